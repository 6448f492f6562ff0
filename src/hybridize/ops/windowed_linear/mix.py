"""How near and far become one output: DESIGN D2 (shared normalizer), D3 (separate), D12 (ablations).

Legend: `*` any leading dimensions, H query heads, V value dim. `num` and `den` are not yet divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridize.ops.types import EPSILON, HYBRID, Ablation, guarded


@dataclass(frozen=True)
class SharedMix:
    """o = (gamma num_near + eta num_far) / (gamma den_near + eta den_far); LoLCATs Eq. 6. eta is 1 or 1 - gamma."""

    gamma_H: Tensor
    eta: Literal["one", "one_minus_gamma"] = "one"

    @property
    def eta_H(self) -> Tensor:
        return torch.ones_like(self.gamma_H) if self.eta == "one" else 1 - self.gamma_H


@dataclass(frozen=True)
class SeparateMix:
    """o = g near + (1 - g) far, each normalised alone.

    g is `gate_H`, or with `mass_bias_H` sigma(lse_near - ln den_far - bias). A query without far keys takes near alone
    (`renormalize`) or g near (`zero`).
    """

    gate_H: Tensor | None = None
    mass_bias_H: Tensor | None = None
    empty_far: Literal["renormalize", "zero"] = "renormalize"

    def __post_init__(self) -> None:
        if (self.gate_H is None) == (self.mass_bias_H is None):
            raise ValueError("SeparateMix takes either gate_H or mass_bias_H")

    def gate(self, den_near: Tensor, shift: Tensor, den_far: Tensor) -> Tensor:
        if self.gate_H is not None:
            return self.gate_H.to(den_near).expand_as(den_near)
        assert self.mass_bias_H is not None
        lse = shift + den_near.clamp_min(EPSILON).log()
        return torch.sigmoid(lse - den_far.clamp_min(EPSILON).log() - self.mass_bias_H.to(den_near))


Mix = SharedMix | SeparateMix


@dataclass(frozen=True)
class Branches:
    """The sums that an output is made of. `all_*` are sums over every key <= t by the maps, for `linear_only`."""

    near_num: Tensor  # [*, H, V]
    near_den: Tensor  # [*, H]
    shift: Tensor  # [*, H]: c, the near maximum that was subtracted
    far_num: Tensor
    far_den: Tensor
    has_far: Tensor  # bool [*]
    all_num: Tensor | None = None
    all_den: Tensor | None = None


def combine(branches: Branches, mix: Mix, ablation: Ablation, where: Tensor | None = None) -> Tensor:
    """The output `[*, H, V]`; where `where` (bool `[*, H]`) is false nothing is removed."""
    o = _combine(branches, mix, ablation)
    if where is None or ablation.mode == "hybrid":
        return o
    if ablation.keep_empty:
        where = where & branches.has_far[..., None]
    return torch.where(where[..., None], o, _combine(branches, mix, HYBRID))


def far_share(branches: Branches, mix: Mix) -> Tensor:
    """The share of the weights that lies on far keys, `[*, H]` in 0..1: the sum of their coefficients."""
    return near_and_far_scales(branches, mix)[1] * branches.far_den


def _combine(branches: Branches, mix: Mix, ablation: Ablation) -> Tensor:
    if isinstance(mix, SharedMix):
        return _shared(branches, mix, ablation)
    return _separate(branches, mix, ablation)


def near_and_far_scales(branches: Branches, mix: Mix) -> tuple[Tensor, Tensor]:
    """What a near weight e^(s-c) and a far weight phi(q) phi(k) is multiplied with in the output, `[*, H]` each."""
    if isinstance(mix, SharedMix):
        gamma, eta = mix.gamma_H.to(branches.near_den), mix.eta_H.to(branches.near_den)
        den = (gamma * branches.near_den + eta * branches.far_den).clamp_min(EPSILON)
        return gamma / den, eta / den
    near, far = _gates(branches, mix)
    return near / guarded(branches.near_den), far / guarded(branches.far_den)


def _shared(branches: Branches, mix: SharedMix, ablation: Ablation) -> Tensor:
    gamma, eta = mix.gamma_H.to(branches.near_den), mix.eta_H.to(branches.near_den)
    near_den, far_den = gamma * branches.near_den, eta * branches.far_den
    hybrid_den = near_den + far_den
    if ablation.mode == "hybrid":
        num, den = gamma[:, None] * branches.near_num + eta[:, None] * branches.far_num, hybrid_den
    elif ablation.mode == "softmax_only":
        num, den = gamma[:, None] * branches.near_num, near_den
    elif ablation.mode == "far_only":
        num, den = eta[:, None] * branches.far_num, far_den
    else:
        assert branches.all_num is not None and branches.all_den is not None
        num, den = eta[:, None] * branches.all_num, eta * branches.all_den
    if ablation.removal == "zero":
        den = hybrid_den
    return num / den.clamp_min(EPSILON)[..., None]  # masses under a shared normalizer are never negative


def _gates(branches: Branches, mix: SeparateMix) -> tuple[Tensor, Tensor]:
    """Weights of the near and the far output, `[*, H]`."""
    g = mix.gate(branches.near_den, branches.shift, branches.far_den)
    far = 1 - g
    if mix.empty_far == "renormalize":
        g = torch.where(branches.has_far[..., None], g, torch.ones_like(g))
    return g, far


def _separate(branches: Branches, mix: SeparateMix, ablation: Ablation) -> Tensor:
    near_gate, far_gate = _gates(branches, mix)
    if ablation.removal == "renormalize" and ablation.mode != "hybrid":
        near_gate, far_gate = torch.ones_like(near_gate), torch.ones_like(far_gate)
    near = near_gate[..., None] * branches.near_num / guarded(branches.near_den)[..., None]
    far = far_gate[..., None] * branches.far_num / guarded(branches.far_den)[..., None]
    if ablation.mode == "hybrid":
        return near + far
    if ablation.mode == "softmax_only":
        return near
    if ablation.mode == "far_only":
        return far
    assert branches.all_num is not None and branches.all_den is not None
    return far_gate[..., None] * branches.all_num / guarded(branches.all_den)[..., None]
