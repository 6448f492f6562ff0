"""Intervals against closed forms and against their own coverage."""

from __future__ import annotations

import math

import pytest
import torch

from hybridize.evals.aggregate import (
    Z_95,
    bootstrap_interval,
    bootstrap_ratio_interval,
    mean_and_standard_error,
    ratio_standard_error,
    wilson_interval,
)


def test_wilson_bounds_solve_their_equation() -> None:
    """Both bounds are the roots p of (p̂ - p)² = z² p (1 - p) / n."""
    for correct, samples in [(1, 7), (5, 10), (49, 50), (312, 900)]:
        for p in wilson_interval(correct, samples):
            assert (correct / samples - p) ** 2 == pytest.approx(Z_95**2 * p * (1 - p) / samples, rel=1e-9)


def test_wilson_ends() -> None:
    low, high = wilson_interval(0, 20)
    assert low == 0.0 and high == pytest.approx(Z_95**2 / (20 + Z_95**2))
    low, high = wilson_interval(20, 20)
    assert high == 1.0 and low == pytest.approx(20 / (20 + Z_95**2))


@pytest.mark.parametrize(("correct", "samples"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses(correct: int, samples: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        wilson_interval(correct, samples)


def test_mean_and_standard_error() -> None:
    assert mean_and_standard_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx((3.0, math.sqrt(14 / 3 / 4)))
    assert mean_and_standard_error([4.0]) == (4.0, None)
    with pytest.raises(ValueError, match="empty"):
        mean_and_standard_error([])


def test_ratio_error_of_equal_weights_is_that_of_the_mean() -> None:
    values = [0.3, 2.0, -1.0, 4.0, 1.5]
    error = ratio_standard_error([2 * value for value in values], [2.0] * 5)
    assert error == pytest.approx(mean_and_standard_error(values)[1])
    assert ratio_standard_error([1.0, 0.0], [3.0, 0.0]) is None


def test_bootstrap_is_fixed_by_its_seed_and_covers() -> None:
    """About 95% of the intervals hold the true mean; 200 trials of 60 values leave room for chance."""
    generator = torch.Generator().manual_seed(3)
    hits = 0
    for _ in range(200):
        values = (2 + torch.randn(60, generator=generator, dtype=torch.float64)).tolist()
        interval = bootstrap_interval(values, resamples=400)
        assert interval is not None and interval == bootstrap_interval(values, resamples=400)
        hits += interval[0] < 2 < interval[1]
    assert 178 <= hits <= 199


def test_bootstrap_of_many_rows_runs_in_slices() -> None:
    """More rows than fit one slice: still finite, ordered, and around the ratio."""
    numerators = torch.arange(1, 600_001, dtype=torch.float64).tolist()
    interval = bootstrap_ratio_interval(numerators, [2.0] * 600_000, resamples=5)
    assert interval is not None
    low, high = interval
    assert low < high
    assert low == pytest.approx(150_000, rel=0.01) and high == pytest.approx(150_000, rel=0.01)


def test_bootstrap_refuses() -> None:
    assert bootstrap_interval([1.0]) is None
    with pytest.raises(ValueError, match=r"confidence is 1\.5"):
        bootstrap_interval([1.0, 2.0], confidence=1.5)
    with pytest.raises(ValueError, match="denominators has 1 values"):
        bootstrap_ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="resamples is 0"):
        bootstrap_interval([1.0, 2.0], resamples=0)
