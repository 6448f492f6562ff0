"""A selection of layers (the JSON of `hybridize select`) as a plot by layer and as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from hybridize.report.drawing import (
    COLOURS,
    INK,
    MARKERS,
    STYLE,
    layer_axis,
    legend_above,
    log_ticks,
    make_figure,
    to_svg,
)
from hybridize.report.summary import ABSENT, format_number

KEPT, REPLACED, RECALL, KNOWLEDGE = COLOURS[1], COLOURS[0], COLOURS[2], COLOURS[3]
SCORE = {
    "halo": "recall lost / knowledge lost",
    "jet": "drop of recall",
    "kl": "distillation loss (nats)",
}
DECADES = 1000  # scores further apart than this are drawn on a logarithmic axis

Draw = Callable[[Axes], None]


def selection_plot(selection: Mapping[str, Any], key: str = "selection") -> str:
    """Score by layer, the kept ones filled, over recall and knowledge with the layer replaced (dashed: the teacher), as an
    inline `<svg>`; an empty string where nothing was measured. `key` must differ between the figures of a page."""
    layers = selection["by_layer"]
    panels: list[Draw] = []
    if any(_value(layer, name) is not None for layer in layers for name in ("recall", "knowledge")):
        panels.append(lambda axes: _draw_measured(axes, selection))
    if any("score" in layer for layer in layers):
        panels.append(lambda axes: _draw_scores(axes, selection))
    if not panels:
        return ""
    with matplotlib.rc_context(STYLE):
        figure = make_figure(0.4 + 2.2 * len(panels))
        grid: Any = figure.subplots(len(panels), 1, squeeze=False)
        for axes, draw in zip(grid[:, 0], panels, strict=True):
            draw(axes)
            axes.set_xlim(-0.7, len(layers) - 0.3)
            layer_axis(axes.xaxis, "layer (from 0)" if axes is grid[-1, 0] else "")
        title = f"Score of each layer under the rule {_rule(selection)}; kept: {_listed(selection['kept'])}"
        return to_svg(figure, key, title)


def _draw_measured(axes: Axes, selection: Mapping[str, Any]) -> None:
    """Recall and knowledge with each layer replaced, one standard error up and down."""
    for name, colour, marker in (("recall", RECALL, MARKERS[0]), ("knowledge", KNOWLEDGE, MARKERS[1])):
        points = [
            (layer["layer"], value, _error(layer, name) or 0.0)
            for layer in selection["by_layer"]
            if (value := _value(layer, name)) is not None
        ]
        if not points:
            continue
        x, y, errors = zip(*points, strict=True)
        axes.errorbar(
            x, y, errors, color=colour, marker=marker, elinewidth=1, label=f"{name}, layer replaced"
        )
        teacher = _value(selection.get("teacher") or {}, name)
        if teacher is not None:
            axes.axhline(teacher, color=colour, linewidth=1, linestyle="--")
    axes.set_ylabel("share right")
    legend_above(axes)


def _draw_scores(axes: Axes, selection: Mapping[str, Any]) -> None:
    """Stems from zero, or from the axis where scores lie decades apart; scores of zero then stand on it, hollow."""
    # A loss is shown as it is: lowest is kept.
    sign = -1 if selection["rule"] == "kl" else 1
    scores = {layer["layer"]: sign * layer["score"] for layer in selection["by_layer"] if "score" in layer}
    positive = [score for score in scores.values() if score > 0]
    wide = bool(positive) and min(scores.values()) >= 0 and max(positive) > DECADES * _middle(positive)
    floor = min(positive) / 2 if wide else 0.0
    if selection["rule"] == "kl":
        floor = min(scores.values()) - 0.1 * (max(scores.values()) - min(scores.values()))
    for layer, score in scores.items():
        kept = layer in selection["kept"]
        colour, drawn = (KEPT if kept else REPLACED), max(score, floor) if wide else score
        axes.plot((layer, layer), (floor, drawn), color=colour, linewidth=1.6)
        axes.plot(
            layer, drawn, marker="o", color=colour, markerfacecolor=colour if kept else "none", markersize=5
        )
    for kept_too, label in ((True, "keeps softmax"), (False, "replaced")):
        colour = KEPT if kept_too else REPLACED
        face = colour if kept_too else "none"
        axes.plot([], [], marker="o", color=colour, markerfacecolor=face, linestyle="none", label=label)
    if wide:
        axes.set_yscale("log")
        log_ticks(axes.yaxis, positive)
    axes.axhline(floor, color=INK, linewidth=1)
    axes.set_ylabel(SCORE.get(selection["rule"], "score"))
    legend_above(axes)


def selection_table(selection: Mapping[str, Any]) -> str:
    """One line a layer, kept ones marked, for the terminal; the teacher last where it was measured."""
    layers = selection["by_layer"]
    names = [name for name in ("recall", "knowledge", "loss") if any(name in layer for layer in layers)]
    scored = any("score" in layer for layer in layers)
    rank = {layer: place + 1 for place, layer in enumerate(selection["ranking"])}
    rows = [["layer", *names, *(["score"] if scored else []), "rank", ""]]
    for layer in layers:
        cells = [_cell(layer, name) for name in names]
        score = [format_number(layer.get("score"))] if scored else []
        place = str(rank.get(layer["layer"], ABSENT))
        rows.append([str(layer["layer"]), *cells, *score, place, "kept" if layer["kept"] else ""])
    if selection.get("teacher"):
        cells = [_cell(selection["teacher"], name) for name in names]
        rows.append(["teacher", *cells, *([ABSENT] if scored else []), ABSENT, ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    kept = selection["kept"]
    lines.append(
        f"rule {_rule(selection)}: {len(kept)} of {len(layers)} layers keep softmax: {_listed(kept)}"
    )
    return "\n".join(lines)


def _rule(selection: Mapping[str, Any]) -> str:
    return f"{selection['rule']}, spread" if selection.get("spread") else str(selection["rule"])


def _cell(entry: Mapping[str, Any], name: str) -> str:
    value, error = _value(entry, name), _error(entry, name)
    if value is None:
        return ABSENT
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _value(entry: Mapping[str, Any], name: str) -> float | None:
    found = entry.get(name)
    return found.get("value") if isinstance(found, Mapping) else found


def _error(entry: Mapping[str, Any], name: str) -> float | None:
    found = entry.get(name)
    return found.get("standard_error") if isinstance(found, Mapping) else None


def _middle(values: list[float]) -> float:
    """The median; infinite scores do not occur."""
    return sorted(values)[math.floor(len(values) / 2)]


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
