"""Long dense rows on a CPU, a slab of tokens at a time, the state carried along. The result is the same.

Tensors of tens of megabytes come fresh from the operating system at every call, and the page faults cost more than the
arithmetic: in one piece a token costs 3.2 times as much at T = 16,384 as at T = 2,048, in slabs 1.4 times
(benchmarks/windowed_linear_cost.py, two cores).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result

SLAB = 2048
"""Tokens of all rows in a slab."""

Forward = Callable[..., Result]
"""(*tensors, sequences, state, return_state) -> Result"""


def in_slabs(
    forward: Forward,
    tensors: Sequence[Tensor],
    sequences: Sequences,
    state: Any,
    return_state: bool,
    chunk: int,
) -> Result:
    """`forward` over slabs of the `[B, T, ...]` tensors that hold whole chunks of `chunk` tokens; in one piece where that is
    short enough."""
    rows, length = sequences.shape
    tokens = max(SLAB // rows // chunk, 1) * chunk
    if tensors[0].device.type != "cpu" or not sequences.is_dense or length <= tokens:
        return forward(*tensors, sequences, state, return_state)
    results = []
    begin = 0
    # split, not slices: the backward of a slice fills a whole row with zeros
    for pieces in zip(*(x.split(tokens, 1) for x in tensors), strict=True):
        starts = [start + begin for start in sequences.starts]
        slab = Sequences.dense(rows, pieces[0].shape[1], starts, pieces[0].device)
        begin += pieces[0].shape[1]
        result = forward(*pieces, slab, state, return_state or begin < length)
        state = result.state
        results.append(result)
    aux = {name: torch.cat([result.aux[name] for result in results], 1) for name in results[0].aux}
    return Result(torch.cat([result.o for result in results], 1), state, aux)
