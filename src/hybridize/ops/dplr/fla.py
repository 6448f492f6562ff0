"""The diagonal plus low rank rule by flash-linear-attention's Triton kernel, `chunk_rwkv7`.

It warns of float32 values, whose products are TF32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridize.ops import kernels
from hybridize.ops.dplr.state import DplrState
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


@torch.compiler.disable
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
    assert kernel is not None  # `kernels.select` asked
    r, k, v, a, b = (x.to(v_BTHV.dtype) for x in (r_BTHD, k_BTHD, v_BTHV, a_BTHD, b_BTHD))
    tensors = (r, w_BTHD.float(), k, v, a, b)
    return kernels.run(kernel, tensors, v, sequences, state, DplrState, return_state, scale=scale)
