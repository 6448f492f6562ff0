"""What one head group computes: an attention, its window, normalizer, feature map, positions, decay, norms and gates.

`hybridize.spec` builds the layers and the model of these, and is where they are imported from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hybridize.windows import Window


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
    `short_conv` is the width of a causal convolution of recurrent attention's q, k and v, before norms and positions.
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
    short_conv: int | None = Field(default=None, ge=2)

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
        if self.short_conv is not None and not self.recurrent:
            raise ValueError(
                f"attention {self.attention!r} takes no short_conv; only recurrent attention has one: {', '.join(RECURRENT)}"
            )
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
