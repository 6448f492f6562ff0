"""The near (window softmax) and far (linear) terms of one call on a chunk grid: numerators and denominators.

Shared by the chunked implementations. Everything is float32 (float64 for float64 inputs). Cost and memory grow linearly
with the number of tokens: scores are `[C, 2C]` a chunk, prefix states `[F, V]` a chunk.

Legend: P tokens, M chunks, C chunk length, K keys of a chunk (C, or 2C with the chunk before), s sinks, N sequences,
H query heads, G KV heads, R = H/G, J heads of the key map (H or G), D head dim, F features, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridize.ops.ring import RingState, sink_keys, stack_sources
from hybridize.ops.sequences import Grid, Sequences
from hybridize.ops.types import compute_dtype
from hybridize.windows import Window


@dataclass(frozen=True)
class Terms:
    """`num_PHV` and `den_PH` of one branch, not divided; `shift_PH` is the c that near scores had subtracted."""

    num_PHV: Tensor
    den_PH: Tensor
    shift_PH: Tensor | None = None


class Chunks:
    """The call's tensors laid on its grid. `back` adds each chunk's predecessor to its keys."""

    def __init__(self, sequences: Sequences, grid: Grid, back: bool) -> None:
        self.sequences, self.grid, self.back = sequences, grid, back
        device = sequences.device
        c = grid.chunk
        self.t_C1 = torch.arange(c, device=device)[:, None] + (c if back else 0)
        self.i_1K = torch.arange(2 * c if back else c, device=device)[None, :]

    def lay(self, x_PHD: Tensor, ring_NRHD: Tensor | None = None) -> Tensor:
        """`[M, H, C, D]` of new tokens (and ring slots, for keys and values); missing positions are zero."""
        if self.grid.source_X is None:
            laid = x_PHD
        elif ring_NRHD is None:
            laid = stack_sources(x_PHD, None).index_select(0, self.grid.source_X.clamp_max(x_PHD.shape[0]))
        else:
            laid = stack_sources(x_PHD, ring_NRHD).index_select(0, self.grid.source_X)
        return laid.unflatten(0, (self.grid.chunks, self.grid.chunk)).transpose(1, 2)

    def with_previous(self, x: Tensor, axis: int) -> Tensor:
        """Each chunk's slots preceded by those of the chunk before (zeros before the first) along `axis`."""
        if not self.back:
            return x
        return torch.cat([self.shift(x, 1), x], dim=axis)

    def shift(self, x_M: Tensor, by: int) -> Tensor:
        """Chunk m gets chunk m - by of the same sequence; zeros where there is none."""
        if x_M.shape[0] == 0:
            return x_M
        shifted = torch.cat([x_M.new_zeros(min(by, x_M.shape[0]), *x_M.shape[1:]), x_M[:-by]])
        if self.grid.rows == 1:
            return shifted
        outside = (self.grid.index_M < by).view(-1, *(1,) * (x_M.dim() - 1))
        return shifted.masked_fill(outside, 0)

    def key_mask(self, mask_MC: Tensor | None) -> Tensor | None:
        """`[M, 1, K]` of a per-slot mask; None stays None only where no slot can be missing."""
        if mask_MC is None and not self.back:
            return None
        if mask_MC is None:
            mask_MC = torch.ones(
                self.grid.chunks, self.grid.chunk, dtype=torch.bool, device=self.sequences.device
            )
        return self.with_previous(mask_MC, axis=1)[:, None, :]

    def gather(self, x_MHCV: Tensor) -> Tensor:
        """Back to tokens: `[P, H, ...]` of `[M, H, C, ...]`."""
        flat = x_MHCV.transpose(1, 2).flatten(0, 1)
        return flat if self.grid.source_X is None else flat.index_select(0, self.grid.token_P)

    def prefix(self, x_M: Tensor, lag: int) -> Tensor:
        """Sum over the chunks 0 .. m - lag of chunk m's own sequence."""
        grid = self.grid
        if grid.even and grid.rows:
            total = x_M.unflatten(0, (grid.rows, grid.most_chunks)).cumsum(1).flatten(0, 1)
        else:
            total, by = x_M, 1
            while (
                by < grid.most_chunks
            ):  # doubling: exact per sequence, no sum ever crosses a sequence's start
                total = total + self.shift(total, by)
                by *= 2
        return self.shift(total, lag)


