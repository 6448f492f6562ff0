"""Choosing from tables and files, the JSON of a selection, and its way back."""

from __future__ import annotations

import json

import pytest
from tests.select.test_rules import KNOWLEDGE, ORDER, RECALL

from hybridize.report.selection_plot import selection_plot, selection_table
from hybridize.select import LayerScores, Score, ScoreTable, choose, load_scores
from hybridize.select.table import ScorePart


def table(errors: float | None = 0.01) -> ScoreTable:
    parts = (ScorePart("pairs 512", 0.1, errors, 4), ScorePart("pairs 1024", 0.2, None, 4))
    layers = [
        LayerScores(i, Score(r, errors, 8, parts), Score(c, 0.02, 500))
        for i, (r, c) in enumerate(zip(RECALL, KNOWLEDGE, strict=True))
    ]
    return ScoreTable.of(
        [*layers, LayerScores(None, Score(0.95, 0.01), Score(0.61))], {"layers": 8, "seed": 0}
    )


def test_choose_by_every_rule():
    assert choose("halo", 8, scores=table()).kept == (1, 3)
    assert choose("halo", 8, "1/2", scores=table(), cap=50).ranking.order[:2] == (3, 1)
    assert choose("jet", 8, 2, scores=table()).ranking.order[:2] == (4, 6)
    losses = ScoreTable.of([LayerScores(i, loss=loss) for i, loss in enumerate([3.0, 1.0, 2.0])])
    assert choose("kl", 3, 1, scores=losses).kept == (1,)
    assert choose("uniform", 28).kept == (3, 7, 11, 15, 19, 23, 27)
    assert choose("tail", 28).kept == (15, 17, 19, 21, 23, 25, 27)
    assert choose("given", 28, given=[9, 2]).kept == (2, 9)


def test_a_floor_of_standard_errors():
    chosen = choose("halo", 8, 1, scores=table(), floor="standard_error")
    assert (
        chosen.ranking == choose("halo", 8, 1, scores=table(), floor=0.02).ranking
    )  # all errors of C are 0.02
    assert chosen.kept == (1,) and choose("halo", 8, 1, scores=table()).kept == (3,)
    assert chosen.to_dict()["floor"] == "standard_error"
    numbers = [
        LayerScores(i, Score(r), Score(c)) for i, (r, c) in enumerate(zip(RECALL, KNOWLEDGE, strict=True))
    ]
    with pytest.raises(ValueError, match="not every layer's knowledge has one"):
        choose("halo", 8, scores=ScoreTable.of(numbers), floor="standard_error")
    with pytest.raises(ValueError, match="floor is 'noise'; give a number"):
        choose("halo", 8, scores=table(), floor="noise")
    with pytest.raises(ValueError, match="floor is 0.1 under the rule 'jet'"):
        choose("jet", 8, scores=table(), floor=0.1)


def test_spread_is_for_rules_that_score():
    chosen = choose("jet", 8, 2, scores=table(), spread=True)
    assert chosen.kept == tuple(
        min(range(*block), key=lambda layer: (RECALL[layer], layer)) for block in ((0, 4), (4, 8))
    )
    assert chosen.to_dict()["spread"] is True and choose("uniform", 8).to_dict()["spread"] is False
    with pytest.raises(
        ValueError, match="spread is on under the rule 'tail', which has no scores; halo, jet"
    ):
        choose("tail", 8, spread=True)
    with pytest.raises(ValueError, match="spread is 'yes'; it is True or False"):
        choose("jet", 8, scores=table(), spread="yes")


def test_flat_recall_is_refused_with_the_tables_errors():
    with pytest.raises(ValueError, match="hardly varies"):
        choose("halo", 8, scores=table(errors=0.21))
    choose("halo", 8, scores=table(errors=None))


