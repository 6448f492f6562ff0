"""Maps of a diagnosis: heads, the far share by position, passkeys by length and depth.

Every function returns an inline `<svg>`, or an empty string where there is nothing to draw; blank cells were not measured,
or have no two branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

from hybridize.report.diagnosis import LayerEntry, ModelEntry, RunDiagnosis
from hybridize.report.diagnosis_text import ablations, label, student_of, teacher_of
from hybridize.report.drawing import STYLE, layer_axis, make_axes, make_figure, thinned, to_svg
from hybridize.report.summary import format_length, shorten

MAP_STYLE = {**STYLE, "axes.grid": False}
MOST_DEPTHS = 11  # as many fit side by side with their counts


def heads_plot(layers: LayerEntry, key: str) -> str:
    """Rise of the loss when one head's linear branch is removed: layers from the bottom up, heads from left to right."""
    rows = [list(row) if row is not None else [] for row in layers.heads or []]
    width = max((len(row) for row in rows), default=0)
    grid = _grid([row + [math.nan] * (width - len(row)) for row in rows])
    if not np.isfinite(grid).any():
        return ""
    with matplotlib.rc_context(MAP_STYLE):
        figure, axes = make_axes()
        low = min(0.0, float(np.nanmin(grid)))
        high = float(np.nanmax(grid))
        image = axes.imshow(
            grid, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest", vmin=low,
            vmax=high if high > low else low + 1,
        )  # fmt: skip
        layer_axis(axes.yaxis)
        layer_axis(axes.xaxis, "head (from 0)")
        figure.colorbar(image, ax=axes, label="rise of the loss (nats a token)")
        return to_svg(
            figure,
            f"{key}-heads",
            "Rise of the loss when one head's linear branch is removed, by layer and head",
        )


def share_map(layers: LayerEntry, key: str) -> str:
    """Share of the weights that the linear branch carries, by layer and position of the query."""
    spans = layers.far_share_by_position
    depth = max((len(span.share) for span in spans), default=0)
    columns = [list(span.share) + [None] * (depth - len(span.share)) for span in spans]
    grid = _grid(columns).T if columns and depth else np.empty((0, 0))
    if not np.isfinite(grid).any():
        return ""
    with matplotlib.rc_context(MAP_STYLE):
        figure, axes = make_axes()
        image = axes.imshow(
            grid, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest", vmin=0, vmax=1
        )
        # Ticks stand on the edges between columns: a column is a range of positions.
        edges = [spans[0].start, *(span.end for span in spans)]
        named = [(i - 0.5, format_length(edge)) for i, edge in enumerate(edges) if edge is not None]
        named = thinned(named, 7)
        axes.set_xticks([x for x, _ in named], [name for _, name in named])
        layer_axis(axes.yaxis)
        axes.set_xlabel("position of the query (tokens)")
        figure.colorbar(image, ax=axes, label="share of the weights")
        return to_svg(
            figure, f"{key}-share-map", "Share of the weights of the linear branch by layer and position"
        )


def passkey_plot(run: RunDiagnosis, key: str) -> str:
    """Keys found by prompt length and depth, one panel a model."""
    candidates = [teacher_of(run), student_of(run), *ablations(run, "softmax_only")]
    shown = [model for model in candidates if model is not None and model.passkey_cells]
    if not shown:
        return ""
    lengths = sorted({cell.length for model in shown for cell in model.passkey_cells})
    depths = sorted({cell.depth for model in shown for cell in model.passkey_cells})
    with matplotlib.rc_context(MAP_STYLE):
        figure = make_figure(0.5 + len(shown) * (0.38 + 0.26 * len(lengths)))
        grid: Any = figure.subplots(len(shown), 1, squeeze=False, sharex=True)
        for axes, model in zip(grid[:, 0], shown, strict=True):
            _draw_passkeys(axes, model, lengths, depths)
            axes.set_title(shorten(label(model), 40), loc="left", fontsize=10)
        step = math.ceil(len(depths) / MOST_DEPTHS)
        ticks = range(0, len(depths), step)
        grid[-1, 0].set_xticks(ticks, [f"{100 * depths[tick]:.0f}" for tick in ticks])
        grid[-1, 0].set_xlabel("depth of the key in the prompt (%)")
        figure.supylabel("prompt length (tokens)", fontsize=10)
        return to_svg(figure, f"{key}-passkey", "Passkeys found by prompt length and depth")


def _draw_passkeys(axes: Any, model: ModelEntry, lengths: Sequence[int], depths: Sequence[float]) -> None:
    shares = np.full((len(lengths), len(depths)), np.nan)
    for cell in model.passkey_cells:
        if cell.samples == 0:
            continue
        y, x = lengths.index(cell.length), depths.index(cell.depth)
        shares[y, x] = cell.correct / cell.samples
        axes.text(
            x, y, f"{cell.correct}/{cell.samples}" if len(depths) <= MOST_DEPTHS else str(cell.correct), fontsize=7,
            ha="center", va="center", color="#000000" if shares[y, x] > 0.55 else "#ffffff",
        )  # fmt: skip
    axes.imshow(shares, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0, vmax=1)
    axes.set_yticks(range(len(lengths)), [format_length(length) for length in lengths])
    axes.tick_params(length=0)


def _grid(rows: Sequence[Sequence[float | None]]) -> Any:
    """A 2-D array; what is missing or infinite is NaN, which is drawn blank."""
    values = np.array([[math.nan if v is None else v for v in row] for row in rows], dtype=float)
    values = values.reshape(len(rows), -1) if rows else np.empty((0, 0))
    return np.where(np.isfinite(values), values, np.nan)
