"""The folder of a run: what made it, what is finished, and the weights that each step trained.

recipe.yaml            the resolved recipe
run.json               identity (model, recipe, data), versions, commands
steps/0-transfer/      the loop's checkpoints and logs; when finished: trained.safetensors or adapter/, config.json,
                       outcome.json (written last)
steps/1-select/        scores.jsonl of a sweep, selection.json, outcome.json
model/                 the student as it stands, a folder that AutoModelForCausalLM opens
adapter/               its LoRA adapter, where the recipe keeps that apart (merge: false)
student.json           after which step the student in model/ stands
evaluations.json       measurements of the teacher, the swap and every step
results.json           what the report is made from (see hybridize.report.schema); report.html is made from it
control/               the run of the control: the teacher with the same fine-tuning
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridize.atomic import atomic_write
from hybridize.train.process import command_line

OUTCOME = "outcome.json"
"""What a finished step leaves in its folder, last."""

_OWN = ("model", "adapter", "steps", "recipe.yaml", "results.json")
_REMEDY = "restore the file, or remove it and run the same command again to have it made anew"


class RunFolder:
    """Reads and writes the bookkeeping files; every file appears whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def student(self) -> Path:
        return self.path / "student.json"

    def student_after(self) -> int | None:
        """The step after which the student in `model` stands; None where no save was completed."""
        record = read_json(self.student)
        return record.get("after_step") if isinstance(record, dict) else None

    def step(self, index: int, kind: str) -> Path:
        return self.path / "steps" / f"{index}-{kind}"

    def finished(self, index: int, kind: str) -> bool:
        return (self.step(index, kind) / OUTCOME).exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One conversion at a time in a folder. Raises ValueError where another process works in it, and for a model's own folder."""
        from filelock import FileLock, Timeout

        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"out is {str(self.path)!r}, a file; name a folder")
        if (self.path / "config.json").exists() and not (self.path / "run.json").exists():
            raise ValueError(
                f"out is {str(self.path)!r}, which holds a model; name a folder of the run's own"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{self.path} is in use by another conversion; wait for it or choose another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def claim(self, identity: dict[str, Any], undecided: Iterable[int] = ()) -> None:
        """Make the folder this run's own, or check that it is. `undecided` numbers steps that may differ from the recorded ones.

        Raises ValueError naming the first field of the model, recipe or data that differs, or for a folder that holds
        something else under the names of a run.
        """
        path = self.path / "run.json"
        record = read_json(path)
        if record is None:
            foreign = [name for name in _OWN if (self.path / name).exists()]
            if foreign:
                raise ValueError(
                    f"{self.path} holds {foreign[0]} but no run.json, so it is no run; choose another folder or remove that"
                )
            write_json(path, {"identity": identity, "versions": versions(), "commands": [command_line()]})
            return
        if not {"identity", "commands"} <= set(record):
            raise ValueError(f"{path} is no record of a run; choose another folder")
        now = json.loads(json.dumps(identity))
        begun = record["identity"]
        changed = adopt_steps(begun["recipe"], now["recipe"], undecided)
        if begun["model"]["fingerprint"] == now["model"]["fingerprint"]:
            now["model"] = begun["model"]  # the same weights by another path
        difference = first_difference(begun, now)
        if difference is not None:
            field, before, after = difference
            raise ValueError(
                f"{field} is {after!r}, but {self.path} was begun with {before!r}; restore it or choose another folder"
            )
        if command_line() not in record["commands"][-1:]:
            record["commands"].append(command_line())
            changed = True
        if changed:
            write_json(path, record)


def adopt_steps(begun: dict[str, Any], now: dict[str, Any], undecided: Iterable[int]) -> bool:
    """Put the steps numbered `undecided` of the recipe `now` into `begun`, where they are of the same kind; whether any differ."""
    changed = False
    for index in undecided:
        steps = begun["steps"], now["steps"]
        if all(index < len(each) for each in steps) and steps[0][index].keys() == steps[1][index].keys():
            changed = changed or steps[0][index] != steps[1][index]
            steps[0][index] = steps[1][index]
    return changed


def first_difference(before: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Path and both values of the first place where two plain structures differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            found = first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            found = first_difference(old, new, f"{path}[{index}]")
            if found is not None:
                return found
        return None
    return None if before == now else (path, before, now)


def read_json(path: Path) -> Any:
    """The mapping or list that a JSON file holds, None where there is none. Raises ValueError naming a broken one."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:  # also text that is not UTF-8
        raise ValueError(f"{path} is damaged: not JSON ({error}); {_REMEDY}") from None
    if not isinstance(value, dict | list):
        raise ValueError(f"{path} is damaged: it holds {value!r}; {_REMEDY}")
    return value


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "w") as file:
        json.dump(value, file, indent=1)


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"python": platform.python_version()}
    for name in ("hybridize", "torch", "transformers", "peft", "safetensors", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
