"""Small modules with parameters of their own around a mixer: norms, output gates, short convolutions.

Legend: B rows, T tokens, E width of the residual stream, H heads, G KV heads, D head dim, V value dim, C channels, w width of
a convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from hybridize.ops import short_conv
from hybridize.ops.sequences import Sequences
from hybridize.ops.short_conv import ShortConvState

GATE_STD = 0.02
"""Standard deviation of a `half` gate's first weights."""


class OwnStart(nn.Module, ABC):
    """A module that knows its parameters' first values: a checkpoint that lacks them gets these."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Give every parameter its first value."""


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
        if x.dtype == self.weight.dtype:  # torch computes in float32 and rounds once
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        weight = self.weight.to(wide.dtype)
        return nn.functional.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)


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
        gate = 2 * gate if self.kind == "open" else gate
        return o_BTHV * gate.to(o_BTHV.dtype).unflatten(-1, o_BTHV.shape[-2:])


class ShortConv(OwnStart):
    """A depthwise causal convolution of q, k and v over the last w tokens, with weights `[C, w]` for each of the three.

    At first every token keeps its own value (last tap 1, the others 0), so that a converted layer starts from the teacher's
    projections. For the same reason no activation follows: the layers that are trained from scratch with a convolution (GDN,
    GLA, Mamba-2) put a SiLU behind it, which no choice of weights makes an identity. HypeNet's own layers have neither.
    """

    def __init__(self, q_channels: int, kv_channels: int, width: int) -> None:
        super().__init__()
        self.q_weight = nn.Parameter(torch.empty(q_channels, width))
        self.k_weight = nn.Parameter(torch.empty(kv_channels, width))
        self.v_weight = nn.Parameter(torch.empty(kv_channels, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in self.parameters():
            weight.zero_()
            weight[:, -1] = 1

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        state: ShortConvState | None = None,
        keep_state: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, ShortConvState | None]:
        """q, k and v after the convolution and, with `keep_state`, the state after the last token: one for all three, q's
        channels first, then k's and v's."""
        qkv = q_BTHD, k_BTGD, v_BTGV
        x_BTC = torch.cat([x.flatten(2) for x in qkv], 2)
        weight_Cw = torch.cat([self.q_weight, self.k_weight, self.v_weight])
        y_BTC, after, _ = short_conv.forward(
            x_BTC, weight_Cw, sequences=sequences, state=state, return_state=keep_state
        )
        parts = y_BTC.split([x.shape[2] * x.shape[3] for x in qkv], 2)
        q, k, v = (y.unflatten(2, x.shape[2:]).to(x.dtype) for x, y in zip(qkv, parts, strict=True))
        return q, k, v, after
