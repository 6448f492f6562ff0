"""Signature, validation and dispatch of softmax attention.

Legend: B rows, T tokens, H query heads, G KV heads, D head dim, V value dim, Q query rows, S keys.
"""

from __future__ import annotations

from torch import Tensor

from hybridize.ops.ring import RingState
from hybridize.ops.sequences import Sequences
from hybridize.ops.softmax import chunked, reference
from hybridize.ops.softmax.state import KVState
from hybridize.ops.types import Impl, Result, check_qkv, outside_autocast, resolve_impl
from hybridize.windows import Window

IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}


@outside_autocast
def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    window: Window | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sequences: Sequences | None = None,
    state: KVState | RingState | None = None,
    return_state: bool = False,
    return_aux: bool = False,
    impl: Impl = "auto",
) -> Result:
    """Causal softmax attention over every earlier key, or over those that `window` sees.

    Returns `o_BTHV` in v's dtype, the state on request (`KVState`, or `RingState` with a window) and, with `return_aux`,
    `lse` [B, T, H] float32. A query without keys gives 0. Raises ValueError for shapes that do not fit.
    """
    check_qkv(q_BTHD, k_BTGD, v_BTGV)
    if sequences is None:
        starts = state.lengths_N.tolist() if state is not None else None
        sequences = Sequences.dense(q_BTHD.shape[0], q_BTHD.shape[1], starts, q_BTHD.device)
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    module = IMPLEMENTATIONS[resolve_impl(impl, tuple(IMPLEMENTATIONS))]
    return module.forward(
        q_BTHD, k_BTGD, v_BTGV, window, scale, softcap, sequences, state, return_state, return_aux
    )


@outside_autocast
def step(
    q_B1HD: Tensor,
    k_B1GD: Tensor,
    v_B1GV: Tensor,
    window: Window | None,
    state: KVState | RingState,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    starts: tuple[int, ...] | None = None,
) -> Result:
    """One token a row; `starts` are the state's lengths as integers, where the caller has them."""
    starts = tuple(state.lengths_N.tolist()) if starts is None else starts
    sequences = Sequences.dense(q_B1HD.shape[0], 1, starts, q_B1HD.device)
    return forward(
        q_B1HD,
        k_B1GD,
        v_B1GV,
        window,
        scale=scale,
        softcap=softcap,
        sequences=sequences,
        state=state,
        return_state=True,
    )


@outside_autocast
def coefficients(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    window: Window | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    rows: slice = slice(None),
) -> Tensor:
    """Weights `A_BHQS` of v for the queries in `rows` of dense rows; memory Q x S."""
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    return reference.coefficients(q_BTHD, k_BTGD, window, scale, softcap, rows)
