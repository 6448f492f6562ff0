"""Gated DeltaNet: before a head writes a value it takes back a share of what its memory holds under that key (arXiv 2412.06464).

    S_t = exp(g_t) (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t ,   o_t = q_t S_t / sqrt(D)
    g_t = -exp(A_log) softplus(W x_t + b) ,   beta_t = 2 sigmoid(U x_t)

beta reaches 2, so that the memory's eigenvalues lie in (-1, 1): HypeNet (arXiv 2601.22156, Table 15) allows negative ones;
the GDN paper itself stops at sigmoid. q and k have length 1 a head, always: the rule is stable for beta |k|^2 <= 2 only, and an
RMS norm (`qk_norm`) makes |k|^2 = D; its weights still choose among channels. No convolution unless the spec asks, and no SiLU on q, k and v (which
HypeNet's models trained from scratch have): they stay the teacher's.

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
    first_weight,
    l2_normalised,
    linear,
)
from hybridize.mixers.types import GroupShape
from hybridize.ops import delta
from hybridize.spec import GroupSpec


class GdnControl(Control):
    """`dt_weight` and `beta_weight` [H, E], `dt_bias` and `A_log` [H].

    At first A is uniform in 0 .. 16 and the softplus log-uniform in 0.001 .. 0.1; beta is about 1.
    """

    dt_weight: Tensor
    dt_bias: Tensor
    A_log: Tensor
    beta_weight: Tensor

    def first(self, generator: torch.Generator) -> dict[str, Tensor]:
        heads, width = self.shape.heads, self.shape.hidden
        return {
            "dt_weight": first_weight(generator, heads, width),
            "dt_bias": first_dt_bias(generator, heads),
            "A_log": first_A_log(generator, heads, 0),
            "beta_weight": first_weight(generator, heads, width),
        }

    def gates(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """g and beta `[B, T, H]`."""
        g_BTH = decay_rate(self.A_log, softplus(linear(x_BTE, self.dt_weight) + self.dt_bias))
        return g_BTH, 2 * torch.sigmoid(linear(x_BTE, self.beta_weight))


class GdnMixer(RecurrentMixer):
    operation = delta

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        self.scale = shape.head_dim**-0.5
        self.control = GdnControl(shape)

    def operands(self, q_BTHD: Tensor, k_BTHD: Tensor, x_BTE: Tensor | None) -> Operands:
        return Operands((l2_normalised(q_BTHD), l2_normalised(k_BTHD)), self.control(x_BTE))
