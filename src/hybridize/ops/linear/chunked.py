"""Chunked linear attention: linear cost and memory, eager, CPU and GPU."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.grid import get_grid
from hybridize.ops.linear.state import LinearState, empty_linear
from hybridize.ops.sequences import Sequences
from hybridize.ops.slabs import in_slabs
from hybridize.ops.terms import far_terms, fold
from hybridize.ops.types import Result, compute_dtype, guarded, per_head

CHUNK = 64


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
    run = partial(_forward, map_q, map_k)
    return in_slabs(run, (q_BTHD, k_BTGD, v_BTGV), sequences, state, return_state, CHUNK)


def _forward(
    map_q: FeatureMap,
    map_k: FeatureMap,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sequences: Sequences,
    state: LinearState | None,
    return_state: bool,
) -> Result:
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGV))
    dtype = compute_dtype(q)
    grid = get_grid(sequences, CHUNK, None)
    phi_k = map_k(grid.lay_keys(k).transpose(1, 2)).transpose(1, 2)
    v_MGCV = grid.lay_keys(v).to(dtype)
    terms = far_terms(grid, map_q(q), phi_k, v_MGCV, state.memory if state else None)
    o = (terms.num_PHV / guarded(terms.den_PH)[..., None]).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    state = state or empty_linear(len(sequences), map_k.heads, map_k.features, v.shape[-1], dtype, q.device)
    S, z = fold(grid, phi_k, v_MGCV, state.memory)
    return Result(o, LinearState(lengths_N=state.lengths_N + sequences.tensor("lengths"), S_NJFV=S, z_NJF=z))


def step(q: Tensor, k: Tensor, v: Tensor, map_q: FeatureMap, map_k: FeatureMap, state: LinearState) -> Result:
    """q `[B, 1, H, D]`, k `[B, 1, G, D]`, v `[B, 1, G, V]`."""
    phi_q, phi_k = map_q(q[:, 0]), map_k(k[:, 0])
    keys, heads = phi_k.shape[1], phi_q.shape[1]
    v_BJV = per_head(v[:, 0].to(phi_k.dtype), keys, 1)
    S = state.S_NJFV + phi_k[..., None] * v_BJV[:, :, None]
    z = state.z_NJF + phi_k
    phi_q_BJXF = phi_q.unflatten(1, (keys, heads // keys))
    num = (phi_q_BJXF @ S).flatten(1, 2)
    den = (phi_q_BJXF @ z[..., None]).flatten(1)
    o = (num / guarded(den)[..., None]).to(v.dtype)[:, None]
    return Result(o, LinearState(lengths_N=state.lengths_N + 1, S_NJFV=S, z_NJF=z))
