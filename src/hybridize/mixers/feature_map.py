"""The parameters of a feature map (DESIGN D4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridize.mixers.parts import OwnStart
from hybridize.ops.feature_map import FeatureMap

NOISE = 0.1
"""Standard deviation of `identity_noise`."""


class FeatureMapWeights(OwnStart):
    """`weight` [H, D, Q] and, one-sided with a bias, `bias` [H, Q]; float32. First value: a rectangular identity.

    With `identity_noise` a fixed generator (seeded by `seed`) adds N(0, 0.1), the same on every machine.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        features: int,
        activation: str,
        *,
        two_sided: bool,
        bias: bool,
        noise: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.activation, self.two_sided, self.noise, self.seed = activation, two_sided, noise, seed
        width = features // 2 if two_sided else features
        self.weight = nn.Parameter(torch.empty(heads, head_dim, width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(heads, width, dtype=torch.float32)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        heads, head_dim, width = self.weight.shape
        self.weight.copy_(torch.eye(head_dim, width).expand(heads, -1, -1))
        if self.noise:
            generator = torch.Generator().manual_seed(self.seed)
            noise = torch.randn(heads, head_dim, width, generator=generator, dtype=torch.float32)
            self.weight.add_(NOISE * noise.to(self.weight))
        if self.bias is not None:
            self.bias.zero_()

    def map(self) -> FeatureMap:
        return FeatureMap(self.weight, self.activation, self.two_sided, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Features `[..., H, F]` of `x` `[..., G, D]`, float32."""
        return self.map()(x)
