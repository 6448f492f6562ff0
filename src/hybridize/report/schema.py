"""What `results.json` of a run folder holds: the only thing a report is made from.

Every part but the title, the model and the rows may be missing; the report then leaves its section out. Entries are
built from plain values or straight from objects with the same attribute names:
`PerplexityEntry.model_validate(evals.perplexity(...))`, `PasskeyEntry.model_validate(accuracy)`,
`PositionEntry.model_validate(bucket)`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybridize.atomic import atomic_write

RESULTS_FILE = "results.json"


class Entry(BaseModel):
    """Unknown keys are refused; infinities and NaN survive in valid JSON, as strings."""

    model_config = ConfigDict(
        extra="forbid", from_attributes=True, ser_json_inf_nan="strings", protected_namespaces=()
    )


Kind = TypeVar("Kind", bound=Entry)


class PerplexityEntry(Entry):
    """Perplexity of one model on one text, with a 95% interval (absent for a single row of text)."""

    perplexity: float
    low: float | None = None
    high: float | None = None
    tokens: int


class ChangeEntry(Entry):
    """Change of the mean nll in nats a token against the row before, on the same text row by row, with its 95% interval
    (absent for a single row of text). Negative is better."""

    nats: float
    low: float | None = None
    high: float | None = None


class PositionEntry(Entry):
    """Perplexity of predictions at positions `start <= p < end` (`end` absent: open)."""

    start: int
    end: int | None = None
    perplexity: float
    tokens: int


class PasskeyEntry(Entry):
    """Share of keys found at one prompt length, in 0..1, with Wilson's 95% interval."""

    accuracy: float
    low: float
    high: float
    samples: int


class Row(Entry):
    """One model of the main table.

    kind: `teacher`; `stage`, a state of the student in the order of the steps; or `control`, for example the teacher
        after the same fine-tuning, which shows what the text alone buys.
    perplexity, by_position, change: by name of the text; `change` compares a stage with the stage before it. passkey: by prompt length in tokens. state_bytes: what generation
    keeps for one sequence (keys, values, linear states), in bytes by context length in tokens.
    """

    name: str
    kind: Literal["teacher", "stage", "control"] = "stage"
    perplexity: dict[str, PerplexityEntry] = Field(default_factory=dict)
    passkey: dict[int, PasskeyEntry] = Field(default_factory=dict)
    state_bytes: dict[int, int] = Field(default_factory=dict)
    by_position: dict[str, list[PositionEntry]] = Field(default_factory=dict)
    change: dict[str, ChangeEntry] = Field(default_factory=dict)


class LayerHistory(Entry):
    """Normalised MSE of every layer at chosen optimizer steps: `mse[i]` has one value a layer at `steps[i]`."""

    steps: list[int]
    mse: list[list[float]]


class LayerErrors(Entry):
    """MSE of each layer's attention output over the variance of the teacher's, before and after transfer."""

    before: list[float]
    after: list[float]
    history: LayerHistory | None = None


class Curve(Entry):
    """One training stage: loss by optimizer step, and validation loss at `validation_steps`. `unit` names the loss."""

    stage: str
    unit: str = "loss"
    steps: list[int]
    loss: list[float]
    validation_steps: list[int] = Field(default_factory=list)
    validation: list[float] = Field(default_factory=list)


class Generation(Entry):
    """Greedy continuations of one prompt."""

    prompt: str
    teacher: str
    student: str


class Cost(Entry):
    """What a run, or one of its stages, took: wall time, training tokens, peak memory of the device in bytes."""

    stage: str = "all"
    seconds: float
    tokens: int = 0
    device: str = ""
    peak_memory: int | None = None


class Results(Entry):
    """A whole run. `fingerprints`, `versions` and `notes` are shown as they are; `selection` is the JSON of a `select` step
    (see `hybridize.select.result`)."""

    version: Literal[1] = 1
    title: str
    model: str
    recipe: str = ""
    recipe_text: str = ""
    spec: str = ""
    rows: list[Row]
    layers: LayerErrors | None = None
    selection: dict[str, Any] | None = None
    curves: list[Curve] = Field(default_factory=list)
    generations: list[Generation] = Field(default_factory=list)
    costs: list[Cost] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    fingerprints: dict[str, str] = Field(default_factory=dict)
    commands: list[str] = Field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """Names of the texts, in the order in which the rows name them."""
        return list(dict.fromkeys(text for row in self.rows for text in row.perplexity))

    @property
    def passkey_lengths(self) -> list[int]:
        return sorted({length for row in self.rows for length in row.passkey})

    @property
    def state_lengths(self) -> list[int]:
        return sorted({length for row in self.rows for length in row.state_bytes})

    @property
    def teacher(self) -> Row | None:
        return next((row for row in self.rows if row.kind == "teacher"), None)


def save_results(results: Results, run_folder: str | os.PathLike[str]) -> Path:
    """Write `results.json`; the file appears whole or not at all."""
    return write_entry(results, Path(run_folder) / RESULTS_FILE)


def load_results(run_folder: str | os.PathLike[str]) -> Results:
    """Read `results.json`. Raises ValueError where it is missing or does not fit the schema, naming the first field."""
    path = Path(run_folder) / RESULTS_FILE
    if not path.is_file():
        raise ValueError(
            f"run_folder is {str(run_folder)!r}, which has no {RESULTS_FILE}; evaluate the run first"
        )
    return read_entry(Results, path, "the results schema", "evaluate the run again")


def read_entry(kind: type[Kind], path: Path, schema: str, remedy: str) -> Kind:
    """The entry in a JSON file. Raises ValueError where it does not fit, naming the first field and the remedy."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path} does not fit {schema}: {field}: {first['msg']}; {remedy}") from error


def write_entry(entry: Entry, path: Path) -> Path:
    """The entry as a JSON file, which appears whole or not at all."""
    with atomic_write(path, "w") as file:
        file.write(entry.model_dump_json(indent=1) + "\n")
    return path
