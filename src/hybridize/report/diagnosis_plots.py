"""Plots of a diagnosis along tokens, layers and steps; its maps are in `diagnosis_maps.py`.

Every function returns an inline `<svg>`, or an empty string where there is nothing to draw. `key` tells the figures of
several runs on one page apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hybridize.report.diagnosis import GainCurve, Interval, LayerEntry, ModelEntry, RunDiagnosis
from hybridize.report.diagnosis_text import (
    ablations,
    bounds,
    controls,
    finite,
    label,
    rising,
    student_of,
    teacher_of,
)
from hybridize.report.drawing import (
    COLOURS,
    INK,
    MARKERS,
    STYLE,
    bucket_centre,
    layer_axis,
    legend_above,
    legend_columns,
    log_y,
    make_axes,
    make_figure,
    position_axis,
    to_svg,
)
from hybridize.report.schema import PositionEntry
from hybridize.report.summary import format_nats, shorten

STUDENT, REMOVED, TEACHER, CONTROL = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[3]
LEAST_SPAN = 0.001  # nats; closer up, bars would show noise
AGAINST_STUDENT = "loss less the student's (nats a token)"


@dataclass(frozen=True)
class Bar:
    interval: Interval
    colour: str
    hollow: bool = False


@dataclass(frozen=True)
class BarRow:
    """The bars of one name, from the top down."""

    name: str
    bars: list[Bar]


def ablation_plot(run: RunDiagnosis, text: str, key: str) -> str:
    """Loss on far-eligible tokens less the student's: without the linear branch and for the controls, then without the window."""
    others = [model for model in (teacher_of(run), *controls(run)) if model is not None]
    panels = [
        ("No linear branch; references", [*_mode_rows(run, text, ["softmax_only"])]),
        ("No window", _mode_rows(run, text, ["far_only", "linear_only", "sinks_only", "none"])),
    ]
    panels[0][1].extend(
        BarRow(label(model), [Bar(interval, TEACHER if model.kind == "teacher" else CONTROL)])
        for model in others
        if (interval := _delta(model, text)) is not None
    )
    legend = [
        Patch(facecolor=REMOVED, edgecolor=REMOVED, label="removal: zero"),
        Patch(facecolor="none", edgecolor=REMOVED, label="removal: renormalize"),
    ]
    if not any(bar.hollow for _, rows in panels for row in rows for bar in row.bars):
        legend = []
    drawn = [(title, rows) for title, rows in panels if rows]
    title = f"Loss on far-eligible tokens of {text} less the student's, by ablation and reference"
    return _bar_figure(drawn, legend, f"{key}-ablation-{text}", title)


def need_plot(run: RunDiagnosis, text: str, key: str) -> str:
    """Loss less the student's on tokens where the far past helps the teacher, and on the other far-eligible ones."""
    rows = []
    for model in (*ablations(run, "softmax_only"), teacher_of(run), *controls(run)):
        if model is None or text not in model.texts:
            continue
        entry = model.texts[text]
        colour = {"ablation": REMOVED, "teacher": TEACHER}.get(model.kind, CONTROL)
        pair = ((entry.useful_delta, False), (entry.other_delta, True))
        bars = [Bar(delta, colour, hollow) for delta, hollow in pair if delta is not None and finite(delta)]
        if bars:
            rows.append(BarRow(label(model), bars))
    legend = [
        Patch(facecolor=INK, edgecolor=INK, label="tokens that the far past helps"),
        Patch(facecolor="none", edgecolor=INK, label="other far-eligible tokens"),
    ]
    title = f"Loss on {text} less the student's where the far past helps the teacher, and elsewhere"
    return _bar_figure([("", rows)] if rows else [], legend, f"{key}-need-{text}", title)


