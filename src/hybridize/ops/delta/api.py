"""Signature, validation and dispatch of the gated delta rule (GDN: Yang et al. 2025, Eq. 10; KDA: Kimi Linear, Eq. 1).

    S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t ,    o_t = scale q_t S_t

Token t is part of its own output. g <= 0 is one number a head (GDN) or a vector over the key channels (KDA); beta lies in
0..1, or 0..2 where negative eigenvalues are wanted (not checked); k is used as given: callers normalise it.

Legend: B rows, T tokens, H query heads, G KV heads, D key dim, V value dim, N sequences.
"""

from __future__ import annotations

from torch import Tensor

from hybridize.ops.delta import chunked, fla, reference
from hybridize.ops.delta.state import DeltaState
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
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    sequences: Sequences | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
) -> Result:
    """The gated delta rule over whole sequences. g is `[B, T, H]` or `[B, T, H, D]`, beta `[B, T, H]`.

    Returns `o_BTHV` in v's dtype and, with `return_state`, the float32 state after the last token. `sequences` says how
    the tokens divide into sequences (default: dense rows, continuing `state`). `auto` takes fla's kernels for 16-bit
    values on CUDA, `chunked` otherwise. Raises ValueError for shapes that do not fit and for an `impl` that cannot run.
    """
    check(q_BTHD, k_BTGD, v_BTGV, g, beta)
    sequences = sequences_of(q_BTHD, v_BTGV, sequences, state)
    module = select(impl, IMPLEMENTATIONS, q_BTHD, v_BTGV)
    result: Result = module.forward(q_BTHD, k_BTGD, v_BTGV, g, beta, scale, sequences, state, return_state)
    return result


@outside_autocast
def step(
    q_B1HD: Tensor,
    k_B1GD: Tensor,
    v_B1GV: Tensor,
    g: Tensor,
    beta: Tensor,
    state: DeltaState,
    *,
    scale: float,
) -> Result:
    """One token a row; the state holds every earlier one."""
    check(q_B1HD, k_B1GD, v_B1GV, g, beta)
    check_step("q", q_B1HD, v_B1GV, state)
    return chunked.step(q_B1HD, k_B1GD, v_B1GV, g, beta, state, scale)


@outside_autocast
def coefficients(
    q_BTHD: Tensor, k_BTGD: Tensor, g: Tensor, beta: Tensor, rows: slice = slice(None), *, scale: float
) -> Tensor:
    """Coefficients `A_BHQS` of v for the queries in `rows`, o = A v, of dense rows that start from nothing; any sign."""
    check(q_BTHD, k_BTGD, k_BTGD, g, beta)
    return chunked.coefficients(q_BTHD, k_BTGD, g, beta, rows, scale)


def check(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuse shapes that do not fit, naming the argument."""
    check_qkv(q_BTHD, k_BTGD, v_BTGV)
    heads, channels = tuple(q_BTHD.shape[:3]), tuple(q_BTHD.shape)
    if tuple(g.shape) not in (heads, channels):
        raise ValueError(
            f"g has shape {tuple(g.shape)}; allowed are {heads} (one decay a head) and {channels} (one a channel)"
        )
    if tuple(beta.shape) != heads:
        raise ValueError(f"beta has shape {tuple(beta.shape)}; it must be {heads}")
