"""The raw keys and values that a windowed operation keeps: a ring of recent positions, and the sinks.

Legend: N rows, P new tokens of all rows, R ring slots (position p lies in slot p % R), s sinks, G KV heads, D, V dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import State
from hybridize.windows import Window


@dataclass
class RingState(State):
    """Keys `[N, R, G, D]`, values `[N, R, G, V]` of the last positions, and those of the sinks `[N, s, G, ...]`."""

    k_NRGD: Tensor
    v_NRGV: Tensor
    sink_k_NsGD: Tensor
    sink_v_NsGV: Tensor


def empty_ring(window: Window, rows: int, k_PGD: Tensor, v_PGV: Tensor) -> RingState:
    """A ring that has seen nothing, with the dtype and heads of `k_PGD` and `v_PGV`."""
    return RingState(
        lengths_N=torch.zeros(rows, dtype=torch.int64, device=k_PGD.device),
        k_NRGD=k_PGD.new_zeros(rows, window.ring, *k_PGD.shape[1:]),
        v_NRGV=v_PGV.new_zeros(rows, window.ring, *v_PGV.shape[1:]),
        sink_k_NsGD=k_PGD.new_zeros(rows, window.sinks, *k_PGD.shape[1:]),
        sink_v_NsGV=v_PGV.new_zeros(rows, window.sinks, *v_PGV.shape[1:]),
    )


def stack_sources(x_PGD: Tensor, ring_NRGD: Tensor | None) -> Tensor:
    """(new tokens, ring, one row of zeros), the rows that `Sequences`' indices point into."""
    zero = x_PGD.new_zeros(1, *x_PGD.shape[1:])
    if ring_NRGD is None:
        return torch.cat([x_PGD, zero])
    return torch.cat([x_PGD, ring_NRGD.flatten(0, 1).to(x_PGD.dtype), zero])


def sink_keys(
    sequences: Sequences, window: Window, k_PGD: Tensor, v_PGV: Tensor, ring: RingState | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions 0 .. s-1 after the call's tokens, `[N, s, G, ...]`; unseen ones are zero."""
    index = sequences.sink_index(window.sinks)
    shape = (len(sequences), window.sinks)
    if ring is None:
        ring = empty_ring(window, len(sequences), k_PGD, v_PGV)
    k = stack_sources(k_PGD, ring.sink_k_NsGD).index_select(0, index).unflatten(0, shape)
    v = stack_sources(v_PGV, ring.sink_v_NsGV).index_select(0, index).unflatten(0, shape)
    return k, v


def advance_ring(
    sequences: Sequences, window: Window, k_PGD: Tensor, v_PGV: Tensor, ring: RingState | None
) -> RingState:
    """The ring after the call's new tokens."""
    ring = ring or empty_ring(window, len(sequences), k_PGD, v_PGV)
    sink_k, sink_v = ring.sink_k_NsGD, ring.sink_v_NsGV
    if window.sinks:
        sink_k, sink_v = sink_keys(sequences, window, k_PGD, v_PGV, ring)
    k, v = ring.k_NRGD, ring.v_NRGV
    if window.ring:
        index = sequences.ring_index(window.ring)
        shape = (len(sequences), window.ring)
        k = stack_sources(k_PGD, k).index_select(0, index).unflatten(0, shape)
        v = stack_sources(v_PGV, v).index_select(0, index).unflatten(0, shape)
    lengths = ring.lengths_N + sequences.tensor("lengths")
    return RingState(lengths_N=lengths, k_NRGD=k, v_NRGV=v, sink_k_NsGD=sink_k, sink_v_NsGV=sink_v)
