"""Softmax attention: full, or over a window with sinks; causal, grouped heads, optional score cap."""

from hybridize.ops.softmax.api import coefficients, forward, step
from hybridize.ops.softmax.state import KVState

__all__ = ["KVState", "coefficients", "forward", "step"]
