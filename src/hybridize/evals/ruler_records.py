"""What a RULER run has answered so far: one file of JSON lines for a task, a length and settings, so that a run goes on.

The first line says what the answers depend on; its digest is part of the file's name, so a changed model or setting
starts a file of its own. Half a line that a kill left at the end (see `hybridize.json_lines`) counts as not answered. Two writers at once may answer a sample twice; one counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridize import json_lines

_SAMPLED = 64  # values of each tensor in a model's fingerprint
# Where a model came from and how it is run, not what it computes.
_NOT_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map")


@dataclass(frozen=True)
class Answer:
    """The prediction for sample `index`. `score` is the share (0..1) of the references that it contains."""

    index: int
    depth: float | None
    prompt_tokens: int
    references: tuple[str, ...]
    prediction: str
    score: float


class Records:
    """Answers of one task at one length, in memory and, with a folder, on disk."""

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        """Read what the folder has for `identity`, plain values of which `task` and `length` name the file.

        Raises ValueError for a file of this name that was made by other settings.
        """
        self.identity = dict(identity)
        self.answers: dict[int, Answer] = {}
        self.path = None if folder is None else Path(folder) / _file_name(self.identity)
        self._begun = False
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"records is {str(folder)!r}, which is no folder; name one")
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def add(self, answers: Sequence[Answer]) -> None:
        """Keep answers; on return they are on the disk. Raises DiskFullError where it is full."""
        self.answers |= {answer.index: answer for answer in answers}
        if self.path is None:
            return
        if not self._begun:
            self._rewrite(self.path)
            return
        json_lines.append(self.path, map(asdict, answers))

    def _read(self, path: Path) -> None:
        first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        header = json_lines.parse(first)
        if header is not None and header != self.identity:
            raise ValueError(f"{path} was made by other settings than its name says; move it away")
        found = [answer for answer in map(_answer, lines) if answer is not None]
        self.answers = {answer.index: answer for answer in found}
        # A whole file is its header, its answers and the empty string after the last line break.
        self._begun = header is not None and len(lines) == len(found) + 1 and not lines[-1]

    def _rewrite(self, path: Path) -> None:
        answers = (asdict(answer) for _, answer in sorted(self.answers.items()))
        json_lines.rewrite(path, [self.identity, *answers])
        self._begun = True


def _file_name(identity: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(f"{json.dumps(identity, sort_keys=True)}\n".encode()).hexdigest()
    return f"{identity['task']}-{identity['length']}-{digest[:12]}.jsonl"


def _answer(line: str) -> Answer | None:
    value = json_lines.parse(line)
    if value is None or set(value) != set(Answer.__dataclass_fields__):
        return None
    return Answer(**{**value, "references": tuple(value["references"])})


def model_fingerprint(model: nn.Module) -> str:
    """sha256 of what a model computes: its config, a hybrid's spec in force, and 64 values of every tensor.

    The values lie evenly over a tensor, so that training, merging or rounding of any part is seen, at little cost.
    """
    config = getattr(model, "config", None)
    fields = config.to_dict() if config is not None else {}
    fields = {key: value for key, value in fields.items() if key not in _NOT_THE_MODEL}
    spec = getattr(model, "effective_spec", None)
    digest = hashlib.sha256(json.dumps([fields, spec], sort_keys=True, default=str).encode())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, x in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(f"{name}:{tuple(x.shape)}:{x.dtype}".encode())
        flat = x.detach().reshape(-1)
        chosen = flat[:: max(1, flat.numel() // _SAMPLED)]
        digest.update(chosen.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()
