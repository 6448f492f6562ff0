"""Signature, validation and dispatch of decaying linear attention.

Lightning (a fixed decay a head; HypeNet Eq. 18-19), Mamba-2's scalar gate, GLA's gate a key channel.

Legend: B rows, T tokens, H query heads, G KV heads, D head dim, V value dim, Q chosen queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.decay import chunked, dense, fla, reference
from hybridize.ops.decay.state import DecayState
from hybridize.ops.kernels import select
from hybridize.ops.recurrence import check_step, sequences_of
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Impl, Result, check_qkv, outside_autocast

IMPLEMENTATIONS = {"chunked": chunked, "reference": reference, "fla": fla}


@outside_autocast
def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_decay: Tensor,
    *,
    scale: float,
    sequences: Sequences | None = None,
    state: DecayState | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
) -> Result:
    """`S_t = D_t S_{t-1} + k_t^T v_t`, `o_t = scale q_t S_t`, with `D_t = exp(log_decay_t)`.

    `log_decay` is finite and at most 0: `[H]` (fixed), `[B, T, H]` (a scalar a token) or `[B, T, H, D]` (a value a key
    channel). Returns `o_BTHV` in v's dtype and, with `return_state`, the float32 state after the last token. `sequences`
    says how the tokens divide into sequences (default: dense rows, continuing `state`). `auto` takes fla's
    kernels for 16-bit values on CUDA, `chunked` otherwise. Raises ValueError for shapes that do not fit and for an
    `impl` that cannot run.
    """
    check_qkv(q_BTHD, k_BTGD, v_BTGV)
    check_log_decay(q_BTHD, log_decay)
    sequences = sequences_of(q_BTHD, v_BTGV, sequences, state)
    module = select(impl, IMPLEMENTATIONS, q_BTHD, v_BTGV)
    result: Result = module.forward(q_BTHD, k_BTGD, v_BTGV, log_decay, scale, sequences, state, return_state)
    return result


@outside_autocast
def step(
    q_B1HD: Tensor, k_B1GD: Tensor, v_B1GV: Tensor, log_decay: Tensor, state: DecayState, *, scale: float
) -> Result:
    """One token a row; the state holds every earlier one. `log_decay` is `[H]`, `[B, 1, H]` or `[B, 1, H, D]`."""
    check_qkv(q_B1HD, k_B1GD, v_B1GV)
    check_log_decay(q_B1HD, log_decay)
    check_step("q", q_B1HD, v_B1GV, state)
    return chunked.step(q_B1HD, k_B1GD, v_B1GV, log_decay, state, scale)


@outside_autocast
def coefficients(
    q_BTHD: Tensor, k_BTGD: Tensor, log_decay: Tensor, rows: slice = slice(None), *, scale: float
) -> Tensor:
    """Weights `A_BHQS` of v for the queries in `rows` of dense rows: o = A v. Zero for later keys; differentiable."""
    check_qkv(q_BTHD, k_BTGD, k_BTGD)
    check_log_decay(q_BTHD, log_decay)
    return dense.coefficients(q_BTHD, k_BTGD, log_decay, rows, scale)


def check_log_decay(q_BTHD: Tensor, log_decay: Tensor) -> None:
    """Refuse decays whose shape does not fit q, and growth where that is known without waiting for a device."""
    rows, tokens, heads, dim = q_BTHD.shape
    allowed = (heads,), (rows, tokens, heads), (rows, tokens, heads, dim)
    if log_decay.shape not in allowed:
        shapes = ", ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"log_decay has shape {list(log_decay.shape)}; allowed are {shapes}")
    known = log_decay.dim() == 1 and log_decay.device.type == "cpu" and not torch.compiler.is_compiling()
    if known and bool((log_decay > 0).any()):
        raise ValueError(f"log_decay reaches {float(log_decay.max()):g}; it must be at most 0")
