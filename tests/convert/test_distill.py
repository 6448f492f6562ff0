"""Distillation: its divergence and gradient against the materialised ones, what trains, and long contexts by either loss."""

import pytest
import torch
from tests.convert import halo
from torch.nn.functional import kl_div

from hybridize.convert.distill import DistillStage
from hybridize.convert.finetune import FinetuneStage, merge
from hybridize.data.batching import Batch
from hybridize.models.surgery import replace_layers, resolve_spec
from hybridize.recipe import DistillStep, LongContextStep
from hybridize.spec import HybridSpec


def stage_of(model, teacher=None, validation=(), autocast=False, **step) -> DistillStage:
    raw = {"tokens": 1} | step
    return DistillStage(
        model, teacher or halo.teacher(), DistillStep.model_validate(raw), validation, autocast=autocast
    )


@pytest.fixture(scope="module")
def batch(text) -> Batch:
    return halo.batch(text)


def halo_student():
    """Two of four layers kept, as after a selection."""
    model = halo.student()
    spec = HybridSpec.model_validate({"all": halo.LIGHTNING, "kept": halo.KEPT}).with_kept([1, 3])
    replace_layers(model, halo.teacher(), resolve_spec(spec, model.config.base_config()))
    return model


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(batch):
    stage = stage_of(halo.teacher(), validation=[batch])
    result = stage.step(batch, 1 / stage.count(batch))
    assert abs(float(result.loss)) < 1e-3
    assert all(p.grad.abs().max() < 1e-6 for p in stage.parameters().values())
    assert abs(stage.validate()["loss"]) < 1e-6


def test_loss_and_gradient_are_those_of_the_materialised_divergence(batch):
    model, teacher, naive = halo_student(), halo.teacher(), halo_student()
    stage = stage_of(model, teacher)
    result = stage.step(batch, 1 / stage.count(batch))
    naive.float().requires_grad_(True).train()
    counted = batch.labels_BT[:, 1:] != -100
    logits = naive.logits(naive.hidden_states(batch.input_ids_BT, position_ids=batch.position_ids_BT)[0])
    with torch.no_grad():
        known = teacher.hidden_states(batch.input_ids_BT, position_ids=batch.position_ids_BT)[0]
        log_p = teacher.logits(known).log_softmax(-1)
    kl = kl_div(logits.log_softmax(-1), log_p, log_target=True, reduction="none").sum(-1)[:, :-1][counted]
    kl.mean().backward()
    assert result.tokens == int(counted.sum())
    torch.testing.assert_close(result.loss, kl.sum().detach(), rtol=1e-4, atol=1e-5)
    theirs = dict(naive.named_parameters())
    for name, parameter in stage.parameters().items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("step", "trains"),
    [
        ({}, lambda name: True),
        ({"train": "mixers"}, lambda name: ".self_attn." in name),
        ({"lora": {"rank": 2}}, lambda name: "lora_" in name or ".groups." in name),
        ({"lora": {"rank": 2, "on": ["q"]}}, lambda name: "q_proj.lora_" in name or ".groups." in name),
    ],
    ids=["all", "mixers", "lora", "lora on q"],
)
def test_what_trains(step, trains, batch):
    model, teacher = halo_student(), halo.teacher()
    stage = stage_of(model, teacher, [batch], **step)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    known = {name: p.detach().clone() for name, p in teacher.named_parameters()}
    first = stage.validate()
    optimizer = torch.optim.AdamW(stage.parameters().values(), lr=3e-3, weight_decay=0.0)
    for _ in range(3):
        stage.step(batch, 1 / stage.count(batch))
        optimizer.step()
        optimizer.zero_grad()
    assert stage.validate()["loss"] < first["loss"] and first["next_token_loss"] > 0
    assert all(torch.equal(p, known[name]) for name, p in teacher.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != trains(name), name
    stage.finish()
    assert not any(p.requires_grad for p in model.parameters())
    if stage.adapted is not None:
        with torch.no_grad():
            unmerged = model(batch.input_ids_BT).logits
            torch.testing.assert_close(
                merge(stage.adapted)(batch.input_ids_BT).logits, unmerged, atol=1e-4, rtol=1e-4
            )


def test_bf16(batch):
    model, teacher = halo_student().bfloat16(), halo.teacher().bfloat16()
    stage = stage_of(model, teacher, [batch], autocast=True)
    stage.step(batch, 1 / stage.count(batch))
    assert all(p.dtype == torch.float32 and p.grad.isfinite().all() for p in stage.parameters().values())
    with_lora = stage_of(halo_student().bfloat16(), teacher, [batch], autocast=True, lora={})
    with_lora.step(batch, 1 / with_lora.count(batch))
    own = {n: p for n, p in with_lora.parameters().items() if ".groups." in n}
    assert own and {p.dtype for p in own.values()} == {torch.float32}
    with_lora.finish()
    assert {p.dtype for p in own.values()} == {torch.bfloat16}


def test_activation_checkpointing_changes_no_gradient(batch):
    plain, saving = stage_of(halo_student()), stage_of(halo_student(), activation_checkpointing=True)
    for stage in (plain, saving):
        stage.step(batch, 1 / stage.count(batch))
    for name, parameter in plain.parameters().items():
        torch.testing.assert_close(parameter.grad, saving.parameters()[name].grad, atol=1e-6, rtol=1e-4)


def test_long_context_trains_every_weight_by_either_loss(batch):
    step = LongContextStep.model_validate({"tokens": 1, "length": 128})
    model = halo_student()
    by_ce = FinetuneStage(model, step.as_finetune(), [batch], autocast=False)
    assert set(by_ce.parameters()) == {name for name, _ in model.named_parameters()}
    model = halo_student()
    by_kl = DistillStage(
        model, halo.teacher(), step.model_copy(update={"objective": "kl"}), [batch], autocast=False
    )
    assert set(by_kl.parameters()) == {name for name, _ in model.named_parameters()}
