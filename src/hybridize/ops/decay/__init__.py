"""Decaying linear attention: S_t = D_t S_{t-1} + k_t^T v_t, o_t = scale q_t S_t (Lightning, GLA, Mamba-2)."""

from hybridize.ops.decay.api import DecayState, coefficients, forward, step

__all__ = ["DecayState", "coefficients", "forward", "step"]
