"""Save and load: the same bits, from any process; teachers inside; adapters merged; damaged checkpoints noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.hybrids import (
    HEAD_WISE,
    KEPT,
    SPECS,
    TERRACED,
    hybrid,
    realigned,
    shift_own_parameters,
    tokens,
)
from tests.models.tiny import MODEL_TYPES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import hybridize  # noqa: F401  (registers the auto classes)
from hybridize.models.configuration import HybridConfig
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.spec import HybridSpec

IDS = tokens(2, 23)
ROOT = Path(__file__).parents[2]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def in_a_fresh_process(code: str, *arguments: object) -> str:
    threads = str(torch.get_num_threads())  # the same bits need the same order of sums
    environment = {
        "PYTHONPATH": f"{ROOT / 'src'}",
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "PATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_before_the_swap_student_is_teacher(family, tied):
    """Bit for bit in its parameters, names included; and `as_teacher` gives the original's logits."""
    teacher = tiny_model(family, tied, num_hidden_layers=2)
    expected = logits(teacher)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    spec = {"all": TERRACED, "layers": {"1": HEAD_WISE}}
    model = hybridize_model(teacher, HybridSpec.model_validate(spec))
    with model.as_teacher():
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    kept = hybridize_model(
        tiny_model(family, tied, num_hidden_layers=2), HybridSpec.model_validate({"all": KEPT})
    )
    torch.testing.assert_close(logits(kept), expected, rtol=1e-4, atol=1e-4)
    after = model.state_dict()
    assert set(before) == {name for name in after if ".groups." not in name}
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert not model.training


@pytest.mark.parametrize(
    "spec", [{"all": TERRACED, "layers": {"1": HEAD_WISE}}, SPECS["halo"]], ids=["", "halo"]
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_save_and_load_give_the_same_bits(family, tied, spec, tmp_path):
    model = hybrid(spec, family, tied=tied)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, HybridForCausalLM)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    torch.testing.assert_close(logits(realigned(loaded)), logits(model), rtol=0, atol=0)
    written = json.loads((tmp_path / "config.json").read_text())
    base = model.config.base_config()
    assert written["base_model_type"] == family and written["spec_version"] == 1
    assert all(
        written[key] == getattr(base, key) for key in ("hidden_size", "num_key_value_heads", "vocab_size")
    )
    assert loaded.spec == model.spec
    again = HybridConfig.from_pretrained(tmp_path).base_config().to_dict()
    assert {k: v for k, v in again.items() if k != "transformers_version"} == {
        k: v for k, v in base.to_dict().items() if k != "transformers_version"
    }
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("spec", SPECS)
def test_every_attention_survives(spec, tmp_path):
    model = hybrid(spec)
    model.save_pretrained(tmp_path)
    loaded = realigned(AutoModelForCausalLM.from_pretrained(tmp_path))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("init", ["identity", "identity_noise"])
def test_first_values_are_the_same_everywhere(init, tmp_path):
    """Two conversions agree, and so does a checkpoint; noise comes from a fixed generator, not from the global one."""
    group = {**TERRACED, "feature_map": {"init": init, "features": 8}}

    def convert(seed: int) -> HybridForCausalLM:
        torch.manual_seed(seed)
        return hybridize_model(
            tiny_model("llama", num_hidden_layers=2), HybridSpec.model_validate({"all": group})
        )

    one, two = convert(0), convert(1)
    one.save_pretrained(tmp_path)
    loaded = HybridForCausalLM.from_pretrained(tmp_path)
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value) and torch.equal(loaded.state_dict()[name], value), (
            name
        )
    if init == "identity_noise":
        first, second = (mixer.groups[0] for mixer in one.mixers)
        assert not torch.equal(first.map_q.weight, first.map_k.weight)
        assert not torch.equal(first.map_q.weight, second.map_q.weight)


WIDE = ("map_q", "map_k", "mix", "control")
"""Parts that stay float32 in a model of another dtype: feature maps, mixes, and what gates are computed from."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["head-wise", "sliding", "halo", "recurrent"])
def test_low_precision_checkpoints_keep_maps_and_gates_in_float32(spec, dtype, tmp_path):
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "teacher")
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=dtype)
    model = hybridize_model(teacher, HybridSpec.model_validate(SPECS[spec]))
    shift_own_parameters(model)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    wide = {name for name in stored if any(f".{part}." in name for part in WIDE)}
    assert all(stored[name].dtype == (torch.float32 if name in wide else dtype) for name in stored)
    assert bool(wide) == (spec != "halo")
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype),
    ):
        for name, value in model.state_dict().items():
            assert value.dtype == (torch.float32 if name in wide else dtype)
            assert loaded.state_dict()[name].dtype == value.dtype and torch.equal(
                loaded.state_dict()[name], value
            )
        torch.testing.assert_close(logits(realigned(loaded)), logits(model), rtol=0, atol=0)


def test_a_process_without_our_import_opens_it_through_the_stub(tmp_path):
    """trust_remote_code=True, nothing of ours imported before; saved again from there it still opens both ways."""
    model = hybrid("every-kind")
    first, second = tmp_path / "first", tmp_path / "second"
    model.save_pretrained(first)
    torch.save(logits(model), tmp_path / "logits.pt")
    code = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
assert not any(name.startswith("hybridize") for name in sys.modules)
first, second, logits = sys.argv[1:]
ids = torch.randint(3, 128, (2, 23), generator=torch.Generator().manual_seed(0))
for source, target in ((first, second), (second, None)):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, torch.load(logits))
    assert AutoConfig.from_pretrained(source, trust_remote_code=True).model_type == "hybridize"
    if target:
        model.save_pretrained(target)
print("same")
"""
    assert in_a_fresh_process(code, first, second, tmp_path / "logits.pt").strip() == "same"
    for folder in (first, second):
        torch.testing.assert_close(
            logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model), rtol=0, atol=0
        )
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map["AutoModelForCausalLM"] == "hybridize_stub.HybridForCausalLM", auto_map
    assert sorted(p.name for p in second.iterdir()) == sorted(p.name for p in first.iterdir())


