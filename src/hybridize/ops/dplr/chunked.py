"""The chunked diagonal plus low rank rule: linear cost and memory, eager, CPU and GPU (RWKV-7, Peng et al. 2025).

Inside a chunk, what token i reads is c_i = a_i S_{i-1}, a sum over what earlier tokens wrote and read. That is one unit lower
triangular system for all c at once, and the rest are matrix products.

Legend: M chunks, C slots of a chunk, H heads, D key dim, V value dim.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybridize.ops.affine import Affine, attend
from hybridize.ops.affine import coefficients as affine_coefficients
from hybridize.ops.decayed_pairs import from_start, pair_weights, to_end
from hybridize.ops.dplr.state import DplrState
from hybridize.ops.grid import Grid, get_grid
from hybridize.ops.sequences import Sequences
from hybridize.ops.slabs import in_slabs
from hybridize.ops.types import Result, compute_dtype

CHUNK = 64


def forward(
    r_BTHD: Tensor,
    w_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    a_BTHD: Tensor,
    b_BTHD: Tensor,
    scale: float,
    sequences: Sequences,
    state: DplrState | None,
    return_state: bool,
) -> Result:
    tensors = (r_BTHD, w_BTHD, k_BTHD, v_BTHV, a_BTHD, b_BTHD)
    return in_slabs(partial(_forward, scale), tensors, sequences, state, return_state, CHUNK)


def _forward(
    scale: float,
    r_BTHD: Tensor,
    w_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    a_BTHD: Tensor,
    b_BTHD: Tensor,
    sequences: Sequences,
    state: DplrState | None,
    return_state: bool,
) -> Result:
    dtype, (heads, dim) = compute_dtype(r_BTHD), r_BTHD.shape[2:]
    grid = get_grid(sequences, CHUNK, None)
    maps = chunk_maps(grid, r_BTHD, w_BTHD, k_BTHD, a_BTHD, b_BTHD, scale)
    v_MHCV = grid.lay_queries(v_BTHV.flatten(0, 1)).to(dtype)
    state = state or DplrState.empty(len(sequences), heads, dim, v_BTHV.shape[3], dtype, r_BTHD.device)
    o, S = attend(grid, maps, v_MHCV, state.S_NHDV.to(dtype))
    o = grid.gather(o).to(v_BTHV.dtype).unflatten(0, r_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    return Result(o, state.after(sequences.tensor("lengths"), S))


def chunk_maps(
    grid: Grid, r_BTHD: Tensor, w_BTHD: Tensor, k_BTHD: Tensor, a_BTHD: Tensor, b_BTHD: Tensor, scale: float
) -> Affine:
    """What each chunk does to its values and to the state that enters it. Empty slots have w, k, a and b zero."""
    dtype = compute_dtype(r_BTHD)
    r, w, k, a, b = (
        grid.lay_queries(x.flatten(0, 1)).to(dtype) for x in (r_BTHD, w_BTHD, k_BTHD, a_BTHD, b_BTHD)
    )
    r = scale * r
    # a_i reads the state that token i - 1 left: as a query at i - 1 its weights need no decay taken back
    next_a = torch.cat([a[..., 1:, :], torch.zeros_like(a[..., :1, :])], -2)
    weights = pair_weights(torch.stack([r, next_a]), torch.stack([k, b]), w)
    A_rk, A_rb = weights[0].unbind(0)
    A_ak, A_ab = _one_later(weights[1]).unbind(0)
    entered = from_start(w)
    a_entered = a * torch.cat([torch.ones_like(w[..., :1, :]), entered[..., :-1, :]], -2)
    # (1 - A_ab) c = A_ak v + a_entered S
    solved = torch.linalg.solve_triangular(
        -A_ab, torch.cat([A_ak, a_entered], -1), upper=False, unitriangular=True
    )
    c_of_v, c_of_S = solved.split([A_ak.shape[-1], a.shape[-1]], -1)
    left = to_end(w)
    b_left = (b * left).transpose(-1, -2)
    W = k * left + (b_left @ c_of_v).transpose(-1, -2)
    P = entered[..., -1, :].diag_embed() + b_left @ c_of_S
    return Affine(A_rk + A_rb @ c_of_v, r * entered + A_rb @ c_of_S, W, P)


def _one_later(weights: Tensor) -> Tensor:
    """Row i becomes row i + 1; the first row is zero."""
    return torch.cat([torch.zeros_like(weights[..., :1, :]), weights[..., :-1, :]], -2)


def coefficients(
    r_BTHD: Tensor,
    w_BTHD: Tensor,
    k_BTHD: Tensor,
    a_BTHD: Tensor,
    b_BTHD: Tensor,
    rows: slice,
    scale: float,
) -> Tensor:
    """`A_BHQS` of the queries in `rows` over all keys; differentiable, memory Q x S."""
    batch, length = r_BTHD.shape[:2]
    grid = get_grid(Sequences.dense(batch, length, device=r_BTHD.device), CHUNK, None)
    maps = chunk_maps(grid, r_BTHD, w_BTHD, k_BTHD, a_BTHD, b_BTHD, scale)
    return affine_coefficients(maps, batch, length, rows)


def step(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: DplrState, scale: float
) -> Result:
    """r, w, k, a, b `[B, 1, H, D]`, v `[B, 1, H, V]`."""
    dtype = compute_dtype(r)
    r_BHD, w_BHD, k_BHD, v_BHV, a_BHD, b_BHD = (x[:, 0].to(dtype) for x in (r, w, k, v, a, b))
    read_BH1V = a_BHD[..., None, :] @ state.S_NHDV
    S = w_BHD.exp()[..., None] * state.S_NHDV + b_BHD[..., None] * read_BH1V
    S = S + k_BHD[..., None] * v_BHV[..., None, :]
    o = (scale * r_BHD[..., None, :] @ S).squeeze(-2).to(v.dtype)[:, None]
    return Result(o, state.after(1, S))
