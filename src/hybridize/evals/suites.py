"""Suites of lm-eval tasks as data, what their average means, and how two models are compared on them.

Nothing here imports lm_eval or touches a model: scores go in, numbers come out, and a saved result can be compared later.

Legend: N samples, R bootstrap resamples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridize.evals.aggregate import wilson_interval
from hybridize.problems import nearest

RESAMPLES = 2000
_DRAWS = 4_000_000  # indices that exist at a time, 32 MB


@dataclass(frozen=True)
class SuiteTask:
    """A task or group of lm-eval by name. `shots` None: as its own file says; `metric` None: the first it reports."""

    name: str
    shots: int | None = None
    metric: str | None = None


@dataclass(frozen=True)
class Suite:
    """Tasks whose accuracies are averaged with equal weight, and the paper that defines them."""

    name: str
    source: str
    tasks: tuple[SuiteTask, ...]


def _common_sense(mmlu_shots: int) -> tuple[SuiteTask, ...]:
    return (
        SuiteTask("piqa", 0, "acc"),
        SuiteTask("arc_easy", 0, "acc"),
        SuiteTask("arc_challenge", 0, "acc_norm"),
        SuiteTask("hellaswag", 0, "acc_norm"),
        SuiteTask("winogrande", 0, "acc"),
        SuiteTask("mmlu", mmlu_shots, "acc"),
    )


SUITES = {
    suite.name: suite
    for suite in (
        Suite("imbalance", "arXiv 2510.05901, Section 3", _common_sense(0)),
        Suite("lolcats", "arXiv 2410.10254, Section 4", _common_sense(5)),
    )
}
_METRICS = {task.name: task.metric for suite in SUITES.values() for task in suite.tasks}


def expand(tasks: str | Sequence[str], shots: int | None = None) -> tuple[SuiteTask, ...]:
    """The tasks that names stand for: a suite's, or a task itself with `shots` (None: as its own file says).

    `name:metric` chooses the metric of a task; without it a task of a suite keeps the suite's metric.
    Raises ValueError for no name, `shots` beside a suite, and one task asked for in two ways.
    """
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names or not all(names):
        raise ValueError(f"tasks is {names}; name at least one lm-eval task or a suite ({', '.join(SUITES)})")
    found: dict[str, SuiteTask] = {}
    for name in names:
        if name in SUITES and shots is not None:
            raise ValueError(
                f"num_fewshot is {shots}, but the suite {name!r} fixes its shots; leave num_fewshot out or name the tasks"
            )
        base, _, metric = name.partition(":")
        single = SuiteTask(base, shots, metric or _METRICS.get(base))
        for task in SUITES[name].tasks if name in SUITES else (single,):
            if found.setdefault(task.name, task) != task:
                raise ValueError(
                    f"tasks asks for {task.name!r} as {_words(found[task.name])} and as {_words(task)}; run them apart"
                )
    return tuple(found.values())


def _words(task: SuiteTask) -> str:
    shots = "its own shots" if task.shots is None else f"{task.shots}-shot"
    return f"{shots} {task.metric or 'first metric'}"


@dataclass(frozen=True)
class Part:
    """Samples that are resampled together: the per-sample scores of a task (or of a subtask, where a group weighs its
    subtasks equally), their weight in the task's score, and an id of every sample's text and prompt."""

    name: str
    weight: float
    scores: tuple[float, ...]
    ids: tuple[str, ...]

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class TaskScore:
    """One task's (or group's) score in 0..1 under `metric`, `shots` examples before each question.

    `local` names the tasks of it that came from the caller's own files: their text need not be the standard one.
    """

    name: str
    metric: str
    shots: int
    parts: tuple[Part, ...]
    local: tuple[str, ...] = ()
    version: str = ""

    @property
    def score(self) -> float:
        return sum(part.weight * part.mean for part in self.parts)

    @property
    def samples(self) -> int:
        return sum(len(part.scores) for part in self.parts)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95%: Wilson's for right-or-wrong scores, a bootstrap over samples for others; None for a single sample."""
        scores = self.parts[0].scores
        if len(self.parts) == 1 and set(scores) <= {0.0, 1.0}:
            return wilson_interval(round(sum(scores)), len(scores))
        return stratified_interval([(part.weight, part.scores) for part in self.parts])


