"""Changing what a hybrid model computes, for a while or for good: ablations, dropped windows, another spec, the teacher inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, cast

from torch import Tensor

from hybridize.layers.token_mixer import Effective, Intercept, Mode, Scope, TokenMixer
from hybridize.models.families import AttentionShape, Family
from hybridize.ops.types import Removal
from hybridize.spec import ResolvedSpec


class Interventions:
    """What `HybridForCausalLM` can do besides running as it is."""

    family: Family
    spec: ResolvedSpec
    shapes: list[AttentionShape]
    config: Any  # a HybridConfig

    @property
    def mixers(self) -> list[TokenMixer]:
        """The layers' token mixers, in order."""
        return [cast(TokenMixer, module) for module in self.family.attention_modules(cast(Any, self))]

    @property
    def _mixing(self) -> list[Any]:
        """The head groups of all layers that have both branches, and so a window."""
        return [group for mixer in self.mixers for group in mixer.mixers if _both(group)]

    @contextmanager
    def override(
        self,
        mode: Mode = "hybrid",
        removal: Removal = "zero",
        scope: Scope = "mixed",
        *,
        layers: Sequence[int] | None = None,
        where: Tensor | Sequence[Tensor] | None = None,
        keep_empty: bool = False,
        window_size: int | None = None,
    ) -> Iterator[Self]:
        """Temporarily compute something else (DESIGN D11, D12): the same weights, parts removed or windows resized.

        `mode` names what stays, `removal` whether coefficients stay (`zero`) or are renormalised, `scope` whether
        only layers with both branches are touched (`mixed`) or `all`; `layers` names the layers (default: every one).
        `where` (bool, broadcast to `[B, T, H]`, or one such tensor a layer) confines the mode to some queries and heads;
        with `keep_empty` queries without a far key are left alone. `window_size` takes the place of the windows' sizes
        in layers with both branches. Do not mix caches across overrides.
        """
        _check_choice(
            "mode", mode, ("hybrid", "softmax_only", "far_only", "linear_only", "sinks_only", "none")
        )
        _check_choice("removal", removal, ("zero", "renormalize"))
        _check_choice("scope", scope, ("mixed", "all"))
        chosen = range(len(self.mixers)) if layers is None else layers
        if any(not 0 <= layer < len(self.mixers) for layer in chosen):
            raise ValueError(f"layers is {list(chosen)}; the model has layers 0 to {len(self.mixers) - 1}")
        before = [mixer.effective for mixer in self.mixers]
        windows = [(group, group.window) for group in self._mixing]
        for layer in chosen:
            here = where if where is None or isinstance(where, Tensor) else where[layer]
            self.mixers[layer].effective = Effective(mode, removal, scope, here, keep_empty, window_size)
            for group in filter(_both, self.mixers[layer].mixers):
                if window_size is not None:
                    cast(Any, group).window = replace(cast(Any, group).window, size=window_size)
        try:
            yield self
        finally:
            for mixer, effective in zip(self.mixers, before, strict=True):
                mixer.effective = effective
            for group, window in windows:
                group.window = window

    def respec(self, spec: ResolvedSpec) -> None:
        """Compute `spec` from now on, and store it in the config. Parameters that keep their name and shape keep their
        values; those that are new (a mixing weight, say) start as in a fresh conversion.

        Raises ValueError for a spec of another number of layers or heads, or that expands other layers; the model is then
        as before.
        """
        if len(spec.layers) != len(self.shapes):
            raise ValueError(f"spec has {len(spec.layers)} layers; the model has {len(self.shapes)}")
        layers = list(zip(self.mixers, spec.layers, strict=True))
        for mixer, layer in layers:
            mixer.check_respec(layer)
        for mixer, layer in layers:
            mixer.respec(layer)
        self.spec = spec
        self.config.hybrid_spec = spec.model_dump(mode="json")

    @property
    def first_far_position(self) -> int | None:
        """The first position with a far key in some layer that has both branches, under the windows in force; None without
        such a layer."""
        return min((group.window.first_far_position for group in self._mixing), default=None)

    @property
    def effective_spec(self) -> dict[str, Any]:
        """What the model computes right now: the resolved spec, the override in force (the first layer's that has one, and
        which layers share it) and the windows' sizes where these are overridden, for artefacts."""
        changed = [mixer.effective for mixer in self.mixers if mixer.effective != Effective()]
        effective = changed[0] if changed else Effective()
        override: dict[str, Any] = {
            "mode": effective.mode,
            "removal": effective.removal,
            "scope": effective.scope,
        }
        shared = [i for i, mixer in enumerate(self.mixers) if mixer.effective == effective]
        if len(shared) < len(self.mixers):
            override["layers"] = shared
        sizes = {
            cast(Any, group).window.size for mixer in self.mixers for group in mixer.mixers if _both(group)
        }
        declared = {
            group.window.size
            for group in self.spec.groups
            if group.window and group.attention == "windowed_linear"
        }
        if sizes != declared:
            override["window_sizes"] = sorted(sizes)
        return {"spec": self.spec.model_dump(mode="json"), "override": override}

    @contextmanager
    def intercepted(self, intercept: Intercept) -> Iterator[Self]:
        """`intercept(mixer, q, k, v, sequences) -> o` runs in place of every layer's attention."""
        for mixer in self.mixers:
            mixer.intercept = intercept
        try:
            yield self
        finally:
            for mixer in self.mixers:
                mixer.intercept = None

    @property
    def _intercepted(self) -> bool:
        return any(mixer.intercept is not None for mixer in self.mixers)

    def as_teacher(self) -> Any:
        """Context in which every layer computes the softmax attention it replaced: the teacher, from one set of weights.

        Nothing is cached inside: `generate` needs `use_cache=False`.
        """
        return self.intercepted(lambda mixer, q, k, v, sequences: mixer.teacher(q, k, v, sequences))


def _both(group: Any) -> bool:
    return bool(group.near and group.far)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
