"""The sequences of one call, and their grid of position-aligned chunks.

A call holds N sequences, either as rows of a dense `[B, T]` batch or one after another in a packed row `[1, P]`.
Internally all operations see the tokens flat, `[P, ...]`. Chunks are aligned to absolute positions of their sequence
(a chunk starts at a multiple of the chunk length), so the same masks serve every chunk, whatever the phase.

Legend: P tokens of all sequences, N sequences, M chunks of all sequences, C chunk length, R ring slots, s sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from hybridize.windows import Window


@dataclass(frozen=True)
class Grid:
    """Where each chunk position finds its key, and where each token finds its output. Tensors on the call's device."""

    chunk: int
    rows: int
    source_X: (
        Tensor | None
    )  # [M*C] index into (new tokens [P], ring [N*R], one row of zeros); None: the identity
    valid_MC: Tensor | None  # bool: the position holds a key (new or from the ring); None: every one does
    fresh_MC: Tensor | None  # bool: the key is a new token; None: as `valid_MC`
    start_M: Tensor  # position of the chunk's first slot in its sequence
    row_M: Tensor  # sequence of the chunk
    index_M: Tensor  # number of the chunk within its sequence's grid, from 0
    most_chunks: int  # the largest number of chunks of a sequence
    even: bool  # every sequence has `most_chunks` chunks
    token_P: Tensor  # [P] index into the [M*C] slots

    @property
    def chunks(self) -> int:
        return self.row_M.shape[0]


