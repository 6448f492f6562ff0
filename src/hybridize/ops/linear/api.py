"""Signature, validation and dispatch of linear attention (Katharopoulos et al. 2020; LoLCATs Eq. 2-3).

Legend: B rows, T tokens, H query heads, G KV heads, D head dim, V value dim.
"""

from __future__ import annotations

from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.linear import chunked, reference
from hybridize.ops.linear.state import LinearState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Impl, Result, check_qkv, outside_autocast, resolve_impl

IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}


@outside_autocast
def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    map_q: FeatureMap,
    map_k: FeatureMap,
    *,
    sequences: Sequences | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
) -> Result:
    """Causal linear attention from raw q, k (after RoPE) and the maps.

    Returns `o_BTHV` in v's dtype and, with `return_state`, the float32 state after the last token. `sequences` says how
    the tokens divide into sequences (default: dense rows, continuing `state`). Raises ValueError for shapes that do not fit.
    """
    sequences = prepare(q_BTHD, k_BTGD, v_BTGV, map_q, map_k, sequences, state)
    module = IMPLEMENTATIONS[resolve_impl(impl, tuple(IMPLEMENTATIONS))]
    return module.forward(q_BTHD, k_BTGD, v_BTGV, map_q, map_k, sequences, state, return_state)


@outside_autocast
def step(
    q_B1HD: Tensor, k_B1GD: Tensor, v_B1GV: Tensor, map_q: FeatureMap, map_k: FeatureMap, state: LinearState
) -> Result:
    """One token a row; the state holds every earlier one."""
    return chunked.step(q_B1HD, k_B1GD, v_B1GV, map_q, map_k, state)


@outside_autocast
def coefficients(
    q_BTHD: Tensor, k_BTGD: Tensor, map_q: FeatureMap, map_k: FeatureMap, rows: slice = slice(None)
) -> Tensor:
    """Weights `A_BHQS` of v for the queries in `rows`; each row sums to 1."""
    return reference.coefficients(q_BTHD, k_BTGD, map_q, map_k, rows)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map_q: FeatureMap,
    map_k: FeatureMap,
    sequences: Sequences | None,
    state: LinearState | None,
) -> Sequences:
    """Check shapes; the call's sequences (dense rows that continue the state unless given)."""
    check_qkv(q, k, v)
    check_maps(q, k, map_q, map_k)
    if sequences is not None:
        return sequences
    starts = state.lengths_N.tolist() if state is not None else None
    return Sequences.dense(q.shape[0], q.shape[1], starts, q.device)


def check_maps(q_BTHD: Tensor, k_BTGD: Tensor, map_q: FeatureMap, map_k: FeatureMap) -> None:
    """Refuse maps whose heads or features do not fit the tensors or each other."""
    heads, groups = q_BTHD.shape[2], k_BTGD.shape[2]
    if map_q.heads != heads:
        raise ValueError(f"map_q has {map_q.heads} heads; q has {heads}")
    if map_k.heads not in (heads, groups):
        raise ValueError(
            f"map_k has {map_k.heads} heads; allowed are {heads} (query heads) and {groups} (KV heads)"
        )
    if map_q.features != map_k.features:
        raise ValueError(f"map_q gives {map_q.features} features and map_k {map_k.features}; they must agree")
