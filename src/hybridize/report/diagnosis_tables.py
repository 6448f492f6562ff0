"""Tables of a diagnosis as plain cells: the models of one run, several runs side by side, what a text needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hybridize.report.diagnosis import Diagnosis, Interval, ModelEntry, RunDiagnosis
from hybridize.report.diagnosis_text import (
    LINEAR,
    REMOVALS,
    WINDOW,
    ablations,
    controls,
    nats_bounds,
    student_of,
    teacher_of,
    top_layers,
)
from hybridize.report.page import Cell
from hybridize.report.summary import (
    ABSENT,
    format_bytes,
    format_interval,
    format_length,
    format_nats,
    format_number,
    format_percent,
    shorten,
)

NOTHING = Cell(ABSENT)


@dataclass(frozen=True)
class Column:
    """A heading with, in small print, what was counted (empty notes are left out); and how a row's cell is made."""

    head: str
    notes: list[str]
    cell: Callable[[ModelEntry], Cell]


@dataclass(frozen=True)
class Group:
    head: str
    columns: list[Column] = field(default_factory=list)


def model_groups(run: RunDiagnosis) -> list[Group]:
    """Columns of a run's models by measure; those that nobody has are left out."""
    groups = [_text_group(run, text) for text in _names(model.texts for model in run.models)]
    groups += [_passkey_group(run), _task_group(run), _state_group(run)]
    return [group for group in groups if group.columns]


def row_note(model: ModelEntry) -> str:
    """Small print under a model's name: what it is, unless the name says so."""
    if model.kind == "control":
        return "control"
    if model.kind != "ablation":
        return "" if model.kind in model.name.lower() else model.kind
    parts = [] if model.mode in model.name else [model.mode]
    if model.removal and model.removal not in model.name:
        parts.append(f"removal: {model.removal}")
    return ", ".join(parts)


