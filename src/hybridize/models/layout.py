"""How the rows of one call divide into sequences: from `cu_seqlens`, position ids or a 2-D mask, made once a call.

Padded and packed calls become one packed row `[1, P]` of real tokens for the whole model; dense calls stay `[B, T]`.

Legend: B rows, T columns of this call, P real tokens, N sequences, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences


@dataclass(frozen=True)
class SequenceLayout:
    """The call's sequences, their positions (`[B, T]` or `[1, P]`), and for padded or packed calls the way in and out.

    `real_P` indexes the real tokens in the flattened `[B*T]`; None where every token is real and stays in place.
    """

    shape: tuple[int, int]
    sequences: Sequences
    real_P: Tensor | None = None

    @property
    def position_ids(self) -> Tensor:
        return self.sequences.tensor("position").view(self.sequences.shape)

    def enter(self, x_BT: Tensor) -> Tensor:
        """`[B, T, ...]` to the shape that the layers see."""
        if self.real_P is not None:
            return x_BT.flatten(0, 1).index_select(0, self.real_P)[None]
        return x_BT.reshape(*self.sequences.shape, *x_BT.shape[2:])

    def leave(self, x: Tensor) -> Tensor:
        """Back to `[B, T, ...]`; zero at padding."""
        if self.real_P is None:
            return x.reshape(*self.shape, *x.shape[2:])
        rows, columns = self.shape
        out = x.new_zeros(rows * columns, *x.shape[2:])
        return out.index_copy(0, self.real_P, x[0]).view(rows, columns, *x.shape[2:])


def build_layout(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    past_columns: int = 0,
    past_lengths: list[int] | None = None,
) -> SequenceLayout:
    """The layout of a `[B, T]` call.

    `past_lengths` are the real tokens each row has in the cache, `past_columns` the columns seen (padding included).
    Raises ValueError for a mask with holes, position ids that are neither consecutive nor packed, and for packed rows
    that continue a cache.
    """
    rows, columns = shape
    starts = past_lengths or [0] * rows
    if len(starts) != rows:
        raise ValueError(f"the cache holds {len(starts)} rows; this call has {rows}")
    if columns < 1:
        raise ValueError("input_ids has no tokens")
    if cu_seqlens is not None:
        return _packed(shape, cu_seqlens.to(device), past_columns)
    if attention_mask is not None:
        return _masked(shape, device, attention_mask, past_columns, starts)
    if position_ids is not None and columns > 1:
        return _from_positions(shape, device, position_ids, past_columns, starts)
    return SequenceLayout(shape, Sequences.dense(rows, columns, starts, device))


def _packed(shape: tuple[int, int], cu_seqlens: Tensor, past_columns: int) -> SequenceLayout:
    if past_columns:
        raise ValueError("cu_seqlens with a cache is not allowed: packed rows cannot be continued")
    if cu_seqlens.dim() != 1 or int(cu_seqlens[-1]) != shape[0] * shape[1]:
        raise ValueError(
            f"cu_seqlens ends at {int(cu_seqlens[-1])}; the rows hold {shape[0]} x {shape[1]} = {shape[0] * shape[1]} tokens"
        )
    return SequenceLayout(shape, Sequences.packed(cu_seqlens))


def _masked(
    shape: tuple[int, int], device: torch.device, mask: Tensor, past_columns: int, starts: list[int]
) -> SequenceLayout:
    rows, columns = shape
    if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] not in (columns, past_columns + columns):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be 2-D, [{rows}, {columns}]"
            + (f" or [{rows}, {past_columns + columns}]" if past_columns else "")
        )
    whole = mask.bool()
    real = whole[:, -columns:]
    # one rise at most in a row, and a row with tokens in the cache cannot start over after padding
    rises = (whole[:, 1:] & ~whole[:, :-1]).sum(1) + whole[:, 0]
    late = (~real[:, 0]) & real.any(1) & (torch.tensor(starts, device=mask.device) > 0)
    holes = torch.nonzero((rises > 1) | late).flatten().tolist()
    if holes:
        raise ValueError(
            f"attention_mask row {holes[0]} has a hole (1s, then 0s, then 1s); pad on the left or on the right only"
        )
    lengths = real.sum(1).tolist()
    if all(length == columns for length in lengths):
        return SequenceLayout(shape, Sequences.dense(rows, columns, starts, device))
    if not any(lengths):
        raise ValueError("attention_mask marks every token of this call as padding")
    real_P = torch.nonzero(real.flatten()).flatten().to(device)
    sequences = Sequences(lengths, starts, shape=(1, sum(lengths)), device=device)
    return SequenceLayout(shape, sequences, real_P)


def _from_positions(
    shape: tuple[int, int], device: torch.device, position_ids: Tensor, past_columns: int, starts: list[int]
) -> SequenceLayout:
    rows, columns = shape
    if position_ids.dim() != 2 or position_ids.shape[1] != columns or position_ids.shape[0] not in (1, rows):
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; it must be [{rows}, {columns}]")
    positions = position_ids.to("cpu").expand(rows, columns)
    first = torch.tensor(starts)
    if bool((positions == first[:, None] + torch.arange(columns)).all()):
        return SequenceLayout(shape, Sequences.dense(rows, columns, starts, device))
    restart = positions == 0
    consecutive = positions[:, 1:] == positions[:, :-1] + 1
    if past_columns or not bool(restart[:, 0].all()) or not bool((consecutive | restart[:, 1:]).all()):
        raise ValueError(
            "position_ids must count every row from its first token (after the cache's tokens), or restart at 0 where a"
            " packed document begins; give attention_mask for padded rows"
        )
    bounds = torch.cat([torch.nonzero(restart.flatten()).flatten(), torch.tensor([rows * columns])])
    return SequenceLayout(shape, Sequences.packed(bounds.to(device)))
