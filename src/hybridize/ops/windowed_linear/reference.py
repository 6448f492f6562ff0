"""The oracle: quadratic windowed linear attention, written as the formula says, a sequence at a time.

Legend: T new tokens of a sequence, S keys (kept ones and new ones), s sinks, H query heads, J key-map heads, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.linear.state import LinearState, empty_linear
from hybridize.ops.ring import advance_ring, empty_ring
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, capped, compute_dtype
from hybridize.ops.windowed_linear.definition import Definition
from hybridize.ops.windowed_linear.mix import Branches, combine, far_share, near_and_far_scales
from hybridize.ops.windowed_linear.state import WindowedLinearState


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    definition: Definition,
    sequences: Sequences,
    state: WindowedLinearState | None,
    return_state: bool,
    return_aux: bool,
) -> Result:
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGV))
    dtype = compute_dtype(q)
    window, map_k = definition.window, definition.map_k
    rows = len(sequences)
    ring = state.ring if state else empty_ring(window, rows, k, v)
    far = (
        state.far if state else empty_linear(rows, map_k.heads, map_k.features, v.shape[-1], dtype, q.device)
    )
    where_BTH = definition.where(q_BTHD)
    where_PH = where_BTH.flatten(0, 1) if where_BTH is not None else None
    outputs, shares, branches_list, S, z = [], [], [], [], []
    for n, (begin, length) in enumerate(zip(sequences.bounds, sequences.lengths, strict=False)):
        start = sequences.starts[n]
        piece = slice(begin, begin + length)
        # the keys held raw: sinks that have left the window, the window's own, then the new ones
        kept = window.kept_from(start)
        early = torch.arange(min(window.sinks, kept), device=q.device)
        recent = torch.arange(kept, start, device=q.device)
        slot = recent % window.ring
        i_S = torch.cat([early, recent, torch.arange(start, start + length, device=q.device)])
        k_SGD = torch.cat([ring.sink_k_NsGD[n][early], ring.k_NRGD[n][slot], k[piece]])
        v_SGV = torch.cat([ring.sink_v_NsGV[n][early], ring.v_NRGV[n][slot], v[piece]]).to(dtype)
        t_T1 = torch.arange(start, start + length, device=q.device)[:, None]
        branches = _branches(q[piece], k_SGD, v_SGV, i_S, t_T1, definition, far, n)
        where = where_PH[piece] if where_PH is not None else None
        outputs.append(combine(branches, definition.mix, definition.ablation, where))
        shares.append(far_share(branches, definition.mix))
        branches_list.append(branches)
        end = start + length
        leaves = (i_S < window.kept_from(end)) & (i_S >= window.sinks)
        if window.overlap:
            leaves = i_S >= start
        phi_SJF = map_k(k_SGD) * leaves[:, None, None]
        v_SJV = v_SGV.repeat_interleave(map_k.heads // v.shape[1], 1)
        S.append(far.S_NJFV[n] + torch.einsum("sjf,sjv->jfv", phi_SJF, v_SJV))
        z.append(far.z_NJF[n] + phi_SJF.sum(0))
    o = torch.cat(outputs).to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    aux = {}
    if return_aux:
        for name in ("near_den", "far_den", "shift"):
            aux[name] = torch.cat([getattr(entry, name) for entry in branches_list]).unflatten(
                0, q_BTHD.shape[:2]
            )
        aux["far_share"] = torch.cat(shares).unflatten(0, q_BTHD.shape[:2])
    if not return_state:
        return Result(o, None, aux)
    lengths = far.lengths_N + sequences.tensor("lengths")
    new_far = LinearState(lengths_N=lengths, S_NJFV=torch.stack(S), z_NJF=torch.stack(z))
    new_ring = advance_ring(sequences, window, k, v, ring)
    return Result(o, WindowedLinearState(lengths_N=lengths, ring=new_ring, far=new_far), aux)


def _branches(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGV: Tensor,
    i_S: Tensor,
    t_T1: Tensor,
    definition: Definition,
    memory: LinearState,
    n: int,
) -> Branches:
    window, map_q, map_k = definition.window, definition.map_q, definition.map_k
    heads = q_THD.shape[1]
    dtype = v_SGV.dtype
    v_HSV = v_SGV.transpose(0, 1).repeat_interleave(heads // v_SGV.shape[1], 0)
    weight, shift = near_weights(q_THD, k_SGD, window.near(t_T1, i_S), definition)
    phi_q = map_q(q_THD).transpose(0, 1)
    product = far_products(q_THD, k_SGD, map_q, map_k)
    far_mask = window.far(t_T1, i_S)
    everything = i_S <= t_T1
    if window.overlap:  # keys of earlier calls are in the memory already
        fresh = i_S >= t_T1[0, 0] if len(t_T1) else i_S < 0
        far_mask, everything = far_mask & fresh, everything & fresh
    repeat = heads // map_k.heads
    S_HFV = memory.S_NJFV[n].to(dtype).repeat_interleave(repeat, 0)
    z_HF = memory.z_NJF[n].to(dtype).repeat_interleave(repeat, 0)
    past_num, past_den = phi_q @ S_HFV, (phi_q @ z_HF[..., None]).squeeze(-1)
    sums = {
        "near_num": weight @ v_HSV,
        "near_den": weight.sum(-1),
        "shift": shift,
        "far_num": (product * far_mask) @ v_HSV + past_num,
        "far_den": (product * far_mask).sum(-1) + past_den,
        "all_num": (product * everything) @ v_HSV + past_num,
        "all_den": (product * everything).sum(-1) + past_den,
    }
    return Branches(
        has_far=window.has_far(t_T1[:, 0]), **{name: value.transpose(0, 1) for name, value in sums.items()}
    )


def near_weights(
    q_THD: Tensor, k_SGD: Tensor, near_TS: Tensor, definition: Definition
) -> tuple[Tensor, Tensor]:
    """e^(s - c) `[H, T, S]`, zero where not near, and c `[H, T]`; all may have leading dimensions."""
    dtype = compute_dtype(q_THD)
    repeat = q_THD.shape[-2] // k_SGD.shape[-2]
    k_HSD = k_SGD.to(dtype).transpose(-3, -2).repeat_interleave(repeat, -3)
    score = (definition.scale * q_THD.to(dtype)).transpose(-3, -2) @ k_HSD.transpose(-1, -2)
    score = capped(score, definition.softcap)
    score = score.masked_fill(~near_TS, -torch.inf)
    shift = score.amax(-1) if score.shape[-1] else score.sum(-1)
    shift = shift.masked_fill(shift == -torch.inf, 0)
    return torch.exp(score - shift[..., None]), shift


def far_products(q_THD: Tensor, k_SGD: Tensor, map_q: FeatureMap, map_k: FeatureMap) -> Tensor:
    """phi(q) phi(k) `[H, T, S]`, no mask; all may have leading dimensions."""
    phi_q, phi_k = map_q(q_THD).transpose(-3, -2), map_k(k_SGD).transpose(-3, -2)
    return phi_q @ phi_k.repeat_interleave(phi_q.shape[-3] // phi_k.shape[-3], -3).transpose(-1, -2)


def coefficients(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    definition: Definition,
    rows: slice,
) -> Tensor:
    """`A_BHQS` of the queries in `rows` over all keys of dense rows that start at position 0."""
    window = definition.window
    i_S = torch.arange(k_BTGD.shape[1], device=q_BTHD.device)
    t_Q1 = torch.arange(q_BTHD.shape[1], device=q_BTHD.device)[rows][:, None]
    near, far = window.near(t_Q1, i_S), window.far(t_Q1, i_S)
    weight, shift = near_weights(q_BTHD[:, rows], k_BTGD, near, definition)
    product = far_products(q_BTHD[:, rows], k_BTGD, definition.map_q, definition.map_k) * far
    nothing = weight.new_zeros(0)
    branches = Branches(
        near_num=nothing,
        near_den=weight.sum(-1).transpose(1, 2),
        shift=shift.transpose(1, 2),
        far_num=nothing,
        far_den=product.sum(-1).transpose(1, 2),
        has_far=window.has_far(t_Q1[:, 0]),
    )
    scales_BQH = near_and_far_scales(branches, definition.mix)
    near_scale, far_scale = (scale.transpose(1, 2)[..., None] for scale in scales_BQH)
    return weight * near_scale + product * far_scale
