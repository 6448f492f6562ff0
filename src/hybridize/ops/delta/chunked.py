"""The chunked gated delta rule: linear cost and memory, eager, CPU and GPU (Yang et al. 2024, 2025; KDA).

Inside a chunk, what token i writes is u_i = beta_i (v_i - k_i Diag(exp(g_i)) S_{i-1}). With the decayed products of its keys
this is one unit lower triangular system for all u at once, and the rest are matrix products.

Legend: M chunks, C slots of a chunk, H query heads, G KV heads, D key dim, V value dim; g has D channels, or 1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybridize.ops.affine import Affine, attend
from hybridize.ops.affine import coefficients as affine_coefficients
from hybridize.ops.decayed_pairs import from_start, pair_weights, to_end
from hybridize.ops.delta.state import DeltaState
from hybridize.ops.grid import Grid, get_grid
from hybridize.ops.sequences import Sequences
from hybridize.ops.slabs import in_slabs
from hybridize.ops.types import Result, compute_dtype, per_head

CHUNK = 64


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    g: Tensor,
    beta_BTH: Tensor,
    scale: float,
    sequences: Sequences,
    state: DeltaState | None,
    return_state: bool,
) -> Result:
    run = partial(_forward, scale)
    return in_slabs(run, (q_BTHD, k_BTGD, v_BTGV, g, beta_BTH), sequences, state, return_state, CHUNK)


def _forward(
    scale: float,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    g: Tensor,
    beta_BTH: Tensor,
    sequences: Sequences,
    state: DeltaState | None,
    return_state: bool,
) -> Result:
    dtype, heads = compute_dtype(q_BTHD), q_BTHD.shape[2]
    grid = get_grid(sequences, CHUNK, None)
    maps = chunk_maps(grid, q_BTHD, k_BTGD, g, beta_BTH, scale)
    v = grid.lay_keys(v_BTGV.flatten(0, 1)).to(dtype)
    v_MHCV = per_head(v, heads, 1)
    state = state or DeltaState.empty(len(sequences), heads, q_BTHD.shape[3], v.shape[-1], dtype, v.device)
    o, S = attend(grid, maps, v_MHCV, state.S_NHDV.to(dtype))
    o = grid.gather(o).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    return Result(o, state.after(sequences.tensor("lengths"), S))


def chunk_maps(
    grid: Grid, q_BTHD: Tensor, k_BTGD: Tensor, g: Tensor, beta_BTH: Tensor, scale: float
) -> Affine:
    """What each chunk does to its values and to the state that enters it. Empty slots have g, beta and k zero."""
    dtype, heads = compute_dtype(q_BTHD), q_BTHD.shape[2]
    g = g if g.dim() == 4 else g[..., None]

    def lay(x_BTHD: Tensor) -> Tensor:
        return grid.lay_queries(x_BTHD.flatten(0, 1)).to(dtype)

    q, g, beta = scale * lay(q_BTHD), lay(g), lay(beta_BTH[..., None])
    k = per_head(lay(k_BTGD), heads, 1)
    ((A_qk, A_kk),) = pair_weights(torch.stack([q, k]), k[None], g).unbind(1)
    # (1 + tril(beta A_kk, -1)) u = beta (v - (k exp G) S)
    solved = torch.linalg.solve_triangular(
        (beta * A_kk).tril(-1), beta.squeeze(-1).diag_embed(), upper=False, unitriangular=True
    )
    entered = from_start(g)
    A = A_qk @ solved
    W = solved.transpose(-1, -2) @ (k * to_end(g))
    k_entered = k * entered
    kept = entered[..., -1, :].expand(*k.shape[:2], k.shape[-1]).diag_embed()
    return Affine(A, q * entered - A @ k_entered, W, kept - W.transpose(-1, -2) @ k_entered)


def coefficients(
    q_BTHD: Tensor, k_BTGD: Tensor, g: Tensor, beta_BTH: Tensor, rows: slice, scale: float
) -> Tensor:
    """`A_BHQS` of the queries in `rows` over all keys; differentiable, memory Q x S."""
    batch, length = q_BTHD.shape[:2]
    grid = get_grid(Sequences.dense(batch, length, device=q_BTHD.device), CHUNK, None)
    return affine_coefficients(chunk_maps(grid, q_BTHD, k_BTGD, g, beta_BTH, scale), batch, length, rows)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: DeltaState, scale: float) -> Result:
    """q `[B, 1, H, D]`, k `[B, 1, G, D]`, v `[B, 1, G, V]`, g `[B, 1, H]` or `[B, 1, H, D]`, beta `[B, 1, H]`."""
    dtype, heads = compute_dtype(q), q.shape[2]
    q_BHD, g, beta_BH = (x[:, 0].to(dtype) for x in (q, g, beta))
    k_BHD, v_BHV = (per_head(x[:, 0].to(dtype), heads, 1) for x in (k, v))
    decay = g.exp() if g.dim() == 3 else g.exp()[..., None]
    S = decay[..., None] * state.S_NHDV
    held_BHV = (k_BHD[..., None, :] @ S).squeeze(-2)
    S = S + k_BHD[..., None] * (beta_BH[..., None] * (v_BHV - held_BHV))[..., None, :]
    o = (scale * q_BHD[..., None, :] @ S).squeeze(-2).to(v.dtype)[:, None]
    return Result(o, state.after(1, S))
