"""Tokens moved to other places, each to at most one: the way there and its gradient are both plain gathers.

The backward of indexing would add up, atomically or one by one, every slot that holds the zero row: on CUDA that took
six sevenths of a training step on packed rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridize.ops.ring import stack_sources


def rearrange(x_P: Tensor, index_S: Tensor, back_P: Tensor) -> Tensor:
    """`[S, ...]`: slot s gets `x[index[s]]`, or zeros where `index[s]` is P.

    `back_P` is the way back: token p lies in slot `back[p]`, in none where that is S.
    """
    moved: Tensor = _Rearranged.apply(x_P, index_S, back_P)
    return moved


class _Rearranged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_P: Tensor, index_S: Tensor, back_P: Tensor) -> Tensor:
        ctx.save_for_backward(index_S, back_P)
        return stack_sources(x_P, None).index_select(0, index_S)

    @staticmethod
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None, None]:
        index_S, back_P = ctx.saved_tensors
        return rearrange(grad_S, back_P, index_S), None, None
