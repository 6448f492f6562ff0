"""Tasks that need no download, on any causal model: which of them there are, `offline_tasks` says.

A question is scored by forward passes alone; nothing is generated.

Legend: B rows, T tokens of the longest row, N last tokens whose logits count, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.evals.aggregate import Proportion
from hybridize.evals.generation import Progress, evaluating, left_pad, padding_id
from hybridize.evals.offline_tasks import TASKS, Corpus, Frame, Ids, Question, Reach
from hybridize.models.modeling import HybridForCausalLM
from hybridize.problems import nearest
from hybridize.spec import reach_of


@dataclass(frozen=True)
class TaskResult(Proportion):
    """`correct` of `samples` questions; `scores` holds 1 or 0 for each of them, in their fixed order.

    `chance` is the expected share of a guess. `reach` says whether answering needs text beyond the window.
    """

    name: str
    correct: int
    samples: int
    chance: float
    reach: Reach
    scores: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation in nats, a token on average, and whether greedy decoding gives exactly it."""

    mean: float
    greedy: bool


def run_offline(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    samples: int = 100,
    reach_tokens: int = 128,
    max_length: int = 1024,
    batch_size: int = 8,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> list[TaskResult]:
    """Ask `samples` questions of each task (fewer where the text gives no more, see `TaskResult.samples`).

    Args:
        documents: held-out texts, in a fixed order.
        names: of `offline_tasks.TASKS`; None for all.
        reach_tokens: how far back the model's softmax sees: w for a sliding window of w, 2w for a terraced one.
        max_length: most tokens of a question; four times the reach are enough and no more are used.
        on_progress: called with forward passes done and to do, over all tasks.

    Raises:
        ValueError: an unknown name, numbers that leave no room for a task, or text that gives no question.
    """
    names = list(TASKS) if names is None else list(dict.fromkeys(names))
    for name in names:
        if name not in TASKS:
            raise ValueError(f"names contains {name!r}; {nearest(name, list(TASKS))}")
    for argument, value in (("samples", samples), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{argument} is {value}; it must be at least 1")
    if max_length < 3 * reach_tokens:
        raise ValueError(
            f"max_length is {max_length}; it must be at least {3 * reach_tokens}, three times reach_tokens"
        )
    corpus, frame = Corpus(documents, tokenizer), Frame(reach_tokens, min(max_length, 4 * reach_tokens), seed)
    questions = {
        name: list(itertools.islice(TASKS[name].questions(corpus, frame), samples)) for name in names
    }
    for name in names:
        if not questions[name]:
            raise ValueError(
                f"documents gives no question for {name!r}; give more or longer texts, or leave the task out of names"
            )
    likelihoods = score_continuations(
        model,
        [row for asked in questions.values() for question in asked for row in _rows(question)],
        pad_token_id=padding_id(tokenizer),
        batch_size=batch_size,
        on_progress=on_progress,
    )
    scored = iter(likelihoods)
    return [_result(name, asked, scored) for name, asked in questions.items()]


def offline_values(
    model: Any, tokenizer: Any, documents: Sequence[str], samples: int, on_progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Every task on these documents as plain values, at the reach of the model's own windows."""
    reach = reach_of(model.spec.groups if isinstance(model, HybridForCausalLM) else ())
    results = run_offline(
        model,
        tokenizer,
        documents,
        samples=samples,
        reach_tokens=reach,
        max_length=4 * reach,
        on_progress=on_progress,
    )
    keep = ("name", "reach", "accuracy", "low", "high", "chance", "samples")
    return [{name: getattr(result, name) for name in keep} for result in results]


def _rows(question: Question) -> list[tuple[Ids, Ids]]:
    """What has to be scored to answer: every choice after the context, then after the baseline."""
    contexts = [question.context] if question.baseline is None else [question.context, question.baseline]
    return [(context, choice) for context in contexts for choice in question.choices]


def _result(name: str, questions: Sequence[Question], scored: Iterator[Likelihood]) -> TaskResult:
    """The task's result; takes the likelihoods of its questions from `scored`, which has them in order."""
    scores = tuple(
        int(_is_right(question, list(itertools.islice(scored, len(_rows(question))))))
        for question in questions
    )
    chance = sum(question.chance for question in questions) / len(questions)
    return TaskResult(name, sum(scores), len(scores), chance, TASKS[name].reach, scores)


def _is_right(question: Question, likelihoods: Sequence[Likelihood]) -> bool:
    count = len(question.choices)
    if count == 1:
        return likelihoods[0].greedy
    values = [likelihood.mean for likelihood in likelihoods]
    if question.baseline is not None:
        values = [after - before for after, before in zip(values[:count], values[count:], strict=True)]
    return values.index(max(values)) == question.answer


def score_continuations(
    model: Any,
    rows: Sequence[tuple[Ids, Ids]],
    *,
    pad_token_id: int,
    batch_size: int = 8,
    on_progress: Progress | None = None,
) -> list[Likelihood]:
    """Likelihoods of `(context, continuation)` pairs of token ids, in their order; neither may be empty.

    Pairs that give the model the same input (continuations of one token after one context) share a forward pass.
    Raises ValueError where the model yields NaN.
    """
    by_input: dict[Ids, list[int]] = {}
    for index, (context, continuation) in enumerate(rows):
        by_input.setdefault(context + continuation[:-1], []).append(index)
    inputs = sorted(by_input, key=len, reverse=True)
    found: dict[int, Likelihood] = {}
    with evaluating(model):
        for first in range(0, len(inputs), batch_size):
            batch = inputs[first : first + batch_size]
            longest = max(len(rows[index][1]) for ids in batch for index in by_input[ids])
            logits_BNV = _last_logits(model, batch, longest, pad_token_id)
            for ids, logits_NV in zip(batch, logits_BNV, strict=True):
                for index in by_input[ids]:
                    found[index] = _likelihood(logits_NV, rows[index][1])
            if on_progress is not None:
                on_progress(first + len(batch), len(inputs))
    return [found[index] for index in range(len(rows))]


def _last_logits(model: Any, batch: Sequence[Ids], count: int, pad_token_id: int) -> Tensor:
    """float32 logits [B, N, V] at the last `count` tokens of each row: padding on the left aligns them."""
    input_ids_BT, mask_BT = left_pad(batch, pad_token_id)
    # transformers' models count positions from the first column unless told otherwise.
    position_ids_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
    inputs = {"input_ids": input_ids_BT, "attention_mask": mask_BT, "position_ids": position_ids_BT}
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    logits_BNV: Tensor = model(**inputs, use_cache=False, logits_to_keep=count).logits.float()
    if logits_BNV.isnan().any():
        raise ValueError("model gives NaN logits on held-out text; look for the layer that diverged")
    return logits_BNV


def _likelihood(logits_NV: Tensor, continuation: Ids) -> Likelihood:
    targets_N = torch.tensor(continuation, device=logits_NV.device)
    logits_NV = logits_NV[-len(continuation) :]
    nll = torch.nn.functional.cross_entropy(logits_NV, targets_N).item()
    return Likelihood(-nll, bool((logits_NV.argmax(-1) == targets_N).all()))
