"""Gated linear attention: every key channel fades by its own factor, computed from the token (GLA, arXiv 2312.06635, Eq. 3-4).

    S_t = Diag(alpha_t) S_{t-1} + k_t^T v_t ,   o_t = q_t S_t / sqrt(D) ,   alpha_t = sigmoid(W2 W1 x_t + b)^(1/16)

The teacher's q, k and v, no convolution unless the spec asks; the low rank is 16.

Legend: B rows, T tokens, E width, H query heads of the group, D head dim, R low rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridize.mixers.recurrent import (
    Control,
    Operands,
    RecurrentMixer,
    first_low_rank,
    linear,
    spaced,
)
from hybridize.mixers.types import GroupShape
from hybridize.ops import decay
from hybridize.spec import GroupSpec

RANK = 16
TEMPERATURE = 16
"""The paper's tau: the root of the sigmoid that is the decay, so that forgetting starts slow."""
MEMORY = 2048, 64
"""Tokens after which a head has kept 1/e, for the first and the last head at first."""


class GlaControl(Control):
    """`down` [R, E], `up` [H D, R], `bias` [H, D].

    The memory starts long: without the token's part a head keeps 1/e after 2048 to 64 tokens, heads spaced evenly in the
    logarithm, all channels of a head alike (so that the two of a RoPE pair fade together). The paper's own start, b = 0,
    forgets as much in 23 tokens.
    """

    down: Tensor
    up: Tensor
    bias: Tensor

    def first(self, generator: torch.Generator) -> dict[str, Tensor]:
        heads, dim, width = self.shape.heads, self.shape.head_dim, self.shape.hidden
        down, up = first_low_rank(generator, heads * dim, RANK, width)
        longest, shortest = map(math.log, MEMORY)
        tokens_H = spaced(longest, shortest, heads).exp()
        bias_H = -torch.expm1(TEMPERATURE / tokens_H).log()
        return {"down": down, "up": up, "bias": bias_H[:, None].expand(-1, dim)}

    def gates(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """ln alpha `[B, T, H, D]`."""
        logit_BTHD = linear(linear(x_BTE, self.down), self.up).unflatten(-1, self.bias.shape) + self.bias
        return (logsigmoid(logit_BTHD) / TEMPERATURE,)


class GlaMixer(RecurrentMixer):
    operation = decay

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        self.scale = shape.head_dim**-0.5
        self.control = GlaControl(shape)

    def operands(self, q_BTHD: Tensor, k_BTHD: Tensor, x_BTE: Tensor | None) -> Operands:
        return Operands((q_BTHD, k_BTHD), self.control(x_BTE))
