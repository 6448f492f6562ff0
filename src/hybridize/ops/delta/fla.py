"""The gated delta rule by flash-linear-attention's Triton kernels: `chunk_gated_delta_rule` (GDN) and `chunk_kda` (KDA).

Their products are of v's dtype (float32 ones are TF32), their sums and the carried states float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridize.ops.delta import kernels
from hybridize.ops.delta.state import DeltaState, empty_delta
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result


@cache
def load() -> tuple[kernels.Kernel, kernels.Kernel] | None:
    """The kernels for a scalar and for a vector g; None where the library or Triton is missing."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    return chunk_gated_delta_rule, chunk_kda


def refusal(q_BTHD: Tensor, v_BTGV: Tensor) -> str | None:
    """Why the kernels cannot take these tensors; None where they can."""
    return kernels.refusal(load, q_BTHD, v_BTGV)


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
    assert found is not None  # `refusal` was asked
    heads, dtype = q_BTHD.shape[2], v_BTGV.dtype
    if return_state and state is None:
        state = empty_delta(len(sequences), heads, q_BTHD.shape[3], v_BTGV.shape[3], torch.float32, g.device)
    if sequences.total == 0:
        return Result(v_BTGV.new_zeros(*q_BTHD.shape[:3], v_BTGV.shape[3]), state if return_state else None)
    k, v = (x.to(dtype).repeat_interleave(heads // x.shape[2], 2) for x in (k_BTGD, v_BTGV))
    tensors = (q_BTHD.to(dtype), k, v, g.float(), beta_BTH.float())
    S_NHDV = state.S_NHDV if state else None
    o, S = kernels.call(found[g.dim() - 3], tensors, sequences, S_NHDV, return_state, scale=scale)
    if S is None or state is None:
        return Result(o)
    return Result(o, DeltaState(lengths_N=state.lengths_N + sequences.tensor("lengths"), S_NHDV=S))
