"""What the recurrences share (`decay`, `delta`, `dplr`): their state, one matrix a head, and the checks around it.

Legend: B rows, T tokens, H heads, D key dim, V value dim, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import State


@dataclass
class RecurrentState(State):
    """`S_NHDV`: what the tokens so far have written, as a map from keys to values; float32, or float64 for float64 inputs."""

    S_NHDV: Tensor

    @classmethod
    def empty(
        cls, rows: int, heads: int, dim: int, values: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """The state of rows that have seen no token."""
        return cls(
            lengths_N=torch.zeros(rows, dtype=torch.int64, device=device),
            S_NHDV=torch.zeros(rows, heads, dim, values, dtype=dtype, device=device),
        )

    def after(self, tokens: Tensor | int, S_NHDV: Tensor) -> Self:
        """The state `tokens` (a number, or one for each row) later."""
        return type(self)(lengths_N=self.lengths_N + tokens, S_NHDV=S_NHDV)


def sequences_of(
    q_BTHD: Tensor, v_BTHV: Tensor, sequences: Sequences | None, state: RecurrentState | None
) -> Sequences:
    """The call's sequences: dense rows that continue the state unless given. Refuses a state of another call's shape."""
    if sequences is None:
        starts = state.lengths_N.tolist() if state is not None else None
        sequences = Sequences.dense(q_BTHD.shape[0], q_BTHD.shape[1], starts, q_BTHD.device)
    if state is not None:
        check_state(q_BTHD, v_BTHV, state, len(sequences))
    return sequences


def check_step(name: str, q_B1HD: Tensor, v_B1HV: Tensor, state: RecurrentState) -> None:
    """Refuse more than one token a row, and a state of another call's shape; `name` is what the operation calls q."""
    check_state(q_B1HD, v_B1HV, state, q_B1HD.shape[0])
    if q_B1HD.shape[1] != 1:
        raise ValueError(f"{name} has {q_B1HD.shape[1]} tokens a row; a step takes 1")


def check_state(q_BTHD: Tensor, v_BTHV: Tensor, state: RecurrentState, rows: int) -> None:
    """Refuse a state of other rows, heads or dims."""
    needed = (rows, *q_BTHD.shape[2:], v_BTHV.shape[3])
    if tuple(state.S_NHDV.shape) != needed:
        raise ValueError(f"state holds S of shape {tuple(state.S_NHDV.shape)}; the call needs {needed}")
