"""Measurements as plain data, in the schema of `hybridize.report.diagnosis`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from hybridize.evals.offline import TaskResult
from hybridize.evals.passkey import PasskeyResult
from hybridize.evals.suite import text_values
from hybridize.evals.suites import HarnessResult, difference, recovered, stratified_interval
from hybridize.probes.need import Need
from hybridize.probes.token_losses import Estimate, TokenLosses
from hybridize.probes.verdict import Judgement
from hybridize.spec import GroupSpec, ResolvedSpec


@dataclass
class Measured:
    """One model's losses by text, and its answers."""

    losses: dict[str, TokenLosses]
    keys: PasskeyResult | None = None
    tasks: list[TaskResult] = field(default_factory=list)
    harness: HarnessResult | None = None


def far_tokens(losses: TokenLosses, split_at: int | None) -> Tensor:
    """Far-eligible tokens; every counted one where no layer has two branches."""
    return losses.from_position(split_at or 0)


def text_entry(
    losses: TokenLosses, base: TokenLosses, split_at: int | None, need: Need | None
) -> dict[str, Any]:
    """A `TextEntry`; `base` are the student's losses on the same text."""
    values = text_values(losses.summary(split_at))
    far_NT = far_tokens(losses, split_at)
    far = losses.mean(far_NT)
    entry: dict[str, Any] = {
        "perplexity": {key: values[key] for key in ("perplexity", "low", "high", "tokens")},
        "by_position": values["by_position"],
        "far_nll": far.value if far is not None else None,
        "far_tokens": int(far_NT.sum()),
        "delta": plain_estimate(losses.less(base)),
        "far_delta": plain_estimate(losses.less(base, far_NT)),
    }
    if need is not None:
        entry["useful_delta"] = plain_estimate(losses.less(base, need.useful_NT))
        entry["other_delta"] = plain_estimate(losses.less(base, far_NT & ~need.useful_NT))
    return entry


def answers(measured: Measured) -> dict[str, Any]:
    """Passkeys and tasks of a `ModelEntry`."""
    entry: dict[str, Any] = {}
    if measured.keys is not None:
        entry["passkey"] = {
            a.length: {"accuracy": a.accuracy, "low": a.low, "high": a.high, "samples": a.samples}
            for a in measured.keys.by_length
        }
        entry["passkey_cells"] = [asdict(cell) for cell in measured.keys.cells]
    entry["tasks"] = {
        task.name: {
            "accuracy": task.accuracy,
            "low": task.low,
            "high": task.high,
            "samples": task.samples,
            "chance": task.chance,
            "reach": task.reach,
        }
        for task in measured.tasks
    }
    for score in measured.harness.tasks if measured.harness is not None else ():
        low, high = score.interval or (score.score, score.score)
        entry["tasks"][score.name] = {
            "accuracy": score.score,
            "low": low,
            "high": high,
            "samples": score.samples,
        }
    return entry


@dataclass(frozen=True)
class Points:
    """Averages over tasks, in points: the student, the student without its linear branch, the teacher (None: not asked).

    `delta`: DESIGN D12's delta_LA, student less softmax_only, with its 95% interval (paired, samples drawn within a task).
    """

    what: str
    student: float
    without: float
    teacher: float | None
    delta: Estimate

    @property
    def sentence(self) -> str:
        interval = "" if self.delta.low is None else f" [{self.delta.low:+.1f}, {self.delta.high:+.1f}]"
        said = (
            f"{self.what}: AVG {self.student:.1f} with the linear branch, {self.without:.1f} without it, so delta_LA is "
            f"{self.delta.value:+.1f} points{interval} over {self.delta.tokens:,} samples"
        )
        if self.teacher:
            said += f"; recovered performance {100 * self.student / self.teacher:.1f}% of the teacher's {self.teacher:.1f}"
        return said


def points(student: Measured, without: Measured, teacher: Measured | None) -> list[Points]:
    """delta_LA and recovered performance on the offline tasks and on the harness's, where they were measured."""
    found = []
    if student.tasks and without.tasks:
        strata = [
            (100 / len(student.tasks), [x - y for x, y in zip(a.scores, b.scores, strict=True)])
            for a, b in zip(student.tasks, without.tasks, strict=True)
        ]
        low, high = stratified_interval(strata) or (None, None)
        averages = [
            100 * sum(task.accuracy for task in model.tasks) / len(model.tasks)
            if model is not None and model.tasks
            else None
            for model in (student, without, teacher)
        ]
        assert averages[0] is not None and averages[1] is not None
        delta = Estimate(averages[0] - averages[1], low, high, sum(task.samples for task in student.tasks))
        found.append(Points("offline tasks", averages[0], averages[1], averages[2], delta))
    if student.harness is not None and without.harness is not None:
        change = difference(student.harness, without.harness)
        low, high = change.interval or (None, None)
        samples = sum(task.samples for task in student.harness.tasks)
        known = teacher.harness if teacher is not None else None
        if known is not None:
            recovered(student.harness, known)  # refuses results on other samples
        found.append(
            Points(
                "lm-eval tasks",
                student.harness.average,
                without.harness.average,
                known.average if known is not None else None,
                Estimate(change.points, low, high, samples),
            )
        )
    return found


def verdict_entry(judgement: Judgement, averages: list[Points]) -> dict[str, Any]:
    """A `Verdict`; averages over tasks join its reasons and figures."""
    figures = {name: estimate.to_dict() for name, estimate in judgement.figures.items()}
    if judgement.linear != "not_applicable":
        figures |= {f"delta_LA, {entry.what} (points)": entry.delta.to_dict() for entry in averages}
    return {
        "linear": judgement.linear,
        "window": judgement.window,
        "sentence": judgement.sentence,
        "reasons": [*judgement.reasons, *(entry.sentence for entry in averages)]
        if judgement.linear != "not_applicable"
        else judgement.reasons,
        "thresholds": judgement.thresholds,
        "figures": figures,
    }


def need_entry(need: Need) -> dict[str, Any]:
    return {
        "context": need.context,
        "threshold": need.threshold,
        "need": need.need.to_dict(),
        "tokens": need.need.tokens,
        "useful_share": need.useful_share,
    }


def plain_estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.to_dict()


def describe_spec(spec: ResolvedSpec) -> str:
    """The spec in a line: how many layers compute what."""
    counts: dict[str, int] = {}
    for layer in spec.layers:
        words = " | ".join(_group(group, len(layer.groups) > 1) for group in layer.groups)
        counts[words] = counts.get(words, 0) + 1
    return "; ".join(f"{count} x {words}" for words, count in counts.items())


def _group(group: GroupSpec, several: bool) -> str:
    words = [f"{group.heads} heads" if several else "", group.attention.replace("_", " ")]
    if group.window is not None:
        sinks = f" + {group.window.sinks} sinks" if group.window.sinks else ""
        words.append(
            f"{group.window.kind} {group.window.size}{sinks}{', overlapping' if group.window.overlap else ''}"
        )
    if group.normalizer is not None:
        kind = group.normalizer.kind
        words.append(kind if kind == "shared" else f"separate, {group.normalizer.mix}")  # type: ignore[union-attr]
    return " ".join(word for word in words if word)
