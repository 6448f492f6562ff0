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

    def targets(self, labels_BT: Tensor, ignored: int) -> Tensor:
        """The labels that a next-token loss counts: neither padding nor a sequence's first token of this call, whose
        prediction would come from padding or from another document."""
        if self.real_P is None and self.sequences.is_dense:
            return labels_BT
        flat = labels_BT.flatten()
        real = (
            torch.arange(len(flat), device=flat.device)
            if self.real_P is None
            else self.real_P.to(flat.device)
        )
        begins = [b for b, n in zip(self.sequences.bounds, self.sequences.lengths, strict=False) if n]
        later = torch.ones(len(real), dtype=torch.bool, device=flat.device)
        later[torch.tensor(begins, device=flat.device)] = False
        counted = real[later]
        return torch.full_like(flat, ignored).index_copy(0, counted, flat[counted]).view(self.shape)


def build_layout(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cached: bool = False,
    past_columns: int = 0,
    past_lengths: list[int] | None = None,
) -> SequenceLayout:
    """The layout of a `[B, T]` call.

    `cached` says that the call has a cache, `past_lengths` are the real tokens each row has in it, `past_columns` the
    columns seen (padding included). What is given must agree: a mask with position ids, position ids with `cu_seqlens`.
    Raises ValueError for a mask with holes, position ids that are neither consecutive nor packed, and for packed rows
    with a cache.
    """
    rows, columns = shape
    starts = past_lengths or [0] * rows
    if len(starts) != rows:
        raise ValueError(
            f"the cache holds {len(starts)} rows and input_ids has {rows}; give a cache with {rows} rows (or a new one)"
        )
    if columns < 1:
        raise ValueError(f"input_ids has shape {shape}; it must hold at least one token a row")
    positions = _checked_positions(shape, position_ids) if position_ids is not None else None
    if attention_mask is not None:
        layout = _masked(shape, device, attention_mask, past_columns, starts)
    else:
        layout = SequenceLayout(shape, Sequences.dense(rows, columns, starts, device))
    if cu_seqlens is not None:
        if layout.real_P is not None:
            raise ValueError(
                "attention_mask marks padding beside cu_seqlens; give packed rows without padding, or the mask alone"
            )
        layout = _packed(shape, cu_seqlens.to(device), cached)
    if positions is None or _agrees(layout, positions):
        return layout
    if cu_seqlens is not None:
        raise ValueError(
            "position_ids disagree with cu_seqlens; they must restart at 0 where cu_seqlens begins a document"
        )
    return _from_positions(layout, positions, cached)


def _packed(shape: tuple[int, int], cu_seqlens: Tensor, cached: bool) -> SequenceLayout:
    if cached:
        raise ValueError(
            "cu_seqlens with a cache is not allowed: packed rows cannot be continued; pass use_cache=False"
        )
    total = shape[0] * shape[1]
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens is a {cu_seqlens.dtype} tensor of shape {tuple(cu_seqlens.shape)}; it must be [documents + 1] integers"
        )
    if int(cu_seqlens[-1]) != total:
        raise ValueError(
            f"cu_seqlens ends at {int(cu_seqlens[-1])}; the rows hold {shape[0]} x {shape[1]} = {total} tokens"
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
    if mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"attention_mask holds {float(mask.min())} to {float(mask.max())}; it must hold 1 for tokens and 0 for padding"
        )
    whole = mask.bool()
    real = whole[:, -columns:]
    start_B = torch.tensor(starts, device=mask.device)
    # one rise at most in a row, and a row with tokens in the cache cannot start over after padding
    rises = (whole[:, 1:] & ~whole[:, :-1]).sum(1) + whole[:, 0]
    late = (~real[:, 0]) & real.any(1) & (start_B > 0)
    holes = torch.nonzero((rises > 1) | late).flatten().tolist()
    if holes:
        raise ValueError(
            f"attention_mask row {holes[0]} has a hole (1s, then 0s, then 1s); pad on the left or on the right only"
        )
    if past_columns and mask.shape[1] > columns:
        seen = whole[:, :-columns].sum(1)
        wrong = torch.nonzero(seen != start_B).flatten().tolist()
        if wrong:
            raise ValueError(
                f"attention_mask row {wrong[0]} marks {int(seen[wrong[0]])} earlier tokens; the cache holds"
                f" {starts[wrong[0]]}. Give the mask that the cached tokens came with, then this call's"
            )
    lengths = real.sum(1).tolist()
    if all(length == columns for length in lengths):
        return SequenceLayout(shape, Sequences.dense(rows, columns, starts, device))
    if not any(lengths):
        raise ValueError(
            "attention_mask marks every token of this call as padding; at least one must be a token"
        )
    real_P = torch.nonzero(real.flatten()).flatten().to(device)
    sequences = Sequences(lengths, starts, shape=(1, sum(lengths)), device=device)
    return SequenceLayout(shape, sequences, real_P)


def _checked_positions(shape: tuple[int, int], position_ids: Tensor) -> Tensor:
    """`[B, T]`"""
    rows, columns = shape
    if position_ids.dim() != 2 or position_ids.shape[1] != columns or position_ids.shape[0] not in (1, rows):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; it must be [{rows}, {columns}]"
        )
    return position_ids.expand(rows, columns)


def _agrees(layout: SequenceLayout, positions_BT: Tensor) -> bool:
    """Whether the real tokens have the positions that the layout counts (whatever stands at padding)."""
    expected = layout.sequences.tensor("position")
    found = positions_BT.to(expected.device).flatten()
    return bool(
        (found == expected).all() if layout.real_P is None else (found[layout.real_P] == expected).all()
    )


def _from_positions(layout: SequenceLayout, positions_BT: Tensor, cached: bool) -> SequenceLayout:
    """Rows packed with documents, each counted from 0."""
    rows, columns = layout.shape
    restart = positions_BT == 0
    consecutive = positions_BT[:, 1:] == positions_BT[:, :-1] + 1
    packed = bool(restart[:, 0].all()) and bool((consecutive | restart[:, 1:]).all())
    if layout.real_P is not None or not packed:
        starts = list(layout.sequences.starts)
        raise ValueError(
            f"position_ids run {positions_BT[0, :4].tolist()}...; they must count each row's tokens from"
            f" {starts[0] if len(set(starts)) == 1 else starts} without a jump, or restart at 0 where a packed document"
            " begins (attention_mask tells where padding is)"
        )
    if cached:
        raise ValueError(
            "position_ids restart inside a row, and packed rows cannot be continued by a cache; pass use_cache=False"
        )
    bounds = torch.cat([torch.nonzero(restart.flatten()).flatten().cpu(), torch.tensor([rows * columns])])
    return SequenceLayout(layout.shape, Sequences.packed(bounds.to(layout.sequences.device)))
