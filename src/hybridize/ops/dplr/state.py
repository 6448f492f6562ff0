"""The state of the diagonal plus low rank rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.types import State


@dataclass
class DplrState(State):
    """`S_NHDV`: what the tokens so far have written, as a map from keys to values; float32."""

    S_NHDV: Tensor


def empty_dplr(
    rows: int, heads: int, dim: int, values: int, dtype: torch.dtype, device: torch.device
) -> DplrState:
    return DplrState(
        lengths_N=torch.zeros(rows, dtype=torch.int64, device=device),
        S_NHDV=torch.zeros(rows, heads, dim, values, dtype=dtype, device=device),
    )
