"""Measurements at the milestones of a conversion, and `results.json`, from which the report is made.

Each milestone is measured once and kept in `evaluations.json`; resuming does not measure it again.
"""

from __future__ import annotations

import csv
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridize.convert.run_folder import OUTCOME, RunFolder, read_json, versions, write_json
from hybridize.convert.status import Say, status
from hybridize.data import DataSpec
from hybridize.data.batching import Batch, held_out_texts
from hybridize.evals.aggregate import paired_difference
from hybridize.evals.generation import greedy
from hybridize.evals.suite import run_suite
from hybridize.models.families import get_family
from hybridize.models.modeling import HybridForCausalLM
from hybridize.plan.bytes import softmax_spec, state_bytes
from hybridize.recipe import DistillStep, Recipe, SelectStep, TrainingStep, TransferStep

STATE_LENGTHS = (1024, 65536)
BATCH = 4
CONTROL = "teacher, same fine-tuning"
HISTORY_POINTS = 60


class Milestones:
    """The models that a run passes through, each measured the same way."""

    def __init__(
        self, run: RunFolder, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, progress: bool
    ) -> None:
        self.run, self.recipe, self.tokenizer, self.progress = run, recipe, tokenizer, progress
        self.plan = recipe.evaluation
        self.path = run.path / "evaluations.json"
        self.entries: list[dict[str, Any]] = read_json(self.path) or []
        self.asked = self.plan.model_dump(mode="json", exclude={"control"}) if self.plan is not None else None
        self._texts: dict[str, list[Batch]] | None = None
        self._left_out: list[str] = []

    def measured(self, name: str) -> bool:
        """Whether there is nothing left to measure under `name`: the recipe's evaluation, as it is now, has been done."""
        if self.asked is None:
            return True
        return any(entry["name"] == name and entry.get("asked") == self.asked for entry in self.entries)

    def measure(self, name: str, kind: str, model: PreTrainedModel, *, passkeys: bool = True) -> None:
        """Measure `model` under `name`, unless that has been done; without `passkeys` where none could be found anyway."""
        if self.plan is None or self.measured(name):
            return
        with status(self.progress) as say:
            suite = run_suite(
                model,
                self.tokenizer,
                self._held_out(say),
                passkey_lengths=self.plan.passkey if passkeys else (),
                samples=self.plan.samples,
                split_at=self.recipe.first_far_position,
                on_progress=partial(say, f"measuring {name}"),
            )
        shapes = get_family(_base_config(model)).shapes(_base_config(model))
        spec = model.spec if isinstance(model, HybridForCausalLM) else softmax_spec(shapes)
        width = 2 if self.recipe.precision == "bf16" else 4  # also where a student's masters are float32
        continued = greedy(model, self.tokenizer, self.plan.prompts, max_new_tokens=self.plan.new_tokens)
        entry = {
            "name": name,
            "kind": kind,
            "asked": self.asked,
            **suite.to_dict(),
            "state_bytes": {length: state_bytes(spec, shapes, length, width) for length in STATE_LENGTHS},
            "generations": dict(zip(self.plan.prompts, continued, strict=True)),
            "left_out": self._left_out,
        }
        self._add(entry)

    def lend_teacher(self, folder: Path) -> None:
        """Give the control run the teacher's measurements, which are the same."""
        path = folder / "evaluations.json"
        own = [entry for entry in read_json(path) or [] if entry["kind"] != "teacher"]
        write_json(path, [*(entry for entry in self.entries if entry["kind"] == "teacher"), *own])

    def adopt_control(self, folder: Path) -> None:
        """Take over the last milestone of the control run: the teacher with the same fine-tuning."""
        measured = read_json(folder / "evaluations.json") or []
        if measured and not self.measured(CONTROL):
            self._add({**measured[-1], "name": CONTROL, "kind": "control"})

    def _add(self, entry: dict[str, Any]) -> None:
        self.entries = [other for other in self.entries if other["name"] != entry["name"]] + [entry]
        write_json(self.path, self.entries)

    def _held_out(self, say: Say) -> dict[str, list[Batch]]:
        """Test batches by name of the text: each of the recipe's own, then the others."""
        assert self.plan is not None
        if self._texts is None:
            own = self.recipe.data
            specs = own.by_source()
            joined = specs.keys() - {*self.plan.texts} if len(specs) > 1 else set()
            for source in self.plan.texts:
                specs.setdefault(source, DataSpec(source=source, length=own.length))
            self._texts, self._left_out = held_out_texts(
                specs, self.tokenizer, self.plan.rows, BATCH, say, optional=joined
            )
        return self._texts

    def write_results(self, recipe: Recipe, identity: dict[str, Any], notes: list[str]) -> None:
        """`results.json` in the schema of `hybridize.report.schema`."""
        if self.plan is None:
            return
        entries = [entry for entry in self.entries if entry.get("asked") == self.asked]
        stages = [entry for entry in entries if entry["kind"] == "stage"]
        before = {new["name"]: old for old, new in pairwise(stages)}
        rows = [_row(entry, before.get(entry["name"])) for entry in entries]
        outcomes = {
            f"{index}-{step.kind}": read_json(self.run.step(index, step.kind) / OUTCOME)
            for index, step in enumerate(recipe.steps)
        }
        done = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
        units = {
            f"{index}-{step.kind}": _unit(step)
            for index, step in enumerate(recipe.steps)
            if isinstance(step, TrainingStep)
        }
        left_out = dict.fromkeys(note for entry in entries for note in entry.get("left_out", ()))
        results: dict[str, Any] = {
            "version": 1,
            "title": f"{identity['model']['name']} by {recipe.name}",
            "model": identity["model"]["name"],
            "recipe": recipe.name,
            "recipe_text": recipe.to_yaml(),
            "rows": rows,
            "curves": [
                _curve(self.run.path / "steps" / name, name, units[name]) for name in done if name in units
            ],
            "generations": self._generations(),
            "costs": [
                {
                    "stage": name,
                    "seconds": outcome["seconds"],
                    "tokens": outcome["tokens"],
                    "device": outcome["device"],
                    "peak_memory": outcome["peak_memory_bytes"],
                }
                for name, outcome in done.items()
            ],
            "notes": [*notes, *left_out, *_selections(recipe, outcomes)],
            "versions": versions(),
            "fingerprints": {
                "model": identity["model"]["fingerprint"],
                "data": identity["data"]["fingerprint"],
            },
            "commands": read_json(self.run.path / "run.json")["commands"],
        }
        layers = next((_layers(self.run.path / "steps" / name) for name in done if "transfer" in name), None)
        if layers is not None:
            results["layers"] = layers
        selection = next(
            (self.run.path / "steps" / name / "selection.json" for name in done if "select" in name), None
        )
        if selection is not None and selection.is_file():
            results["selection"] = read_json(selection)
        write_json(self.run.path / "results.json", results)

    def _generations(self) -> list[dict[str, str]]:
        teacher = next(entry for entry in self.entries if entry["kind"] == "teacher")
        students = [entry for entry in self.entries if entry["kind"] == "stage"]
        if not students:
            return []
        return [
            {"prompt": prompt, "teacher": text, "student": students[-1]["generations"][prompt]}
            for prompt, text in teacher["generations"].items()
        ]


