"""The spec: what every layer of a hybrid computes.

A recipe writes a `HybridSpec` (defaults for all layers, overrides for ranges of layers). `HybridSpec.resolve` checks it
against a model's shape and gives a `ResolvedSpec`: one `LayerSpec` a layer, nothing implied. The resolved form is stored
in a checkpoint's `config.json` and is the only truth about the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hybridize.windows import Window

SPEC_VERSION: Literal[1] = 1


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FeatureMapSpec(Frozen):
    """phi(x) = act(xW + b) + act(-xW - b), concatenated; `features` is the final F (default: the head dim).

    `hedgehog` is two-sided without a bias, `t2r` is relu, one-sided, with a bias (LoLCATs Table 1).
    """

    kind: Literal["hedgehog", "t2r"] = "hedgehog"
    features: int | None = Field(default=None, ge=2)
    activation: Literal["softmax", "exp", "relu", "elu", "identity"] | None = None
    k_map_heads: Literal["query", "kv"] = "query"
    init: Literal["identity", "identity_noise"] = "identity"

    @property
    def two_sided(self) -> bool:
        return self.kind == "hedgehog"

    @property
    def bias(self) -> bool:
        return self.kind == "t2r"

    @property
    def act(self) -> str:
        return self.activation or ("softmax" if self.kind == "hedgehog" else "relu")


class SharedNormalizer(Frozen):
    """Near and far share one denominator (LoLCATs Eq. 6); `gamma` is the first value of the learnt near weight."""

    kind: Literal["shared"] = "shared"
    gamma: float = Field(default=0.1, gt=0, lt=1)
    eta: Literal["one", "one_minus_gamma"] = "one"


class SeparateNormalizer(Frozen):
    """g near + (1 - g) far, each normalised alone: g `fixed`, `learnt` per head, or from the branches' `mass`."""

    kind: Literal["separate"] = "separate"
    mix: Literal["fixed", "learnt", "mass"] = "fixed"
    gate: float = Field(default=0.5, ge=0, le=1)
    empty_far: Literal["renormalize", "zero"] = "renormalize"


Normalizer = Annotated[SharedNormalizer | SeparateNormalizer, Field(discriminator="kind")]


class LogPosition(Frozen):
    """s_t = ln(t + base) / ln base, t from 0 (HyPE, arXiv 2601.22156, Eq. 11)."""

    kind: Literal["log_position"] = "log_position"
    base: float = Field(default=500.0, gt=1)
    when: Literal["inference", "always"] = "inference"


class LogLength(Frozen):
    """s_t = max(1, ln(t + 1) / ln length)."""

    kind: Literal["log_length"] = "log_length"
    length: float = Field(gt=1)
    when: Literal["inference", "always"] = "inference"


class LogDeclared(Frozen):
    """One constant, ln declared / ln length, for texts of a declared length."""

    kind: Literal["log_declared"] = "log_declared"
    length: float = Field(gt=1)
    declared: float = Field(gt=1)
    when: Literal["inference", "always"] = "inference"


class ConstantScale(Frozen):
    kind: Literal["constant"] = "constant"
    value: float = Field(gt=0)
    when: Literal["inference", "always"] = "inference"


LogitScale = Annotated[LogPosition | LogLength | LogDeclared | ConstantScale, Field(discriminator="kind")]
"""A factor on q of full softmax groups, a function of the query's position alone; `inference`: not while training."""


class LightningDecay(Frozen):
    """The fixed decay of a Lightning head h of H (from 1, counted inside its group), layer l of L (from 0).

    `hypenet`: ln gamma = -2^(-8h/H), the same in every layer. `minimax`: that times 1 - l / (L - 1 + 1e-5) + 1e-5.
    `layer_scaled`: -(8/H) (1 - l/L) (h - 1), as in flash-linear-attention's Lightning.
    """

    convention: Literal["hypenet", "minimax", "layer_scaled"] = "hypenet"


LINEAR = ("linear", "windowed_linear")
RECURRENT = ("lightning", "gla", "gdn", "mamba2", "rwkv7", "kda")


class RopeBase(Frozen):
    """RoPE over the whole head dim with its own base, whatever the teacher's."""

    rope: float = Field(gt=1)


def _parse_position(value: Any) -> Any:
    if isinstance(value, str) and value not in ("rope", "none"):
        raise ValueError(f"position is {value!r}; write rope (the teacher's), none or {{rope: 10000}}")
    return value


def _parse_heads(value: Any) -> Any:
    """`3/4` (a share of the heads) or a count of query heads."""
    if isinstance(value, str) and re.fullmatch(r"\d+/\d+", value.strip()):
        numerator, denominator = value.split("/")
        if int(denominator) == 0 or not 0 < Fraction(int(numerator), int(denominator)) <= 1:
            raise ValueError(f"heads is {value!r}; a share must lie in (0, 1]")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"heads is {value!r}; write a share such as '3/4' or a number of query heads")
    return value