def _mode_rows(run: RunDiagnosis, text: str, modes: Sequence[str]) -> list[BarRow]:
    rows = []
    for mode in modes:
        bars = [
            Bar(interval, REMOVED, hollow=model.removal == "renormalize")
            for model in ablations(run, mode)
            if (interval := _delta(model, text)) is not None
        ]
        if bars:
            rows.append(BarRow(mode, bars))
    return rows


def _delta(model: ModelEntry, text: str) -> Interval | None:
    entry = model.texts.get(text)
    return entry.far_delta if entry is not None and finite(entry.far_delta) else None


def _bar_figure(
    panels: Sequence[tuple[str, list[BarRow]]], legend: Sequence[Patch], name: str, title: str
) -> str:
    if not panels:
        return ""
    heights = [0.2 + sum(0.12 + 0.24 * max(len(row.bars), 1.4) for row in rows) for _, rows in panels]
    with matplotlib.rc_context({**STYLE, "axes.spines.left": False}):
        figure = make_figure(0.75 + sum(heights) + 0.35 * len(panels))
        grid: Any = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for axes, (heading, rows) in zip(grid[:, 0], panels, strict=True):
            _draw_bars(axes, rows)
            if heading:
                axes.set_title(heading, loc="left", fontsize=10)
        grid[-1, 0].set_xlabel(AGAINST_STUDENT)
        if legend:
            figure.legend(handles=list(legend), loc="outside upper center", ncols=2)
        return to_svg(figure, name, title)


def _draw_bars(axes: Axes, rows: Sequence[BarRow]) -> None:
    """Horizontal bars with intervals, each with its value at its end; the axis makes room for the values."""
    ends = [0.0]
    texts = []
    for i, row in enumerate(rows):
        height = 0.8 / max(len(row.bars), 2)
        for j, bar in enumerate(row.bars):
            y = i + (j - (len(row.bars) - 1) / 2) * height
            value, reach = bar.interval.value, bounds(bar.interval)
            face = "none" if bar.hollow else bar.colour
            axes.barh(y, value, height * 0.8, facecolor=face, edgecolor=bar.colour, linewidth=1.2)
            if reach is not None:
                axes.plot(reach, (y, y), color=INK, linewidth=1, solid_capstyle="butt")
                axes.plot(reach, (y, y), color=INK, marker="|", markersize=4, linestyle="none")
            low, high = reach or (value, value)
            ends += [low, high, value]
            texts.append((max(high, value, 0.0) if value >= 0 else min(low, value), y, value))
    span = max(max(ends) - min(ends), LEAST_SPAN)
    room = 0.34 * span
    axes.set_xlim(
        min(ends) - (room if any(value < 0 for *_, value in texts) else 0.02 * span),
        max(ends) + (room if any(value >= 0 for *_, value in texts) else 0.02 * span),
    )
    for x, y, value in texts:
        side = 1 if value >= 0 else -1
        axes.text(
            x + side * 0.02 * span, y, format_nats(value), va="center", ha="left" if side > 0 else "right"
        )
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), [_two_lines(row.name) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))


def _two_lines(name: str) -> str:
    return "\n".join(wrap(shorten(name, 34), 18)[:2])


