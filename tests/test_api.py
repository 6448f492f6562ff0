"""`load` and `evaluate`: what they open, the ablations, the plain values, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from tests.convert import bench

import hybridize
from hybridize.convert import pipeline
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


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Settings of a small RULER evaluation, and records of its own: the random teacher writes 128 tokens a question."""
    essays = tmp_path_factory.mktemp("essays") / "essays.txt"
    essays.write_text("The old ship left its harbor at dawn. Nobody saw it go. " * 100)
    return {"ruler": ["niah"], "essays": essays, "lengths": [256], "samples": 2}


def test_ruler_goes_on_from_the_run(run, text, asked, monkeypatch):
    values = evaluate(run, text, **asked)
    assert json.loads(json.dumps(values)) == values and not values["perplexity"] and "passkey" not in values
    ruler = values["ruler"]
    assert [(r["task"], r["length"], r["samples"]) for r in ruler["results"]] == [
        (f"niah_single_{i}", 256, 2) for i in (1, 2, 3)
    ]
    assert ruler["haystack"] == "essays" and ruler["niah"][0]["samples"] == 6
    assert ruler["records"] == str(run / "ruler") and len(list((run / "ruler").glob("*.jsonl"))) == 3
    monkeypatch.setattr(
        hybridize.HybridForCausalLM, "generate", lambda *_, **__: pytest.fail("it was all answered before")
    )
    assert evaluate(run, text, **asked) == values
    with pytest.raises(pytest.fail.Exception):
        evaluate(run, text, mode="softmax_only", **asked)


def test_a_teacher_is_stretched_to_the_longest_length(teacher, text, tmp_path, asked, caplog):
    plain = tmp_path / "plain"
    bench.write_teacher(plain, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    options = {"tasks": ["perplexity"], "lengths": [600], "samples": 1, "texts": [str(long_text(tmp_path))]}
    values = {
        trick: evaluate(plain, text, length_trick=trick, **options)
        for trick in ("none", "yarn", "dynamic_ntk")
    }
    assert len({next(iter(v["perplexity"].values()))["nll"] for v in values.values()}) == 3
    assert "600 are beyond the 512 positions" in values["none"]["length_note"]
    assert "length_note" not in values["yarn"] and values["yarn"]["length_trick"] == "yarn"
    near = options | {"lengths": [300], "tasks": ["passkey"]}
    assert evaluate(plain, text, length_trick="yarn", **near) == evaluate(plain, text, **near)
    assert "nothing is stretched" in caplog.text
    ruler = evaluate(plain, text, length_trick="yarn", records=tmp_path / "kept", **asked)["ruler"]
    assert ruler["records"] == str(tmp_path / "kept") and len(list((tmp_path / "kept").iterdir())) == 3
    assert (
        evaluate(teacher, text, **asked | {"ruler": ["niah_single_1"], "samples": 1})["ruler"]["records"]
        is None
    )


def test_a_control_is_stretched_as_its_teacher(text, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hybridize.models.surgery import softmax_teacher

    plain, control = tmp_path / "plain", tmp_path / "control"
    bench.write_teacher(plain, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    softmax_teacher(AutoModelForCausalLM.from_pretrained(plain)).save_pretrained(control)
    AutoTokenizer.from_pretrained(plain).save_pretrained(control)
    options = {"lengths": [600], "ruler": ["niah_single_1"], "samples": 1, "length_trick": "yarn"}
    options |= {"tasks": ["perplexity"], "texts": [str(long_text(tmp_path))]}
    ours, theirs = (evaluate(target, text, **options) for target in (control, plain))
    nll, expected = (next(iter(found["perplexity"].values()))["nll"] for found in (ours, theirs))
    assert nll == pytest.approx(expected, rel=1e-5) and ours["length_trick"] == "yarn"
    assert ours["ruler"]["records"] == str(control / "ruler")  # as without the trick, under other names
    evaluate(control, text, **options | {"length_trick": "none"})
    assert len(list((control / "ruler").iterdir())) == 2
    with pytest.raises(
        ValueError, match="^mode is 'linear_only' with length_trick 'yarn': a control has no branch"
    ):
        evaluate(control, text, mode="linear_only", **options)


def long_text(folder: Path) -> Path:
    """A text whose test split has a row of 600 tokens."""
    target = folder / "long"
    target.mkdir()
    for split in ("train", "validation", "test"):
        (target / f"{split}.txt").write_text(bench.sentences(3, 1300))
    return target


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ruler": ["niha"]}, "^RULER has no task 'niha' here; did you mean 'niah'"),
        ({"ruler": ["vt"], "ruler_scorer": "nvida"}, "^scorer is 'nvida'"),
        ({"ruler": ["niah"], "essays": "nowhere.txt"}, "^essays is 'nowhere.txt'"),
        ({"essays": "nowhere.txt"}, "^essays is of RULER's tasks, and none is asked"),
        ({"chat": True}, "^chat is of RULER's tasks"),
        ({"batch_tokens": 512}, "^batch_tokens is of RULER's tasks"),
        ({"records": "answers"}, "^records is of RULER's tasks"),
        ({"ruler_scorer": "lm-eval"}, "^ruler_scorer is of RULER's tasks"),
        ({"limit": 3}, "^limit is of lm-eval's tasks, and none is asked"),
        ({"shots": 2}, "^shots is of lm-eval's tasks"),
        ({"include_path": "nowhere"}, "^include_path is of lm-eval's tasks"),
        ({"length_trick": "yarn"}, "^length_trick is 'yarn', but .* is a hybrid"),
        ({"logit_scale": "log_position:500"}, "^logit_scale: the spec has no full softmax attention"),
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


def test_an_ablation_that_would_touch_no_layer_is_refused(teacher, text, tmp_path):
    """Of a layer-wise hybrid, whose layers have one branch each, `mixed` would leave everything as it is."""
    from tests.models.hybrids import hybrid
    from transformers import AutoTokenizer

    hybrid("halo", vocab_size=AutoTokenizer.from_pretrained(teacher).vocab_size).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="^mode is 'softmax_only' with scope 'mixed', .*--scope all"):
        evaluate(tmp_path, text, mode="softmax_only", tasks=["perplexity"])
    whole = evaluate(tmp_path, text, tasks=["perplexity"])["perplexity"]
    removed = evaluate(tmp_path, text, tasks=["perplexity"], mode="softmax_only", scope="all")["perplexity"]
    assert whole != removed


def test_data_and_overrides_belong_to_recipe_files(teacher, text, tmp_path):
    with pytest.raises(ValueError, match="^overrides and data need"):
        hybridize.convert(str(teacher), bench.recipe(text), tmp_path, data="x.txt")


@pytest.mark.parametrize(
    "data",
    [
        "notes: draft #2.txt",
        "[x].txt",
        "[x]",
        "*.txt",
        "a, b.txt",
        "123",
        Path("y.txt"),
        ["[a].txt", "b: c"],
        ["code"],
    ],
)
def test_a_text_may_have_any_name(data, tmp_path, monkeypatch):
    """What means something in YAML is a name here, but for a list of names."""
    seen: list = []
    monkeypatch.setattr(
        pipeline, "convert", lambda model, recipe, out, **_: seen.append(recipe.data.source) or out
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[x]").mkdir()
    hybridize.convert("teacher", "halo-smollm2-135m", tmp_path / "run", data=data)
    hybridize.convert("teacher", "halo-smollm2-135m", tmp_path / "run", data="[code, essays]")
    one = str(data) if isinstance(data, str | Path) else tuple(data) if len(data) > 1 else data[0]
    assert seen == [one, ("code", "essays")]
