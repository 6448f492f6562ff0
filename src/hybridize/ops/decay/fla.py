"""Adapter to the kernels of flash-linear-attention: `simple_gla` for decays of whole heads, `gla` for decays of channels.

They multiply in the inputs' dtype (float32 as the GPU multiplies float32, often TF32) and add up in float32; between
chunks of a bfloat16 call the states are rounded to bfloat16. Initial and final states are float32.

Legend: P tokens, N sequences, B rows, T tokens, H query heads, G KV heads, D head dim, V value dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from hybridize.ops.decay.state import DecayState, empty_decay
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def installed() -> bool:
    """Whether flash-linear-attention and the triton it needs can be imported."""
    try:
        import fla.ops.gla
        import fla.ops.simple_gla  # noqa: F401
    except ImportError:
        return False
    return True


def available(q_BTHD: Tensor) -> bool:
    """Whether these kernels can take q."""
    return q_BTHD.device.type == "cuda" and q_BTHD.dtype in DTYPES and installed()


def require(q_BTHD: Tensor) -> None:
    """Raise ValueError or ImportError with the reason where the kernels cannot take q."""
    if q_BTHD.device.type != "cuda":
        raise ValueError(f"impl is 'fla', which needs CUDA tensors; q is on {q_BTHD.device}")
    if q_BTHD.dtype not in DTYPES:
        raise ValueError(f"impl is 'fla', which takes {', '.join(map(str, DTYPES))}; q is {q_BTHD.dtype}")
    if not installed():
        raise ImportError("impl is 'fla', which needs flash-linear-attention: pip install 'hybridize[gpu]'")


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_decay: Tensor,
    sequences: Sequences,
    state: DecayState | None,
    return_state: bool,
    *,
    scale: float,
) -> Result:
    heads, dim, values = q_BTHD.shape[2], q_BTHD.shape[3], v_BTGV.shape[3]
    if sequences.total == 0:
        state = state or empty_decay(len(sequences), heads, dim, values, torch.float32, q_BTHD.device)
        return Result(v_BTGV.new_zeros(*q_BTHD.shape[:3], values), state if return_state else None)
    dtype = torch.promote_types(q_BTHD.dtype, torch.promote_types(k_BTGD.dtype, v_BTGV.dtype))
    q, k, v = (x.to(dtype) for x in (q_BTHD, k_BTGD, v_BTGV))
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    start = None if state is None else state.S_NHDV.float()
    log = log_decay.float()
    if torch.is_grad_enabled():
        if log.dim() == 1 and log.requires_grad:
            # the kernels give no gradient of a fixed decay
            log = log.expand(*q.shape[:2], -1)
        trains = any(x is not None and x.requires_grad for x in (q, k, v, log, start))
        if log.dim() == 3 and trains and _scalar_backward_refused(q.device):
            log = log[..., None].expand(-1, -1, -1, dim)
    cu_seqlens = filled = None
    if not sequences.is_dense:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        log = log if log.dim() == 1 else log.flatten(0, 1)[None]
        cu_seqlens, filled = _bounds(sequences)
        start = None if start is None else start.index_select(0, filled)
    o, final = _kernel(q, k, v, log, scale, start, return_state, cu_seqlens)
    o = o.view(*q_BTHD.shape[:3], values).to(v_BTGV.dtype)
    if not return_state:
        return Result(o)
    state = state or empty_decay(len(sequences), heads, dim, values, torch.float32, q.device)
    if filled is not None:
        final = state.S_NHDV.float().index_copy(0, filled, final)
    return Result(o, DecayState(lengths_N=state.lengths_N + sequences.tensor("lengths"), S_NHDV=final))


@cache
def _scalar_backward_refused(device: torch.device) -> bool:
    """Whether the backward of scalar decays is one that triton miscompiles, 3.4 to 3.7.0 on Hopper (the library's issue
    640): recent versions raise, earlier ones go wrong. Channels that all decay alike take the other kernels."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return "3.4.0" <= TorchVersion(triton.__version__) < "3.7.1"


def _bounds(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Running totals of the sequences that hold tokens, as the kernels want none without, and which these are. Made once
    for a call: the library keeps what it derives from the same tensor."""

    def make() -> tuple[Tensor, Tensor]:
        lengths = sequences.array("lengths")
        filled = np.flatnonzero(lengths)
        return sequences.move(np.concatenate([[0], np.cumsum(lengths[filled])])), sequences.move(filled)

    return sequences.once("filled bounds", make)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log: Tensor,
    scale: float,
    start: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Any]:
    """The kernel that takes such decays: (o, final state or None)."""
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    kernel = chunk_gla if log.dim() == 4 else chunk_simple_gla
    return kernel(
        q,
        k,
        v,
        **{{1: "g_gamma", 3: "g", 4: "g"}[log.dim()]: log},
        scale=scale,
        initial_state=start,
        output_final_state=return_state,
        cu_seqlens=cu_seqlens,
    )
