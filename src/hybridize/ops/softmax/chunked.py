"""Softmax attention in linear memory: torch's fused kernel for full attention, chunks for windows.

Full attention with a score cap or with its lse goes through query tiles of our own. Packed sequences are laid out in
groups of similar length, right-padded, which a causal mask makes harmless.

Legend: N rows, T tokens, S keys, H query heads, G KV heads, D head dim, V value dim, P tokens of all sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hybridize.ops.grid import get_grid
from hybridize.ops.rearrange import rearrange
from hybridize.ops.ring import RingState, advance_ring
from hybridize.ops.sequences import Sequences
from hybridize.ops.softmax.state import KVState, append
from hybridize.ops.terms import near_terms
from hybridize.ops.types import EPSILON, Result, capped, compute_dtype, guarded, per_head
from hybridize.windows import Window

TILE = 256
RATIO = {False: 2, True: 4}
"""Largest ratio of lengths within a group: on CUDA padding costs less than launches."""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's: it plans anew for every shape, and packed shapes never repeat."""


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    window: Window | None,
    scale: float,
    softcap: float | None,
    sequences: Sequences,
    state: KVState | RingState | None,
    return_state: bool,
    return_aux: bool,
) -> Result:
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGV))
    if window is not None:
        assert state is None or isinstance(state, RingState)
        if state is None and max(sequences.lengths, default=0) <= window.first_far_position:
            # the window hides nothing: a grid of its size could be far larger than the text
            o, lse = _fresh(q, k, v, scale, softcap, sequences, return_aux)
            return _result(
                o, advance_ring(sequences, window, k, v, None) if return_state else None, lse, sequences
            )
        if state is not None and sequences.is_step and softcap is None and not return_aux:
            ring = advance_ring(sequences, window, k, v, state)
            o = _step(q, ring, window, scale, sequences).to(v.dtype)
            return _result(o, ring if return_state else None, None, sequences)
        grid = get_grid(sequences, window.chunk(), window)
        kv = (
            grid.lay_keys(k, state.k_NRGD if state else None),
            grid.lay_keys(v, state.v_NRGV if state else None),
        )
        near = near_terms(grid, window, q, k, v, kv, state, scale=scale, softcap=softcap)
        o = (near.num_PHV / guarded(near.den_PH)[..., None]).to(v.dtype)
        new_ring = advance_ring(sequences, window, k, v, state) if return_state else None
        assert near.shift_PH is not None
        lse = near.shift_PH + near.den_PH.clamp_min(EPSILON).log() if return_aux else None
        return _result(o, new_ring, lse, sequences)
    assert state is None or isinstance(state, KVState)
    new_state = append(state, sequences, k, v) if return_state or state is not None else None
    if state is None:
        o, lse = _fresh(q, k, v, scale, softcap, sequences, return_aux)
    else:
        assert new_state is not None
        o, lse = _continued(q, new_state, scale, softcap, sequences, return_aux)
    return _result(o, new_state if return_state else None, lse, sequences)


def _result(
    o_PHV: Tensor, state: KVState | RingState | None, lse_PH: Tensor | None, sequences: Sequences
) -> Result:
    aux = {"lse": lse_PH.unflatten(0, sequences.shape)} if lse_PH is not None else {}
    return Result(o_PHV.unflatten(0, sequences.shape), state, aux)


def _fresh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sequences: Sequences,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sequences that start here: causal attention over groups of similar length."""
    if sequences.is_dense:
        q, k, v = (x.unflatten(0, sequences.shape) for x in (q, k, v))
        o, lse = _attend(q, k, v, None, scale, softcap, return_lse)
        return o.flatten(0, 1), lse.flatten(0, 1) if lse is not None else None
    outputs, lses = [], []
    shapes, index_S, back_P = sequences.buckets(RATIO[q.device.type == "cuda"])
    sizes = [rows * length for rows, length in shapes]
    split = [rearrange(x, index_S, back_P).split(sizes) for x in (q, k, v)]
    for shape, *group in zip(shapes, *split, strict=True):
        x_q, x_k, x_v = (x.unflatten(0, shape) for x in group)
        o, lse = _attend(x_q, x_k, x_v, None, scale, softcap, return_lse)
        outputs.append(o.flatten(0, 1))
        if lse is not None:
            lses.append(lse.flatten(0, 1))
    o, lse = torch.cat(outputs), torch.cat(lses) if lses else None
    return rearrange(o, back_P, index_S), rearrange(lse, back_P, index_S) if lse is not None else None


def _step(q_NHD: Tensor, ring: RingState, window: Window, scale: float, sequences: Sequences) -> Tensor:
    """`o_NHV` of one token a row, whose key is in the ring already: the slots and the sinks that it sees."""
    slots, dtype = ring.k_NRGD.shape[1], compute_dtype(q_NHD)

    def make() -> Tensor:
        t_N1 = sequences.tensor("starts")[:, None]
        position_NR = t_N1 - (t_N1 - torch.arange(slots, device=t_N1.device)) % max(slots, 1)
        near = replace(window, sinks=0).near(t_N1, position_NR) & (position_NR >= window.sinks)
        sinks = torch.arange(window.sinks, device=t_N1.device) <= t_N1
        return torch.cat([near, sinks], 1)[:, None, None]

    seen_N11K = sequences.once(("seen", window), make)
    k_NKGD = torch.cat([ring.k_NRGD, ring.sink_k_NsGD], 1).to(dtype)
    v_NKGV = torch.cat([ring.v_NRGV, ring.sink_v_NsGV], 1).to(dtype)
    return _fused(q_NHD[:, None].to(dtype), k_NKGD, v_NKGV, scale, attn_mask=seen_N11K)[:, 0]


def _continued(
    q: Tensor, held: KVState, scale: float, softcap: float | None, sequences: Sequences, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Queries after a state: rows right-padded to one length, positions decide what each query sees."""
    if sequences.is_dense:
        q_NTHD, places = q.unflatten(0, sequences.shape), None
    else:
        index_NT, back_P = places = sequences.padded()
        q_NTHD = rearrange(q, index_NT.flatten(), back_P).unflatten(0, index_NT.shape)
    everything = sequences.is_step and all(start + 1 == held.k_NSGD.shape[1] for start in sequences.starts)
    if everything and softcap is None and not return_lse:
        o, lse = _fused(q_NTHD, held.k_NSGD, held.v_NSGV, scale), None
    else:
        t_NT = sequences.tensor("starts")[:, None] + torch.arange(q_NTHD.shape[1], device=q.device)
        o, lse = _attend(q_NTHD, held.k_NSGD, held.v_NSGV, t_NT, scale, softcap, return_lse)
    o, lse = o.flatten(0, 1), lse.flatten(0, 1) if lse is not None else None
    if places is not None:
        index_S, back_P = places[0].flatten(), places[1]
        o, lse = rearrange(o, back_P, index_S), rearrange(lse, back_P, index_S) if lse is not None else None
    return o, lse


