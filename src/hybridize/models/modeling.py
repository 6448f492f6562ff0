"""`HybridForCausalLM`: a base model of any supported family whose attention modules are `TokenMixer`s.

The base model's children are taken over under their names, so base parameter names stay. Masks become sequence lengths
once, at the top (`models.layout`); no 4-D mask is ever built.

Legend: B rows, T tokens, E width, V vocabulary.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hybridize import losses
from hybridize.layers.token_mixer import Call, TokenMixer
from hybridize.mixers.parts import OwnStart
from hybridize.models.cache import HybridCache
from hybridize.models.configuration import STUB, HybridConfig
from hybridize.models.families import base_architecture, get_family
from hybridize.models.interventions import Interventions
from hybridize.models.layout import SequenceLayout, build_layout

CACHE = "cache" if "cache" in inspect.signature(CausalLMOutputWithPast).parameters else "past_key_values"
"""transformers' name of the cache argument: `cache` since 5.24, `past_key_values` before."""

ATTENTION = "hybridize"
STUB_SOURCE = '''"""Lets transformers open this folder with trust_remote_code=True; the code is in the package hybridize."""

from hybridize.models.configuration import HybridConfig
from hybridize.models.modeling import HybridForCausalLM
'''


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("an attention module was left in place of a TokenMixer")


# registered without a mask function: transformers then builds no mask at all
AttentionInterface.register(ATTENTION, _refuse)


