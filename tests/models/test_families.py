"""Every family against the module it describes: same q, k, v to the bit, same output, same shapes; and the refusals.

Shapes: B batch, T tokens, E hidden width, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from tests.models.tiny import LLAMA3_ROPE, MODEL_TYPES, WINDOW, tiny_config, tiny_model
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, Gemma3Config, LlamaForCausalLM, PreTrainedModel

from hybridize.models.families import FAMILIES, AttentionShape, base_architecture, get_family, notes

EVERY = [(model_type, tied) for model_type in MODEL_TYPES for tied in (False, True)]
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)


def softmax_attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, shape: AttentionShape) -> Tensor:
    """Causal softmax attention straight from the definition; `[B, T, H, D]`."""
    group = shape.heads // shape.kv_heads
    k_BTHD, v_BTHD = k_BTGD.repeat_interleave(group, dim=2), v_BTGD.repeat_interleave(group, dim=2)
    scores_BHTT = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) * shape.scale
    if shape.softcap is not None:
        scores_BHTT = shape.softcap * torch.tanh(scores_BHTT / shape.softcap)
    position = torch.arange(q_BTHD.shape[1])
    age_TT = position[:, None] - position[None, :]
    seen_TT = (age_TT >= 0) & (age_TT < (shape.window or len(position)))
    weights_BHTT = scores_BHTT.masked_fill(~seen_TT, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights_BHTT, v_BTHD)


def record_attention(model: PreTrainedModel, ids_BT: Tensor) -> list[tuple[dict, Tensor]]:
    """(keyword arguments, output) of each attention module in one forward pass."""
    calls: list[tuple[dict, Tensor]] = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda _, args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids_BT, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize(("model_type", "tied"), EVERY)
def test_project_and_finish_rebuild_the_original_attention(model_type: str, tied: bool) -> None:
    model = tiny_model(model_type, tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    family = get_family(model.config)
    modules = family.attention_modules(model)
    for tokens in LENGTHS:
        calls = record_attention(model, torch.randint(3, 128, (2, tokens)))
        assert len(calls) == len(modules) == 4
        for module, shape, (kwargs, y_BTE) in zip(modules, family.shapes(model.config), calls, strict=True):
            with torch.no_grad():
                q, k, v = family.project(
                    module, shape, kwargs["hidden_states"], kwargs["position_embeddings"]
                )
                ours_BTE = family.finish(module, softmax_attention(q, k, v, shape))
            torch.testing.assert_close(
                ours_BTE, y_BTE, rtol=0, atol=2e-6 * max(1.0, y_BTE.abs().max().item())
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_projections_are_the_originals_to_the_bit(
    model_type: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(model_type).to(dtype)
    family = get_family(model.config)
    modeling = importlib.import_module(type(model).__module__)
    original = modeling.eager_attention_forward
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def spy(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
    ) -> object:
        seen.append((query, key, value))
        return original(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(modeling, "eager_attention_forward", spy)
    calls = record_attention(model, torch.randint(3, 128, (2, 11)))
    shapes = family.shapes(model.config)
    for module, shape, (kwargs, _), theirs in zip(
        family.attention_modules(model), shapes, calls, seen, strict=True
    ):
        with torch.no_grad():
            ours = family.project(module, shape, kwargs["hidden_states"], kwargs["position_embeddings"])
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype == dtype
            assert torch.equal(mine, other.transpose(1, 2))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_module_with_the_same_children_can_take_over(model_type: str) -> None:
    class Mixer(nn.Module):
        def __init__(self, attention: nn.Module, shape: AttentionShape) -> None:
            super().__init__()
            self.shape = shape
            for name, child in attention.named_children():
                self.add_module(name, child)

        def forward(
            self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
        ) -> tuple:
            q, k, v = family.project(self, self.shape, hidden_states, position_embeddings)
            return family.finish(self, softmax_attention(q, k, v, self.shape)), None

    model = tiny_model(model_type)
    family = get_family(model.config)
    ids_BT = torch.randint(3, 128, (2, 2 * WINDOW + 1))
    with torch.no_grad():
        before = model(ids_BT, use_cache=False).logits
    names = list(model.state_dict())
    for layer, shape in enumerate(family.shapes(model.config)):
        family.replace_attention(model, layer, Mixer(family.attention_modules(model)[layer], shape))
    assert list(model.state_dict()) == names
    assert all(isinstance(module, Mixer) for module in family.attention_modules(model))
    assert family.attention_modules(model.model) == family.attention_modules(model)  # without the head too
    with torch.no_grad():
        torch.testing.assert_close(model(ids_BT, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_shapes_match_the_parameters_and_modules(model_type: str) -> None:
    model = tiny_model(model_type)
    family = get_family(model.config)
    for shape, module in zip(family.shapes(model.config), family.attention_modules(model), strict=True):
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        assert module.o_proj.weight.shape == (shape.hidden, width)
        if family.fused_qkv:
            assert module.qkv_proj.weight.shape == (width + 2 * kv_width, shape.hidden)
        else:
            assert module.q_proj.weight.shape == (width, shape.hidden)
            assert module.k_proj.weight.shape == module.v_proj.weight.shape == (kv_width, shape.hidden)
        assert shape.scale == module.scaling
        assert shape.layer == module.layer_idx
        assert shape.rope == bool(getattr(module, "use_rope", True))
        assert (family.qk_norm != "none") == hasattr(module, "q_norm")
        targets = family.lora_targets(["q", "k", "v", "o"])
        assert all(isinstance(getattr(module, name), nn.Linear) for name in targets)


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("llama", [None] * 4),
        ("mistral", [WINDOW] * 4),
        ("qwen2", [None, None, WINDOW, WINDOW]),
        ("qwen3", [None, None, WINDOW, WINDOW]),
        ("smollm3", [None] * 4),
        ("olmo2", [None] * 4),
        ("phi3", [WINDOW] * 4),
        ("gemma2", [WINDOW, None] * 2),
        ("gemma3_text", [WINDOW, None] * 2),
    ],
)
def test_each_layer_has_its_own_window(model_type: str, windows: list[int | None]) -> None:
    config = tiny_config(model_type)
    assert [shape.window for shape in get_family(config).shapes(config)] == windows


def test_windows_that_are_switched_off() -> None:
    for model_type in ("mistral", "phi3"):
        config = tiny_config(model_type, sliding_window=None)
        assert get_family(config).shape(config, 0).window is None
    for model_type in ("qwen2", "qwen3"):
        config = tiny_config(model_type, use_sliding_window=False)
        assert get_family(config).shape(config, 3).window is None


def test_smollm3_layers_without_rope_may_slide() -> None:
    model = tiny_model("smollm3", use_sliding_window=True, sliding_window=WINDOW, no_rope_layer_interval=2)
    family = get_family(model.config)
    shapes = family.shapes(model.config)
    assert [(shape.rope, shape.window) for shape in shapes] == [(True, None), (False, WINDOW)] * 2
    calls = record_attention(model, torch.randint(3, 128, (1, 2 * WINDOW)))
    for module, shape, (kwargs, y_BTE) in zip(family.attention_modules(model), shapes, calls, strict=True):
        with torch.no_grad():
            q, k, v = family.project(module, shape, kwargs["hidden_states"], kwargs["position_embeddings"])
            ours_BTE = family.finish(module, softmax_attention(q, k, v, shape))
        torch.testing.assert_close(ours_BTE, y_BTE, rtol=0, atol=1e-5)


def test_softcaps() -> None:
    gemma2, gemma3 = tiny_config("gemma2"), tiny_config("gemma3_text", final_logit_softcapping=5.0)
    assert FAMILIES["gemma2"].shape(gemma2, 0).softcap == 2.0
    assert FAMILIES["gemma2"].final_logit_softcap(gemma2) == 3.0
    assert FAMILIES["gemma3_text"].final_logit_softcap(gemma3) == 5.0
    assert FAMILIES["llama"].final_logit_softcap(tiny_config("llama")) is None
    # Gemma 3 does not apply this field, so neither do we.
    capped = tiny_config("gemma3_text", attn_logit_softcapping=2.0)
    assert FAMILIES["gemma3_text"].shape(capped, 0).softcap is None


def test_lora_targets() -> None:
    assert FAMILIES["llama"].lora_targets(["q", "v"]) == ["q_proj", "v_proj"]
    assert FAMILIES["phi3"].lora_targets(["q", "k", "v", "o"]) == ["qkv_proj", "o_proj"]
    assert FAMILIES["phi3"].lora_targets(["v"]) == ["qkv_proj"]
    with pytest.raises(ValueError, match=r"projections: 'gate' is not one; allowed are q, k, v, o"):
        FAMILIES["llama"].lora_targets(["q", "gate"])


def test_base_architecture_and_rows() -> None:
    assert base_architecture(tiny_config("llama")) is LlamaForCausalLM
    assert set(MODEL_TYPES) == set(FAMILIES)
    for family in FAMILIES.values():
        assert pickle.loads(pickle.dumps(family)) == copy.deepcopy(family) == family


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        (
            "qwen3_moe",
            {},
            r"'qwen3_moe' cannot be converted: no row in .*docs/adding-a-family.md.*did you mean 'qwen3'\?",
        ),
        ("gpt2", {}, "no row in .* allowed are llama, mistral, "),
        ("t5", {}, "encoder or cross-attention"),
        ("deepseek_v3", {}, "multi-head latent attention"),
        ("llama4_text", {}, "attention_chunk_size"),
        ("mamba", {}, "no row in"),
    ],
)
def test_other_families_are_refused(model_type: str, fields: dict, message: str) -> None:
    config = CONFIG_MAPPING[model_type](**fields)
    for judge in (get_family, base_architecture):
        with pytest.raises(ValueError, match=message) as error:
            judge(config)
        assert "\n" not in str(error.value)


def test_a_composite_model_names_its_text_model() -> None:
    with pytest.raises(ValueError, match="pass its text model's config, 'gemma3_text'"):
        get_family(Gemma3Config())


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 2,
    "long_factor": [2.0] * 2,
    "partial_rotary_factor": 0.5,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
        (
            "phi3",
            {"rope_parameters": {**LONGROPE, "rope_theta": 1e4}},
            "rope_type 'longrope' picks its frequencies",
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rope_type 'dynamic'",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types has 'chunked_attention'; allowed are full",
        ),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False},
            "sliding_window is not set",
        ),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
        ("mistral", {"is_causal": False}, "bidirectional"),
    ],
)
def test_settings_that_a_hybrid_cannot_keep_are_refused(model_type: str, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_family(tiny_config(model_type, **fields))


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3_ROPE,
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "default", "rope_theta": 5e5},
    ],
)
def test_fixed_rope_types_are_accepted(rope: dict) -> None:
    assert get_family(tiny_config("llama", rope_parameters=rope)).model_type == "llama"


def test_attention_dropout_is_noted() -> None:
    assert notes(tiny_config("llama")) == []
    (note,) = notes(tiny_config("llama", attention_dropout=0.1))
    assert note.startswith("attention_dropout 0.1 is ignored")