def test_a_process_that_imports_hybridize_first_needs_no_trust(tmp_path):
    model = hybrid("terraced")
    model.save_pretrained(tmp_path)
    code = """
import sys, hybridize
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""
    assert in_a_fresh_process(code, tmp_path).strip() == "HybridForCausalLM"


@pytest.mark.parametrize(
    "family,tied,spec",
    [
        ("llama", True, "kept-half"),
        ("qwen2", False, "kept-half"),
        ("phi3", True, "kept-half"),
        ("qwen2", True, "halo"),
        ("phi3", False, "recurrent"),
    ],
)
def test_merged_adapters_equal_unmerged_ones(family, tied, spec, tmp_path):
    """LoRA on q, k, v, o; the tied embedding and the maps stay; the merged model saves and loads."""
    model = hybrid(spec, family, tied=tied)
    untouched = {n: p.clone() for n, p in model.state_dict().items() if "proj" not in n}
    targets = model.family.lora_targets(["q", "k", "v", "o"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.eval()
    assert {
        n.rsplit(".", 1)[0].split(".")[-3] for n, p in adapted.named_parameters() if p.requires_grad
    } <= set(targets)
    unmerged = logits(adapted)
    generated = adapted.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    adapted.save_pretrained(tmp_path / "adapter")
    reopened = peft.PeftModel.from_pretrained(hybrid(spec, family, tied=tied), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(reopened), unmerged, rtol=0, atol=0)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged), unmerged, rtol=1e-4, atol=1e-4)
    for name, value in untouched.items():
        assert torch.equal(merged.state_dict()[name], value), name
    merged.save_pretrained(tmp_path / "merged")
    loaded = realigned(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=0, atol=0)
    again = merged.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    torch.testing.assert_close(again, generated)


def damaged(tmp_path: Path, change) -> Path:
    hybrid("terraced").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return tmp_path


MAP = "model.layers.1.self_attn.groups.0.map_q.weight"
DAMAGES = {
    "missing map": (lambda tensors: tensors.pop(MAP), MAP),
    "missing base weight": (
        lambda t: t.pop("model.layers.0.mlp.up_proj.weight"),
        "model.layers.0.mlp.up_proj.weight",
    ),
    "wrong shape": (lambda tensors: tensors.update({MAP: torch.zeros(4, 8, 3)}), MAP),
    "foreign tensor": (lambda tensors: tensors.update({f"{MAP}.extra": torch.zeros(2)}), f"{MAP}.extra"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_noticed(damage, tmp_path):
    """A model that would start from first values in places is an error, not a warning."""
    change, name = DAMAGES[damage]
    folder = damaged(tmp_path, change)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(
        AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True), HybridForCausalLM
    )


def edited(tmp_path: Path, **fields: object) -> Path:
    hybrid("terraced").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(
        json.dumps({key: value for key, value in {**config, **fields}.items() if value != "gone"})
    )
    return tmp_path


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"spec_version": 2}, "spec_version is 2; this hybridize reads version 1"),
        ({"hybrid_spec": "gone"}, "hybrid_spec is missing"),
        ({"base_model_type": "gone"}, "base_model_type is missing"),
        ({"base_model_type": "mamba"}, "'mamba' cannot be converted"),
        ({"base_model_type": "nonsense"}, "base_model_type is 'nonsense'"),
        ({"num_hidden_layers": 3}, "hybrid_spec has 2 layers; the model has 3"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, "groups of layer 0 hold .4. query heads"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(edited(tmp_path, **fields))


def test_the_config_alone_says_what_the_model_is(tmp_path):
    model = hybrid("kept-half", "qwen3")
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, HybridConfig) and config.spec == model.spec
    assert [layer.groups[0].attention for layer in config.spec.layers] == ["windowed_linear", "softmax"]
    fresh = HybridForCausalLM(config)
    assert {n: p.shape for n, p in fresh.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    with torch.device("meta"):
        assert all(p.is_meta for p in HybridForCausalLM(config).parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_larger_vocabulary_survives(tied, tmp_path):
    model = hybrid("terraced", tied=tied)
    before = logits(model)
    model.resize_token_embeddings(140, mean_resizing=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 140 and logits(loaded).shape[-1] == 140
    torch.testing.assert_close(logits(loaded)[..., :128], before, rtol=0, atol=0)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
