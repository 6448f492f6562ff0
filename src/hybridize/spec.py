"""The spec: what every layer of a hybrid computes.

A recipe writes a `HybridSpec` (defaults for all layers, overrides for ranges of layers). `HybridSpec.resolve` checks it
against a model's shape and gives a `ResolvedSpec`: one `LayerSpec` a layer, nothing implied. The resolved form is stored
in a checkpoint's `config.json` and is the only truth about the model. What a head group may compute is in `spec_groups`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, model_validator

from hybridize.spec_groups import (
    LINEAR,
    RECURRENT,
    ConstantScale,
    FeatureMapSpec,
    Frozen,
    GroupSpec,
    LightningDecay,
    LogDeclared,
    LogitScale,
    LogLength,
    LogPosition,
    Normalizer,
    RopeBase,
    SeparateNormalizer,
    SharedNormalizer,
    first_far_position,
    reach_of,
)

__all__ = [
    "LINEAR",
    "RECURRENT",
    "SPEC_VERSION",
    "ConstantScale",
    "FeatureMapSpec",
    "Frozen",
    "GroupSpec",
    "HybridSpec",
    "LayerSpec",
    "LightningDecay",
    "LogDeclared",
    "LogLength",
    "LogPosition",
    "LogitScale",
    "Normalizer",
    "ResolvedSpec",
    "RopeBase",
    "SeparateNormalizer",
    "SharedNormalizer",
    "first_far_position",
    "parse_layers",
    "reach_of",
]

SPEC_VERSION: Literal[1] = 1


class LayerSpec(Frozen):
    """The head groups of one layer, in head order; together they cover every head once."""

    groups: tuple[GroupSpec, ...]

    @model_validator(mode="before")
    @classmethod
    def _one_group_shorthand(cls, value: Any) -> Any:
        if isinstance(value, dict) and "groups" not in value:
            return {"groups": [value]}
        return value

    @model_validator(mode="after")
    def _not_empty(self) -> LayerSpec:
        if not self.groups:
            raise ValueError("groups is empty; a layer needs at least one head group")
        return self

    @property
    def has_linear(self) -> bool:
        """Whether some group has feature maps."""
        return any(group.attention in LINEAR for group in self.groups)

    @property
    def is_softmax(self) -> bool:
        return all(group.attention == "softmax" for group in self.groups)

    @property
    def keeps_projections(self) -> bool:
        """See `GroupSpec.keeps_projections`, of every group."""
        return all(group.keeps_projections for group in self.groups)

    @property
    def expand(self) -> bool:
        """Whether every query head has its own key and value head."""
        return self.groups[0].expand


class HybridSpec(Frozen):
    """A spec as a recipe writes it. `layers` overrides `all` for ranges such as `"0-15"` or `"0,4,8"`.

    `kept` is what the layers compute that a `select` step keeps on softmax; until then all layers are candidates and
    compute `all`.
    """

    all: LayerSpec
    layers: dict[str, LayerSpec] = Field(default_factory=dict)
    kept: LayerSpec | None = None

    @model_validator(mode="after")
    def _ranges(self) -> HybridSpec:
        seen: set[int] = set()
        for text in self.layers:
            indices = set(parse_layers(text))
            if seen & indices:
                raise ValueError(f"layers {text!r} names layer {min(seen & indices)} a second time")
            seen |= indices
        return self

    def with_kept(self, layers: Iterable[int]) -> HybridSpec:
        """The spec after a selection: `layers` compute `kept`. Raises ValueError without a `kept`."""
        if self.kept is None:
            raise ValueError("spec.kept is missing; it says what the selected layers compute")
        chosen = sorted(set(layers))
        if not chosen:
            return self.model_copy(update={"kept": None})
        others = {
            text: ",".join(str(index) for index in parse_layers(text) if index not in chosen)
            for text in self.layers
        }
        overrides = {others[text]: layer for text, layer in self.layers.items() if others[text]}
        overrides[",".join(map(str, chosen))] = self.kept
        return self.model_copy(update={"layers": overrides, "kept": None})

    def resolve(self, *, layers: int, heads: int, kv_heads: int, head_dim: int) -> ResolvedSpec:
        """Check the spec against a model's shape; every problem in one `ValueError`.

        `kept` is checked like the others, though no layer computes it yet.
        """
        chosen = [self.all] * layers
        problems = []
        for text, layer_spec in self.layers.items():
            for index in parse_layers(text):
                if index >= layers:
                    problems.append(
                        f"spec.layers[{text!r}] names layer {index}; the model has layers 0 to {layers - 1}"
                    )
                else:
                    chosen[index] = layer_spec
        resolved: list[LayerSpec] = []
        for layer_spec in chosen:
            try:
                resolved.append(_resolve_layer(layer_spec, heads, kv_heads, head_dim))
            except ValueError as error:
                problems.append(str(error))
        if self.kept is not None:
            try:
                _resolve_layer(self.kept, heads, kv_heads, head_dim)
            except ValueError as error:
                problems.append(f"spec.kept: {error}")
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))
        return ResolvedSpec(layers=tuple(resolved))


SOFTMAX = HybridSpec(all=LayerSpec(groups=(GroupSpec(attention="softmax"),)))
"""Every layer as the teacher has it."""


class ResolvedSpec(Frozen):
    """One complete `LayerSpec` a layer; stored in `config.json` under `hybrid_spec`."""

    version: Literal[1] = SPEC_VERSION
    layers: tuple[LayerSpec, ...]

    @property
    def groups(self) -> list[GroupSpec]:
        return [group for layer in self.layers for group in layer.groups]


def parse_layers(text: str) -> list[int]:
    """Layer numbers (from 0) of a text such as `0-3,8`; both ends of a range are included."""
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f"layers is {text!r}; write numbers and ranges from 0, such as '0-3,8'")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ValueError(f"layers has the range {part.strip()!r}, which runs backwards")
        indices.extend(range(first, last + 1))
    return indices


def _resolve_layer(layer: LayerSpec, heads: int, kv_heads: int, head_dim: int) -> LayerSpec:
    per_kv = heads // kv_heads
    if len({group.expand for group in layer.groups}) > 1:
        raise ValueError("heads: expand concerns a whole layer; write expand: true in each of its groups")
    if layer.expand:
        kv_heads, per_kv = heads, 1
    counts = []
    for group in layer.groups:
        share = Fraction(group.heads) * heads if isinstance(group.heads, str) else Fraction(group.heads)
        if share.denominator != 1 or share % per_kv:
            raise ValueError(
                f"heads {group.heads!r} of {heads} query heads is {float(share):g}; a group holds whole KV groups of {per_kv} query heads"
            )
        counts.append(int(share))
    if sum(counts) != heads:
        raise ValueError(f"the groups hold {sum(counts)} query heads; the model has {heads}")
    groups = [
        _resolve_group(group, count, head_dim) for group, count in zip(layer.groups, counts, strict=True)
    ]
    return LayerSpec(groups=tuple(groups))


def _resolve_group(group: GroupSpec, heads: int, head_dim: int) -> GroupSpec:
    group = group.completed().model_copy(update={"heads": heads})
    rotated = group.position == "rope" or isinstance(group.position, RopeBase)
    if rotated and head_dim % 2:
        raise ValueError(f"position {group.position} rotates pairs of channels; the head dim is {head_dim}")
    if group.feature_map is None:
        return group
    features = group.feature_map.features or head_dim
    if group.feature_map.two_sided and features % 2:
        raise ValueError(f"feature_map.features is {features}; a two-sided map needs an even number")
    feature_map = group.feature_map.model_copy(
        update={"features": features, "activation": group.feature_map.act}
    )
    return group.model_copy(update={"feature_map": feature_map})
