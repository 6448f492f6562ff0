"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness) on any causal model. The only file that imports lm_eval.

Everything but the glue lives in `suites`: which tasks a suite has, averages, intervals, paired differences.

Local files: `include_path` names a folder of task files in lm-eval's own format, for example

    task: arc_easy
    dataset_path: json
    dataset_kwargs: {data_files: {test: arc_easy.jsonl}}
    ...

A task or group there replaces lm-eval's own of that name; tags gain members and never lose any. Data files are looked
for from the working directory, as lm-eval does, and else from the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from hybridize.evals.generation import Progress, evaluating, padding_id
from hybridize.evals.suites import SUITES, HarnessResult, Part, SuiteTask, TaskScore, expand, unknown_task

INSTALL = 'lm-eval 0.4.12 or later is needed: pip install "hybridize[eval]"'
_LEAVES = ("TASK", "PY_TASK")


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
        include_path: folder of local task files, see above.
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
    _check_installed()
    import lm_eval

    folder = None if include_path is None else Path(include_path).resolve()
    recorder = _Truncations()
    with _quiet(recorder), _random_state(), _padding(tokenizer), evaluating(model):
        _seed(seed)  # as simple_evaluate does, but before tasks are made: some shuffle while they load
        manager = _task_manager(folder, [task.name for task in wanted])
        items = [item for task in wanted for item in _load(manager, task, folder)]
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
    local = _local_names(manager, folder)
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
    _check_installed()
    folder = None if include_path is None else Path(include_path).resolve()
    with _quiet(_Truncations()), _random_state():
        manager = _task_manager(folder, [task.name for task in wanted])
        for task in wanted:
            _load(manager, task, folder)


def _check_numbers(limit: int | float | None, batch_size: int, num_fewshot: int | None) -> None:
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
        raise ValueError(
            f"limit is {limit}; give a number of samples, a share between 0 and 1, or None for all"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if num_fewshot is not None and num_fewshot < 0:
        raise ValueError(f"num_fewshot is {num_fewshot}; it must be 0 or more")


def _check_installed() -> None:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"{INSTALL} ({error})") from error
    if not hasattr(TaskManager, "load"):  # before 0.4.12 local tasks did not reliably replace others
        raise ValueError(INSTALL)


def _task_manager(folder: Path | None, names: Sequence[str]) -> Any:
    """A TaskManager that knows `names`, local files first. Raises ValueError for broken, double or unknown ones.

    lm-eval's own index takes seconds to make and is left out where the local files say everything.
    """
    from lm_eval.tasks import TaskManager

    local: dict[str, Any] = {}
    if folder is not None:
        _check_local_files(folder)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        local = manager.task_index
        if all(_is_complete(local, name) for name in names):
            return manager
    manager = TaskManager()
    index = manager.task_index
    for name, entry in local.items():
        if entry.kind.name == "TAG" and name in index:
            # Merged by lm-eval, a local tag would replace its own: mmlu would shrink to the local subtasks, silently.
            index[name].tags.update(entry.tags)
        else:
            index[name] = entry
    for name in names:
        if name not in index:
            raise unknown_task(name, list(index))
    return manager


def _is_complete(index: dict[str, Any], name: str) -> bool:
    """Whether an index of local files alone defines `name` with all its members. A tag may have more members elsewhere."""
    entry = index.get(name)
    if entry is None or entry.kind.name == "TAG":
        return False
    if entry.kind.name in _LEAVES:
        return True
    members = entry.cfg.get("task") or []
    return all(isinstance(member, str) and _is_complete(index, member) for member in members)


def _check_local_files(folder: Path) -> None:
    """lm-eval skips files that it cannot read and all but one of equal names, saying nothing; here both are errors."""
    if not folder.is_dir():
        raise ValueError(f"include_path is {str(folder)!r}, which is no folder")
    owners: dict[str, Path] = {}
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            config = yaml.load(path.read_text(encoding="utf-8"), Loader=_LocalLoader)
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no readable YAML: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} holds no mapping; a task file has keys such as task and dataset_path")
        name = config.get("group", config.get("task"))
        if isinstance(name, str) and owners.setdefault(name, path) != path:
            raise ValueError(f"{name!r} is defined in {owners[name]} and in {path}; keep one of them")
    if not owners:
        raise ValueError(f"include_path is {str(folder)!r}, which holds no *.yaml file with a task or group")