class GroupSpec(Frozen):
    """One head group: an attention and what it needs. `window: null` on a softmax group keeps the teacher's own.

    `position: null` is the teacher's own. `qk_norm` is an RMS norm of q and k a head, before RoPE (the teacher's, where it has
    one); `output_norm` one over the group's heads together; `output_gate` a sigmoid of the layer's input on the output: `half`
    is sigmoid(Wx), `open` twice that with W = 0 at first, so that it changes nothing at the start (`true`: `open` for softmax,
    `half` for recurrent attention). `expand` (written `heads: expand`) gives every query head its own key and value head, copies of the teacher's at first.
    """

    heads: Annotated[int | str, BeforeValidator(_parse_heads)] = "1/1"
    attention: Literal[
        "softmax", "linear", "windowed_linear", "lightning", "gla", "gdn", "mamba2", "rwkv7", "kda"
    ]
    window: Window | None = None
    normalizer: Normalizer | None = None
    feature_map: FeatureMapSpec | None = None
    position: Annotated[Literal["rope", "none"] | RopeBase | None, BeforeValidator(_parse_position)] = None
    logit_scale: LogitScale | None = None
    decay: LightningDecay | None = None
    qk_norm: bool = False
    output_norm: bool = False
    output_gate: Literal["open", "half"] | None = None
    expand: bool = False

    @model_validator(mode="before")
    @classmethod
    def _sugar(cls, value: Any) -> Any:
        """`heads: expand` and `output_gate: true`."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if value.get("heads") == "expand":
            value.update(heads="1/1", expand=True)
        if isinstance(value.get("output_gate"), bool):
            kind = "open" if value.get("attention") == "softmax" else "half"
            value["output_gate"] = kind if value["output_gate"] else None
        return value

    @model_validator(mode="after")
    def _consistent(self) -> GroupSpec:
        if self.window is not None and self.window.size < 1:
            raise ValueError("window.size is 0; it must be at least 1 key")
        if self.attention == "windowed_linear" and self.window is None:
            raise ValueError("attention 'windowed_linear' needs a window, e.g. {kind: terraced, size: 64}")
        if self.attention == "linear" and self.window is not None:
            raise ValueError("attention 'linear' takes no window; use 'windowed_linear'")
        if self.attention in RECURRENT and self.window is not None:
            raise ValueError(f"attention {self.attention!r} takes no window; it remembers by its own decay")
        if self.attention != "windowed_linear" and self.normalizer is not None:
            raise ValueError(
                f"attention {self.attention!r} takes no normalizer; only 'windowed_linear' combines two branches"
            )
        if self.attention not in LINEAR and self.feature_map is not None:
            raise ValueError(f"attention {self.attention!r} takes no feature_map")
        if self.attention == "softmax" and self.window is not None and self.window.overlap:
            raise ValueError("window.overlap concerns the far keys; attention 'softmax' has none")
        if self.logit_scale is not None and (self.attention != "softmax" or self.window is not None):
            raise ValueError("logit_scale is for softmax attention without a window")
        if self.decay is not None and self.attention != "lightning":
            raise ValueError(f"attention {self.attention!r} takes no decay; only 'lightning' has a fixed one")
        identity = self.feature_map is not None and self.feature_map.act == "identity"
        mass = isinstance(self.normalizer, SeparateNormalizer) and self.normalizer.mix == "mass"
        if identity and (isinstance(self.normalizer, SharedNormalizer) or mass or self.normalizer is None):
            if self.attention == "windowed_linear":
                raise ValueError(
                    "feature_map.activation 'identity' gives signed masses; use normalizer {kind: separate} with mix fixed or learnt"
                )
        return self

    @property
    def recurrent(self) -> bool:
        return self.attention in RECURRENT

    @property
    def own_parameters(self) -> bool:
        """Whether the group has projections, norms, gates or decays beyond the teacher's, which a whole-mixer transfer trains."""
        dressed = self.qk_norm or self.output_norm or self.output_gate is not None
        return self.recurrent or dressed or self.expand

    @property
    def keeps_projections(self) -> bool:
        """Whether q, k and v are the teacher's own, so that the layer can still compute the attention it replaced."""
        own = self.position in (None, "rope") and not self.qk_norm and self.logit_scale is None
        return own and not (self.expand or self.recurrent)

    def completed(self) -> GroupSpec:
        """The same group with the defaults of its attention written out."""
        update: dict[str, Any] = {}
        if self.attention == "windowed_linear" and self.normalizer is None:
            update["normalizer"] = SharedNormalizer()
        if self.attention in LINEAR and self.feature_map is None:
            update["feature_map"] = FeatureMapSpec()
        if self.attention == "lightning" and self.decay is None:
            update["decay"] = LightningDecay()
        return self.model_copy(update=update)


def first_far_position(groups: Iterable[GroupSpec]) -> int | None:
    """The first position at which some linear branch has a key that no window of it sees; None without linear branches."""
    linear = [group for group in groups if group.attention != "softmax"]
    return min((group.window.first_far_position if group.window else 0 for group in linear), default=None)


def reach_of(groups: Iterable[GroupSpec], default: int = 128) -> int:
    """The most keys that a window of these groups sees (a terraced one up to 2w), sinks included; `default` without windows."""
    windows = [group.window for group in groups if group.window is not None]
    return max((window.ring + window.sinks for window in windows), default=default)


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
        """Check the spec against a model's shape; every problem in one `ValueError`."""
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
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))
        return ResolvedSpec(layers=tuple(resolved))


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
