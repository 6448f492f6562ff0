"""The state of linear attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.types import State


@dataclass
class LinearState(State):
    """`S_NJFV` = sum phi(k) v^T and `z_NJF` = sum phi(k) over the keys folded so far, float32; J key-map heads."""

    S_NJFV: Tensor
    z_NJF: Tensor

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        return self.S_NJFV, self.z_NJF


def empty_linear(
    rows: int, heads: int, features: int, values: int, dtype: torch.dtype, device: torch.device
) -> LinearState:
    return LinearState(
        lengths_N=torch.zeros(rows, dtype=torch.int64, device=device),
        S_NJFV=torch.zeros(rows, heads, features, values, dtype=dtype, device=device),
        z_NJF=torch.zeros(rows, heads, features, dtype=dtype, device=device),
    )
