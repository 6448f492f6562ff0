"""What a diagnosis says in words: the verdicts, where the linear branch works, names of models, values with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridize.report.diagnosis import Interval, LayerEntry, ModelEntry, RunDiagnosis, Verdict
from hybridize.report.page import Cell
from hybridize.report.summary import format_nats, format_number


@dataclass(frozen=True)
class Answer:
    """A verdict in big words, in plain words, and as a sign that does without colour."""

    word: str
    plain: str
    sign: str


LINEAR = {
    "balanced": Answer("Balanced", "the linear branch is used", "✓"),
    "weak": Answer("Weak", "the linear branch is used, but adds little", "!"),
    "bypassed": Answer("Bypassed", "the linear branch is not used", "✕"),
    "inconclusive": Answer(
        "Inconclusive", "the measurement cannot tell whether the linear branch is used", "?"
    ),
    "not_applicable": Answer("Not applicable", "there is no linear branch beside a window to judge", "–"),
}
WINDOW = {
    "used": "used",
    "unused": "not used",
    "inconclusive": "inconclusive",
    "not_applicable": "not applicable",
}
MODES = {
    "hybrid": "both branches, as trained",
    "softmax_only": "the linear branch removed",
    "far_only": "the window removed; the linear branch keeps its far keys",
    "linear_only": "the window removed; the linear branch sees every key",
    "sinks_only": "softmax over the first 8 tokens, nothing else",
    "none": "no attention at all: every attention output is 0",
}
REMOVALS = {
    "zero": "the removed part outputs 0 and its share of the weights stays with it",
    "renormalize": "the removed part's share of the weights goes to what remains",
}


def student_of(run: RunDiagnosis) -> ModelEntry | None:
    return next((model for model in run.models if model.kind == "student"), None)


def teacher_of(run: RunDiagnosis) -> ModelEntry | None:
    return next((model for model in run.models if model.kind == "teacher"), None)


def ablations(run: RunDiagnosis, mode: str) -> list[ModelEntry]:
    """The student under one mode, `zero` first, then `renormalize`, then where the two are the same."""
    order = ("zero", "renormalize", None)
    found = [model for model in run.models if model.kind == "ablation" and model.mode == mode]
    return sorted(found, key=lambda model: order.index(model.removal))


def controls(run: RunDiagnosis) -> list[ModelEntry]:
    return [model for model in run.models if model.kind == "control"]


def label(model: ModelEntry) -> str:
    """How plots call a model: the teacher and the student so, ablations by what remains and how the rest went."""
    if model.kind == "control":
        return model.name
    if model.kind != "ablation":
        return model.kind
    return f"{model.mode}, {model.removal}" if model.removal else model.mode


def finite(interval: Interval | None) -> bool:
    return interval is not None and math.isfinite(interval.value)


def bounds(interval: Interval) -> tuple[float, float] | None:
    """Both ends of the interval, where both are known and finite."""
    if interval.low is None or interval.high is None:
        return None
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return None
    return interval.low, interval.high


def nats_bounds(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return ""
    return f"{format_nats(interval.low)} to {format_nats(interval.high)}"


def signed_number(value: float | None) -> str:
    """As `format_number`, with a true minus sign."""
    text = format_number(value)
    return f"−{text[1:]}" if text.startswith("-") else text


def number_bounds(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return ""
    return f"{signed_number(interval.low)} to {signed_number(interval.high)}"


def rising(layers: LayerEntry) -> list[int]:
    """Layers whose loss rises by more than the error when their linear branch alone is removed, the largest rise first."""
    found = [
        (layer, entry.value)
        for layer, entry in enumerate(layers.loss_rise)
        if entry is not None and finite(entry) and entry.low is not None and entry.low > 0
    ]
    return [layer for layer, _ in sorted(found, key=lambda pair: -pair[1])]


def where(run: RunDiagnosis, most: int = 3) -> str:
    """The layers in which the linear branch does most; empty where no layer was measured alone."""
    layers = run.layers
    measured = [entry for entry in layers.loss_rise if entry is not None] if layers is not None else []
    if layers is None or not measured:
        return ""
    if all(entry.low is None for entry in measured):
        chosen = _largest(layers, most)
        return f"{_most_in(layers, chosen)} No intervals: one row of text." if chosen else ""
    found = rising(layers)
    total = f"{len(measured)} {'layer' if len(measured) == 1 else 'layers'} with two branches"
    if not found:
        return f"Nowhere: removed alone, none of the {total} raises the loss by more than the error."
    verb = "raises" if len(found) == 1 else "raise"
    return f"{_most_in(layers, found[:most])} {len(found)} of {total} {verb} it by more than the error."


def top_layers(run: RunDiagnosis, most: int = 3) -> str:
    """`where` in a table's cell: 12, 5, 3."""
    layers = run.layers
    measured = [entry for entry in layers.loss_rise if entry is not None] if layers is not None else []
    if layers is None or not measured:
        return ""
    certain = any(entry.low is not None for entry in measured)
    chosen = rising(layers)[:most] if certain else _largest(layers, most)
    return ", ".join(map(str, chosen)) or "none"


def _largest(layers: LayerEntry, most: int) -> list[int]:
    found = [
        (layer, entry.value)
        for layer, entry in enumerate(layers.loss_rise)
        if entry is not None and finite(entry)
    ]
    return [layer for layer, _ in sorted(found, key=lambda pair: -pair[1])][:most]


def _most_in(layers: LayerEntry, chosen: Sequence[int]) -> str:
    parts: list[str] = []
    for layer in chosen:
        entry = layers.loss_rise[layer]
        assert entry is not None
        parts.append(f"layer {layer} ({format_nats(entry.value)}{'' if parts else ' nats'})")
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"Most in {joined}: so much the loss rises without that layer's linear branch."


def figure_rows(verdict: Verdict) -> list[tuple[str, list[Cell]]]:
    """What was measured, and its bound where a threshold has the same name."""
    rows = []
    for name, figure in verdict.figures.items():
        measured = Cell(signed_number(figure.value), number_bounds(figure))
        rows.append((name.replace("_", " "), [measured, Cell(_bound(verdict.thresholds.get(name)))]))
    return rows


def threshold_rows(verdict: Verdict) -> list[tuple[str, list[Cell]]]:
    """Thresholds that no figure has the name of."""
    return [
        (name.replace("_", " "), [Cell(_bound(value))])
        for name, value in verdict.thresholds.items()
        if name not in verdict.figures
    ]


def _bound(value: float | None) -> str:
    """As it was set: 0.005 and not 0.00500."""
    return f"{value:g}" if value is not None and math.isfinite(value) else format_number(value)
