"""Feature maps: phi(x) = act(xW + b), or two-sided act(xW + b) ++ act(-xW - b) (DESIGN D4; LoLCATs Table 1, Hedgehog).

Legend: B rows, T tokens, H map heads (query heads, or KV heads), G KV heads, D head dim, Q projection width, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.types import compute_dtype

CLAMP = 1e-12
"""Lower bound of the features of non-negative activations."""
EXP_BOUND = 30.0
"""`exp` features bound their argument to +- this, so that sums over long texts stay finite in float32."""


@dataclass(frozen=True)
class FeatureMap:
    """Weights of a map and how they act. `weight_HDQ` [H, D, Q] with F = 2Q two-sided, F = Q one-sided."""

    weight_HDQ: Tensor
    activation: str
    two_sided: bool = True
    bias_HQ: Tensor | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {self.activation!r}; allowed are {', '.join(map(repr, ACTIVATIONS))}"
            )

    @property
    def heads(self) -> int:
        return self.weight_HDQ.shape[0]

    @property
    def features(self) -> int:
        return self.weight_HDQ.shape[2] * (2 if self.two_sided else 1)

    @property
    def signed(self) -> bool:
        return self.activation == "identity"

    def __call__(self, x: Tensor) -> Tensor:
        """Features `[..., H, F]` of `x` `[..., G, D]`, float32 (float64 stays); H is a multiple of G."""
        heads, groups = self.heads, x.shape[-2]
        if heads % groups:
            raise ValueError(
                f"the feature map has {heads} heads, not a multiple of its input's {groups} heads"
            )
        dtype = compute_dtype(x)
        lead = x.shape[:-2]
        x_GND = x.to(dtype).reshape(-1, groups, x.shape[-1]).transpose(0, 1)
        weight = self.weight_HDQ.to(dtype).view(groups, heads // groups, *self.weight_HDQ.shape[1:])
        weight_GDX = weight.transpose(1, 2).flatten(2)  # [G, D, (H/G) Q]
        y = torch.bmm(x_GND, weight_GDX).transpose(0, 1).reshape(*lead, heads, self.weight_HDQ.shape[2])
        if self.bias_HQ is not None:
            y = y + self.bias_HQ.to(dtype)
        act = ACTIVATIONS[self.activation]
        features = act(torch.stack([y, -y], dim=-2)).flatten(-2) if self.two_sided else act(y)
        return features if self.signed else features.clamp_min(CLAMP)


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-EXP_BOUND, EXP_BOUND).exp()


def _elu(x: Tensor) -> Tensor:
    return 1 + torch.nn.functional.elu(x)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=-1)


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS = {"softmax": _softmax, "exp": _exp, "relu": torch.relu, "elu": _elu, "identity": _identity}
