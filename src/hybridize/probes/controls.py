"""The control that needs no training: the teacher itself under a sliding window and sinks with the student's bytes of state.

A hybrid that does not beat it has bought nothing with its linear branch (compare StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridize.models.families import AttentionShape
from hybridize.plan.bytes import state_bytes
from hybridize.spec import GroupSpec, LayerSpec, ResolvedSpec
from hybridize.windows import Window

LONG = 1 << 20
"""Tokens after which every window and state has its final size."""
SINKS = 4


def window_control(
    spec: ResolvedSpec, shapes: Sequence[AttentionShape], dtype_bytes: int
) -> ResolvedSpec | None:
    """The student's spec with everything that is not plain full softmax replaced by a window of the same bytes, SINKS of
    its keys being sinks; None where these bytes do not hold a single key besides them.

    Full softmax layers, and full softmax groups of heads beside others, are the teacher's own: only the rest become windows. Where the
    teacher itself sees a shorter window, its own is kept.
    """
    layers = []
    for layer, shape in zip(spec.layers, shapes, strict=True):
        parts = [(group,) for group in layer.groups] if any(map(_full, layer.groups)) else [layer.groups]
        groups = []
        for part in parts:
            heads = sum(int(group.heads) for group in part)
            kv_heads, uneven = divmod(heads * shape.kv_heads, shape.heads)
            size = _keys(part, kv_heads, shape, dtype_bytes) - SINKS if not uneven else 0
            if all(map(_full, part)) or (shape.window is not None and size >= shape.window):
                groups.append(GroupSpec(attention="softmax", heads=heads))
            elif size < 1:
                return None
            else:
                window = Window("sliding", size, SINKS)
                groups.append(GroupSpec(attention="softmax", heads=heads, window=window))
        layers.append(LayerSpec(groups=tuple(groups)))
    return ResolvedSpec(layers=tuple(layers))


def window_sizes(spec: ResolvedSpec) -> list[int]:
    """The different window sizes of a control, rising."""
    return sorted({group.window.size for group in spec.groups if group.window is not None})


def _full(group: GroupSpec) -> bool:
    """Whether the group keeps every key, so that no window has as many bytes."""
    return group.attention == "softmax" and group.window is None


def _keys(groups: tuple[GroupSpec, ...], kv_heads: int, shape: AttentionShape, dtype_bytes: int) -> int:
    """How many keys and values of `kv_heads` heads the groups' state would hold."""
    held = state_bytes(ResolvedSpec(layers=(LayerSpec(groups=groups),)), [shape], LONG, dtype_bytes)
    return held // (2 * kv_heads * shape.head_dim * dtype_bytes)
