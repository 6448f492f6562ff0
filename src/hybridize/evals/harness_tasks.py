"""lm-eval's tasks by name: its index with local files in front, their data, the metric that each reports.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybridize.evals.suites import SuiteTask, unknown_task

INSTALL = 'lm-eval 0.4.12 or later is needed: pip install "hybridize[eval]"'
_LEAVES = ("TASK", "PY_TASK")


@dataclass(frozen=True)
class Item:
    """An lm-eval task or group, the names of its leaf tasks, the metric to report, and whether a group's score is the
    mean over all samples (else over its leaves)."""

    name: str
    task: Any
    leaves: tuple[str, ...]
    metric: str
    pooled: bool


def check_installed() -> None:
    """Raise ValueError where lm-eval is missing or too old."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"{INSTALL} ({error})") from error
    if not hasattr(TaskManager, "load"):  # before 0.4.12 local tasks did not reliably replace others
        raise ValueError(INSTALL)


def task_manager(folder: Path | None, names: Sequence[str]) -> Any:
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


def load(manager: Any, task: SuiteTask, folder: Path | None) -> list[Item]:
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


def _single(leaf: Any, metric: str | None) -> Item:
    name = leaf.task_name
    metric = metric or next(iter(leaf.aggregation()), None)
    _check_mean(name, metric, [leaf])
    return Item(name, leaf, (name,), str(metric), pooled=True)


def _group(group: Any, metric: str | None) -> Item:
    by_size = {each.metric: bool(each.weight_by_size) for each in group.aggregate_metric_list}
    metric = metric or next(iter(by_size))
    if metric not in by_size:
        raise ValueError(f"group {group.name!r} does not report {metric}; it reports {', '.join(by_size)}")
    leaves = group.get_all_tasks()
    _check_mean(group.name, metric, leaves)
    return Item(group.name, group, tuple(leaf.task_name for leaf in leaves), metric, by_size[metric])


def _check_mean(name: str, metric: str | None, leaves: Sequence[Any]) -> None:
    """Refuse what cannot be resampled before the model works for hours."""
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


def local_names(manager: Any, folder: Path | None) -> frozenset[str]:
    """The tasks that come from files in `folder`."""
    if folder is None:
        return frozenset()
    return frozenset(
        name
        for name, entry in manager.task_index.items()
        if entry.yaml_path is not None and folder in Path(entry.yaml_path).resolve().parents
    )
