"""Suites, their averages, and the comparison of two models on the same samples."""

from __future__ import annotations

import json
import math

import pytest

from hybridize.evals.suites import (
    SUITES,
    HarnessResult,
    Part,
    SuiteTask,
    TaskScore,
    difference,
    expand,
    recovered,
    stratified_interval,
    unknown_task,
)


def task(name: str, *scores: float, **kwargs: object) -> TaskScore:
    part = Part(name, 1.0, tuple(map(float, scores)), tuple(f"{name}{i}" for i in range(len(scores))))
    return TaskScore(name, "acc", 0, (part,), **kwargs)  # type: ignore[arg-type]


def result(*tasks: TaskScore) -> HarnessResult:
    return HarnessResult(tasks)


def test_the_published_suites() -> None:
    names = ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu"]
    for suite, mmlu_shots in (("imbalance", 0), ("lolcats", 5)):
        tasks = SUITES[suite].tasks
        assert [t.name for t in tasks] == names
        assert [t.shots for t in tasks] == [0, 0, 0, 0, 0, mmlu_shots]
        assert {t.name for t in tasks if t.metric == "acc_norm"} == {"arc_challenge", "hellaswag"}
        assert {t.metric for t in tasks} == {"acc", "acc_norm"}


def test_names_become_tasks() -> None:
    assert expand("imbalance") == expand(["imbalance"]) == SUITES["imbalance"].tasks
    assert expand(["boolq", "hellaswag"], 3) == (SuiteTask("boolq", 3), SuiteTask("hellaswag", 3, "acc_norm"))
    assert expand("hellaswag:acc") == (SuiteTask("hellaswag", None, "acc"),)
    assert len(expand(["imbalance", "boolq", "boolq"])) == 7


@pytest.mark.parametrize(
    ("names", "shots", "message"),
    [
        ([], None, "name at least one"),
        ("", None, "name at least one"),
        ("lolcats", 5, "the suite 'lolcats' fixes its shots"),
        (["imbalance", "lolcats"], None, "'mmlu' as 0-shot acc and as 5-shot acc; run them apart"),
        (["boolq", "boolq:f1"], None, "'boolq' as its own shots first metric and as its own shots f1"),
    ],
)
def test_contradictions(names: str | list[str], shots: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(names, shots)


def test_unknown_names_get_the_nearest() -> None:
    assert "did you mean 'piqa'" in str(unknown_task("pika", ["piqa", "mmlu"]))
    assert "suites are imbalance, lolcats" in str(unknown_task("xyzzy", ["piqa", "mmlu"]))


def test_the_average_weighs_tasks_alike() -> None:
    both = result(task("small", 1, 1), task("large", *[0] * 98))
    assert both.average == 50
    assert recovered(
        result(task("a", 1, 0, 0, 0), task("b", 1, 0)), result(task("a", 1, 1, 1, 0), task("b", 1, 0))
    ) == (pytest.approx(100 * 37.5 / 62.5))
    with pytest.raises(ValueError, match="average is 0"):
        recovered(both, result(task("small", 0, 0), task("large", *[0] * 98)))


def test_a_group_that_weighs_its_parts_alike() -> None:
    parts = (
        Part("x", 0.5, (1.0, 1.0, 1.0, 0.0), ("a", "b", "c", "d")),
        Part("y", 0.5, (0.0, 0.0), ("e", "f")),
    )
    group = TaskScore("g", "acc", 0, parts)
    assert group.score == 0.375 and group.samples == 6
    low, high = group.interval or (math.nan, math.nan)
    assert (low, high) == (0.125, 0.5), "y is always wrong, so only x can vary"


def test_the_difference_is_paired() -> None:
    """Two models that agree but on one sample differ surely, however widely the samples spread."""
    spread = [i % 2 for i in range(100)]
    better = [1, *spread[1:]]
    gap = difference(result(task("a", *better), task("b", 0, 1)), result(task("a", *spread), task("b", 0, 1)))
    assert gap.points == pytest.approx(0.5)
    assert gap.by_task["a"][0] == pytest.approx(1) and gap.by_task["b"] == (0, (0, 0))
    low, high = gap.interval or (math.nan, math.nan)
    assert 0 <= low <= 0.5 <= high < 2
    back = difference(
        result(task("a", *spread), task("b", 0, 1)), result(task("a", *better), task("b", 0, 1))
    )
    assert back.points == -gap.points and back.interval == pytest.approx((-high, -low), abs=1e-9)


def test_stratified_interval_covers_and_stays_in_its_strata() -> None:
    """The normal approximation of a weighted mean of two strata, from which pooling them would be far."""
    a, b = [0.0, 1.0] * 200, [10.0, 12.0] * 50
    low, high = stratified_interval([(0.75, a), (0.25, b)]) or (math.nan, math.nan)
    half = 1.96 * math.sqrt(0.75**2 * 0.25 / 400 + 0.25**2 * 1.0 / 100)
    assert (low + high) / 2 == pytest.approx(0.75 * 0.5 + 0.25 * 11, abs=0.02)
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
    assert stratified_interval([(0.75, a), (0.25, b)]) == (low, high), "the same every time"
    assert stratified_interval([(1.0, [3.0])]) is None


def test_results_survive_json() -> None:
    before = HarnessResult(
        (task("a", 1, 0, 1, local=("a",), version="1.0"), task("b", 0.25, 0.5)),
        limit=3,
        seed=7,
        lm_eval="0.4",
        truncated=2,
    )
    plain = json.loads(json.dumps(before.to_dict()))
    assert HarnessResult.from_dict(plain) == before
    assert plain["average"] == before.average and plain["tasks"][0]["score"] == before.tasks[0].score
    assert difference(HarnessResult.from_dict(plain), before).points == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (result(task("b", 1, 0)), r"hold the tasks \['a'\] and \['b'\]"),
        (result(task("a", 1, 0, 0)), r"'a': the two results come from different samples \(2 and 3\)"),
    ],
)
def test_different_samples_are_not_compared(other: HarnessResult, message: str) -> None:
    for compare in (difference, recovered):
        with pytest.raises(ValueError, match=message):
            compare(result(task("a", 1, 0)), other)
