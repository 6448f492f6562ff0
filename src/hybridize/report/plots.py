"""Plots of a run as inline SVG that follows the page's colours, has a title for screen readers and no outside references."""

from __future__ import annotations

import html
import io
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hybridize.report.schema import Curve, LayerErrors, Row
from hybridize.report.summary import format_length

# Readable on white and on near-black alike (after Okabe and Ito's palette, which stays distinct for the colour-blind; markers differ too).
COLOURS = ("#2a88c8", "#d55e00", "#009e73", "#cc79a7", "#c98a00", "#7f6fd0")
MARKERS = ("o", "s", "^", "D", "v", "P")
# Lines, ticks and text are drawn in this colour and then handed to the page.
INK = "#010203"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hybridize",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "axes.grid": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
# Inches; small, so that the text stays readable where a phone shrinks the figure to its width.
SIZE = (4.5, 3.0)


def layer_plot(layers: LayerErrors) -> str:
    """Normalised MSE of each layer before and after transfer, on a log scale."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        for (name, values), colour, marker in zip(
            (("before", layers.before), ("after", layers.after)),
            (COLOURS[1], COLOURS[0]),
            MARKERS,
            strict=False,
        ):
            axes.plot(range(len(values)), values, color=colour, marker=marker, label=name)
        axes.vlines(
            range(len(layers.before)),
            layers.after,
            layers.before,
            color=INK,
            alpha=0.25,
            linewidth=1,
            zorder=0,
        )
        _log_y(axes, [*layers.before, *layers.after])
        axes.set_xlabel("layer (from 0)")
        axes.set_ylabel("MSE / teacher's variance")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return _svg(figure, "layers", "Normalised error of each layer before and after transfer")


def history_plot(layers: LayerErrors) -> str:
    """Normalised MSE by layer and optimizer step, as a map."""
    assert layers.history is not None
    steps, mse = layers.history.steps, layers.history.mse
    positive = [value for row in mse for value in row if 0 < value < math.inf]
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = _axes()
        by_layer = [[row[layer] for row in mse] for layer in range(len(mse[0]))]
        norm = LogNorm(min(positive), max(positive)) if positive and min(positive) < max(positive) else None
        image = axes.imshow(
            by_layer, aspect="auto", origin="lower", cmap="viridis", norm=norm, interpolation="nearest"
        )
        ticks = sorted({round(i * (len(steps) - 1) / 4) for i in range(5)})
        axes.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("layer (from 0)")
        bar = figure.colorbar(image, ax=axes, label="MSE / teacher's variance")
        if norm is not None:
            _log_ticks(bar.ax.yaxis, positive)
        return _svg(figure, "history", "Normalised error of each layer during transfer")


def position_plot(rows: Sequence[Row], text: str) -> str:
    """Perplexity by position in the document, one line a row; both axes logarithmic."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        drawn: list[float] = []
        edges: set[int] = set()
        for i, row in enumerate(rows):
            buckets = [bucket for bucket in row.by_position.get(text, []) if bucket.tokens > 0]
            if not buckets:
                continue
            ends = [bucket.end or 2 * max(bucket.start, 1) for bucket in buckets]
            values = [bucket.perplexity for bucket in buckets]
            axes.plot(
                [
                    math.sqrt(max(bucket.start, end / 4) * end)
                    for bucket, end in zip(buckets, ends, strict=True)
                ],
                values,
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                linestyle="--" if row.kind == "control" else "-",
                label=row.name,
            )
            drawn += values
            edges |= {end for bucket, end in zip(buckets, ends, strict=True) if bucket.end is not None}
        axes.set_xscale("log", base=2)
        if edges:
            axes.set_xticks(sorted(edges), [format_length(edge) for edge in sorted(edges)])
        axes.xaxis.set_minor_locator(NullLocator())
        _log_y(axes, drawn)
        axes.set_xlabel("position in the document (tokens)")
        axes.set_ylabel("perplexity")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return _svg(figure, f"position-{text}", f"Perplexity by position on {text}")


def curve_plot(curve: Curve) -> str:
    """Training loss (thin, and smoothed) and validation loss of one stage."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        smooth = _smoothed(curve.loss)
        axes.plot(curve.steps, curve.loss, color=COLOURS[0], alpha=0.3, linewidth=1)
        axes.plot(curve.steps, smooth, color=COLOURS[0], label="training, smoothed")
        if curve.validation:
            axes.plot(
                curve.validation_steps, curve.validation, color=COLOURS[1], marker="o", label="validation"
            )
        values = [*curve.loss, *curve.validation]
        finite = [value for value in values if 0 < value < math.inf]
        if finite and max(finite) > 5 * min(finite):
            _log_y(axes, values)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(curve.unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return _svg(figure, f"curve-{curve.stage}", f"Loss during {curve.stage}")


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _log_y(axes: Axes, values: Sequence[float]) -> None:
    """A log axis with plain numbers, where anything can be drawn on one; few decades get the digits between."""
    drawable = [value for value in values if 0 < value < math.inf]
    if not drawable:
        return
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, drawable)


def _log_ticks(axis: Axis, values: Sequence[float]) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 1000 * min(values) else (1,)))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 1e7 else f"{value:.0e}")
    )
    axis.set_minor_locator(NullLocator())


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred mean over about 1/20 of the curve; non-finite values drop out."""
    half = max(1, len(values) // 40)
    means = []
    for i in range(len(values)):
        near = [value for value in values[max(0, i - half) : i + half + 1] if math.isfinite(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an `<svg>` element: no prologue or metadata, ids of its own, ink in the page's colour."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=").replace(INK, "currentColor")
    # Several figures share a page: their ids must differ, whatever characters a text's or a stage's name has.
    prefix = f"f{zlib.crc32(name.encode()):08x}"
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    head = re.match(r"<svg[^>]*>", svg)
    assert head
    view_box = re.search(r'viewBox="[^"]*"', head.group())
    assert view_box
    label = html.escape(title, quote=True)
    return (
        f'<svg {view_box.group()} role="img" aria-label="{label}"><title>{label}</title>{svg[head.end() :]}'
    )
