"""Chunked windowed linear attention: linear cost and memory, eager, CPU and GPU; and the one-token step.

Legend: P tokens of all sequences, N rows, M chunks, C chunk length, R ring slots, s sinks, H query heads, G KV heads,
J key-map heads, D head dim, F features, V value dim, X query heads of one KV or key-map head.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.grid import get_grid
from hybridize.ops.linear.state import LinearState, empty_linear
from hybridize.ops.ring import RingState, advance_ring
from hybridize.ops.sequences import Sequences
from hybridize.ops.slabs import in_slabs
from hybridize.ops.terms import Terms, far_terms, fold, near_terms
from hybridize.ops.types import Result, capped, compute_dtype, per_head
from hybridize.ops.windowed_linear.definition import Definition
from hybridize.ops.windowed_linear.mix import Branches, combine, far_share
from hybridize.ops.windowed_linear.state import WindowedLinearState
from hybridize.windows import Window


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
    where_BTH = definition.where(q_BTHD)
    run = partial(_forward, definition, return_aux)
    if where_BTH is None:
        run = partial(run, None)
    tensors = [where_BTH, q_BTHD, k_BTGD, v_BTGV] if where_BTH is not None else [q_BTHD, k_BTGD, v_BTGV]
    return in_slabs(run, tensors, sequences, state, return_state, definition.window.chunk())


def _forward(
    definition: Definition,
    return_aux: bool,
    where_BTH: Tensor | None,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sequences: Sequences,
    state: WindowedLinearState | None,
    return_state: bool,
) -> Result:
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGV))
    dtype = compute_dtype(q)
    window, map_k = definition.window, definition.map_k
    ring, far = (state.ring, state.far) if state else (None, None)
    grid = get_grid(sequences, window.chunk(), window)
    k_MGKD = grid.lay_keys(k, ring.k_NRGD if ring else None)
    v_MGKV = grid.lay_keys(v, ring.v_NRGV if ring else None).to(dtype)
    near = near_terms(
        grid, window, q, k, v, (k_MGKD, v_MGKV), ring, scale=definition.scale, softcap=definition.softcap
    )
    linear_only = definition.ablation.mode == "linear_only"
    all_keys = grid.reaches_frame(everything=linear_only)
    k_MGXD, v_MGXV = (k_MGKD, v_MGKV) if all_keys else (grid.own(k_MGKD), grid.own(v_MGKV))
    phi_k = map_k(k_MGXD.transpose(1, 2)).transpose(1, 2)
    phi_q = definition.map_q(q)
    memory = far.memory if far else None
    far_sums = far_terms(grid, phi_q, phi_k, v_MGXV, memory)
    everything = None
    if linear_only:
        all_memory = _with_sinks(far, ring, map_k, window, sequences) if far and ring else memory
        everything = far_terms(grid, phi_q, phi_k, v_MGXV, all_memory, everything=True)
    branches = _branches(near, far_sums, everything, grid.has_far_P)
    where_PH = where_BTH.flatten(0, 1) if where_BTH is not None else None
    o = combine(branches, definition.mix, definition.ablation, where_PH)
    o = o.to(v_BTGV.dtype).unflatten(0, q_BTHD.shape[:2])
    aux = {}
    if return_aux:
        pieces = {"near_den": near.den_PH, "far_den": far_sums.den_PH, "shift": branches.shift}
        pieces["far_share"] = far_share(branches, definition.mix)
        aux = {name: value.unflatten(0, q_BTHD.shape[:2]) for name, value in pieces.items()}
    if not return_state:
        return Result(o, None, aux)
    far = far or empty_linear(len(sequences), map_k.heads, map_k.features, v.shape[-1], dtype, q.device)
    S, z = fold(grid, grid.own(phi_k), grid.own(v_MGKV), far.memory)
    lengths = far.lengths_N + sequences.tensor("lengths")
    new_state = WindowedLinearState(
        lengths_N=lengths,
        ring=advance_ring(sequences, window, k, v, ring),
        far=LinearState(lengths_N=lengths, S_NJFV=S, z_NJF=z),
    )
    return Result(o, new_state, aux)


def _branches(near: Terms, far: Terms, everything: Terms | None, has_far: Tensor) -> Branches:
    assert near.shift_PH is not None
    return Branches(
        near_num=near.num_PHV,
        near_den=near.den_PH,
        shift=near.shift_PH,
        far_num=far.num_PHV,
        far_den=far.den_PH,
        has_far=has_far,
        all_num=everything.num_PHV if everything else None,
        all_den=everything.den_PH if everything else None,
    )


def _with_sinks(
    far: LinearState, ring: RingState, map_k: FeatureMap, window: Window, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """The memory plus the sinks that lie before the ring's keys: `linear_only` counts them, the far set does not."""
    if window.sinks == 0 or window.overlap:
        return far.memory
    kept_N = window.kept_from(sequences.tensor("starts"))
    before = torch.arange(window.sinks, device=kept_N.device) < kept_N[:, None]
    num, den = _sums(map_k, ring.sink_k_NsGD, ring.sink_v_NsGV, before)
    return far.S_NJFV + num, far.z_NJF + den


