"""Where attention lives in each supported transformers family, and how to project into and out of it.

One row of `FAMILIES` for each. `project` gives q, k, v as the original module hands them to its attention function, and
`finish` makes the module's output from what that function returns; what lies between is a token mixer's business. Both
touch a module's children by name only, so they serve the original and a mixer that took its children over.

Shapes: B batch, T tokens, E hidden width, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from hybridize.problems import nearest

PROJECTIONS = ("q", "k", "v", "o")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class AttentionShape:
    """What a token mixer needs to know of one layer's attention.

    `scale` multiplies q·k; `softcap` c replaces a score s by c·tanh(s/c) after scaling; `window` is the model's own
    sliding window in keys, the query's own included (None: all earlier keys); `rope` is False in a layer without
    position embeddings; `layers` counts the model's; `normed`: q and k of each head are normalised.
    """

    layer: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    rope: bool
    layers: int = 1
    normed: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture: the facts about its attention that its config does not state by itself.

    `package` names the modeling module; `window` says which layers use `config.sliding_window`; `scale_field` names the
    config field whose inverse square root scales the scores (None: the head dim); `softcap_field` and
    `logit_softcap_field` name the caps of attention scores and of the final logits; `rope_field` names a list with a 1
    for each layer that rotates q and k.
    """

    model_type: str
    package: str
    fused_qkv: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    window: Literal["none", "all", "layer_types"] = "none"
    scale_field: str | None = None
    softcap_field: str | None = None
    logit_softcap_field: str | None = None
    rope_field: str | None = None

    def shape(self, config: PreTrainedConfig, layer: int) -> AttentionShape:
        """The attention shape of `layer` (from 0)."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        scaled_by = head_dim if self.scale_field is None else getattr(config, self.scale_field)
        return AttentionShape(
            layer=layer,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=scaled_by**-0.5,
            softcap=getattr(config, self.softcap_field) if self.softcap_field else None,
            window=config.sliding_window if self._slides(config, layer) else None,
            rope=bool(getattr(config, self.rope_field)[layer]) if self.rope_field else True,
            layers=config.num_hidden_layers,
            normed=self.qk_norm == "head",
        )

    def shapes(self, config: PreTrainedConfig) -> list[AttentionShape]:
        """The attention shapes of all layers, in order."""
        return [self.shape(config, layer) for layer in range(config.num_hidden_layers)]

    def _slides(self, config: PreTrainedConfig, layer: int) -> bool:
        if self.window == "layer_types":
            return config.layer_types[layer] == "sliding_attention"
        return self.window == "all"

    def attention_modules(self, model: PreTrainedModel) -> list[nn.Module]:
        """The self-attention modules of `model` (with or without its language-model head), in layer order."""
        return [layer.self_attn for layer in _decoder_layers(model)]

    def replace_attention(self, model: PreTrainedModel, layer: int, attention: nn.Module) -> None:
        """Put `attention` where layer `layer`'s self-attention is: `model.layers.{layer}.self_attn`."""
        _decoder_layers(model)[layer].self_attn = attention

    def project(
        self,
        mixer: Any,
        shape: AttentionShape,
        x_BTE: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, T, H, D]`, k and v `[B, T, G, D]`, after qk-norm and RoPE, bit for bit as the original computes them.

        `mixer` is any module with the original's children; `position_embeddings` are the (cos, sin), `[B or 1, T, R]`
        with R rotated dims, that the decoder hands to its layers.
        """
        q, k, v = self.heads(mixer, shape, x_BTE)
        return *(self.rotate(q, k, position_embeddings) if shape.rope else (q, k)), v

    def heads(self, mixer: Any, shape: AttentionShape, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of every head, after the family's own qk-norm and before RoPE."""
        if self.fused_qkv:
            q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            q, k, v = mixer.qkv_proj(x_BTE).split([q_width, kv_width, kv_width], dim=-1)
        else:
            q, k, v = mixer.q_proj(x_BTE), mixer.k_proj(x_BTE), mixer.v_proj(x_BTE)
        if self.qk_norm == "projection":
            q, k = mixer.q_norm(q), mixer.k_norm(k)
        q_BTHD = q.unflatten(-1, (shape.heads, shape.head_dim))
        k_BTGD = k.unflatten(-1, (shape.kv_heads, shape.head_dim))
        v_BTGD = v.unflatten(-1, (shape.kv_heads, shape.head_dim))
        if self.qk_norm == "head":
            q_BTHD, k_BTGD = mixer.q_norm(q_BTHD), mixer.k_norm(k_BTGD)
        return q_BTHD, k_BTGD, v_BTGD

    def rotate(
        self, q_BTHD: Tensor, k_BTGD: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """q and k turned by the family's own RoPE."""
        cos, sin = position_embeddings
        return _rotary(self.package)(q_BTHD, k_BTGD, cos, sin, unsqueeze_dim=2)

    @torch.no_grad()
    def expand(self, mixer: nn.Module, shape: AttentionShape) -> None:
        """Give every query head its own key and value head: whole head blocks of the projections are copied, query head h
        taking those of KV head floor(h / (H / G)) (DESIGN D5). Biases and a norm over the keys' width go along."""
        if shape.kv_heads == shape.heads:
            return
        times = shape.heads // shape.kv_heads

        def copied(x: Tensor) -> nn.Parameter:
            blocks = x.unflatten(0, (-1, shape.head_dim)).repeat_interleave(times, 0)
            return nn.Parameter(blocks.flatten(0, 1).contiguous(), requires_grad=x.requires_grad)

        def widen(linear: Any, change: Callable[[Tensor], nn.Parameter]) -> None:
            linear.weight = change(linear.weight)
            if linear.bias is not None:
                linear.bias = change(linear.bias)
            linear.out_features = linear.weight.shape[0]

        if self.fused_qkv:
            q_width = shape.heads * shape.head_dim

            def fused(x: Tensor) -> nn.Parameter:
                joined = torch.cat([x[:q_width], copied(x[q_width:])])
                return nn.Parameter(joined, requires_grad=x.requires_grad)

            widen(mixer.qkv_proj, fused)
            return
        for name in ("k_proj", "v_proj"):
            widen(getattr(mixer, name), copied)
        if self.qk_norm == "projection":
            norm: Any = mixer.k_norm
            norm.weight = copied(norm.weight)

    def finish(self, mixer: Any, o_BTHD: Tensor) -> Tensor:
        """The attention module's output `[B, T, E]` from its heads' outputs."""
        return mixer.o_proj(o_BTHD.flatten(-2))

    def lora_targets(self, projections: Sequence[str]) -> list[str]:
        """The module names behind some of q, k, v, o. A fused projection adapts q, k and v together.

        Raises `ValueError` for any other name.
        """
        for projection in projections:
            if projection not in PROJECTIONS:
                raise ValueError(
                    f"projections: {projection!r} is not one; {nearest(projection, PROJECTIONS)}"
                )
        fused = ("q", "k", "v") if self.fused_qkv else ()
        return list(dict.fromkeys("qkv_proj" if p in fused else f"{p}_proj" for p in projections))

    def final_logit_softcap(self, config: PreTrainedConfig) -> float | None:
        """The cap c of the final logits, x -> c·tanh(x/c); None where there is none."""
        return getattr(config, self.logit_softcap_field) if self.logit_softcap_field else None


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "llama"),
        Family("mistral", "mistral", window="all"),
        Family("qwen2", "qwen2", window="layer_types"),
        Family("qwen3", "qwen3", qk_norm="head", window="layer_types"),
        Family("smollm3", "smollm3", window="layer_types", rope_field="no_rope_layers"),
        Family("olmo2", "olmo2", qk_norm="projection"),
        Family("phi3", "phi3", fused_qkv=True, window="all"),
        Family(
            "gemma2",
            "gemma2",
            window="layer_types",
            scale_field="query_pre_attn_scalar",
            softcap_field="attn_logit_softcapping",
            logit_softcap_field="final_logit_softcapping",
        ),
        # Gemma 3's config has attn_logit_softcapping, but its attention does not apply it.
        Family(
            "gemma3_text",
            "gemma3",
            qk_norm="head",
            window="layer_types",
            scale_field="query_pre_attn_scalar",
            logit_softcap_field="final_logit_softcapping",
        ),
    )
}


def get_family(config: PreTrainedConfig) -> Family:
    """The family of `config`, judged from the config alone, before any weight loads.

    Raises `ValueError` for a family without a row and for settings of a supported one that a hybrid cannot keep.
    """
    problem = _unsupported_mechanism(config) or _unsupported_family(config) or _unsupported_setting(config)
    if problem:
        raise ValueError(f"model_type {config.model_type!r} cannot be converted: {problem}")
    family = FAMILIES[config.model_type]
    _rotary(
        family.package
    )  # import it here rather than in the first forward, which may be under torch.compile
    return family


def base_architecture(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The causal language model class of `config`, such as `LlamaForCausalLM`.

    Raises `ValueError` where `get_family` does.
    """
    get_family(config)
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def notes(config: PreTrainedConfig) -> list[str]:
    """What a conversion of a supported `config` changes silently; one sentence each."""
    dropout = getattr(config, "attention_dropout", 0.0) or 0.0
    if dropout == 0.0:
        return []
    return [
        f"attention_dropout {dropout} is ignored: converted layers train without dropout on attention weights"
    ]


def _unsupported_mechanism(config: PreTrainedConfig) -> str | None:
    """What no family here could have, asked first because it explains more than an unknown name."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it has an encoder or cross-attention, and only decoder-only language models are converted"
    if getattr(config, "text_config", None) is not None:
        return f"it holds several models; pass its text model's config, {config.text_config.model_type!r}"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its multi-head latent attention (kv_lora_rank) has no keys and values of its own to project"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked attention (attention_chunk_size) is not supported"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised (quantization_config), so they cannot be trained; take the full-precision checkpoint"
    if getattr(config, "is_heterogeneous", False):
        return "its layers differ in size (per_layer_config), and one shape for all layers is assumed"
    return None


def _unsupported_family(config: PreTrainedConfig) -> str | None:
    if config.model_type in FAMILIES:
        return None
    return (
        "no row in hybridize/models/families.py says where its attention lives "
        f"(docs/adding-a-family.md); {nearest(config.model_type, list(FAMILIES))}"
    )


def _unsupported_setting(config: PreTrainedConfig) -> str | None:
    for rope_type in _rope_types(config):
        if "dynamic" in rope_type or rope_type == "longrope":
            return (
                f"rope_type {rope_type!r} picks its frequencies by the length of the prompt, so prefill and decode would "
                "disagree; take a checkpoint with a fixed RoPE (default, linear, llama3, yarn)"
            )
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention is bidirectional, and only causal attention is converted"
    if config.num_attention_heads % config.num_key_value_heads != 0:
        return (
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if FAMILIES[config.model_type].window != "layer_types":
        return None
    for layer_type in config.layer_types:
        if layer_type not in LAYER_TYPES:
            return f"layer_types has {layer_type!r}; allowed are {', '.join(LAYER_TYPES)}"
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        return "layer_types has 'sliding_attention', but sliding_window is not set"
    return None


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The RoPE types in use; Gemma 3 keeps one set of RoPE parameters for each layer type."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {each.get("rope_type", "default") for each in nested or [parameters]}


def _decoder_layers(model: PreTrainedModel) -> Any:
    """The list of decoder layers, in a type that lets their attributes be named."""
    return model.base_model.layers


_ROTARY: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {}


def _rotary(package: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The family's own rotation: partial in Phi-3, cast back in OLMo 2."""
    if package not in _ROTARY:
        modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        _ROTARY[package] = modeling.apply_rotary_pos_emb
    return _ROTARY[package]
