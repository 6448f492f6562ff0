"""Checkpoints: a folder with tensors (safetensors), the rest (JSON) and a manifest of checksums. Never a pickle.

    run/checkpoints/step-00000120/   tensors.safetensors  state.json  manifest.json
    run/checkpoints/best-00000100/   the parameters at the best validation

The last two steps are kept, and the best parameters they refer to, so that falling back by one loses nothing.
"""

import json
import logging
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridize.atomic import atomic_folder, remove_stale, sha256_file

__all__ = [
    "Checkpoint",
    "CorruptCheckpointError",
    "best_path",
    "load",
    "load_latest",
    "prune",
    "rng_state",
    "save",
    "set_rng_state",
    "step_path",
    "steps",
]

_log = logging.getLogger("hybridize.train")
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_FORMAT = 1


class CorruptCheckpointError(RuntimeError):
    """A file of a checkpoint is missing, cut short or changed."""


@dataclass
class Checkpoint:
    """What a checkpoint holds: named tensors on the CPU, and JSON values."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def best_path(folder: Path, step: int) -> Path:
    return folder / f"best-{step:08d}"


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint folder, whole or not at all.

    Raises:
        DiskFullError: the disk is full; earlier checkpoints are intact.
    """
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + 2**16
    with atomic_folder(path, bytes_needed=needed) as folder:
        # safetensors refuses tensors that share memory, so views are written as copies
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / _TENSORS
        )
        (folder / _STATE).write_text(json.dumps({"format": _FORMAT, **state}), encoding="utf-8")
        files = {name: {"sha256": sha256_file(folder / name)} for name in (_TENSORS, _STATE)}
        (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte.

    Raises:
        CorruptCheckpointError: names the file that is missing, cut short or changed.
    """
    try:
        files = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: files[name]["sha256"] for name in (_TENSORS, _STATE)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"checkpoint file {path / _MANIFEST} is missing or damaged") from error
    for name, checksum in expected.items():
        if not (path / name).is_file():
            raise CorruptCheckpointError(f"checkpoint file {path / name} is missing")
        if sha256_file(path / name) != checksum:
            raise CorruptCheckpointError(f"checkpoint file {path / name} is damaged: its checksum differs")
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        tensors = load_file(path / _TENSORS)
    except (ValueError, SafetensorError) as error:
        raise CorruptCheckpointError(f"checkpoint in {path} cannot be read: {error}") from error
    if state.get("format") != _FORMAT:
        raise ValueError(f"checkpoint {path} has format {state.get('format')}: this version reads {_FORMAT}")
    return Checkpoint(path, tensors, state)


def steps(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest sound checkpoint, or None where there is none at all. Damaged ones are set aside with a warning.

    Raises:
        CorruptCheckpointError: there are checkpoints and all are damaged (starting afresh would hide the loss).
    """
    remove_stale(folder)
    found = steps(folder)
    failure: CorruptCheckpointError | None = None
    damaged: list[Path] = []
    for path in reversed(found):
        try:
            checkpoint = load(path)
        except CorruptCheckpointError as error:
            _log.warning("%s; trying the checkpoint before it", error)
            failure = failure or error
            damaged.append(path)
            continue
        for bad in damaged:
            shutil.rmtree(_aside(bad), ignore_errors=True)
            bad.rename(_aside(bad))
        return checkpoint
    if failure is not None:
        raise CorruptCheckpointError(
            f"{failure}, and no sound checkpoint is left in {folder}: remove that folder to start from the beginning"
        ) from failure
    return None


def prune(folder: Path, keep: int = 2) -> None:
    """Remove all but the last `keep` checkpoints and the best parameters that these refer to."""
    found = steps(folder)
    for path in found[:-keep]:
        shutil.rmtree(path)
    needed = {_best_of(path) for path in found[-keep:]}
    for path in folder.glob("best-*"):
        if path not in needed:
            shutil.rmtree(path)


def _best_of(path: Path) -> Path | None:
    try:
        step = json.loads((path / _STATE).read_text(encoding="utf-8")).get("best_step")
    except (OSError, ValueError):
        return None  # a damaged checkpoint refers to nothing
    return None if step is None else best_path(path.parent, step)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".damaged")


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every global random generator: torch's as tensors, Python's and numpy's as JSON values."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def set_rng_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Restore `rng_state()`. Devices that the state does not know keep theirs."""
    torch.set_rng_state(tensors["torch"])
    for device in range(torch.cuda.device_count()):
        if (state := tensors.get(f"cuda.{device}")) is not None:
            torch.cuda.set_rng_state(state, device)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
