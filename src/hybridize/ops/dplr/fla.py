"""The diagonal plus low rank rule by flash-linear-attention's Triton kernel, `chunk_rwkv7`.

Its products are of v's dtype (float32 ones are TF32, which it warns of), its sums and the carried states float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridize.ops.delta import kernels
from hybridize.ops.dplr.state import DplrState, empty_dplr
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result


@cache
def load() -> kernels.Kernel | None:
    """The kernel; None where the library or Triton is missing."""
    try:
        from fla.ops.rwkv7 import chunk_rwkv7
    except ImportError:
        return None
    kernel: kernels.Kernel = chunk_rwkv7
    return kernel


def refusal(r_BTHD: Tensor, v_BTHV: Tensor) -> str | None:
    """Why the kernel cannot take these tensors; None where it can."""
    return kernels.refusal(load, r_BTHD, v_BTHV)


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
    kernel = load()
    assert kernel is not None  # `refusal` was asked
    heads, dim = r_BTHD.shape[2:]
    if return_state and state is None:
        state = empty_dplr(len(sequences), heads, dim, v_BTHV.shape[3], torch.float32, v_BTHV.device)
    if sequences.total == 0:
        return Result(torch.zeros_like(v_BTHV), state if return_state else None)
    r, k, v, a, b = (x.to(v_BTHV.dtype) for x in (r_BTHD, k_BTHD, v_BTHV, a_BTHD, b_BTHD))
    S_NHDV = state.S_NHDV if state else None
    tensors = (r, w_BTHD.float(), k, v, a, b)
    o, S = kernels.call(kernel, tensors, sequences, S_NHDV, return_state, scale=scale)
    if S is None or state is None:
        return Result(o)
    return Result(o, DplrState(lengths_N=state.lengths_N + sequences.tensor("lengths"), S_NHDV=S))
