"""What the loop and a stage agree on: the stage's protocol, the configuration, the result, the errors.

Vectors over layers have the shape `[L]`.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from hybridize.train import optim

Batches = Iterable[Any] | Callable[[int], Iterator[Any]]
"""Micro-batches, or a function that gives them from an optimizer step on."""


@dataclass
class StepResult:
    """What one micro-batch gave, detached and left on the device.

    loss: summed over the counted tokens (not scaled). tokens: how many counted, equal to `stage.count(batch)`.
    metrics: means over those tokens; scalars, or vectors `[L]` such as the per-layer normalised error `layers/nmse`.
    """

    loss: Tensor | float
    tokens: int
    metrics: dict[str, Tensor | float] = field(default_factory=dict)


class Stage(Protocol):
    """What is trained, and how a batch becomes gradients.

    A stage may also have `check() -> str | None`, asked when a loss or gradient is not finite: one phrase that says where.
    """

    name: str

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable float32 parameters, always in the same order under the same names."""

    def count(self, batch: Any) -> int:
        """How many tokens of a micro-batch count. Called before `step`, and best answered from CPU tensors."""

    def step(self, batch: Any, scale: float) -> StepResult:
        """Forward and backward of one micro-batch: gradients of `scale * (loss summed over counted tokens)` accumulate.

        `scale` is 1 / (counted tokens of all micro-batches of the optimizer step).
        """

    def validate(self) -> dict[str, float]:
        """Metrics on validation data, the monitored one among them (lower is better)."""

    def on_boundary(self, k: int) -> None:
        """Epoch k begins, k from 0. Called again with the current k when a run resumes.

        Random draws made here depend on the seed and k alone, and leave the global generators as they were.
        """


@dataclass
class TrainConfig:
    """How to train.

    steps, tokens: the budget, exactly one of them: optimizer steps, or counted tokens.
    micro_batches: batches accumulated per optimizer step.
    lr: a rate, or a schedule of `hybridize.train.optim`. betas, weight_decay: AdamW's.
    clip: largest total gradient norm, None for no clipping.
    epoch_steps, epoch_tokens: the length of an epoch, for `on_boundary`; with neither the run is one epoch.
    eval_every: optimizer steps between validations (the last step is always validated); None: never.
    monitor: the validation metric that schedules and the best checkpoint follow, lower is better.
    keep_best: restore the best validated parameters at the end.
    patience: stop after so many validations in a row of which none was good; None: run to the end of the budget. Good is a
        monitored metric below all before it; with `guard` only while that metric (higher is better) keeps at least
        `guard_share` of the highest value seen. A validation before the first step sets the marks.
    save_every, save_every_s: steps, seconds between checkpoints; whichever comes first.
    log_every: steps between log lines. On an accelerator the host waits for the device only then.
    """

    steps: int | None = None
    tokens: int | None = None
    micro_batches: int = 1
    lr: float | optim.Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float | None = 1.0
    epoch_steps: int | None = None
    epoch_tokens: int | None = None
    eval_every: int | None = 100
    monitor: str = "loss"
    keep_best: bool = True
    patience: int | None = None
    guard: str | None = None
    guard_share: float | None = None
    save_every: int | None = None
    save_every_s: float | None = 300.0
    log_every: int = 10
    seed: int = 0
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(f"steps is {self.steps} and tokens is {self.tokens}: give exactly one of them")
        for name in (
            "steps",
            "tokens",
            "micro_batches",
            "eval_every",
            "save_every",
            "log_every",
            "epoch_steps",
            "epoch_tokens",
            "patience",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: give at least 1")
        if (self.guard is None) != (self.guard_share is None):
            raise ValueError(
                f"guard is {self.guard!r} and guard_share is {self.guard_share}: give both or none"
            )
        if self.patience is not None and self.eval_every is None:
            raise ValueError("eval_every is None: patience counts validations, give a number of steps")
        if isinstance(self.lr, optim.Plateau) and self.eval_every is None:
            raise ValueError(
                "eval_every is None: a plateau schedule needs validations, give a number of steps"
            )

    def fingerprint(self) -> dict[str, Any]:
        """The fields that decide the resulting weights, as JSON values."""
        free = {"save_every", "save_every_s", "log_every", "tensorboard"}
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in free}
        values["lr"] = {
            "kind": type(optim.schedule(self.lr)).__name__,
            **dataclasses.asdict(optim.schedule(self.lr)),
        }
        return json.loads(json.dumps(values))


@dataclass
class Progress:
    """The counters a checkpoint stores."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    busy: float = 0.0
    logged_tokens: int = 0
    logged_busy: float = 0.0
    best_step: int | None = None
    best_metric: float | None = None
    validated_step: int | None = None
    final_metric: float | None = None
    best_guard: float | None = None
    not_good: int = 0
    stopped: str | None = None


@dataclass
class TrainResult:
    """The outcome, also written to `result.json`. Seconds are wall time over all sessions, validation and saving included;
    tokens_per_second counts training steps only. `stopped` says why a run ended before its budget. Memory is the device's
    peak, or the process's on the CPU."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    best_step: int | None
    best_metric: float | None
    final_metric: float | None
    restored: str
    history: str
    stopped: str | None = None


class NonFiniteError(RuntimeError):
    """A loss, gradient or validation metric is not finite. `step` and `parameters` (in order) say where."""

    def __init__(self, message: str, step: int, parameters: list[str]):
        super().__init__(message)
        self.step, self.parameters = step, parameters


def batches_from(batches: Batches, step: int, micro_batches: int) -> Iterator[Any]:
    """The micro-batches from optimizer step `step` on."""
    if callable(batches):
        return iter(batches(step))
    return itertools.islice(iter(batches), step * micro_batches, None)
