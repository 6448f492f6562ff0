"""A softmax window and linear attention over the far past, under a shared or separate normalizers (DESIGN D1-D4)."""

from hybridize.ops.windowed_linear.api import coefficients, forward, step
from hybridize.ops.windowed_linear.mix import Mix, SeparateMix, SharedMix
from hybridize.ops.windowed_linear.state import WindowedLinearState

__all__ = ["Mix", "SeparateMix", "SharedMix", "WindowedLinearState", "coefficients", "forward", "step"]
