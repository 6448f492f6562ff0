"""Chunked decaying attention: linear cost and memory, eager, CPU and GPU.

Inside a chunk, weights; between chunks, the state. Exponents are sums of log decays over some tokens, so none is
positive. They come as differences of cumulative sums over one chunk: in float32 an exponent is off by up to 2^-24 of
the chunk's whole sum, about 2e-4 where every token decays by e^-50.

Legend: P tokens, N sequences, M chunks of all sequences, C chunk length, H query heads, G KV heads, D head dim, V value
dim, X decays of a head and token: 1 or D; n blocks of b tokens each, C = n b.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridize.ops.decay.state import DecayState, empty_decay
from hybridize.ops.grid import Grid, get_grid
from hybridize.ops.sequences import Sequences
from hybridize.ops.slabs import in_slabs
from hybridize.ops.types import Result, compute_dtype
from hybridize.ops.walk import walk

CHUNK = 64


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_decay: Tensor,
    sequences: Sequences,
    state: DecayState | None,
    return_state: bool,
    *,
    scale: float,
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
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    state = state or empty_decay(len(sequences), heads, q.shape[-1], v.shape[-1], dtype, q.device)
    weigh = {1: _fixed, 3: _scalar, 4: _vector}[log_decay.dim()]
    weight_MHCC, G_MHCX = weigh(grid, q * scale, k, log_decay.to(dtype))
    total_MH1X = G_MHCX[:, :, -1:]
    kv_MHDV = (k * (total_MH1X - G_MHCX).exp()).mT @ v
    entering_MHDV, final_NHDV = walk(grid, state.S_NHDV, _advance, total_MH1X.exp().mT, kv_MHDV)
    o = weight_MHCC @ v + (q * (scale * G_MHCX.exp())) @ entering_MHDV
    o = grid.gather(o).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o)
    return Result(o, DecayState(lengths_N=state.lengths_N + sequences.tensor("lengths"), S_NHDV=final_NHDV))


def _advance(S_nHDV: Tensor, decay_nHX1: Tensor, kv_nHDV: Tensor) -> Tensor:
    return decay_nHX1 * S_nHDV + kv_nHDV


def _fixed(grid: Grid, q_MHCD: Tensor, k_MHCD: Tensor, log_H: Tensor) -> tuple[Tensor, Tensor]:
    """`weight_MHCC` of each value for each query of its chunk, and `G_MHC1`: log decays summed from the chunk's start up
    to and including each token. Here every chunk shares the decays between its tokens."""
    t = torch.arange(grid.chunk, device=log_H.device)
    lag_CC = t[:, None] - t
    decay_HCC = (log_H[:, None, None] * lag_CC).masked_fill(lag_CC < 0, -torch.inf).exp()
    tokens_MC = grid.foldable_MK(False).cumsum(1)
    return (q_MHCD @ k_MHCD.mT) * decay_HCC, (log_H[:, None] * tokens_MC[:, None])[..., None]


def _scalar(grid: Grid, q_MHCD: Tensor, k_MHCD: Tensor, log_BTH: Tensor) -> tuple[Tensor, Tensor]:
    """The same where each head and token has its own decay."""
    G_MHC1 = grid.lay_queries(log_BTH.flatten(0, 1)[..., None]).cumsum(2)
    hidden_CC = torch.ones(grid.chunk, grid.chunk, dtype=torch.bool, device=q_MHCD.device).triu(1)
    # masked before exp: above the diagonal the differences are positive
    decay_MHCC = (G_MHC1 - G_MHC1.mT).masked_fill(hidden_CC, -torch.inf).exp()
    return (q_MHCD @ k_MHCD.mT) * decay_MHCC, G_MHC1


def _vector(grid: Grid, q_MHCD: Tensor, k_MHCD: Tensor, log_BTHD: Tensor) -> tuple[Tensor, Tensor]:
    """The same where each channel of the keys has its own decay, with `G_MHCD`.

    Blocks of 1 token are joined to blocks of 2, of 4, and so on: the second half's queries meet the first half's keys
    at the border between them, where keys have decayed from their place and queries decay from there.
    """
    G_MHCD = grid.lay_queries(log_BTHD.flatten(0, 1)).cumsum(2)
    weight_MHnbb = (q_MHCD * k_MHCD).sum(-1)[..., None, None]
    while (size := weight_MHnbb.shape[-1]) < grid.chunk:
        # [M, H, n / 2, b, D] each: the halves of blocks of 2 b
        (_, q), (k, _), (G_k, G_q) = (
            x.unflatten(2, (-1, 2, size)).unbind(3) for x in (q_MHCD, k_MHCD, G_MHCD)
        )
        border = G_k[..., -1:, :]
        cross = (q * (G_q - border).exp()) @ (k * (border - G_k).exp()).mT
        first, second = weight_MHnbb.unflatten(2, (-1, 2)).unbind(3)
        weight_MHnbb = torch.cat([pad(first, (0, size)), torch.cat([cross, second], -1)], -2)
    return weight_MHnbb.squeeze(2), G_MHCD


def step(
    q_B1HD: Tensor, k_B1GD: Tensor, v_B1GV: Tensor, log_decay: Tensor, state: DecayState, *, scale: float
) -> Result:
    """One token a row."""
    dtype, heads = compute_dtype(q_B1HD), q_B1HD.shape[2]
    q, k, v = (x[:, 0].to(dtype) for x in (q_B1HD, k_B1GD, v_B1GV))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    decay = log_decay.to(dtype).exp()
    decay = decay if decay.dim() == 1 else decay[:, 0]
    decay_HX = decay if decay.dim() == 3 else decay[..., None]  # with rows in front unless it is fixed
    S = decay_HX[..., None] * state.S_NHDV + k[..., None] * v[:, :, None]
    o = (scale * q[:, :, None] @ S).transpose(1, 2)
    return Result(o.to(v_B1GV.dtype), DecayState(lengths_N=state.lengths_N + 1, S_NHDV=S))
