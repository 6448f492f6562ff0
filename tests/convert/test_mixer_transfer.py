"""Transfer of whole mixers: what it minimises, what it leaves alone, and that a candidate sees what the teacher's layer saw."""

import pytest
import torch
from tests.convert import halo

from hybridize.convert.mixer_transfer import MixerTransferStage, watched
from hybridize.data.batching import Batch
from hybridize.recipe import TransferStep

GROUPS = {
    "lightning": halo.LIGHTNING,
    "gdn": {"attention": "gdn", "position": "rope", "output_norm": True},
    "windowed_linear": {
        "attention": "windowed_linear",
        "window": {"kind": "sliding", "size": 8},
        "output_gate": True,
    },
    "gated softmax": {"attention": "softmax", "output_gate": "half"},
    "head groups": {
        "groups": [
            {"heads": "1/2", "attention": "softmax", "position": "none"},
            {"heads": "1/2", "attention": "lightning", "position": "rope"},
        ]
    },
}


def stage_of(model, teacher=None, validation=(), autocast=False, **step) -> MixerTransferStage:
    raw = {"tokens": 1, "train": "mixer"} | step
    return MixerTransferStage(
        model, teacher or halo.teacher(), TransferStep.model_validate(raw), validation, autocast=autocast
    )


@pytest.fixture(scope="module")
def batch(text) -> Batch:
    return halo.batch(text)


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "objective", [{"mixer_mse": 1}, {"hidden_l2": 1}, {"mixer_mse": 10, "hidden_l2": 0.1}], ids=str
)
@pytest.mark.parametrize("group", GROUPS)
def test_the_loss_falls_and_nothing_else_moves(group, objective, batch):
    model, teacher = halo.student({"all": GROUPS[group]}), halo.teacher()
    stage = stage_of(model, teacher, [batch], objective=objective)
    ours, theirs = snapshot(model), snapshot(teacher)
    first = stage.validate()
    optimizer = torch.optim.AdamW(stage.parameters().values(), lr=3e-3, weight_decay=0.0)
    for _ in range(4):
        stage.step(batch, 1 / stage.count(batch))
        optimizer.step()
        optimizer.zero_grad()
    last = stage.validate()
    assert last["loss"] < first["loss"] and last["nmse"] < first["nmse"]
    assert all(torch.equal(value, theirs[name]) for name, value in teacher.named_parameters())
    for name, value in model.named_parameters():
        moved = not torch.equal(value, ours[name])
        assert moved == (name in stage.parameters()) == (".self_attn." in name), name


def test_the_loss_is_the_mean_over_layers_of_the_mse_after_o_proj(batch):
    model, teacher = halo.student(), halo.teacher()
    stage = stage_of(model, teacher)
    expected, inputs = [], {}
    with (
        torch.no_grad(),
        watched(teacher, range(4), lambda layer, seen, y: inputs.update({layer: (seen, y)})),
    ):
        teacher.hidden_states(batch.input_ids_BT, position_ids=batch.position_ids_BT)
    for layer, (seen, y) in inputs.items():
        with torch.no_grad():
            expected.append((model.mixers[layer](**seen)[0] - y).square().mean())
    result = stage.step(batch, 1 / stage.count(batch))
    torch.testing.assert_close(result.loss / result.tokens, torch.stack(expected).mean())
    distances = stage_of(model, teacher, objective={"hidden_l2": 1}).step(batch, 1.0)
    by_hand = [(model.mixers[i](**seen)[0] - y).norm(dim=-1).mean() for i, (seen, y) in inputs.items()]
    torch.testing.assert_close(distances.loss / distances.tokens, torch.stack(by_hand).mean().detach())


def test_a_layers_gradient_does_not_depend_on_the_layers_below(batch):
    """Teacher-forced: with another candidate below, the same gradient."""
    one, other = halo.student(), halo.student()
    with torch.no_grad():
        for p in other.mixers[0].parameters():
            p.mul_(1.5)
    for model in (one, other):
        stage_of(model).step(batch, 1.0)
    for a, b in zip(one.mixers[2].parameters(), other.mixers[2].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_teachers_own_attention_has_no_error(batch):
    """A gate that starts open and expanded heads change nothing at first."""
    spec = {"all": {"attention": "softmax", "output_gate": True, "heads": "expand"}}
    stage = stage_of(halo.student(spec), validation=[batch])
    assert max(stage.layer_errors()) < 1e-9


def test_kept_layers_are_no_candidates(batch):
    model = halo.student({"all": halo.LIGHTNING, "layers": {"1": {"attention": "softmax"}}})
    stage = stage_of(model, validation=[batch])
    assert stage.layers == [0, 2, 3]
    assert not any(".layers.1." in name for name in stage.parameters())
    assert stage.layer_errors()[1] == 0 and min(stage.layer_errors()[i] for i in stage.layers) > 0


def test_bf16_trains_float32_masters(batch):
    model, teacher = halo.student().bfloat16(), halo.teacher().bfloat16()
    stage = stage_of(model, teacher, autocast=True)
    assert {p.dtype for p in stage.parameters().values()} == {torch.float32}
    stage.step(batch, 1 / stage.count(batch))
    grads = [p.grad for p in stage.parameters().values()]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert {p.dtype for p in teacher.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "phi3", "olmo2"])
def test_other_families(model_type, batch):
    spec = {"all": {"attention": "lightning", "position": "rope", "output_gate": True, "heads": "expand"}}
    model, teacher = halo.student(spec, model_type), halo.teacher(model_type)
    stage = stage_of(model, teacher, [batch])
    first = stage.validate()["loss"]
    optimizer = torch.optim.AdamW(stage.parameters().values(), lr=3e-3)
    stage.step(batch, 1 / stage.count(batch))
    optimizer.step()
    assert stage.validate()["loss"] < first
