"""The page and the terminal table of `hybridize diagnose`, from its `report.json`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from hybridize.report import diagnosis_maps as maps
from hybridize.report import diagnosis_plots as plots
from hybridize.report import diagnosis_tables as tables
from hybridize.report.diagnosis import Diagnosis, GainCurve, RunDiagnosis, load_diagnosis
from hybridize.report.diagnosis_text import (
    LINEAR,
    MODES,
    REMOVALS,
    WINDOW,
    Answer,
    figure_rows,
    student_of,
    threshold_rows,
    where,
)
from hybridize.report.page import Cell, Plot, render, write_page
from hybridize.report.summary import shorten

TERMINAL_COLOURS = {"balanced": "green", "weak": "yellow", "bypassed": "red", "inconclusive": "blue"}


@dataclass(frozen=True)
class RunView:
    """One run and what its section shows; `where` names the layers that use the branch most, or is empty."""

    run: RunDiagnosis
    anchor: str
    answer: Answer
    window: str
    where: str
    plots: dict[str, list[Plot]]

    @property
    def groups(self) -> list[tables.Group]:
        return tables.model_groups(self.run)

    @property
    def rows(self) -> list[tuple[str, str, str, list[Cell]]]:
        """Kind, name, note and cells of each model."""
        columns = [column for group in self.groups for column in group.columns]
        return [
            (model.kind, model.name, tables.row_note(model), [column.cell(model) for column in columns])
            for model in self.run.models
        ]

    @property
    def has_delta(self) -> bool:
        return any(tables.has_delta(self.run, text) for text in _texts(self.run))

    @property
    def reasons(self) -> list[str]:
        return [reason for reason in self.run.verdict.reasons if reason != self.run.verdict.sentence]

    @property
    def figures(self) -> list[tuple[str, list[Cell]]]:
        """What the verdict rests on; the column of bounds only where a figure has one."""
        rows = figure_rows(self.run.verdict)
        bounded = any(name in self.run.verdict.thresholds for name in self.run.verdict.figures)
        return [(name, cells if bounded else cells[:1]) for name, cells in rows]

    @property
    def thresholds(self) -> list[tuple[str, list[Cell]]]:
        return threshold_rows(self.run.verdict)

    @property
    def need(self) -> list[tuple[str, list[Cell]]]:
        return tables.need_rows(self.run)

    @property
    def modes(self) -> dict[str, str]:
        """The modes that the run's ablations are in, in plain words."""
        found = {model.mode for model in self.run.models if model.kind == "ablation"}
        return {mode: words for mode, words in MODES.items() if mode in found}

    @property
    def removals(self) -> dict[str, str]:
        found = {model.removal for model in self.run.models}
        return {removal: words for removal, words in REMOVALS.items() if removal in found}


def write_diagnosis(folder: str | os.PathLike[str]) -> Path:
    """Render `report.json` of a folder to `report.html` beside it; returns the page's path.

    Raises ValueError where `report.json` is missing or does not fit the schema.
    """
    return write_page(folder, render_diagnosis_html(load_diagnosis(folder)))


def render_diagnosis_html(diagnosis: Diagnosis) -> str:
    """The page as text: verdicts first, then, for several runs, the table of runs, then a section for each run."""
    views = [_view(run, i) for i, run in enumerate(diagnosis.runs, start=1)]
    side = tables.side_by_side(diagnosis) if len(views) > 1 else []
    return render(
        "diagnosis.html.j2",
        diagnosis=diagnosis,
        title=_title(diagnosis),
        views=views,
        side=side,
    )


def render_diagnosis_table(diagnosis: Diagnosis) -> Table:
    """For a terminal: the models of one run, or several runs side by side; intervals stay in the page and the JSON."""
    return _models_table(diagnosis.runs[0]) if len(diagnosis.runs) == 1 else _runs_table(diagnosis)


def _runs_table(diagnosis: Diagnosis) -> Table:
    # Text objects: a string would be read as markup.
    table = Table(title=Text(_title(diagnosis)))
    table.add_column("measure", overflow="fold")
    for run in diagnosis.runs:
        table.add_column(Text(shorten(run.name, 40)), justify="right", overflow="fold")
    for group, rows in tables.side_by_side(diagnosis):
        if group != "verdict":
            table.add_row(Text(shorten(group, 40), style="bold"))
        for row in rows:
            table.add_row(Text(row.measure), *(Text(cell.value) for cell in row.cells))
        table.add_section()
    return table


def _models_table(run: RunDiagnosis) -> Table:
    """Every text; of keys and state the longest length, of tasks the mean, so that the table fits a terminal."""
    answer = LINEAR[run.verdict.linear]
    style = f"bold {TERMINAL_COLOURS.get(run.verdict.linear, 'bright_black')}"
    title = Text.assemble(f"{shorten(run.name, 60)}: ", (answer.word.lower(), style), f", {answer.plain}")
    table = Table(title=title, caption=Text(run.verdict.sentence))
    table.add_column("model", overflow="fold")
    texts = set(_texts(run))
    columns = []
    for group in tables.model_groups(run):
        for column in group.columns if group.head in texts else group.columns[-1:]:
            columns.append(column)
            table.add_column(
                Text(f"{shorten(group.head)}\n{shorten(column.head)}"), justify="right", overflow="fold"
            )
    for model in run.models:
        note = tables.row_note(model)
        name = shorten(model.name, 40)
        name = f"{name} ({note})" if note else name
        table.add_row(Text(name), *(Text(column.cell(model).value) for column in columns))
    return table


