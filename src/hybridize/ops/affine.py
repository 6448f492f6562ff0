"""Chunks as affine maps: every recurrence that is linear in the state and in the values is one, once a chunk is summed up.

For a chunk that starts from the state S and holds the values v: o = A v + R S, and the state after it is W^T v + P S.

Legend: M chunks, C slots of a chunk, H heads, D, V state dims, N sequences, Q chosen queries, m chunks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridize.ops.grid import Grid
from hybridize.ops.walk import walk


class Affine(NamedTuple):
    """The four maps of each chunk."""

    A_MHCC: Tensor
    R_MHCD: Tensor
    W_MHCD: Tensor
    P_MHDD: Tensor


def attend(grid: Grid, maps: Affine, v_MHCV: Tensor, S_NHDV: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[M, H, C, V]` and the states `[N, H, D, V]` after the last chunk."""
    written = maps.W_MHCD.transpose(-1, -2) @ v_MHCV
    entering, final = walk(grid, S_NHDV, lambda S, P, kv: P @ S + kv, maps.P_MHDD, written)
    return maps.A_MHCC @ v_MHCV + maps.R_MHCD @ entering, final


def coefficients(maps: Affine, rows: int, length: int, queries: slice) -> Tensor:
    """`A_BHQS` of the chosen queries over the `length` tokens of `rows` dense rows that start from nothing.

    Each query's row R is taken back through the chunks before its own: what it reads there is R W^T. Memory Q x S.
    """
    chunk = maps.A_MHCC.shape[-1]
    shape = (rows, maps.A_MHCC.shape[0] // max(rows, 1))
    A, R, W, P = (x.unflatten(0, shape).transpose(1, 2) for x in maps)  # [B, H, m, ...]
    t = torch.arange(length, device=A.device)[queries]
    own, slot = t // chunk, t % chunk
    A_BHQC, R_BHQD = A[:, :, own, slot], R[:, :, own, slot]
    reads, blocks = torch.zeros_like(R_BHQD), []
    for m in reversed(range(A.shape[2])):
        here = (own == m)[:, None]
        blocks.append(torch.where(here, A_BHQC, reads @ W[:, :, m].transpose(-1, -2)))
        reads = torch.where(here, R_BHQD, reads @ P[:, :, m])
    return torch.cat(blocks[::-1], -1)[..., :length]
