"""One word on the linear branch and one on the window, from measured losses and thresholds kept in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from hybridize.probes.token_losses import Estimate

Label = Literal["balanced", "weak", "bypassed", "inconclusive", "not_applicable"]
WindowLabel = Literal["used", "unused", "inconclusive", "not_applicable"]


@dataclass(frozen=True)
class Thresholds:
    """All bounds of the verdict.

    min_far_tokens: far-eligible tokens below which nothing is said.
    min_need: nats a far-eligible token must gain from the far past, by the teacher, for a text to tell anything.
    bypassed_share: the linear branch is bypassed where its gain is surely below this share of the need.
    balanced_share: it is balanced where its gain is surely at least this share; weak between the two. The gain may exceed the
        need: a student that has adapted to its linear branch misses it everywhere.
    window_unused_share: the window is unused where removing it surely costs less than this share of the student's loss on the
        same tokens. A share, because a fixed number of nats is lost in the noise of a text that the student hardly predicts
        and is much on one that it knows almost by heart: 2% is 0.1 nats at a loss of 5 and 0.002 at 0.1.
    """

    min_far_tokens: float = 300
    min_need: float = 0.02
    bypassed_share: float = 0.05
    balanced_share: float = 0.25
    window_unused_share: float = 0.02


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Judgement:
    """See `report.diagnosis.Verdict`, which has the same fields."""

    linear: Label
    window: WindowLabel
    sentence: str
    reasons: list[str]
    thresholds: dict[str, float] = field(default_factory=lambda: asdict(THRESHOLDS))
    figures: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """What is known on one text; all in nats on far-eligible tokens.

    loss: the student's loss. gain: its loss without the linear branch less its loss with it, by removal (`zero`,
    `renormalize`). need: what the far past brings the teacher. window_loss: the same as gain for the window (far keys alone
    remain). control: the equal-bytes window teacher's loss less the student's. useful, other: the gain on the tokens where
    the far past helps the teacher, and on the others.
    """

    text: str
    loss: float
    gain: dict[str, Estimate]
    need: Estimate | None = None
    window_loss: Estimate | None = None
    control: Estimate | None = None
    useful: Estimate | None = None
    other: Estimate | None = None

    @property
    def smallest_gain(self) -> tuple[str, Estimate]:
        """The removal under which the branch looks least useful: a fall that is only a matter of scale does not count."""
        return min(self.gain.items(), key=lambda item: item[1].value)


def judge(evidence: Evidence, thresholds: Thresholds = THRESHOLDS) -> Judgement:
    """The verdict on a student with both branches, from the text that trained it."""
    removal, gain = evidence.smallest_gain
    figures = {f"gain, {name}": estimate for name, estimate in evidence.gain.items()}
    reasons = [_gain_reason(evidence, removal, gain)]
    need = evidence.need
    if need is not None:
        figures["need"] = need
        reasons.append(f"the teacher gains {_nats(need)} a token from the far past on the same tokens")
    if evidence.useful is not None and evidence.other is not None:
        figures |= {"useful": evidence.useful, "other": evidence.other}
        reasons.append(
            f"where the far past helps the teacher the linear branch brings {_nats(evidence.useful)}, on the other tokens "
            f"{_nats(evidence.other)}: only what it brings beyond the second is news from afar"
        )
    if evidence.window_loss is not None:
        figures["window"] = evidence.window_loss
        reasons.append(
            f"removing the window costs {_nats(evidence.window_loss)}, beside a loss of {evidence.loss:.3f}; it is unused below "
            f"{thresholds.window_unused_share:.0%} of that"
        )
    if evidence.control is not None:
        figures["control"] = evidence.control
        reasons.append(_control_reason(evidence.control))
    linear, sentence = _linear(gain, need, thresholds)
    window = _window(evidence.window_loss, thresholds.window_unused_share * evidence.loss)
    if window == "unused":
        sentence += " The softmax window does nothing."
    if evidence.control is not None and evidence.control.high is not None and evidence.control.high < 0:
        sentence += f" But the teacher under a plain window of the same bytes is better by {-evidence.control.value:.3f} nats."
    return Judgement(linear, window, sentence, reasons, asdict(thresholds), figures)


def not_applicable(why: str) -> Judgement:
    return Judgement("not_applicable", "not_applicable", why, [why])


def _linear(gain: Estimate, need: Estimate | None, thresholds: Thresholds) -> tuple[Label, str]:
    if gain.tokens < thresholds.min_far_tokens or gain.low is None or gain.high is None:
        return (
            "inconclusive",
            f"Too little text to tell: {gain.tokens} far-eligible tokens; measure more rows or longer documents.",
        )
    could = max(need.value if need is not None else 0.0, thresholds.min_need)
    needed = need is not None and (need.value if need.low is None else need.low) >= thresholds.min_need
    bypassed, balanced = thresholds.bypassed_share * could, thresholds.balanced_share * could
    said = f"without it the loss rises by {gain.value:.3f} nats, {_times(gain.value / could)} what the far past brings the teacher"
    if gain.low >= balanced:
        return "balanced", f"The linear branch is used: {said}."
    if not needed:
        return (
            "inconclusive",
            "The text hardly needs its far past, so it cannot show whether the linear branch would deliver it; measure a text "
            "with longer documents.",
        )
    if gain.low >= bypassed:
        return "weak", f"The linear branch does little: {said}."
    if gain.high < bypassed:
        return "bypassed", f"The linear branch is bypassed: {said}."
    return (
        "inconclusive",
        f"Too little text to tell: {said}, and the interval of its gain reaches over the bounds.",
    )


def _window(cost: Estimate | None, unused: float) -> WindowLabel:
    """`cost` of removing the window against the bound `unused`, both in nats."""
    if cost is None or cost.low is None or cost.high is None:
        return "inconclusive"
    if cost.high < unused:
        return "unused"
    return "used" if cost.low >= unused else "inconclusive"


def _gain_reason(evidence: Evidence, removal: str, gain: Estimate) -> str:
    others = ", ".join(
        f"{_nats(estimate)} by {name}" for name, estimate in evidence.gain.items() if name != removal
    )
    also = f" ({others})" if others else ""
    return (
        f"without the linear branch the loss on {evidence.text} rises by {_nats(gain)} by removal {removal!r}{also}, over "
        f"{gain.tokens:,} tokens whose query has a far key"
    )


def _control_reason(control: Estimate) -> str:
    if control.low is not None and control.low > 0:
        return f"it beats the teacher under a plain window of the same bytes by {_nats(control)}"
    if control.high is not None and control.high < 0:
        worse = Estimate(
            -control.value, -control.high, -control.low if control.low is not None else None, control.tokens
        )
        return (
            f"it loses to the teacher under a plain window of the same bytes by {_nats(worse)}: the conversion has bought "
            "nothing on this text"
        )
    return f"it does not differ surely from the teacher under a plain window of the same bytes ({_nats(control)})"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio >= 1.05 else f"{ratio:.0%} of"


def _nats(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f} nats"
    return f"{estimate.value:.3f} nats [{estimate.low:.3f}, {estimate.high:.3f}]"
