"""Depthwise causal convolution over the last w tokens of a sequence: `y_t = sum_j weight[:, j] x_{t - w + 1 + j}`.

Linear, without a bias; before a sequence's first token lie zeros. One way serves whole texts and single tokens.

Legend: B rows, T tokens, N sequences, P tokens of all sequences, C channels, w width, R = w - 1 tokens held, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, State, compute_dtype, outside_autocast


@dataclass
class ShortConvState(State):
    """`x_NRC`: the last w - 1 inputs of each row in their own dtype, the oldest first; zeros where there were fewer."""

    x_NRC: Tensor


@outside_autocast
def forward(
    x_BTC: Tensor,
    weight_Cw: Tensor,
    *,
    sequences: Sequences | None = None,
    state: ShortConvState | None = None,
    return_state: bool = False,
) -> Result:
    """`y_BTC` in x's dtype (sums in float32) and, with `return_state`, the last inputs of every sequence.

    The last column of `weight_Cw` weighs the token itself. `sequences` says how the tokens divide into sequences (default:
    dense rows); with a `state` they go on from it. Raises ValueError for shapes that do not fit.
    """
    _check(x_BTC, weight_Cw)
    rows, length, channels = x_BTC.shape
    held = weight_Cw.shape[1] - 1
    sequences = sequences or Sequences.dense(rows, length, device=x_BTC.device)
    if state is None:
        lengths = torch.zeros(len(sequences), dtype=torch.int64, device=x_BTC.device)
        state = ShortConvState(lengths_N=lengths, x_NRC=x_BTC.new_zeros(len(sequences), held, channels))
    needed = (len(sequences), held, channels)
    if tuple(state.x_NRC.shape) != needed:
        raise ValueError(f"state holds inputs of shape {tuple(state.x_NRC.shape)}; the call needs {needed}")
    before_NRC = state.x_NRC.to(x_BTC.dtype)
    if sequences.is_dense:
        laid = torch.cat([before_NRC, x_BTC], 1)
        y = _weighted(laid, weight_Cw)
        last_NRC = laid[:, length:]
    else:
        places = sequences.once(("short_conv", held), lambda: _Places.of(sequences, held))
        laid = torch.cat([before_NRC.flatten(0, 1), x_BTC.flatten(0, 1)]).index_select(0, places.source_S)
        y = _weighted(laid[None], weight_Cw)[0].index_select(0, places.token_P)
        y = y.unflatten(0, (rows, length))
        last_NRC = laid.index_select(0, places.last_NR).unflatten(0, (len(sequences), held))
    y_BTC = y.to(x_BTC.dtype)
    if not return_state:
        return Result(y_BTC)
    # a view would hold on to the whole text
    lengths_N = state.lengths_N + sequences.tensor("lengths")
    return Result(y_BTC, ShortConvState(lengths_N=lengths_N, x_NRC=last_NRC.clone()))


def _weighted(laid_NSC: Tensor, weight_Cw: Tensor) -> Tensor:
    """`[N, S - w + 1, C]`: slot s weighs the slots s .. s + w - 1."""
    dtype = compute_dtype(laid_NSC)
    wide, weight_wC = laid_NSC.to(dtype), weight_Cw.to(dtype).T
    width = len(weight_wC)
    length = wide.shape[1] - width + 1
    y = wide[:, :length] * weight_wC[0]
    for j in range(1, width):
        y = torch.addcmul(y, wide[:, j : j + length], weight_wC[j])
    return y


@dataclass(frozen=True)
class _Places:
    """Sequences one after another, each behind the R inputs held of it: its tokens then see nothing of another one.

    `source_S` says which of (held inputs `[N R]`, tokens `[P]`) lies in each slot, each in one; `token_P` where the outputs
    of the tokens lie, R slots early, and `last_NR` the last R slots of each sequence.
    """

    source_S: Tensor
    token_P: Tensor
    last_NR: Tensor

    @classmethod
    def of(cls, sequences: Sequences, held: int) -> _Places:
        rows, bounds = np.arange(len(sequences)), np.asarray(sequences.bounds)
        slots = np.arange(held)
        token_P = np.arange(sequences.total) + held * sequences.array("row")
        first_NR = (bounds[:-1] + held * rows)[:, None] + slots
        source_S = np.empty(sequences.total + held * len(sequences), dtype=np.int64)
        source_S[first_NR.reshape(-1)] = np.arange(first_NR.size)
        source_S[token_P + held] = first_NR.size + np.arange(sequences.total)
        last_NR = (bounds[1:] + held * rows)[:, None] + slots
        return cls(*(sequences.move(index) for index in (source_S, token_P, last_NR.reshape(-1))))


def _check(x_BTC: Tensor, weight_Cw: Tensor) -> None:
    if x_BTC.dim() != 3:
        raise ValueError(f"x has shape {tuple(x_BTC.shape)}; it must be [B, T, channels]")
    if weight_Cw.dim() != 2 or weight_Cw.shape[0] != x_BTC.shape[2] or weight_Cw.shape[1] < 2:
        raise ValueError(
            f"weight has shape {tuple(weight_Cw.shape)}; it must be [{x_BTC.shape[2]}, width], width at least 2"
        )
