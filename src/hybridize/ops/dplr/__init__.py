"""Diagonal plus low rank, RWKV-7's rule: S_t = Diag(exp(w_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t, o_t = scale r_t S_t."""

from hybridize.ops.dplr.api import DplrState, coefficients, forward, step

__all__ = ["DplrState", "coefficients", "forward", "step"]
