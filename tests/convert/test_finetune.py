"""Fine-tuning: what trains, merging, prompt masking, accumulation, checkpointing, bf16."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.convert import bench
from tests.models.tiny import tiny_model
from torch.nn.functional import cross_entropy

import hybridize
from hybridize.convert.finetune import FinetuneStage, merge
from hybridize.data.batching import Batch
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.recipe import FinetuneStep
from hybridize.spec import HybridSpec


def student(model_type: str = "llama", **overrides) -> HybridForCausalLM:
    spec = HybridSpec.model_validate({"all": bench.WINDOWED})
    return hybridize_model(tiny_model(model_type, **overrides), spec)


def stage_of(model: HybridForCausalLM, **step) -> FinetuneStage:
    return FinetuneStage(model, FinetuneStep.model_validate({"tokens": 1} | step), [], autocast=False)


def train(stage: FinetuneStage, batch: Batch, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(stage.parameters().values(), lr=1e-2)
    for _ in range(steps):
        stage.step(batch, 1 / stage.count(batch))
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def batch(text: Path) -> Batch:
    return bench.batch(text, rows=4)


@pytest.mark.parametrize(
    ("model_type", "on", "modules"),
    [
        ("llama", ["q", "v"], {"q_proj", "v_proj"}),
        ("llama", ["o"], {"o_proj"}),
        ("phi3", ["q"], {"qkv_proj"}),
        ("phi3", ["q", "k", "v", "o"], {"qkv_proj", "o_proj"}),
        ("qwen2", ["k"], {"k_proj"}),
    ],
)
@pytest.mark.parametrize("train_maps", [False, True])
def test_lora_touches_the_named_projections_alone(model_type, on, modules, train_maps, batch):
    model = student(model_type)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stage = stage_of(model, lora={"on": on}, train_maps=train_maps)
    adapted = {name.split(".self_attn.")[1].split(".")[0] for name in stage.parameters() if "lora_" in name}
    assert adapted == modules
    train(stage, batch)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            moved = not torch.equal(parameter, before[name.replace(".base_layer", "")])
            assert moved == (train_maps and ".groups." in name), name


def test_merged_equals_unmerged(batch):
    stage = stage_of(student(), lora={"rank": 4, "alpha": 32})
    train(stage, batch)
    stage.finish()
    with torch.no_grad():
        unmerged = stage.model(batch.input_ids_BT).logits
        merged = merge(stage.adapted)(batch.input_ids_BT).logits
        plain = student()(batch.input_ids_BT).logits
    torch.testing.assert_close(merged, unmerged, atol=1e-4, rtol=1e-4)
    assert (unmerged - plain).abs().max() > 0.1


def test_full_trains_every_weight_but_frozen_maps(batch):
    model = student()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(stage_of(model, full=True), batch)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (".groups." in name), name


def test_prompt_tokens_teach_nothing(questions):
    """The stage's gradient is the one of the responses' tokens by a naive loss, and prompts do have their tokens there."""
    batch = bench.batch(questions, rows=2)
    masked = batch.labels_BT == -100
    assert 0.3 < masked.float().mean() < 0.9
    ours, naive = student(), student()
    stage = stage_of(ours, full=True)
    stage.step(batch, 1 / stage.count(batch))
    naive.requires_grad_(True)
    naive.train()
    hidden, _ = naive.hidden_states(batch.input_ids_BT, position_ids=batch.position_ids_BT)
    counted = ~masked[:, 1:]
    loss = cross_entropy(naive.logits(hidden)[:, :-1][counted], batch.input_ids_BT[:, 1:][counted])
    loss.backward()
    theirs = dict(naive.named_parameters())
    for name, parameter in stage.parameters().items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-5, rtol=1e-4)


def test_micro_batches_add_up_to_one_large_batch(questions):
    whole = bench.batch(questions, rows=4)
    parts = [
        Batch(*(tensor[i : i + 1] for tensor in (whole.input_ids_BT, whole.labels_BT, whole.position_ids_BT)))
        for i in range(4)
    ]
    counts = [stage_of(student()).count(part) for part in parts]
    assert len(set(counts)) > 1  # a mean of means would differ
    one, many = stage_of(student(), full=True), stage_of(student(), full=True)
    total = one.count(whole)
    one.step(whole, 1 / total)
    for part in parts:
        many.step(part, 1 / total)
    for name, parameter in one.parameters().items():
        torch.testing.assert_close(parameter.grad, many.parameters()[name].grad, atol=1e-5, rtol=1e-4)


def test_activation_checkpointing_changes_no_gradient(batch):
    plain, saving = stage_of(student()), stage_of(student(), activation_checkpointing=True)
    for stage in (plain, saving):
        torch.manual_seed(0)
        for name, parameter in stage.parameters().items():
            parameter.data.normal_(0, 0.1) if "lora_" in name else None
        stage.step(batch, 1.0)
    for name, parameter in plain.parameters().items():
        torch.testing.assert_close(parameter.grad, saving.parameters()[name].grad, atol=1e-3, rtol=1e-4)
    saving.finish()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in saving.model.modules())


def convert(teacher: Path, text: Path, out: Path, changes: dict, **options) -> Path:
    return hybridize.convert(
        str(teacher), bench.recipe(text, changes), out, device="cpu", progress=False, **options
    )


def test_an_unmerged_adapter_stays_apart_and_load_attaches_it(teacher, text, tmp_path, batch):
    finetune = bench.RECIPE["steps"][1]["finetune"]
    apart = {"steps": [{"finetune": finetune | {"lora": {"merge": False}}}]}
    merged = {"steps": [{"finetune": finetune}]}
    first, second = (
        convert(teacher, text, tmp_path / "a", apart),
        convert(teacher, text, tmp_path / "b", merged),
    )
    assert (first / "adapter" / "adapter_model.safetensors").is_file() and not (second / "adapter").exists()
    base = load_file(first / "model" / "model.safetensors")
    start = load_file(Path(teacher) / "model.safetensors")
    assert all(torch.equal(base[name], value) for name, value in start.items())
    with torch.no_grad():
        ours = hybridize.load(first, device="cpu")[0](batch.input_ids_BT).logits
        theirs = hybridize.load(second, device="cpu")[0](batch.input_ids_BT).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_an_adapter_that_a_later_step_merged_is_not_attached_twice(teacher, text, tmp_path):
    finetune = bench.RECIPE["steps"][1]["finetune"] | {"tokens": 256, "validation_rows": 2}
    steps = {"steps": [{"finetune": finetune | {"lora": {"merge": False}}}, {"finetune": finetune}]}
    convert(teacher, text, tmp_path, steps, stop_after="0")
    assert (tmp_path / "adapter").is_dir()
    convert(teacher, text, tmp_path, steps)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("how", [{"train_maps": True}, {"full": True}, {"full": True, "train_maps": True}])
def test_a_finished_step_is_applied_again_as_it_was(teacher, text, tmp_path, how):
    """The student made from the stored outcomes equals the one that training left in memory."""
    finetune = bench.RECIPE["steps"][1]["finetune"] | {"tokens": 512, "validation_rows": 2} | how
    steps = {"steps": [bench.RECIPE["steps"][0], {"finetune": finetune}]}
    convert(teacher, text, tmp_path, steps)
    trained = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "student.json").unlink()
    convert(teacher, text, tmp_path, steps)
    again = load_file(tmp_path / "model" / "model.safetensors")
    assert trained.keys() == again.keys()
    for name, tensor in trained.items():
        assert torch.equal(tensor, again[name]), name


def test_bf16_runs_and_keeps_maps_in_float32(teacher, text, tmp_path):
    run = convert(teacher, text, tmp_path, {"precision": "bf16"})
    tensors = load_file(run / "model" / "model.safetensors")
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if ".groups." in name else torch.bfloat16), name
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    model, _ = hybridize.load(run, device="cpu", dtype="bfloat16")
    assert {p.dtype for n, p in model.named_parameters() if ".groups." in n} == {torch.float32}


def test_bf16_trains_every_weight_beside_kept_softmax_layers(batch):
    spec = HybridSpec.model_validate({"all": bench.WINDOWED, "layers": {"0": {"attention": "softmax"}}})
    model = hybridize_model(tiny_model("llama"), spec)
    stage = FinetuneStage(model, FinetuneStep.model_validate({"tokens": 1, "full": True}), [], autocast=True)
    stage.step(batch, 1 / stage.count(batch))
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in stage.parameters().values() if p.requires_grad
    )
