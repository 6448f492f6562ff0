"""Chunked decaying attention: linear cost and memory, eager, CPU and GPU.

Inside a chunk, weights; between chunks, the state. Exponents are sums of log decays over the tokens between two alone, so
none is positive and a strong decay costs its neighbours no digits.

Legend: P tokens, N sequences, M chunks of all sequences, C chunk length, H query heads, G KV heads, D head dim, V value
dim, X decays of a head and token: 1 or D.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridize.ops.decay.state import DecayState
from hybridize.ops.decayed_pairs import from_start, pair_weights, to_end
from hybridize.ops.grid import Grid, get_grid
from hybridize.ops.sequences import Sequences
from hybridize.ops.slabs import in_slabs
from hybridize.ops.types import Result, compute_dtype, per_head
from hybridize.ops.walk import walk

CHUNK = 64


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_decay: Tensor,
    scale: float,
    sequences: Sequences,
    state: DecayState | None,
    return_state: bool,
) -> Result:
    tensors = q_BTHD, k_BTGD, v_BTGV
    if log_decay.dim() == 1:
        run = partial(_forward_fixed, scale, log_decay)
        return in_slabs(run, tensors, sequences, state, return_state, CHUNK)
    return in_slabs(partial(_forward, scale), (*tensors, log_decay), sequences, state, return_state, CHUNK)


def _forward_fixed(scale: float, log_H: Tensor, q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Result:
    return _forward(scale, q, k, v, log_H, *call)


def _forward(
    scale: float,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_decay: Tensor,
    sequences: Sequences,
    state: DecayState | None,
    return_state: bool,
) -> Result:
    dtype, heads = compute_dtype(q_BTHD), q_BTHD.shape[2]
    grid = get_grid(sequences, CHUNK, None)
    # slots without a token hold zeros: their decay is exp(0), and neither their key nor their value adds anything
    q, k, v = (grid.lay_queries(x.flatten(0, 1)).to(dtype) for x in (q_BTHD, k_BTGD, v_BTGV))
    k, v = (per_head(x, heads, 1) for x in (k, v))
    state = state or DecayState.empty(len(sequences), heads, q.shape[-1], v.shape[-1], dtype, q.device)
    weigh = _fixed if log_decay.dim() == 1 else _given
    # the weights inside a chunk, and what is left: at each token of what entered the chunk, at its end of what a token wrote
    weight_MHCC, entered_MHCX, left_MHCX = weigh(grid, q * scale, k, log_decay.to(dtype))
    kv_MHDV = (k * left_MHCX).mT @ v
    entering_MHDV, final_NHDV = walk(grid, state.S_NHDV, _advance, entered_MHCX[:, :, -1:].mT, kv_MHDV)
    o = weight_MHCC @ v + (q * (scale * entered_MHCX)) @ entering_MHDV
    o = grid.gather(o).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    return Result(o, state.after(sequences.tensor("lengths"), final_NHDV))


def _advance(S_nHDV: Tensor, decay_nHX1: Tensor, kv_nHDV: Tensor) -> Tensor:
    return decay_nHX1 * S_nHDV + kv_nHDV


def _fixed(grid: Grid, q_MHCD: Tensor, k_MHCD: Tensor, log_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Here every chunk shares the decays between its tokens."""
    t = torch.arange(grid.chunk, device=log_H.device)
    lag_CC = t[:, None] - t
    decay_HCC = (log_H[:, None, None] * lag_CC).masked_fill(lag_CC < 0, -torch.inf).exp()
    tokens_MC = grid.foldable_MK(False).cumsum(1)
    entered, left = (
        (log_H[:, None] * n_MC[:, None]).exp() for n_MC in (tokens_MC, tokens_MC[:, -1:] - tokens_MC)
    )
    return (q_MHCD @ k_MHCD.mT) * decay_HCC, entered[..., None], left[..., None]


def _given(grid: Grid, q_MHCD: Tensor, k_MHCD: Tensor, log: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Here each token has decays of its own, for its heads or for their channels."""
    log = log if log.dim() == 4 else log[..., None]
    g_MHCX = grid.lay_queries(log.flatten(0, 1))
    return pair_weights(q_MHCD[None], k_MHCD[None], g_MHCX)[0, 0], from_start(g_MHCX), to_end(g_MHCX)


def step(
    q_B1HD: Tensor, k_B1GD: Tensor, v_B1GV: Tensor, log_decay: Tensor, state: DecayState, scale: float
) -> Result:
    """One token a row."""
    dtype, heads = compute_dtype(q_B1HD), q_B1HD.shape[2]
    q, k, v = q_B1HD[:, 0].to(dtype), *(per_head(x[:, 0], heads, 1) for x in (k_B1GD, v_B1GV))
    decay = log_decay.to(dtype).exp()
    decay = decay if decay.dim() == 1 else decay[:, 0]
    decay_HX = decay if decay.dim() == 3 else decay[..., None]  # with rows in front unless it is fixed
    S = torch.addcmul(decay_HX[..., None] * state.S_NHDV, k[..., None], v[:, :, None])  # in the state's dtype
    o = (scale * q[:, :, None] @ S).transpose(1, 2)
    return Result(o.to(v_B1GV.dtype), state.after(1, S))
