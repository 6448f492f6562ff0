"""Where q and k of a head group stand: their positions, and the logit scale on q.

Legend: B rows, T tokens, H query heads, G KV heads, D head dim, P tokens of all sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.positions import log_scale, rope
from hybridize.spec import (
    ConstantScale,
    GroupSpec,
    LogDeclared,
    LogitScale,
    LogLength,
    LogPosition,
    RopeBase,
)

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""q and k turned by the family's own RoPE"""


def place(
    spec: GroupSpec,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    sequences: Sequences,
    rotate: Rotate,
    *,
    rotated: bool,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """One group's q and k with its positions, and q with its logit scale; `rotated`: the teacher's layer has RoPE."""
    q, k = q_BTHD, k_BTGD
    if isinstance(spec.position, RopeBase):
        shape, base = q.shape[:2], spec.position.rope

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = rope.tables(sequences.tensor("position"), q_BTHD.shape[-1], base)
            return cos.unflatten(0, shape), sin.unflatten(0, shape)

        turn = sequences.once(("rope", base), make)
        q, k = rope.rotate(q, *turn), rope.rotate(k, *turn)
    elif spec.position == "rope" or (spec.position is None and rotated):
        q, k = rotate(q, k)
    scale = spec.logit_scale
    if scale is None or (training and scale.when == "inference"):
        return q, k
    factor = sequences.once(("scale", scale), lambda: _factors(scale, sequences.tensor("position")))
    # the factor stays float32: rounded to bf16 it would move every logit of a query by up to 0.4%
    return (q * factor.unflatten(0, q.shape[:2])[..., None, None]).to(q.dtype), k


def _factors(scale: LogitScale, position_P: Tensor) -> Tensor:
    match scale:
        case LogPosition():
            return log_scale.log_position(position_P, scale.base)
        case LogLength():
            return log_scale.log_length(position_P, scale.length)
        case LogDeclared():
            return log_scale.constant(position_P, math.log(scale.declared) / math.log(scale.length))
        case ConstantScale():
            return log_scale.constant(position_P, scale.value)