def _sums(map_k: FeatureMap, k_NRGD: Tensor, v_NRGV: Tensor, mask_NR: Tensor) -> tuple[Tensor, Tensor]:
    """(sum phi(k) v^T, sum phi(k)) over the masked slots of each row: `[N, J, F, V]`, `[N, J, F]`."""
    phi_NRJF = map_k(k_NRGD) * mask_NR[..., None, None]
    v_NRJV = per_head(v_NRGV.to(phi_NRJF.dtype), phi_NRJF.shape[2], 2)
    return torch.einsum("nrjf,nrjv->njfv", phi_NRJF, v_NRJV), phi_NRJF.sum(1)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    definition: Definition,
    starts: tuple[int, ...],
    state: WindowedLinearState,
) -> Result:
    """One token a row: q `[N, 1, H, D]`, k `[N, 1, G, D]`, v `[N, 1, G, V]`. Touches w keys and one state."""
    sequences = Sequences.dense(q.shape[0], 1, starts, q.device)
    dtype = compute_dtype(q)
    window, map_k = definition.window, definition.map_k
    t_N = state.lengths_N
    far = _evict(state, map_k, window, starts, k, v)
    ring = advance_step(state.ring, window, k, v)
    slots = torch.arange(window.ring, device=q.device)
    position_NR = t_N[:, None] - (t_N[:, None] - slots) % window.ring  # latest position <= t in each slot
    near_NR = (position_NR >= 0) & (position_NR >= window.sinks) & window.near(t_N[:, None], position_NR)
    k_NRGD = torch.cat([ring.sink_k_NsGD, ring.k_NRGD], 1).to(dtype)
    v_NRGV = torch.cat([ring.sink_v_NsGV, ring.v_NRGV], 1).to(dtype)
    seen_sinks = torch.arange(window.sinks, device=q.device) <= t_N[:, None]
    mask = torch.cat([seen_sinks, near_NR], 1)
    groups = k.shape[2]
    q_NGXD = (q[:, 0].to(dtype) * definition.scale).unflatten(1, (groups, -1))
    score = q_NGXD @ k_NRGD.permute(0, 2, 3, 1)
    score = capped(score, definition.softcap)
    score = score.masked_fill(~mask[:, None, None], -torch.inf)
    shift = score.amax(-1, keepdim=True)
    weight = torch.exp(score - shift)
    near = Terms((weight @ v_NRGV.transpose(1, 2)).flatten(1, 2), weight.sum(-1).flatten(1), shift.flatten(1))
    phi_q = definition.map_q(q[:, 0])
    everything = None
    if definition.ablation.mode == "linear_only":
        memory = far.memory
        if not window.overlap:
            held = _sums(map_k, ring.k_NRGD, ring.v_NRGV, _unfolded(window, t_N, position_NR))
            sinks = _sums(map_k, ring.sink_k_NsGD, ring.sink_v_NsGV, seen_sinks)
            memory = (memory[0] + held[0] + sinks[0], memory[1] + held[1] + sinks[1])
        everything = _read(phi_q, *memory)
    branches = _branches(near, _read(phi_q, *far.memory), everything, window.has_far(t_N))
    where_BTH = definition.where(q)
    where_NH = where_BTH[:, 0] if where_BTH is not None else None
    o = combine(branches, definition.mix, definition.ablation, where_NH).to(v.dtype)[:, None]
    lengths = t_N + sequences.tensor("lengths")
    return Result(o, WindowedLinearState(lengths_N=lengths, ring=ring, far=far))


