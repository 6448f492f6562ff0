"""Compiled steps give the loss and the gradients of uncompiled ones, and leave nothing compiled behind.

Graphs run without code generation here (`aot_eager`): what is tested is that tracing a layer changes nothing. `-m slow` runs the real
backend, which needs a C++ compiler.
"""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.convert import halo

import hybridize
from hybridize.convert import compiled
from hybridize.convert.distill import DistillStage
from hybridize.convert.finetune import FinetuneStage
from hybridize.convert.mixer_transfer import MixerTransferStage
from hybridize.data.batching import Batch
from hybridize.models.surgery import replace_layers, resolve_spec
from hybridize.recipe import DistillStep, FinetuneStep, TransferStep
from hybridize.spec import HybridSpec


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def joined(text) -> Batch:
    batch = halo.batch(text)
    rows, length = batch.input_ids_BT.shape
    return dataclasses.replace(batch, position_ids_BT=torch.arange(length).expand(rows, length).contiguous())


def student(attention: dict = halo.LIGHTNING):
    model = halo.student({"all": attention})
    spec = HybridSpec.model_validate({"all": attention, "kept": halo.KEPT}).with_kept([1, 3])
    replace_layers(model, halo.teacher(), resolve_spec(spec, model.config.base_config()))
    return model


def distill(model, **step):
    return DistillStage(
        model, halo.teacher(), DistillStep.model_validate({"tokens": 1, **step}), [], autocast=False
    )


def transfer(model):
    step = TransferStep.model_validate({"tokens": 1, "train": "mixer"})
    return MixerTransferStage(model, halo.teacher(), step, [], autocast=False)


def finetune(model, **step):
    step = FinetuneStep.model_validate({"tokens": 1, "lr": 1e-3, "lora": {"rank": 2}, **step})
    return FinetuneStage(model, step, [], autocast=False)


GDN = {"attention": "gdn", "qk_norm": True, "output_norm": True, "heads": "expand"}
LINEAR = {
    "attention": "windowed_linear",
    "feature_map": {"kind": "hedgehog"},
    "window": {"kind": "sliding", "size": 8},
}
STAGES: dict[str, Callable] = {
    "distill": lambda: distill(student()),
    "distill gdn": lambda: distill(student(GDN)),
    "checkpointing": lambda: distill(student(), activation_checkpointing=True),
    "lora": lambda: distill(student(), lora={"rank": 2}),
    "transfer": lambda: transfer(student()),
    "finetune windows": lambda: finetune(halo.student({"all": LINEAR})),
    "finetune checkpointing": lambda: finetune(halo.student({"all": LINEAR}), activation_checkpointing=True),
    "short convolutions": lambda: distill(student({**GDN, "short_conv": 4})),
}


