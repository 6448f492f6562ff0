"""The oracle: the gated delta rule token by token, as the formula says, a sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.delta.state import DeltaState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, compute_dtype, per_head


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    g: Tensor,
    beta_BTH: Tensor,
    scale: float,
    sequences: Sequences,
    state: DeltaState | None,
    return_state: bool,
) -> Result:
    dtype, heads = compute_dtype(q_BTHD), q_BTHD.shape[2]
    q, k, v, g, beta = (x.flatten(0, 1).to(dtype) for x in (q_BTHD, k_BTGD, v_BTGV, g, beta_BTH))
    k, v = (per_head(x, heads, 1) for x in (k, v))
    decay = g.exp() if g.dim() == 3 else g.exp()[..., None]  # [P, H, D] or [P, H, 1]
    state = state or DeltaState.empty(len(sequences), heads, q.shape[-1], v.shape[-1], dtype, q.device)
    outputs, states = [v.new_zeros(0, heads, v.shape[-1])], []
    for n, (begin, length) in enumerate(zip(sequences.bounds, sequences.lengths, strict=False)):
        S_HDV = state.S_NHDV[n].to(dtype)
        for t in range(begin, begin + length):
            S_HDV = decay[t, :, :, None] * S_HDV
            held_HV = torch.einsum("hd,hdv->hv", k[t], S_HDV)
            written_HV = beta[t, :, None] * (v[t] - held_HV)
            S_HDV = S_HDV + k[t, :, :, None] * written_HV[:, None, :]
            outputs.append(scale * torch.einsum("hd,hdv->hv", q[t], S_HDV)[None])
        states.append(S_HDV)
    o = torch.cat(outputs).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    return Result(o, state.after(sequences.tensor("lengths"), torch.stack(states)))
