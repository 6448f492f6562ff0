"""DESIGN section 4 for one layer: every attention, window, normalizer, map, dtype, head layout and head dim, pairwise.

The oracle is each group's own weights (`coefficients`) in float64, applied to v: quadratic, no state, no chunks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from tests.ops.cases import lengths
from tests.pairwise import full_product, label, pairwise
from torch import Tensor, nn

from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.families import FAMILIES, AttentionShape
from hybridize.ops.sequences import Sequences
from hybridize.spec import HybridSpec

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
    "head-wise": {
        "attention": ("head-wise",),
        "window": tuple(WINDOWS),
        "normalizer": tuple(NORMALIZERS),
        **{**COMMON, "heads": ("mha", "gqa")},
    },
}
PAIRWISE = [row for factors in MATRIX.values() for row in pairwise(factors)]
PRODUCT = [
    row
    for factors in MATRIX.values()
    for row in full_product({name: choices for name, choices in factors.items() if name not in COMMON})
]
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
    q: Tensor
    k: Tensor
    v: Tensor

    def cut(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[:, begin:end], self.k[:, begin:end], self.v[:, begin:end]

    def double(self) -> Tensors:
        return Tensors(self.q.double(), self.k.double(), self.v.double())


def tensors(
    rows: int, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, length, count, dim) for count in (heads, kv_heads, kv_heads)]
    return Tensors(
        *(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    )


def oracle(mixer: TokenMixer, x: Tensors) -> Tensor:
    """Each group's weights in float64, applied to v."""
    mixer, x = copy.deepcopy(mixer).double(), x.double()
    outputs = []
    for part, (heads, kv_heads) in zip(mixer.groups, mixer.slices, strict=True):
        weights = part.coefficients(x.q[:, :, heads], x.k[:, :, kv_heads], slice(None))
        v = x.v[:, :, kv_heads]
        v = v.repeat_interleave(weights.shape[1] // v.shape[2], 2)
        outputs.append(torch.einsum("bhqs,bshv->bqhv", weights, v))
    return torch.cat(outputs, 2)


def in_pieces(mixer: TokenMixer, x: Tensors, sizes: list[int]) -> Tensor:
    states, outputs, begin = [None] * len(mixer.groups), [], 0
    for size in sizes:
        piece = x.cut(begin, begin + size)
        sequences = Sequences.dense(x.q.shape[0], size, [begin] * x.q.shape[0])
        outputs.append(mixer.attend(*piece, sequences, states))
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


@torch.no_grad()
def check(row: dict) -> None:
    heads, kv_heads = HEADS[row["heads"]]
    dim, dtype = row["dim"], row["dtype"]
    mixer = build(layer_spec(row), heads, kv_heads, dim, row["softcap"])
    w = row["size"]
    longest = 3 * w + 5
    bound = ERROR[dtype]
    x = tensors(2, longest, heads, kv_heads, dim, dtype)
    exact = oracle(mixer, x)
    for length in lengths(w):
        o = mixer.attend(*x.cut(0, length), Sequences.dense(2, length))
        assert o.dtype == dtype
        assert error(o, exact[:, :length]) < bound, f"prefix of {length}"
    for sizes in pieces(w):
        assert error(in_pieces(mixer, x, sizes), exact) < bound, f"pieces {sizes}"
    # documents of uneven length in one row; the second one is poison
    documents = [1, w + 1, longest, w]
    singles = [tensors(1, n, heads, kv_heads, dim, dtype, seed=n) for n in documents]
    singles[1] = Tensors(*(torch.full_like(y, torch.nan) for y in (singles[1].q, singles[1].k, singles[1].v)))
    packed = Tensors(*(torch.cat([getattr(y, name) for y in singles], 1) for name in "qkv"))
    bounds = torch.tensor(documents).cumsum(0)
    sequences = Sequences.packed(torch.cat([torch.zeros(1, dtype=torch.int64), bounds]))
    o = mixer.attend(packed.q, packed.k, packed.v, sequences)
    for number, piece in enumerate(o.split(documents, 1)):
        if number == 1:
            assert piece.isnan().all()
        else:
            assert error(piece, oracle(mixer, singles[number])) < bound, f"document {number}"


@pytest.mark.parametrize("row", PAIRWISE, ids=label)
def test_matrix(row):
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", PRODUCT, ids=label)
def test_full_product(row):
    """Every choice with every other: about 44,000 layers, hours on one core."""
    common = {**COMMON, "heads": ("mha", "gqa")} if row["attention"] == "head-wise" else COMMON
    for rest in full_product(common):
        check({**row, **rest})


@pytest.mark.parametrize(
    "row",
    pairwise(
        {
            "attention": ("windowed_linear", "head-wise"),
            "window": tuple(WINDOWS),
            "normalizer": tuple(NORMALIZERS),
            "heads": ("mha", "gqa"),
            "softcap": (None, 5.0),
            "size": SIZES,
        }
    )
    + [
        {"attention": kind, "heads": "gqa", "softcap": cap, "size": 64}
        for kind in ("softmax", "linear")
        for cap in (None, 5.0)
    ],
    ids=label,
)
def test_gradients_equal_the_oracles(row):
    """Of q, k, v and every parameter, in float64; through one pass and through pieces that hand on their state."""
    heads, kv_heads = HEADS[row["heads"]]
    mixer = build(layer_spec(row), heads, kv_heads, 6, row["softcap"]).double()
    length = 3 * row["size"] + 5
    x = tensors(2, length, heads, kv_heads, 6, torch.float64)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v)] + list(mixer.groups.parameters())
    ways = {
        "whole": lambda: mixer.attend(x.q, x.k, x.v, Sequences.dense(2, length)),
        "pieces": lambda: in_pieces(mixer, x, pieces(row["size"])[1]),
    }
    outputs = []
    for part, (q_heads, k_heads) in zip(mixer.groups, mixer.slices, strict=True):
        weights = part.coefficients(x.q[:, :, q_heads], x.k[:, :, k_heads], slice(None))
        v = x.v[:, :, k_heads]
        v = v.repeat_interleave(weights.shape[1] // v.shape[2], 2)
        outputs.append(torch.einsum("bhqs,bshv->bqhv", weights, v))
    exact = torch.cat(outputs, 2)
    seed = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad((exact * seed).sum(), leaves)
    for name, way in ways.items():
        found = torch.autograd.grad((way() * seed).sum(), leaves)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "row",
    [
        {"attention": "linear"},
        {"attention": "softmax"},
        {"attention": "windowed_linear", "window": "terraced-sinks", "size": 64},
        {"attention": "windowed_linear", "window": "sliding", "size": 24},
    ],
    ids=label,
)
@torch.no_grad()
def test_one_long_document_among_many_short_ones(row):
    """Sums over chunks take another way where lengths differ this much; poison in one document stays there."""
    mixer = build(layer_spec(row), 4, 2, 8)
    documents = [1] * 20 + [3, 1300, 2, 700] + [1] * 20
    singles = [tensors(1, n, 4, 2, 8, torch.float32, seed=n) for n in documents]
    for poisoned in (5, 22):
        singles[poisoned] = Tensors(
            *(torch.full_like(y, torch.nan) for y in vars(singles[poisoned]).values())
        )
    alone = [
        mixer.attend(x.q, x.k, x.v, Sequences.dense(1, n)) for x, n in zip(singles, documents, strict=True)
    ]
    states, begins = [None], [0] * len(documents)
    for ends in ([(n + 1) // 2 for n in documents], documents):
        counts = [e - b for b, e in zip(begins, ends, strict=True)]
        cuts = [x.cut(b, e) for x, b, e in zip(singles, begins, ends, strict=True)]
        sequences = Sequences.packed(torch.tensor([0, *counts]).cumsum(0), begins)
        o = mixer.attend(*(torch.cat(part, 1) for part in zip(*cuts, strict=True)), sequences, states)
        for piece, whole, b, e in zip(o.split(counts, 1), alone, begins, ends, strict=True):
            torch.testing.assert_close(piece, whole[:, b:e], rtol=1e-4, atol=1e-4, equal_nan=True)
        begins = ends


@pytest.mark.parametrize("attention", ["linear", "windowed_linear"])
@torch.no_grad()
def test_states_stay_float32_and_sums_leave_autocast(attention):
    row = {"attention": attention, "size": W, **({"window": "sliding"} if attention != "linear" else {})}
    mixer = build(layer_spec(row), 4, 2, 16)
    x = tensors(1, 40, 4, 2, 16, torch.bfloat16)
    states = [None]
    plain = mixer.attend(x.q, x.k, x.v, Sequences.dense(1, 40), states)
    far = states[0] if attention == "linear" else states[0].far
    assert far.S_NJFV.dtype == far.z_NJF.dtype == torch.float32
    if attention != "linear":
        assert states[0].ring.k_NRGD.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        automatic = mixer.attend(x.q, x.k, x.v, Sequences.dense(1, 40), [None])
        stepped = in_pieces(mixer, x, [30, 1, 1, 8])
    torch.testing.assert_close(automatic, plain, rtol=0, atol=0)
    assert error(stepped, plain.double()) < ERROR[torch.bfloat16]


@torch.no_grad()
def test_three_calls_make_the_forward():
    mixer = build({"attention": "windowed_linear", "window": {"kind": "sliding", "size": W}}, 4, 2, 8)
    for name, width in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        setattr(mixer, name, nn.Linear(32, width))
    x_BTE = torch.randn(2, 11, 32)
    cos, sin = torch.randn(2, 1, 11, 8)
    q, k, v = mixer.family.project(mixer, mixer.shape, x_BTE, (cos, sin))
    y = mixer.family.finish(mixer, mixer.attend(q, k, v, Sequences.dense(2, 11)))
    torch.testing.assert_close(mixer(x_BTE, (cos, sin))[0], y)
    with pytest.raises(ValueError, match="attention_mask reached a token mixer"):
        mixer(x_BTE, (cos, sin), attention_mask=torch.ones(2, 11))


@torch.no_grad()
def test_a_layer_without_own_window_takes_the_teachers():
    """A softmax group whose spec names no window keeps the model's own; `teacher` is the attention replaced."""
    mixer = build({"attention": "softmax"}, 4, 2, 8)
    narrow = AttentionShape(0, 32, 4, 2, 8, 8**-0.5, None, W, True)
    windowed = TokenMixer(nn.Module(), FAMILIES["llama"], narrow, mixer.spec)
    x = tensors(1, 20, 4, 2, 8, torch.float32)
    own = build({"attention": "softmax", "window": {"kind": "sliding", "size": W}}, 4, 2, 8)
    sequences = Sequences.dense(1, 20)
    expected = own.attend(x.q, x.k, x.v, sequences)
    torch.testing.assert_close(windowed.attend(x.q, x.k, x.v, sequences), expected)
    torch.testing.assert_close(windowed.teacher(x.q, x.k, x.v, sequences), expected)
    assert error(mixer.attend(x.q, x.k, x.v, sequences), expected.double()) > 0.1


@pytest.mark.parametrize("counts", [(2,), (4, 2), (1, 3)])
def test_groups_that_do_not_fit_the_heads_are_refused(counts):
    """A stored spec edited by hand: too few heads, too many, or a split inside a KV group."""
    spec = (
        HybridSpec.model_validate({"all": {"attention": "softmax"}})
        .resolve(layers=1, heads=4, kv_heads=2, head_dim=8)
        .layers[0]
    )
    groups = tuple(spec.groups[0].model_copy(update={"heads": count}) for count in counts)
    shape = AttentionShape(0, 32, 4, 2, 8, 8**-0.5, None, None, True)
    with pytest.raises(
        ValueError, match=r"groups of layer 0 hold .* query heads; they must add up to 4 in multiples of 2"
    ):
        TokenMixer(nn.Module(), FAMILIES["llama"], shape, spec.model_copy(update={"groups": groups}))
