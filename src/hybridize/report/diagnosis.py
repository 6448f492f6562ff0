"""What `report.json` of `hybridize diagnose` holds: the only thing its page is made from.

Losses are in nats a token, positions in tokens, bytes for one sequence. Intervals are 95%, by bootstrap over rows of text,
paired where two models are compared; Wilson's for shares of correct answers. A missing part was not measured.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from hybridize.report.schema import (
    Entry,
    PasskeyEntry,
    PerplexityEntry,
    PositionEntry,
    read_entry,
    write_entry,
)

DIAGNOSIS_FILE = "report.json"

Label = Literal["balanced", "weak", "bypassed", "inconclusive", "not_applicable"]


class Interval(Entry):
    """A value and its 95% interval (absent where one row of text was all there was)."""

    value: float
    low: float | None = None
    high: float | None = None


class TextEntry(Entry):
    """One model on one text. `far` is about the far-eligible tokens alone: those whose query has a key beyond the window.

    `delta` and `far_delta`: this model's loss less the student's, paired row by row (positive: worse than the student).
    `useful_delta`, `other_delta`: the same on the tokens where the far past helps the teacher, and on the other far-eligible
    ones (see `NeedEntry`).
    """

    perplexity: PerplexityEntry
    by_position: list[PositionEntry] = Field(default_factory=list)
    far_nll: float | None = None
    far_tokens: int = 0
    delta: Interval | None = None
    far_delta: Interval | None = None
    useful_delta: Interval | None = None
    other_delta: Interval | None = None


class PasskeyCellEntry(Entry):
    """`correct` of `samples` keys found at one prompt length (tokens) and depth (0 first to 1 last)."""

    length: int
    depth: float
    correct: int
    samples: int


class TaskEntry(Entry):
    """Share of right answers in 0..1 on one task. `reach`: whether answering needs text beyond the window."""

    accuracy: float
    low: float
    high: float
    samples: int
    chance: float | None = None
    reach: Literal["near", "far", "mixed"] = "mixed"


class ModelEntry(Entry):
    """One measured model.

    kind: `teacher`; `student` as it is; `ablation`, the student with parts removed (`mode`, `removal`, DESIGN D12); or
        `control`: the teacher under a window of the same bytes of state, the teacher with the same fine-tuning.
    texts: by name of the text. passkey: by prompt length. tasks: by name. state_bytes: by context length.
    """

    name: str
    kind: Literal["teacher", "student", "ablation", "control"]
    mode: str = "hybrid"
    removal: Literal["zero", "renormalize"] | None = None
    texts: dict[str, TextEntry] = Field(default_factory=dict)
    passkey: dict[int, PasskeyEntry] = Field(default_factory=dict)
    passkey_cells: list[PasskeyCellEntry] = Field(default_factory=list)
    tasks: dict[str, TaskEntry] = Field(default_factory=dict)
    state_bytes: dict[int, int] = Field(default_factory=dict)


class ShareByPosition(Entry):
    """Mean share of the weights that the far branch carries, one value a layer, for queries at `start <= t < end`."""

    start: int
    end: int | None = None
    share: list[float | None]


class LayerEntry(Entry):
    """What each layer's linear branch does; every list has one value a layer, None in layers without two branches.

    loss_rise: rise of the loss on far-eligible tokens of `text` when this layer's linear branch alone is removed.
    heads: the same head by head, `heads[layer][head]`. near_norm, far_norm: root mean square of each branch's share of the
    output; cosine: between the two; far_share: share of the weights that the far branch carries. Means over far-eligible
    tokens.
    """

    text: str
    tokens: int
    removal: Literal["zero", "renormalize"]
    loss_rise: list[Interval | None]
    heads: list[list[float] | None] | None = None
    near_norm: list[float | None] = Field(default_factory=list)
    far_norm: list[float | None] = Field(default_factory=list)
    cosine: list[float | None] = Field(default_factory=list)
    far_share: list[float | None] = Field(default_factory=list)
    far_share_by_position: list[ShareByPosition] = Field(default_factory=list)


class NeedEntry(Entry):
    """Whether a text needs its far past at all, judged by the teacher.

    need: the teacher's loss with the context cut to a window of near keys less its loss with all of it, mean over
    far-eligible tokens. useful_share: share of these tokens whose loss falls by at least `threshold` nats.
    """

    context: int
    threshold: float
    need: Interval
    tokens: int
    useful_share: float


class GainCurve(Entry):
    """The linear gain during one training stage: loss without the linear branch less loss with it, on a small validation
    slice, far-eligible tokens only."""

    stage: str
    steps: list[int]
    gain: list[float]
    loss: list[float] = Field(default_factory=list)


class Verdict(Entry):
    """The answer. `linear`: about the linear branch; `window`: about the softmax window.

    sentence: one line for a reader in a hurry; reasons: the comparisons that led there, with their figures; thresholds: the
    bounds they were held against, by name; figures: the values, by the same names where there is one.
    """

    linear: Label
    window: Literal["used", "unused", "inconclusive", "not_applicable"]
    sentence: str
    reasons: list[str]
    thresholds: dict[str, float]
    figures: dict[str, Interval] = Field(default_factory=dict)


class RunDiagnosis(Entry):
    """One run or model. `models` begins with the teacher (where known), then the student.

    far_from: the first position whose query has a key beyond the window in some layer; before it, removing the linear branch
    changes nothing.
    """

    name: str
    source: str
    teacher: str = ""
    recipe: str = ""
    spec: str
    verdict: Verdict
    models: list[ModelEntry]
    layers: LayerEntry | None = None
    far_from: int | None = None
    need: dict[str, NeedEntry] = Field(default_factory=dict)
    gain: list[GainCurve] = Field(default_factory=list)
    seconds: float = 0.0
    device: str = ""
    notes: list[str] = Field(default_factory=list)
    fingerprints: dict[str, str] = Field(default_factory=dict)

    @property
    def student(self) -> ModelEntry:
        return next(model for model in self.models if model.kind == "student")


class Diagnosis(Entry):
    """One call of `hybridize diagnose`: one run, or several side by side. `quick`: fewer rows and no head by head scan."""

    version: Literal[1] = 1
    quick: bool = False
    runs: list[RunDiagnosis]
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """Names of the texts, in the order in which the models name them."""
        return list(dict.fromkeys(t for run in self.runs for model in run.models for t in model.texts))


def save_diagnosis(diagnosis: Diagnosis, folder: str | os.PathLike[str]) -> Path:
    """Write `report.json` into `folder`; the file appears whole or not at all."""
    path = Path(folder) / DIAGNOSIS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_entry(diagnosis, path)


def load_diagnosis(folder: str | os.PathLike[str]) -> Diagnosis:
    """Read `report.json`. Raises ValueError where it is missing or does not fit the schema, naming the first field."""
    path = Path(folder) / DIAGNOSIS_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run `hybridize diagnose` first")
    return read_entry(Diagnosis, path, "the schema", "diagnose again")
