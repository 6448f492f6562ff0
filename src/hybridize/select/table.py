"""The scores of single-layer replacements: what a sweep measures, and what every rule that measures ranks by.

Nothing here imports torch, so that a stored table is ranked in no time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hybridize import json_lines

SCORES_FILE = "scores.jsonl"
FORMAT = "hybridize selection"
VERSION = 1
EXAMPLE = '{"layer": 0, "recall": 0.9, "knowledge": 0.6}'


@dataclass(frozen=True)
class ScorePart:
    """One task of a score, for example niah_single_2 at 1,024 tokens."""

    name: str
    value: float
    standard_error: float | None
    samples: int

    @classmethod
    def read(cls, plain: Any) -> ScorePart:
        """From JSON, what `asdict` gave. Raises ValueError for anything else."""
        if not isinstance(plain, dict) or not isinstance(plain.get("name"), str):
            raise ValueError(f"a part of a score is {plain!r}; it must be an object with a name")
        return cls(plain["name"], *_numbers(plain))


@dataclass(frozen=True)
class Score:
    """`value` in [0, 1], the mean of the parts with equal weight; `samples` of all of them."""

    value: float
    standard_error: float | None = None
    samples: int = 0
    parts: tuple[ScorePart, ...] = ()

    @classmethod
    def mean(cls, parts: Sequence[ScorePart]) -> Score:
        """The equal-weight mean of independent parts; its error is unknown where that of a part is."""
        errors = [part.standard_error for part in parts]
        known = [error for error in errors if error is not None]
        error = math.sqrt(sum(x * x for x in known)) / len(parts) if len(known) == len(parts) else None
        value = math.fsum(part.value for part in parts) / len(parts)
        return cls(value, error, sum(part.samples for part in parts), tuple(parts))

    @classmethod
    def read(cls, plain: Any) -> Score:
        """From JSON: what `asdict` gave, or a bare number. Raises ValueError for anything else."""
        if isinstance(plain, int | float) and not isinstance(plain, bool):
            return cls(float(plain))
        if not isinstance(plain, dict) or "value" not in plain:
            raise ValueError(f"a score is {plain!r}; it must be a number, or an object with a value")
        parts = plain.get("parts", [])
        if not isinstance(parts, list | tuple):
            raise ValueError(f"a score has the parts {parts!r}; they must be a list")
        return cls(*_numbers(plain), tuple(ScorePart.read(part) for part in parts))


@dataclass(frozen=True)
class LayerScores:
    """The scores of the model in which `layer` alone was changed (None: the teacher); `loss` is that of `kl`."""

    layer: int | None
    recall: Score | None = None
    knowledge: Score | None = None
    loss: float | None = None

    @classmethod
    def read(cls, plain: Any) -> LayerScores:
        if not isinstance(plain, Mapping):
            raise ValueError(f"an entry is {plain!r}; it must be an object such as {EXAMPLE}")
        layer, loss = plain.get("layer"), plain.get("loss")
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
            raise ValueError(f"layer is {layer!r}; it must be a number from 0, or null for the teacher")
        recall, knowledge = (
            Score.read(plain[key]) if plain.get(key) is not None else None for key in ("recall", "knowledge")
        )
        if loss is not None and not _is_number(loss):
            raise ValueError(f"loss is {loss!r}; it must be a number")
        return cls(layer, recall, knowledge, None if loss is None else float(loss))

    def plain(self) -> dict[str, Any]:
        """For JSON, without what was not measured."""
        return {"layer": self.layer} | {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class ScoreTable:
    """One entry a layer, in order; the teacher's scores and what the sweep depended on, where known."""

    layers: tuple[LayerScores, ...]
    teacher: LayerScores | None = None
    identity: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls, entries: Sequence[LayerScores], identity: Mapping[str, Any] | None = None, source: str = "scores"
    ) -> ScoreTable:
        """Entries in any order, the last of a layer counts. Raises ValueError where layers are missing."""
        found = {entry.layer: entry for entry in entries}
        teacher = found.pop(None, None)
        highest = max((layer for layer in found if layer is not None), default=0)
        count = (identity or {}).get("layers") or 1 + highest
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{source}: identity.layers is {count!r}; it must be a number of layers")
        if highest >= count:
            raise ValueError(f"{source} has scores of layer {highest}, but its identity names {count} layers")
        if len(found) < count:
            some = list(itertools.islice((layer for layer in range(count) if layer not in found), 8))
            more = ", ..." if count - len(found) > len(some) else ""
            raise ValueError(
                f"{source} lacks {'layer' if count - len(found) == 1 else 'layers'} {', '.join(map(str, some))}{more} of {count}; "
                "run the sweep again, it goes on where it was stopped"
            )
        return cls(tuple(found[layer] for layer in range(count)), teacher, identity)

    def recall(self) -> list[Score]:
        return [_present(entry.recall, "recall", entry.layer) for entry in self.layers]

    def knowledge(self) -> list[Score]:
        return [_present(entry.knowledge, "knowledge", entry.layer) for entry in self.layers]

    def losses(self) -> list[float]:
        return [_present(entry.loss, "loss", entry.layer) for entry in self.layers]

    def recall_errors(self) -> list[float | None]:
        """The standard error of each layer's R, None where it is unknown."""
        return [score.standard_error for score in self.recall()]

    def knowledge_errors(self) -> list[float | None]:
        """The standard error of each layer's C, None where it is unknown."""
        return [score.standard_error for score in self.knowledge()]


