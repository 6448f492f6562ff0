"""The state of decaying linear attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.types import State


@dataclass
class DecayState(State):
    """`S_NHDV` after the tokens seen so far: float32, or float64 for float64 inputs."""

    S_NHDV: Tensor


def empty_decay(
    rows: int, heads: int, dim: int, values: int, dtype: torch.dtype, device: torch.device
) -> DecayState:
    """The state of rows that have seen no token."""
    return DecayState(
        lengths_N=torch.zeros(rows, dtype=torch.int64, device=device),
        S_NHDV=torch.zeros(rows, heads, dim, values, dtype=dtype, device=device),
    )
