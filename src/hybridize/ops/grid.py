"""The chunk grid of one call: tokens laid on chunks that are aligned to absolute positions.

A chunk starts at a multiple of the chunk length in its sequence, so the same masks serve every chunk, whatever the phase of
padding, packing or a cache. With a window, a chunk's keys are those of the chunk before and its own.

Legend: P tokens of all sequences, N sequences, M chunks of all sequences, C chunk length, K keys of a chunk (C, or 2C with the
chunk before), R ring slots, H heads (any), D, V any trailing width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybridize.ops.rearrange import rearrange
from hybridize.ops.ring import stack_sources
from hybridize.ops.sequences import Sequences
from hybridize.windows import Window

PADDED_PREFIX = 8
"""Prefix sums go through a padded `[N, most chunks]` layout while that is at most so many times the chunks."""


def get_grid(sequences: Sequences, chunk: int, window: Window | None) -> Grid:
    """The grid of a call, made once; `window` None gives chunks whose keys are their own tokens alone."""
    return sequences.once(("grid", chunk, window), lambda: Grid(sequences, chunk, window))


class Grid:
    """Indices and masks of the grid. Slots without a token or key are zero when laid, and masked.

    In numpy: `chunks_of_row` [N] counts the chunks of each sequence; `row_of_chunk` [M] is the sequence of each chunk and
    `place_in_row` [M] its place there, from 0.
    """

    def __init__(self, sequences: Sequences, chunk: int, window: Window | None) -> None:
        self.sequences, self.chunk, self.window = sequences, chunk, window
        starts, ends = sequences.array("starts"), sequences.array("ends")
        kept = np.asarray([window.kept_from(int(start)) for start in starts]) if window else starts
        first = kept // chunk
        counts = np.where(ends > starts, -(-ends // chunk) - first, 0)
        self.row_of_chunk = np.repeat(np.arange(len(starts)), counts)
        self.place_in_row = np.arange(len(self.row_of_chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._start = (first[self.row_of_chunk] + self.place_in_row) * chunk
        self._kept, self.chunks_of_row = kept, counts
        self.chunks = len(self.row_of_chunk)
        self.keys = 2 * chunk if window else chunk
        slots = (np.cumsum(counts) - counts) * chunk - first * chunk
        self._token = slots[sequences.array("row")] + sequences.array("position")
        self._ring = window.ring if window else 0
        position = self._start[:, None] + np.arange(chunk)
        self._source = self._find(position)
        self.identity = self._source.size == sequences.total and bool(
            (self._source.reshape(-1) == np.arange(sequences.total)).all()
        )

    def _find(self, position_MK: np.ndarray) -> np.ndarray:
        """Index of positions (of each chunk's sequence) into (new tokens, ring, zero row)."""
        sequences, row = self.sequences, self.row_of_chunk[:, None]
        starts, ends = sequences.array("starts")[row], sequences.array("ends")[row]
        begin = np.asarray(sequences.bounds[:-1], dtype=np.int64)[row]
        new = begin - starts + position_MK
        old = sequences.total + row * self._ring + position_MK % max(self._ring, 1)
        held = (position_MK >= self._kept[row]) & (position_MK < ends)
        index = np.where(position_MK >= starts, new, old)
        return np.where(held, index, sequences.total + len(sequences) * self._ring)

    @cached_property
    def row_M(self) -> Tensor:
        """Sequence of each chunk."""
        return self.sequences.move(self.row_of_chunk)

    @cached_property
    def position_MC(self) -> Tensor:
        """Absolute position of each slot."""
        return self.sequences.move(self._start[:, None] + np.arange(self.chunk))

    @cached_property
    def _positions_MK(self) -> np.ndarray:
        return self._start[:, None] + np.arange(self.chunk - self.keys, self.chunk)

    @cached_property
    def _query_source(self) -> Tensor:
        return self.sequences.move(np.minimum(self._source.reshape(-1), self.sequences.total))

    @cached_property
    def _key_source(self) -> np.ndarray:
        return self._find(self._positions_MK)

    @cached_property
    def _key_source_with_ring(self) -> Tensor:
        return self.sequences.move(self._key_source.reshape(-1))

    @cached_property
    def _key_source_without_ring(self) -> Tensor:
        return self.sequences.move(np.minimum(self._key_source.reshape(-1), self.sequences.total))

    def lay_queries(self, x_PHD: Tensor) -> Tensor:
        """`[M, H, C, D]` of the call's tokens."""
        laid = x_PHD if self.identity else rearrange(x_PHD, self._query_source, self._token_P)
        return laid.unflatten(0, (self.chunks, self.chunk)).transpose(1, 2)

    def lay_keys(self, x_PGD: Tensor, ring_NRGD: Tensor | None = None) -> Tensor:
        """`[M, G, K, D]`: keys or values of each chunk, from the call's tokens and the ring."""
        if self.identity and self.keys == self.chunk:
            laid = x_PGD
        else:
            index = self._key_source_without_ring if ring_NRGD is None else self._key_source_with_ring
            laid = stack_sources(x_PGD, ring_NRGD).index_select(0, index)
        return laid.unflatten(0, (self.chunks, self.keys)).transpose(1, 2)

    def own(self, x_MGKD: Tensor) -> Tensor:
        """`[M, G, C, D]`: a chunk's own slots out of its K keys (or of its own already)."""
        return x_MGKD[:, :, x_MGKD.shape[2] - self.chunk :]

    def gather(self, x_MHCV: Tensor) -> Tensor:
        """Back to tokens: `[P, H, ...]`."""
        flat = x_MHCV.transpose(1, 2).flatten(0, 1)
        return flat if self.identity else rearrange(flat, self._token_P, self._query_source)

    @cached_property
    def _token_P(self) -> Tensor:
        return self.sequences.move(self._token)

    @cached_property
    def _offsets(self) -> tuple[Tensor, Tensor]:
        """Query and key positions within a chunk's frame, whose zero lies at a multiple of the chunk length."""
        t = torch.arange(self.keys - self.chunk, self.keys, device=self.sequences.device)[:, None]
        return t, torch.arange(self.keys, device=self.sequences.device)[None, :]

    @cached_property
    def hidden_M11CK(self) -> Tensor:
        """Which keys the window's softmax does not see, its sinks as columns behind: `[M, 1, 1, C, K + s]`."""
        assert self.window is not None
        near = replace(self.window, sinks=0).near(*self._offsets)[None]
        position = self._positions_MK
        row = self.row_of_chunk[:, None]
        held = (position >= np.maximum(self._kept[row], self.window.sinks)) & (
            position < self.sequences.array("ends")[row]
        )
        near = near & self.sequences.move(held)[:, None, :]
        if self.window.sinks:
            sinks = torch.arange(self.window.sinks, device=near.device) <= self.position_MC[:, :, None]
            near = torch.cat([near, sinks], dim=2)
        return ~near[:, None, None]

    def reaches_frame(self, everything: bool) -> bool:
        """Whether some of a chunk's K keys are far from one of its queries: their features are wanted then."""
        window = self.window
        if window is None or everything or window.overlap:
            return True
        return not (window.kind == "terraced" and self.chunk == window.size)

    def not_far_CK(self, everything: bool) -> Tensor:
        """Which of a chunk's keys do not reach a query through the linear branch."""

        def make() -> Tensor:
            t, i = self._offsets
            if self.window is None or everything:
                return i > t
            return ~replace(self.window, sinks=0).far(t, i)  # sinks are not folded in, see `foldable_MK`

        return self.sequences.once(("not far", self.chunk, self.window, everything), make)

    def foldable_MK(self, everything: bool) -> Tensor:
        """Which keys enter far sums: those that the memory does not hold yet; sinks only with `everything`."""

        def make() -> Tensor:
            window, row, position = self.window, self.row_of_chunk[:, None], self._positions_MK
            in_memory = window is None or window.overlap
            low = self.sequences.array("starts")[row] if in_memory else self._kept[row]
            if window is not None and not in_memory and not everything:
                low = np.maximum(low, window.sinks)
            return self.sequences.move((position >= low) & (position < self.sequences.array("ends")[row]))

        return self.sequences.once(("foldable", self.chunk, self.window, everything), make)

    @cached_property
    def leaving_MC(self) -> Tensor:
        """Which of the chunks' own keys have left the window by the end of their sequence."""
        end = self.sequences.array("ends")
        if self.window is not None and not self.window.overlap:
            end = np.asarray([self.window.kept_from(int(e)) for e in end])
        leaving = self._start[:, None] + np.arange(self.chunk) < end[self.row_of_chunk][:, None]
        return self.sequences.move(leaving) & self.foldable_MK(False)[:, self.keys - self.chunk :]

    @cached_property
    def has_far_P(self) -> Tensor:
        """Whether each token has a far key."""
        assert self.window is not None
        return self.window.has_far(self.sequences.tensor("position"))

    def prefix(self, x_MX: Tensor) -> Tensor:
        """Sum over the chunks before the ones that chunk m's own keys cover, within its sequence. Nothing crosses sequences."""
        lag = self.keys // self.chunk
        most, rows = int(self.chunks_of_row.max(initial=0)), len(self.sequences)
        if rows * (most + lag) > PADDED_PREFIX * self.chunks + 64:
            return self._doubling(x_MX, lag, most)
        place_M, read_M = self._padded_places(most + lag, lag)
        buffer = x_MX.new_zeros(rows * (most + lag), *x_MX.shape[1:])
        sums = buffer.index_copy(0, place_M, x_MX).unflatten(0, (rows, most + lag)).cumsum(1)
        return sums.flatten(0, 1).index_select(0, read_M)

    def _padded_places(self, width: int, lag: int) -> tuple[Tensor, Tensor]:
        """Where chunk i of a sequence is written (`lag` late) and read in the padded layout."""

        def make() -> tuple[Tensor, Tensor]:
            read = self.row_of_chunk * width + self.place_in_row
            return self.sequences.move(read + lag), self.sequences.move(read)

        return self.sequences.once(("places", self.chunk, self.window), make)

    def _doubling(self, x_MX: Tensor, lag: int, most: int) -> Tensor:
        """Prefix sums by doubling, for sequences of very uneven lengths."""
        total, by = x_MX, 1
        while by < most:
            total = total + self._shift(total, by)
            by *= 2
        return self._shift(total, lag)

    def _shift(self, x_MX: Tensor, by: int) -> Tensor:
        """Chunk m gets chunk m - by of its sequence; zeros where there is none."""
        shifted = torch.cat([x_MX.new_zeros(min(by, self.chunks), *x_MX.shape[1:]), x_MX[:-by]])
        outside = self.sequences.move(self.place_in_row < by).view(-1, *(1,) * (x_MX.dim() - 1))
        return shifted.masked_fill(outside, 0)
