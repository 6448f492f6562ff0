"""Held-out perplexity, as a whole, by position in the document, and split by whether a far key exists.

Shapes: B rows of a batch, T tokens of a row, V vocabulary, N rows in all, P positions.

Labels are the ids themselves, -100 where a token does not count, as everywhere in transformers: the logits at t predict
the label at t + 1. The first token of a document is never predicted: nothing of it has been read.
The position of a prediction is that of the token the model reads last, so at position p it knows p + 1 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.evals.aggregate import bootstrap_ratio_interval, ratio_standard_error
from hybridize.evals.generation import Progress, evaluating
from hybridize.losses import IGNORE

POSITION_EDGES = (0, 64, *(2**n for n in range(7, 21)))
# float32 logits exist for so many tokens at a time: 200 MB at a vocabulary of 49,152.
TOKENS_PER_CHUNK = 1024


class Batch(Protocol):
    """Token ids, labels (-100 does not count) and positions (restarting at every document), each [B, T] int64."""

    @property
    def input_ids_BT(self) -> Tensor: ...
    @property
    def labels_BT(self) -> Tensor: ...
    @property
    def position_ids_BT(self) -> Tensor: ...


@dataclass(frozen=True)
class PositionBucket:
    """Predictions at positions `start <= p < end` (`end` None: open). `nll` is the mean in nats a token."""

    start: int
    end: int | None
    nll_sum: float
    tokens: int

    @property
    def nll(self) -> float:
        return self.nll_sum / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return _exp(self.nll)


@dataclass(frozen=True)
class PerplexityResult:
    """`nll_sum` in nats over `tokens` predictions in `rows` rows, and how sure it is.

    `low` and `high` bound the perplexity: a 95% bootstrap interval over rows. `standard_error` is that of the mean nll,
    also over rows. All three are None for a single row. `row_nll_sums` and `row_tokens` let two models be compared row by
    row (`aggregate.paired_difference`). `near_only` and `far_eligible` split the predictions at
    `split_at`; `bits_per_byte` is there when the caller gave a byte count.
    """

    nll_sum: float
    tokens: int
    rows: int
    low: float | None
    high: float | None
    standard_error: float | None
    by_position: tuple[PositionBucket, ...]
    row_nll_sums: tuple[float, ...] = ()
    row_tokens: tuple[int, ...] = ()
    near_only: PositionBucket | None = None
    far_eligible: PositionBucket | None = None
    bits_per_byte: float | None = None

    @property
    def nll(self) -> float:
        return self.nll_sum / self.tokens

    @property
    def perplexity(self) -> float:
        return _exp(self.nll)

    @property
    def far_share(self) -> float | None:
        """The share of predictions whose query has a far key; None without `split_at`."""
        return None if self.far_eligible is None else self.far_eligible.tokens / self.tokens


def perplexity(
    model: Any,
    rows: Tensor | Iterable[Batch] | Sequence[Sequence[int]],
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    buckets: Sequence[int] = POSITION_EDGES,
    split_at: int | None = None,
    byte_count: int | None = None,
    batch_size: int = 8,
    on_progress: Progress | None = None,
) -> PerplexityResult:
    """Perplexity of `model` on `rows`; negative log-likelihoods in float32, sums in float64.

    rows: token ids [N, T] (with `labels` [N, T] and `position_ids` [N, T], where given); or batches that already carry
        both (`batch_size` is then theirs); or documents as id lists of any lengths, one a row, padded on the right.
    buckets: rising edges of the position buckets; positions past the last edge form an open bucket.
    split_at: the first position whose query has a far key (a window of w sliding: w; terraced: 2w).
    byte_count: UTF-8 bytes of the text that was predicted, for bits per byte.
    on_progress: called with (rows done, rows in all, or 0 where the iterable has no length).

    Raises ValueError where no token counts, shapes differ, or the edges do not rise from 0.
    """
    _checked(buckets, split_at, byte_count)
    total_rows = len(rows) if isinstance(rows, Tensor | Sequence) and not _holds_batches(rows) else 0

    nlls, positions = [], []
    done = 0
    with evaluating(model):
        for batch in _batches(rows, labels, position_ids, batch_size):
            nll_BT, position_BT = token_nll(model, *batch)
            nlls.append(nll_BT)
            positions.append(position_BT)
            done += len(nll_BT)
            if on_progress is not None:
                on_progress(done, total_rows)
    return summarise(nlls, positions, buckets=buckets, split_at=split_at, byte_count=byte_count)


def summarise(
    nlls: Sequence[Tensor],
    positions: Sequence[Tensor],
    *,
    buckets: Sequence[int] = POSITION_EDGES,
    split_at: int | None = None,
    byte_count: int | None = None,
) -> PerplexityResult:
    """The result of token losses and positions as `token_nll` gives them, `[B, T-1]` a batch. Raises as `perplexity`."""
    edges = _checked(buckets, split_at, byte_count)
    row_nll: list[float] = []
    row_tokens: list[int] = []
    nll_P = torch.zeros(0, dtype=torch.float64)
    tokens_P = torch.zeros(0, dtype=torch.int64)
    for nll_BT, position_BT in zip(nlls, positions, strict=True):
        counts_BT = ~nll_BT.isnan()
        row_nll += nll_BT.nan_to_num(nan=0.0, posinf=math.inf).sum(1).tolist()
        row_tokens += counts_BT.sum(1).tolist()
        counted_P = position_BT[counts_BT]
        nll_P = _add(nll_P, torch.bincount(counted_P, nll_BT[counts_BT]))
        tokens_P = _add(tokens_P, torch.bincount(counted_P))

    tokens = sum(row_tokens)
    if tokens == 0:
        raise ValueError(
            "rows has no token that counts; give rows of at least 2 tokens that are not all masked"
        )
    interval = bootstrap_ratio_interval(row_nll, row_tokens)
    return PerplexityResult(
        nll_sum=math.fsum(row_nll),
        tokens=tokens,
        rows=len(row_nll),
        low=None if interval is None else _exp(interval[0]),
        high=None if interval is None else _exp(interval[1]),
        standard_error=ratio_standard_error(row_nll, row_tokens),
        by_position=tuple(
            bucket
            for start, end in zip(edges, [*edges[1:], None], strict=True)
            if (bucket := _bucket(nll_P, tokens_P, start, end)).tokens
        ),
        row_nll_sums=tuple(row_nll),
        row_tokens=tuple(row_tokens),
        near_only=None if split_at is None else _bucket(nll_P, tokens_P, 0, split_at),
        far_eligible=None if split_at is None else _bucket(nll_P, tokens_P, split_at, None),
        bits_per_byte=None if byte_count is None else math.fsum(row_nll) / math.log(2) / byte_count,
    )


def _checked(buckets: Sequence[int], split_at: int | None, byte_count: int | None) -> list[int]:
    edges = list(buckets)
    if not edges or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"buckets is {edges}; edges must start at 0 and rise, for example (0, 64, 128)")
    if split_at is not None and split_at < 0:
        raise ValueError(f"split_at is {split_at}; it is a position, 0 or more")
    if byte_count is not None and byte_count < 1:
        raise ValueError(f"byte_count is {byte_count}; it must be at least 1")
    return edges


def token_nll(
    model: Any,
    input_ids_BT: Tensor,
    labels_BT: Tensor,
    position_ids_BT: Tensor,
    mask_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of every prediction, float64 on the CPU [B, T-1], NaN where none counts, and its position.

    A model that yields NaN is refused here, by ValueError, so that NaN can stand for "does not count".
    """
    inputs = {"input_ids": input_ids_BT, "position_ids": position_ids_BT}
    if mask_BT is not None:
        inputs["attention_mask"] = mask_BT
    # Without a cache: transformers tells packed documents apart by their positions only then.
    logits_BTV = model(**{name: x.to(model.device) for name, x in inputs.items()}, use_cache=False).logits
    counts_BT = (labels_BT[:, 1:] != IGNORE) & (position_ids_BT[:, 1:] == position_ids_BT[:, :-1] + 1)
    if mask_BT is not None:
        counts_BT &= (mask_BT[:, 1:] != 0) & (mask_BT[:, :-1] != 0)
    rows_N, columns_N = counts_BT.nonzero(as_tuple=True)
    targets_N = labels_BT[rows_N, columns_N + 1]
    nll_BT = torch.full(counts_BT.shape, math.nan, dtype=torch.float64)
    for first in range(0, len(rows_N), TOKENS_PER_CHUNK):
        part = slice(first, first + TOKENS_PER_CHUNK)
        b, t = rows_N[part], columns_N[part]
        logits_NV = logits_BTV[b.to(logits_BTV.device), t.to(logits_BTV.device)].float()
        nll_N = (
            F.cross_entropy(logits_NV, targets_N[part].to(logits_NV.device), reduction="none").cpu().double()
        )
        if nll_N.isnan().any():
            raise ValueError("model gives NaN logits on held-out text; look for the layer that diverged")
        nll_BT[b, t] = nll_N
    return nll_BT, position_ids_BT[:, :-1]


