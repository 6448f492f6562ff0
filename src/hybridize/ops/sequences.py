"""The sequences of one call, as plain integers, and the indices that operations need of them.

A call holds N sequences, either as rows of a dense `[B, T]` batch or one after another in a packed row `[1, P]`.
Internally all operations see the tokens flat, `[P, ...]`.

Legend: P tokens of all sequences, N sequences, R ring slots, s sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Made = TypeVar("Made")


class Sequences:
    """Lengths (new tokens) and starts (tokens seen before) of the sequences of one call, as plain integers.

    Indices and masks are made once (`once`) and shared by all layers of a forward pass.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        starts: Sequence[int] | None = None,
        *,
        shape: tuple[int, int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.lengths = tuple(int(length) for length in lengths)
        self.starts = (
            tuple(int(start) for start in starts) if starts is not None else (0,) * len(self.lengths)
        )
        self.shape = shape  # (B, T) of the tensors that the call passes
        self.device = torch.device(device)
        if len(self.starts) != len(self.lengths):
            raise ValueError(f"starts has {len(self.starts)} entries for {len(self.lengths)} sequences")
        if min(self.lengths, default=0) < 0 or sum(self.lengths) != shape[0] * shape[1]:
            raise ValueError(
                f"the sequences hold {sum(self.lengths)} tokens; the tensors hold {shape[0]} x {shape[1]}"
            )
        self._made: dict[Hashable, Any] = {}

    @classmethod
    def dense(
        cls, rows: int, length: int, starts: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Sequences:
        """Every row of a `[rows, length]` batch is one sequence."""
        return cls((length,) * rows, starts, shape=(rows, length), device=device)

    @classmethod
    def packed(
        cls, cu_seqlens: Tensor, starts: Sequence[int] | None = None, shape: tuple[int, int] | None = None
    ) -> Sequences:
        """Sequences one after another in a row; `cu_seqlens` [N+1] holds 0 and the running totals."""
        bounds = cu_seqlens.tolist()
        if len(bounds) < 2 or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens is {bounds[:8]}; it must start at 0 and never fall")
        lengths = [b - a for a, b in pairwise(bounds)]
        return cls(lengths, starts, shape=shape or (1, bounds[-1]), device=cu_seqlens.device)

    def __len__(self) -> int:
        return len(self.lengths)

    def on(self, device: torch.device) -> Sequences:
        """The same sequences with their tensors on `device` (layers of one model may lie on several)."""
        if device == self.device:
            return self
        return self.once(
            device, lambda: Sequences(self.lengths, self.starts, shape=self.shape, device=device)
        )

    @property
    def total(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def bounds(self) -> list[int]:
        """Running totals [N+1] of the lengths."""
        return [0, *accumulate(self.lengths)]

    @property
    def is_dense(self) -> bool:
        """Whether the tensors' rows are the sequences."""
        return self.shape[0] == len(self.lengths) and all(length == self.shape[1] for length in self.lengths)

    @property
    def is_step(self) -> bool:
        """One new token in every row."""
        return self.shape[1] == 1 and self.is_dense

    @torch.compiler.disable
    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives, made once for this call and shared by its layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def tensor(self, name: str) -> Tensor:
        """`lengths`, `starts`, `ends` [N], or `position` and `row` [P], as int64 on the call's device."""
        return self.once(name, lambda: self.move(self.array(name)))

    def move(self, array: np.ndarray) -> Tensor:
        """An array as a tensor on the call's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def array(self, name: str) -> np.ndarray:
        """The same as `tensor`, in numpy."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        starts = np.asarray(self.starts, dtype=np.int64)
        if name == "lengths":
            return lengths
        if name == "starts":
            return starts
        if name == "ends":
            return starts + lengths
        row = np.repeat(np.arange(len(lengths)), lengths)
        if name == "row":
            return row
        if name != "position":
            raise KeyError(name)
        offset = np.arange(self.total) - np.asarray(self.bounds[:-1], dtype=np.int64)[row]
        return starts[row] + offset

    def ring_index(self, slots: int) -> Tensor:
        """[N*R] where each ring slot finds its key after the call: slot j holds the last position p with p % R = j."""
        ends = self.array("ends")[:, None]
        latest = ends - 1 - ((ends - 1 - np.arange(slots)) % slots)
        return self.once(("ring", slots), lambda: self._locate(latest, slots))

    def sink_index(self, sinks: int) -> Tensor:
        """[N*s] where each of the first `sinks` positions finds its key after the call."""
        positions = np.broadcast_to(np.arange(sinks), (len(self), sinks))
        return self.once(("sinks", sinks), lambda: self._locate(positions, sinks))

    def history_index(self, held: int) -> Tensor:
        """[N*S] where positions 0 .. S-1 (S: the longest row after the call) lie in (new tokens, old [N*held], zero row)."""
        longest = int(self.array("ends").max(initial=0))
        positions = np.broadcast_to(np.arange(longest), (len(self), longest))
        return self.once(("history", held), lambda: self._locate(positions, held))

    def padded(self) -> tuple[Tensor, Tensor]:
        """`[N, T]` index of each row's tokens, right-padded with index P, and [P] the way back into its flat form."""

        def make() -> tuple[Tensor, Tensor]:
            index = self._padded_index(np.arange(len(self)))
            offset = self.array("position") - self.array("starts")[self.array("row")]
            return self.move(index), self.move(self.array("row") * index.shape[1] + offset)

        return self.once("padded", make)

    def buckets(self, ratio: int) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
        """Sequences in groups whose lengths differ at most by `ratio`, right-padded: the groups' shapes (n, T); for every
        slot of the flattened, concatenated groups its token, P for padding; and [P] the slot of each token."""

        def make() -> tuple[list[tuple[int, int]], Tensor, Tensor]:
            lengths = self.array("lengths")
            size = np.where(lengths > 0, np.log(np.maximum(lengths, 1)) // np.log(ratio), -1)
            groups = [np.flatnonzero(size == value) for value in np.unique(size[size >= 0])]
            indices = [self._padded_index(group) for group in groups]
            back = np.empty(self.total + 1, dtype=np.int64)
            flat = np.concatenate([index.reshape(-1) for index in indices])
            back[flat] = np.arange(len(flat))
            return [index.shape for index in indices], self.move(flat), self.move(back[:-1])

        return self.once(("buckets", ratio), make)

    def _padded_index(self, rows: np.ndarray) -> np.ndarray:
        lengths = self.array("lengths")[rows]
        begin = np.asarray(self.bounds[:-1], dtype=np.int64)[rows]
        column = np.arange(int(lengths.max(initial=0)))
        return np.where(column < lengths[:, None], begin[:, None] + column, self.total)

    def _locate(self, position_NK: np.ndarray, slots: int) -> Tensor:
        """Index of positions into (new tokens, old slots [N*slots], zero row), flat; outside a sequence: the zero row."""
        starts, ends = self.array("starts")[:, None], self.array("ends")[:, None]
        begin = np.asarray(self.bounds[:-1], dtype=np.int64)[:, None]
        rows = np.arange(len(self))[:, None]
        new = begin - starts + position_NK
        old = self.total + rows * slots + position_NK % max(slots, 1)
        index = np.where(position_NK >= starts, new, old)
        inside = (position_NK >= 0) & (position_NK < ends)
        index = np.where(inside, index, self.total + len(self) * slots)
        return self.move(index.reshape(-1))
