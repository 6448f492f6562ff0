"""The oracle: the recurrence token by token, a sequence at a time, as the formula says."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.decay.state import DecayState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, compute_dtype, per_head


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_decay: Tensor,
    scale: float,
    sequences: Sequences,
    state: DecayState | None,
    return_state: bool,
) -> Result:
    dtype, heads = compute_dtype(q_BTHD), q_BTHD.shape[2]
    q, k, v = (x.flatten(0, 1).to(dtype) for x in (q_BTHD, k_BTGD, v_BTGV))
    k, v = (per_head(x, heads, 1) for x in (k, v))
    decay = log_decay.to(dtype).exp()
    decay_PHX = decay.expand(len(q), -1) if decay.dim() == 1 else decay.flatten(0, 1)
    decay_PHX = decay_PHX if decay_PHX.dim() == 3 else decay_PHX[..., None]  # X: 1 or D
    state = state or DecayState.empty(len(sequences), heads, q.shape[-1], v.shape[-1], dtype, q.device)
    outputs, finals = [], []
    for n, (begin, length) in enumerate(zip(sequences.bounds, sequences.lengths, strict=False)):
        S_HDV = state.S_NHDV[n]
        for t in range(begin, begin + length):
            S_HDV = decay_PHX[t, :, :, None] * S_HDV + k[t, :, :, None] * v[t, :, None, :]
            outputs.append(scale * (q[t, :, None, :] @ S_HDV).squeeze(1))
        finals.append(S_HDV)
    o = torch.stack(outputs) if outputs else v.new_zeros(0, heads, v.shape[-1])
    o = o.to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    return Result(o, state.after(sequences.tensor("lengths"), torch.stack(finals)))
