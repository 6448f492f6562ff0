"""The default scores: what their rows ask, that they never change, and that one packed pass scores them as rows alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from tests.evals import test_offline
from tests.evals.ruler_models import ESSAYS, make_tokenizer
from tests.models.hybrids import hybrid

from hybridize.evals.offline import run_offline
from hybridize.select import scores
from hybridize.select.recall_tasks import QUERIES, RECALL_TASKS, recall_row
from hybridize.select.rows import Row, score_rows
from hybridize.select.scores import knowledge, knowledge_probe, recall, recall_probe
from hybridize.select.table import Score


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model():
    return hybrid("kept-half", vocab_size=512)


@pytest.fixture(scope="module")
def probe(tokenizer):
    return recall_probe(
        tokenizer,
        positions=512,
        tasks=["niah_single_2", "pairs"],
        lengths=[400, 500],
        samples=3,
        essays=ESSAYS,
    )


def answers(tokenizer, row: Row) -> str:
    return tokenizer.decode([row.ids[t] for t in row.targets])


@pytest.mark.parametrize("task", RECALL_TASKS)
@pytest.mark.parametrize("template", ["bos", "no bos"])
def test_a_row_predicts_its_answer_and_nothing_else(tokenizer, task, template):
    if template == "no bos":
        tokenizer = make_tokenizer(None)
        tokenizer._tokenizer.post_processor = type(tokenizer.backend_tokenizer.post_processor)(
            single="$A", special_tokens=[]
        )
    for index in range(3):
        row = recall_row(tokenizer, task, 1000, index, essays=ESSAYS)
        assert len(row.ids) <= 1000 and row.targets[-1] == len(row.ids) - 1
        before = tokenizer.decode(row.ids[: row.targets[0]])
        asked = answers(tokenizer, row)
        if task == "pairs":
            values = re.findall(r"\d{7}", asked)
            assert len(values) == QUERIES and "".join(values) == re.sub(r"\s", "", asked)
            assert all(before.count(value) == 1 for value in values)
            places = sorted(before.index(value) / len(before) for value in values)
            assert places[0] < 0.25 and places[-1] > 0.75
        else:
            assert asked == asked.strip() and before.count(asked) == 1
            assert re.fullmatch(r"\d{7}|[0-9a-f-]{36}", asked)


def test_pairs_fill_their_length(tokenizer):
    for length in (450, 700, 1500):
        row = recall_row(tokenizer, "pairs", length, 0)
        assert length - length // 128 - 40 < len(row.ids) <= length
    with pytest.raises(ValueError, match=r"length is 100; pairs needs at least \d+ tokens"):
        recall_row(tokenizer, "pairs", 100, 0)


def test_one_packed_pass_scores_as_rows_alone(model, probe):
    rows = [each[0] for lengths in probe.rows.values() for each in lengths.values()]
    for batch_tokens in (100, 1200):
        scores = score_rows(model, rows, batch_tokens=batch_tokens)
        for row, found in zip(rows, scores, strict=True):
            logits = model(torch.tensor([row.ids]), use_cache=False).logits[0].log_softmax(-1)
            places = torch.tensor(row.targets)
            wanted = torch.tensor(row.ids)[places]
            assert found.hits == (logits[places - 1].argmax(-1) == wanted).double().mean().item()
            assert found.mean == pytest.approx(logits[places - 1, wanted].mean().item(), abs=1e-4)


def test_probability_is_that_of_whole_answers(model):
    row = Row(tuple(range(1, 13)), (3, 4, 7, 8, 9, 11))
    logits = model(torch.tensor([row.ids])).logits[0].double().log_softmax(-1)
    each = {t: logits[t - 1, row.ids[t]].item() for t in row.targets}
    answers = [each[3] + each[4], each[7] + each[8] + each[9], each[11]]
    wanted = sum(math.exp(answer) for answer in answers) / 3
    assert score_rows(model, [row])[0].probability == pytest.approx(wanted, rel=1e-4)


def test_hits_are_what_greedy_decoding_gives(model):
    prompt = [5, 9, 301, 77, 12, 400]
    new = model.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[
        0
    ].tolist()
    places = tuple(range(len(prompt), len(new)))
    assert score_rows(model, [Row(tuple(new), places)])[0].hits == 1
    new[-3] = (new[-3] + 1) % 512
    assert score_rows(model, [Row(tuple(new), places)])[0].hits < 1


def test_recall_is_the_mean_of_its_parts(model, tokenizer, probe):
    found = probe.score(model)
    assert [part.name for part in found.parts] == [
        "niah_single_2 400",
        "niah_single_2 500",
        "pairs 400",
        "pairs 500",
    ]
    assert found.samples == 12 and all(part.samples == 3 for part in found.parts)
    assert found.value == pytest.approx(sum(part.value for part in found.parts) / 4)
    assert found.standard_error is not None and 0 <= found.value <= 1
    assert probe.score(model) == found
    assert (
        recall(
            model, tokenizer, tasks=["niah_single_2", "pairs"], lengths=[400, 500], samples=3, essays=ESSAYS
        )
        == found
    )
    assert Score.read(json.loads(json.dumps(found, default=vars))) == found


def test_lengths_follow_the_positions(tokenizer):
    assert recall_probe(tokenizer, positions=450, tasks=["pairs"], samples=1).identity["lengths"] == [450]
    assert recall_probe(tokenizer, positions=1500, tasks=["pairs"], samples=1).identity["lengths"] == [
        512,
        1024,
    ]
    with pytest.raises(ValueError, match="lengths contains 600; the teacher has 512 positions"):
        recall_probe(tokenizer, positions=512, tasks=["pairs"], lengths=[450, 600])


def test_identities_tell_samples_apart(tokenizer):
    def make(**changes):
        options = {"positions": 512, "tasks": ["pairs"], "lengths": [450], "samples": 2}
        return recall_probe(tokenizer, **options | changes)

    first = make()
    assert first.identity == make().identity and first.rows == make().rows
    assert json.loads(json.dumps(first.identity)) == first.identity
    for changes in (
        {"seed": 1},
        {"samples": 3},
        {"lengths": [470]},
        {"tasks": ["niah_multikey_2"], "lengths": [400]},
    ):
        assert make(**changes).identity["sha256"] != first.identity["sha256"]
    # more samples add to the former ones
    assert make(samples=3).rows["pairs"][450][:2] == first.rows["pairs"][450]


@pytest.mark.parametrize("names", [["cloze_near"], ["recall_near", "last_word_near", "cloze_far"]])
def test_knowledge_weighs_what_the_offline_tasks_judge(model, names, monkeypatch):
    """Counting the heaviest choice as right gives the accuracy of `run_offline`."""
    weight = scores._weight

    def judged(question, scored):
        each = [weight(replace(question, answer=i), scored) for i in range(len(question.choices))]
        if len(each) == 1:
            assert each[0] == scored[0].probability
            return float(scored[0].hits == 1)
        assert sum(each) == pytest.approx(1)
        return float(each.index(max(each)) == question.answer)

    monkeypatch.setattr(scores, "_weight", judged)
    tokenizer = test_offline.make_tokenizer()
    found = knowledge(
        model,
        tokenizer,
        documents=test_offline.DOCUMENTS,
        tasks=names,
        samples=6,
        reach_tokens=100,
        max_length=330,
    )
    results = run_offline(
        model, tokenizer, test_offline.DOCUMENTS, names=names, samples=6, reach_tokens=100, max_length=330
    )
    assert [(part.name, part.value, part.samples) for part in found.parts] == [
        (result.name, pytest.approx(result.accuracy), result.samples) for result in results
    ]
    assert found.value == pytest.approx(sum(result.accuracy for result in results) / len(results))


def test_probes_name_what_is_wrong(tokenizer):
    for options, said in (
        ({"tasks": ["pair"]}, "did you mean 'pairs'"),
        ({"tasks": ["niah_multiquery"]}, "niah_multiquery"),
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": ["pairs"], "samples": 0}, "samples is or contains 0"),
        ({"tasks": ["pairs"], "lengths": []}, "lengths is or contains 0"),
        ({"tasks": ["pairs"], "batch_tokens": 0}, "batch_tokens is or contains 0"),
    ):
        with pytest.raises(ValueError, match=said):
            recall_probe(tokenizer, positions=512, **options)
    with pytest.raises(ValueError, match="did you mean 'cloze_near'"):
        knowledge_probe(tokenizer, documents=test_offline.DOCUMENTS, tasks=["cloze_nea"])
    with pytest.raises(ValueError, match="documents"):
        knowledge_probe(tokenizer, documents=["too short"], samples=2)


def test_a_model_that_gives_nan_is_named(tokenizer, probe):
    broken = hybrid("kept-half", vocab_size=512)
    broken.mixers[0].o_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN logits"):
        probe.score(broken)
