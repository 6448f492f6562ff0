"""Plots of a run: layers' errors, perplexity by position, curves of training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from hybridize.report.drawing import (
    COLOURS,
    INK,
    MARKERS,
    STYLE,
    bucket_centre,
    layer_axis,
    legend_above,
    log_ticks,
    log_y,
    make_axes,
    position_axis,
    to_svg,
)
from hybridize.report.schema import Curve, LayerErrors, Row
from hybridize.report.summary import shorten


def layer_plot(layers: LayerErrors) -> str:
    """Normalised MSE of each layer before and after transfer, on a log scale."""
    with matplotlib.rc_context(STYLE):
        figure, axes = make_axes()
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
        log_y(axes, [*layers.before, *layers.after])
        axes.set_ylabel("MSE / teacher's variance")
        layer_axis(axes.xaxis)
        legend_above(axes)
        return to_svg(figure, "layers", "Normalised error of each layer before and after transfer")


def history_plot(layers: LayerErrors) -> str:
    """Normalised MSE by layer and optimizer step, as a map."""
    assert layers.history is not None
    steps, mse = layers.history.steps, layers.history.mse
    positive = [value for row in mse for value in row if 0 < value < math.inf]
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = make_axes()
        by_layer = [[row[layer] for row in mse] for layer in range(len(mse[0]))]
        norm = LogNorm(min(positive), max(positive)) if positive and min(positive) < max(positive) else None
        image = axes.imshow(
            by_layer, aspect="auto", origin="lower", cmap="viridis", norm=norm, interpolation="nearest"
        )
        ticks = sorted({round(i * (len(steps) - 1) / 4) for i in range(5)})
        axes.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
        axes.set_xlabel("optimizer step")
        layer_axis(axes.yaxis)
        bar = figure.colorbar(image, ax=axes, label="MSE / teacher's variance")
        if norm is not None:
            log_ticks(bar.ax.yaxis, positive)
        return to_svg(figure, "history", "Normalised error of each layer during transfer")


def position_plot(rows: Sequence[Row], text: str) -> str:
    """Perplexity by position in the document, one line a row; both axes logarithmic."""
    with matplotlib.rc_context(STYLE):
        figure, axes = make_axes()
        drawn: list[float] = []
        edges: set[int] = set()
        for i, row in enumerate(rows):
            buckets = [bucket for bucket in row.by_position.get(text, []) if bucket.tokens > 0]
            if not buckets:
                continue
            values = [bucket.perplexity for bucket in buckets]
            axes.plot(
                [bucket_centre(bucket.start, bucket.end) for bucket in buckets],
                values,
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                linestyle="--" if row.kind == "control" else "-",
                label=shorten(row.name),
            )
            drawn += values
            edges |= {bucket.end for bucket in buckets if bucket.end is not None}
        log_y(axes, drawn)
        position_axis(axes, sorted(edges))
        axes.set_ylabel("perplexity")
        legend_above(axes)
        return to_svg(figure, f"position-{text}", f"Perplexity by position on {text}")


def curve_plot(curve: Curve) -> str:
    """Training loss (thin, and smoothed) and validation loss of one stage."""
    with matplotlib.rc_context(STYLE):
        figure, axes = make_axes()
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
            log_y(axes, values)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(curve.unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        legend_above(axes)
        return to_svg(figure, f"curve-{curve.stage}", f"Loss during {curve.stage}")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred mean over about 1/20 of the curve; non-finite values drop out."""
    half = max(1, len(values) // 40)
    means = []
    for i in range(len(values)):
        near = [value for value in values[max(0, i - half) : i + half + 1] if math.isfinite(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means
