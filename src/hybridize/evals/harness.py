"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness) on any causal model.

Only this file and `harness_tasks`, which finds and loads the tasks, import lm_eval. Everything but the glue lives in `suites`: which
tasks a suite has, averages, intervals, paired differences.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridize.evals.generation import Progress, evaluating, padding_id
from hybridize.evals.harness_tasks import Item, check_installed, load, local_names, task_manager
from hybridize.evals.suites import SUITES, HarnessResult, Part, TaskScore, expand


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | float | None = None,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> HarnessResult:
    """Evaluate a transformers-like causal model; scores of every sample are kept.

    Args:
        tasks: a suite of `suites.SUITES`, or names of lm-eval tasks, groups and tags; `name:metric` chooses a metric.
        include_path: folder of local task files, see `harness_tasks`.
        limit: only the first so many samples of each (sub)task, or a share of them in (0, 1). For a quick look.
        num_fewshot: examples before each question; None takes the task's own number. Suites fix theirs.
        seed: of the choice of examples and of what tasks shuffle.
        on_progress: called with requests done and to do; it starts again for each kind of request.

    The model is put in eval mode, without gradients, and the caller's random generators, training flag and tokenizer
    are as before afterwards. Log-likelihoods are summed from float32 log-softmax also where the model computes bf16.

    Raises:
        ValueError: lm-eval is missing, a name is unknown, data cannot be fetched, or a task lacks the metric.
    """
    wanted = expand(tasks, num_fewshot)
    _check_numbers(limit, batch_size, num_fewshot)
    check_installed()
    import lm_eval

    folder = None if include_path is None else Path(include_path).resolve()
    recorder = _Truncations()
    with _quiet(recorder), _random_state(), _padding(tokenizer), evaluating(model):
        _seed(seed)  # as simple_evaluate does, but before tasks are made: some shuffle while they load
        manager = task_manager(folder, [task.name for task in wanted])
        items = [item for task in wanted for item in load(manager, task, folder)]
        language_model = _language_model(model, tokenizer, batch_size, on_progress)
        with _without_cache(model):
            raw = lm_eval.simple_evaluate(
                model=language_model,
                tasks=[item.task for item in items],
                task_manager=manager,
                limit=limit,
                bootstrap_iters=0,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
    assert raw is not None, "one process evaluates and gets the results"
    local = local_names(manager, folder)
    return HarnessResult(
        tasks=tuple(_score(item, raw, local) for item in items),
        limit=limit,
        seed=seed,
        lm_eval=importlib.metadata.version("lm_eval"),
        truncated=recorder.count,
        suite=tasks if isinstance(tasks, str) and tasks in SUITES else None,
    )


def check_tasks(
    tasks: str | Sequence[str], *, include_path: str | Path | None = None, num_fewshot: int | None = None
) -> None:
    """Raise the ValueError that `run_harness` would for names and data, before any model is loaded. Fetches the data."""
    wanted = expand(tasks, num_fewshot)
    _check_numbers(None, 1, num_fewshot)
    check_installed()
    folder = None if include_path is None else Path(include_path).resolve()
    with _quiet(_Truncations()), _random_state():
        manager = task_manager(folder, [task.name for task in wanted])
        for task in wanted:
            load(manager, task, folder)


def _check_numbers(limit: int | float | None, batch_size: int, num_fewshot: int | None) -> None:
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
        raise ValueError(
            f"limit is {limit}; give a number of samples, a share between 0 and 1, or None for all"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if num_fewshot is not None and num_fewshot < 0:
        raise ValueError(f"num_fewshot is {num_fewshot}; it must be 0 or more")


def _language_model(model: Any, tokenizer: Any, batch_size: int, on_progress: Progress | None) -> Any:
    """lm-eval's wrapper around a model in memory; it tells `on_progress` instead of drawing bars."""
    from lm_eval.models.huggingface import HFLM

    class Reporting(HFLM):
        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self.set_cache_hook(_Counter(len(requests), on_progress))
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self.set_cache_hook(_Counter(len(requests), on_progress))
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self.set_cache_hook(_Counter(len(requests), on_progress))
            return super().generate_until(requests, disable_tqdm=True)

    # In bf16 the log-softmax of a long answer would be off by more than answers differ.
    return Reporting(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        softmax_dtype="float32",
    )


class _Counter:
    """Stands where lm-eval would store answers: it is told of every one."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self.done, self.total, self.on_progress = 0, total, on_progress

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def _score(item: Item, raw: Any, local: frozenset[str]) -> TaskScore:
    """The score of one task or group, with its samples."""
    parts = [_part(leaf, item.metric, raw["samples"][leaf], 1 / len(item.leaves)) for leaf in item.leaves]
    if item.pooled:
        # The mean over all samples: they are resampled together, whichever subtask they come from.
        scores = tuple(score for part in parts for score in part.scores)
        parts = [Part(item.name, 1.0, scores, tuple(sample for part in parts for sample in part.ids))]
    return TaskScore(
        name=item.name,
        metric=item.metric,
        shots=int(raw["n-shot"][item.leaves[0]]),
        parts=tuple(parts),
        local=tuple(leaf for leaf in item.leaves if leaf in local),
        version=str(raw["versions"].get(item.name, "")),
    )


def _part(name: str, metric: str, samples: Sequence[Any], weight: float) -> Part:
    """The samples of one task in the order of its documents, under the task's first filter."""
    kept = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    kept.sort(key=lambda sample: sample["doc_id"])
    scores = tuple(float(sample[metric]) for sample in kept)
    return Part(name, weight, scores, tuple(_sample_id(sample) for sample in kept))


def _sample_id(sample: Any) -> str:
    """Equal for equal document, prompt and target: what two models must share to be compared on it."""
    joined = ":".join(str(sample[key]) for key in ("doc_hash", "prompt_hash", "target_hash"))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    """lm-eval seeds the global generators; the caller's go on afterwards as if it had not."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def _padding(tokenizer: Any) -> Iterator[None]:
    """lm-eval changes the padding side, and would give a tokenizer without a padding token a new one, which the model
    has no embedding for; here an old one is lent for the time. Padding is masked or right of everything that counts."""
    token, side = tokenizer.pad_token, tokenizer.padding_side
    if token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_id(tokenizer))
    try:
        yield
    finally:
        tokenizer.pad_token, tokenizer.padding_side = token, side


@contextlib.contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Log-likelihoods need no cache, and lm-eval does not say so; generation asks for its own."""
    before = model.config.use_cache
    model.config.use_cache = False
    try:
        yield
    finally:
        model.config.use_cache = before


class _Truncations(logging.Handler):
    """Counts prompts that lm-eval cut to the model's length: it only logs that."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "runcat" in record.getMessage()


@contextlib.contextmanager
def _quiet(handler: logging.Handler) -> Iterator[None]:
    """lm-eval's and datasets' messages and bars go to `handler` alone."""
    import datasets
    from lm_eval.api import task as lm_eval_task

    logger = logging.getLogger("lm_eval")
    before = (logger.handlers, logger.propagate, logger.level, lm_eval_task.tqdm)
    bars = datasets.is_progress_bar_enabled()
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    lm_eval_task.tqdm = lambda iterable, **_: iterable
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.handlers, logger.propagate, _, lm_eval_task.tqdm = before
        logger.setLevel(before[2])
        if bars:
            datasets.enable_progress_bars()
