"""Closed forms: bytes of a decoding state and parameters of the new parts, from shapes alone.

H query heads, G key/value heads, D head dim (also the value dim V), F features, w window (or a convolution's width), L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridize.models.families import AttentionShape
from hybridize.spec import SOFTMAX, GroupSpec, ResolvedSpec, SeparateNormalizer

FLOAT32 = 4


def state_bytes(
    spec: ResolvedSpec, shapes: Sequence[AttentionShape], length: int, dtype_bytes: int = 2
) -> int:
    """Bytes that one sequence of `length` tokens keeps between decode steps, all layers together.

    Softmax keeps 2·S·G·D numbers in the model's dtype, S the keys in sight: all of them, or a window's ring and sinks.
    Linear attention keeps S[F, V] and z[F] for each of its key heads, in float32: H_k·F·(V + 1)·4 bytes; recurrent
    attention S[D, V] for each of its query heads, and behind a short convolution of width w the last w - 1 inputs of q, k and
    v, (w - 1)(H + 2G)·D numbers in the model's dtype.

    Args:
        spec: one entry a layer, heads as counts.
        shapes: the model's attention shapes, one a layer.
        dtype_bytes: bytes of a cached key or value number.
    """
    return sum(
        _group_bytes(group, shape, length, dtype_bytes)
        for layer, shape in zip(spec.layers, shapes, strict=True)
        for group in layer.groups
    )


def softmax_spec(shapes: Sequence[AttentionShape]) -> ResolvedSpec:
    """The teacher as a spec: every head its own softmax attention."""
    first = shapes[0]
    return SOFTMAX.resolve(
        layers=len(shapes), heads=first.heads, kv_heads=first.kv_heads, head_dim=first.head_dim
    )


def map_parameters(spec: ResolvedSpec, shapes: Sequence[AttentionShape]) -> int:
    """Parameters of all feature maps: for q and k a weight [heads, D, F/2], or [heads, D, F] and a bias if one-sided."""
    return sum(
        _group_map_parameters(group, shape)
        for layer, shape in zip(spec.layers, shapes, strict=True)
        for group in layer.groups
    )


def mix_parameters(spec: ResolvedSpec) -> int:
    """Learnt weights that mix near and far: one a query head, none where the mixture is fixed."""
    return sum(int(group.heads) for group in spec.groups if _mix_is_learnt(group))


def qkv_channels(group: GroupSpec, shape: AttentionShape) -> int:
    """Channels of q, k and v together."""
    return (int(group.heads) + 2 * _kv_heads(group, shape)) * shape.head_dim


def _group_bytes(group: GroupSpec, shape: AttentionShape, length: int, dtype_bytes: int) -> int:
    if group.recurrent:
        held = ((group.short_conv or 1) - 1) * qkv_channels(group, shape) * dtype_bytes
        return int(group.heads) * shape.head_dim * shape.head_dim * FLOAT32 + held
    near = 2 * _keys_kept(group, shape, length) * _kv_heads(group, shape) * shape.head_dim * dtype_bytes
    if group.feature_map is None:
        return near
    assert group.feature_map.features is not None
    return near + _key_maps(group, shape) * group.feature_map.features * (shape.head_dim + 1) * FLOAT32


def _keys_kept(group: GroupSpec, shape: AttentionShape, length: int) -> int:
    if group.attention == "linear":
        return 0
    if group.window is not None:
        return group.window.ring + group.window.sinks  # allocated whole at once
    return min(length, shape.window or length)


def _kv_heads(group: GroupSpec, shape: AttentionShape) -> int:
    return int(group.heads) if group.expand else int(group.heads) * shape.kv_heads // shape.heads


def _key_maps(group: GroupSpec, shape: AttentionShape) -> int:
    assert group.feature_map is not None
    return int(group.heads) if group.feature_map.k_map_heads == "query" else _kv_heads(group, shape)


def _group_map_parameters(group: GroupSpec, shape: AttentionShape) -> int:
    feature_map = group.feature_map
    if feature_map is None:
        return 0
    assert feature_map.features is not None
    width = feature_map.features // 2 if feature_map.two_sided else feature_map.features
    one_head = shape.head_dim * width + (width if feature_map.bias else 0)
    return (int(group.heads) + _key_maps(group, shape)) * one_head


def _mix_is_learnt(group: GroupSpec) -> bool:
    if group.attention != "windowed_linear":
        return False
    return not (isinstance(group.normalizer, SeparateNormalizer) and group.normalizer.mix == "fixed")
