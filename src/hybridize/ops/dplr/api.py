"""Signature, validation and dispatch of the diagonal plus low rank rule (RWKV-7: Peng et al. 2025).

    S_t = Diag(exp(w_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t ,    o_t = scale r_t S_t

All are row vectors, S maps keys to values (the paper's state transposed). Token t is part of its own output. a reads the
state before it decays, b writes what a read, w <= 0. RWKV-7 has a = -kk and b = kk * (its in-context rate), kk its
normalised removal key; its bonus for the current token is the caller's.

Legend: B rows, T tokens, H heads, D key dim, V value dim, N sequences.
"""

from __future__ import annotations

from torch import Tensor

from hybridize.ops.dplr import chunked, fla, reference
from hybridize.ops.dplr.state import DplrState
from hybridize.ops.kernels import select
from hybridize.ops.recurrence import check_step, sequences_of
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Impl, Result, outside_autocast

IMPLEMENTATIONS = {"chunked": chunked, "reference": reference, "fla": fla}


@outside_autocast
def forward(
    r_BTHD: Tensor,
    w_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    a_BTHD: Tensor,
    b_BTHD: Tensor,
    *,
    scale: float,
    sequences: Sequences | None = None,
    state: DplrState | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
) -> Result:
    """The diagonal plus low rank rule over whole sequences.

    Returns `o_BTHV` in v's dtype and, with `return_state`, the float32 state after the last token. `sequences` says how
    the tokens divide into sequences (default: dense rows, continuing `state`). `auto` takes fla's kernels for 16-bit
    values on CUDA, `chunked` otherwise. Raises ValueError for shapes that do not fit and for an `impl` that cannot run.
    """
    check(r_BTHD, v_BTHV, w=w_BTHD, k=k_BTHD, a=a_BTHD, b=b_BTHD)
    sequences = sequences_of(r_BTHD, v_BTHV, sequences, state)
    module = select(impl, IMPLEMENTATIONS, r_BTHD, v_BTHV)
    result: Result = module.forward(
        r_BTHD, w_BTHD, k_BTHD, v_BTHV, a_BTHD, b_BTHD, scale, sequences, state, return_state
    )
    return result


@outside_autocast
def step(
    r_B1HD: Tensor,
    w_B1HD: Tensor,
    k_B1HD: Tensor,
    v_B1HV: Tensor,
    a_B1HD: Tensor,
    b_B1HD: Tensor,
    state: DplrState,
    *,
    scale: float,
) -> Result:
    """One token a row; the state holds every earlier one."""
    check(r_B1HD, v_B1HV, w=w_B1HD, k=k_B1HD, a=a_B1HD, b=b_B1HD)
    check_step("r", r_B1HD, v_B1HV, state)
    return chunked.step(r_B1HD, w_B1HD, k_B1HD, v_B1HV, a_B1HD, b_B1HD, state, scale)


@outside_autocast
def coefficients(
    r_BTHD: Tensor,
    w_BTHD: Tensor,
    k_BTHD: Tensor,
    a_BTHD: Tensor,
    b_BTHD: Tensor,
    rows: slice = slice(None),
    *,
    scale: float,
) -> Tensor:
    """Coefficients `A_BHQS` of v for the queries in `rows`, o = A v, of dense rows that start from nothing; any sign."""
    check(r_BTHD, k_BTHD, w=w_BTHD, k=k_BTHD, a=a_BTHD, b=b_BTHD)
    return chunked.coefficients(r_BTHD, w_BTHD, k_BTHD, a_BTHD, b_BTHD, rows, scale)


def check(r_BTHD: Tensor, v_BTHV: Tensor, **others_BTHD: Tensor) -> None:
    """Refuse shapes that do not fit, naming the argument."""
    if r_BTHD.dim() != 4:
        raise ValueError(f"r has shape {tuple(r_BTHD.shape)}; it must be [B, T, heads, dim]")
    for name, tensor in others_BTHD.items():
        if tensor.shape != r_BTHD.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be r's, {tuple(r_BTHD.shape)}")
    if v_BTHV.dim() != 4 or v_BTHV.shape[:3] != r_BTHD.shape[:3]:
        shape = ", ".join(map(str, r_BTHD.shape[:3]))
        raise ValueError(f"v has shape {tuple(v_BTHV.shape)}; it must be ({shape}, V)")
