"""RULER runs: scores of models whose answers are known, and runs that go on where they were stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evals.ruler_models import ESSAYS, NEEDLE, Speaker, make_tokenizer, noise, perfect
from tests.models.hybrids import hybrid
from tests.models.tiny import tiny_model
from torch import nn
from transformers import PreTrainedTokenizerFast

from hybridize.evals.haystacks import Haystack
from hybridize.evals.ruler import GROUPS, NIAH, per_cent, run_ruler, string_match_all
from hybridize.evals.ruler_records import Records, model_fingerprint
from hybridize.evals.ruler_tasks import TASKS, Form, least_length, make_sample


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def ask(
    model: nn.Module, tokenizer: Any, tasks: Any = ("niah",), lengths: Any = (700,), **options: Any
) -> dict:
    options = {"samples": 4, "essays": ESSAYS, **options}
    return run_ruler(model, tokenizer, tasks, lengths, **options)


def test_a_length_too_short_is_refused_with_the_least(tokenizer: PreTrainedTokenizerFast) -> None:
    form = Form(tokenizer)
    for name in ("niah_single_3", "niah_multikey_3", "vt"):
        least = least_length(name, 3, form=form, essays=ESSAYS)
        for index in range(3):
            assert len(make_sample(name, least, index, form=form, essays=ESSAYS).input_ids) <= least
        model = Speaker(tokenizer, noise)
        with pytest.raises(
            ValueError, match=rf"lengths contains {least - 1}; {name} needs at least {least} tokens"
        ):
            ask(model, tokenizer, [name], [9000, least - 1], samples=3)
        assert not model.batches
    with pytest.raises(ValueError, match="sample 0 of vt needs at least"):
        make_sample("vt", 100, 0, form=form)


def test_scores_are_the_share_of_references_contained() -> None:
    assert string_match_all(" it is AB12-cd and 777.", ["ab12-CD", "777"]) == 1
    assert string_match_all("777", ["ab12", "777", "778", "1"]) == 0.25
    shares = [1, 0, 0]
    assert per_cent(shares) == 33.33 and per_cent(shares, "lm-eval") == pytest.approx(100 / 3, abs=1e-12)


def test_scores_agree_with_lm_eval() -> None:
    common = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    predictions = [" The number is 1234567.\n", "\x00none", "AAA bbb"]
    references = [["1234567"], ["7654321"], ["aaa", "ccc"]]
    ours = [string_match_all(p, r) for p, r in zip(predictions, references, strict=True)]
    theirs = common.string_match_all(common.postprocess_pred(predictions), references)
    assert per_cent(ours, "lm-eval") == pytest.approx(100 * theirs)


def test_a_perfect_model_scores_all_and_noise_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [2000, 2600]
    good = ask(Speaker(tokenizer, perfect), tokenizer, ["ruler"], lengths)
    bad = ask(Speaker(tokenizer, noise), tokenizer, ["ruler"], lengths)
    assert [(r["length"], r["task"]) for r in good["results"]] == [
        (n, name) for n in lengths for name in TASKS
    ]
    for result in good["results"]:
        assert result["score"] == 100 and result["scores"] == [1.0] * 4, result["examples"]
        assert result["low"] == pytest.approx(51.01, abs=0.01) and result["high"] == 100
        assert result["interval"] == "wilson" and result["samples"] == 4
        assert 0.9 * result["length"] - 128 < result["prompt_tokens"] <= result["length"] - 30
    assert all(result["score"] == 0 and result["low"] == 0 for result in bad["results"])
    assert [n["score"] for n in good["niah"]] == [100, 100] and [n["score"] for n in bad["niah"]] == [0, 0]
    assert json.loads(json.dumps(good)) == good
    assert good["haystack"] == "essays" and good["settings"]["haystack"] == ESSAYS.fingerprint


def test_niah_is_the_mean_of_the_three_singles(tokenizer: PreTrainedTokenizerFast) -> None:
    def no_uuids(prompt: str) -> str:
        return noise(prompt) if "uuid" in prompt else perfect(prompt)

    result = ask(Speaker(tokenizer, no_uuids), tokenizer, [*NIAH, "niah_multivalue"], samples=6)
    assert [r["score"] for r in result["results"]] == [100, 100, 0, 100]
    (niah,) = result["niah"]
    assert niah["score"] == 66.67 and niah["samples"] == 18
    assert niah["low"] < 66.67 < niah["high"]
    exact = ask(Speaker(tokenizer, no_uuids), tokenizer, samples=6, scorer="lm-eval")
    assert exact["niah"][0]["score"] == pytest.approx(200 / 3, abs=1e-12)
    assert ask(Speaker(tokenizer, noise), tokenizer, NIAH[:2])["niah"] == []


def test_scores_by_depth(tokenizer: PreTrainedTokenizerFast) -> None:
    def near_the_end(prompt: str) -> str:
        return perfect(prompt) if NEEDLE.search(prompt).start() > len(prompt) // 2 else noise(prompt)  # type: ignore[union-attr]

    (result,) = ask(Speaker(tokenizer, near_the_end), tokenizer, ["niah_single_1"], [3000], samples=40)[
        "results"
    ]
    buckets = {b["start"]: b for b in result["by_depth"]}
    assert list(buckets) == [i / 10 for i in range(10)] and sum(b["samples"] for b in buckets.values()) == 40
    assert all(buckets[i / 10]["score"] == (100 if i > 5 else 0) for i in (0, 1, 2, 3, 6, 7, 8, 9))
    first, second = result["examples"]
    assert first["score"] == 1 and second["score"] == 0 and second["prediction"].startswith(" grass")


def test_partial_answers_get_a_bootstrap_interval(tokenizer: PreTrainedTokenizerFast) -> None:
    answers = iter(range(100))

    def some(prompt: str) -> str:
        return ",".join(perfect(prompt).split(",")[: next(answers) % 4 + 1])

    (result,) = ask(Speaker(tokenizer, some), tokenizer, ["niah_multivalue"], samples=8)["results"]
    assert result["score"] == 62.5 and result["scores"] == [0.25, 0.5, 0.75, 1.0] * 2
    assert (
        result["interval"] == "bootstrap"
        and result["low"] < 62.5 < result["high"]
        and result["by_depth"] == []
    )


def test_batches_follow_the_token_budget(tokenizer: PreTrainedTokenizerFast) -> None:
    model, told = Speaker(tokenizer, perfect), []
    ask(
        model,
        tokenizer,
        ["niah_single_1"],
        [700, 2100, 4500],
        samples=5,
        batch_tokens=4200,
        progress=lambda done, total: told.append((done, total)),
    )
    assert model.batches == [5, 2, 2, 1, 1, 1, 1, 1, 1]
    assert told[-1] == (15, 15) and told == sorted(told)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def test_answers_are_kept_and_not_asked_again(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    first = ask(Speaker(tokenizer, perfect), tokenizer, folder=tmp_path, samples=3)
    again, more = Speaker(tokenizer, perfect), Speaker(tokenizer, perfect)
    assert ask(again, tokenizer, folder=tmp_path, samples=3) == first and not again.batches
    longer = ask(more, tokenizer, folder=tmp_path, samples=5, scorer="lm-eval")
    assert sum(more.batches) == 6 and longer == {
        **ask(Speaker(tokenizer, perfect), tokenizer, samples=5, scorer="lm-eval")
    }
    assert [path.name.rsplit("-", 2)[0] for path in files(tmp_path)] == list(NIAH)
    header, *lines = (json.loads(line) for line in files(tmp_path)[0].read_text().splitlines())
    assert header["task"] == "niah_single_1" and header["seed"] == 0 and header["haystack"] is None
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4]
    assert set(lines[0]) == {"index", "depth", "prompt_tokens", "references", "prediction", "score"}
    fewer = Speaker(tokenizer, perfect)
    assert (
        ask(fewer, tokenizer, folder=tmp_path, samples=2)["results"][0]["samples"] == 2 and not fewer.batches
    )


@pytest.mark.parametrize("cut", [1, 20, -200])
def test_a_run_goes_on_after_half_a_line(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, cut: int
) -> None:
    """Cut in the last line, and in the header."""
    whole = ask(Speaker(tokenizer, perfect), tokenizer, ["niah_single_1"], folder=tmp_path)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: -cut if cut > 0 else 10])
    model = Speaker(tokenizer, perfect)
    assert ask(model, tokenizer, ["niah_single_1"], folder=tmp_path) == whole
    # Without its line break a last line is whole, so nothing is asked for it.
    assert sum(model.batches) == (0 if cut == 1 else 1 if cut > 0 else 4)
    ask(Speaker(tokenizer, perfect), tokenizer, ["niah_single_1"], folder=tmp_path, samples=6)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("index") for line in lines] == [None, 0, 1, 2, 3, 4, 5]


def test_a_stopped_run_keeps_its_batches(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    calls = iter(range(100))

    def stopped(prompt: str) -> str:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return perfect(prompt)

    with pytest.raises(KeyboardInterrupt):
        ask(Speaker(tokenizer, stopped), tokenizer, ["niah_single_1"], folder=tmp_path, batch_tokens=1400)
    model = Speaker(tokenizer, perfect)
    ask(model, tokenizer, ["niah_single_1"], folder=tmp_path)
    assert model.batches == [2]


def test_another_setting_or_model_has_a_file_of_its_own(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def run(weight: float = 0.0, **options: Any) -> int:
        model = Speaker(tokenizer, perfect)
        nn.init.constant_(model.anchor, weight)
        ask(model, tokenizer, ["niah_single_2"], folder=tmp_path, samples=2, **options)
        return sum(model.batches)

    other = Haystack("essays", ESSAYS.words[::-1])
    for count, options in enumerate([{}, {"weight": 0.5}, {"seed": 1}, {"chat": True}, {"essays": other}], 1):
        assert run(**options) == 2 and run(**options) == 0
        assert len(files(tmp_path)) == count
    path = files(tmp_path)[0]
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7').replace('"seed": 1', '"seed": 7'))
    with pytest.raises(ValueError, match="other settings than its name says"):
        for options in ({}, {"weight": 0.5}, {"seed": 1}, {"chat": True}, {"essays": other}):
            run(**options)


def test_fingerprint_sees_weights_and_the_spec_in_force() -> None:
    model = hybrid("terraced")
    before = model_fingerprint(model)
    assert before == model_fingerprint(hybrid("terraced")) != model_fingerprint(hybrid("sliding"))
    with model.override(mode="softmax_only"):
        assert model_fingerprint(model) != before
    assert model_fingerprint(model) == before
    with torch.no_grad():
        next(model.parameters()).mul_(1.001)
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("kind", ["teacher", "hybrid"])
def test_real_models_run(
    tokenizer: PreTrainedTokenizerFast, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 512, "max_position_embeddings": 1024}
    model = tiny_model("llama", num_hidden_layers=2, **sizes) if kind == "teacher" else hybrid(**sizes)
    result = ask(model, tokenizer, ["niah_single_1"], [420], samples=2)
    assert result["results"][0]["score"] == 0 and result["haystack"] is None
    assert json.dumps(result)


def test_wrong_arguments_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = Speaker(tokenizer, perfect)
    for options, message in (
        ({"tasks": ["niah_singel_1"]}, "did you mean 'niah_single_1'"),
        ({"tasks": []}, "tasks or lengths is empty"),
        ({"lengths": []}, "tasks or lengths is empty"),
        ({"lengths": [700, 0]}, "lengths is or contains 0"),
        ({"samples": 0}, "samples is or contains 0"),
        ({"batch_tokens": 0}, "batch_tokens is or contains 0"),
        ({"scorer": "nvida"}, "scorer is 'nvida'; did you mean 'nvidia'"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(model, tokenizer, **options)
    assert GROUPS["niah"] == NIAH and not model.batches


def test_records_in_a_file_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="records is .* which is no folder"):
        Records(tmp_path / "file", {"task": "vt", "length": 512})
