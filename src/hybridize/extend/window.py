"""A softmax window for linear attention, or another window for layers that have one: mixing at inference.

"Inference-time hybrid" of arXiv 2510.05901, section 4.1: a linear conversion gains its window when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hybridize.spec import (
    LINEAR,
    GroupSpec,
    HybridSpec,
    LayerSpec,
    Normalizer,
    ResolvedSpec,
    SeparateNormalizer,
)
from hybridize.windows import Window

Spec = TypeVar("Spec", HybridSpec, ResolvedSpec)


def with_window(spec: Spec, window: Window, normalizer: Normalizer | None = None) -> Spec:
    """The spec with `window` in every group that has linear attention.

    A `linear` group becomes `windowed_linear` under `normalizer` (default: separate, g = 0.5); a `windowed_linear` group
    keeps its own normalizer unless one is given. Raises ValueError where no group has linear attention, or a group does
    not allow the change.
    """
    if not any(layer.has_linear for layer in _layers(spec)):
        raise ValueError("window: the spec has no linear attention that could gain one")

    return _map_groups(spec, lambda group: _with_window(group, window, normalizer))


def with_window_size(spec: Spec, size: int) -> Spec:
    """The spec with windows of `size` keys in every group that mixes two branches."""

    def resize(group: GroupSpec) -> GroupSpec:
        if group.attention != "windowed_linear" or group.window is None:
            return group
        return group.model_copy(update={"window": replace(group.window, size=size)})

    return _map_groups(spec, resize)


def _map_groups(spec: Spec, edit: Callable[[GroupSpec], GroupSpec]) -> Spec:
    def layer(before: LayerSpec) -> LayerSpec:
        return LayerSpec(groups=tuple(edit(group) for group in before.groups))

    if isinstance(spec, ResolvedSpec):
        return spec.model_copy(update={"layers": tuple(layer(one) for one in spec.layers)})
    layers = {name: layer(one) for name, one in spec.layers.items()}
    kept = layer(spec.kept) if spec.kept is not None else None
    return spec.model_copy(update={"all": layer(spec.all), "layers": layers, "kept": kept})


def parse_window(text: str) -> Window:
    """`sliding:64` or `terraced:32`, with `+sinks:4` and `+overlap` behind it.

    Raises ValueError for anything else.
    """
    head, *options = text.split("+")
    kind, _, size = head.partition(":")
    sinks, overlap = 0, False
    for option in options:
        name, _, count = option.partition(":")
        if name == "overlap" and not count:
            overlap = True
        elif name == "sinks" and count.isdigit():
            sinks = int(count)
        else:
            raise ValueError(f"window has the option {option!r}; allowed are +sinks:N and +overlap")
    if kind not in ("sliding", "terraced") or not size.isdigit() or int(size) < 1:
        raise ValueError(
            f"window is {text!r}; write sliding:64 or terraced:64, with +sinks:4 or +overlap behind it"
        )
    return Window("sliding" if kind == "sliding" else "terraced", int(size), sinks, overlap)


def _layers(spec: HybridSpec | ResolvedSpec) -> list[LayerSpec]:
    if isinstance(spec, ResolvedSpec):
        return list(spec.layers)
    return [spec.all, *spec.layers.values(), *([spec.kept] if spec.kept is not None else [])]


def _with_window(group: GroupSpec, window: Window, normalizer: Normalizer | None) -> GroupSpec:
    if group.attention not in LINEAR:
        return group
    chosen = normalizer or (SeparateNormalizer() if group.attention == "linear" else group.normalizer)
    changes = {"attention": "windowed_linear", "window": window, "normalizer": chosen}
    return GroupSpec.model_validate({**dict(group), **changes})
