"""Intervals and standard errors for the numbers that evaluations report. CPU, float64, the same answer every time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Z_95 = 1.959963984540054


def wilson_interval(correct: int, samples: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (1927), 95% by default.

    Unlike the normal approximation it stays inside [0, 1] and keeps its width at 0 or `samples` correct.
    Raises ValueError unless 0 <= correct <= samples and samples >= 1.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; an interval needs at least 1 sample")
    if not 0 <= correct <= samples:
        raise ValueError(f"correct is {correct}; it must lie in 0..{samples}, the number of samples")
    p, z2 = correct / samples, z * z
    centre = (p + z2 / (2 * samples)) / (1 + z2 / samples)
    half = z / (1 + z2 / samples) * math.sqrt(p * (1 - p) / samples + z2 / (4 * samples**2))
    # At the ends the bound equals the proportion; rounding must not move it.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == samples else centre + half
    return low, high


class Proportion:
    """`correct` of `samples`, as accuracy in 0..1 with Wilson's 95% interval; mixed into data classes that have the two."""

    correct: int
    samples: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def low(self) -> float:
        return wilson_interval(self.correct, self.samples)[0]

    @property
    def high(self) -> float:
        return wilson_interval(self.correct, self.samples)[1]


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error (sample deviation over √n); the error of a single value is unknown: None."""
    if len(values) == 0:
        raise ValueError("values is empty; a mean needs at least 1 value")
    values_N = torch.as_tensor(values, dtype=torch.float64)
    if len(values_N) == 1:
        return values_N.item(), None
    return values_N.mean().item(), (values_N.std() / math.sqrt(len(values_N))).item()


def ratio_standard_error(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Standard error of `sum(numerators) / sum(denominators)` over independent pairs, by linearisation.

    It serves a token-weighted mean whose rows hold unequal numbers of tokens. None for fewer than two pairs that count.
    """
    numerators_N, denominators_N = _pairs(numerators, denominators)
    n = len(numerators_N)
    if n < 2:
        return None
    residuals_N = numerators_N - numerators_N.sum() / denominators_N.sum() * denominators_N
    return math.sqrt(n / (n - 1) * residuals_N.square().sum().item()) / denominators_N.sum().item()


def bootstrap_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile bootstrap of `sum(numerators) / sum(denominators)`: pairs are drawn with replacement.

    The generator is fixed by `seed`, so the same pairs always give the same interval. None for fewer than two pairs
    that count. Raises ValueError for a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1, for example 0.95")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; it must be at least 1")
    numerators_N, denominators_N = _pairs(numerators, denominators)
    n = len(numerators_N)
    if n < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    estimates = []
    # Slices bound the memory: an evaluation of 10,000 rows would otherwise draw 2,000 x 10,000 indices at once.
    slice_size = max(1, min(resamples, 1_000_000 // n))
    for first in range(0, resamples, slice_size):
        draws_RN = torch.randint(n, (min(slice_size, resamples - first), n), generator=generator)
        estimates.append(numerators_N[draws_RN].sum(1) / denominators_N[draws_RN].sum(1))
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat(estimates), tails).tolist()
    return low, high


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean of `values`; None for fewer than two values."""
    return bootstrap_ratio_interval(
        values, [1.0] * len(values), confidence=confidence, resamples=resamples, seed=seed
    )


def paired_difference(
    nll_sums: Sequence[float], former_nll_sums: Sequence[float], tokens: Sequence[int]
) -> tuple[float, tuple[float, float] | None]:
    """Change of the mean nll (nats a token) between two models on the same rows, and its 95% bootstrap interval over rows.

    Pairing removes the spread between rows, which is far larger than what a stage changes. Negative is better.
    """
    differences = [new - old for new, old in zip(nll_sums, former_nll_sums, strict=True)]
    return math.fsum(differences) / sum(tokens), bootstrap_ratio_interval(differences, tokens)


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as float64 vectors without the pairs of zero weight, which carry no information."""
    if len(numerators) != len(denominators):
        raise ValueError(
            f"denominators has {len(denominators)} values; it needs {len(numerators)}, one a numerator"
        )
    numerators_N = torch.as_tensor(numerators, dtype=torch.float64)
    denominators_N = torch.as_tensor(denominators, dtype=torch.float64)
    counts_N = denominators_N > 0
    return numerators_N[counts_N], denominators_N[counts_N]
