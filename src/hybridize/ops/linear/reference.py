"""The oracle: quadratic linear attention, written as the formula says, a sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.linear.state import LinearState, empty_linear
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, compute_dtype, guarded


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    map_q: FeatureMap,
    map_k: FeatureMap,
    sequences: Sequences,
    state: LinearState | None,
    return_state: bool,
) -> Result:
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGV))
    dtype = compute_dtype(q)
    state = state or empty_linear(len(sequences), map_k.heads, map_k.features, v.shape[-1], dtype, q.device)
    outputs, S, z = [], [], []
    for n, (begin, length) in enumerate(zip(sequences.bounds, sequences.lengths, strict=False)):
        piece = slice(begin, begin + length)
        phi_q = map_q(q[piece]).transpose(0, 1)  # [H, T, F]
        heads = phi_q.shape[0]
        phi_k = map_k(k[piece]).transpose(0, 1)
        v_HTV = v[piece].to(dtype).transpose(0, 1).repeat_interleave(heads // v.shape[1], 0)
        phi_kH = phi_k.repeat_interleave(heads // phi_k.shape[0], 0)
        weight = (phi_q @ phi_kH.transpose(-1, -2)).tril()
        S_HFV = state.S_NJFV[n].repeat_interleave(heads // phi_k.shape[0], 0)
        z_HF = state.z_NJF[n].repeat_interleave(heads // phi_k.shape[0], 0)
        num = weight @ v_HTV + phi_q @ S_HFV
        den = weight.sum(-1) + (phi_q @ z_HF[..., None]).squeeze(-1)
        outputs.append((num / guarded(den)[..., None]).transpose(0, 1))
        v_JTV = v[piece].to(dtype).transpose(0, 1).repeat_interleave(phi_k.shape[0] // v.shape[1], 0)
        S.append(state.S_NJFV[n] + phi_k.transpose(-1, -2) @ v_JTV)
        z.append(state.z_NJF[n] + phi_k.sum(1))
    o = torch.cat(outputs).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    lengths = state.lengths_N + sequences.tensor("lengths")
    return Result(o, LinearState(lengths_N=lengths, S_NJFV=torch.stack(S), z_NJF=torch.stack(z)))


def coefficients(q_BTHD: Tensor, k_BTGD: Tensor, map_q: FeatureMap, map_k: FeatureMap, rows: slice) -> Tensor:
    """`A_BHQS` of the queries in `rows` over all keys; differentiable, memory Q x S."""
    heads = q_BTHD.shape[2]
    phi_q = map_q(q_BTHD[:, rows]).transpose(1, 2)
    phi_k = map_k(k_BTGD).transpose(1, 2)
    phi_k = phi_k.repeat_interleave(heads // phi_k.shape[1], 1)
    t = torch.arange(q_BTHD.shape[1], device=q_BTHD.device)
    weight = (phi_q @ phi_k.transpose(-1, -2)) * (t <= t[rows][:, None])
    return (
        weight * guarded(weight.sum(-1, keepdim=True)).reciprocal()
    )  # its gradient has half a division's passes
