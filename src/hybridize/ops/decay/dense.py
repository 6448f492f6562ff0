"""The coefficients of v as a matrix, for probes, losses and maps: some queries of dense rows over all keys.

Legend: B rows, T tokens, S keys (all T), Q the queries asked for, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.types import compute_dtype, per_head

BLOCK = 16
"""Queries that share a reference point where channels decay apart: memory is BLOCK x BLOCK x D inside a block."""


def coefficients(q_BTHD: Tensor, k_BTGD: Tensor, log_decay: Tensor, rows: slice, scale: float) -> Tensor:
    """`A_BHQS = scale sum_d q_td k_sd exp(sum of log_decay over s+1 .. t)` for s <= t, else 0; differentiable."""
    dtype, heads = compute_dtype(q_BTHD), q_BTHD.shape[2]
    q_BHQD = q_BTHD[:, rows].to(dtype).transpose(1, 2) * scale
    k_BHSD = per_head(k_BTGD.to(dtype).transpose(1, 2), heads, 1)
    s = torch.arange(q_BTHD.shape[1], device=q_BTHD.device)
    t = s[rows]
    if log_decay.dim() == 4:
        G_BHSD = log_decay.to(dtype).transpose(1, 2).cumsum(2)
        return _vector(q_BHQD, k_BHSD, G_BHSD, t.tolist())
    if log_decay.dim() == 1:
        G_BHS = (log_decay.to(dtype)[:, None] * s)[None]
    else:
        G_BHS = log_decay.to(dtype).transpose(1, 2).cumsum(2)
    difference = G_BHS[:, :, rows, None] - G_BHS[:, :, None, :]
    return (q_BHQD @ k_BHSD.mT) * difference.masked_fill(s > t[:, None], -torch.inf).exp()


def _vector(q_BHQD: Tensor, k_BHSD: Tensor, G_BHSD: Tensor, times: list[int]) -> Tensor:
    """The same, a block of queries at a time. Keys up to the block's first query, at `first`, decay to it before they
    meet a query, which decays from there: no exponent is positive. Later keys meet their queries pair by pair."""
    columns = k_BHSD.shape[2]
    pieces = [k_BHSD.new_zeros(*q_BHQD.shape[:3], columns)[:, :, :0]]
    for begin in range(0, len(times), BLOCK):
        block = times[begin : begin + BLOCK]
        first, last = block[0], block[-1]
        q, G_t = q_BHQD[:, :, begin : begin + BLOCK], G_BHSD[:, :, block]
        G_first = G_BHSD[:, :, first : first + 1]
        before = slice(0, first + 1)
        early = (q * (G_t - G_first).exp()) @ (
            k_BHSD[:, :, before] * (G_first - G_BHSD[:, :, before]).exp()
        ).mT
        inside = slice(first + 1, last + 1)
        s = torch.arange(first + 1, last + 1, device=q.device)
        hidden = s > torch.tensor(block, device=q.device)[:, None]
        difference = G_t[:, :, :, None] - G_BHSD[:, :, None, inside]
        weight = difference.masked_fill(hidden[..., None], -torch.inf).exp()
        late = torch.einsum("bhqd,bhsd,bhqsd->bhqs", q, k_BHSD[:, :, inside], weight)
        row = torch.cat([early, late], -1)
        pieces.append(torch.nn.functional.pad(row, (0, columns - row.shape[-1])))
    return torch.cat(pieces, 2)
