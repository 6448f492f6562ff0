"""Kimi Delta Attention: the gated delta rule whose key channels each fade by their own factor (arXiv 2510.26692, Eq. 1).

    S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t ,   o_t = q_t S_t / sqrt(D)
    g_t = -exp(A_log) softplus(W2 W1 x_t + b) ,   beta_t = sigmoid(U x_t)

beta stays below 1, as in its paper; q and k have length 1 a head whatever `qk_norm` does (see `gdn`). No convolution unless the spec asks, no SiLU.
HypeNet's authors report (arXiv 2601.22156, appendix G.2) that their distillation of it diverged.

Legend: B rows, T tokens, E width, H query heads of the group, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hybridize.mixers.recurrent import (
    Control,
    Operands,
    RecurrentMixer,
    decay_rate,
    first_A_log,
    first_dt_bias,
    first_low_rank,
    first_weight,
    l2_normalised,
    linear,
)
from hybridize.mixers.types import GroupShape
from hybridize.ops import delta
from hybridize.spec import GroupSpec


class KdaControl(Control):
    """`down` [D, E] and `up` [H D, D] (the low rank is the head dim), `dt_bias` [H, D], `A_log` [H], `beta_weight` [H, E].

    At first A is uniform in 1 .. 16 and the softplus log-uniform in 0.001 .. 0.1; beta is about 0.5.
    """

    down: Tensor
    up: Tensor
    dt_bias: Tensor
    A_log: Tensor
    beta_weight: Tensor

    def first(self, generator: torch.Generator) -> dict[str, Tensor]:
        heads, dim, width = self.shape.heads, self.shape.head_dim, self.shape.hidden
        down, up = first_low_rank(generator, heads * dim, dim, width)
        return {
            "down": down,
            "up": up,
            "dt_bias": first_dt_bias(generator, heads, dim),
            "A_log": first_A_log(generator, heads, 1),
            "beta_weight": first_weight(generator, heads, width),
        }

    def gates(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """g `[B, T, H, D]` and beta `[B, T, H]`."""
        step_BTHD = linear(linear(x_BTE, self.down), self.up).unflatten(-1, self.dt_bias.shape)
        g_BTHD = decay_rate(self.A_log[:, None], softplus(step_BTHD + self.dt_bias))
        return g_BTHD, torch.sigmoid(linear(x_BTE, self.beta_weight))


class KdaMixer(RecurrentMixer):
    operation = delta

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        self.scale = shape.head_dim**-0.5
        self.control = KdaControl(shape)

    def operands(self, q_BTHD: Tensor, k_BTHD: Tensor, x_BTE: Tensor | None) -> Operands:
        return Operands((l2_normalised(q_BTHD), l2_normalised(k_BTHD)), self.control(x_BTE))