def outcome(stage, batches) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The losses of the steps, and the sums of their gradients."""
    losses = [torch.as_tensor(stage.step(batch, 1 / 64).loss) for batch in batches]
    return losses, {name: p.grad for name, p in stage.parameters().items() if p.grad is not None}


def check(make, batches, regular: bool) -> None:
    torch.manual_seed(0)  # adapters draw their first values
    losses, gradients = outcome(make(), batches)
    torch.manual_seed(0)
    stage = make()
    stage.compile(regular=regular)
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    found, ours = outcome(stage, batches)
    assert frames["ok"] > 0, "nothing was compiled"
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    mixers = stage.model.mixers
    assert all(module._compiled_call_impl is None for module in stage.model.modules())
    assert not any({"attend", "convolve"} & set(vars(mixer)) for mixer in mixers)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("regular", [True, False])
def test_a_compiled_step_is_the_step(name, regular, text):
    batch = joined(text) if regular else halo.batch(text)
    check(STAGES[name], [batch, batch], regular)


@pytest.mark.parametrize("attention", [halo.LIGHTNING, {**GDN, "short_conv": 4}])
def test_rows_of_any_packing_share_their_graphs(attention, text):
    """What is compiled does not see the documents of a row: a new packing forces nothing anew."""
    stage = distill(student(attention))
    stage.compile(regular=False)
    first = halo.batch(text)
    stage.step(first, 1.0)
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    other = copy.deepcopy(first)
    other.position_ids_BT[:] = torch.arange(other.position_ids_BT.shape[1]) % 24
    assert not torch.equal(other.position_ids_BT, first.position_ids_BT)
    stage.step(other, 1.0)
    assert counted["unique_graphs"] == before > 0


def test_layers_are_compiled_under_activation_checkpointing_too(text):
    counted = torch._dynamo.utils.counters["stats"]
    stage = distill(student(), activation_checkpointing=True)
    stage.compiled = compiled.Compiled(compiled.layers_of(stage.model), regular=True)  # and not the teacher's
    counted.clear()
    stage.step(joined(text), 1.0)
    assert counted["unique_graphs"] > 1, "nothing but the loss is compiled"


def test_a_selection_by_kl_compiles_its_distillation(teacher, text, tmp_path):
    distillation = {"tokens": 2 * halo.STEP, "lr": 1e-3, **halo.FEW, "compile": True}
    steps = [halo.STEPS[0], {"select": {"rule": "kl", "keep": "1/2", "distill": distillation}}, halo.STEPS[2]]
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    hybridize.convert(
        str(teacher),
        halo.recipe(text, steps),
        tmp_path / "run",
        device="cpu",
        stop_after="select",
        progress=False,
    )
    assert counted["unique_graphs"] > 0


def test_a_compiler_that_fails_is_told_in_a_line(text, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no header\nand pages about it")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    stage = distill(student())
    stage.compile(regular=True)
    with pytest.raises(RuntimeError, match=r"^compile: true: .*no header\); .* set compile: false"):
        stage.step(joined(text), 1.0)
    assert all(module._compiled_call_impl is None for module in stage.model.modules())


@pytest.mark.slow
def test_the_real_backend(text, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    check(STAGES["distill"], [joined(text)] * 2, True)


def test_a_missing_compiler_is_named_before_anything_runs(teacher, text, tmp_path, monkeypatch):
    steps = copy.deepcopy(halo.STEPS)
    steps[2]["distill"]["compile"] = True
    recipe = halo.recipe(text, steps)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    compiled.check_compiler(
        recipe, torch.device("cpu"), range(len(recipe.steps))
    )  # another backend needs none
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    with pytest.raises(ValueError, match=r"steps\[2\].distill.compile: torch.compile needs a C\+\+ compiler"):
        hybridize.convert(str(teacher), recipe, tmp_path / "run", device="cpu", progress=False)
    hybridize.convert(
        str(teacher), recipe, tmp_path / "run", device="cpu", stop_after="select", progress=False
    )  # what is compiled comes later
    compiled.check_compiler(halo.recipe(text), torch.device("cpu"), range(4))


def test_the_compiler_is_the_one_that_torch_looks_for(text, tmp_path, monkeypatch):
    distillation = {"tokens": halo.STEP, "lr": 1e-3, **halo.FEW, "compile": True}
    steps = [halo.STEPS[0], {"select": {"rule": "kl", "keep": "1/2", "distill": distillation}}, halo.STEPS[2]]
    recipe = halo.recipe(text, steps)
    other = tmp_path / "clang++"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(ValueError, match=r"steps\[1\].select.distill.compile: .*compiler, and g\+\+ is not"):
        compiled.check_compiler(recipe, torch.device("cpu"), range(len(recipe.steps)))
    monkeypatch.setenv("CXX", "clang++")
    compiled.check_compiler(recipe, torch.device("cpu"), range(len(recipe.steps)))


def test_maps_inside_the_attention_are_not_compiled():
    with pytest.raises(ValueError, match="compile: true goes with train: mixer"):
        TransferStep.model_validate({"tokens": 1, "compile": True})
