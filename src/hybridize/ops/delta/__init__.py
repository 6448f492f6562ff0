"""The gated delta rule: S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t, o_t = scale q_t S_t."""

from hybridize.ops.delta.api import DeltaState, coefficients, forward, step

__all__ = ["DeltaState", "coefficients", "forward", "step"]
