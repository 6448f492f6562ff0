"""The matrix of layers that the tests go through: every attention, window, normalizer, map, dtype, head layout and head dim;
how to build one, its inputs, its oracle, and ways through it in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tests.pairwise import full_product, pairwise
from torch import Tensor, nn
from torch.nn.functional import conv1d

from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.families import FAMILIES, AttentionShape
from hybridize.ops.sequences import Sequences
from hybridize.spec import RECURRENT, HybridSpec

HEADS = {"mha": (4, 4), "gqa": (8, 4), "mqa": (4, 1)}
# Chunks hold at least 64 keys: windows of 4 stay inside one, those of 24 and 64 cross several (3w + 5 tokens).
W = 4
SIZES = (W, 24, 64)
WINDOWS = {
    "sliding": {"kind": "sliding"},
    "terraced": {"kind": "terraced"},
    "sliding-sinks": {"kind": "sliding", "sinks": 3},
    "terraced-sinks": {"kind": "terraced", "sinks": 2},
    "sliding-overlap": {"kind": "sliding", "overlap": True},
    "terraced-overlap-sinks": {"kind": "terraced", "sinks": 1, "overlap": True},
}
NORMALIZERS = {
    "shared": {"kind": "shared", "gamma": 0.3},
    "shared-1mg": {"kind": "shared", "eta": "one_minus_gamma"},
    "fixed": {"kind": "separate", "gate": 0.7},
    "learnt": {"kind": "separate", "mix": "learnt"},
    "mass": {"kind": "separate", "mix": "mass"},
    "fixed-zero": {"kind": "separate", "empty_far": "zero"},
    "mass-zero": {"kind": "separate", "mix": "mass", "empty_far": "zero"},
}
MAPS = {
    "hedgehog": {"kind": "hedgehog", "features": 16},
    "hedgehog-kv-noise": {"kind": "hedgehog", "features": 10, "k_map_heads": "kv", "init": "identity_noise"},
    "t2r": {"kind": "t2r", "features": 7},
    "exp": {"kind": "hedgehog", "features": 8, "activation": "exp"},
}
COMMON = {
    "heads": tuple(HEADS),
    "dim": (64, 96, 128, 256),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "softcap": (None, 5.0),
    "size": SIZES,
}
MATRIX = {
    "softmax": {"attention": ("softmax",), **COMMON},
    "softmax-window": {
        "attention": ("softmax",),
        "window": tuple(name for name in WINDOWS if "overlap" not in name),
        **COMMON,
    },
    "linear": {"attention": ("linear",), "map": tuple(MAPS), **COMMON},
    "windowed_linear": {
        "attention": ("windowed_linear",),
        "window": tuple(WINDOWS),
        "normalizer": tuple(NORMALIZERS),
        "map": tuple(MAPS),
        **COMMON,
    },
    "recurrent": {
        "attention": RECURRENT,
        "conv": (None, 4),
        "heads": tuple(HEADS),
        "dim": COMMON["dim"],
        "dtype": COMMON["dtype"],
        "size": SIZES,
    },
    "head-wise": {
        "attention": ("head-wise",),
        "window": tuple(WINDOWS),
        "normalizer": tuple(NORMALIZERS),
        **{**COMMON, "heads": ("mha", "gqa")},
    },
}
PAIRWISE = [row for factors in MATRIX.values() for row in pairwise(factors)]
PRODUCT = [
    (row, {name: choices for name, choices in factors.items() if name in COMMON})
    for factors in MATRIX.values()
    for row in full_product({name: choices for name, choices in factors.items() if name not in COMMON})
]
"""What a kind of layer has of its own, and the choices that all of its like have."""
# what low precision may cost against float64 on the same rounded inputs, relative to the whole output
ERROR = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def group(row: dict) -> dict:
    """The spec of one row."""
    spec = {"attention": row["attention"]}
    if "window" in row:
        spec["window"] = {**WINDOWS[row["window"]], "size": row["size"]}
    if "normalizer" in row:
        spec["normalizer"] = NORMALIZERS[row["normalizer"]]
    if "map" in row:
        spec["feature_map"] = MAPS[row["map"]]
    if row.get("conv"):
        spec["short_conv"] = row["conv"]
    return spec


def layer_spec(row: dict) -> dict:
    if row["attention"] != "head-wise":
        return group(row)
    near = {"kind": "sliding", "size": row["size"]}
    mixed = {**group({**row, "attention": "windowed_linear"}), "heads": "1/4"}
    rest = [{"attention": "softmax", "window": near, "heads": "1/2"}, {"attention": "linear", "heads": "1/4"}]
    return {"groups": [*rest, mixed]}


def build(spec: dict, heads: int, kv_heads: int, dim: int, softcap: float | None = None) -> TokenMixer:
    """A float32 mixer whose own parameters have left their first values."""
    resolved = HybridSpec.model_validate({"all": spec}).resolve(
        layers=1, heads=heads, kv_heads=kv_heads, head_dim=dim
    )
    attention = nn.Module()
    attention.o_proj = nn.Linear(heads * dim, heads * dim, bias=False)
    shape = AttentionShape(0, heads * dim, heads, kv_heads, dim, dim**-0.5, softcap, None, True)
    mixer = TokenMixer(attention, FAMILIES["llama"], shape, resolved.layers[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.groups.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return mixer


@dataclass
class Tensors:
    """q, k, v as they are projected, and the layer's input x, from which recurrent attentions compute their gates."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Tensors:
        return Tensors(*map(function, vars(self).values()))

    def cut(self, begin: int, end: int) -> Tensors:
        return self.map(lambda y: y[:, begin:end])

    def through(
        self, mixer: TokenMixer, sequences: Sequences | None = None, states: list[Any] | None = None
    ) -> Tensor:
        """What `mixer` makes of them; without `sequences` every row is one."""
        sequences = sequences or Sequences.dense(*self.q.shape[:2])
        qkv = mixer.convolve(self.q, self.k, self.v, sequences, states)
        return mixer.attend(*qkv, sequences, states, x_BTE=self.x)

    @staticmethod
    def packed(singles: list[Tensors]) -> Tensors:
        return Tensors(
            *(torch.cat(parts, 1) for parts in zip(*(vars(x).values() for x in singles), strict=True))
        )