def near_terms(
    chunks: Chunks,
    window: Window,
    q_PHD: Tensor,
    k_PGD: Tensor,
    v_PGV: Tensor,
    ring: RingState | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Terms:
    """`num = sum_near e^(s - c) v`, `den = sum_near e^(s - c)`, `shift = c = max_near s` (differentiated: DESIGN D2)."""
    grid = chunks.grid
    dtype = compute_dtype(q_PHD)
    groups = k_PGD.shape[1]
    q_MGXD = (chunks.lay(q_PHD).to(dtype) * scale).unflatten(1, (groups, -1)).flatten(2, 3)
    k_MGKD = chunks.with_previous(chunks.lay(k_PGD, ring.k_NRGD if ring else None).to(dtype), axis=2)
    v_MGKV = chunks.with_previous(chunks.lay(v_PGV, ring.v_NRGV if ring else None).to(dtype), axis=2)
    # inside the grid the window alone decides: sinks come as columns of their own, below
    near_MCK = replace(window, sinks=0).near(chunks.t_C1, chunks.i_1K)[None]
    valid_MC = grid.valid_MC
    if window.sinks:
        position_MC = grid.start_M[:, None] + torch.arange(grid.chunk, device=q_PHD.device)
        outside_sinks = position_MC >= window.sinks
        valid_MC = outside_sinks if valid_MC is None else valid_MC & outside_sinks
    valid_M1K = chunks.key_mask(valid_MC)
    if valid_M1K is not None:
        near_MCK = near_MCK & valid_M1K
    if window.sinks:
        sink_k, sink_v = sink_keys(chunks.sequences, window, k_PGD, v_PGV, ring)
        k_MGKD = torch.cat([k_MGKD, sink_k[grid.row_M].transpose(1, 2).to(dtype)], dim=2)
        v_MGKV = torch.cat([v_MGKV, sink_v[grid.row_M].transpose(1, 2).to(dtype)], dim=2)
        t_MC1 = (grid.start_M[:, None] + torch.arange(grid.chunk, device=q_PHD.device))[:, :, None]
        causal = torch.arange(window.sinks, device=q_PHD.device) <= t_MC1
        near_MCK = torch.cat([near_MCK.expand(grid.chunks, -1, -1), causal], dim=2)
    score_MGXK = q_MGXD @ k_MGKD.transpose(-1, -2)
    if softcap is not None:
        score_MGXK = softcap * torch.tanh(score_MGXK / softcap)
    score = score_MGXK.unflatten(2, (-1, grid.chunk)).masked_fill(~near_MCK[:, None, None], -torch.inf)
    c = score.amax(-1, keepdim=True)
    c = c.masked_fill(c == -torch.inf, 0)
    weight = torch.exp(score - c)
    num = weight.flatten(2, 3) @ v_MGKV
    num_PHV = chunks.gather(num.unflatten(2, (-1, grid.chunk)).flatten(1, 2))
    den_PH = chunks.gather(weight.sum(-1).flatten(1, 2))
    return Terms(num_PHV, den_PH, chunks.gather(c.squeeze(-1).flatten(1, 2)))


def far_terms(
    chunks: Chunks,
    window: Window | None,
    phi_q_PHF: Tensor,
    phi_k_MJCF: Tensor,
    v_MGCV: Tensor,
    memory: tuple[Tensor, Tensor] | None,
    *,
    everything: bool = False,
) -> Terms:
    """`num = sum_far phi(q) phi(k) v`, `den = sum_far phi(q) phi(k)`.

    `phi_k_MJCF`, `v_MGCV` lie on the grid (features of missing slots do not matter). `memory` (S `[N, J, F, V]`,
    z `[N, J, F]`) holds the keys folded before the call. Far is what `window` says; every key <= t where `window` is None
    or with `everything`.
    """
    grid = chunks.grid
    groups, heads, keys = v_MGCV.shape[1], phi_q_PHF.shape[1], phi_k_MJCF.shape[1]
    folded = _folded_slots(grid, window, everything)
    if folded is not None:
        phi_k_MJCF = phi_k_MJCF * folded[:, None, :, None]
    lag = 2 if chunks.back else 1
    # chunk sums and their prefix: one state [F, V] a chunk and key-map head
    kv = phi_k_MJCF.transpose(-1, -2).unflatten(1, (groups, -1)).flatten(2, 3) @ v_MGCV  # [M, G, (J/G) F, V]
    kv_MJFV = kv.unflatten(2, (keys // groups, -1)).flatten(1, 2)
    s_MJFV = chunks.prefix(kv_MJFV, lag)
    z_MJF = chunks.prefix(phi_k_MJCF.sum(2), lag)
    if memory is not None:
        s_MJFV = s_MJFV + memory[0][grid.row_M]
        z_MJF = z_MJF + memory[1][grid.row_M]
    phi_q_MJXF = chunks.lay(phi_q_PHF).unflatten(1, (keys, heads // keys)).flatten(2, 3)  # X = (H/J) C
    num_MHCV = (phi_q_MJXF @ s_MJFV).unflatten(2, (-1, grid.chunk)).flatten(1, 2)
    den_MHC = (phi_q_MJXF @ z_MJF[..., None]).squeeze(-1).unflatten(2, (-1, grid.chunk)).flatten(1, 2)
    inside = (
        None if window is None or everything else replace(window, sinks=0)
    )  # sink slots are zeroed already
    far_CK = chunks.i_1K <= chunks.t_C1 if inside is None else inside.far(chunks.t_C1, chunks.i_1K)
    if inside is None or not _only_near(inside, grid.chunk):
        weight_MJXK = phi_q_MJXF @ chunks.with_previous(phi_k_MJCF, axis=2).transpose(-1, -2)
        weight = weight_MJXK.unflatten(2, (-1, grid.chunk)) * far_CK
        weight_MGXK = weight.flatten(1, 2).unflatten(1, (groups, -1)).flatten(2, 3)
        intra = weight_MGXK @ chunks.with_previous(v_MGCV, axis=2)
        num_MHCV = num_MHCV + intra.unflatten(2, (-1, grid.chunk)).flatten(1, 2)
        den_MHC = den_MHC + weight.flatten(1, 2).sum(-1)
    return Terms(chunks.gather(num_MHCV), chunks.gather(den_MHC))


def _only_near(window: Window, chunk: int) -> bool:
    """Whether a chunk and the one before hold no far key: so for a terraced window of exactly one chunk."""
    return window.kind == "terraced" and not window.overlap and chunk == window.size


def _folded_slots(grid: Grid, window: Window | None, everything: bool) -> Tensor | None:
    """Which slots enter far sums: those whose key the memory does not hold yet; sinks only with `everything`."""
    if window is None or window.overlap:
        return grid.fresh_MC
    valid = grid.valid_MC
    if everything or window.sinks == 0:
        return valid
    position = grid.start_M[:, None] + torch.arange(grid.chunk, device=grid.start_M.device)
    not_sink = position >= window.sinks
    return not_sink if valid is None else valid & not_sink


def fold(
    chunks: Chunks, window: Window | None, phi_k_MJCF: Tensor, v_MGCV: Tensor, memory: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(S, z) after the call: the memory plus every key that has left the window by the end of its sequence."""
    grid, sequences = chunks.grid, chunks.sequences
    groups, keys = v_MGCV.shape[1], phi_k_MJCF.shape[1]
    slots = _folded_slots(grid, window, everything=False)
    position = grid.start_M[:, None] + torch.arange(grid.chunk, device=grid.start_M.device)
    end_N = sequences.tensor("ends")
    if window is not None and not window.overlap:
        end_N = torch.where(end_N > 0, window.kept_from(end_N), end_N)
    leaves = position < end_N[grid.row_M][:, None]
    slots = leaves if slots is None else slots & leaves
    phi = phi_k_MJCF * slots[:, None, :, None]
    kv = phi.transpose(-1, -2).unflatten(1, (groups, -1)).flatten(2, 3) @ v_MGCV
    s_MJFV = kv.unflatten(2, (keys // groups, -1)).flatten(1, 2)
    s = memory[0].index_add(0, grid.row_M, s_MJFV)
    z = memory[1].index_add(0, grid.row_M, phi.sum(2))
    return s, z
