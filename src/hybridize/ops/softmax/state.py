"""The state of full softmax attention (a window's state is a `RingState`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import State

ROOM = 256
"""Tokens that a state which is continued leaves room for: keys and values are copied once in so many steps, not in each."""


class _Room:
    """Memory that ends behind what a state shows of it. `used` slots are filled; the first state that goes on writes behind them,
    which no other state sees; a second one that goes on from the same place has to copy."""

    def __init__(self, k_NSGD: Tensor, v_NSGV: Tensor, slots: int) -> None:
        rows, self.used = k_NSGD.shape[:2]
        self.k_NSGD = k_NSGD.new_empty(rows, slots, *k_NSGD.shape[2:])
        self.v_NSGV = v_NSGV.new_empty(rows, slots, *v_NSGV.shape[2:])
        self.k_NSGD[:, : self.used] = k_NSGD
        self.v_NSGV[:, : self.used] = v_NSGV

    def fits(self, held: int, end: int) -> bool:
        """Whether slots `held` to `end` may be written here and now."""
        inference = self.k_NSGD.is_inference() == torch.is_inference_mode_enabled()
        return self.used == held and end <= self.k_NSGD.shape[1] and inference

    def write(self, k_NTGD: Tensor, v_NTGV: Tensor) -> tuple[Tensor, Tensor]:
        """Everything up to the new tokens, as views."""
        start, self.used = self.used, self.used + k_NTGD.shape[1]
        self.k_NSGD[:, start : self.used] = k_NTGD
        self.v_NSGV[:, start : self.used] = v_NTGV
        return self.k_NSGD[:, : self.used], self.v_NSGV[:, : self.used]


@dataclass
class KVState(State):
    """Keys `[N, S, G, D]` and values `[N, S, G, V]`; row n holds its positions 0 .. lengths[n] - 1, zeros behind.

    They may be views into memory with `room` for more tokens, which `nbytes` does not count.
    """

    k_NSGD: Tensor
    v_NSGV: Tensor
    room: _Room | None = field(default=None, repr=False, compare=False)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return super(KVState, replace(self, room=None)).map(function)


def append(state: KVState | None, sequences: Sequences, k_PGD: Tensor, v_PGV: Tensor) -> KVState:
    """The state with the call's tokens added to each row."""
    if state is None:
        state = KVState(
            lengths_N=torch.zeros(len(sequences), dtype=torch.int64, device=k_PGD.device),
            k_NSGD=k_PGD.new_zeros(len(sequences), 0, *k_PGD.shape[1:]),
            v_NSGV=v_PGV.new_zeros(len(sequences), 0, *v_PGV.shape[1:]),
        )
    lengths = state.lengths_N + sequences.tensor("lengths")
    held = state.k_NSGD.shape[1]
    if sequences.is_dense and all(start == held for start in sequences.starts):
        new = k_PGD.unflatten(0, sequences.shape), v_PGV.unflatten(0, sequences.shape)
        return _extended(state, lengths, *new)
    index = sequences.history_index(held)
    shape = (len(sequences), index.shape[0] // len(sequences))

    def merge(old_NSGD: Tensor, new_PGD: Tensor) -> Tensor:
        zero = new_PGD.new_zeros(1, *new_PGD.shape[1:])
        return torch.cat([new_PGD, old_NSGD.flatten(0, 1), zero]).index_select(0, index).unflatten(0, shape)

    return KVState(lengths_N=lengths, k_NSGD=merge(state.k_NSGD, k_PGD), v_NSGV=merge(state.v_NSGV, v_PGV))


def _extended(state: KVState, lengths_N: Tensor, k_NTGD: Tensor, v_NTGV: Tensor) -> KVState:
    """Every row with the same number of tokens more."""
    held, tokens = state.k_NSGD.shape[1], k_NTGD.shape[1]
    same = state.k_NSGD.dtype == k_NTGD.dtype and state.v_NSGV.dtype == v_NTGV.dtype
    # autograd may need what a later token's write would mark as changed
    if held == 0 or tokens > ROOM or not same or torch.is_grad_enabled():
        k, v = torch.cat([state.k_NSGD, k_NTGD], 1), torch.cat([state.v_NSGV, v_NTGV], 1)
        return KVState(lengths_N=lengths_N, k_NSGD=k, v_NSGV=v)
    room = state.room
    if room is None or not room.fits(held, held + tokens):
        room = _Room(state.k_NSGD, state.v_NSGV, held + tokens + ROOM)
    k, v = room.write(k_NTGD, v_NTGV)
    return KVState(lengths_N=lengths_N, k_NSGD=k, v_NSGV=v, room=room)