def position_plot(run: RunDiagnosis, text: str, key: str) -> str:
    """Loss by position, and under it the loss less the student's, for the student, its ablation, the teacher, the controls."""
    student = student_of(run)
    lines = [(model, style) for model, style in _lines(run) if _buckets(model, text)]
    if not lines:
        return ""
    base = {(b.start, b.end): _nats(b) for b in _buckets(student, text)} if student is not None else {}
    gaps = [
        (model, style, rows)
        for model, style in lines
        if model is not student and (rows := [b for b in _buckets(model, text) if (b.start, b.end) in base])
    ]
    edges = sorted({b.end for model, _ in lines for b in _buckets(model, text) if b.end is not None})
    with matplotlib.rc_context(STYLE):
        names = [shorten(label(model)) for model, _ in lines]
        legend_rows = math.ceil(len(names) / legend_columns(names))
        figure = make_figure((4.0 if gaps else 2.4) + 0.17 * legend_rows)
        grid: Any = figure.subplots(2 if gaps else 1, 1, squeeze=False)
        top = grid[0, 0]
        for name, (model, style) in zip(names, lines, strict=True):
            _draw_buckets(top, _buckets(model, text), _nats, style, name)
        top.set_ylabel("loss (nats a token)")
        for model, style, rows in gaps:
            _draw_buckets(grid[1, 0], rows, lambda b: _nats(b) - base[b.start, b.end], style, label(model))
        for axes in grid[:, 0]:
            position_axis(axes, edges, "position in the document (tokens)" if axes is grid[-1, 0] else "")
            if run.far_from:
                axes.axvline(run.far_from, color=INK, linewidth=1, linestyle=":")
        if gaps:
            grid[1, 0].axhline(0, color=STUDENT, linewidth=1)
            grid[1, 0].set_ylabel("less the student's")
        legend_above(top)
        return to_svg(figure, f"{key}-position-{text}", f"Loss by position on {text}")


def _lines(run: RunDiagnosis) -> list[tuple[ModelEntry, dict[str, Any]]]:
    """The models that are compared along the text, and how each is drawn."""
    lines: list[tuple[ModelEntry, dict[str, Any]]] = []
    for model, colour, marker in (
        (teacher_of(run), TEACHER, MARKERS[2]),
        (student_of(run), STUDENT, MARKERS[0]),
    ):
        if model is not None:
            lines.append((model, {"color": colour, "marker": marker}))
    for model in ablations(run, "softmax_only"):
        dashed = model.removal == "renormalize"
        style = {"markerfacecolor": "none", "linestyle": "--"} if dashed else {}
        lines.append((model, {"color": REMOVED, "marker": MARKERS[1], **style}))
    for i, model in enumerate(controls(run)):
        style = {"color": COLOURS[3 + i % 3], "marker": MARKERS[3 + i % 3], "linestyle": "-."}
        lines.append((model, style))
    return lines


def _buckets(model: ModelEntry | None, text: str) -> list[PositionEntry]:
    if model is None or text not in model.texts:
        return []
    return [b for b in model.texts[text].by_position if b.tokens > 0 and 0 < b.perplexity < math.inf]


def _nats(bucket: PositionEntry) -> float:
    return math.log(bucket.perplexity)


def _draw_buckets(
    axes: Axes,
    buckets: Sequence[PositionEntry],
    value: Callable[[PositionEntry], float],
    style: dict[str, Any],
    name: str,
) -> None:
    centres = [bucket_centre(bucket.start, bucket.end) for bucket in buckets]
    axes.plot(centres, [value(bucket) for bucket in buckets], label=name, **style)


def loss_rise_plot(layers: LayerEntry, key: str) -> str:
    """Rise of the loss when one layer's linear branch is removed; filled where it is beyond the error, the largest named."""
    points = [(i, entry) for i, entry in enumerate(layers.loss_rise) if entry is not None and finite(entry)]
    if not points:
        return ""
    sure = rising(layers)
    with matplotlib.rc_context(STYLE):
        figure, axes = make_axes()
        for layer, entry in points:
            reach = bounds(entry)
            if reach is not None:
                axes.plot((layer, layer), reach, color=REMOVED, linewidth=1.2, alpha=0.7)
            face = REMOVED if layer in sure or entry.low is None else "none"
            axes.plot(layer, entry.value, marker="o", color=REMOVED, markerfacecolor=face, markersize=5)
        for layer, entry in points:
            if layer not in sure[:3]:
                continue
            top = (bounds(entry) or (0.0, entry.value))[1]
            axes.annotate(
                str(layer), (layer, top), (0, 3), textcoords="offset points", ha="center", weight="bold"
            )
        axes.axhline(0, color=INK, linewidth=1)
        axes.margins(y=0.12)
        axes.set_xlim(-0.7, len(layers.loss_rise) - 0.3)
        axes.set_ylabel("rise of the loss (nats a token)")
        layer_axis(axes.xaxis)
        return to_svg(
            figure, f"{key}-rise", "Rise of the loss when one layer's linear branch is removed, by layer"
        )


