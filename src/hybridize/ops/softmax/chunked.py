"""Softmax attention in linear memory: torch's fused kernel for full attention, chunks for windows.

Full attention with a score cap or with its lse goes through query tiles of our own. Packed sequences are laid out in
groups of similar length, right-padded, which a causal mask makes harmless.

Legend: N rows, T tokens, S keys, H query heads, G KV heads, D head dim, V value dim, P tokens of all sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridize.ops.ring import RingState, advance_ring
from hybridize.ops.sequences import Sequences
from hybridize.ops.softmax.state import KVState, append
from hybridize.ops.terms import Chunks, near_terms
from hybridize.ops.types import EPSILON, Result, compute_dtype, guarded
from hybridize.windows import Window

TILE = 256


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
        chunks = Chunks(sequences, sequences.grid(window.chunk(), window), back=True)
        near = near_terms(chunks, window, q, k, v, state, scale=scale, softcap=softcap)
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
        o, lse = _attend(
            *(x.unflatten(0, sequences.shape) for x in (q, k, v)), None, scale, softcap, return_lse
        )
        return o.flatten(0, 1), lse.flatten(0, 1) if lse is not None else None
    outputs, lses = [], []
    for index_NT in sequences.buckets():
        x_q, x_k, x_v = (torch.cat([x, x.new_zeros(1, *x.shape[1:])])[index_NT] for x in (q, k, v))
        o, lse = _attend(x_q, x_k, x_v, None, scale, softcap, return_lse)
        outputs.append(o.flatten(0, 1))
        if lse is not None:
            lses.append(lse.flatten(0, 1))
    back = sequences.from_buckets()
    return torch.cat(outputs)[back], torch.cat(lses)[back] if lses else None


def _continued(
    q: Tensor, held: KVState, scale: float, softcap: float | None, sequences: Sequences, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Queries after a state: rows right-padded to one length, positions decide what each query sees."""
    keys = held.k_NSGD.shape[1]
    if sequences.is_dense:
        q_NTHD, back = q.unflatten(0, sequences.shape), None
    else:
        index_NT, back = sequences.padded()
        q_NTHD = torch.cat([q, q.new_zeros(1, *q.shape[1:])])[index_NT]
    length = q_NTHD.shape[1]
    everything = length == 1 and all(start + 1 == keys for start in sequences.starts)
    mask = None
    if not everything:
        t_NT1 = (sequences.tensor("starts")[:, None] + torch.arange(length, device=q.device))[..., None]
        mask = torch.arange(keys, device=q.device) <= t_NT1
    elif softcap is not None or return_lse:
        mask = torch.ones(q_NTHD.shape[0], 1, keys, dtype=torch.bool, device=q.device)
    o, lse = _attend(
        q_NTHD,
        held.k_NSGD,
        held.v_NSGV,
        mask,
        scale,
        softcap,
        return_lse,
        causal=mask is None and not everything,
    )
    o, lse = o.flatten(0, 1), lse.flatten(0, 1) if lse is not None else None
    if back is not None:
        o, lse = o[back], lse[back] if lse is not None else None
    return o, lse


def _attend(
    q_NTHD: Tensor,
    k_NSGD: Tensor,
    v_NSGV: Tensor,
    mask_NTS: Tensor | None,
    scale: float,
    softcap: float | None,
    return_lse: bool,
    causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`o_NTHV` (and lse `[N, T, H]`); without a mask, causal from position 0 or everything visible."""
    if softcap is None and not return_lse:
        o = scaled_dot_product_attention(
            q_NTHD.transpose(1, 2),
            k_NSGD.transpose(1, 2),
            v_NSGV.transpose(1, 2),
            attn_mask=None if mask_NTS is None else mask_NTS[:, None],
            is_causal=causal and mask_NTS is None,
            scale=scale,
            enable_gqa=q_NTHD.shape[2] != k_NSGD.shape[2],
        )
        return o.transpose(1, 2), None
    if mask_NTS is None:
        t = torch.arange(q_NTHD.shape[1], device=q_NTHD.device)
        mask_NTS = (torch.arange(k_NSGD.shape[1], device=q_NTHD.device) <= t[:, None])[None]
    return _tiled(q_NTHD, k_NSGD, v_NSGV, mask_NTS, scale, softcap)


def _tiled(
    q_NTHD: Tensor, k_NSGD: Tensor, v_NSGV: Tensor, mask_NTS: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over tiles of queries; scores `[N, H, TILE, S]` at a time."""
    dtype = compute_dtype(q_NTHD)
    groups = k_NSGD.shape[2]
    k_NGDS = k_NSGD.to(dtype).permute(0, 2, 3, 1)[:, :, None]
    v_NGSV = v_NSGV.to(dtype).transpose(1, 2)
    outputs, lses = [], []
    for q_tile, mask in zip(q_NTHD.split(TILE, 1), mask_NTS.split(TILE, 1), strict=True):
        q_NGRTD = (q_tile.to(dtype) * scale).transpose(1, 2).unflatten(1, (groups, -1))
        score = q_NGRTD @ k_NGDS
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        score = score.masked_fill(~mask[:, None, None], -torch.inf)
        lse = score.logsumexp(-1, keepdim=True)
        weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0))
        o = (weight.flatten(2, 3) @ v_NGSV).unflatten(2, (-1, q_tile.shape[1])).flatten(1, 2)
        outputs.append(o.transpose(1, 2))
        lses.append(lse.squeeze(-1).flatten(1, 2).transpose(1, 2))
    return torch.cat(outputs, 1).to(v_NSGV.dtype), torch.cat(lses, 1)
