"""The gated delta rule by flash-linear-attention's Triton kernels: `chunk_gated_delta_rule` (GDN) and `chunk_kda` (KDA)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridize.ops import kernels
from hybridize.ops.delta.state import DeltaState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, per_head


@cache
def load() -> tuple[kernels.Kernel, kernels.Kernel] | None:
    """The kernels for a scalar and for a vector g; None where the library or Triton is missing."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    return chunk_gated_delta_rule, chunk_kda


@torch.compiler.disable
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
    found = load()
    assert found is not None  # `kernels.select` asked
    heads, dtype = q_BTHD.shape[2], v_BTGV.dtype
    k, v = (per_head(x.to(dtype), heads, 2) for x in (k_BTGD, v_BTGV))
    tensors = (q_BTHD.to(dtype), k, v, g.float(), beta_BTH.float())
    start = state.S_NHDV if state is not None else None
    if g.dim() == 3 and kernels.trains(*tensors, start) and kernels.scalar_backward_refused(v.device):
        tensors = (*tensors[:3], tensors[3][..., None].expand(-1, -1, -1, q_BTHD.shape[3]), tensors[4])
    kernel = found[tensors[3].dim() - 3]
    return kernels.run(kernel, tensors, v, sequences, state, DeltaState, return_state, scale=scale)
