"""Tiny random models of every supported family, for tests: 4 layers, width 32, 4 query heads on 2 key/value heads."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

WINDOW = 8  # keys in the model's own sliding window, the query's own included
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 16  # cut to the number of layers

# What makes each family itself, with an independent head dim (width / heads is 8) where the family has one.
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "head_dim": 16},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "phi3": {
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
    },
}
MODEL_TYPES = tuple(_FAMILY)


def tiny_config(model_type: str, tied: bool = False, **overrides: Any) -> PreTrainedConfig:
    """A config of `model_type` with every feature of its family switched on; `overrides` replace fields."""
    fields = _COMMON | _FAMILY[model_type] | {"tie_word_embeddings": tied} | overrides
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    return CONFIG_MAPPING[model_type](
        **copy.deepcopy(fields)
    )  # configs complete their rope_parameters in place


def tiny_model(
    model_type: str,
    tied: bool = False,
    *,
    seed: int = 0,
    attn_implementation: str = "eager",
    **overrides: Any,
) -> PreTrainedModel:
    """A float32 model in eval mode whose weights depend on `seed` alone; wide enough that no part of it is nearly zero."""
    config = tiny_config(model_type, tied, **overrides)
    config._attn_implementation = attn_implementation
    generator = torch.Generator().manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Matrices get unit-variance outputs; norm weights and biases move away from their first values.
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(scale * noise if parameter.dim() > 1 else parameter + scale * noise)
    return model.eval()