def _title(diagnosis: Diagnosis) -> str:
    if len(diagnosis.runs) == 1:
        return f"Diagnosis of {shorten(diagnosis.runs[0].name, 60)}"
    return f"Diagnosis of {len(diagnosis.runs)} runs"


def _view(run: RunDiagnosis, number: int) -> RunView:
    anchor = f"run-{number}"
    plots_by_section = {
        "ablations": _ablations(run, anchor),
        "layers": _layers(run, anchor),
        "need": _need(run, anchor),
        "positions": _positions(run, anchor),
        "passkeys": _passkeys(run, anchor),
        "gain": _gain(run.gain, anchor),
    }
    return RunView(
        run=run,
        anchor=anchor,
        answer=LINEAR[run.verdict.linear],
        window=WINDOW[run.verdict.window],
        where=where(run),
        plots=plots_by_section,
    )


def _drawn(*pairs: tuple[str, str]) -> list[Plot]:
    """The plots that have something to show."""
    return [Plot(Markup(svg), caption) for svg, caption in pairs if svg]


def _texts(run: RunDiagnosis) -> list[str]:
    return list(dict.fromkeys(text for model in run.models for text in model.texts))


def _ablations(run: RunDiagnosis, key: str) -> list[Plot]:
    return _drawn(
        *(
            (
                plots.ablation_plot(run, text, key),
                f"{shorten(text, 60)}: how much worse than the student each model predicts the far-eligible tokens. softmax_only is the "
                "student without its linear branch: a bar whose interval touches 0 means that nothing measurable was lost. "
                "A teacher left of 0 is better than the student; one right of 0 is beaten by it. Thin lines are 95% intervals.",
            )
            for text in _texts(run)
        )
    )


def _layers(run: RunDiagnosis, key: str) -> list[Plot]:
    layers = run.layers
    if layers is None:
        return []
    measured = f"{shorten(layers.text, 60)}, {layers.tokens:,} far-eligible tokens, removal: {layers.removal}"
    return _drawn(
        (
            plots.loss_rise_plot(layers, key),
            f"Rise of the loss when one layer's linear branch alone is removed ({measured}). Higher means that the layer's linear branch does more. Filled: "
            "the 95% interval lies above 0; even where nothing is used, one in forty would. Numbers name the largest.",
        ),
        (
            maps.heads_plot(layers, key),
            f"The same, head by head ({measured}). Bright: removing this head's linear branch alone costs most. Blank: the "
            "layer does not have both branches.",
        ),
        (
            plots.share_plot(layers, key),
            "Share of the attention weights that the linear branch carries. Near 0, nearly everything goes to the window.",
        ),
        (
            maps.share_map(layers, key),
            "The same share by layer and position of the query. A branch that reads the far past should carry more as there "
            "is more of it: rows grow brighter to the right.",
        ),
        (
            plots.norms_plot(layers, key),
            "Size of what each branch puts into the output. A linear branch far below the window can hardly be heard; a "
            "large one may still say nothing useful.",
        ),
        (
            plots.cosine_plot(layers, key),
            "Cosine between the two branches' outputs. Near 1 they say the same; near 0 the linear branch adds something of "
            "its own; below 0 they work against each other.",
        ),
    )


def _need(run: RunDiagnosis, key: str) -> list[Plot]:
    return _drawn(
        *(
            (
                plots.need_plot(run, text, key),
                f"{shorten(text, 60)}: a linear branch that works is missed on the tokens that the far past helps the teacher to predict "
                "(filled), more than on the others (outlined). Bars right of 0: worse than the student.",
            )
            for text in _texts(run)
        )
    )


def _positions(run: RunDiagnosis, key: str) -> list[Plot]:
    line = (
        f" Dotted line: the first position with a key beyond the window ({run.far_from:,}); before it nothing can be lost."
        if run.far_from
        else ""
    )
    compared = student_of(run) is not None and len(run.models) > 1
    below = (
        ", and below it the same less the student's. Where softmax_only rises above 0, the linear branch helps."
        if compared
        else "."
    )
    return _drawn(
        *(
            (
                plots.position_plot(run, text, key),
                f"{shorten(text, 60)}: loss by position in the document{below}{line}",
            )
            for text in _texts(run)
        )
    )


def _passkeys(run: RunDiagnosis, key: str) -> list[Plot]:
    return _drawn(
        (
            maps.passkey_plot(run, key),
            "Keys found of keys hidden, by prompt length and depth (0: at the start of the prompt, farthest back; 100: at "
            "its end). Bright: found. If the student is no brighter than softmax_only, its linear branch "
            "recalls nothing.",
        )
    )


def _gain(curves: list[GainCurve], key: str) -> list[Plot]:
    return _drawn(
        *(
            (
                plots.gain_plot(curve, f"{key}-{i}"),
                f"{shorten(curve.stage, 60)}: loss without the linear branch less loss with it, on a small validation slice. "
                "A line that sinks to 0 while the loss falls is a branch that training bypasses.",
            )
            for i, curve in enumerate(curves)
        )
    )
