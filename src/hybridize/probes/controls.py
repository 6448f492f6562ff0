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
    """The student's spec with every layer that is not plain full softmax replaced by a window of the same bytes, SINKS of
    its keys being sinks; None where a layer's bytes do not hold a single key besides them.

    Full softmax layers are the teacher's own, so in a layer-wise hybrid only the other layers become windows. Where the teacher itself
    sees a shorter window, its own is kept.
    """
    layers = []
    for layer, shape in zip(spec.layers, shapes, strict=True):
        if all(group.attention == "softmax" and group.window is None for group in layer.groups):
            layers.append(LayerSpec(groups=(GroupSpec(attention="softmax", heads=shape.heads),)))
            continue
        size = _keys(layer, shape, dtype_bytes) - SINKS
        if size < 1:
            return None
        window = None if shape.window is not None and size >= shape.window else Window("sliding", size, SINKS)
        layers.append(LayerSpec(groups=(GroupSpec(attention="softmax", heads=shape.heads, window=window),)))
    return ResolvedSpec(layers=tuple(layers))


def window_sizes(spec: ResolvedSpec) -> list[int]:
    """The different window sizes of a control, rising."""
    return sorted({group.window.size for group in spec.groups if group.window is not None})


def _keys(layer: LayerSpec, shape: AttentionShape, dtype_bytes: int) -> int:
    """How many keys and values the layer's state would hold."""
    held = state_bytes(ResolvedSpec(layers=(layer,)), [shape], LONG, dtype_bytes)
    return held // (2 * shape.kv_heads * shape.head_dim * dtype_bytes)
