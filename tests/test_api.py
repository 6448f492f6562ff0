"""`load` and `evaluate`: what they open, the ablations, the plain values, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from tests.convert import bench

import hybridize
from hybridize.convert.run_folder import write_json


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDIZE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return bench.write_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return bench.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(teacher, text, tmp_path_factory) -> Path:
    steps = {"steps": [{"transfer": {"tokens": 256, "batch": {"rows": 2}, "validation_rows": 2}}]}
    out = tmp_path_factory.mktemp("runs") / "run"
    return hybridize.convert(str(teacher), bench.recipe(text, steps), out, device="cpu", progress=False)


def evaluate(target: Path, text: Path, **options):
    return hybridize.evaluate(
        target,
        **{"texts": [str(text)], "lengths": [64], "samples": 4, "device": "cpu", "progress": False} | options,
    ).to_dict()


def test_load_opens_runs_students_and_teachers(run, teacher):
    for target in (run, run / "model"):
        model, tokenizer = hybridize.load(target, device="cpu")
        assert isinstance(model, hybridize.HybridForCausalLM) and not model.training
    plain, own = hybridize.load(teacher, device="cpu", dtype="bfloat16")
    assert not isinstance(plain, hybridize.HybridForCausalLM) and plain.dtype == torch.bfloat16
    assert own.get_vocab() == tokenizer.get_vocab()


def test_load_says_what_is_missing(tmp_path, teacher):
    with pytest.raises(ValueError, match="neither an alias"):
        hybridize.load(tmp_path / "nowhere" / "deep" / "x", device="cpu")
    write_json(tmp_path / "run.json", {})
    with pytest.raises(ValueError, match="has no finished student yet; run the same convert command"):
        hybridize.load(tmp_path, device="cpu")
    for dtype in ("float23", "int8", torch.int64):
        with pytest.raises(ValueError, match="^dtype is "):
            hybridize.load(teacher, device="cpu", dtype=dtype)


def test_an_evaluation_is_plain_values(run, text):
    values = evaluate(run, text, tasks=["perplexity", "passkey"], lengths=[64, 96], samples=2)
    assert json.loads(json.dumps(values)) == values
    (of_text,) = values["perplexity"].values()
    assert {"perplexity", "low", "high", "nll", "tokens", "by_position", "far_share"} <= set(of_text)
    assert of_text["by_position"][0]["start"] == 0 and 0 < of_text["far_share"] < 1
    assert [entry["length"] for entry in values["passkey"]["lengths"]] == [64, 96]
    assert all(
        entry["samples"] == 2 and 0 <= entry["accuracy"] <= 1 for entry in values["passkey"]["lengths"]
    )
    assert values["model"] == str(run) and values["effective_spec"]["mode"] == "hybrid"


def test_every_mode_is_a_model_of_its_own(run, text):
    nll = {}
    for mode in ("hybrid", "softmax_only", "far_only", "linear_only", "sinks_only", "none"):
        values = evaluate(run, text, tasks=["perplexity"], mode=mode)
        assert values["mode"] == mode and values["effective_spec"]["mode"] == mode
        (of_text,) = values["perplexity"].values()
        nll[mode] = of_text["nll"]
    assert len(set(nll.values())) == len(nll)
    zero, renormalize = (
        evaluate(run, text, tasks=["perplexity"], mode="softmax_only", removal=removal)
        for removal in ("zero", "renormalize")
    )
    assert zero["perplexity"] != renormalize["perplexity"]


def test_a_teacher_is_measured_and_has_nothing_to_remove(teacher, text):
    values = evaluate(teacher, text, tasks=["perplexity"])
    assert "effective_spec" not in values and values["perplexity"]
    with pytest.raises(ValueError, match="^mode is 'softmax_only', but .* is no hybrid"):
        evaluate(teacher, text, mode="softmax_only")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ["perplexty"]}, "^tasks contains 'perplexty'; did you mean 'perplexity'"),
        ({"tasks": []}, "^tasks is "),
        ({"lengths": []}, "^lengths is "),
        ({"lengths": [1]}, "^lengths is "),
        ({"samples": 0}, "^samples is 0"),
        ({"mode": "softmax"}, "^mode is 'softmax'"),
        ({"removal": "both"}, "^removal is 'both'"),
        ({"scope": "some"}, "^scope is 'some'"),
        ({"texts": ["docstring"]}, "did you mean 'docstrings'"),
    ],
)
def test_evaluate_refuses(run, text, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        evaluate(run, text, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_data_and_overrides_belong_to_recipe_files(teacher, text, tmp_path):
    with pytest.raises(ValueError, match="^overrides and data need"):
        hybridize.convert(str(teacher), bench.recipe(text), tmp_path, data="x.txt")
