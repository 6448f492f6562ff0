"""A small noisy regression as a stage; run as a script it trains in a folder, so that tests can kill it.

python toy.py FOLDER SCHEDULE
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridize.train import Constant, Cosine, Plateau, StepResult, TrainConfig, train

SCHEDULES = {
    "constant": Constant(0.02),
    "cosine": Cosine(0.05, final=1e-3, warmup=0.2),
    "plateau": Plateau(0.3, patience=1, final=1e-4),
}


class Toy:
    """Two linear layers with noise from every random generator: torch, Python and numpy."""

    name = "toy"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(4, 8, generator=generator) / 2)
        self.last = nn.Parameter(torch.randn(8, 1, generator=generator) / 3)
        self.bias = nn.Parameter(torch.zeros(1))
        self.epochs: list[int] = []
        self.validations = 0

    def parameters(self) -> dict[str, nn.Parameter]:
        return {"layers.0.weight": self.first, "layers.1.weight": self.last, "layers.1.bias": self.bias}

    def output(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.first) @ self.last + self.bias)[:, 0]

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[0])

    def step(self, batch: tuple[Tensor, Tensor], scale: float) -> StepResult:
        x, y = batch
        noise = 0.1 * torch.randn_like(y) + 0.05 * random.random() + 0.05 * float(np.random.rand())
        error = (self.output(x) - y - noise).square()
        (error.sum() * scale).backward()
        layers = torch.stack([self.first.detach().square().mean(), self.last.detach().square().mean()])
        return StepResult(
            error.detach().sum(), len(x), {"absolute": error.detach().sqrt().mean(), "layers/nmse": layers}
        )

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        self.validations += 1
        torch.randn(self.validations)  # validation may draw as it likes
        x, y = batch_at(10_000, 64)
        return {"loss": float((self.output(x) - y).square().mean())}

    def on_boundary(self, k: int) -> None:
        torch.randn(3)
        self.epochs.append(k)


def batch_at(index: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(rows or 2 + index % 5, 4, generator=generator)
    return x, x[:, 0] * x[:, 1] + x[:, 2]


def batches(start: int, micro_batches: int = 2) -> Iterator[Any]:
    index = start * micro_batches
    while True:
        yield batch_at(index)
        index += 1


def config(schedule: str = "plateau", **changes: Any) -> TrainConfig:
    fields = dict(
        steps=60,
        micro_batches=2,
        lr=SCHEDULES[schedule],
        weight_decay=0.01,
        eval_every=5,
        epoch_steps=10,
        save_every=2,
        log_every=3,
        tensorboard=False,
    )
    return TrainConfig(**(fields | changes))


class Loud(Toy):
    """Says when a micro-batch begins."""

    def step(self, batch: tuple[Tensor, Tensor], scale: float) -> StepResult:
        print("micro-batch", flush=True)
        return super().step(batch, scale)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Loud(), batches, config(sys.argv[2]), Path(sys.argv[1]), progress=False)
    print("done", flush=True)
