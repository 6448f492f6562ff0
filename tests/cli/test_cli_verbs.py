"""Verbs hand their arguments to the public API, print what comes back, and end errors as one red line."""

import errno
import io
import json
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

import hybridize
from hybridize.cli import common, evaluate, generate
from hybridize.cli.main import run


@pytest.fixture
def record(monkeypatch):
    """Replace a function of the public API by one that notes its arguments."""

    def replace(name, result=None, error=None):
        calls = []

        def recorder(*args, **kwargs):
            calls.append((args, kwargs))
            if error is not None:
                raise error
            return result

        monkeypatch.setattr(hybridize, name, recorder, raising=False)
        return calls

    return replace


def test_recipes_list_show_and_copy(cli, tmp_path):
    for arguments in (("recipes",), ("recipes", "list")):
        code, out, _ = cli(*arguments)
        assert code == 0 and "lolcats-smollm2-135m" in out and "two CPU cores" in out
    code, out, _ = cli("recipes", "show", "demo")
    assert code == 0 and out == hybridize.recipe_path("demo").read_text()
    code, out, _ = cli("recipes", "copy", "demo", tmp_path / "mine.yaml")
    assert code == 0 and (tmp_path / "mine.yaml").read_text() == hybridize.recipe_path("demo").read_text()
    code, _, err = cli("recipes", "copy", "demo", tmp_path / "mine.yaml")
    assert code == 2 and err.startswith("error: ") and "exists" in err
    assert json.loads(cli("recipes", "schema")[1])["title"] == "Recipe"


def test_plan_prints_tables_and_json(cli, tmp_path):
    LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=99,
    ).save_pretrained(tmp_path)
    code, out, _ = cli("plan", tmp_path, "-r", "demo")
    assert code == 0
    for part in ("cache of one sequence", "131,072", "transfer", "finetune", "60", "student"):
        assert part in out
    code, out, _ = cli("plan", tmp_path, "-r", "demo", "--set", "transfer.tokens=1024", "--json", "-")
    plain = json.loads(out)
    assert code == 0 and plain["stages"][0]["tokens"] == 1024 and plain["layers"] == 2
    cli("plan", tmp_path, "-r", "demo", "--json", tmp_path / "deep" / "plan.json")
    assert json.loads((tmp_path / "deep" / "plan.json").read_text())["layers"] == 2


def test_plan_names_what_convert_would_refuse(cli, tmp_path):
    LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=99,
    ).save_pretrained(tmp_path)
    code, out, _ = cli("plan", tmp_path, "-r", "lolcats-llama3.1-405b")
    assert code == 0 and "convert would refuse: devices: the recipe needs 24 GPUs" in out


