"""RWKV-7's time mixing: channels fade, and each token first takes back what the memory holds under its removal key
(arXiv 2503.14456, section 4.1).

    S_t = Diag(exp(w_t)) S_{t-1} - (a_t kk_t)^T (kk_t S_{t-1}) + k'_t^T v_t
    o_t = q_t S_t + (sum_d q_td k'_td r_kd) v_t
    w_t = -exp(-1/2) sigmoid(w0 + low rank(x_t)) ,   a_t = sigmoid(a0 + low rank(x_t))
    kk_t = k_t * k_k / |k_t * k_k| ,   k'_t = k_t (1 + (a_t - 1) k_a)

q (the receptance), k and v are the teacher's. Left out of the original: the token shift, the value residual from the first
layer, its output gate (a spec has its own). The bonus for the current token joins before the group's norm, the original adds
it after.

Legend: B rows, T tokens, E width, H query heads of the group, D head dim, R low rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridize.mixers.recurrent import (
    Control,
    Operands,
    RecurrentMixer,
    first_low_rank,
    l2_normalised,
    linear,
    spaced,
)
from hybridize.mixers.types import GroupShape
from hybridize.ops import dplr
from hybridize.ops.types import compute_dtype
from hybridize.spec import GroupSpec

FASTEST = math.exp(-0.5)
"""No channel fades faster than exp(-FASTEST) a token."""


def low_rank(width: int, head_dim: int) -> int:
    """R of both gates: 2.5 sqrt(E) for heads of 64, in steps of 32, as RWKV-7's own models take it."""
    return max(32, 32 * round(2.5 * width**0.5 * head_dim / 64 / 32))


class Rwkv7Control(Control):
    """`w_down` and `a_down` [R, E], `w_up` and `a_up` [H D, R]; `w0`, `a0`, `k_k`, `k_a` and `r_k` [H, D].

    First values as RWKV-7's: decays spread over the channels, slower ones in deeper layers (the slowest keeps 1/e after
    thousands of tokens, the fastest two), in-context rates around 0.45, k_k around 0.7, k_a 1.02, r_k -0.04.
    """

    w_down: Tensor
    w_up: Tensor
    w0: Tensor
    a_down: Tensor
    a_up: Tensor
    a0: Tensor
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor

    def first(self, generator: torch.Generator) -> dict[str, Tensor]:
        heads, dim, width = self.shape.heads, self.shape.head_dim, self.shape.hidden
        depth = self.shape.layer / max(self.shape.layers - 1, 1)
        channels, rank = heads * dim, low_rank(width, dim)
        w_down, w_up = first_low_rank(generator, channels, rank, width)
        a_down, a_up = first_low_rank(generator, channels, rank, width)
        ramp_HD = spaced(0, 1, channels).unflatten(0, (heads, dim))
        inside_D = spaced(-1, 1, dim)
        bend_D = inside_D * inside_D.abs()
        return {
            "w_down": w_down,
            "w_up": w_up,
            "w0": -5.5 + 6 * ramp_HD ** (1 + depth**0.3) + 2.5 * bend_D,
            "a_down": a_down,
            "a_up": a_up,
            "a0": -0.19 + 0.3 * bend_D + 0.4 * (ramp_HD - 0.5),
            "k_k": 0.71 - 0.1 * (ramp_HD - 0.5),
            "k_a": torch.full_like(ramp_HD, 1.02),
            "r_k": torch.full_like(ramp_HD, -0.04),
        }

    def gates(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """The log decay w and the in-context rate a, `[B, T, H, D]`."""
        w_BTHD = linear(torch.tanh(linear(x_BTE, self.w_down)), self.w_up).unflatten(-1, self.w0.shape)
        a_BTHD = linear(linear(x_BTE, self.a_down), self.a_up).unflatten(-1, self.a0.shape)
        return -FASTEST * torch.sigmoid(self.w0 + w_BTHD), torch.sigmoid(self.a0 + a_BTHD)


class Rwkv7Mixer(RecurrentMixer):
    operation = dplr
    scale = 1.0

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        self.control = Rwkv7Control(shape)

    def operands(self, q_BTHD: Tensor, k_BTHD: Tensor, x_BTE: Tensor | None) -> Operands:
        w_BTHD, a_BTHD = self.control(x_BTE)
        q, k = (x.to(compute_dtype(x)) for x in (q_BTHD, k_BTHD))
        kk = l2_normalised(k * self.control.k_k)
        k = k * (1 + (a_BTHD - 1) * self.control.k_a)
        bonus_BTH = (q * k * self.control.r_k).sum(-1)
        # the operation's order around v: r, w, k, v, a, b
        return Operands((q, w_BTHD, k), (-kk, kk * a_BTHD), own=bonus_BTH)