@dataclass(frozen=True)
class HarnessResult:
    """Scores by task in the order asked for. `limit` says that only the first samples of each task were taken.

    `truncated` counts prompts that were cut on the left because they exceed the model's length.
    """

    tasks: tuple[TaskScore, ...]
    limit: int | float | None = None
    seed: int = 0
    lm_eval: str = ""
    truncated: int = 0
    suite: str | None = None

    @property
    def average(self) -> float:
        """AVG: the equal-weight mean of the tasks' scores, in points (per cent). Samples are not pooled."""
        return 100 * sum(task.score for task in self.tasks) / len(self.tasks)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the average, in points; samples are drawn within each task."""
        interval = stratified_interval(
            [(part.weight / len(self.tasks), part.scores) for task in self.tasks for part in task.parts]
        )
        return None if interval is None else (100 * interval[0], 100 * interval[1])

    def to_dict(self) -> dict[str, Any]:
        """Plain values with all scores of all samples; `from_dict` reads them back."""
        plain = dataclasses.asdict(self) | {"average": self.average, "interval": self.interval}
        for values, task in zip(plain["tasks"], self.tasks, strict=True):
            values |= {"score": task.score, "interval": task.interval, "samples": task.samples}
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> HarnessResult:
        """The result that `to_dict` wrote, also after JSON."""
        tasks = tuple(
            TaskScore(
                name=t["name"],
                metric=t["metric"],
                shots=t["shots"],
                parts=tuple(
                    Part(p["name"], p["weight"], tuple(p["scores"]), tuple(p["ids"])) for p in t["parts"]
                ),
                local=tuple(t["local"]),
                version=t["version"],
            )
            for t in plain["tasks"]
        )
        names = [f.name for f in dataclasses.fields(cls) if f.name != "tasks"]
        return cls(tasks, **{name: plain[name] for name in names})


@dataclass(frozen=True)
class Difference:
    """AVG of one model minus AVG of another on the same samples, in points, with its 95% bootstrap interval (paired;
    samples drawn within each task), and the same by task. Positive: the first model is better."""

    points: float
    interval: tuple[float, float] | None
    by_task: dict[str, tuple[float, tuple[float, float] | None]]


def recovered(student: HarnessResult, teacher: HarnessResult) -> float:
    """Recovered performance: AVG(student) / AVG(teacher), in per cent. Chance is not subtracted (arXiv 2510.05901).

    Raises ValueError where the two were not measured on the same samples.
    """
    _check_same_samples(student, teacher)
    if teacher.average == 0:
        raise ValueError("the teacher's average is 0; nothing can be recovered of it")
    return 100 * student.average / teacher.average


def difference(first: HarnessResult, second: HarnessResult) -> Difference:
    """AVG(first) - AVG(second): Δ_LA when they are a hybrid and its softmax-only ablation (arXiv 2510.05901, Section 3.2).

    Raises ValueError where the two were not measured on the same samples with the same prompts.
    """
    _check_same_samples(first, second)
    by_task: dict[str, tuple[float, tuple[float, float] | None]] = {}
    strata: list[tuple[float, list[float]]] = []
    for a, b in zip(first.tasks, second.tasks, strict=True):
        differences = [
            (100 * p.weight, [x - y for x, y in zip(p.scores, q.scores, strict=True)])
            for p, q in zip(a.parts, b.parts, strict=True)
        ]
        by_task[a.name] = (100 * (a.score - b.score), stratified_interval(differences))
        strata += [(weight / len(first.tasks), values) for weight, values in differences]
    return Difference(first.average - second.average, stratified_interval(strata), by_task)


def stratified_interval(
    strata: Sequence[tuple[float, Sequence[float]]], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """95% percentile bootstrap interval of `Σ weight · mean(values)` over strata `(weight, values)`.

    Values are drawn with replacement within their stratum. The generator is fixed by `seed`. None where no stratum has
    two values: nothing is known of their spread.
    """
    if all(len(values) < 2 for _, values in strata):
        return None
    generator = torch.Generator().manual_seed(seed)
    totals_R = torch.zeros(resamples, dtype=torch.float64)
    for weight, values in strata:
        values_N = torch.as_tensor(values, dtype=torch.float64)
        size = max(1, _DRAWS // len(values_N))
        for first in range(0, resamples, size):
            part_R = totals_R[first : first + size]
            draws_RN = torch.randint(
                len(values_N), (len(part_R), len(values_N)), generator=generator, dtype=torch.int32
            )
            part_R += weight * values_N[draws_RN].mean(1)
    low, high = torch.quantile(totals_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _check_same_samples(first: HarnessResult, second: HarnessResult) -> None:
    names = [[task.name for task in result.tasks] for result in (first, second)]
    if names[0] != names[1]:
        raise ValueError(
            f"the two results hold the tasks {names[0]} and {names[1]}; measure both models on one list"
        )
    for a, b in zip(first.tasks, second.tasks, strict=True):
        if (a.metric, a.shots) != (b.metric, b.shots):
            raise ValueError(
                f"task {a.name!r} was measured as {a.shots}-shot {a.metric} and as {b.shots}-shot {b.metric}; measure both alike"
            )
        if [(p.name, p.weight, p.ids) for p in a.parts] != [(p.name, p.weight, p.ids) for p in b.parts]:
            raise ValueError(
                f"task {a.name!r}: the two results come from different samples ({a.samples} and {b.samples}); "
                "measure both with the same files, limit and seed"
            )


def unknown_task(name: str, known: Sequence[str]) -> ValueError:
    """The error for a name that is neither a suite nor a task."""
    close = nearest(name, [*SUITES, *known])
    hint = (
        close
        if close.startswith("did you mean")
        else f"suites are {', '.join(SUITES)}; `lm-eval ls tasks` lists all tasks"
    )
    return ValueError(f"tasks contains {name!r}, which is no task of lm-eval or of include_path; {hint}")
