"""Rows of tokens some of which are to be predicted, scored by forward passes alone.

Legend: P tokens of all rows of a pass, N predicted tokens, E width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from hybridize.evals.generation import evaluating
from hybridize.models.modeling import HybridForCausalLM

_LOGITS = 1 << 26  # float32 logits that exist at a time, 256 MB


@dataclass(frozen=True)
class Row:
    """Token ids, and which of them (by position, from 1 on, ascending) are predicted from what precedes them."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.targets or self.targets[0] < 1 or self.targets[-1] >= len(self.ids):
            raise ValueError(f"targets is {self.targets}; it needs positions in 1..{len(self.ids) - 1}")


@dataclass(frozen=True)
class RowScore:
    """`hits`: the share of the predicted tokens that are the model's first choice; `mean`: their log-likelihood in nats a
    token; `probability`: that of a whole answer (of predicted tokens side by side), the mean over the row's answers. Answers
    that are all hits are what greedy decoding gives."""

    hits: float
    mean: float
    probability: float


def row_of_text(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> Row:
    """A text as a prompt is tokenised, where the characters of `spans` (first, end) are predicted; what follows is cut off.

    Raises ValueError for a tokenizer that cannot say where its tokens stand.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}, which cannot say where its tokens stand in the text; use a fast one"
        )
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    targets = [
        index
        for index, (first, end) in enumerate(encoded.offset_mapping)
        # A token of its own for the space before an answer would count for nothing.
        if any(first < b and end > a and text[max(first, a) : min(end, b)].strip() for a, b in spans)
    ]
    return Row(tuple(encoded.input_ids[: targets[-1] + 1]), tuple(targets))


def score_rows(
    model: HybridForCausalLM, rows: Sequence[Row], *, batch_tokens: int = 16_384
) -> list[RowScore]:
    """Scores of rows in their order. Rows of one pass are packed, up to `batch_tokens` tokens; a longer row goes alone.

    Raises ValueError where the model yields NaN.
    """
    scores: dict[int, RowScore] = {}
    # Rows of similar length side by side: attention is computed over groups of them.
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    with evaluating(model):
        for batch in _batches(rows, order, batch_tokens):
            found = _score_batch(model, [rows[index] for index in batch])
            scores.update(zip(batch, found, strict=True))
    return [scores[index] for index in range(len(rows))]


def _batches(rows: Sequence[Row], order: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    tokens = 0
    for index in order:
        length = len(rows[index].ids) - 1
        if batch and tokens + length > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += length
    if batch:
        yield batch


def _score_batch(model: HybridForCausalLM, batch: Sequence[Row]) -> list[RowScore]:
    bounds = [0, *accumulate(len(row.ids) - 1 for row in batch)]  # the last token is only predicted
    ids_P = torch.tensor([token for row in batch for token in row.ids[:-1]], device=model.device)
    hidden_1PE, _ = model.hidden_states(ids_P[None], cu_seqlens=torch.tensor(bounds, device=model.device))
    places = [start + t - 1 for row, start in zip(batch, bounds, strict=False) for t in row.targets]
    targets = [row.ids[t] for row in batch for t in row.targets]
    hidden_NE = hidden_1PE[0, torch.tensor(places, device=hidden_1PE.device)]
    targets_N = torch.tensor(targets, device=hidden_NE.device)
    size = max(1, _LOGITS // model.config.vocab_size)
    hits, likelihoods = [], []
    for part_NE, part_N in zip(hidden_NE.split(size), targets_N.split(size), strict=True):
        logits_NV = model.logits(part_NE).float()
        part_N = part_N.to(logits_NV.device)
        hits.append((logits_NV.argmax(-1) == part_N).double().cpu())
        likelihoods.append(
            -torch.nn.functional.cross_entropy(logits_NV, part_N, reduction="none").double().cpu()
        )
    hits_N, likelihood_N = torch.cat(hits), torch.cat(likelihoods)
    if likelihood_N.isnan().any():
        raise ValueError("the model gives NaN logits; look for the layer that diverged")
    counts = [len(row.targets) for row in batch]
    parts = zip(batch, hits_N.split(counts), likelihood_N.split(counts), strict=True)
    return [
        RowScore(hit.mean().item(), likelihood.mean().item(), _probability(row, likelihood))
        for row, hit, likelihood in parts
    ]


def _probability(row: Row, likelihood_n: torch.Tensor) -> float:
    """The mean over the row's answers of the probability of all their tokens."""
    begins = [i for i, target in enumerate(row.targets) if i == 0 or target != row.targets[i - 1] + 1]
    lengths = [end - begin for begin, end in pairwise([*begins, len(row.targets)])]
    return sum(answer.sum().exp().item() for answer in likelihood_n.split(lengths)) / len(lengths)
