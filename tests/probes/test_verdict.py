"""The verdict: every label, from figures on both sides of each bound."""

from __future__ import annotations

import pytest

from hybridize.probes.token_losses import Estimate
from hybridize.probes.verdict import THRESHOLDS, Evidence, judge


def near(value: float, half: float = 0.001, tokens: int = 5000) -> Estimate:
    return Estimate(value, value - half, value + half, tokens)


def verdict(zero, renormalized=None, need=0.4, window=1.0, control=None):
    gain = {"zero": zero, "renormalize": renormalized or zero}
    return judge(Evidence("docs", 2.5, gain, near(need), near(window), control))


@pytest.mark.parametrize(
    ("gain", "label"),
    [
        (near(0.0), "bypassed"),
        (near(-0.05), "bypassed"),
        (near(0.018), "bypassed"),
        (near(0.02, 0.01), "inconclusive"),
        (near(0.03), "weak"),
        (near(0.0995, 0.001), "weak"),
        (near(0.102), "balanced"),
        (near(0.5), "balanced"),
        (near(0.1, 0.2), "inconclusive"),
        (near(0.5, tokens=20), "inconclusive"),
        (Estimate(0.5, None, None, 5000), "inconclusive"),
    ],
)
def test_labels(gain, label):
    assert verdict(gain).linear == label


def test_the_smaller_gain_decides():
    """A shrunken output alone is no sign that the branch carries anything."""
    found = verdict(near(0.5), near(0.0))
    assert found.linear == "bypassed" and "'renormalize'" in found.reasons[0]
    assert set(found.figures) >= {"gain, zero", "gain, renormalize", "need", "window"}


def test_a_text_that_needs_nothing_far_tells_nothing_but_a_sure_gain_does():
    assert verdict(near(0.0), need=0.001).linear == "inconclusive"
    assert "hardly needs its far past" in verdict(near(0.0), need=0.001).sentence
    assert verdict(near(0.1), need=0.001).linear == "balanced"


def test_without_a_teacher_only_a_sure_gain_counts():
    gain = {"zero": near(0.1), "renormalize": near(0.1)}
    assert judge(Evidence("docs", 2.5, gain)).linear == "balanced"
    assert judge(Evidence("docs", 2.5, {"zero": near(0.0)})).linear == "inconclusive"


@pytest.mark.parametrize(
    ("loss", "cost", "label"),
    [
        (2.5, near(0.0), "unused"),
        (2.5, near(-0.3), "unused"),
        (2.5, near(0.048), "unused"),
        (2.5, near(0.05, 0.01), "inconclusive"),
        (2.5, near(0.052), "used"),
        (2.5, near(0.5), "used"),
        # the same nats are nothing in a large loss and much in a small one
        (10.0, near(0.15), "unused"),
        (0.1, near(0.015), "used"),
        (2.5, Estimate(0.0, None, None, 5000), "inconclusive"),
        (2.5, None, "inconclusive"),
    ],
)
def test_the_window(loss, cost, label):
    found = judge(Evidence("docs", loss, {"zero": near(0.3)}, near(0.4), cost))
    assert found.window == label
    assert ("window does nothing" in found.sentence) == (label == "unused")


def test_the_window_is_told_beside_the_loss_it_is_held_against():
    (reason,) = (reason for reason in verdict(near(0.3)).reasons if "window" in reason)
    assert reason == (
        "removing the window costs 1.000 nats [0.999, 1.001], beside a loss of 2.500; it is unused below 2% of that"
    )


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (near(0.2), "beats the teacher"),
        (near(-0.2), "bought nothing"),
        (near(0.0, 0.1), "does not differ surely"),
    ],
)
def test_the_control_is_told(control, words):
    assert any(words in reason for reason in verdict(near(0.3), control=control).reasons)


def test_the_bounds_are_printed():
    assert verdict(near(0.3)).thresholds["balanced_share"] == THRESHOLDS.balanced_share
