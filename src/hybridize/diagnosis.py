"""`hybridize diagnose` as a function: runs in, `report.json` and `report.html` out.

The measurements are `probes.diagnose`, the page is `report`; here they meet.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from hybridize.api import load
from hybridize.convert.drift import drift_note
from hybridize.convert.run_folder import read_json, versions
from hybridize.convert.status import status
from hybridize.data import DataSpec, plain_texts
from hybridize.data.batching import held_out_texts
from hybridize.devices import choose_device
from hybridize.evals.suites import expand
from hybridize.models.teacher import load_teacher, resolve_model
from hybridize.probes.diagnose import QUICK, Plan, Subject
from hybridize.probes.diagnose import diagnose as measure
from hybridize.recipe import load_recipe
from hybridize.report.diagnosis import Diagnosis, RunDiagnosis, save_diagnosis
from hybridize.report.diagnosis_html import render_diagnosis_table, write_diagnosis
from hybridize.train.process import command_line

BATCH = 4
DOCUMENTS = 2000
"""Held-out documents that tasks are made from, at most."""
QUICK_ROWS, QUICK_LENGTH = 3, 512
ALWAYS = "code"
"""The text that is measured beside a run's own."""


def diagnose(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    quick: bool = False,
    texts: Sequence[str] | None = None,
    rows: int | None = None,
    length: int | None = None,
    passkey: Sequence[int] | None = None,
    tasks: int | None = None,
    heads: int | None = None,
    harness: Sequence[str] = (),
    include_path: str | Path | None = None,
    limit: float | None = None,
    scope: str = "mixed",
    window: str | None = None,
    mix: float | None = None,
    logit_scale: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Say whether the linear branch of a hybrid does anything, and where.

    Args:
        runs: run folders, checkpoint folders or teachers; several are put side by side on the same texts.
        out: folder for `report.json` and `report.html`; by default `diagnosis` in the only run's folder, else
            `runs/diagnosis`.
        quick: one text, few rows, no heads, passkeys, tasks or fine-tuned control.
        texts: held-out texts; by default the first run's own and `code`. The first one decides the verdict.
        rows, length: rows of each text and tokens a row; by default 64 rows of 1,024 on a GPU, 8 on a CPU.
        passkey: prompt lengths (default 512, 1024; empty: none). tasks: samples a task (default 50; 0: none).
        heads: rows for the scan head by head (default 2 on a GPU, 0 on a CPU, where a row takes minutes).
        harness: lm-eval suites (`imbalance`, `lolcats`) or tasks; include_path, limit: see `evaluate`.
        scope: `mixed` removes branches in layers that have both; `all` also whole layers of one kind.
        window, mix, logit_scale: see `load`.

    Raises:
        ValueError: naming the argument.
    """
    names = [runs] if isinstance(runs, str | Path) else list(runs)
    if not names:
        raise ValueError("runs is empty; name at least one run or model")
    if scope not in ("mixed", "all"):
        raise ValueError(f"scope is {scope!r}; allowed are 'mixed', 'all'")
    for what, value in (("rows", rows), ("length", length)):
        if value is not None and value < 2:
            raise ValueError(f"{what} is {value}; it must be at least 2")
    plan = replace(QUICK if quick else Plan(), scope=scope)  # type: ignore[arg-type]
    if passkey is not None:
        plan = replace(plan, passkey_lengths=tuple(passkey))
    if tasks is not None:
        plan = replace(plan, tasks=tasks)
    gpu = choose_device(device).type == "cuda"
    if not quick and not gpu:
        plan = replace(plan, layer_rows=4, head_rows=0)
    if heads is not None:
        plan = replace(plan, head_rows=heads)
    if harness:
        expand(list(harness))
        folder_of_tasks = None if include_path is None else str(include_path)
        plan = replace(plan, harness=tuple(harness), include_path=folder_of_tasks, limit=limit)
    rows = rows or (QUICK_ROWS if quick else 64 if gpu else 8)
    length = length or (QUICK_LENGTH if quick else 1024)
    specs = _texts(names[0], texts, length)
    own = specs.keys() - {ALWAYS}
    optional = own if len(own) > 1 and not texts else set()
    entries = []
    with status(progress) as say:
        for name in names:
            subject, tokenizer = _subject(name, device, dtype, window, mix, logit_scale)
            if note := drift_note(Path(name), tokenizer, say):
                subject.notes.append(note)
            if quick:
                subject.tuned = None
            batches, left_out = held_out_texts(
                specs,
                tokenizer,
                rows,
                BATCH,
                say,
                optional=optional,
                count=1 if quick and not texts else None,
            )
            subject.notes += left_out
            specs, optional = {text: specs[text] for text in batches}, set()  # the same for every run
            documents = (
                list(islice(plain_texts(specs[next(iter(batches))], "test"), DOCUMENTS)) if plan.tasks else []
            )
            raw = measure(subject, tokenizer, batches, documents, plan, say)
            entries.append(RunDiagnosis.model_validate(raw))
    diagnosis = Diagnosis(quick=quick, runs=entries, command=command_line(), versions=versions())
    folder = Path(out) if out is not None else _default_folder(names)
    save_diagnosis(diagnosis, folder)
    write_diagnosis(folder)
    return diagnosis


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """The verdicts and the table of models, on the terminal."""
    console = Console()
    console.print(render_diagnosis_table(diagnosis))
    for run in diagnosis.runs:
        console.print(f"{run.name}: {run.verdict.linear}. {run.verdict.sentence}", markup=False)


def _default_folder(names: Sequence[str | Path]) -> Path:
    first = Path(names[0])
    return first / "diagnosis" if len(names) == 1 and first.is_dir() else Path("runs") / "diagnosis"


def _texts(first: str | Path, texts: Sequence[str] | None, length: int) -> dict[str, DataSpec]:
    """Held-out texts by name: those asked for, else the first run's own and `code`."""
    if texts:
        return {text: DataSpec(source=text, length=length) for text in texts}
    own = DataSpec(length=length)
    recipe = Path(first) / "recipe.yaml"
    if recipe.is_file():
        own = load_recipe(recipe).data.model_copy(update={"length": length})
    specs = own.by_source()
    specs.setdefault(ALWAYS, DataSpec(source=ALWAYS, length=length))
    return specs


def _subject(
    name: str | Path,
    device: str | None,
    dtype: str | None,
    window: str | None,
    mix: float | None,
    logit_scale: str | None,
) -> tuple[Subject, PreTrainedTokenizerBase]:
    model, tokenizer = load(name, device=device, dtype=dtype, window=window, mix=mix, logit_scale=logit_scale)
    subject = Subject(str(name), str(name), lambda: model)
    folder = Path(name)
    record = read_json(folder / "run.json") if folder.is_dir() else None
    if record is None:
        return subject, tokenizer
    teacher = record["identity"]["model"]["name"]
    weights = next(model.parameters())
    subject.name, subject.teacher_name = folder.name, teacher
    subject.recipe = (read_json(folder / "results.json") or {}).get("recipe", "")
    subject.gain = list(_gain_curves(folder))
    try:
        source = resolve_model(teacher)
        subject.load_teacher = lambda: load_teacher(source, dtype=weights.dtype, device=weights.device)
    except ValueError as error:
        subject.notes.append(f"the teacher cannot be found ({error})")
    control = folder / "control"
    if (control / "model" / "config.json").is_file():
        subject.tuned = lambda: load(control, device=device, dtype=dtype)[0]
    return subject, tokenizer


def _gain_curves(folder: Path) -> Iterator[dict[str, Any]]:
    """The linear gain during each fine-tuning, as it was logged."""
    for path in sorted(folder.glob("steps/*/validation.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row.get("linear_gain")]
        if rows:
            yield {
                "stage": path.parent.name,
                "steps": [int(row["step"]) for row in rows],
                "gain": [float(row["linear_gain"]) for row in rows],
                "loss": [float(row["loss"]) for row in rows],
            }
