"""Output norms start from the size of the attention that they replace."""

import math

import pytest
import torch
from tests.models.tiny import tiny_model

from hybridize.convert.calibrate_output import calibrate_output, layers_with_norms
from hybridize.data.batching import Batch
from hybridize.models.surgery import hybridize_model, softmax_teacher
from hybridize.spec import HybridSpec


def batch(rows: int = 2, length: int = 24) -> Batch:
    ids = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(0))
    return Batch(ids, ids.clone(), torch.arange(length).expand(rows, -1).clone())


def spec(**changes) -> HybridSpec:
    group = {"attention": "lightning", "output_norm": True, "output_gate": True, "heads": "expand", **changes}
    return HybridSpec.model_validate({"all": group})


@pytest.mark.parametrize("gate", [True, False, "open"])
def test_every_channel_starts_with_the_teachers_mean_square(gate):
    teacher = softmax_teacher(tiny_model("llama"))
    model = hybridize_model(tiny_model("llama"), spec(output_gate=gate or None))
    seen = {}
    hooks = [
        mixer.o_proj.register_forward_pre_hook(
            lambda module, args, layer=layer: seen.setdefault(layer, args[0].detach())
        )
        for layer, mixer in enumerate(teacher.mixers)
    ]
    ours = batch()
    with torch.no_grad():
        teacher.hidden_states(ours.input_ids_BT, position_ids=ours.position_ids_BT)
    for hook in hooks:
        hook.remove()
    calibrate_output(model, teacher, ours)
    for layer, mixer in enumerate(model.mixers):
        (group,) = mixer.mixers
        wanted = seen[layer].flatten(0, 1).square().mean(0).sqrt() / (0.5 if gate is True else 1)
        torch.testing.assert_close(group.output_norm.weight.detach(), wanted, rtol=1e-4, atol=1e-6)


def test_it_brings_the_outputs_to_the_teachers_size():
    """What a whole-mixer transfer starts from: without it the outputs are many times too large."""
    teacher = softmax_teacher(tiny_model("llama"))
    model = hybridize_model(tiny_model("llama"), spec())
    ours = batch()

    def sizes(which) -> list[float]:
        found = []
        hooks = [
            mixer.register_forward_hook(lambda m, a, out: found.append(out[0].square().mean().item()))
            for mixer in which.mixers
        ]
        with torch.no_grad():
            which.hidden_states(ours.input_ids_BT, position_ids=ours.position_ids_BT)
        for hook in hooks:
            hook.remove()
        return found

    before, wanted = sizes(model), sizes(teacher)
    calibrate_output(model, teacher, ours)
    after = sizes(model)
    off = abs(math.log(before[0] / wanted[0])), abs(math.log(after[0] / wanted[0]))
    assert off[1] < 0.5 * off[0]
    assert off[1] < math.log(5)


def test_layers_without_a_norm_are_left_alone():
    model = hybridize_model(tiny_model("llama"), HybridSpec.model_validate({"all": {"attention": "softmax"}}))
    assert layers_with_norms(model) == []
