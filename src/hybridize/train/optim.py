"""AdamW, learning-rate schedules, and the gradient's norm and clipping without a device synchronisation."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Constant:
    """One learning rate. `warmup` is the share of the budget over which it rises linearly from 0."""

    rate: float
    warmup: float = 0.0

    def lr(self, progress: float) -> float:
        """The rate at `progress`, the share of the budget that is done."""
        return self.rate * _ramp(progress, self.warmup)

    def observe(self, metric: float) -> None:
        """Take a validation's metric, which this schedule ignores."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class Cosine(Constant):
    """Half a cosine from `rate` to `final` after a linear warm-up. Loshchilov and Hutter (arXiv 1608.03983)."""

    final: float = 0.0

    def lr(self, progress: float) -> float:
        if progress < self.warmup:
            return super().lr(progress)
        done = min(1.0, (progress - self.warmup) / max(1e-12, 1 - self.warmup))
        return self.final + (self.rate - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass
class Plateau(Constant):
    """Multiply the rate by `factor` after more than `patience` validations without an improvement.

    A metric improves when it falls below `best * (1 - threshold)`. Same rule as torch's `ReduceLROnPlateau`; the defaults
    are LoLCATs' (arXiv 2410.10254, appendix A).
    """

    factor: float = 0.1
    patience: int = 10
    final: float = 1e-5
    threshold: float = 1e-4
    scale: float = field(default=1.0, init=False)
    best: float = field(default=math.inf, init=False)
    bad: int = field(default=0, init=False)

    def lr(self, progress: float) -> float:
        return max(self.rate * self.scale, min(self.final, self.rate)) * _ramp(progress, self.warmup)

    def observe(self, metric: float) -> None:
        if metric < self.best * (1 - self.threshold):
            self.best, self.bad = metric, 0
            return
        self.bad += 1
        if self.bad > self.patience:
            self.scale, self.bad = self.scale * self.factor, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "best": self.best, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.best, self.bad = state["scale"], state["best"], state["bad"]


Schedule = Constant | Cosine | Plateau


def schedule(rate: float | Schedule) -> Schedule:
    """A fresh schedule: a number is a constant rate."""
    return copy.deepcopy(rate) if isinstance(rate, Constant) else Constant(rate)


def _ramp(progress: float, warmup: float) -> float:
    return min(1.0, progress / warmup) if warmup > 0 else 1.0


def adamw(
    parameters: Mapping[str, nn.Parameter],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over named master weights, one fused kernel on CUDA. Vectors and scalars do not decay.

    Raises:
        ValueError: no parameter, one that is frozen, or one kept in less than float32.
    """
    if not parameters:
        raise ValueError("parameters is empty: the stage must name at least one trainable parameter")
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise ValueError(f"parameter {name} does not require a gradient: leave it out or unfreeze it")
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"parameter {name} is {parameter.dtype}: train a float32 master under autocast")
    matrices = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, weight_decay), (vectors, 0.0))
        if members
    ]
    fused = all(parameter.is_cuda for parameter in parameters.values())
    # the rate is set before every step
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=fused or None)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's tensors under `parameter name/slot`."""
    return {
        f"{name}/{slot}": tensor
        for name, parameter in parameters.items()
        for slot, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put `optimizer_tensors` back; torch places each where its parameter lives."""
    state = optimizer.state_dict()
    order = {
        parameter: i for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    state["state"] = {}
    for key, tensor in tensors.items():
        name, slot = key.rsplit("/", 1)
        state["state"].setdefault(order[parameters[name]], {})[slot] = tensor
    optimizer.load_state_dict(state)


def gradient_norms(parameters: Mapping[str, nn.Parameter]) -> tuple[list[str], Tensor]:
    """Names of the parameters that have a gradient, and the gradients' 2-norms `[names]` on the device, in one fused call."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not gradients:
        raise ValueError(
            "no trainable parameter received a gradient: the stage's loss does not depend on what it trains"
        )
    norms = torch._foreach_norm(list(gradients.values()))
    return list(gradients), torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])


def clip(parameters: Mapping[str, nn.Parameter], norms: Tensor, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`; the total before that is returned, on the device."""
    total = torch.linalg.vector_norm(norms)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, total)
    return total