class _LocalLoader(yaml.SafeLoader):
    """Reads task files without running what their !function tags name."""


_LocalLoader.add_constructor("!function", lambda loader, node: str(node.value))


@dataclass(frozen=True)
class _Item:
    """An lm-eval task or group, the names of its leaf tasks, the metric to report, and whether a group's score is the
    mean over all samples (else over its leaves)."""

    name: str
    task: Any
    leaves: tuple[str, ...]
    metric: str
    pooled: bool


def _load(manager: Any, task: SuiteTask, folder: Path | None) -> list[_Item]:
    """What `task` names (several for a tag or a group without a score), data included."""
    try:
        try:
            loaded = manager.load([task.name])
        except FileNotFoundError:
            if folder is None:
                raise
            with contextlib.chdir(folder):
                loaded = manager.load([task.name])
    except Exception as error:  # datasets, hub clients and task files raise whatever they like
        lines = str(error).strip().splitlines() or [type(error).__name__]
        hint = (
            f"; without a network, give include_path a folder with a YAML file for {task.name!r} that has dataset_path: json "
            "and dataset_kwargs: {data_files: ...}"
        )
        raise ValueError(
            f"task {task.name!r} cannot be loaded: {lines[0].rstrip('.')}{hint if isinstance(error, OSError) else ''}"
        ) from error
    for leaf in loaded["tasks"].values():
        if task.shots is not None:
            _check_examples(leaf, task.shots)
            leaf.set_config(key="num_fewshot", value=task.shots)
    group = loaded["groups"].get(task.name)
    if group is not None and group.has_aggregation:
        return [_group(group, task.metric)]
    return [_single(leaf, task.metric) for leaf in loaded["tasks"].values()]


def _check_examples(leaf: Any, shots: int) -> None:
    examples = leaf.fewshot_docs() if shots else ()
    if len(examples or ()) < shots:
        raise ValueError(
            f"task {leaf.task_name!r} has {len(examples or ())} examples to show, too few for {shots}-shot; "
            "its fewshot_split or training_split needs more"
        )


def _single(leaf: Any, metric: str | None) -> _Item:
    name = leaf.task_name
    metric = metric or next(iter(leaf.aggregation()), None)
    _check_mean(name, metric, [leaf])
    return _Item(name, leaf, (name,), str(metric), pooled=True)


def _group(group: Any, metric: str | None) -> _Item:
    by_size = {each.metric: bool(each.weight_by_size) for each in group.aggregate_metric_list}
    metric = metric or next(iter(by_size))
    if metric not in by_size:
        raise ValueError(f"group {group.name!r} does not report {metric}; it reports {', '.join(by_size)}")
    leaves = group.get_all_tasks()
    _check_mean(group.name, metric, leaves)
    return _Item(group.name, group, tuple(leaf.task_name for leaf in leaves), metric, by_size[metric])


def _check_mean(name: str, metric: str | None, leaves: Sequence[Any]) -> None:
    """Refuse what cannot be resampled before the model works for hours."""
    import numpy as np
    from lm_eval.api.metrics import mean

    for leaf in leaves:
        offered = leaf.aggregation()
        if metric not in offered:
            raise ValueError(
                f"task {leaf.task_name!r} does not report {metric or 'a metric'}; it reports {', '.join(offered)}"
            )
        if offered[metric] is not mean and offered[metric] is not np.mean:  # fda, swde and squad name numpy's
            raise ValueError(
                f"task {name!r}: {metric} is no mean over samples ({offered[metric].__name__}), so it has no interval here; "
                "choose another metric with name:metric, or leave the task out"
            )


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


def _score(item: _Item, raw: Any, local: frozenset[str]) -> TaskScore:
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


def _local_names(manager: Any, folder: Path | None) -> frozenset[str]:
    if folder is None:
        return frozenset()
    return frozenset(
        name
        for name, entry in manager.task_index.items()
        if entry.yaml_path is not None and folder in Path(entry.yaml_path).resolve().parents
    )


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
