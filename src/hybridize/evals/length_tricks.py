"""A teacher beyond its own length: the usual changes of its rotary positions, as a config to load it with.

A student is compared with its teacher at lengths that the teacher never saw; without a trick that comparison says
little. The length is declared, never that of the prompt at hand: otherwise prefill and decode would differ (D7).
"""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

from transformers import PreTrainedConfig, PreTrainedModel

from hybridize.models.configuration import HybridConfig
from hybridize.models.families import base_architecture
from hybridize.models.modeling import HybridForCausalLM
from hybridize.problems import nearest

Trick = Literal["none", "yarn", "dynamic_ntk"]


def with_length_trick(config: PreTrainedConfig, trick: Trick, length: int) -> PreTrainedConfig:
    """A copy of a teacher's config whose rotary positions reach `length` tokens; `max_position_embeddings` becomes `length`.

    With L0 = max_position_embeddings and s = length / L0:

    - `yarn` (arXiv 2309.00071): factor s over L0 positions, transformers' own `yarn`, its attention factor included.
    - `dynamic_ntk`: base · s^(d / (d - 2)), d the rotated dimensions of a head: what dynamic NTK with factor 1 gives a text
      of `length` tokens, here for every text.
    - `none`, or `length <= L0`: `config` itself.

    Layers that see a sliding window or chunks only, where the config gives them positions of their own, stay as they are.

    Raises:
        ValueError: an unknown trick, a hybrid's config (its spec holds its positions), no rotary positions, or positions
            that are scaled already, where the two scalings would not add up.
    """
    if trick not in get_args(Trick):
        raise ValueError(f"trick is {trick!r}; {nearest(trick, get_args(Trick))}")
    if trick == "none":
        return config
    if isinstance(config, HybridConfig):
        raise ValueError(
            "config is a hybrid's, whose spec holds its positions; length tricks are for teachers and controls"
        )
    ropes, trained = (
        getattr(config, "rope_parameters", None),
        getattr(config, "max_position_embeddings", None),
    )
    if not ropes or trained is None:
        raise ValueError(
            f"config is a {type(config).__name__} without rotary positions; leave trick at 'none'"
        )
    if length <= trained:
        return config
    changed = copy.deepcopy(config)
    changed.max_position_embeddings = length
    if trick == "yarn" and hasattr(changed, "original_max_position_embeddings"):
        # Phi-3's config has this field at top level, and transformers lets it win over the one in `rope_parameters`.
        changed.original_max_position_embeddings = trained
    dimensions = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "rope_theta" in ropes or "rope_type" in ropes:
        changed.rope_parameters = _scaled(ropes, trick, length, trained, dimensions)
        return changed
    changed.rope_parameters = {
        kind: _scaled(rope, trick, length, trained, dimensions) if kind == "full_attention" else rope
        for kind, rope in ropes.items()
    }
    return changed


def with_longer_positions(model: PreTrainedModel, trick: Trick, length: int) -> PreTrainedModel:
    """A teacher built again by `with_length_trick`'s config around the same weights (nothing is copied); `model` itself where
    the config stays. A control, a hybrid whose every layer is its teacher's, becomes the plain model that it is.

    Raises ValueError as `with_length_trick` does."""
    before, architecture = model.config, type(model)
    if isinstance(model, HybridForCausalLM) and model.is_a_control:
        before = model.config.base_config()
        architecture = base_architecture(before)
    config = with_length_trick(before, trick, length)
    if config is before:
        return model
    longer: PreTrainedModel = architecture.from_pretrained(
        None, config=config, state_dict=model.state_dict(), dtype=model.dtype
    )
    longer.generation_config = model.generation_config
    return longer.to(model.device).eval()  # type: ignore[arg-type]


def positions_note(config: PreTrainedConfig, longest: int) -> str | None:
    """A sentence for lengths beyond the positions that a config declares; None for others."""
    declared = getattr(config, "max_position_embeddings", None)
    if declared is None or longest <= declared:
        return None
    return f"lengths up to {longest:,} are beyond the {declared:,} positions of the model's config"


def _scaled(rope: dict[str, Any], trick: Trick, length: int, trained: int, dimensions: int) -> dict[str, Any]:
    """One set of rope parameters, of the default type, scaled from `trained` to `length` positions."""
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ValueError(
            f"config has positions of type {kind!r}, scaled already, up to {trained} tokens; leave trick at 'none'"
        )
    if trick == "yarn":
        return {
            **rope,
            "rope_type": "yarn",
            "factor": length / trained,
            "original_max_position_embeddings": trained,
        }
    rotated = int(dimensions * rope.get("partial_rotary_factor", 1.0))
    return {**rope, "rope_theta": rope["rope_theta"] * (length / trained) ** (rotated / (rotated - 2))}
