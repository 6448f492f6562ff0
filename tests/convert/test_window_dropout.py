"""SSD: what is dropped and what is not, schedules by epoch, and the window that the student keeps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.convert import bench
from tests.models.tiny import tiny_model

import hybridize
from hybridize.convert.finetune import FinetuneStage
from hybridize.convert.pipeline import convert
from hybridize.convert.window_dropout import Dropper
from hybridize.data.batching import Batch
from hybridize.models.surgery import hybridize_model
from hybridize.recipe import FinetuneStep, Recipe, RecipeError, WindowDropout
from hybridize.spec import HybridSpec

SEPARATE = {
    "attention": "windowed_linear",
    "window": {"kind": "sliding", "size": 8},
    "normalizer": {"kind": "separate", "gate": 0.5},
}
SHARED = bench.WINDOWED
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def student(spec=SEPARATE):
    return hybridize_model(tiny_model("llama"), HybridSpec.model_validate({"all": spec}))


@pytest.fixture(scope="module")
def batch(text) -> Batch:
    return bench.batch(text, rows=4)


@torch.no_grad()
def logits(model, batch: Batch):
    return model(batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False).logits


@pytest.mark.parametrize("far", ["own", "all"])
@pytest.mark.parametrize("removal", ["zero", "renormalize"])
@pytest.mark.parametrize("spec", [SEPARATE, SHARED], ids=["separate", "shared"])
def test_always_dropped_is_the_ablation_but_for_queries_without_far_keys(spec, removal, far, batch):
    model = student(spec)
    dropper = Dropper(model, WindowDropout(p=(1.0,), far_when_dropped=far, removal=removal))
    with dropper.training(batch):
        dropped = logits(model, batch)
    mode = "far_only" if far == "own" else "linear_only"
    with model.override(mode, removal):
        ablated = logits(model, batch)
    if far == "all":
        torch.testing.assert_close(dropped, ablated, **TOLERANCE)
        return
    early = batch.position_ids_BT < model.first_far_position
    torch.testing.assert_close(dropped[early], logits(model, batch)[early], **TOLERANCE)
    assert (ablated[early] - dropped[early]).abs().amax() > 1e-3
    # the first layer sees the same input: its far-eligible outputs are the ablation's
    mixer, x = model.mixers[0], torch.randn(4, bench.LENGTH, model.config.hidden_size)
    cos_sin = model.model.rotary_emb(x, batch.position_ids_BT)
    with dropper.training(batch):
        ours = mixer(x, cos_sin)[0]
    with model.override(mode, removal):
        theirs = mixer(x, cos_sin)[0]
    first = model.first_far_position
    torch.testing.assert_close(ours[:, first:], theirs[:, first:], **TOLERANCE)


def test_nothing_is_dropped_at_zero_and_evaluation_never_drops(batch):
    model = student()
    whole = logits(model, batch)
    with Dropper(model, WindowDropout(p=(0.0,))).training(batch):
        assert torch.equal(logits(model, batch), whole)
    dropper = Dropper(model, WindowDropout(p=(1.0,)))
    with dropper.evaluation():
        assert torch.equal(logits(model, batch), whole)


def test_granularity(batch):
    model = student()
    positions = batch.position_ids_BT
    sequences = (positions == 0).flatten().cumsum(0).view_as(positions)
    torch.manual_seed(0)
    per_batch = [Dropper(model, WindowDropout(p=(0.5,), per="batch")).draw(positions) for _ in range(20)]
    assert {draw.shape for draw in per_batch} == {(1, 1, 1)} and len({bool(draw) for draw in per_batch}) == 2
    drawn = Dropper(model, WindowDropout(p=(0.5,), per="sequence")).draw(positions)
    for n in sequences.unique():
        assert len(drawn[..., 0][sequences == n].unique()) == 1
    assert 0 < drawn.float().mean() < 1
    layers = Dropper(model, WindowDropout(p=(0.5,), per="layer")).draw(positions)
    assert len(layers) == len(model.mixers) and not torch.equal(layers[0], layers[1])
    for draw in layers:
        assert all(len(draw[..., 0][sequences == n].unique()) == 1 for n in sequences.unique())
    often = torch.stack([Dropper(model, WindowDropout(p=(0.9,))).draw(positions) for _ in range(200)]).float()
    per_document = often[:, positions == 0].mean()
    assert abs(per_document - 0.9) < 0.05


def test_schedules_hold_their_last_value():
    schedule = WindowDropout(p=(0.9, 0.75, 0.5), window=(4, 8))
    assert [schedule.at(k) for k in range(5)] == [(0.9, 4), (0.75, 8), (0.5, 8), (0.5, 8), (0.5, 8)]
    assert WindowDropout(p=(0.5,)).at(3) == (0.5, None)


def test_gradients_pass_through_both_branches_and_checkpointing_draws_once(batch):
    step = {"tokens": 1, "lora": {}, "window_dropout": {"p": [0.5]}}
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = student()
        stage = FinetuneStage(
            model,
            FinetuneStep.model_validate({**step, "activation_checkpointing": checkpointing}),
            [],
            autocast=False,
        )
        torch.manual_seed(1)
        for name, p in stage.parameters().items():
            torch.nn.init.normal_(p, std=0.1) if "lora_B" in name else None
        stage.step(batch, 1 / stage.count(batch))
        gradients.append([p.grad for p in stage.parameters().values()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


SCHEDULED = {
    "spec.all": SEPARATE,
    "steps.1.finetune": {
        "tokens": 12 * 4 * bench.LENGTH,
        "batch": {"rows": 4},
        "eval_every": 4,
        "validation_rows": 4,
        "lr": 0.01,
        "keep_best": False,
        "window_dropout": {"p": [0.9, 0.5], "window": [2, 4, 16], "epoch": 4 * 4 * bench.LENGTH},
    },
}


def test_the_student_keeps_the_last_window_and_resumes_with_it(teacher, text, tmp_path):
    recipe = bench.recipe(text, SCHEDULED)
    run = convert(str(teacher), recipe, tmp_path / "run", device="cpu", progress=False)
    model, _ = hybridize.load(run, device="cpu")
    assert {group.window.size for group in model.spec.groups} == {16}
    rows = (run / "steps/1-finetune/validation.csv").read_text().splitlines()
    assert rows[0].split(",")[-2:] == ["linear_gain", "linear_gain_renormalized"] and len(rows) == 4
    before = load_file(run / "model/model.safetensors")
    (run / "student.json").unlink()  # the steps' outcomes are applied again
    convert(str(teacher), recipe, run, device="cpu", progress=False)
    again, _ = hybridize.load(run, device="cpu")
    assert {group.window.size for group in again.spec.groups} == {16}
    after = load_file(run / "model/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (
        json.loads((run / "steps/1-finetune/config.json").read_text())["hybrid_spec"]["layers"][0]["groups"][
            0
        ]["window"]["size"]
        == 16
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps.1.finetune.keep_best": True}, "keep_best: false"),
        ({"steps.1.finetune.window_dropout.window": [64]}, "the sliding window of 64 needs at least 65"),
        ({"steps.1.finetune.window_dropout.p": [1.5]}, "less than or equal to 1"),
        ({"steps.1.finetune.window_dropout.p": []}, "at least 1 item"),
        ({"spec.all": {"attention": "linear"}}, "no windowed_linear attention to drop windows of"),
    ],
)
def test_schedules_that_cannot_work_are_refused(text, changes, message):
    with pytest.raises(RecipeError) as error:
        Recipe.from_dict(bench.plain(text, SCHEDULED | changes))
    assert message in str(error.value)
