"""One self-contained HTML page, and a table for the terminal, from a run's `results.json`."""

from __future__ import annotations

import os
from pathlib import Path

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from hybridize.report import plots, summary
from hybridize.report.page import Cell, Plot, render, write_page
from hybridize.report.schema import Results, Row, load_results
from hybridize.report.selection_plot import selection_plot


def write_report(run_folder: str | os.PathLike[str]) -> Path:
    """Render `results.json` of a run folder to `report.html` beside it; returns the page's path.

    Raises ValueError where the results are missing or do not fit the schema.
    """
    return write_page(run_folder, render_html(load_results(run_folder)))


def render_html(results: Results) -> str:
    """The page as text. It loads nothing: styles and figures are inside, and there is no script."""
    return render(
        "report.html.j2",
        results=results,
        sentences=summary.stage_sentences(results),
        groups=table_groups(results),
        rows=[(row, table_cells(results, row)) for row in results.rows],
        layer_plots=_layer_plots(results),
        selection_plots=_selection_plots(results),
        position_plots=_position_plots(results),
        curve_plots=_curve_plots(results),
    )


def render_table(results: Results) -> Table:
    """The main table for a terminal; intervals stay in the page and the JSON."""
    # Text objects: a string would be read as markup.
    table = Table(title=Text(results.title))
    table.add_column("model")
    for group, columns in table_groups(results):
        for column in columns:
            table.add_column(Text(f"{group}\n{column}"), justify="right")
    for row in results.rows:
        table.add_row(Text(row.name), *(cell.value for cell in table_cells(results, row)))
    return table


def table_groups(results: Results) -> list[tuple[str, list[str]]]:
    """Headings of the main table: measure, and its columns."""
    groups = [
        ("perplexity", results.texts),
        ("passkey", [summary.format_length(length) for length in results.passkey_lengths]),
        ("state", [summary.format_length(length) for length in results.state_lengths]),
    ]
    return [(group, columns) for group, columns in groups if columns]


def table_cells(results: Results, row: Row) -> list[Cell]:
    """The row's cells in the order of the headings; a dash where nothing was measured."""
    cells = []
    for text in results.texts:
        entry = row.perplexity.get(text)
        cells.append(
            Cell(summary.ABSENT)
            if entry is None
            else Cell(summary.format_number(entry.perplexity), summary.format_interval(entry))
        )
    for length in results.passkey_lengths:
        found = row.passkey.get(length)
        cells.append(
            Cell(summary.ABSENT)
            if found is None
            else Cell(summary.format_percent(found.accuracy), summary.format_interval(found))
        )
    cells += [Cell(summary.format_bytes(row.state_bytes.get(length))) for length in results.state_lengths]
    return cells


def _layer_plots(results: Results) -> list[Plot]:
    if results.layers is None or not results.layers.before:
        return []
    shown = [
        Plot(
            Markup(plots.layer_plot(results.layers)),
            "Mean squared error of each layer's attention output over the variance of the teacher's output, before and "
            "after transfer. 1 means no better than a constant; lower is better.",
        )
    ]
    history = results.layers.history
    if history is not None and history.mse:
        caption = "The same error by layer during transfer. A layer that stays bright did not learn."
        shown.append(Plot(Markup(plots.history_plot(results.layers)), caption))
    return shown


def _selection_plots(results: Results) -> list[Plot]:
    svg = selection_plot(results.selection) if results.selection is not None else ""
    if not svg:
        return []
    caption = (
        "Recall and knowledge with one layer replaced at a time (dashed: the teacher), and the score that the rule gives "
        "each layer. Filled: layers that keep softmax."
    )
    return [Plot(Markup(svg), caption)]


def _position_plots(results: Results) -> list[Plot]:
    texts = dict.fromkeys(text for row in results.rows for text in row.by_position)
    return [
        Plot(
            Markup(plots.position_plot(results.rows, text)),
            f"Perplexity on {text} by the position of the last token read. A model that uses its far past keeps "
            "falling along the document.",
        )
        for text in texts
        if any(bucket.tokens for row in results.rows for bucket in row.by_position.get(text, []))
    ]


def _curve_plots(results: Results) -> list[Plot]:
    return [
        Plot(Markup(plots.curve_plot(curve)), f"{curve.stage}: {curve.unit} by optimizer step.")
        for curve in results.curves
        if curve.steps
    ]
