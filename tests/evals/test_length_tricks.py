"""Rotary frequencies beyond a teacher's own length, against transformers' functions and the papers' formulas."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.models.hybrids import hybrid
from tests.models.tiny import LLAMA3_ROPE, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridize.evals.length_tricks import positions_note, with_length_trick, with_longer_positions
from hybridize.models.surgery import hybridize_model
from hybridize.spec import HybridSpec

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": ROPE},
    "qwen3": {},
    "phi3": {},  # rotates half of a head
    "mistral": {},
}
L0 = 512


def rotary(config: PreTrainedConfig) -> tuple[Tensor, float]:
    """Frequencies and attention factor of a model made with this config."""
    module = AutoModelForCausalLM.from_config(config).model.rotary_emb
    return module.inv_freq, module.attention_scaling


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [513, 2048, 131072])
def test_dynamic_ntk_is_transformers_for_the_declared_length(family: str, length: int) -> None:
    config = tiny_config(family, **FAMILIES[family])
    dynamic = tiny_config(family, **FAMILIES[family])
    dynamic.rope_parameters = {**dynamic.rope_parameters, "rope_type": "dynamic", "factor": 1.0}
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](dynamic, torch.device("cpu"), seq_len=length)
    changed = with_length_trick(config, "dynamic_ntk", length)
    found, scaling = rotary(changed)
    torch.testing.assert_close(found, expected)
    assert scaling == 1 and changed.max_position_embeddings == length
    # The lowest frequency is interpolated by the whole factor, the highest is left alone.
    plain, _ = rotary(config)
    torch.testing.assert_close(found[-1], plain[-1] * L0 / length)
    assert found[0] == plain[0] == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1024, 4096])
def test_yarn_is_transformers_and_the_papers(family: str, length: int) -> None:
    config = tiny_config(family, **FAMILIES[family])
    changed = with_length_trick(config, "yarn", length)
    found, scaling = rotary(changed)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](changed, torch.device("cpu"))
    torch.testing.assert_close(found, expected)
    s = length / L0
    assert scaling == factor == pytest.approx(0.1 * math.log(s) + 1)
    # NTK by parts: a frequency that turns often over L0 stays, one that turns less than once is interpolated.
    plain, _ = rotary(config)
    turns = L0 * plain / (2 * math.pi)
    torch.testing.assert_close(found[turns > 32], plain[turns > 32])
    torch.testing.assert_close(found[-1], plain[-1] / s)
    assert ((found <= plain * 1.0001) & (found >= plain / s * 0.9999)).all()


def test_short_lengths_and_none_leave_the_config() -> None:
    config = tiny_config("llama", rope_parameters=dict(ROPE))
    for trick, length in (("none", 10**6), ("yarn", L0), ("dynamic_ntk", 100)):
        assert with_length_trick(config, trick, length) is config  # type: ignore[arg-type]
    before = config.to_dict()
    with_length_trick(config, "yarn", 4 * L0)
    with_length_trick(config, "dynamic_ntk", 4 * L0)
    assert config.to_dict() == before, "the config given is never changed"


@pytest.mark.parametrize("trick", ["yarn", "dynamic_ntk"])
def test_layers_with_a_window_keep_their_positions(trick: Any) -> None:
    config = tiny_config("gemma3_text")
    assert set(config.rope_parameters) == {"full_attention", "sliding_attention"}
    changed = with_length_trick(config, trick, 2048)
    assert changed.rope_parameters["sliding_attention"] == config.rope_parameters["sliding_attention"]
    assert changed.rope_parameters["full_attention"] != config.rope_parameters["full_attention"]
    AutoModelForCausalLM.from_config(changed)


@pytest.mark.parametrize("trick", ["yarn", "dynamic_ntk"])
def test_weights_load_and_only_the_positions_differ(trick: Any, tmp_path: Any) -> None:
    teacher = tiny_model("llama", rope_parameters=dict(ROPE), num_hidden_layers=2)
    teacher.save_pretrained(tmp_path)
    changed = with_length_trick(teacher.config, trick, 1024)
    longer = AutoModelForCausalLM.from_pretrained(tmp_path, config=changed).eval()
    ids_BT = torch.arange(3, 128)[None].repeat(1, 6)
    with torch.no_grad():
        ours, theirs = longer(ids_BT).logits, teacher(ids_BT).logits
    assert ours.isfinite().all() and not torch.allclose(ours, theirs, atol=1e-3)
    again = type(changed).from_dict(changed.to_dict())
    assert again.rope_parameters == changed.rope_parameters


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_loaded_teacher_is_stretched_around_its_own_weights(tied: bool, tmp_path: Any) -> None:
    teacher = tiny_model("llama", rope_parameters=dict(ROPE), num_hidden_layers=2, tie_word_embeddings=tied)
    teacher = teacher.to(torch.bfloat16)
    teacher.save_pretrained(tmp_path)
    ids_BT = torch.arange(3, 128)[None].repeat(1, 6)
    before = teacher(ids_BT).logits
    longer = with_longer_positions(teacher, "yarn", 1024)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=with_length_trick(teacher.config, "yarn", 1024), dtype=torch.bfloat16
    )
    torch.testing.assert_close(longer(ids_BT).logits, loaded(ids_BT).logits, rtol=0, atol=0)
    torch.testing.assert_close(teacher(ids_BT).logits, before, rtol=0, atol=0)
    assert longer.lm_head.weight.data_ptr() == teacher.lm_head.weight.data_ptr() and not longer.training
    assert with_longer_positions(teacher, "yarn", 100) is teacher
    assert with_longer_positions(teacher, "none", 10**6) is teacher


@pytest.mark.parametrize("trick", ["yarn", "dynamic_ntk"])
@pytest.mark.parametrize("position", [None, "rope"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2"])
@torch.no_grad()
def test_a_control_is_stretched_as_its_teacher(family: str, position: Any, trick: Any) -> None:
    teacher = tiny_model(family, **FAMILIES.get(family, {}))
    ids_BT = torch.arange(3, 128)[None].repeat(1, 6)
    length = 4 * teacher.config.max_position_embeddings
    expected = with_longer_positions(teacher, trick, length)(ids_BT).logits
    group = {"attention": "softmax", "position": position}
    control = hybridize_model(copy.deepcopy(teacher), HybridSpec.model_validate({"all": group}))
    plain = control(ids_BT).logits
    longer = with_longer_positions(control, trick, length)
    assert type(longer) is type(teacher)
    assert longer.lm_head.weight.data_ptr() == control.lm_head.weight.data_ptr()
    torch.testing.assert_close(longer(ids_BT).logits, expected, rtol=1e-4, atol=3e-5)
    assert not torch.allclose(expected, plain, atol=1e-4)
    torch.testing.assert_close(control(ids_BT).logits, plain, rtol=0, atol=0)
    assert with_longer_positions(control, trick, 100) is control


def test_a_hybrid_is_no_control() -> None:
    softmax = {"attention": "softmax"}
    teacher = tiny_model("llama", num_hidden_layers=2)
    for change in (
        {"position": "none"},
        {"output_gate": True},
        {"heads": "expand"},
        {"qk_norm": True},
        {"window": {"kind": "sliding", "size": 8}},
        {"logit_scale": {"kind": "constant", "value": 2.0}},
    ):
        spec = HybridSpec.model_validate({"all": softmax, "layers": {"0": {**softmax, **change}}})
        model = hybridize_model(copy.deepcopy(teacher), spec)
        assert not model.is_a_control
        with pytest.raises(ValueError, match="config is a hybrid's"):
            with_longer_positions(model, "yarn", 2048)


def test_lengths_beyond_the_positions_are_told() -> None:
    config = tiny_config("llama")
    assert positions_note(config, config.max_position_embeddings) is None
    assert "lengths up to 1,000,000 are beyond the 512 positions" in str(positions_note(config, 10**6))
    assert positions_note(hybrid().config, 10**6) is not None


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ValueError, match="trick is 'yarm'; did you mean 'yarn'"):
        with_length_trick(tiny_config("llama"), "yarm", 2048)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positions of type 'llama3', scaled already"):
        with_length_trick(tiny_config("llama", rope_parameters=dict(LLAMA3_ROPE)), "yarn", 2048)
    with pytest.raises(ValueError, match="config is a hybrid's"):
        with_length_trick(hybrid().config, "yarn", 2048)
    with pytest.raises(ValueError, match="GPT2Config without rotary positions"):
        with_length_trick(GPT2Config(), "yarn", 2048)
