"""Decaying linear attention by flash-linear-attention's kernels: `chunk_simple_gla` for decays of whole heads, `chunk_gla` for
decays of channels. Between chunks of a bfloat16 call they round the states to bfloat16.

Legend: B rows, T tokens, H query heads, G KV heads, D head dim, V value dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybridize.ops import kernels
from hybridize.ops.decay.state import DecayState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, per_head


@cache
def load() -> tuple[kernels.Kernel, kernels.Kernel] | None:
    """The kernels for decays of heads and of channels; None where the library or Triton is missing."""
    try:
        from fla.ops.gla import chunk_gla
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    return chunk_simple_gla, chunk_gla


@torch.compiler.disable
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
    found = load()
    assert found is not None  # `kernels.select` asked
    of_heads, of_channels = found
    heads, dtype = q_BTHD.shape[2], v_BTGV.dtype
    k, v = (per_head(x.to(dtype), heads, 2) for x in (k_BTGD, v_BTGV))
    q, log = q_BTHD.to(dtype), log_decay.float()
    if torch.is_grad_enabled():
        if log.dim() == 1 and log.requires_grad:
            # the kernels give no gradient of a fixed decay
            log = log.expand(*q.shape[:2], -1)
        start = state.S_NHDV if state is not None else None
        if (
            log.dim() == 3
            and kernels.trains(q, k, v, log, start)
            and kernels.scalar_backward_refused(q.device)
        ):
            log = log[..., None].expand(-1, -1, -1, q.shape[3])
    fixed: dict[str, Any] = {"g_gamma": log} if log.dim() == 1 else {}
    tensors = (q, k, v) if fixed else (q, k, v, log)
    kernel = of_channels if log.dim() == 4 else of_heads
    return kernels.run(kernel, tensors, v, sequences, state, DecayState, return_state, scale=scale, **fixed)
