"""Losses inside attention layers: outputs and weights of a student's attention against its teacher's.

Shapes: B batch, T tokens, H heads, V value dim, Q a tile of queries, S keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.losses.precision import wide


def output_mse(
    student_BTHV: Tensor, teacher_BTHV: Tensor, mask_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean squared error of attention outputs, and the same over the teacher's variance.

    Both are means over B, T, H, V of the counted tokens (`mask_BT` true; all tokens without a mask) and 0 where no
    token counts. The variance is taken over the counted tokens, channel by channel: a normalised error of 1 is what the
    best constant output would reach, whatever the layer's scale. LoLCATs (arXiv 2410.10254), Eq. 5; the trailing axes
    may also be one width axis.

    Raises:
        ValueError: the shapes differ.
    """
    if student_BTHV.shape != teacher_BTHV.shape:
        raise ValueError(
            f"student has shape {tuple(student_BTHV.shape)} and teacher {tuple(teacher_BTHV.shape)}: they must be equal"
        )
    student, teacher = wide(student_BTHV), wide(teacher_BTHV)
    tokens = student.shape[:2]
    keep = torch.ones(tokens, dtype=torch.bool, device=student.device) if mask_BT is None else mask_BT.bool()
    if keep.shape != tokens:
        raise ValueError(f"mask has shape {tuple(keep.shape)}: expected {tuple(tokens)}")
    keep = keep.reshape(*tokens, *[1] * (student.dim() - 2))
    count = keep.sum().clamp(min=1)
    # masked_fill and not a product: a masked token may hold NaN or infinity
    channels = student[0, 0].numel()
    error = (student - teacher).masked_fill(~keep, 0).square().sum()
    centre = teacher.masked_fill(~keep, 0).sum((0, 1), keepdim=True) / count
    spread = (teacher - centre).masked_fill(~keep, 0).square().sum()
    mse, variance = error / (count * channels), spread / (count * channels)
    return mse, mse / variance.clamp(min=1e-12)


def weight_cross_entropy(
    teacher_weights_BHQS: Tensor, student_weights_BHQS: Tensor, clamp: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Cross-entropy between attention weights in nats, and the same less the teacher's entropy (the KL divergence).

    `-sum_i A_ti ln max(A'_ti, clamp)`, mean over the rows B, H, Q of one tile of queries. Keys a query cannot see hold 0
    in both tensors and contribute nothing. LoLCATs (arXiv 2410.10254), appendix A.3; Hedgehog (arXiv 2402.04347).

    Raises:
        ValueError: the shapes differ.
    """
    if teacher_weights_BHQS.shape != student_weights_BHQS.shape:
        raise ValueError(
            f"teacher weights have shape {tuple(teacher_weights_BHQS.shape)} and student weights"
            f" {tuple(student_weights_BHQS.shape)}: they must be equal"
        )
    teacher, student = wide(teacher_weights_BHQS), wide(student_weights_BHQS)
    cross = -(teacher * student.clamp(min=clamp).log()).sum()
    divergence = cross + torch.xlogy(teacher, teacher).sum()
    rows = max(1, teacher_weights_BHQS.shape[:-1].numel())
    return cross / rows, divergence / rows


def tiled_weight_cross_entropy(
    weights: Callable[[Any], tuple[Tensor, Tensor]],
    tiles: Sequence[Any],
    learnt: Sequence[Tensor],
    *,
    counted: Callable[[Any], Tensor] | None = None,
    clamp: float = 1e-12,
) -> Tensor:
    """The cross-entropy of `weight_cross_entropy`, summed over all queries, one tile of them in memory at a time.

    The gradients are formed while a tile's weights exist: nothing of a tile's size outlives it and nothing is computed
    twice.

    Args:
        weights: the teacher's and the student's weights `[B, H, Q, S]` of a tile; B, Q and S may differ from tile to tile.
            The teacher gets no gradient.
        tiles: what `weights` takes; together they hold every query once.
        learnt: every tensor that the gradient shall reach; whatever else the student's weights come from is a constant.
        counted: which queries of a tile count, a bool that broadcasts to `[B, H, Q]`; by default all.
        clamp: the lower bound of the student's weights in the logarithm.
    """
    if not tiles:
        raise ValueError("tiles is empty: give at least one tile of queries")

    def one_tile(tile: Any) -> Tensor:
        teacher, student = weights(tile)
        cross_BHQ: Tensor = _TileCross.apply(wide(teacher), wide(student), clamp)
        return (cross_BHQ if counted is None else cross_BHQ.masked_fill(~counted(tile), 0)).sum()

    total: Tensor = _TiledSum.apply(one_tile, tiles, torch.is_grad_enabled(), *learnt)
    return total


class _TileCross(torch.autograd.Function):
    """-sum_i A_i ln max(A'_i, clamp) `[B, H, Q]`; keeps its gradient -A_i / A'_i alone of what has a tile's size."""

    @staticmethod
    def forward(ctx, teacher_BHQS, student_BHQS, clamp):  # type: ignore[no-untyped-def]
        bounded = student_BHQS.clamp(min=clamp)
        if ctx.needs_input_grad[1]:
            gradient = (teacher_BHQS / bounded).masked_fill_(student_BHQS < clamp, 0)
            ctx.save_for_backward(gradient)
        return -bounded.log_().mul_(teacher_BHQS).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHQ):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return None, gradient * -grad_BHQ[..., None], None


class _TiledSum(torch.autograd.Function):
    """Sum of `one_tile` over the tiles, which uses the very tensors in `learnt`."""

    @staticmethod
    def forward(ctx, one_tile, tiles, learn, *learnt):  # type: ignore[no-untyped-def]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need and learn]
        gradients: list[Tensor | None] = [None] * len(learnt)
        sums = []
        for tile in tiles:
            with torch.set_grad_enabled(bool(wanted)):
                tile_sum = one_tile(tile)
            sums.append(tile_sum.detach())
            if tile_sum.requires_grad:
                parts = torch.autograd.grad(tile_sum, [learnt[i] for i in wanted], allow_unused=True)
                for i, part in zip(wanted, parts, strict=True):
                    gradients[i] = _plus(gradients[i], part)
        ctx.save_for_backward(*gradients)
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, None, None, *(None if x is None else (x * grad).to(x.dtype) for x in ctx.saved_tensors)


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total + part