@pytest.mark.parametrize("name", ["selection.json", "scores.jsonl"])
@pytest.mark.parametrize("cap", [None, 50.0])
def test_a_file_ranks_exactly_as_its_table(tmp_path, name, cap):
    chosen = choose("halo", 8, scores=table(), cap=cap)
    path = tmp_path / name
    if name == "selection.json":
        chosen.save(path)
    else:
        lines = [
            {"identity": {"layers": 8, "seed": 0}},
            *[entry.plain() for entry in [table().teacher, *table().layers]],
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_scores(path) == table()
    again = choose("halo", 8, scores=path, cap=cap)
    assert again.ranking == chosen.ranking and again.to_dict() == chosen.to_dict()
    assert choose("jet", 8, scores=path).ranking == choose("jet", 8, scores=table()).ranking


def test_bare_numbers_will_do(tmp_path):
    lines = [
        {"layer": i, "recall": r, "knowledge": c}
        for i, (r, c) in enumerate(zip(RECALL, KNOWLEDGE, strict=True))
    ]
    path = tmp_path / "scores.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    assert choose("halo", 8, scores=path).ranking.order == ORDER
    assert choose("halo", 8, scores=tmp_path).ranking.order == ORDER
    with pytest.raises(ValueError, match="no recall of the teacher"):
        choose("jet", 8, scores=path)
    with pytest.raises(ValueError, match="no loss for layer 0"):
        choose("kl", 8, scores=path)


def test_a_byte_order_mark_is_no_score(tmp_path):
    path = tmp_path / "scores.jsonl"
    path.write_text('{"layer": 0, "recall": 0.5}\n', encoding="utf-8-sig")
    assert load_scores(path).recall()[0].value == 0.5


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "scores.jsonl"
    with pytest.raises(ValueError, match="no such file"):
        load_scores(path)
    for text, said in (
        ("", "holds no scores"),
        ('{"layer": 1, "recall": 0.5}\n', "lacks layer 0 of 2"),
        ('{"layer": 0, "recall": 0.5}\n{"layer": 1, "rec', "line 2 is no JSON object"),
        ('{"identity": {"layers": 2}}\n{"layer": 0, "recall": 0.5}\n{"layer": 1, "rec', "lacks layer 1 of 2"),
        ('{"identity": {"layers": 1}}\n{"layer": 1, "recall": 0.5}\n', "its identity names 1 layers"),
        ('{"identity": {"layers": "2"}}\n{"layer": 0, "recall": 0.5}\n', "identity.layers is '2'"),
        ('{"identity": 5}\n{"layer": 0, "recall": 0.5}\n', "identity is 5"),
        ('{"layer": 1000000000000, "recall": 0.5}\n', "lacks layers 0, 1, 2, 3, 4, 5, 6, 7, ... of"),
        ('{"layer": 0, "recall": {"value": null}}\n', "has the value None"),
        ('{"layer": 0, "recall": {"value": 0.5, "standard_error": "x"}}\n', "has the standard_error 'x'"),
        ('{"layer": 0, "recall": {"value": 0.5, "standard_error": NaN}}\n', "has the standard_error nan"),
        ('{"layer": 0, "recall": {"value": Infinity}}\n', "has the value inf"),
        ('{"layer": 0, "loss": true}\n', "loss is True; it must be a number"),
        ('{"layer": 0, "loss": "2"}\n', "loss is '2'"),
        ('{"layer": 0, "loss": [3]}\n', r"loss is \[3\]"),
        (
            '{"layer": 0, "recall": {"value": 0.5, "parts": null}}\n',
            "has the parts None; they must be a list",
        ),
        ('{"layer": 0, "recall": {"value": 0.5, "parts": 3}}\n', "has the parts 3"),
        ('{"layer": 0, "recall": {"value": 0.5, "samples": "many"}}\n', "has 'many' samples"),
        ('{"layer": 0, "recall": {"value": 0.5, "parts": [{"value": 1}]}}\n', "an object with a name"),
        ('{"layer": 0, "recall": {"value": 0.5, "parts": [{"name": "x"}]}}\n', "has the value None"),
        ('{"by_layer": 5, "format": "hybridize selection", "version": 1}', "by_layer must be a list"),
        ('{"by_layer": [5], "format": "hybridize selection", "version": 1}', "an entry is 5"),
        (
            '{"by_layer": [], "teacher": 5, "format": "hybridize selection", "version": 1}',
            "teacher an object",
        ),
        ('{"identity": {"layers": 3}}\n{"layer": 0, "recall": 0.5}\n', "lacks layers 1, 2 of 3"),
        ('{"layer": "a"}\n', "layer is 'a'"),
        ('{"layer": 0, "recall": "x"}\n', "a score is 'x'"),
        ('{"format": "hybridize selection", "version": 2, "by_layer": []}', "version 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            load_scores(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rule": "hallo"}, "did you mean 'halo'"),
        ({"rule": "halo"}, "scores is missing"),
        ({"rule": "halo", "scores": table(), "layers": 9}, "scores has 8 layers; the model has 9"),
        ({"rule": "jet", "scores": table(), "cap": 50}, "only 'halo' takes one"),
        ({"rule": "given"}, "needs the layers"),
        ({"rule": "uniform", "given": [1]}, "leave `given` out"),
        ({"rule": "uniform", "keep": 9}, "keep is 9"),
    ],
)
def test_choose_names_what_is_wrong(arguments, said):
    with pytest.raises(ValueError, match=said):
        choose(**{"layers": 8} | arguments)


def test_the_json_holds_what_decided():
    plain = json.loads(json.dumps(choose("halo", 8, scores=table(), cap=50).to_dict()))
    assert (plain["rule"], plain["keep"], plain["count"], plain["cap"], plain["layers"]) == (
        "halo",
        "1/4",
        2,
        50,
        8,
    )
    assert plain["kept"] == [1, 3] and plain["ranking"] == list(ORDER)
    assert plain["teacher"]["recall"]["value"] == 0.95 and plain["identity"] == {"layers": 8, "seed": 0}
    entry = plain["by_layer"][3]
    assert entry["kept"] and entry["score"] == 50 and entry["recall"]["parts"][0]["name"] == "pairs 512"
    plain = choose("given", 4, given=[2, 0]).to_dict()
    assert (
        plain["given"] == [2, 0]
        and plain["count"] == 2
        and plain["by_layer"][1] == {"layer": 1, "kept": False}
    )


def test_plot_and_table_of_every_rule():
    losses = ScoreTable.of([LayerScores(i, loss=loss) for i, loss in enumerate([3.0, 1.0, 2.0])])
    for chosen in (
        choose("halo", 8, scores=table()),
        choose("halo", 8, scores=table(), cap=50),
        choose("jet", 8, scores=table()),
        choose("kl", 3, 1, scores=losses),
    ):
        plain = json.loads(json.dumps(chosen.to_dict()))
        svg = selection_plot(plain)
        assert svg.startswith("<svg") and svg.endswith("</svg>") and "layer (from 0)" in svg
        text = selection_table(plain)
        assert len(text.splitlines()) == chosen.layers + 2 + (plain["teacher"] is not None)
        assert sum(line.endswith("kept") for line in text.splitlines()) == len(chosen.kept)
    plain = choose("uniform", 28).to_dict()
    assert selection_plot(plain) == "" and "7 of 28 layers keep softmax: 3, 7, 11" in selection_table(plain)