def norms_plot(layers: LayerEntry, key: str) -> str:
    """Root mean square of what each branch puts into the output, by layer."""
    series = [
        ("window", layers.near_norm, STUDENT, MARKERS[0]),
        ("linear branch", layers.far_norm, REMOVED, MARKERS[1]),
    ]
    return _layer_lines(series, f"{key}-norms", "Size of each branch's output by layer", "root mean square")


def cosine_plot(layers: LayerEntry, key: str) -> str:
    """Cosine between the two branches' outputs, by layer."""
    series = [("cosine", layers.cosine, COLOURS[5], MARKERS[2])]
    title = "Cosine between the two branches' outputs by layer"
    return _layer_lines(series, f"{key}-cosine", title, "cosine", limits=(-1.05, 1.05))


def share_plot(layers: LayerEntry, key: str) -> str:
    """Share of the weights that the linear branch carries, by layer."""
    series = [("share", layers.far_share, REMOVED, MARKERS[1])]
    title = "Share of the weights that the linear branch carries, by layer"
    return _layer_lines(series, f"{key}-share", title, "share of the weights", limits=(-0.03, 1.03))


def _layer_lines(
    series: Sequence[tuple[str, Sequence[float | None], str, str]],
    name: str,
    title: str,
    unit: str,
    limits: tuple[float, float] | None = None,
) -> str:
    values = [v for _, column, *_ in series for v in column if v is not None and math.isfinite(v)]
    if not values:
        return ""
    with matplotlib.rc_context(STYLE):
        figure, axes = make_axes()
        for legend, column, colour, marker in series:
            drawn = [math.nan if v is None or not math.isfinite(v) else v for v in column]
            axes.plot(range(len(drawn)), drawn, color=colour, marker=marker, label=legend)
        if limits is not None:
            axes.set_ylim(min(limits[0], *values), max(limits[1], *values))
            axes.axhline(0, color=INK, linewidth=1)
        elif min(values) > 0 and max(values) > 10 * min(values):
            log_y(axes, values)
        else:
            axes.set_ylim(bottom=min(0.0, *values))
        axes.set_ylabel(unit)
        layer_axis(axes.xaxis)
        if len(series) > 1:
            legend_above(axes)
        return to_svg(figure, name, title)


def gain_plot(curve: GainCurve, key: str) -> str:
    """What the linear branch is worth while a stage trains: loss without it less loss with it; the loss under it."""
    gain = [value for value in curve.gain if math.isfinite(value)]
    if not gain:
        return ""
    panels = [("linear gain (nats)", curve.gain, REMOVED)]
    if any(math.isfinite(value) for value in curve.loss):
        panels.append(("loss (nats)", curve.loss, STUDENT))
    with matplotlib.rc_context(STYLE):
        figure = make_figure(2.1 * len(panels) + 0.5)
        grid: Any = figure.subplots(len(panels), 1, squeeze=False, sharex=True)
        for axes, (unit, values, colour) in zip(grid[:, 0], panels, strict=True):
            drawn = [value if math.isfinite(value) else math.nan for value in values]
            count = min(len(drawn), len(curve.steps))
            axes.plot(curve.steps[:count], drawn[:count], color=colour, marker="o")
            axes.set_ylabel(unit)
        grid[0, 0].axhline(0, color=INK, linewidth=1)
        grid[-1, 0].set_xlabel("optimizer step")
        grid[-1, 0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        return to_svg(figure, f"{key}-gain-{curve.stage}", f"Gain of the linear branch during {curve.stage}")
