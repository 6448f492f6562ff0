"""The state of full softmax attention (a window's state is a `RingState`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import State


@dataclass
class KVState(State):
    """Keys `[N, S, G, D]` and values `[N, S, G, V]`; row n holds its positions 0 .. lengths[n] - 1, zeros behind."""

    k_NSGD: Tensor
    v_NSGV: Tensor


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
        k = torch.cat([state.k_NSGD, k_PGD.unflatten(0, sequences.shape)], 1)
        v = torch.cat([state.v_NSGV, v_PGV.unflatten(0, sequences.shape)], 1)
        return KVState(lengths_N=lengths, k_NSGD=k, v_NSGV=v)
    index = sequences.history_index(held)
    shape = (len(sequences), index.shape[0] // len(sequences))

    def merge(old_NSGD: Tensor, new_PGD: Tensor) -> Tensor:
        zero = new_PGD.new_zeros(1, *new_PGD.shape[1:])
        return torch.cat([new_PGD, old_NSGD.flatten(0, 1), zero]).index_select(0, index).unflatten(0, shape)

    return KVState(lengths_N=lengths, k_NSGD=merge(state.k_NSGD, k_PGD), v_NSGV=merge(state.v_NSGV, v_PGV))
