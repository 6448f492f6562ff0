"""Decayed products of the tokens of a chunk, without ever exponentiating a positive number or subtracting two sums.

The weight of token j for token i is x_i Diag(exp(g_{j+1} + ... + g_i)) y_j. Written as (x_i exp(G_i)) (y_j exp(-G_j)) with
running sums G it overflows under strong decay, and as exp(G_i - G_j) it loses the digits that the sums share. Here each
exponent is a sum of the g between j and i alone.

Legend: M chunks, H heads, C slots of a chunk, D key channels, X and Y kinds of vectors that are paired.
"""

from __future__ import annotations

import torch
from torch import Tensor


def from_start(g_MHCD: Tensor) -> Tensor:
    """exp(g_1 + ... + g_i): what is left at slot i of what entered the chunk (or the block)."""
    return g_MHCD.cumsum(-2).exp()


def to_end(g_MHCD: Tensor) -> Tensor:
    """exp(g_{i+1} + ... + g_C): what is left at the end of what slot i wrote."""
    later = torch.cat([g_MHCD[..., 1:, :], torch.zeros_like(g_MHCD[..., :1, :])], -2)
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def between(g_MHCD: Tensor) -> Tensor:
    """`[M, H, C, C, D]` exp(g_{j+1} + ... + g_i) for i >= j, zero above the diagonal."""
    size = g_MHCD.shape[-2]
    i = torch.arange(size, device=g_MHCD.device)
    after = (i[:, None] > i)[:, :, None]
    sums = torch.where(after, g_MHCD[..., :, None, :], 0).cumsum(-3)
    return sums.masked_fill((i[:, None] < i)[:, :, None], -torch.inf).exp()


def pair_weights(x_XMHCD: Tensor, y_YMHCD: Tensor, g_MHCD: Tensor) -> Tensor:
    """`[X, Y, M, H, C, C]` weights of y_j for x_i, zero for j > i; g has a channel of its own for each d, or one for all.

    One for all: every pair has its decay. Otherwise blocks of one token are joined to blocks of two, of four, and so on, and
    decays are split where two blocks meet; C is a power of two.
    """
    if g_MHCD.shape[-1] == 1:
        return torch.einsum("xmhid,ymhjd->xymhij", x_XMHCD, y_YMHCD) * between(g_MHCD).squeeze(-1)
    weights = torch.einsum("xmhid,ymhid->xymhi", x_XMHCD, y_YMHCD)[..., None, None]
    while (size := weights.shape[-1]) < g_MHCD.shape[-2]:
        weights = _join(weights, *(z.unflatten(-2, (-1, 2, size)) for z in (x_XMHCD, y_YMHCD, g_MHCD)))
    return weights.squeeze(-3)


def _join(weights: Tensor, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Weights inside blocks of s tokens -> inside blocks of 2s. Every pair across meets at the block's middle."""
    late = x[..., 1, :, :] * from_start(g[..., 1, :, :])
    early = y[..., 0, :, :] * to_end(g[..., 0, :, :])
    across = torch.einsum("xmhnid,ymhnjd->xymhnij", late, early)
    first, second = weights.unflatten(-3, (-1, 2)).unbind(-3)
    upper = torch.cat([first, torch.zeros_like(across)], -1)
    return torch.cat([upper, torch.cat([across, second], -1)], -2)