class HybridForCausalLM(Interventions, PreTrainedModel, GenerationMixin):
    """A causal language model with hybrid attention; see `HybridConfig.spec` for what each layer computes."""

    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _is_stateful = True  # transformers refuses assisted decoding and prompt lookup: states cannot be cropped
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = {"map_q", "map_k", "mix", "control"}  # noqa: RUF012
    _no_split_modules: list[str] = []  # noqa: RUF012

    def __init__(self, config: HybridConfig, base: PreTrainedModel | None = None) -> None:
        """Build from the config; with `base`, take over that model's modules and weights instead of new ones."""
        super().__init__(config)
        base_config = config.base_config()
        self.family = get_family(base_config)
        self.shapes = self.family.shapes(base_config)
        self.spec = config.spec
        if len(self.spec.layers) != len(self.shapes):
            raise ValueError(
                f"hybrid_spec has {len(self.spec.layers)} layers; the model has {len(self.shapes)}"
            )
        if base is None:
            base_config._attn_implementation = ATTENTION
            base = base_architecture(base_config)(base_config)
        self.model = base.base_model
        self.model.config._attn_implementation = ATTENTION
        self.lm_head = cast(nn.Linear, base.get_output_embeddings())
        modules = self.family.attention_modules(base)
        for attention, shape, layer in zip(modules, self.shapes, self.spec.layers, strict=True):
            mixer = TokenMixer(attention, self.family, shape, layer)
            self.family.replace_attention(base, shape.layer, mixer)
        self._no_split_modules = list(base._no_split_modules or [])
        self.post_init()

    @property
    def is_a_control(self) -> bool:
        """Whether every layer computes its teacher's own attention, with whatever weights."""
        return all(mixer.is_the_teachers for mixer in self.mixers)

    @classmethod
    def from_teacher(cls, teacher: PreTrainedModel, config: HybridConfig) -> HybridForCausalLM:
        """The hybrid around `teacher`'s own weights (nothing is copied; the teacher object must not be used again)."""
        model = cls(config, base=teacher)
        device = next(teacher.parameters()).device
        for mixer in model.mixers:
            mixer.groups.to(device)
        model.generation_config = teacher.generation_config
        return model.eval()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As transformers', but parameters that are missing, left over or of another shape are a `ValueError`.

        transformers would start them afresh and only log it; `ignore_mismatched_sizes=True` asks for that.
        """
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path,
            *args,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **kwargs,
        )
        model, info = loaded
        if not ignore_mismatched_sizes:
            _check_loaded(str(pretrained_model_name_or_path), info)
        return (model, info) if output_loading_info else model

    def initialize_weights(self) -> None:
        """Parameters that a checkpoint lacks get their first values; ours by their own rule."""
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, OwnStart):
                missing = [p for p in module.parameters() if not getattr(p, "_is_hf_initialized", False)]
                if missing and not any(p.is_meta for p in missing):
                    module.reset_parameters()

    def hidden_states(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """`[B, T, E]` before the head (zero at padding) and, on request, the hidden states of all layers."""
        layout = self._layout(input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache)
        return self._run(layout, input_ids, inputs_embeds, cache, output_hidden_states)

    def _layout(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: HybridCache | None,
    ) -> SequenceLayout:
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            raise ValueError(f"attention_mask is a {type(attention_mask).__name__}; it must be a 2-D tensor")
        return build_layout(
            (tokens.shape[0], tokens.shape[1]),
            tokens.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cached=cache is not None,
            past_columns=cache.columns if cache is not None else 0,
            past_lengths=cache.lengths if cache is not None else None,
        )

    def _run(
        self,
        layout: SequenceLayout,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: HybridCache | None,
        output_hidden_states: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        if cache is not None:
            self._check_cache(cache)
        states = [list(layer) for layer in cache.states] if cache is not None else None
        call = Call(layout.sequences, states, layout.shape, layout.enter)
        outputs = self.model(
            input_ids=layout.enter(input_ids) if input_ids is not None else None,
            inputs_embeds=layout.enter(inputs_embeds) if inputs_embeds is not None else None,
            position_ids=layout.position_ids,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            hybrid_call=call,
        )
        if cache is not None and states is not None:
            ends = [a + b for a, b in zip(layout.sequences.starts, layout.sequences.lengths, strict=True)]
            cache.advance(states, layout.shape[1], ends, [mixer.effective for mixer in self.mixers])
        all_states = self._leave_all(layout, outputs.hidden_states) if output_hidden_states else None
        return layout.leave(outputs.last_hidden_state), all_states

    def _check_cache(self, cache: HybridCache) -> None:
        groups = [len(layer.groups) for layer in self.spec.layers]
        if [len(layer) for layer in cache.states] != groups:
            raise ValueError(
                f"the cache has {[len(layer) for layer in cache.states]} states by layer; this model needs {groups}, see new_cache()"
            )
        effective = [mixer.effective for mixer in self.mixers]
        if cache.effective is not None and cache.effective != effective:
            layer = next(i for i, (a, b) in enumerate(zip(cache.effective, effective, strict=True)) if a != b)
            raise ValueError(
                f"the cache was filled under {cache.effective[layer]}, this call computes {effective[layer]} in layer {layer}; "
                "start a new cache inside each override"
            )
        if self.training and any(
            getattr(module, "gradient_checkpointing", False) for module in self.modules()
        ):
            raise ValueError(
                "a cache under gradient checkpointing is not allowed: the second forward would continue it twice; pass use_cache=False"
            )
        if self._intercepted:
            raise ValueError(
                "a cache while attention is intercepted (as_teacher) is not allowed: no state is kept there; pass use_cache=False"
            )

    @staticmethod
    def _leave_all(layout: SequenceLayout, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(layout.leave(state) for state in states)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        cache: HybridCache | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, V]` (of the last `logits_to_keep` columns), the loss for `labels`, and the cache.

        The loss is the mean over the labels that count, or with `num_items_in_batch` (transformers' Trainer: the labels
        of a whole optimizer step) their sum over that number.

        `attention_mask` is 2-D `[B, T]` or, with a cache, `[B, past + T]`; `cu_seqlens` or restarting `position_ids`
        mark packed documents. Raises ValueError for what cannot be laid out (see `models.layout.build_layout`).
        """
        cache = cache if cache is not None else past_key_values
        if cache is not None and not isinstance(cache, HybridCache):
            raise ValueError(
                f"the cache is a {type(cache).__name__}; a hybrid model takes a HybridCache (or None)"
            )
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if (
            cache is None
            and use_cache
            and not self.training
            and not self._intercepted
            and cu_seqlens is None
            and not _packs(position_ids, attention_mask)
        ):
            cache = self.new_cache()
        layout = self._layout(input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache)
        hidden_BTE, all_states = self._run(
            layout, input_ids, inputs_embeds, cache, bool(output_hidden_states)
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(hidden_BTE[:, kept])
        loss = None
        if labels is not None:
            loss, count = self.next_token_loss(hidden_BTE, layout.targets(labels, losses.IGNORE))
            loss = loss if num_items_in_batch is None else loss * count / num_items_in_batch
        by_name: dict[str, Any] = {CACHE: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=all_states, **by_name)

    def logits(self, hidden_BTE: Tensor) -> Tensor:
        """`[B, T, V]`, the family's final cap applied."""
        logits = self.lm_head(hidden_BTE)
        cap = self.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def final_softcap(self) -> float | None:
        return self.family.final_logit_softcap(self.config)

    def next_token_loss(self, hidden_BTE: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Mean next-token cross-entropy (nats) over the labels that count, and their number. Chunked over tokens."""
        total, count = losses.next_token_ce(hidden_BTE, self.lm_head, labels_BT, softcap=self.final_softcap)
        return total / count.clamp_min(1), count

    def new_cache(self) -> HybridCache:
        """An empty cache for this model; the first call makes its rows."""
        return HybridCache([len(layer.groups) for layer in self.spec.layers])

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        given = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if given is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
            return
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}; a hybrid model makes its own cache, leave it None"
            )
        model_kwargs[CACHE] = self.new_cache()

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Safetensors, `config.json` with the resolved spec, and the stub for `trust_remote_code=True`."""
        super().save_pretrained(save_directory, **kwargs)
        Path(save_directory, f"{STUB}.py").write_text(STUB_SOURCE, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Kept from copying source files into checkpoints: the stub imports the installed package."""


def _packs(position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether position ids restart inside a row (packed documents, which no cache can continue), padding aside."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] == 1:
        return False
    padded = isinstance(attention_mask, Tensor) and not bool(attention_mask.all())
    return not padded and bool((position_ids[:, 1:] == 0).any())


def _check_loaded(source: str, info: dict[str, Any]) -> None:
    for problem, words in (
        ("mismatched_keys", "has another shape than config.json says for"),
        ("missing_keys", "lacks"),
        ("unexpected_keys", "holds, and config.json does not know,"),
    ):
        if info.get(problem):
            entries = sorted(entry[0] if isinstance(entry, tuple) else entry for entry in info[problem])
            raise ValueError(
                f"checkpoint {source!r} {words} {entries[0]} ({len(entries)} in all); take the folder as it was saved"
            )