def _base_config(model: PreTrainedModel) -> Any:
    return model.config.base_config() if isinstance(model, HybridForCausalLM) else model.config


def _row(entry: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """One row of the main table; `before` is the stage to compare with, row of text by row of text."""
    texts = entry["perplexity"]
    keep = ("perplexity", "low", "high", "tokens")
    row: dict[str, Any] = {
        "name": entry["name"],
        "kind": entry["kind"],
        "perplexity": {name: {key: values[key] for key in keep} for name, values in texts.items()},
        "by_position": {
            name: [b for b in values["by_position"] if b["tokens"]] for name, values in texts.items()
        },
        "state_bytes": entry["state_bytes"],
    }
    if before is not None:
        row["change"] = {name: _change(values, before["perplexity"][name]) for name, values in texts.items()}
    if "passkey" in entry:
        row["passkey"] = {
            values["length"]: {key: value for key, value in values.items() if key != "length"}
            for values in entry["passkey"]["lengths"]
        }
    return row


def _change(values: dict[str, Any], before: dict[str, Any]) -> dict[str, float | None]:
    nats, interval = paired_difference(values["row_nll_sums"], before["row_nll_sums"], values["row_tokens"])
    low, high = interval or (None, None)
    return {"nats": nats, "low": low, "high": high}


def _read_csv(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _unit(step: TrainingStep) -> str:
    """What a step's loss is measured in."""
    if not isinstance(step, TransferStep):
        distilled = isinstance(step, DistillStep) or getattr(step, "objective", "ce") == "kl"
        return "KL, nats a token" if distilled else "nats a token"
    objective = step.objective
    terms = {
        "output MSE": objective.output_mse,
        "weight CE": objective.weight_ce,
        "mixer MSE": objective.mixer_mse,
        "hidden L2": objective.hidden_l2,
    }
    return " + ".join(f"{weight:g} x {name}" for name, weight in terms.items() if weight)


def _selections(recipe: Recipe, outcomes: dict[str, Any]) -> list[str]:
    """One sentence for a finished selection."""
    return [
        f"select by rule {step.rule}: layers {', '.join(map(str, outcomes[name]['kept']))} keep softmax"
        for index, step in enumerate(recipe.steps)
        if isinstance(step, SelectStep) and outcomes.get(name := f"{index}-{step.kind}") is not None
    ]


def _curve(folder: Path, name: str, unit: str) -> dict[str, Any]:
    train, validation = _read_csv(folder / "train.csv"), _read_csv(folder / "validation.csv")
    return {
        "stage": name,
        "unit": unit,
        "steps": [int(row["step"]) for row in train],
        "loss": [float(row["loss"]) for row in train],
        "validation_steps": [int(row["step"]) for row in validation],
        "validation": [float(row["loss"]) for row in validation],
    }


def _layers(folder: Path) -> dict[str, Any] | None:
    """Normalised MSE of every layer before and after transfer, and its history thinned to `HISTORY_POINTS`."""
    ends = read_json(folder / "layers.json")
    if ends is None or "after" not in ends:
        return None
    by_step: dict[int, dict[int, float]] = {}
    for row in _read_csv(folder / "layers.csv"):
        if row["metric"] == "layers/nmse":
            by_step.setdefault(int(row["step"]), {})[int(row["layer"])] = float(row["value"])
    every = max(1, -(-len(by_step) // HISTORY_POINTS))
    steps = sorted(by_step)[::every]
    history = {"steps": steps, "mse": [[by_step[s][layer] for layer in sorted(by_step[s])] for s in steps]}
    return {**ends, "history": history}