def _unfolded(window: Window, t_N: Tensor, position_NR: Tensor) -> Tensor:
    """Which ring slots hold a key that is neither folded nor a sink."""
    return (position_NR >= window.kept_from(t_N + 1)[:, None]) & (position_NR >= window.sinks)


def _read(phi_q_NHF: Tensor, S_NJFV: Tensor, z_NJF: Tensor) -> Terms:
    phi_q_NJXF = phi_q_NHF.unflatten(1, (S_NJFV.shape[1], -1))
    return Terms((phi_q_NJXF @ S_NJFV).flatten(1, 2), (phi_q_NJXF @ z_NJF[..., None]).flatten(1))


def _evict(
    state: WindowedLinearState,
    map_k: FeatureMap,
    window: Window,
    starts: tuple[int, ...],
    k: Tensor,
    v: Tensor,
) -> LinearState:
    """(S, z) for the query at position `starts`: the keys that leave the window now are folded in."""
    far, ring = state.far, state.ring
    lengths = far.lengths_N + 1
    if window.overlap:
        num, den = _sums(map_k, k, v, torch.ones(k.shape[:2], dtype=torch.bool, device=k.device))
        return LinearState(lengths_N=lengths, S_NJFV=far.S_NJFV + num, z_NJF=far.z_NJF + den)
    leaving = [(window.kept_from(start), window.kept_from(start + 1)) for start in starts]
    most = max(after - before for before, after in leaving)
    if most == 0:
        return LinearState(lengths_N=lengths, S_NJFV=far.S_NJFV, z_NJF=far.z_NJF)
    first_N = window.kept_from(far.lengths_N)
    position_NE = first_N[:, None] + torch.arange(most, device=k.device)
    mask = (position_NE < window.kept_from(lengths)[:, None]) & (position_NE >= window.sinks)
    slot = (position_NE % window.ring)[..., None, None]
    k_NEGD = ring.k_NRGD.gather(1, slot.expand(-1, -1, *ring.k_NRGD.shape[2:]))
    v_NEGV = ring.v_NRGV.gather(1, slot.expand(-1, -1, *ring.v_NRGV.shape[2:]))
    num, den = _sums(map_k, k_NEGD, v_NEGV, mask)
    return LinearState(lengths_N=lengths, S_NJFV=far.S_NJFV + num, z_NJF=far.z_NJF + den)


def advance_step(ring: RingState, window: Window, k_N1GD: Tensor, v_N1GV: Tensor) -> RingState:
    """The ring with one more token in every row."""

    def write(slots_NRGD: Tensor, x_N1GD: Tensor, hit_NR: Tensor) -> Tensor:
        return torch.where(hit_NR[..., None, None], x_N1GD.to(slots_NRGD.dtype), slots_NRGD)

    t_N1 = ring.lengths_N[:, None]
    hit = torch.arange(window.ring, device=t_N1.device) == (t_N1 % window.ring if window.ring else t_N1)
    sink = torch.arange(window.sinks, device=t_N1.device) == t_N1
    return RingState(
        lengths_N=ring.lengths_N + 1,
        k_NRGD=write(ring.k_NRGD, k_N1GD, hit),
        v_NRGV=write(ring.v_NRGV, v_N1GV, hit),
        sink_k_NsGD=write(ring.sink_k_NsGD, k_N1GD, sink),
        sink_v_NsGV=write(ring.sink_v_NsGV, v_N1GV, sink),
    )
