"""What every operation shares: states, results, implementations, ablations, the guard of denominators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

Impl = Literal["auto", "reference", "chunked", "fla"]
Mode = Literal["hybrid", "softmax_only", "far_only", "linear_only"]
Removal = Literal["zero", "renormalize"]

EPSILON = 1e-12
"""The one guard of every denominator: |denominator| never falls below it. The same in all implementations."""


class Result(NamedTuple):
    """An operation's output `o_BTHV`, the state after the last token (None unless asked for), and `aux` on request."""

    o: Tensor
    state: Any = None
    aux: dict[str, Tensor] = {}  # noqa: RUF012  (never written to)


@dataclass(frozen=True)
class Ablation:
    """Which branch is removed (DESIGN D12) and how: `zero` keeps every coefficient, `renormalize` drops the term.

    `where` (bool, broadcast to `[B, T, H]`) confines the removal to some queries and heads; with `keep_empty` a query that
    has no far key is left alone even there (DESIGN D11). Kept states never depend on an ablation of their own layer.
    """

    mode: Mode = "hybrid"
    removal: Removal = "zero"
    where: Tensor | None = field(default=None, compare=False)
    keep_empty: bool = False


HYBRID = Ablation()


@dataclass
class State:
    """What a sequence mixer remembers: tensors (or nested states) whose first dimension is the row.

    `lengths_N` counts the tokens seen by each row. A state is never changed in place by an operation: `step` and
    `forward` give a new one, so a reference to an old state is already a snapshot.
    """

    lengths_N: Tensor = field(kw_only=True)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same state with `function` applied to every tensor."""

        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                return function(value)
            return value.map(function) if isinstance(value, State) else value

        return type(self)(**{entry.name: apply(getattr(self, entry.name)) for entry in fields(self)})

    def select(self, rows: Tensor) -> Self:
        """Rows `rows` in that order (beam reordering, finished rows removed)."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def repeat(self, times: int) -> Self:
        """Each row `times` times in a row (beams and several samples of one prompt)."""
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def snapshot(self) -> Self:
        return self.map(torch.clone)

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        self.map(count)
        return total


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 for every input, except that float64 stays float64 (oracles and gradient checks)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def capped(score: Tensor, softcap: float | None) -> Tensor:
    """c tanh(score / c), Gemma 2's bound of attention scores; the score itself without a cap."""
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def guarded(denominator: Tensor) -> Tensor:
    """The denominator with |.| at least `EPSILON`, its sign kept; zero becomes `+EPSILON`."""
    small = denominator.abs() < EPSILON
    floor = torch.where(denominator < 0, -EPSILON, EPSILON).to(denominator.dtype)
    return torch.where(small, floor, denominator)


P = ParamSpec("P")
R = TypeVar("R")


def outside_autocast(operation: Callable[P, R]) -> Callable[P, R]:
    """The operation with autocast off for its first tensor's device: sums and exponentials stay float32."""

    @wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        if not torch.is_autocast_enabled(first.device.type):
            return operation(*args, **kwargs)  # what entering a context costs is felt in every decoded token
        with torch.autocast(first.device.type, enabled=False):
            return operation(*args, **kwargs)

    return run


def resolve_impl(impl: str, available: Sequence[str]) -> str:
    """`auto` takes the first available implementation; a name that is not available is refused, never replaced."""
    if impl == "auto":
        return available[0]
    if impl not in available:
        raise ValueError(f"impl is {impl!r}; available here are {', '.join(map(repr, ('auto', *available)))}")
    return impl


def check_qkv(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor) -> None:
    """Refuse shapes that do not fit, naming the argument."""
    for name, tensor in (("q", q_BTHD), ("k", k_BTGD), ("v", v_BTGV)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [B, T, heads, dim]")
    if k_BTGD.shape[:3] != v_BTGV.shape[:3] or q_BTHD.shape[:2] != k_BTGD.shape[:2]:
        raise ValueError(
            f"q, k, v have shapes {tuple(q_BTHD.shape)}, {tuple(k_BTGD.shape)}, {tuple(v_BTGV.shape)};"
            " B and T must agree, and k and v must have the same heads"
        )
    if q_BTHD.shape[3] != k_BTGD.shape[3]:
        raise ValueError(f"q has head dim {q_BTHD.shape[3]} and k has {k_BTGD.shape[3]}; they must agree")
    if q_BTHD.shape[2] % k_BTGD.shape[2]:
        raise ValueError(f"q has {q_BTHD.shape[2]} heads, not a multiple of k's {k_BTGD.shape[2]} heads")


def per_head(x: Tensor, heads: int, dim: int) -> Tensor:
    """The KV head of every query head: dimension `dim` grows to `heads`. x itself, not a copy, where it has as many."""
    times = heads // x.shape[dim]
    return x if times == 1 else x.repeat_interleave(times, dim)
