"""The folder of a run: what made it, what is finished, and the weights that each step trained.

recipe.yaml            the resolved recipe
run.json               identity (model, recipe, data), versions, commands
steps/0-transfer/      the loop's checkpoints and logs; when finished: trained.safetensors or adapter/, config.json,
                       outcome.json (written last)
model/                 the student as it stands, a folder that AutoModelForCausalLM opens
evaluations.json       measurements of the teacher, the swap and every step
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridize.atomic import atomic_write

IDENTITY = ("model", "recipe", "data")


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

    def step(self, index: int, kind: str) -> Path:
        return self.path / "steps" / f"{index}-{kind}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One conversion at a time in a folder. Raises ValueError where another process works in it."""
        from filelock import FileLock, Timeout

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

    def claim(self, identity: dict[str, Any]) -> None:
        """Make the folder this run's own, or check that it is.

        Raises ValueError naming the first field of the model, recipe or data that differs.
        """
        record = read_json(self.path / "run.json")
        if record is None:
            write_json(
                self.path / "run.json",
                {"identity": identity, "versions": versions(), "commands": [" ".join(sys.argv)]},
            )
            return
        difference = first_difference(record["identity"], json.loads(json.dumps(identity)))
        if difference is not None:
            field, before, now = difference
            raise ValueError(
                f"{field} is {now!r}, but {self.path} was begun with {before!r}; restore it or choose another folder"
            )
        command = " ".join(sys.argv)
        if record["commands"][-1] != command:
            record["commands"].append(command)
            write_json(self.path / "run.json", record)


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
    """The content of a JSON file, None where there is none. Raises ValueError naming a broken one."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove the run folder and start again") from None


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
