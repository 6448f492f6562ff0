"""Edits of the spec between steps, the linear gain during fine-tuning, and stopping by it."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from tests.convert import bench
from tests.models.tiny import tiny_model

import hybridize
from hybridize.convert.finetune import FinetuneStage
from hybridize.convert.pipeline import convert
from hybridize.models.surgery import hybridize_model
from hybridize.recipe import FinetuneStep, Recipe, RecipeError
from hybridize.spec import HybridSpec

LINEAR = {"attention": "linear", "feature_map": {"init": "identity_noise"}}
EDIT = {"edit": {"window": {"kind": "sliding", "size": 8}}}


def with_edit(text, edit=EDIT, spec=LINEAR, **changes):
    raw = bench.plain(text, {"spec.all": spec, **changes})
    raw["steps"] = [raw["steps"][0], edit, *raw["steps"][1:]]
    return raw


@pytest.mark.parametrize("mix", ["fixed", "learnt", "mass"])
def test_a_linear_conversion_gains_a_window(teacher, text, tmp_path, mix):
    edit = {
        "edit": {"window": {"kind": "sliding", "size": 8}, "normalizer": {"kind": "separate", "mix": mix}}
    }
    recipe = Recipe.from_dict(with_edit(text, edit))
    assert recipe.first_far_position == 8
    run = convert(str(teacher), recipe, tmp_path, device="cpu", progress=False)
    model, _ = hybridize.load(run, device="cpu")
    assert {(g.attention, g.window.size, g.normalizer.mix) for g in model.spec.groups} == {
        ("windowed_linear", 8, mix)
    }
    if mix == "mass":  # calibrated on the text, not left at its first value
        assert all(m.groups[0].mix.logit.abs().amax() > 1e-3 for m in model.mixers)
    convert(str(teacher), recipe, tmp_path, device="cpu", progress=False)


def test_a_run_may_end_with_an_edit_and_be_measured_after_it(teacher, text, tmp_path):
    raw = with_edit(text, **{"evaluation": {"texts": [], "rows": 2, "new_tokens": 2}})
    raw["steps"] = raw["steps"][:2]
    run = hybridize.convert(str(teacher), Recipe.from_dict(raw), tmp_path, device="cpu", progress=False)
    entries = json.loads((run / "evaluations.json").read_text())
    assert [entry["name"] for entry in entries] == ["teacher", "swapped", "after transfer", "after edit"]
    losses = [next(iter(entry["perplexity"].values()))["nll"] for entry in entries]
    assert losses[2] != losses[3]
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("edit", "spec", "message"),
    [
        ({"edit": {"window": {"kind": "sliding", "size": 0}}}, LINEAR, "window.size"),
        (EDIT, {"attention": "softmax"}, "no linear attention that could gain one"),
        ({"edit": {"window": {"kind": "sliding", "size": 64}}}, LINEAR, "no query has a far key"),
        ({"edit": {"window": {"kind": "sliding", "size": 8}, "normalizer": {"kind": "shared"}}},
         {"attention": "linear", "feature_map": {"activation": "identity"}}, "signed masses"),
        ({"edit": {}}, LINEAR, "window"),
    ],
)  # fmt: skip
def test_edits_that_cannot_work_are_refused(text, edit, spec, message):
    raw = with_edit(text, edit, spec)
    if spec["attention"] == "softmax":
        raw["steps"] = raw["steps"][1:]
    with pytest.raises(RecipeError) as error:
        Recipe.from_dict(raw)
    assert message in str(error.value)


def stage_on(text, spec, **step):
    model = hybridize_model(tiny_model("llama"), HybridSpec.model_validate({"all": spec}))
    validation = [bench.batch(text, rows=4, split="validation")]
    return FinetuneStage(
        model, FinetuneStep.model_validate({"tokens": 1, **step}), validation, autocast=False
    )


def test_the_gain_is_the_loss_without_the_branch_less_the_loss_with_it(text):
    stage = stage_on(text, bench.WINDOWED, gain_rows=3)
    model, batch = stage.model, stage.validation[0].first(3)
    far = (batch.position_ids_BT[:, :-1] >= 16) & (batch.labels_BT[:, 1:] != -100)

    def loss():
        with torch.no_grad():
            out = model(batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False).logits
        return torch.nn.functional.cross_entropy(out[:, :-1][far], batch.labels_BT[:, 1:][far]).item()

    expected = -loss()
    with model.override("softmax_only"):
        expected += loss()
    assert stage.validate()["linear_gain"] == pytest.approx(expected, abs=1e-5)
    assert abs(expected) > 1e-4


def test_a_student_without_two_branches_has_no_gain(text):
    assert set(stage_on(text, {"attention": "softmax"}).validate()) == {"loss"}
    assert set(stage_on(text, LINEAR).validate()) == {"loss"}
    assert set(stage_on(text, bench.WINDOWED, gain_rows=0).validate()) == {"loss"}


def test_fine_tuning_stops_when_the_gain_fades(teacher, text, tmp_path, monkeypatch):
    gains = iter([1.0, 0.9, 0.4, 0.3, 0.2, 0.1])
    losses = iter([5.0, 4.0, 3.0, 2.0, 1.0, 0.5])
    monkeypatch.setattr(
        FinetuneStage, "validate", lambda self: {"loss": next(losses), "linear_gain": next(gains)}
    )
    stopping = {"patience": 2, "min_gain": 0.5}
    changes = {"steps.1.finetune.early_stopping": stopping, "steps.1.finetune.eval_every": 1}
    run = convert(str(teacher), bench.recipe(text, changes), tmp_path, device="cpu", progress=False)
    outcome = json.loads((run / "steps/1-finetune/outcome.json").read_text())
    assert (outcome["steps"], outcome["best_step"], outcome["restored"]) == (3, 1, "best")
    assert outcome["stopped"] == "linear_gain is 0.3, under 50% of the highest seen, 1"
    with (run / "steps/1-finetune/validation.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [0, 1, 2, 3]
    again = convert(str(teacher), bench.recipe(text, changes), tmp_path, device="cpu", progress=False)
    assert json.loads((again / "steps/1-finetune/outcome.json").read_text()) == outcome


def test_fine_tuning_stops_when_the_loss_no_longer_falls(teacher, text, tmp_path, monkeypatch):
    losses = iter([5.0, 4.0, 4.5, 4.4, 3.0])
    monkeypatch.setattr(FinetuneStage, "validate", lambda self: {"loss": next(losses)})
    changes = {
        "steps.1.finetune.early_stopping": {"patience": 2, "min_gain": 0},
        "steps.1.finetune.eval_every": 2,
    }
    run = convert(str(teacher), bench.recipe(text, changes), tmp_path, device="cpu", progress=False)
    outcome = json.loads((run / "steps/1-finetune/outcome.json").read_text())
    assert (outcome["steps"], outcome["best_step"]) == (6, 2)
    assert outcome["stopped"] == "loss did not improve in 2 validations"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_stopping": {}, "keep_best": False}, "needs keep_best: true"),
        ({"early_stopping": {}, "gain_rows": 0}, "gain_rows"),
        ({"early_stopping": {"patience": 0}}, "greater than or equal to 1"),
        ({"early_stopping": {"min_gain": 2}}, "less than or equal to 1"),
    ],
)
def test_stopping_rules_that_cannot_work_are_refused(text, changes, message):
    changed = {f"steps.1.finetune.{name}": value for name, value in changes.items()}
    with pytest.raises(RecipeError) as error:
        bench.recipe(text, changed)
    assert message in str(error.value)


def test_a_gain_to_watch_needs_two_branches(text):
    with pytest.raises(RecipeError, match="no linear gain to watch"):
        bench.recipe(text, {"spec.all": LINEAR, "steps.1.finetune.early_stopping": {}})


def test_the_control_has_no_window_to_drop_and_no_gain_to_watch(text):
    dropout = {"p": [0.5]}
    recipe = bench.recipe(
        text, {"steps.1.finetune.window_dropout": dropout, "steps.1.finetune.early_stopping": {}}
    )
    (step,) = recipe.control().steps
    assert step.window_dropout is None and step.early_stopping is None
    assert step.tokens == recipe.steps[1].tokens
