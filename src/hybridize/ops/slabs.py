"""Long dense rows on a CPU, a slab of tokens at a time, the state carried along. The result is the same.

Tensors of tens of megabytes come fresh from the operating system at every call, and the page faults cost more than the
arithmetic: in one piece a token costs 3.2 times as much at T = 16,384 as at T = 2,048, in slabs 1.4 times
(benchmarks/windowed_linear_cost.py, two cores).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result

SLAB = 2048
"""Tokens of all rows in a slab."""

Forward = Callable[[Tensor, Tensor, Tensor, Sequences, Any, bool], Result]
"""(q, k, v, sequences, state, return_state) -> Result"""


def in_slabs(
    forward: Forward,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sequences: Sequences,
    state: Any,
    return_state: bool,
    chunk: int,
) -> Result:
    """`forward` over slabs that hold whole chunks of `chunk` tokens; in one piece where that is short enough."""
    rows, length = sequences.shape
    tokens = max(SLAB // rows // chunk, 1) * chunk
    if q_BTHD.device.type != "cpu" or not sequences.is_dense or length <= tokens:
        return forward(q_BTHD, k_BTGD, v_BTGV, sequences, state, return_state)
    results = []
    begin = 0
    # split, not slices: the backward of a slice fills a whole row with zeros
    for q, k, v in zip(*(x.split(tokens, 1) for x in (q_BTHD, k_BTGD, v_BTGV)), strict=True):
        starts = [start + begin for start in sequences.starts]
        slab = Sequences.dense(rows, q.shape[1], starts, q.device)
        begin += q.shape[1]
        result = forward(q, k, v, slab, state, return_state or begin < length)
        state = result.state
        results.append(result)
    aux = {name: torch.cat([result.aux[name] for result in results], 1) for name in results[0].aux}
    return Result(torch.cat([result.o for result in results], 1), state, aux)
