"""Mamba-2: every head fades by one factor a token, and the same step scales what it writes (arXiv 2405.21060).

    S_t = exp(A dt_t) S_{t-1} + dt_t k_t^T v_t ,   o_t = q_t S_t + D v_t ,   dt_t = softplus(W x_t + b) ,   A < 0

The multi-head form of HypeNet (arXiv 2601.22156, appendix G.1): q is Mamba-2's C, k its B and v its x, with as many heads of
each, so that a teacher's projections carry over; the original shares B and C among heads. No convolution unless the spec asks, no scale on q k.

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
    linear,
)
from hybridize.mixers.types import GroupShape
from hybridize.ops import decay
from hybridize.spec import GroupSpec


class Mamba2Control(Control):
    """`dt_weight` [H, E], `dt_bias` [H], `A_log` [H] (A is its exponential, negated), `D` [H] of the skip.

    At first, as Mamba-2: A uniform in 1 .. 16, dt log-uniform in 0.001 .. 0.1, D 1.
    """

    dt_weight: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor

    def first(self, generator: torch.Generator) -> dict[str, Tensor]:
        heads, width = self.shape.heads, self.shape.hidden
        return {
            "dt_weight": first_weight(generator, heads, width),
            "dt_bias": first_dt_bias(generator, heads),
            "A_log": first_A_log(generator, heads, 1),
            "D": torch.ones(heads, dtype=torch.float32, device="cpu"),
        }

    def gates(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """A dt and dt `[B, T, H]`."""
        dt_BTH = softplus(linear(x_BTE, self.dt_weight) + self.dt_bias)
        return decay_rate(self.A_log, dt_BTH), dt_BTH


class Mamba2Mixer(RecurrentMixer):
    operation = decay
    scale = 1.0

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        self.control = Mamba2Control(shape)

    def operands(self, q_BTHD: Tensor, k_BTHD: Tensor, x_BTE: Tensor | None) -> Operands:
        log_BTH, dt_BTH = self.control(x_BTE)
        # back in k's dtype: kernels take one dtype for q, k and v
        written_BTHD = (k_BTHD * dt_BTH[..., None]).to(k_BTHD.dtype)
        return Operands((q_BTHD, written_BTHD), (log_BTH,), own=self.control.D)
