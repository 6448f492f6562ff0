"""Losses token by token, kept so that models can be compared on any subset of the same tokens.

Legend: B rows of a batch, T tokens, N rows of all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.evals.aggregate import bootstrap_ratio_interval
from hybridize.evals.generation import evaluating
from hybridize.evals.perplexity import PerplexityResult, summarise, token_nll

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Estimate:
    """A mean in nats a token and its 95% bootstrap interval over rows (None for a single row). `tokens`: how many count."""

    value: float
    low: float | None
    high: float | None
    tokens: int

    def to_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class TokenLosses:
    """One model on one text: `nll_NT` float64, NaN where nothing is predicted; the query's position in its document."""

    nll_NT: Tensor
    position_NT: Tensor

    def summary(self, split_at: int | None) -> PerplexityResult:
        return summarise([self.nll_NT], [self.position_NT], split_at=split_at)

    def from_position(self, first: int) -> Tensor:
        """Counted tokens whose query stands at `first` or later, bool `[N, T]`."""
        return (self.position_NT >= first) & ~self.nll_NT.isnan()

    def less(self, other: TokenLosses, where_NT: Tensor | None = None) -> Estimate | None:
        """Mean of this model's loss less the other's on the same tokens (`where_NT`: on these), paired row by row.

        None where no token counts.
        """
        counts_NT = ~self.nll_NT.isnan() if where_NT is None else where_NT
        difference_NT = torch.where(counts_NT, self.nll_NT - other.nll_NT, 0.0)
        return estimate(difference_NT.sum(1).tolist(), counts_NT.sum(1).tolist())

    def mean(self, where_NT: Tensor) -> Estimate | None:
        """Mean loss on some tokens."""
        return estimate(torch.where(where_NT, self.nll_NT, 0.0).sum(1).tolist(), where_NT.sum(1).tolist())


def estimate(sums_N: Sequence[float], tokens_N: Sequence[int]) -> Estimate | None:
    """Sum over sum, with the interval over rows; None where no token counts."""
    tokens = sum(tokens_N)
    if tokens == 0:
        return None
    value = sum(sums_N) / tokens
    if not any(sums_N):
        # two models that are the same: zero for certain, even on a single row
        return Estimate(0.0, 0.0, 0.0, tokens)
    low, high = bootstrap_ratio_interval(sums_N, tokens_N) or (None, None)
    return Estimate(value, low, high, tokens)


def token_losses(model: Any, batches: Sequence[Any], on_progress: Progress | None = None) -> TokenLosses:
    """Losses of `model` (teacher or student, as it is at this moment) on batches of rows of one length."""
    nlls, positions = [], []
    with evaluating(model):
        for done, batch in enumerate(batches):
            if on_progress is not None:
                on_progress(done, len(batches))
            nll_BT, position_BT = token_nll(
                model, batch.input_ids_BT.cpu(), batch.labels_BT.cpu(), batch.position_ids_BT.cpu()
            )
            nlls.append(nll_BT)
            positions.append(position_BT)
    return TokenLosses(torch.cat(nlls), torch.cat(positions))