def _attend(
    q_NTHD: Tensor,
    k_NSGD: Tensor,
    v_NSGV: Tensor,
    t_NT: Tensor | None,
    scale: float,
    softcap: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`o_NTHV` (and lse `[N, T, H]`). `t_NT` is each query's position; None: as many queries as keys, from 0."""
    if softcap is None and not return_lse:
        if t_NT is None:
            return _fused(q_NTHD, k_NSGD, v_NSGV, scale, is_causal=True), None
        mask_NTS = _visible(t_NT, k_NSGD.shape[1])
        return _fused(q_NTHD, k_NSGD, v_NSGV, scale, attn_mask=mask_NTS[:, None]), None
    if t_NT is None:
        t_NT = torch.arange(q_NTHD.shape[1], device=q_NTHD.device)[None]
    o, lse = _tiled(q_NTHD, k_NSGD, v_NSGV, t_NT, scale, softcap)
    return o, lse if return_lse else None


def _visible(t_NT: Tensor, keys: int) -> Tensor:
    """`[N, T, S]`: whether the key is not later than the query."""
    return torch.arange(keys, device=t_NT.device) <= t_NT[..., None]


def _fused(q_NTHD: Tensor, k_NSGD: Tensor, v_NSGV: Tensor, scale: float, **masking: Any) -> Tensor:
    """torch's fused attention, in v's dtype: under autocast float32 rotations leave q and k wider than v.

    On CUDA K and V are expanded to all heads, since only some of its kernels group heads.
    """
    q_NTHD, k_NSGD = q_NTHD.to(v_NSGV.dtype), k_NSGD.to(v_NSGV.dtype)
    grouped = q_NTHD.shape[2] != k_NSGD.shape[2]
    if grouped and q_NTHD.is_cuda:
        k_NSGD, v_NSGV = (per_head(x, q_NTHD.shape[2], 2) for x in (k_NSGD, v_NSGV))
        grouped = False
    with sdpa_kernel(KERNELS):
        o = scaled_dot_product_attention(
            q_NTHD.transpose(1, 2),
            k_NSGD.transpose(1, 2),
            v_NSGV.transpose(1, 2),
            scale=scale,
            enable_gqa=grouped,
            **masking,
        )
    return o.transpose(1, 2)


def _tiled(
    q_NTHD: Tensor, k_NSGD: Tensor, v_NSGV: Tensor, t_NT: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over tiles of queries: scores `[N, H, TILE, S]` at a time, computed again in the backward pass."""
    dtype = compute_dtype(q_NTHD)
    k_NG1DS = k_NSGD.to(dtype).permute(0, 2, 3, 1)[:, :, None]
    v_NGSV = v_NSGV.to(dtype).transpose(1, 2)
    outputs, lses = [], []
    for q_tile, t_tile in zip(q_NTHD.split(TILE, 1), t_NT.split(TILE, 1), strict=True):
        o, lse = checkpoint(
            _tile,
            q_tile,
            k_NG1DS,
            v_NGSV,
            t_tile,
            scale,
            softcap,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(o)
        lses.append(lse)
    return torch.cat(outputs, 1).to(v_NSGV.dtype), torch.cat(lses, 1)


def _tile(
    q_NTHD: Tensor, k_NG1DS: Tensor, v_NGSV: Tensor, t_NT: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    groups, keys = v_NGSV.shape[1], v_NGSV.shape[2]
    q_NGRTD = (q_NTHD.to(v_NGSV.dtype) * scale).transpose(1, 2).unflatten(1, (groups, -1))
    score = q_NGRTD @ k_NG1DS
    score = capped(score, softcap)
    score = score.masked_fill(~_visible(t_NT, keys)[:, None, None], -torch.inf)
    lse = score.logsumexp(-1, keepdim=True)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0))
    o = (weight.flatten(2, 3) @ v_NGSV).unflatten(2, (-1, q_NTHD.shape[1])).flatten(1, 2)
    return o.transpose(1, 2), lse.squeeze(-1).flatten(1, 2).transpose(1, 2)