def test_every_problem_of_a_recipe_is_a_line(cli, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("sped: 1\nspec: {all: {attention: softmax}}\nsteps: [{tranfer: {}}]\n")
    code, out, err = cli("plan", tmp_path, "-r", recipe)
    assert code == 2 and out == ""
    assert err.splitlines() == [
        f"error: {recipe}: steps[0].tranfer: unknown step; did you mean 'transfer'?",
        f"error: {recipe}: sped: unknown key; did you mean 'spec'?",
    ]


def test_convert_hands_everything_over(cli, record, tmp_path):
    calls = record("convert")
    code, out, _ = cli(
        "convert", "m", "-r", "demo", "-o", tmp_path, "--data", "x.txt", "--set", "seed=1", "--set", "data.length=256",
        "--device", "cuda:1", "--stop-after", "transfer",
    )  # fmt: skip
    ((args, kwargs),) = calls
    assert code == 0 and str(tmp_path) in out
    assert args == ("m", "demo", tmp_path)
    assert kwargs == {
        "data": "x.txt", "overrides": ["seed=1", "data.length=256"], "device": "cuda:1", "stop_after": "transfer"
    }  # fmt: skip


def test_demo_hands_over_its_folder(cli, record, tmp_path):
    calls = record("demo")
    assert cli("demo", "--out", tmp_path, "--quick")[0] == 0
    assert calls == [((tmp_path,), {"quick": True})]


class Result:
    def to_dict(self):
        return {
            "perplexity": {"perplexity": 9.5, "by_position": [{"start": 0, "end": 64, "nll": 2.25}]},
            "seed": None,
        }


def test_eval_hands_over_and_prints(cli, record, tmp_path):
    calls = record("evaluate", result=Result())
    code, out, _ = cli(
        "eval", "run", "--mode", "softmax_only", "--removal", "renormalize", "--tasks", "perplexity, passkey",
        "--lengths", "64,128", "--samples", "3", "--dtype", "float32", "--json", tmp_path / "r.json",
        "--texts", "code, essays", "--scope", "all", "--limit", 4, "--window", "sliding:8", "--mix", "0.5",
    )  # fmt: skip
    ((args, kwargs),) = calls
    assert code == 0 and args == ("run",)
    assert kwargs == {
        "tasks": ["perplexity", "passkey"], "mode": "softmax_only", "removal": "renormalize", "lengths": [64, 128],
        "samples": 3, "device": None, "dtype": "float32", "scope": "all", "texts": ["code", "essays"],
        "include_path": None, "limit": 4.0, "shots": None, "window": "sliding:8", "mix": 0.5, "logit_scale": None,
        "ruler": (), "ruler_scorer": "nvidia", "essays": None, "chat": False, "batch_tokens": None, "records": None, "length_trick": "none",
    }  # fmt: skip
    assert "9.5" in out and "by_position" in out and "2.25" in out
    assert json.loads((tmp_path / "r.json").read_text()) == Result().to_dict()


class Ruler:
    def to_dict(self):
        def scores(first):
            return [
                {"length": n, "score": first + i, "low": 70.123, "high": 95.0}
                for i, n in enumerate((4096, 16384))
            ]

        settings = {"samples": 40, "scorer": "lm-eval", "chat": True}
        results = [{"task": name, **cell} for name in ("niah_single_1", "vt") for cell in scores(80)]
        values = {"results": results, "niah": scores(82.5), "settings": settings, "haystack": "local prose"}
        return {"perplexity": {}, "ruler": {**values, "records": "run/ruler"}}


def test_eval_asks_ruler_and_prints_task_by_length(cli, record, tmp_path):
    calls = record("evaluate", result=Ruler())
    code, out, _ = cli(
        "eval", "run", "--ruler", "niah,vt", "--lengths", "4096,16384", "--ruler-scorer", "lm-eval", "--chat", "--batch-tokens", "65536",
        "--essays", "pg.json", "--records", tmp_path, "--length-trick", "yarn", "--logit-scale", "log_position:500",
        "--json", tmp_path / "r.json",
    )  # fmt: skip
    ((_, kwargs),) = calls
    expected = {
        "tasks": None, "ruler": ["niah", "vt"], "ruler_scorer": "lm-eval", "chat": True, "batch_tokens": 65536, "essays": Path("pg.json"),
        "records": tmp_path, "length_trick": "yarn", "logit_scale": "log_position:500", "samples": None,
    }  # fmt: skip
    assert code == 0 and {name: kwargs[name] for name in expected} == expected
    for part in (
        "4,096",
        "16,384",
        "niah_single_1",
        "mean of single 1-3",
        "82.5 [70.1, 95]",
        "81 [70.1, 95]",
    ):
        assert part in out
    assert "40 samples a task and length; scored as lm-eval; needles in local prose; chat template" in out
    assert json.loads((tmp_path / "r.json").read_text()) == Ruler().to_dict()


@pytest.mark.parametrize("lengths", ["", "12,x", "0", "-4"])
def test_eval_refuses_bad_lengths(cli, record, lengths):
    calls = record("evaluate", result=Result())
    code, _, err = cli("eval", "run", f"--lengths={lengths}")
    assert code == 2 and err.startswith("error: --lengths is ") and not calls


def test_unknown_mode_is_refused_with_the_choices(cli, record):
    code, _, err = cli("eval", "run", "--mode", "linear")
    assert code == 2 and "linear_only" in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("w is 0;\n  it must be 1"), 2, "error: w is 0; it must be 1\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.txt"), 2, "x.txt"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 2, "No space left on device"),
        (RuntimeError("layer 3: the loss is nan"), 1, "error: layer 3: the loss is nan\n"),
    ],
)
def test_known_errors_end_as_one_line(cli, record, error, code, message):
    record("convert", error=error)
    got, _, err = cli("convert", "m", "-r", "demo", "-o", "out")
    assert got == code and message in err
    assert "Traceback" not in err and len(err.strip().splitlines()) == 1


def test_an_interrupt_ends_quietly(cli, record):
    record("convert", error=KeyboardInterrupt())
    code, _, err = cli("convert", "m", "-r", "demo", "-o", "out")
    assert code == 130 and "Traceback" not in err