def tensors(
    rows: int, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        *((rows, length, count, dim) for count in (heads, kv_heads, kv_heads)),
        (rows, length, heads * dim),
    ]
    return Tensors(
        *(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    )


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """torch's own convolution of the channels `[B, T, heads, dim]`."""
    channels, width = weight.shape
    y = conv1d(x.flatten(2).transpose(1, 2), weight[:, None], padding=width - 1, groups=channels)
    return y[..., : x.shape[1]].transpose(1, 2).unflatten(2, x.shape[2:])


def weighted(mixer: TokenMixer, x: Tensors) -> Tensor:
    """Each group's own weights, applied to v."""
    outputs = []
    for part, (heads, kv_heads) in zip(mixer.groups, mixer.slices, strict=True):
        gates = {"x_BTE": x.x} if part.spec.recurrent else {}
        q, k, v = x.q[:, :, heads], x.k[:, :, kv_heads], x.v[:, :, kv_heads]
        if part.spec.short_conv:
            own = part.short_conv
            q, k, v = convolved(q, own.q_weight), convolved(k, own.k_weight), convolved(v, own.v_weight)
        weights = part.coefficients(q, k, slice(None), **gates)
        v = v.repeat_interleave(weights.shape[1] // v.shape[2], 2)
        outputs.append(torch.einsum("bhqs,bshv->bqhv", weights, v))
    return torch.cat(outputs, 2)


def oracle(mixer: TokenMixer, x: Tensors) -> Tensor:
    """The same in float64."""
    return weighted(copy.deepcopy(mixer).double(), x.map(Tensor.double))


def in_pieces(mixer: TokenMixer, x: Tensors, sizes: list[int]) -> Tensor:
    states, outputs, begin = [None] * len(mixer.groups), [], 0
    for size in sizes:
        sequences = Sequences.dense(x.q.shape[0], size, [begin] * x.q.shape[0])
        outputs.append(x.cut(begin, begin + size).through(mixer, sequences, states))
        begin += size
    return torch.cat(outputs, 1)


def pieces(w: int) -> list[list[int]]:
    """Ways through 3w + 5 tokens: one by one (around the edges of a wide window), uneven, whole."""
    steps = [1] * (3 * w + 5) if w == SIZES[0] else [w - 2, *[1] * 4, w - 3, *[1] * 3, w + 3]
    uneven = [2, 1, w + 2, 1, w - 3, w + 2]
    assert sum(steps) == sum(uneven) == 3 * w + 5
    return [steps, uneven, [2 * w + 1, w + 4], [3 * w + 5]]


def error(ours: Tensor, exact: Tensor) -> float:
    assert ours.shape == exact.shape
    return float((ours.double() - exact).norm() / exact.norm())
