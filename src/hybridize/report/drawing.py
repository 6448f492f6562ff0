"""What every plot shares: colours that hold on white and on near-black, axes, and the figure as an inline `<svg>`."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

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
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "axes.grid": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
T = TypeVar("T")
# Inches; small, so that the text stays readable where a phone shrinks the figure to its width.
SIZE = (4.5, 3.0)


def make_figure(height: float = SIZE[1]) -> Figure:
    """An empty figure of the shared width, `height` inches high; call it, and what draws on it, inside `STYLE`."""
    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def make_axes() -> tuple[Figure, Axes]:
    figure = make_figure()
    return figure, figure.add_subplot()


def legend_columns(names: Sequence[str]) -> int:
    """Two columns where the names are short enough to stand side by side."""
    return 2 if max(map(len, names), default=0) <= 26 else 1


def legend_above(axes: Axes) -> None:
    _, names = axes.get_legend_handles_labels()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=legend_columns(names))


def layer_axis(axis: Axis, label: str = "layer (from 0)") -> None:
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_label_text(label)


def thinned(ticks: Sequence[T], most: int) -> list[T]:
    """At most `most` of the ticks, evenly spread, the last among them: more would touch."""
    step = math.ceil(len(ticks) / most)
    return [tick for i, tick in enumerate(ticks) if (len(ticks) - 1 - i) % step == 0]


def position_axis(axes: Axes, edges: Sequence[int], label: str = "position in the document (tokens)") -> None:
    """A logarithmic axis of positions with a tick at each bucket's end."""
    axes.set_xscale("log", base=2)
    if edges:
        shown = thinned(sorted(edges), 9)
        axes.set_xticks(shown, [format_length(edge) for edge in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def bucket_centre(start: int, end: int | None) -> float:
    """Where a bucket of positions is drawn on a logarithmic axis; an open bucket counts as long as what precedes it."""
    last = end or 2 * max(start, 1)
    return math.sqrt(max(start, last / 4) * last)


def log_y(axes: Axes, values: Sequence[float]) -> None:
    """A log axis with plain numbers, where anything can be drawn on one; few decades get the digits between."""
    drawable = [value for value in values if 0 < value < math.inf]
    if not drawable:
        return
    axes.set_yscale("log")
    log_ticks(axes.yaxis, drawable)


def log_ticks(axis: Axis, values: Sequence[float]) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 1000 * min(values) else (1,)))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 1e7 else f"{value:.0e}")
    )
    axis.set_minor_locator(NullLocator())


def to_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an `<svg>` element: no prologue or metadata, ids of its own, ink in the page's colour.

    `name` must differ between the figures of a page; `title` is what a screen reader says.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Text is written as text: that the measuring font lacks a name's letters costs a little room, not the letters.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=").replace(INK, "currentColor")
    # Images are called by their pixels, so that equal ones would share an id; nothing refers to them.
    svg = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", svg)
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