class Sequences:
    """Lengths (new tokens) and starts (tokens seen before) of the sequences of one call, as plain integers.

    Grids are built once and shared by all layers of a forward pass.
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
        self._grids: dict[tuple[int, Window | None], Grid] = {}
        self._tensors: dict[str, Tensor] = {}
        self._buckets: list[Tensor] = []
        self._elsewhere: dict[torch.device, Sequences] = {}

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
        if device not in self._elsewhere:
            self._elsewhere[device] = Sequences(self.lengths, self.starts, shape=self.shape, device=device)
        return self._elsewhere[device]

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

    def tensor(self, name: str) -> Tensor:
        """`lengths`, `starts`, `ends` [N], or `position` and `row` [P], as int64 on the call's device."""
        if name not in self._tensors:
            self._tensors[name] = torch.from_numpy(self._array(name)).to(self.device)
        return self._tensors[name]

    def _array(self, name: str) -> np.ndarray:
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
        name = f"ring {slots}"
        if name not in self._tensors:
            ends = self._array("ends")[:, None]
            latest = ends - 1 - ((ends - 1 - np.arange(slots)) % slots)
            self._tensors[name] = self._locate(latest, slots)
        return self._tensors[name]

    def sink_index(self, sinks: int) -> Tensor:
        """[N*s] where each of the first `sinks` positions finds its key after the call."""
        name = f"sinks {sinks}"
        if name not in self._tensors:
            positions = np.broadcast_to(np.arange(sinks), (len(self), sinks))
            self._tensors[name] = self._locate(positions, sinks)
        return self._tensors[name]

    def history_index(self, held: int) -> Tensor:
        """[N*S] where positions 0 .. S-1 (S: the longest row after the call) lie in (new tokens, old [N*held], zero row)."""
        name = f"history {held}"
        if name not in self._tensors:
            longest = int(self._array("ends").max(initial=0))
            positions = np.broadcast_to(np.arange(longest), (len(self), longest))
            self._tensors[name] = self._locate(positions, held)
        return self._tensors[name]

    def padded(self) -> tuple[Tensor, Tensor]:
        """`[N, T]` index of each row's tokens, right-padded with index P, and [P] the way back into its flat form."""
        if "padded" not in self._tensors:
            index = self._padded_index(np.arange(len(self)))
            self._tensors["padded"] = torch.from_numpy(index).to(self.device)
            offset = self._array("position") - self._array("starts")[self._array("row")]
            self._tensors["unpadded"] = torch.from_numpy(self._array("row") * index.shape[1] + offset).to(
                self.device
            )
        return self._tensors["padded"], self._tensors["unpadded"]

    def buckets(self) -> list[Tensor]:
        """Sequences in groups whose lengths differ at most by 2x: a list of `[n, T]` indices, right-padded with P."""
        if not self._buckets:
            lengths = self._array("lengths")
            size = np.where(lengths > 0, np.ceil(np.log2(np.maximum(lengths, 1))), -1)
            groups = [np.flatnonzero(size == value) for value in np.unique(size[size >= 0])]
            indices = [self._padded_index(group) for group in groups]
            back = np.empty(self.total + 1, dtype=np.int64)
            flat = np.concatenate([index.reshape(-1) for index in indices])
            back[flat] = np.arange(len(flat))
            self._buckets = [torch.from_numpy(index).to(self.device) for index in indices]
            self._tensors["from_buckets"] = torch.from_numpy(back[:-1].copy()).to(self.device)
        return self._buckets

    def from_buckets(self) -> Tensor:
        """[P] where each token lies in the concatenated, flattened buckets."""
        self.buckets()
        return self._tensors["from_buckets"]

    def _padded_index(self, rows: np.ndarray) -> np.ndarray:
        lengths = self._array("lengths")[rows]
        begin = np.asarray(self.bounds[:-1], dtype=np.int64)[rows]
        column = np.arange(int(lengths.max(initial=0)))
        return np.where(column < lengths[:, None], begin[:, None] + column, self.total)

    def _locate(self, position_NK: np.ndarray, slots: int) -> Tensor:
        """Index of positions into (new tokens, old slots [N*slots], zero row), flat; outside a sequence: the zero row."""
        starts, ends = self._array("starts")[:, None], self._array("ends")[:, None]
        begin = np.asarray(self.bounds[:-1], dtype=np.int64)[:, None]
        rows = np.arange(len(self))[:, None]
        new = begin - starts + position_NK
        old = self.total + rows * slots + position_NK % max(slots, 1)
        index = np.where(position_NK >= starts, new, old)
        inside = (position_NK >= 0) & (position_NK < ends)
        index = np.where(inside, index, self.total + len(self) * slots)
        return torch.from_numpy(index.reshape(-1)).to(self.device)

    def grid(self, chunk: int, window: Window | None) -> Grid:
        """The chunk grid for keys kept by `window` (None: only the new tokens have keys)."""
        key = (chunk, window)
        if key not in self._grids:
            self._grids[key] = self._build_grid(chunk, window)
        return self._grids[key]

    def _build_grid(self, chunk: int, window: Window | None) -> Grid:
        lengths, starts = self._array("lengths"), self._array("starts")
        ends = starts + lengths
        kept = np.asarray([window.kept_from(int(start)) for start in starts]) if window else starts
        first = kept // chunk
        counts = np.where(lengths > 0, -(-ends // chunk) - first, 0)
        row = np.repeat(np.arange(len(lengths)), counts)
        index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = (first[row] + index) * chunk
        position = start[:, None] + np.arange(chunk)
        valid = (position >= kept[row][:, None]) & (position < ends[row][:, None])
        fresh = valid & (position >= starts[row][:, None])
        begin = np.asarray(self.bounds[:-1], dtype=np.int64)
        ring = window.ring if window else 0
        zero = self.total + len(lengths) * ring
        new = (begin - starts)[row][:, None] + position
        old = self.total + (row * ring)[:, None] + (position % ring if ring else 0)
        source = np.where(fresh, new, np.where(valid, old, zero)).reshape(-1)
        slots = (np.cumsum(counts) - counts) * chunk - first * chunk
        token_row = self._array("row")
        token = slots[token_row] + self._array("position")
        identity = len(source) == self.total and bool(fresh.all())
        device = self.device

        def move(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return Grid(
            chunk=chunk,
            rows=len(lengths),
            source_X=None if identity else move(source),
            valid_MC=None if valid.all() else move(valid),
            fresh_MC=None if fresh.all() else move(fresh),
            start_M=move(start),
            row_M=move(row),
            index_M=move(index),
            most_chunks=int(counts.max(initial=0)),
            even=bool((counts == counts[0]).all()) if len(counts) else True,
            token_P=move(token),
        )