def test_debug_shows_the_traceback(record, monkeypatch):
    record("convert", error=ValueError("boom"))
    monkeypatch.setenv("HYBRIDIZE_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["hybridize", "convert", "m", "-r", "demo", "-o", "out"])
    with pytest.raises(ValueError, match="boom"):
        run()


@pytest.fixture(scope="module")
def tiny():
    """A random model of a few words and its tokenizer, built here."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    words = [
        "<pad>",
        "<eos>",
        "<unk>",
        *["the", "moon", "is", "round", "and", "far", "user", "assistant", "hello"],
    ]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        vocab_size=len(words), bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.suppress_tokens = [0, 1, 2]
    return model, tokenizer


def test_generate_streams_a_continuation(cli, record, tiny):
    calls = record("load", result=tiny)
    code, out, _ = cli("generate", "run", "the moon is", "--max-new-tokens", "5", "--dtype", "float32")
    assert code == 0 and out.startswith("the moon is") and len(out.split()) > 3
    assert calls == [(("run",), {"device": None, "dtype": "float32"})]
    assert cli("generate", "run", "the moon is", "--max-new-tokens", "5")[1] == out


def test_sampling_follows_its_seed(cli, record, tiny):
    record("load", result=tiny)
    options = ("generate", "run", "the moon is", "--max-new-tokens", "12", "--temperature", "5")
    assert cli(*options, "--seed", "1")[1] == cli(*options, "--seed", "1")[1]
    assert len({cli(*options, "--seed", seed)[1] for seed in range(4)}) > 1


def test_generate_refuses_an_empty_prompt_and_a_missing_template(cli, record, tiny):
    record("load", result=tiny)
    assert cli("generate", "run", "")[::2] == (2, "error: PROMPT is empty; give some text to continue\n")
    code, _, err = cli("generate", "run", "hello", "--chat")
    assert code == 2 and "no chat template" in err


def test_chat_keeps_and_forgets_the_conversation(cli, record, tiny, monkeypatch):
    model, tokenizer = tiny
    seen = []

    class Templated:
        chat_template = "set"
        pad_token_id = tokenizer.pad_token_id

        def apply_chat_template(self, messages, **options):
            seen.append([message["role"] for message in messages])
            return tokenizer(
                " ".join(message["content"] for message in messages) or "hello", return_tensors="pt"
            )

        def decode(self, *args, **kwargs):
            return tokenizer.decode(*args, **kwargs)

    record("load", result=(model, Templated()))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nthe moon\n/reset\nhello\n/exit\nnever\n"))
    code, _, _ = cli("chat", "run", "--max-new-tokens", "3", "--temperature", "0")
    assert code == 0
    assert seen == [["user"], ["user", "assistant", "user"], ["user"]]


def test_chat_ends_with_its_input(cli, record, tiny, monkeypatch):
    record("load", result=tiny)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli("chat", "run")[0] == 0


def test_small_formats():
    assert [common.human_bytes(n) for n in (0, 1023, 1536, 84410368, 17179869184)] == [
        "0 B", "1023 B", "1.5 KiB", "80.5 MiB", "16 GiB"
    ]  # fmt: skip
    assert common.human_bytes(1023 * 1024) == "1023 KiB"
    assert [common.human_count(n) for n in (270, 16_777_216, 8_030_261_248, None)] == [
        "270",
        "16.8M",
        "8.03B",
        "-",
    ]
    assert common.split_list(" a, b,,") == ["a", "b"]
    assert evaluate.parse_lengths("64, 128") == [64, 128]
    assert generate.sampling(5, 0.0, 0.9) == {"max_new_tokens": 5, "do_sample": False}


def test_extend_hands_over(cli, record, tmp_path):
    calls = record("extend", result=tmp_path)
    code, out, _ = cli("extend", "run", "--window", "sliding:64", "--mix", "0.5", "-o", tmp_path / "new")
    assert code == 0 and "hybridize diagnose" in out
    defaults = {"text": "docstrings", "length": 8192, "rows": 16, "device": None, "search_bases": ()}
    edits = {"window": "sliding:64", "mix": 0.5, "logit_scale": None}
    assert calls == [(("run", tmp_path / "new"), defaults | edits)]
    cli("extend", "run", "--logit-scale", "log_position:500", "-o", tmp_path / "new")
    edits = {"window": None, "mix": None, "logit_scale": "log_position:500"}
    assert calls[1:] == [(("run", tmp_path / "new"), defaults | edits)]


def test_extend_prints_the_search(cli, record, tmp_path):
    calls = record("extend", result=tmp_path)
    cli("extend", "run", "--search-base", "", "-o", tmp_path)  # refused by the call, not taken for none
    assert calls.pop()[1]["search_bases"] == ""
    none = {"base": None, "loss": 2.5, "standard_error": 0.1, "change": 0.0, "low": 0.0, "high": 0.0}
    curve = [none, {**none, "base": 100.0, "loss": 2.25, "change": -0.25, "low": -0.31, "high": -0.19}]
    curve += [{**none, "base": 300.0, "loss": 2.4, "change": -0.1}]
    search = {"text": "code", "length": 512, "rows": 3, "curve": curve, "best": "log_position:100"}
    (tmp_path / "extend.json").write_text(json.dumps({"search": search}))
    code, out, _ = cli(
        "extend", "run", "--search-base", "100,300", "--length", 512, "--rows", 4, "--text", "code", "-o", tmp_path
    )  # fmt: skip
    ((_, kwargs),) = calls
    assert code == 0 and (kwargs["search_bases"], kwargs["length"], kwargs["rows"]) == ("100,300", 512, 4)
    for part in ("3 rows of 512 tokens of code", "no scale", "-0.25", "-0.31", "kept: log_position:100"):
        assert part in out
    assert "100 is the smallest base tried" in out


@pytest.mark.parametrize("option", ["--ruler", "--tasks", "--texts"])
def test_eval_refuses_an_empty_list(cli, record, option):
    calls = record("evaluate")
    code, _, err = cli("eval", "run", option, " , ")
    assert code == 2 and f"{option} is ' , '; name at least one" in err and not calls
