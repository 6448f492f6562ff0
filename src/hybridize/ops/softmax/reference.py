"""The oracle: quadratic softmax attention, a sequence at a time.

Legend: T new tokens of a sequence, S keys (kept and new), H query heads, G KV heads, D head dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.ring import RingState, advance_ring, empty_ring
from hybridize.ops.sequences import Sequences
from hybridize.ops.softmax.state import KVState, append
from hybridize.ops.types import Result, State, capped, compute_dtype
from hybridize.windows import Window


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
    if window is None:
        assert state is None or isinstance(state, KVState)
        new_state: State = append(state, sequences, k, v)
    else:
        assert state is None or isinstance(state, RingState)
        state = state or empty_ring(window, len(sequences), k, v)
        new_state = advance_ring(sequences, window, k, v, state)
    outputs, lses = [], []
    for n, (begin, length) in enumerate(zip(sequences.bounds, sequences.lengths, strict=False)):
        piece = slice(begin, begin + length)
        start, end = sequences.starts[n], sequences.starts[n] + length
        if isinstance(new_state, KVState):
            i_S = torch.arange(end, device=q.device)
            k_SGD, v_SGV = new_state.k_NSGD[n, :end], new_state.v_NSGV[n, :end]
        else:
            assert isinstance(state, RingState) and window is not None
            kept = window.kept_from(start)
            early = torch.arange(min(window.sinks, kept), device=q.device)
            recent = torch.arange(kept, start, device=q.device)
            slot = recent % max(window.ring, 1)
            i_S = torch.cat([early, recent, torch.arange(start, end, device=q.device)])
            k_SGD = torch.cat([state.sink_k_NsGD[n][early], state.k_NRGD[n][slot], k[piece]])
            v_SGV = torch.cat([state.sink_v_NsGV[n][early], state.v_NRGV[n][slot], v[piece]])
        t_T1 = torch.arange(start, end, device=q.device)[:, None]
        near = i_S <= t_T1 if window is None else window.near(t_T1, i_S)
        weight, lse = _weights(q[piece], k_SGD, near, scale, softcap)
        v_HSV = v_SGV.to(weight.dtype).transpose(0, 1).repeat_interleave(weight.shape[0] // v.shape[1], 0)
        outputs.append((weight @ v_HSV).transpose(0, 1))
        lses.append(lse.T)
    o = torch.cat(outputs).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    aux = {"lse": torch.cat(lses).unflatten(0, q_BTHD.shape[:2])} if return_aux else {}
    return Result(o, new_state if return_state else None, aux)


def _weights(
    q_THD: Tensor, k_SGD: Tensor, near_TS: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax weights `[H, T, S]` (rows without keys are 0) and lse `[H, T]`."""
    score = _scores(q_THD, k_SGD, near_TS, scale, softcap)
    lse = score.logsumexp(-1)
    return torch.where(near_TS, (score - lse[..., None]).exp(), score.new_zeros(())), lse


def _scores(q_THD: Tensor, k_SGD: Tensor, near_TS: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores `[H, T, S]`, -inf where the query does not see the key; all may have leading dimensions."""
    dtype = compute_dtype(q_THD)
    k_HSD = k_SGD.to(dtype).transpose(-3, -2).repeat_interleave(q_THD.shape[-2] // k_SGD.shape[-2], -3)
    score = (scale * q_THD.to(dtype)).transpose(-3, -2) @ k_HSD.transpose(-1, -2)
    return capped(score, softcap).masked_fill_(~near_TS, -torch.inf)


def coefficients(
    q_BTHD: Tensor, k_BTGD: Tensor, window: Window | None, scale: float, softcap: float | None, rows: slice
) -> Tensor:
    """`A_BHQS` of the queries in `rows` over all keys of dense rows that start at position 0."""
    i_S = torch.arange(k_BTGD.shape[1], device=q_BTHD.device)
    t_Q1 = torch.arange(q_BTHD.shape[1], device=q_BTHD.device)[rows][:, None]
    near = i_S <= t_Q1 if window is None else window.near(t_Q1, i_S)
    weight = _scores(q_BTHD[:, rows], k_BTGD, near, scale, softcap).softmax(-1)
    empty = window is not None and window.size == window.sinks == 0  # no key at all: softmax gives NaN
    return torch.zeros_like(weight) if empty else weight
