"""Shared cases of the operations' tests: lengths around a window's edges, tensors, maps, mixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.windowed_linear import Mix, SeparateMix, SharedMix

W = 4


def lengths(w: int) -> list[int]:
    """DESIGN section 4: {1, w-1, w, w+1, 2w-1, 2w, 2w+1, 3w+5}."""
    return sorted({max(1, n) for n in (1, w - 1, w, w + 1, 2 * w - 1, 2 * w, 2 * w + 1, 3 * w + 5)})


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    map_q: FeatureMap
    map_k: FeatureMap

    def rows(self, rows: slice, tokens: slice) -> Inputs:
        return Inputs(
            self.q[rows, tokens], self.k[rows, tokens], self.v[rows, tokens], self.map_q, self.map_k
        )


def inputs(
    batch: int,
    length: int,
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 8,
    values: int | None = None,
    features: int = 8,
    activation: str = "softmax",
    two_sided: bool = True,
    kv_maps: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    grad: bool = False,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    width = features // 2 if two_sided else features

    def feature_map(count: int) -> FeatureMap:
        bias = None if two_sided else normal(count, width)
        return FeatureMap(normal(count, dim, width), activation, two_sided, bias)

    return Inputs(
        normal(batch, length, heads, dim),
        normal(batch, length, groups, dim),
        normal(batch, length, groups, values or dim),
        feature_map(heads),
        feature_map(groups if kv_maps else heads),
    )


def mixes(heads: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> dict[str, Mix]:
    """Every way to combine near and far, with uneven parameters."""

    def values(start: float) -> Tensor:
        return (start + 0.1 * torch.arange(heads, dtype=torch.float64)).to(dtype).requires_grad_(grad)

    return {
        "shared": SharedMix(values(0.1)),
        "shared-1mg": SharedMix(values(0.2), eta="one_minus_gamma"),
        "separate": SeparateMix(gate_H=values(0.3)),
        "separate-zero": SeparateMix(gate_H=values(0.3), empty_far="zero"),
        "mass": SeparateMix(mass_bias_H=values(-0.5)),
    }
