"""lm-eval's tasks on tiny models, from local files alone; skipped where lm-eval is not installed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.models.hybrids import hybrid
from tests.models.tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridize.evals import harness, harness_tasks
from hybridize.evals.aggregate import wilson_interval
from hybridize.evals.generation import evaluating
from hybridize.evals.harness import check_tasks, run_harness
from hybridize.evals.suites import SUITES, difference
from hybridize.models.modeling import HybridForCausalLM

pytest.importorskip("lm_eval")

FOLDER = Path(__file__).parent / "local_tasks"
QUESTIONS = [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text().splitlines()]
LINES = [json.loads(line)["line"] for line in (FOLDER / "lines.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True, scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is fetched, datasets writes to a folder of the tests', and no time goes into describing the machine."""
    import datasets
    from lm_eval import evaluator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(evaluator, "add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def standard_index() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


@pytest.fixture
def one_index(standard_index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own index takes seconds to make: every use gets a copy of one."""
    from lm_eval import tasks

    make = tasks.TaskManager

    def manager(**options: Any) -> Any:
        if options:
            return make(**options)
        fresh = copy.copy(standard_index)
        fresh._index = {
            name: replace(entry, tags=set(entry.tags)) for name, entry in standard_index.task_index.items()
        }
        return fresh

    monkeypatch.setattr(tasks, "TaskManager", manager)
    monkeypatch.setattr(manager, "load", make.load, raising=False)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, without a padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({s: i for i, s in enumerate(["<s>", "</s>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def model() -> HybridForCausalLM:
    return hybrid("terraced", vocab_size=260)


@pytest.fixture
def run(model: HybridForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    def call(tasks: Any, **options: Any) -> Any:
        return run_harness(model, tokenizer, tasks, **{"include_path": FOLDER} | options)

    return call


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """One sequence alone, token by token."""
    first = len(tokenizer(context).input_ids)
    ids = torch.tensor([tokenizer(context + continuation).input_ids])
    logs = model(ids[:, :-1]).logits[0].double().log_softmax(-1)
    return sum(logs[t - 1, ids[0, t]].item() for t in range(first, ids.shape[1]))


def test_scores_are_those_of_the_likelihoods(
    run: Callable[..., Any], model: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    result = run(["lights:acc", "arc_easy:acc_norm"])
    expected: dict[str, list[float]] = {"lights": [], "arc_easy": []}
    for question in QUESTIONS:
        for name, prompt in (
            ("lights", question["question"]),
            ("arc_easy", f"Question: {question['question']}\nAnswer:"),
        ):
            values = [log_likelihood(model, tokenizer, prompt, f" {c}") for c in question["choices"]]
            if name == "arc_easy":
                values = [v / len(c) for v, c in zip(values, question["choices"], strict=True)]
            expected[name].append(float(values.index(max(values)) == question["answer"]))
    assert {task.name: list(task.parts[0].scores) for task in result.tasks} == expected
    assert 0 < sum(expected["lights"]) < len(QUESTIONS), "or the comparison would say little"
    for task in result.tasks:
        assert task.score == pytest.approx(sum(expected[task.name]) / len(QUESTIONS))
        assert task.interval == wilson_interval(int(sum(expected[task.name])), len(QUESTIONS))
        assert (task.local, task.shots) == ((task.name,), 0)
    assert result.average == pytest.approx(50 * sum(task.score for task in result.tasks))


@pytest.mark.parametrize("kind", ["terraced", "every-kind"])
def test_batches_change_nothing(tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    """Log-likelihoods are padded on the right, without a mask; generation on the left."""
    from lm_eval.api.instance import Instance

    model = hybrid(kind, vocab_size=260)
    pairs = [(q["question"], f" {choice}") for q in QUESTIONS for choice in q["choices"]]
    options = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    outcomes = []
    for batch_size in (1, 8):
        with harness._padding(tokenizer), evaluating(model):
            wrapped = harness._language_model(model, tokenizer, batch_size, None)
            likelihoods = wrapped.loglikelihood(
                [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
            )
            texts = wrapped.generate_until(
                [Instance("generate_until", {}, (line, dict(options)), i) for i, line in enumerate(LINES)]
            )
        outcomes.append((likelihoods, texts))
    (alone, written), (batched, written_together) = outcomes
    assert [value for value, _ in batched] == pytest.approx([value for value, _ in alone], rel=1e-4)
    assert alone[0][0] == pytest.approx(log_likelihood(model, tokenizer, *pairs[0]), rel=1e-4)
    assert written == written_together and len(set(written)) > 1


def test_bf16_models_are_summed_in_float32(tokenizer: PreTrainedTokenizerFast) -> None:
    from lm_eval.api.instance import Instance

    model = tiny_model("llama", vocab_size=260).bfloat16()
    pair = (QUESTIONS[0]["question"], " more light than the sun and the moon")
    with harness._padding(tokenizer), evaluating(model):
        wrapped = harness._language_model(model, tokenizer, 1, None)
        ((value, _),) = wrapped.loglikelihood([Instance("loglikelihood", {}, pair, 0)])
    assert value == pytest.approx(log_likelihood(model, tokenizer, *pair), rel=1e-5)


def test_generation_is_scored(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.models.huggingface import HFLM

    answers = {"do": " re", "east west": " north"}
    monkeypatch.setattr(
        HFLM, "generate_until", lambda self, requests, **_: [answers.get(r.args[0], " x") for r in requests]
    )
    (task,) = run("continue").tasks
    assert (task.metric, task.parts[0].scores) == ("exact_match", (0.0, 1.0, 0.0, 1.0, 0.0))


def test_groups_weigh_as_their_files_say(run: Callable[..., Any]) -> None:
    single = {task.name: task for task in run(["lights:acc", "sums:acc"]).tasks}
    (pooled,), (even,) = run("pooled").tasks, run("even").tasks
    lights, sums = single["lights"], single["sums"]
    assert lights.score != sums.score and (lights.samples, sums.samples) == (7, 3)
    assert pooled.score == pytest.approx((7 * lights.score + 3 * sums.score) / 10)
    assert even.score == pytest.approx((lights.score + sums.score) / 2)
    assert pooled.parts[0].scores == lights.parts[0].scores + sums.parts[0].scores
    assert [part.ids for part in even.parts] == [lights.parts[0].ids, sums.parts[0].ids]


def test_everything_is_as_before(model: HybridForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    def state() -> tuple[Any, ...]:
        numpy = np.random.get_state()[1]
        return random.getstate(), torch.get_rng_state().tolist(), numpy.tolist(), tokenizer.padding_side

    random.seed(5)
    before, vocabulary = state(), len(tokenizer)
    done: list[tuple[int, int]] = []

    def progress(count: int, total: int) -> None:
        assert not model.training and not model.config.use_cache
        done.append((count, total))

    model.train()
    try:
        run_harness(model, tokenizer, ["sums", "continue"], include_path=FOLDER, on_progress=progress)
        assert model.training
    finally:
        model.eval()
    assert state() == before
    assert tokenizer.pad_token is None and len(tokenizer) == vocabulary
    assert model.config.use_cache and all(p.grad is None for p in model.parameters())
    assert done == [(n, 6) for n in range(1, 7)] + [(n, 5) for n in range(1, 6)]


def test_shots_are_examples_before_the_question(run: Callable[..., Any]) -> None:
    none, two = run("lights"), run("lights", num_fewshot=2)
    assert [task.shots for task in (*none.tasks, *two.tasks)] == [0, 2]
    assert none.tasks[0].parts[0].ids != two.tasks[0].parts[0].ids, "the prompts differ"
    assert run("lights", num_fewshot=2, seed=3).tasks[0].parts[0].ids != two.tasks[0].parts[0].ids
    with pytest.raises(ValueError, match="'lights' was measured as 0-shot acc_norm and as 2-shot acc_norm"):
        difference(none, two)
    with pytest.raises(ValueError, match="'lights' has 6 examples to show, too few for 7-shot"):
        run("lights", num_fewshot=7)


def test_limit_takes_the_first_samples(run: Callable[..., Any]) -> None:
    whole, part = run("pooled"), run("pooled", limit=2)
    ids = whole.tasks[0].parts[0].ids
    assert part.tasks[0].parts[0].ids == ids[:2] + ids[7:9]
    assert (part.limit, whole.limit) == (2, None)
    with pytest.raises(
        ValueError, match=r"'pooled': the two results come from different samples \(10 and 4\)"
    ):
        difference(whole, part)


def test_cut_prompts_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    short = tiny_model("llama", vocab_size=260, max_position_embeddings=48)
    assert run_harness(short, tokenizer, "sums", include_path=FOLDER).truncated == 0
    assert run_harness(short, tokenizer, "arc_easy", include_path=FOLDER).truncated > 0


def test_a_suite_of_local_files(
    model: HybridForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """All six tasks read from files, mmlu as a group; two models on the same samples."""
    template = yaml.safe_load((FOLDER / "lights.yaml").read_text())
    template["dataset_kwargs"]["data_files"] = {
        "train": str(FOLDER / "examples.jsonl"),
        "test": str(FOLDER / "questions.jsonl"),
    }
    subjects = ["mmlu_law", "mmlu_logic"]
    for name in ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", *subjects]:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(template | {"task": name}))
    group = {
        "group": "mmlu",
        "task": subjects,
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (tmp_path / "mmlu.yaml").write_text(yaml.safe_dump(group))
    result = run_harness(model, tokenizer, "lolcats", include_path=tmp_path)
    assert result.suite == "lolcats"
    assert [(task.name, task.shots, task.metric) for task in result.tasks] == [
        (task.name, task.shots, task.metric) for task in SUITES["lolcats"].tasks
    ]
    assert result.tasks[-1].samples == 14 and result.tasks[-1].local == tuple(subjects)
    assert result.average == pytest.approx(sum(100 * task.score for task in result.tasks) / 6)
    other = run_harness(
        hybrid("softmax", vocab_size=260, seed=1), tokenizer, "lolcats", include_path=tmp_path
    )
    gap = difference(result, other)
    assert gap.points == pytest.approx(result.average - other.average) and gap.points != 0
    assert gap.interval is not None and gap.interval[0] <= gap.points <= gap.interval[1]


STANDARD: dict[str, dict[str, Any]] = {
    "allenai/ai2_arc": {
        "question": "q?",
        "choices": {"text": ["a", "bb", "c"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    },
    "baber/piqa": {"goal": "g", "sol1": "x", "sol2": "yy", "label": 1},
    "Rowan/hellaswag": {
        "ctx_a": "c",
        "ctx_b": "then",
        "activity_label": "act",
        "endings": ["a", "b", "cc", "d"],
        "label": "2",
    },
    "allenai/winogrande": {"sentence": "the _ is", "option1": "x", "option2": "y", "answer": "2"},
    "cais/mmlu": {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 3},
}


def test_suites_fit_the_tasks_of_lm_eval(
    one_index: None,
    model: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lm-eval's own task files, on stand-ins for the data that they would fetch: six rows that differ by a number."""
    import datasets

    def rows(path: str, name: str | None = None, **_: Any) -> Any:
        row = STANDARD[path]
        text = next(key for key, value in row.items() if isinstance(value, str))
        data = datasets.Dataset.from_list([row | {text: f"{row[text]} {name} {i}"} for i in range(6)])
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test", "dev"), data))

    monkeypatch.setattr(datasets, "load_dataset", rows)
    result = run_harness(model, tokenizer, "lolcats", limit=1)
    assert [(t.name, t.metric, t.shots, t.samples) for t in result.tasks] == [
        (t.name, t.metric, t.shots, 57 if t.name == "mmlu" else 1) for t in SUITES["lolcats"].tasks
    ]
    assert not any(task.local for task in result.tasks)


def test_local_tasks_replace_standard_ones_and_tags_keep_their_members(
    one_index: None, standard_index: Any
) -> None:
    standard = standard_index.task_index
    assert standard["ai2_arc"].tags == {"arc_easy", "arc_challenge"}
    index = harness_tasks.task_manager(FOLDER, ["ai2_arc"]).task_index
    assert index["arc_easy"].yaml_path == FOLDER / "arc_easy.yaml"
    assert index["ai2_arc"].tags == {"arc_easy", "arc_challenge"}
    assert index["arc_challenge"].yaml_path == standard["arc_challenge"].yaml_path


def test_wrong_names(one_index: None, run: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError,
        match="'arc_esay', which is no task of lm-eval or of include_path; did you mean 'arc_easy'",
    ):
        run("arc_esay")
    with pytest.raises(ValueError, match="'lihgts'.* did you mean 'lights'"):
        run(["sums", "lihgts"])
    with pytest.raises(ValueError, match="did you mean 'imbalance'"):
        check_tasks("imbalence")


def test_missing_data_is_one_line(
    one_index: None, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text((FOLDER / "sums.yaml").read_text())
    with pytest.raises(
        ValueError, match="task 'sums' cannot be loaded: .*sums.jsonl.*include_path"
    ) as caught:
        run("sums", include_path=tmp_path)
    assert "\n" not in str(caught.value)

    import datasets

    def unreachable(**_: Any) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub.\nMore words.")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ValueError, match="task 'piqa' cannot be loaded: Couldn't reach.*YAML file for 'piqa'"
    ):
        check_tasks("piqa")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.yaml": "task: x\n", "b/c.yaml": "task: x\n"}, "'x' is defined in .*a.yaml and in .*c.yaml"),
        ({"a.yaml": "task: [x\n"}, "a.yaml is no readable YAML"),
        ({"a.yaml": "- x\n"}, "a.yaml holds no mapping"),
        ({"a.txt": "x"}, "holds no \\*.yaml file with a task"),
        (None, "which is no folder"),
    ],
)
def test_local_files_are_checked(
    tmp_path: Path, run: Callable[..., Any], files: dict[str, str] | None, message: str
) -> None:
    for name, text in (files or {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        run("x", include_path=tmp_path if files else tmp_path / "none")


def test_metrics_that_are_no_means_are_refused_before_the_model_runs(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    config = yaml.safe_load((FOLDER / "sums.yaml").read_text())
    config["dataset_kwargs"]["data_files"]["test"] = str(FOLDER / "sums.jsonl")
    config["metric_list"] = [{"metric": "mcc", "aggregation": "matthews_corrcoef", "higher_is_better": True}]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="'sums': mcc is no mean over samples"):
        run("sums", include_path=tmp_path)
    with pytest.raises(ValueError, match="'sums' does not report acc_norm; it reports acc"):
        run("sums:acc_norm")
    with pytest.raises(ValueError, match="group 'pooled' does not report acc_norm; it reports acc"):
        run("pooled:acc_norm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"limit": 1.5}, "limit is 1.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_fewshot": -1}, "num_fewshot is -1"),
    ],
)
def test_wrong_numbers(run: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("sums", **options)


def test_missing_or_old_lm_eval(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval.tasks", None)
        with pytest.raises(ValueError, match=r'pip install "hybridize\[eval\]"'):
            run("sums")
    from lm_eval.tasks import TaskManager

    monkeypatch.delattr(TaskManager, "load")
    with pytest.raises(ValueError, match="0.4.12 or later"):
        run("sums")


@pytest.mark.parametrize("function", [np.mean, "mean"])
def test_means_by_either_name_are_means(function: Any) -> None:
    """lm-eval's own `mean` and numpy's, which fda, swde and squad_completion name."""
    from lm_eval.api.metrics import mean

    class Leaf:
        task_name = "leaf"

        def aggregation(self) -> dict[str, Any]:
            return {"contains": mean if function == "mean" else function, "worst": np.max}

    harness_tasks._check_mean("leaf", "contains", [Leaf()])
    with pytest.raises(ValueError, match="no mean over samples"):
        harness_tasks._check_mean("leaf", "worst", [Leaf()])