def load_scores(path: Path | str) -> ScoreTable:
    """The table of a sweep's file or folder (`scores.jsonl`), or of a selection's JSON.

    A line is `{"layer": 0, "recall": S, "knowledge": S}` with a number or an object for S; `"layer": null` is the teacher; the
    first line of a sweep holds its `identity`. A half-written last line does not count there; without an identity nothing
    says how many layers there are, so every line must be whole.
    Raises ValueError for files that are missing, of another format, or lack a layer.
    """
    path = Path(path)
    file = path / SCORES_FILE if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"scores is {str(path)!r}; there is no such file")
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    whole = json_lines.parse(text)
    if whole is not None and "by_layer" in whole:
        if whole.get("format") != FORMAT or whole.get("version") != VERSION:
            raise ValueError(
                f"{file} is {whole.get('format')!r} of version {whole.get('version')}; this reads {FORMAT!r} {VERSION}"
            )
        by_layer, teacher = whole["by_layer"], whole.get("teacher")
        if not isinstance(by_layer, list) or not isinstance(teacher, dict | None):
            raise ValueError(f"{file}: by_layer must be a list of objects, and teacher an object or null")
        entries = _entries([*by_layer, *([{**teacher, "layer": None}] if teacher else [])], file)
        return ScoreTable.of(entries, _identity(whole.get("identity"), file), str(file))
    written = [line for line in text.split("\n") if line.strip()]
    lines = [line for line in map(json_lines.parse, written) if line is not None]
    identity = _identity(next((line["identity"] for line in lines if "identity" in line), None), file)
    entries = _entries([line for line in lines if "layer" in line], file)
    if not entries:
        raise ValueError(f"{file} holds no scores; a line is {EXAMPLE}")
    if identity is None and len(lines) < len(written):
        number, line = next((i, line) for i, line in enumerate(written, 1) if json_lines.parse(line) is None)
        raise ValueError(f"{file}: line {number} is no JSON object: {line[:60]!r}; a line is {EXAMPLE}")
    return ScoreTable.of(entries, identity, str(file))


def _numbers(plain: Mapping[str, Any]) -> tuple[float, float | None, int]:
    """`value`, `standard_error` (null where it is unknown) and `samples` of a score or of a part of it."""
    value, error, samples = plain.get("value"), plain.get("standard_error"), plain.get("samples", 0)
    # NaN and what lies outside [0, 1] are refused by the rules, which name the layer
    if not _is_number(value):
        raise ValueError(f"a score has the value {value!r}; it must be a number")
    if error is not None and not (_is_number(error) and error >= 0):
        raise ValueError(f"a score has the standard_error {error!r}; it must be a number")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
        raise ValueError(f"a score has {samples!r} samples; it must be a whole number")
    return float(value), error, samples


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isinf(value)


def _identity(value: Any, file: Path) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{file}: identity is {value!r}; it must be an object")
    return value


def _entries(lines: Sequence[Any], file: Path) -> list[LayerScores]:
    try:
        return [LayerScores.read(line) for line in lines]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def _present(value: Any, name: str, layer: int | None) -> Any:
    if value is None:
        raise ValueError(f"scores has no {name} for layer {layer}; the rule needs it of every layer")
    return value