def _names(tables: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def counted(counts: Iterable[int], unit: str) -> str:
    """65,472 tokens; the range where the models differ; empty where nothing was counted."""
    found = sorted({count for count in counts if count > 0})
    if not found:
        return ""
    return f"{found[0]:,} to {found[-1]:,} {unit}" if len(found) > 1 else f"{found[0]:,} {unit}"


def has_delta(run: RunDiagnosis, text: str) -> bool:
    """Whether any model but the student itself was compared with the student."""
    return any(
        model.texts[text].far_delta is not None
        for model in run.models
        if model.kind != "student" and text in model.texts
    )


def _text_group(run: RunDiagnosis, text: str) -> Group:
    entries = [model.texts[text] for model in run.models if text in model.texts]

    def far(model: ModelEntry) -> Cell:
        if model.kind == "student" and text in model.texts:
            return Cell("reference")
        return _far(model, text)

    columns = [
        Column(
            "perplexity",
            [counted((e.perplexity.tokens for e in entries), "tokens")],
            partial(_perplexity, text=text),
        )
    ]
    if has_delta(run, text):
        columns.append(Column("far Δ", [counted((e.far_tokens for e in entries), "tokens")], far))
    return Group(text, columns)


def _passkey_group(run: RunDiagnosis) -> Group:
    def column(length: int) -> Column:
        samples = [model.passkey[length].samples for model in run.models if length in model.passkey]
        return Column(format_length(length), [counted(samples, "keys")], partial(_passkey, length=length))

    lengths = sorted({length for model in run.models for length in model.passkey})
    return Group("passkey", [column(length) for length in lengths])


def _task_group(run: RunDiagnosis) -> Group:
    names = _names(model.tasks for model in run.models)

    def column(name: str) -> Column:
        entries = [model.tasks[name] for model in run.models if name in model.tasks]
        notes = [counted((entry.samples for entry in entries), "questions")]
        chance = next((entry.chance for entry in entries if entry.chance is not None), None)
        if chance is not None:
            notes.append(f"chance {format_percent(chance)}")
        if entries[0].reach != "mixed":
            notes.append(entries[0].reach)

        def cell(model: ModelEntry) -> Cell:
            entry = model.tasks.get(name)
            if entry is None:
                return NOTHING
            return Cell(
                format_points(entry.accuracy), f"{format_points(entry.low)} to {format_points(entry.high)}"
            )

        return Column(name, notes, cell)

    columns = [column(name) for name in names]
    if len(names) > 1:
        columns.append(Column("mean", [f"of {len(names)} tasks"], lambda model: _mean(model, names)))
    return Group("tasks", columns)


def _mean(model: ModelEntry | None, names: Sequence[str]) -> Cell:
    if model is None or not names or any(name not in model.tasks for name in names):
        return NOTHING
    return Cell(format_points(sum(model.tasks[name].accuracy for name in names) / len(names)))


def format_points(share: float) -> str:
    """A share of right answers in per cent with one decimal: differences of a point matter here."""
    return f"{100 * share:.1f}%"


def _state_group(run: RunDiagnosis) -> Group:
    lengths = sorted({length for model in run.models for length in model.state_bytes})
    return Group("state", [Column(format_length(n), [], partial(_state, length=n)) for n in lengths])


def nats_cell(interval: Interval | None) -> Cell:
    return NOTHING if interval is None else Cell(format_nats(interval.value), nats_bounds(interval))


@dataclass(frozen=True)
class SideRow:
    """One measure, and its cell for each run."""

    measure: str
    cells: list[Cell]


def side_by_side(diagnosis: Diagnosis) -> list[tuple[str, list[SideRow]]]:
    """Measures that compare runs, in groups: verdicts and where; per text what the linear branch and the controls are worth;
    keys; state. Measures that no run has are left out."""
    runs = diagnosis.runs

    def row(measure: str, cell: Callable[[RunDiagnosis], Cell]) -> SideRow:
        return SideRow(measure, [cell(run) for run in runs])

    groups = [
        (
            "verdict",
            [
                row("linear branch", lambda run: Cell(LINEAR[run.verdict.linear].word)),
                row("window", lambda run: Cell(WINDOW[run.verdict.window])),
                row("most used in layers", lambda run: Cell(top_layers(run) or ABSENT)),
            ],
        )
    ]
    for text in diagnosis.texts:
        groups.append((text, _side_text(diagnosis, text)))
    length = max((n for run in runs for model in run.models for n in model.passkey), default=0)
    keys = [row("student", lambda run: _passkey(student_of(run), length))]
    keys += [
        row(f"softmax_only, {removal}", partial(_removed_passkey, removal=removal, length=length))
        for removal in REMOVALS
    ]
    keys.append(row("teacher", lambda run: _passkey(teacher_of(run), length)))
    groups.append((f"passkey at {format_length(length)}", keys))
    common = [
        name
        for name in _names(model.tasks for run in runs for model in run.models)
        if all(name in model.tasks for run in runs if (model := student_of(run)) is not None)
    ]
    tasks = [row("student", lambda run: _mean(student_of(run), common))]
    tasks += [
        row(f"softmax_only, {removal}", partial(_removed_mean, removal=removal, names=common))
        for removal in REMOVALS
    ]
    tasks.append(row("teacher", lambda run: _mean(teacher_of(run), common)))
    groups.append((f"tasks, mean of {shorten(', '.join(common), 80)}", tasks))
    context = max((n for run in runs for model in run.models for n in model.state_bytes), default=0)
    state = [
        row("student", lambda run: _state(student_of(run), context)),
        row("teacher", lambda run: _state(teacher_of(run), context)),
    ]
    groups.append((f"state at {format_length(context)}", state))
    kept = [(group, [r for r in rows if any(cell != NOTHING for cell in r.cells)]) for group, rows in groups]
    return [(group, rows) for group, rows in kept if rows]


def _side_text(diagnosis: Diagnosis, text: str) -> list[SideRow]:
    runs = diagnosis.runs
    rows = [SideRow("student: perplexity", [_perplexity(student_of(run), text) for run in runs])]
    rows += [
        SideRow(f"softmax_only, {removal}: far Δ", [_far(_removed(run, removal), text) for run in runs])
        for removal in REMOVALS
    ]
    for name in dict.fromkeys(model.name for run in runs for model in controls(run)):
        found = [next((m for m in controls(run) if m.name == name), None) for run in runs]
        rows.append(SideRow(f"{shorten(name, 60)}: far Δ", [_far(model, text) for model in found]))
    return rows


def _removed(run: RunDiagnosis, removal: str) -> ModelEntry | None:
    """The student without its linear branch; one entry serves both removals where they are the same."""
    found = ablations(run, "softmax_only")
    return next((model for model in found if model.removal in (removal, None)), None)


def _removed_passkey(run: RunDiagnosis, removal: str, length: int) -> Cell:
    return _passkey(_removed(run, removal), length)


def _removed_mean(run: RunDiagnosis, removal: str, names: Sequence[str]) -> Cell:
    return _mean(_removed(run, removal), names)


def _perplexity(model: ModelEntry | None, text: str) -> Cell:
    if model is None or text not in model.texts:
        return NOTHING
    entry = model.texts[text].perplexity
    return Cell(format_number(entry.perplexity), format_interval(entry))


def _far(model: ModelEntry | None, text: str) -> Cell:
    if model is None or text not in model.texts:
        return NOTHING
    return nats_cell(model.texts[text].far_delta)


def _passkey(model: ModelEntry | None, length: int) -> Cell:
    found = model.passkey.get(length) if model is not None else None
    return NOTHING if found is None else Cell(format_percent(found.accuracy), format_interval(found))


def _state(model: ModelEntry | None, length: int) -> Cell:
    return NOTHING if model is None else Cell(format_bytes(model.state_bytes.get(length)))


def need_rows(run: RunDiagnosis) -> list[tuple[str, list[Cell]]]:
    """What each text needs of its far past: context, need, tokens, share of tokens helped, threshold."""
    return [
        (
            text,
            [
                Cell(f"{format_length(entry.context)}"),
                nats_cell(entry.need),
                Cell(f"{entry.tokens:,}"),
                Cell(format_points(entry.useful_share), f"by at least {entry.threshold:g} nats"),
            ],
        )
        for text, entry in run.need.items()
    ]
