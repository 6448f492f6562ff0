"""Signature, validation and dispatch of windowed linear attention (LoLCATs Eq. 6; DESIGN D1-D4, D12).

Legend: B rows, T tokens, H query heads, G KV heads, D head dim, V value dim, Q query rows, S keys.
"""

from __future__ import annotations

from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.linear.api import check_maps
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import HYBRID, Ablation, Impl, Result, check_qkv, outside_autocast, resolve_impl
from hybridize.ops.windowed_linear import chunked, reference
from hybridize.ops.windowed_linear.definition import Definition
from hybridize.ops.windowed_linear.mix import Mix, SeparateMix, SharedMix
from hybridize.ops.windowed_linear.state import WindowedLinearState
from hybridize.windows import Window

IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}


@outside_autocast
def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    map_q: FeatureMap,
    map_k: FeatureMap,
    window: Window,
    mix: Mix,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    ablation: Ablation = HYBRID,
    sequences: Sequences | None = None,
    state: WindowedLinearState | None = None,
    return_state: bool = False,
    return_aux: bool = False,
    impl: Impl = "auto",
) -> Result:
    """Softmax over the near keys and linear attention over the far ones, from raw q, k (after RoPE) and the maps.

    `scale` multiplies q.k in the softmax only (default D^-1/2); `softcap` bounds its scores. Returns `o_BTHV` in v's
    dtype; with `return_state` the state after the last token; with `return_aux` the masses `near_den`, `far_den`, the
    subtracted maximum `shift` and the weights' `far_share`, `[B, T, H]` each. Raises ValueError for shapes or choices that do not fit.
    """
    check_qkv(q_BTHD, k_BTGD, v_BTGV)
    check_maps(q_BTHD, k_BTGD, map_q, map_k)
    check_mix(mix, map_q, q_BTHD.shape[2])
    if window.size < 1:
        raise ValueError(f"window.size is {window.size}; it must be at least 1 key")
    if sequences is None:
        starts = state.lengths_N.tolist() if state is not None else None
        sequences = Sequences.dense(q_BTHD.shape[0], q_BTHD.shape[1], starts, q_BTHD.device)
    definition = _define(q_BTHD, map_q, map_k, window, mix, scale, softcap, ablation)
    module = IMPLEMENTATIONS[resolve_impl(impl, tuple(IMPLEMENTATIONS))]
    return module.forward(q_BTHD, k_BTGD, v_BTGV, definition, sequences, state, return_state, return_aux)


@outside_autocast
def step(
    q_B1HD: Tensor,
    k_B1GD: Tensor,
    v_B1GV: Tensor,
    map_q: FeatureMap,
    map_k: FeatureMap,
    window: Window,
    mix: Mix,
    state: WindowedLinearState,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    ablation: Ablation = HYBRID,
    starts: tuple[int, ...] | None = None,
) -> Result:
    """One token a row. `starts` are the state's lengths as integers, where the caller has them (saves a device sync)."""
    starts = tuple(state.lengths_N.tolist()) if starts is None else starts
    definition = _define(q_B1HD, map_q, map_k, window, mix, scale, softcap, ablation)
    return chunked.step(q_B1HD, k_B1GD, v_B1GV, definition, starts, state)


@outside_autocast
def coefficients(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    map_q: FeatureMap,
    map_k: FeatureMap,
    window: Window,
    mix: Mix,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    rows: slice = slice(None),
) -> Tensor:
    """Weights `A_BHQS` of v for the queries in `rows` of dense rows; differentiable, memory Q x S."""
    definition = _define(q_BTHD, map_q, map_k, window, mix, scale, softcap, HYBRID)
    return reference.coefficients(q_BTHD, k_BTGD, definition, rows)


def _define(
    q_BTHD: Tensor,
    map_q: FeatureMap,
    map_k: FeatureMap,
    window: Window,
    mix: Mix,
    scale: float | None,
    softcap: float | None,
    ablation: Ablation,
) -> Definition:
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    return Definition(map_q, map_k, window, mix, scale, softcap, ablation)


def check_mix(mix: Mix, map_q: FeatureMap, heads: int) -> None:
    """Signed features have no mass to share or compare; per-head parameters must fit."""
    needs_mass = isinstance(mix, SharedMix) or mix.mass_bias_H is not None
    if map_q.signed and needs_mass:
        raise ValueError("activation 'identity' gives signed masses; it needs SeparateMix with a gate")
    values = (
        mix.gamma_H
        if isinstance(mix, SharedMix)
        else (mix.gate_H if mix.gate_H is not None else mix.mass_bias_H)
    )
    if values is not None and values.shape != (heads,):
        raise ValueError(f"the mix has parameters of shape {tuple(values.shape)}; q has {heads} heads")


__all__ = ["Mix", "SeparateMix", "SharedMix", "coefficients", "forward", "step"]
