"""The near (window softmax) and far (linear) terms of one call on its chunk grid: numerators and denominators.

Shared by the chunked implementations. Everything is float32 (float64 for float64 inputs). Cost and memory grow linearly
with the number of tokens: scores are `[C, K]` a chunk, prefix states `[F, V]` a chunk.

Legend: P tokens, M chunks, C chunk length, K keys of a chunk, s sinks, N sequences, H query heads, G KV heads, J heads of the
key map (H or G), D head dim, F features, V value dim, X query heads of a KV or key-map head times C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.grid import Grid
from hybridize.ops.ring import RingState, sink_keys
from hybridize.ops.types import capped, compute_dtype
from hybridize.windows import Window


@dataclass(frozen=True)
class Terms:
    """`num_PHV` and `den_PH` of one branch, not divided; `shift_PH` is the c that near scores had subtracted."""

    num_PHV: Tensor
    den_PH: Tensor
    shift_PH: Tensor | None = None


def near_terms(
    grid: Grid,
    window: Window,
    q_PHD: Tensor,
    k_PGD: Tensor,
    v_PGV: Tensor,
    laid: tuple[Tensor, Tensor],
    ring: RingState | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Terms:
    """`num = sum_near e^(s - c) v`, `den = sum_near e^(s - c)`, `shift = c = max_near s` (differentiated: DESIGN D2).

    `laid` holds the keys `[M, G, K, D]` and values `[M, G, K, V]` on the grid.
    """
    dtype = compute_dtype(q_PHD)
    k_MGKD, v_MGKV = laid[0].to(dtype), laid[1].to(dtype)
    if window.sinks:
        sink_k, sink_v = sink_keys(grid.sequences, window, k_PGD, v_PGV, ring)
        k_MGKD = torch.cat([k_MGKD, sink_k[grid.row_M].transpose(1, 2).to(dtype)], dim=2)
        v_MGKV = torch.cat([v_MGKV, sink_v[grid.row_M].transpose(1, 2).to(dtype)], dim=2)
    q_MGXD = (grid.lay_queries(q_PHD).to(dtype) * scale).unflatten(1, (k_PGD.shape[1], -1)).flatten(2, 3)
    score_MGXK = q_MGXD @ k_MGKD.transpose(-1, -2)
    score_MGXK = capped(score_MGXK, softcap)
    score = score_MGXK.unflatten(2, (-1, grid.chunk)).masked_fill(grid.hidden_M11CK, -torch.inf)
    c = score.amax(-1, keepdim=True)
    c = c.masked_fill(c == -torch.inf, 0)
    weight = torch.exp(score - c)
    num = (weight.flatten(2, 3) @ v_MGKV).unflatten(2, (-1, grid.chunk))
    # one gather for all three: num, den and c side by side
    together = torch.cat([num, weight.sum(-1, keepdim=True), c], dim=-1).flatten(1, 2)
    num_PHV, den_PH1, shift_PH1 = grid.gather(together).split([num.shape[-1], 1, 1], dim=-1)
    return Terms(num_PHV, den_PH1.squeeze(-1), shift_PH1.squeeze(-1))


def far_terms(
    grid: Grid,
    phi_q_PHF: Tensor,
    phi_k_MJKF: Tensor,
    v_MGKV: Tensor,
    memory: tuple[Tensor, Tensor] | None,
    *,
    everything: bool = False,
) -> Terms:
    """`num = sum_far phi(q) phi(k) v`, `den = sum_far phi(q) phi(k)`.

    `phi_k_MJKF` and `v_MGKV` lie on the grid: of all K keys of a chunk, or of its own C alone (features of missing slots do
    not matter). `memory` (S `[N, J, F, V]`, z `[N, J, F]`) holds the keys folded before the call. Far is what the grid's
    window says; every key <= t without one or with `everything`.
    """
    groups, heads, keys = v_MGKV.shape[1], phi_q_PHF.shape[1], phi_k_MJKF.shape[1]
    width = phi_k_MJKF.shape[2]
    foldable = grid.foldable_MK(everything)[:, grid.keys - width :]
    phi_k_MJKF = phi_k_MJKF.masked_fill(~foldable[:, None, :, None], 0)
    # a column of ones beside v: numerators and denominators come from the same products
    v1_MGKV = torch.cat([v_MGKV, v_MGKV.new_ones(*v_MGKV.shape[:-1], 1)], dim=-1)
    state_MJFV = grid.prefix(_fold_chunks(grid.own(phi_k_MJKF), grid.own(v1_MGKV)))
    if memory is not None:
        state_MJFV = state_MJFV + torch.cat([memory[0], memory[1][..., None]], -1)[grid.row_M]
    phi_q_MJXF = grid.lay_queries(phi_q_PHF).unflatten(1, (keys, heads // keys)).flatten(2, 3)
    sums_MHCV = (phi_q_MJXF @ state_MJFV).unflatten(2, (-1, grid.chunk)).flatten(1, 2)
    if grid.reaches_frame(everything):
        weight_MJXK = phi_q_MJXF @ phi_k_MJKF.transpose(-1, -2)
        weight = weight_MJXK.unflatten(2, (-1, grid.chunk)).masked_fill(grid.not_far_CK(everything), 0)
        weight_MGXK = weight.flatten(1, 2).unflatten(1, (groups, -1)).flatten(2, 3)
        intra = weight_MGXK @ v1_MGKV
        sums_MHCV = sums_MHCV + intra.unflatten(2, (-1, grid.chunk)).flatten(1, 2)
    num_PHV, den_PH1 = grid.gather(sums_MHCV).split([v_MGKV.shape[-1], 1], dim=-1)
    return Terms(num_PHV, den_PH1.squeeze(-1))


def fold(
    grid: Grid, phi_k_MJCF: Tensor, v_MGCV: Tensor, memory: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(S, z) after the call: the memory plus every own key `[.., C, ..]` that has left the window by then."""
    phi = phi_k_MJCF.masked_fill(~grid.leaving_MC[:, None, :, None], 0)
    s = memory[0].index_add(0, grid.row_M, _fold_chunks(phi, v_MGCV))
    z = memory[1].index_add(0, grid.row_M, phi.sum(2))
    return s, z


def _fold_chunks(phi_k_MJCF: Tensor, v_MGCV: Tensor) -> Tensor:
    """sum over a chunk of phi(k) v^T, `[M, J, F, V]`; v is shared by the map heads of a KV head."""
    groups, keys = v_MGCV.shape[1], phi_k_MJCF.shape[1]
    kv = phi_k_MJCF.transpose(-1, -2).unflatten(1, (groups, -1)).flatten(2, 3) @ v_MGCV
    return kv.unflatten(2, (keys // groups, -1)).flatten(1, 2)
