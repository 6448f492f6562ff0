"""Rotary position embedding with a base of its own (Su et al. 2021), in the layout of the supported families: channel c of the
first half turns with channel c of the second.

Legend: P tokens, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tables(position_P: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin `[P, D]`, float32: channel pair c turns by position * base^(-2c / D)."""
    inverse = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=position_P.device) / dim)
    angle = (position_P.double()[:, None] * inverse).float()
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """x turned by its position, in x's dtype."""
    first, second = x_BTHD.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x_BTHD * cos_BTD[:, :, None].to(x_BTHD.dtype) + turned * sin_BTD[:, :, None].to(x_BTHD.dtype)
