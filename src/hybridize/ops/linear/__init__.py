"""Linear attention: o_t = phi(q_t) S_t / phi(q_t) z_t, with S and z sums over keys up to and including t."""

from hybridize.ops.linear.api import LinearState, coefficients, forward, step

__all__ = ["LinearState", "coefficients", "forward", "step"]
