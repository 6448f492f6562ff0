"""What a run reports: sums kept on the device until they are read, CSV and TensorBoard logs, and the progress display.

Vectors over layers have the shape `[L]`.
"""

import csv
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from hybridize.atomic import atomic_write, full_disk_explained

_log = logging.getLogger("hybridize.train")
Values = Mapping[str, float | list[float]]


class Window:
    """Token-weighted means over the steps since the last reading. Adding costs no device synchronisation."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    def add(self, name: str, total: Tensor | float, weight: float) -> None:
        """Add a sum over `weight` tokens: a scalar, or a vector over layers."""
        value = torch.as_tensor(total).detach().to(torch.float64)
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def read(self) -> dict[str, float | list[float]]:
        """The means, in one transfer from each device; the window is empty afterwards."""
        means = {name: value / max(self._weights[name], 1.0) for name, value in self._sums.items()}
        by_device: dict[torch.device, list[str]] = {}
        for name, value in means.items():
            by_device.setdefault(value.device, []).append(name)
        host: dict[str, float | list[float]] = {}
        for names in by_device.values():
            flat = torch.cat([means[name].reshape(-1) for name in names]).cpu()
            parts = flat.split([means[name].numel() for name in names])
            host |= {
                name: part.reshape(means[name].shape).tolist()
                for name, part in zip(names, parts, strict=True)
            }
        self._sums, self._weights = {}, {}
        return {name: host[name] for name in means}

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        return dict(self._sums), dict(self._weights)

    def load(self, sums: Mapping[str, Tensor], weights: Mapping[str, float], device: torch.device) -> None:
        self._sums = {name: value.to(device) for name, value in sums.items()}
        self._weights = dict(weights)


class CsvLog:
    """A CSV file whose first column is `step`; it can be cut back to a step and takes new columns as they come."""

    def __init__(self, path: Path):
        self.path = path
        self._columns = self._read()[0]

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        new = [
            name for name in dict.fromkeys(key for row in rows for key in row) if name not in self._columns
        ]
        if new:
            self._rewrite([*self._columns, *new], self._read()[1])
        with full_disk_explained(self.path), open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerows(rows)

    def cut(self, step: int) -> None:
        """Drop the rows after `step`, and a last row that a kill left unfinished."""
        if self._columns:
            rows = [row for row in self._read()[1] if row["step"].isdigit() and int(row["step"]) <= step]
            self._rewrite(self._columns, rows)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        if not self.path.exists():
            return [], []
        with open(self.path, newline="", encoding="utf-8") as file:
            complete = [line for line in file if line.endswith("\n")]
        reader = csv.DictReader(complete)
        rows = [row for row in reader if None not in row and None not in row.values()]
        return list(reader.fieldnames or []), rows

    def _rewrite(self, columns: list[str], rows: Sequence[Mapping[str, str]]) -> None:
        self._columns = columns
        with atomic_write(self.path, "w") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


class Logs:
    """`train.csv`, `validation.csv` and `layers.csv` (step, metric, layer, value) of a run folder, and TensorBoard."""

    def __init__(self, folder: Path, resume_step: int, tensorboard: bool):
        self.train, self.validation, self.layers = (
            CsvLog(folder / name) for name in ("train.csv", "validation.csv", "layers.csv")
        )
        for log in (self.train, self.validation, self.layers):
            log.cut(resume_step)
        self._board = _summary_writer(folder / "tensorboard", resume_step) if tensorboard else None

    def step(self, step: int, values: Values) -> None:
        self._write(self.train, "train", step, values)

    def validated(self, step: int, values: Values) -> None:
        self._write(self.validation, "validation", step, values)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _write(self, log: CsvLog, prefix: str, step: int, values: Values) -> None:
        scalars = {name: value for name, value in values.items() if not isinstance(value, list)}
        vectors = {name: value for name, value in values.items() if isinstance(value, list)}
        log.append([{"step": step, **scalars}])
        rows = [
            {
                "step": step,
                "metric": name if prefix == "train" else f"{prefix}/{name}",
                "layer": layer,
                "value": value,
            }
            for name, vector in vectors.items()
            for layer, value in enumerate(vector)
        ]
        if rows:
            self.layers.append(rows)
        if self._board is None:
            return
        for name, value in scalars.items():
            self._board.add_scalar(f"{prefix}/{name}", value, step)
        for name, vector in vectors.items():
            for layer, value in enumerate(vector):
                self._board.add_scalar(f"{prefix}/{name}/{layer:03d}", value, step)


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _log.info("TensorBoard is not installed (pip install tensorboard): the logs are CSV only")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def worst_layers(vector: Sequence[float], count: int = 3) -> str:
    """A vector over layers in one short line: its mean and the `count` largest values; layers are numbered from 0."""
    order = sorted(range(len(vector)), key=lambda layer: -vector[layer])[:count]
    worst = "  ".join(f"L{layer} {vector[layer]:.3g}" for layer in order)
    return f"mean {math.fsum(vector) / len(vector):.3g}, worst {worst}"


class Display:
    """A progress bar on a terminal; elsewhere a plain line every `interval` seconds; nothing where `enabled` is false."""

    def __init__(self, name: str, total: int, done: int, *, enabled: bool, unit: str, interval: float = 10.0):
        self._console = Console()
        self._name, self._total, self._start, self._unit = name, total, done, unit
        self._done, self._text, self._layers = done, "", ""
        self._enabled, self._interval = enabled, interval
        self._began = self._last = time.monotonic()
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(name, total=total, completed=done, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._enabled and kind is None:
            self._line()

    def advance(self, done: int) -> None:
        self._done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._enabled and time.monotonic() - self._last >= self._interval:
            self._line()

    def show(self, values: Values) -> None:
        """Take the values just logged; the per-layer line shows the first vector among them."""
        scalars = {name: value for name, value in values.items() if not isinstance(value, list)}
        rate = scalars.get("tokens_per_second", 0.0)
        self._text = f"loss {scalars['loss']:.4g}  lr {scalars['lr']:.2g}  {rate:,.0f} tokens/s"
        vectors = [(name, value) for name, value in values.items() if isinstance(value, list) and value]
        self._layers = "".join(f"{name}: {worst_layers(value)}" for name, value in vectors[:1])
        if self._bar is not None:
            text = f"{self._text}\n{self._layers}" if self._layers else self._text
            self._bar.update(self._task, text=text)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self._enabled:
            print(text, flush=True)

    def _line(self) -> None:
        now = time.monotonic()
        self._last = now
        speed = (self._done - self._start) / max(now - self._began, 1e-9)
        left = f"{(self._total - self._done) / speed:,.0f} s left" if speed > 0 else "time left unknown"
        parts = [f"{self._name} {self._done:,}/{self._total:,} {self._unit}", self._text, left, self._layers]
        print("  ".join(part for part in parts if part), flush=True)
