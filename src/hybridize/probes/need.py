"""Does a text need its far past? The teacher's loss with the context cut to near keys against its loss with all of it.

Without this, "the linear branch brings nothing" could not be told from "nothing far was needed".

Legend: N rows, T tokens, C near keys, S segments of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.data.packing import IGNORED
from hybridize.evals.generation import evaluating
from hybridize.evals.perplexity import token_nll
from hybridize.probes.token_losses import Estimate, Progress, TokenLosses

USEFUL = 0.5
"""Nats by which a token's loss must fall with the far past for that past to count as useful there."""
TOKENS_PER_PASS = 4096


@dataclass(frozen=True)
class Need:
    """`need`: mean fall of the teacher's loss by the far past on far-eligible tokens; `useful_NT`: where it is at least
    `threshold`; `useful_share`: share of the far-eligible tokens."""

    context: int
    need: Estimate
    useful_NT: Tensor
    useful_share: float
    threshold: float = USEFUL


def measure_need(
    teacher: Any,
    batches: Sequence[Any],
    whole: TokenLosses,
    split_at: int,
    context: int,
    on_progress: Progress | None = None,
) -> Need | None:
    """The need of a text, judged by `teacher`, whose losses with all context are `whole`.

    `split_at` is the first far-eligible position, `context` the near keys of a query (with itself). The cut model reads
    each token with `context` to `1.5 context` keys. None where no token is far-eligible.
    """
    where_NT = whole.from_position(split_at)
    if not where_NT.any():
        return None
    cut = TokenLosses(_cut(teacher, batches, split_at, context, on_progress), whole.position_NT)
    need = cut.less(whole, where_NT)
    assert need is not None
    useful_NT = where_NT & (cut.nll_NT - whole.nll_NT >= USEFUL)
    return Need(context, need, useful_NT, useful_NT.sum().item() / where_NT.sum().item())


def _cut(
    teacher: Any, batches: Sequence[Any], split_at: int, context: int, on_progress: Progress | None
) -> Tensor:
    """Losses `[N, T-1]` of far-eligible tokens under a cut context, NaN elsewhere."""
    block = max(1, context // 2)
    length = context + block  # tokens of a segment; its last `block` queries count
    segments = list(_segments(batches, split_at, context, block))
    rows = sum(len(batch.input_ids_BT) for batch in batches)
    cut_NT = torch.full((rows, batches[0].input_ids_BT.shape[1] - 1), torch.nan, dtype=torch.float64)
    at_once = max(1, TOKENS_PER_PASS // length)
    with evaluating(teacher):
        for first in range(0, len(segments), at_once):
            if on_progress is not None:
                on_progress(first, len(segments))
            chosen = segments[first : first + at_once]
            ids_ST = torch.zeros(len(chosen), length + 1, dtype=torch.long)
            labels_ST = torch.full_like(ids_ST, IGNORED)
            for s, (_, _, ids, begin) in enumerate(chosen):
                ids_ST[s, : len(ids)] = ids
                labels_ST[s, begin + 1 : len(ids)] = ids[begin + 1 :]
            positions_ST = torch.arange(length + 1).expand_as(ids_ST)
            nll_ST, _ = token_nll(teacher, ids_ST, labels_ST, positions_ST)
            for s, (row, column, ids, begin) in enumerate(chosen):
                counted = len(ids) - 1 - begin
                cut_NT[row, column : column + counted] = nll_ST[s, begin : begin + counted]
    return cut_NT


def _segments(
    batches: Sequence[Any], split_at: int, context: int, block: int
) -> Iterator[tuple[int, int, Tensor, int]]:
    """Row, column of the first counted query, token ids, and the counted queries' first place among them."""
    row = 0
    for batch in batches:
        for ids_T, position_T in zip(batch.input_ids_BT.cpu(), batch.position_ids_BT.cpu(), strict=True):
            starts = (position_T == 0).nonzero().flatten().tolist()
            for start, end in zip(starts, [*starts[1:], len(ids_T)], strict=True):
                for query in range(start + split_at, end - 1, block):
                    left = max(start, query - context + 1)
                    right = min(query + block, end - 1)  # the last query of a document predicts nothing of it
                    yield row, query, ids_T[left : right + 1], query - left
            row += 1
