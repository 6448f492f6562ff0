"""Small modules with parameters of their own around a mixer: norms and output gates.

Legend: B rows, T tokens, E width of the residual stream, H heads, V value dim.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

GATE_STD = 0.02
"""Standard deviation of a `half` gate's first weights."""


class OwnStart(nn.Module):
    """A module that knows its parameters' first values: a checkpoint that lacks them gets these."""

    def reset_parameters(self) -> None:
        raise NotImplementedError


class RMSNorm(OwnStart):
    """x / rms(x) * weight over the last axis, computed in float32, in x's dtype."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class OutputGate(OwnStart):
    """A factor on each channel of the output from the layer's input: sigmoid(W x) (`half`), or 2 sigmoid(W x) with W = 0 at
    first (`open`: it starts as 1 and changes nothing)."""

    def __init__(self, kind: Literal["open", "half"], width: int, channels: int, seed: int) -> None:
        super().__init__()
        self.kind, self.seed = kind, seed
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.kind == "open":
            self.weight.zero_()
            return
        generator = torch.Generator().manual_seed(self.seed)
        self.weight.copy_(GATE_STD * torch.randn(self.weight.shape, generator=generator, dtype=torch.float32))

    def forward(self, o_BTHV: Tensor, x_BTE: Tensor) -> Tensor:
        gate = torch.sigmoid(nn.functional.linear(x_BTE.to(self.weight.dtype), self.weight))
        factor = 2 if self.kind == "open" else 1
        return o_BTHV * (factor * gate).to(o_BTHV.dtype).unflatten(-1, o_BTHV.shape[-2:])
