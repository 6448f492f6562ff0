"""The oracle: the diagonal plus low rank rule token by token, as the formula says, a sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.dplr.state import DplrState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, compute_dtype


def forward(
    r_BTHD: Tensor,
    w_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    a_BTHD: Tensor,
    b_BTHD: Tensor,
    scale: float,
    sequences: Sequences,
    state: DplrState | None,
    return_state: bool,
) -> Result:
    dtype, heads = compute_dtype(r_BTHD), r_BTHD.shape[2]
    tensors = (r_BTHD, w_BTHD, k_BTHD, v_BTHV, a_BTHD, b_BTHD)
    r, w, k, v, a, b = (x.flatten(0, 1).to(dtype) for x in tensors)
    state = state or DplrState.empty(len(sequences), heads, r.shape[-1], v.shape[-1], dtype, r.device)
    outputs, states = [v.new_zeros(0, heads, v.shape[-1])], []
    for n, (begin, length) in enumerate(zip(sequences.bounds, sequences.lengths, strict=False)):
        S_HDV = state.S_NHDV[n].to(dtype)
        for t in range(begin, begin + length):
            read_HV = torch.einsum("hd,hdv->hv", a[t], S_HDV)  # before the decay
            S_HDV = w[t].exp()[:, :, None] * S_HDV + b[t, :, :, None] * read_HV[:, None, :]
            S_HDV = S_HDV + k[t, :, :, None] * v[t, :, None, :]
            outputs.append(scale * torch.einsum("hd,hdv->hv", r[t], S_HDV)[None])
        states.append(S_HDV)
    o = torch.cat(outputs).to(v_BTHV.dtype).unflatten(0, r_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    return Result(o, state.after(sequences.tensor("lengths"), torch.stack(states)))
