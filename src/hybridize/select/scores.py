"""Recall R and knowledge C of a model, in [0, 1]: what the single-layer replacements are ranked by.

The probes that ship score probabilities where benchmarks count hits: replacing one layer of thirty moves few answers over the
border, so counts of some hundred samples differ by noise alone. (Shares of right tokens on the same prompts were 0.960 to 0.967 for two
thirds of SmolLM2's layers.) They move with a model's sharpness too, and a long answer multiplies many tokens.

A `Probe` makes its samples once and then scores any number of models. Three ship: synthetic recall and held-out cloze,
which need no download and no generation, and tasks of lm-eval. Anything else with `identity` and `score` will do.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from hybridize.data import DataSpec, plain_texts
from hybridize.evals.aggregate import mean_and_standard_error
from hybridize.evals.harness import check_tasks as check_harness_tasks
from hybridize.evals.harness import run_harness
from hybridize.evals.haystacks import Haystack, find_haystack
from hybridize.evals.offline_tasks import TASKS, Corpus, Frame, Question
from hybridize.evals.suites import TaskScore
from hybridize.models.modeling import HybridForCausalLM
from hybridize.problems import nearest
from hybridize.select.recall_tasks import check_tasks, needs_essays, recall_row
from hybridize.select.rows import Row, RowScore, score_rows
from hybridize.select.table import Score, ScorePart

LENGTHS = (512, 1024, 2048)
# From a lone needle to whole lists of lookalikes, so that R has room both ways.
TASKS_OF_RECALL = ("niah_single_2", "niah_single_3", "niah_multikey_2", "pairs")
TASKS_OF_KNOWLEDGE = ("cloze_near",)
HARNESS_RECALL = ("squad_completion", "fda", "swde")
HARNESS_KNOWLEDGE = ("hellaswag:acc_norm", "arc_easy:acc_norm", "arc_challenge:acc_norm")
BATCH_TOKENS = 16_384


class Probe(Protocol):
    """One score of models. `identity`: plain values for JSON that say what a score depends on, besides the model."""

    @property
    def identity(self) -> dict[str, Any]: ...

    def score(self, model: HybridForCausalLM) -> Score: ...


@dataclass(frozen=True)
class TokenProbe:
    """The probability of whole answers, the right ones before them shown: a mean over the answers of a row, the rows of a task
    and length, then tasks and lengths. One forward pass, nothing is generated. `rows[task][length]`."""

    identity: dict[str, Any]
    rows: dict[str, dict[int, list[Row]]] = field(repr=False)
    batch_tokens: int = BATCH_TOKENS

    def score(self, model: HybridForCausalLM) -> Score:
        rows = [row for lengths in self.rows.values() for each in lengths.values() for row in each]
        scored = iter(score_rows(model, rows, batch_tokens=self.batch_tokens))
        tasks, parts = [], []
        for task, lengths in self.rows.items():
            found = {
                n: [row.probability for row in itertools.islice(scored, len(each))]
                for n, each in lengths.items()
            }
            parts += [_part(f"{task} {length}", values) for length, values in found.items()]
            # Samples of one index share their needles at all lengths, so the error is that of their means.
            tasks.append(
                _part(task, [math.fsum(values) / len(found) for values in zip(*found.values(), strict=True)])
            )
        whole = Score.mean(tasks)
        return replace(whole, samples=len(rows), parts=tuple(parts))


@dataclass(frozen=True)
class ChoiceProbe:
    """The weight of the right choice of a question, by task; then the mean over tasks. Choices are weighed by exp of what
    `evals.offline` compares, summed over the choice's tokens: its log-likelihood, less that without the context where the task
    has such a baseline. A question with one choice counts the probability of the whole answer."""

    identity: dict[str, Any]
    parts: dict[str, list[Question]] = field(repr=False)
    batch_tokens: int = BATCH_TOKENS

    def score(self, model: HybridForCausalLM) -> Score:
        rows = [row for questions in self.parts.values() for question in questions for row in _rows(question)]
        scored = iter(score_rows(model, rows, batch_tokens=self.batch_tokens))
        return Score.mean(
            [
                _part(name, [_weight(q, list(itertools.islice(scored, len(_rows(q))))) for q in questions])
                for name, questions in self.parts.items()
            ]
        )


@dataclass(frozen=True)
class HarnessProbe:
    """The mean score of lm-eval tasks."""

    identity: dict[str, Any]
    tokenizer: Any = field(repr=False)
    tasks: tuple[str, ...]
    options: dict[str, Any]

    def score(self, model: HybridForCausalLM) -> Score:
        result = run_harness(model, self.tokenizer, self.tasks, **self.options)
        return Score.mean([_harness_part(task) for task in result.tasks])


def recall_probe(
    tokenizer: Any,
    *,
    positions: int,
    tasks: Sequence[str] = TASKS_OF_RECALL,
    lengths: Sequence[int] | None = None,
    samples: int = 32,
    seed: int = 0,
    essays: Path | str | Haystack | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> TokenProbe:
    """Synthetic recall, `samples` texts for each task and length (see `recall_tasks`).

    Args:
        positions: how many the teacher was made for (`max_position_embeddings`).
        lengths: in tokens; None takes 512, 1,024 and 2,048, as far as the positions go.
        essays: what needles are hidden in; None takes local prose.
        batch_tokens: tokens of one forward pass.

    Raises:
        ValueError: unknown tasks, numbers below 1, lengths beyond the teacher's positions or too short for a task.
    """
    names = tuple(dict.fromkeys(tasks))
    check_tasks(names)
    if lengths is None:
        lengths = [length for length in LENGTHS if length <= positions] or [positions]
    _check_counts(samples=samples, batch_tokens=batch_tokens, lengths=min(lengths, default=0))
    if max(lengths) > positions:
        raise ValueError(f"lengths contains {max(lengths)}; the teacher has {positions} positions")
    hay = None
    if needs_essays(names):
        hay = essays if isinstance(essays, Haystack) else find_haystack(essays)
    lengths = list(dict.fromkeys(lengths))
    rows = {
        name: {
            length: [recall_row(tokenizer, name, length, i, seed=seed, essays=hay) for i in range(samples)]
            for length in lengths
        }
        for name in names
    }
    identity = {
        "probe": "recall",
        "measure": "probability of the answer",
        "tasks": list(names),
        "lengths": lengths,
        "samples": samples,
        "seed": seed,
        "haystack": hay.kind if hay is not None else None,
        "sha256": _digest(rows),
    }
    return TokenProbe(identity, rows, batch_tokens)


def knowledge_probe(
    tokenizer: Any,
    *,
    documents: Sequence[str] | None = None,
    tasks: Sequence[str] = TASKS_OF_KNOWLEDGE,
    samples: int = 500,
    seed: int = 0,
    reach_tokens: int = 128,
    max_length: int = 512,
    batch_tokens: int = BATCH_TOKENS,
) -> ChoiceProbe:
    """Held-out cloze: which of four passages goes on the text? `samples` questions a task of `evals.offline_tasks`.

    Args:
        documents: held-out texts; None takes the test split of the documentation strings.
        reach_tokens, max_length: see `evals.offline.run_offline`.

    Raises:
        ValueError: unknown tasks, numbers below 1, or too little text.
    """
    names = tuple(dict.fromkeys(tasks))
    for name in names:
        if name not in TASKS:
            raise ValueError(f"tasks contains {name!r}; {nearest(name, list(TASKS))}")
    _check_counts(samples=samples, batch_tokens=batch_tokens, tasks=len(names))
    texts = [*plain_texts(DataSpec(), "test")] if documents is None else documents
    corpus, frame = Corpus(texts, tokenizer), Frame(reach_tokens, max_length, seed)
    parts = {name: list(itertools.islice(TASKS[name].questions(corpus, frame), samples)) for name in names}
    for name, questions in parts.items():
        if not questions:
            raise ValueError(f"documents gives no question for {name!r}; give more or longer texts")
    asked = [(q.context, q.choices, q.answer, q.baseline) for part in parts.values() for q in part]
    identity = {
        "probe": "knowledge",
        "measure": "weight of the right choice",
        "tasks": list(names),
        "samples": samples,
        "seed": seed,
        "reach_tokens": reach_tokens,
        "max_length": max_length,
        "sha256": _digest(asked),
    }
    return ChoiceProbe(identity, parts, batch_tokens)


def scores_from_harness(
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    include_path: Path | str | None = None,
    limit: int | float | None = None,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    seed: int = 0,
) -> HarnessProbe:
    """A probe of lm-eval tasks by name, `name:metric` where the metric matters (`evals.harness.run_harness`).

    `HARNESS_RECALL` and `HARNESS_KNOWLEDGE` are nearest to what HALO ranks by (arXiv 2601.22156, Section 6.1).
    Raises ValueError at once for unknown tasks, data that cannot be had, or a missing lm-eval.
    """
    names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    check_harness_tasks(names, include_path=include_path, num_fewshot=num_fewshot)
    fixed: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "seed": seed}
    local = None if include_path is None else str(include_path)
    identity = {"probe": "lm-eval", "tasks": list(names), "include_path": local, **fixed}
    return HarnessProbe(
        identity, tokenizer, names, {**fixed, "include_path": include_path, "batch_size": batch_size}
    )


def recall(model: HybridForCausalLM, tokenizer: Any, **options: Any) -> Score:
    """R of one model, with the options of `recall_probe`; make the probe yourself for more than one."""
    return recall_probe(tokenizer, positions=model.config.max_position_embeddings, **options).score(model)


def knowledge(model: HybridForCausalLM, tokenizer: Any, **options: Any) -> Score:
    """C of one model, with the options of `knowledge_probe`; make the probe yourself for more than one."""
    return knowledge_probe(tokenizer, **options).score(model)


def _rows(question: Question) -> list[Row]:
    """What has to be scored to answer: every choice after the context, then after the baseline."""
    contexts = [question.context] if question.baseline is None else [question.context, question.baseline]
    return [
        Row(context + choice, tuple(range(len(context), len(context) + len(choice))))
        for context in contexts
        for choice in question.choices
    ]


def _weight(question: Question, scored: Sequence[RowScore]) -> float:
    count = len(question.choices)
    if count == 1:
        return scored[0].probability
    lengths = [len(choice) for choice in question.choices] * (1 if question.baseline is None else 2)
    values = [row.mean * length for row, length in zip(scored, lengths, strict=True)]
    if question.baseline is not None:
        values = [after - before for after, before in zip(values[:count], values[count:], strict=True)]
    weights = [math.exp(value - max(values)) for value in values]
    return weights[question.answer] / math.fsum(weights)


def _part(name: str, values: Sequence[float]) -> ScorePart:
    return ScorePart(name, *mean_and_standard_error(values), len(values))


def _harness_part(task: TaskScore) -> ScorePart:
    """A group's subtasks are independent strata of it."""
    errors = [mean_and_standard_error(part.scores)[1] for part in task.parts]
    known = [part.weight * error for part, error in zip(task.parts, errors, strict=True) if error is not None]
    error = sum(x * x for x in known) ** 0.5 if len(known) == len(errors) else None
    return ScorePart(task.name, task.score, error, task.samples)


def _digest(samples: Any) -> str:
    return hashlib.sha256(repr(samples).encode()).hexdigest()


def _check_counts(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is or contains {value}; it must be at least 1")
