"""The states that chunks start from, one chunk after another, all sequences of a call in lockstep.

For operations whose state is carried over chunks by something that is not a plain sum: decays, delta rules.

Legend: N sequences, M chunks of all sequences in the grid's order, n sequences of a round, H heads, D, V state dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridize.ops.grid import Grid
from hybridize.ops.rearrange import rearrange

Step = Callable[..., Tensor]
"""(state `[n, H, D, V]`, *pieces `[n, ...]`) -> the state after one chunk of each of the n sequences"""


def walk(grid: Grid, start_NHDV: Tensor, step: Step, *laid_M: Tensor) -> tuple[Tensor, Tensor]:
    """`(entering_MHDV, final_NHDV)`: the state before each chunk, and the one after the last chunk of each sequence.

    `laid_M` are tensors `[M, ...]` with what `step` needs of each chunk, in the grid's order (as `grid.lay_keys` gives
    them). Round j takes chunk j of every sequence that has one: `step(state, *pieces)` gets the states of these n
    sequences and the rows of `laid_M` for their chunks, in the same order, and returns the next states. It must treat
    the n rows apart and must not write to its arguments. An example, the scalar decay:

        entering, final = walk(grid, start, lambda S, decay, kv: decay * S + kv, decay_MH11, kv_MHDV)

    Hand tensors in here rather than index them inside `step`: the backward of an index fills a whole `[M, ...]` with
    zeros each round, and a training step then costs the square of the number of chunks.

    Differentiable; memory is linear in the chunks; a sequence without tokens keeps its start.
    """
    if grid.chunks == 0:
        return start_NHDV.new_zeros(0, *start_NHDV.shape[1:]), start_NHDV
    rounds = grid.sequences.once(("rounds", grid.chunk, grid.window), lambda: _Rounds.of(grid))
    pieces = zip(*(rounds.split(x) for x in laid_M), strict=True) if laid_M else ((),) * len(rounds.sizes)
    state, entering, finished = rounds.sort(start_NHDV), [], []
    for size, piece in zip(rounds.sizes, pieces, strict=True):
        if size < len(state):
            state, done = state.split([size, len(state) - size])
            finished.append(done)
        entering.append(state)
        state = step(state, *piece)
    final = torch.cat([state, *reversed(finished)]) if finished else state
    return rounds.join(entering), rounds.unsort(final)


@dataclass(frozen=True)
class _Rounds:
    """Which chunks each round takes. Sequences are sorted by falling number of chunks: round j takes the first
    `sizes[j]`. The indices are None where every sequence has equally many chunks: slices serve then."""

    sizes: list[int]
    chunk_of_place_M: Tensor | None = None
    place_of_chunk_M: Tensor | None = None
    row_of_rank_N: Tensor | None = None
    rank_of_row_N: Tensor | None = None

    @classmethod
    def of(cls, grid: Grid) -> _Rounds:
        counts, move = grid.chunks_of_row, grid.sequences.move
        most = int(counts.max())
        if (counts == most).all():
            return cls([len(counts)] * most)
        row_of_rank = np.argsort(-counts, kind="stable")
        rank_of_row = np.argsort(row_of_rank)
        sizes = np.bincount(grid.place_in_row, minlength=most)
        place = (np.cumsum(sizes) - sizes)[grid.place_in_row] + rank_of_row[grid.row_of_chunk]
        return cls(sizes.tolist(), move(np.argsort(place)), move(place), move(row_of_rank), move(rank_of_row))

    def split(self, x_M: Tensor) -> tuple[Tensor, ...]:
        """The rows of each round."""
        if self.chunk_of_place_M is None or self.place_of_chunk_M is None:
            return x_M.unflatten(0, (self.sizes[0], len(self.sizes))).unbind(1)
        return rearrange(x_M, self.chunk_of_place_M, self.place_of_chunk_M).split(self.sizes)

    def join(self, states: list[Tensor]) -> Tensor:
        """What was computed round by round, `[M, ...]` in the grid's order."""
        if self.chunk_of_place_M is None or self.place_of_chunk_M is None:
            return torch.stack(states, 1).flatten(0, 1)
        return rearrange(torch.cat(states), self.place_of_chunk_M, self.chunk_of_place_M)

    def sort(self, x_N: Tensor) -> Tensor:
        if self.row_of_rank_N is None or self.rank_of_row_N is None:
            return x_N
        return rearrange(x_N, self.row_of_rank_N, self.rank_of_row_N)

    def unsort(self, x_N: Tensor) -> Tensor:
        if self.row_of_rank_N is None or self.rank_of_row_N is None:
            return x_N
        return rearrange(x_N, self.rank_of_row_N, self.row_of_rank_N)
