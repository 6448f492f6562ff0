"""The cache of a hybrid model: one `State` a layer and head group, whatever the mixture of attentions.

A plain object with the interface that transformers' models and `generate` call; rows are made by the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridize.layers.token_mixer import Effective
from hybridize.ops.types import State


class HybridCache:
    """States of all layers, tokens seen by each row, and columns seen (padding included)."""

    is_compileable = False
    is_croppable = False

    def __init__(self, groups_per_layer: list[int]) -> None:
        self._groups = list(groups_per_layer)
        self._is_user_defined = False
        self.states: list[list[State | None]] = []
        self.reset()

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self._groups)

    @property
    def is_linear(self) -> list[bool]:
        """As transformers reads it: no layer is one that its own linear-attention code must prepare."""
        return [False] * len(self._groups)

    def reset(self) -> None:
        """Forget everything."""
        self.states = [[None] * count for count in self._groups]
        self.columns = 0
        self.lengths: list[int] | None = None
        # what filled it, layer by layer: states of one override mean nothing to another
        self.effective: list[Effective] | None = None

    def advance(
        self, states: list[list[State | None]], columns: int, lengths: list[int], effective: list[Effective]
    ) -> None:
        """Take a finished call's states, its columns and each row's total of real tokens. A call that failed leaves
        the cache as it was."""
        self.states, self.effective = states, effective
        self.columns += columns
        self.lengths = lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included (what `generate` slices inputs by)."""
        return self.columns

    def _map(self, function: Any) -> None:
        self.states = [[None if s is None else function(s) for s in layer] for layer in self.states]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of `beam_idx`; a row may appear several times or not at all."""
        self._map(lambda state: state.select(beam_idx))
        if self.lengths is not None:
            self.lengths = [self.lengths[index] for index in beam_idx.tolist()]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row."""
        self._map(lambda state: state.repeat(repeats))
        if self.lengths is not None:
            self.lengths = [length for length in self.lengths for _ in range(repeats)]

    def crop(self, max_length: int) -> None:
        raise ValueError("a hybrid cache cannot be cropped: folded keys cannot be taken out of a state again")

    def snapshot(self) -> HybridCache:
        """A cache that goes on from here without touching this one (prefix reuse). Nothing is copied: what a state shows is
        never written again, and of two caches that go on from one state only the first writes behind it. One thread at a time."""
        copy = HybridCache(self._groups)
        copy.states = [list(layer) for layer in self.states]
        copy.columns, copy.lengths = self.columns, list(self.lengths) if self.lengths is not None else None
        copy.effective = self.effective
        return copy

    def restore(self, snapshot: HybridCache) -> None:
        """Go back to a snapshot."""
        other = snapshot.snapshot()
        self.states, self.columns = other.states, other.columns
        self.lengths, self.effective = other.lengths, other.effective

    def to(self, device: torch.device | str) -> HybridCache:
        """Every state on `device`."""
        self._map(lambda state: state.to(device))
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for layer in self.states for state in layer if state is not None)
