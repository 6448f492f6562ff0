"""Plans of recipes with recurrent layers and a selection: what they count is what the stages hold."""

import pytest
import torch
from tests.convert import halo
from tests.models.tiny import tiny_model

from hybridize.convert.distill import DistillStage
from hybridize.convert.finetune import FinetuneStage
from hybridize.convert.mixer_transfer import MixerTransferStage
from hybridize.models.surgery import hybridize_model, resolve_spec
from hybridize.plan.bytes import state_bytes
from hybridize.plan.plan import plan_config
from hybridize.recipe import Recipe
from hybridize.spec import RECURRENT, HybridSpec

STEPS = [
    {"transfer": {"tokens": "1K", "train": "mixer"}},
    {"select": {"keep": "1/2"}},
    {"distill": {"tokens": "1K"}},
    {"distill": {"tokens": "1K", "train": "mixers"}},
    {"distill": {"tokens": "1K", "lora": {"rank": 4}}},
    {"long_context": {"tokens": "1K", "length": 256}},
]


def recipe(steps=STEPS):
    return Recipe.from_dict(
        {"spec": {"all": halo.LIGHTNING, "kept": halo.KEPT}, "steps": steps, "data": {"length": 64}}
    )


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def test_every_stage_trains_as_many_parameters_as_planned():
    model = tiny_model("llama")
    result = plan_config(model.config, recipe())
    transfer, distill, mixers, lora, long = result.stages
    student, teacher = halo.student(), halo.teacher()
    steps = [step for step in recipe().training_steps]
    assert result.own_parameters == _after_selection_total() - result.parameters
    assert transfer.trainable == count(
        MixerTransferStage(student, teacher, steps[0], [], autocast=False).parameters().values()
    )
    for planned, step in zip((distill, mixers, lora), steps[1:4], strict=True):
        stage = DistillStage(_selected(), teacher, step, [], autocast=False)
        assert planned.trainable == count(stage.parameters().values()), step
    stage = FinetuneStage(_selected(), steps[4].as_finetune(), [], autocast=False)
    assert long.trainable == count(stage.parameters().values())
    assert [stage.optimizer_steps for stage in result.stages] == [2, 2, 2, 2, 1]
    assert result.notes[-1].startswith("2 of 4 layers keep softmax; select finds out which")


def _selected():
    spec = HybridSpec.model_validate({"all": halo.LIGHTNING, "kept": halo.KEPT}).with_kept([1, 3])
    return hybridize_model(tiny_model("llama"), spec)


def _after_selection_total():
    return count(_selected().parameters())


def test_a_teacher_beside_the_student_and_its_masters_are_counted():
    result = plan_config(tiny_model("llama").config, recipe())
    transfer, distill, *_, long = result.stages
    total = result.parameters + result.own_parameters
    assert distill.memory.weights == 4 * total + 2 * result.parameters
    assert long.memory.weights == 4 * total and transfer.memory.weights > 4 * transfer.trainable
    assert result.student_disk == 4 * total


@pytest.mark.parametrize("attention", RECURRENT)
def test_a_recurrent_layer_keeps_one_matrix_a_head(attention):
    model = tiny_model("llama")
    spec = HybridSpec.model_validate({"all": {"attention": attention, "position": "rope"}})
    resolved = resolve_spec(spec, model.config)
    student = hybridize_model(model, spec)
    cache = student.new_cache()

    with torch.no_grad():
        student(torch.arange(3, 40)[None], cache=cache)
    held = sum(state.nbytes for layer in cache.states for state in layer)
    planned = state_bytes(resolved, student.shapes, 37)
    assert planned == state_bytes(resolved, student.shapes, 5000) and 0 <= held - planned <= 64 * len(
        cache.states
    )


@pytest.mark.parametrize("more", [{}, {"heads": "expand"}], ids=str)
def test_a_short_convolution_adds_weights_and_its_last_inputs(more):
    base = tiny_model("llama")
    plain, conv = (
        HybridSpec.model_validate({"all": {"attention": "lightning", "short_conv": width, **more}})
        for width in (None, 4)
    )
    without, student = (hybridize_model(tiny_model("llama"), spec) for spec in (plain, conv))
    first = student.shapes[0]
    kv_heads = first.heads if more else first.kv_heads
    channels = len(student.shapes) * (first.heads + 2 * kv_heads) * first.head_dim
    own = count(student.parameters()) - count(without.parameters())
    assert own == 4 * channels
    planned = [
        plan_config(base.config, Recipe.from_dict({"spec": spec.model_dump(), "steps": []})).own_parameters
        for spec in (plain, conv)
    ]
    assert planned[1] - planned[0] == own
    cache = student.new_cache()
    with torch.no_grad():
        student(torch.arange(3, 40)[None], cache=cache)
    held = sum(state.nbytes for layer in cache.states for state in layer)
    wanted = state_bytes(resolve_spec(conv, base.config), student.shapes, 37, dtype_bytes=4)
    assert wanted - state_bytes(resolve_spec(plain, base.config), student.shapes, 37) == 3 * channels * 4
    assert 0 <= held - wanted <= 64 * len(cache.states)


def test_kept_softmax_with_expanded_heads_keeps_a_pair_a_query_head():
    model = tiny_model("llama")
    plain, wide = (
        resolve_spec(HybridSpec.model_validate({"all": {"attention": "softmax", **more}}), model.config)
        for more in ({}, {"heads": "expand"})
    )
    shapes = halo.teacher().shapes
    assert state_bytes(wide, shapes, 100) == 2 * state_bytes(plain, shapes, 100)