def _holds_batches(rows: Tensor | Iterable[Any]) -> bool:
    """Whether `rows` are batches; a tensor and a list of documents are not."""
    if isinstance(rows, Tensor):
        return False
    return not isinstance(rows, Sequence) or (len(rows) > 0 and hasattr(rows[0], "input_ids_BT"))


def _batches(
    rows: Tensor | Iterable[Any], labels: Tensor | None, position_ids: Tensor | None, batch_size: int
) -> Iterator[tuple[Tensor, ...]]:
    """CPU tensors (input ids, labels, positions[, mask]), each [B, T]."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if isinstance(rows, Tensor):
        yield from _tensor_batches(rows, labels, position_ids, batch_size)
        return
    if labels is not None or position_ids is not None:
        raise ValueError(
            "labels and position_ids go with rows given as one tensor [N, T]; batches carry their own"
        )
    if _holds_batches(rows):
        for batch in rows:
            yield batch.input_ids_BT.cpu(), batch.labels_BT.cpu(), batch.position_ids_BT.cpu()
        return
    documents = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    for first in range(0, len(documents), batch_size):
        yield _right_padded(documents[first : first + batch_size])


def _tensor_batches(
    rows_NT: Tensor, labels_NT: Tensor | None, position_ids_NT: Tensor | None, batch_size: int
) -> Iterator[tuple[Tensor, ...]]:
    if rows_NT.dim() != 2:
        raise ValueError(f"rows has shape {tuple(rows_NT.shape)}; token ids must be [rows, tokens]")
    for name, other in (("labels", labels_NT), ("position_ids", position_ids_NT)):
        if other is not None and other.shape != rows_NT.shape:
            raise ValueError(
                f"{name} has shape {tuple(other.shape)}; it must equal that of rows, {tuple(rows_NT.shape)}"
            )
    rows_NT = rows_NT.cpu()
    labels_NT = rows_NT if labels_NT is None else labels_NT.cpu()
    if position_ids_NT is None:
        position_ids_NT = torch.arange(rows_NT.shape[1]).expand_as(rows_NT)
    for first in range(0, len(rows_NT), batch_size):
        part = slice(first, first + batch_size)
        yield rows_NT[part], labels_NT[part], position_ids_NT[part].cpu()


def _right_padded(documents: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    input_ids_BT = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True, padding_value=0)
    lengths_B = torch.tensor([len(document) for document in documents])
    position_ids_BT = torch.arange(input_ids_BT.shape[1]).expand_as(input_ids_BT)
    mask_BT = (position_ids_BT < lengths_B[:, None]).long()
    return input_ids_BT, input_ids_BT, position_ids_BT, mask_BT


def _bucket(nll_P: Tensor, tokens_P: Tensor, start: int, end: int | None) -> PositionBucket:
    return PositionBucket(start, end, nll_P[start:end].sum().item(), int(tokens_P[start:end].sum().item()))


def _add(a_P: Tensor, b_P: Tensor) -> Tensor:
    """The sum of two vectors of possibly unequal lengths."""
    length = max(len(a_P), len(b_P))
    return F.pad(a_P, (0, length - len(a_P))) + F.pad(b_P, (0, length - len(b_P)))


def _exp(nll: float) -> float:
    """e^nll, infinite instead of an OverflowError for a model that is far off."""
    return math.exp(nll) if nll < 700 else (math.nan if math.isnan(nll) else math.inf)
