"""Batches of packed rows: an endless shuffled stream for training that starts at any step, and one ordered pass.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridize.data.packing import IGNORED, PackedRows, Progress, TooLittleText, build_rows
from hybridize.data.spec import DataSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """What a model and a loss take.

    All three are int64 of shape [B, T].

    Attributes:
        input_ids_BT: token ids.
        labels_BT: not shifted (position t holds token t); -100 at the first token of every document or piece, in
            masked prompts, and nowhere else. There is no padding.
        position_ids_BT: from 0 in every document or piece: documents do not see each other.
    """

    input_ids_BT: Tensor
    labels_BT: Tensor
    position_ids_BT: Tensor

    @property
    def tokens(self) -> int:
        """Number of targets."""
        return int((self.labels_BT != IGNORED).sum())

    def first(self, rows: int) -> Batch:
        """The first rows alone."""
        return Batch(self.input_ids_BT[:rows], self.labels_BT[:rows], self.position_ids_BT[:rows])

    def to(self, device: str | torch.device) -> Batch:
        return Batch(
            *(tensor.to(device) for tensor in (self.input_ids_BT, self.labels_BT, self.position_ids_BT))
        )


def batches(rows: PackedRows, batch_size: int, *, seed: int, start_step: int = 0) -> Iterator[Batch]:
    """Endless batches, rows in a new order each epoch, from step `start_step` on.

    Step k takes the rows at places `k * batch_size ...` of the concatenated epochs, so no row is dropped, a batch may
    span two epochs, and starting late costs one permutation. Epoch e's order depends on (seed, e) alone.

    Raises:
        ValueError: `batch_size` below 1 or `start_step` below 0.
    """
    if batch_size < 1 or start_step < 0:
        raise ValueError(
            f"batch_size is {batch_size} and start_step {start_step}; they must be at least 1 and 0"
        )
    return _endless(rows, batch_size, seed, start_step)


def ordered_batches(rows: PackedRows, batch_size: int, tokens: int | None = None) -> Iterator[Batch]:
    """One pass in the order of the rows, for evaluation; the last batch may be smaller.

    Args:
        tokens: read only the first rows, enough for this many tokens; None reads all.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    count = len(rows) if tokens is None else min(len(rows), -(-tokens // rows.length))
    return (make_batch(rows, range(i, min(i + batch_size, count))) for i in range(0, count, batch_size))


def held_out_batches(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    batch_size: int,
    progress: Progress | None = None,
) -> list[Batch]:
    """The first `rows` rows of a text's test split (fewer where it has fewer). Raises ValueError as `build_rows`."""
    tokens = rows * spec.length
    return list(
        ordered_batches(build_rows(spec, tokenizer, "test", tokens, progress=progress), batch_size, tokens)
    )


def held_out_texts(
    specs: Mapping[str, DataSpec],
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    batch_size: int,
    progress: Progress | None = None,
    *,
    optional: Collection[str] = (),
    count: int | None = None,
) -> tuple[dict[str, list[Batch]], list[str]]:
    """`held_out_batches` of texts by their names, the first `count` of them; and notes on those that were left out.

    Left out are the `optional` ones whose test split holds no full row, such as a short text that a run joins with longer ones.
    Raises ValueError as `held_out_batches` for the others, and where no text would remain.
    """
    found: dict[str, list[Batch]] = {}
    missing: list[TooLittleText] = []
    for name, spec in specs.items():
        if len(found) == count:
            break
        try:
            found[name] = held_out_batches(spec, tokenizer, rows, batch_size, progress)
        except TooLittleText as error:
            if name not in optional:
                raise
            missing.append(error)
    if missing and not found:
        raise missing[0]
    notes = [f"nothing is measured on one of the run's texts: {error}" for error in missing]
    for note in notes:
        log.warning("%s", note)
    return found, notes


def first_rows(batches: Iterable[Batch], rows: int) -> list[Batch]:
    """The first `rows` rows of all batches, batch by batch."""
    chosen: list[Batch] = []
    left = rows
    for batch in batches:
        if left > 0:
            chosen.append(batch.first(left))
            left -= len(chosen[-1].input_ids_BT)
    return chosen


def make_batch(rows: PackedRows, indices: Sequence[int]) -> Batch:
    """The given rows as one batch."""
    chosen = [rows.row(index) for index in indices]
    positions_BT = np.stack([_positions(row.starts, rows.length) for row in chosen])
    return Batch(
        input_ids_BT=_long(np.stack([row.input_ids for row in chosen])),
        labels_BT=_long(np.stack([row.labels for row in chosen])),
        position_ids_BT=_long(positions_BT),
    )


def _endless(rows: PackedRows, batch_size: int, seed: int, step: int) -> Iterator[Batch]:
    epoch, order = -1, np.empty(0, dtype=np.int64)
    while True:
        indices = []
        for place in range(step * batch_size, (step + 1) * batch_size):
            if place // len(rows) != epoch:
                epoch = place // len(rows)
                order = np.random.default_rng([seed, epoch]).permutation(len(rows))
            indices.append(int(order[place % len(rows)]))
        yield make_batch(rows, indices)
        step += 1


def _positions(starts: np.ndarray, length: int) -> np.ndarray:
    lengths = np.diff(np.append(starts, length))
    return np.arange(length) - np.repeat(starts, lengths)


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
