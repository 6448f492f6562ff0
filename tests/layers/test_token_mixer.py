"""DESIGN section 4 for one layer: every attention, window, normalizer, map, dtype, head layout and head dim, pairwise.

The oracle is each group's own weights (`coefficients`) in float64, applied to v: quadratic, no state, no chunks.
"""

from __future__ import annotations

import pytest
import torch
from tests.layers.matrix import (
    ERROR,
    HEADS,
    NORMALIZERS,
    PAIRWISE,
    PRODUCT,
    SIZES,
    WINDOWS,
    Tensors,
    W,
    build,
    error,
    in_pieces,
    layer_spec,
    oracle,
    pieces,
    tensors,
    weighted,
)
from tests.ops.cases import lengths
from tests.pairwise import full_product, label, pairwise
from torch import Tensor, nn

from hybridize.layers.token_mixer import Call, TokenMixer
from hybridize.models.families import FAMILIES, AttentionShape
from hybridize.ops.sequences import Sequences
from hybridize.spec import RECURRENT, HybridSpec


@torch.no_grad()
def check(row: dict) -> None:
    heads, kv_heads = HEADS[row["heads"]]
    dim, dtype = row["dim"], row["dtype"]
    mixer = build(layer_spec(row), heads, kv_heads, dim, row.get("softcap"))
    w = row["size"]
    longest = 3 * w + 5
    # Mamba-2 rounds dt k to the inputs' dtype: where q k cancels that shows
    bound = ERROR[dtype] * (4 if row["attention"] == "mamba2" and dtype != torch.float32 else 1)
    x = tensors(2, longest, heads, kv_heads, dim, dtype)
    exact = oracle(mixer, x)
    for length in lengths(w):
        o = x.cut(0, length).through(mixer)
        assert o.dtype == dtype
        assert error(o, exact[:, :length]) < bound, f"prefix of {length}"
    for sizes in pieces(w):
        assert error(in_pieces(mixer, x, sizes), exact) < bound, f"pieces {sizes}"
    # documents of uneven length in one row; the second one is poison
    documents = [1, w + 1, longest, w]
    singles = [tensors(1, n, heads, kv_heads, dim, dtype, seed=n) for n in documents]
    singles[1] = singles[1].map(lambda y: torch.full_like(y, torch.nan))
    bounds = torch.tensor(documents).cumsum(0)
    sequences = Sequences.packed(torch.cat([torch.zeros(1, dtype=torch.int64), bounds]))
    o = Tensors.packed(singles).through(mixer, sequences)
    for number, piece in enumerate(o.split(documents, 1)):
        if number == 1:
            assert piece.isnan().all()
        else:
            assert error(piece, oracle(mixer, singles[number])) < bound, f"document {number}"


@pytest.mark.parametrize("row", PAIRWISE, ids=label)
def test_matrix(row):
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row,common", PRODUCT, ids=[label(row) for row, _ in PRODUCT])
def test_full_product(row, common):
    """Every choice with every other: about 44,000 layers, hours on one core."""
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
    ]
    + pairwise({"attention": RECURRENT, "conv": (None, 3), "heads": ("mha", "gqa"), "size": (W, 64)}),
    ids=label,
)
def test_gradients_equal_the_oracles(row):
    """Of q, k, v, the layer's input and every parameter, in float64; through one pass and through pieces that hand on their state."""
    heads, kv_heads = HEADS[row["heads"]]
    mixer = build(layer_spec(row), heads, kv_heads, 6, row.get("softcap")).double()
    length = 3 * row["size"] + 5
    x = tensors(2, length, heads, kv_heads, 6, torch.float64)
    x = x.map(Tensor.requires_grad_)
    leaves = [x.q, x.k, x.v, *mixer.groups.parameters()]
    if any(group.spec.recurrent for group in mixer.mixers) and row["attention"] != "lightning":
        leaves.append(x.x)
    ways = {
        "whole": lambda: x.through(mixer),
        "pieces": lambda: in_pieces(mixer, x, pieces(row["size"])[1]),
    }
    exact = weighted(mixer, x)
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
        *({"attention": kind} for kind in RECURRENT),
        {"attention": "gdn", "conv": 4},
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
        singles[poisoned] = singles[poisoned].map(lambda y: torch.full_like(y, torch.nan))
    alone = [x.through(mixer) for x in singles]
    states, begins = [None], [0] * len(documents)
    for ends in ([(n + 1) // 2 for n in documents], documents):
        counts = [e - b for b, e in zip(begins, ends, strict=True)]
        cuts = [x.cut(b, e) for x, b, e in zip(singles, begins, ends, strict=True)]
        sequences = Sequences.packed(torch.tensor([0, *counts]).cumsum(0), begins)
        o = Tensors.packed(cuts).through(mixer, sequences, states)
        for piece, whole, b, e in zip(o.split(counts, 1), alone, begins, ends, strict=True):
            torch.testing.assert_close(piece, whole[:, b:e], rtol=1e-4, atol=1e-4, equal_nan=True)
        begins = ends


@pytest.mark.parametrize("attention", ["linear", "windowed_linear", *RECURRENT])
@torch.no_grad()
def test_states_stay_float32_and_sums_leave_autocast(attention):
    row = {"attention": attention, "size": W}
    if attention == "windowed_linear":
        row["window"] = "sliding"
    mixer = build(layer_spec(row), 4, 2, 16)
    x = tensors(1, 40, 4, 2, 16, torch.bfloat16)
    states = [None]
    plain = x.through(mixer, states=states)
    if attention in RECURRENT:
        assert states[0].S_NHDV.dtype == torch.float32
    else:
        far = states[0] if attention == "linear" else states[0].far
        assert far.S_NJFV.dtype == far.z_NJF.dtype == torch.float32
    if attention == "windowed_linear":
        assert states[0].ring.k_NRGD.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        automatic = x.through(mixer, states=[None])
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


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@torch.no_grad()
def test_dressed_groups_by_hand():
    """Norms of q and k a head, then positions, then the scale on q; the output's norm over the group's heads, then its gate.

    Two groups of two heads on one KV head each, head dim 8, in rows that start at token 3.
    """
    scale = {"kind": "log_position", "base": 5, "when": "always"}
    first = {"attention": "softmax", "position": {"rope": 50}, "qk_norm": True, "logit_scale": scale}
    second = {"attention": "softmax", "position": "none", "output_norm": True, "output_gate": "open"}
    groups = [{**first, "heads": "1/2", "output_gate": "half"}, {**second, "heads": "1/2"}]
    mixer = build({"groups": groups}, 4, 2, 8).double()
    for name, width in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        setattr(mixer, name, nn.Linear(32, width).double())
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    t = torch.arange(3, 14, dtype=torch.float64)
    sequences = Sequences.dense(2, 11, [3, 3])
    q, k, v = mixer.project(x, (torch.empty(0), torch.empty(0)), sequences)
    raw_q, raw_k = (linear(x).unflatten(-1, (-1, 8)) for linear in (mixer.q_proj, mixer.k_proj))
    one, two = mixer.mixers
    angle = t[:, None] * 50.0 ** (-torch.arange(4) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def turned(y: Tensor) -> Tensor:
        z = torch.complex(y[..., :4], y[..., 4:]) * turn
        return torch.cat([z.real, z.imag], -1)

    factor = ((t + 5).log() / torch.tensor(5.0).double().log())[:, None, None]
    expected_q = torch.cat([turned(rms(raw_q[:, :, :2], one.q_norm.weight)) * factor, raw_q[:, :, 2:]], 2)
    expected_k = torch.cat([turned(rms(raw_k[:, :, :1], one.k_norm.weight)), raw_k[:, :, 1:]], 2)
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, expected_k, rtol=1e-5, atol=1e-5)
    o = mixer.attend(q, k, v, sequences, x_BTE=x)
    half = o[:, :, :2] * torch.sigmoid(x @ one.output_gate.weight.T).unflatten(-1, (2, 8))
    normed = rms(o[:, :, 2:].flatten(2), two.output_norm.weight)
    opened = (2 * torch.sigmoid(x @ two.output_gate.weight.T) * normed).unflatten(-1, (2, 8))
    y = mixer.o_proj(torch.cat([half, opened], 2).flatten(2))
    torch.testing.assert_close(mixer.finish(o, x), y)
    torch.testing.assert_close(mixer(x, (None, None), hybrid_call=Call(sequences))[0], y)


@torch.no_grad()
def test_positions_and_scales_follow_each_row():
    """Rows of a packed call count from their own first token, and a cached row from where it stands."""
    scale = {"kind": "log_length", "length": 4, "when": "always"}
    mixer = build({"attention": "softmax", "position": {"rope": 50}, "logit_scale": scale}, 2, 1, 8)
    for name, width in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
        setattr(mixer, name, nn.Linear(16, width))
    x, nothing = torch.randn(1, 9, 16), (torch.empty(0), torch.empty(0))
    whole = mixer.project(x, nothing, Sequences.dense(1, 9))
    later = mixer.project(x[:, 4:], nothing, Sequences.dense(1, 5, [4]))
    packed = mixer.project(torch.cat([x, x], 1), nothing, Sequences.packed(torch.tensor([0, 9, 18])))
    for all_of_it, rest, twice in zip(whole, later, packed, strict=True):
        torch.testing.assert_close(rest, all_of_it[:, 4:])
        torch.testing.assert_close(twice, torch.cat([all_of_it, all_of_it], 1))


@torch.no_grad()
def test_a_layer_without_own_window_takes_the_teachers():
    """A softmax group whose spec names no window keeps the model's own; `teacher` is the attention replaced."""
    mixer = build({"attention": "softmax"}, 4, 2, 8)
    narrow = AttentionShape(0, 32, 4, 2, 8, 8**-0.5, None, W, True)
    attention = nn.Module()
    attention.o_proj = nn.Linear(32, 32)
    windowed = TokenMixer(attention, FAMILIES["llama"], narrow, mixer.spec)
    x = tensors(1, 20, 4, 2, 8, torch.float32)
    own = build({"attention": "softmax", "window": {"kind": "sliding", "size": W}}, 4, 2, 8)
    sequences = Sequences.dense(1, 20)
    expected = x.through(own)
    torch.testing.assert_close(x.through(windowed), expected)
    torch.testing.assert_close(windowed.teacher(x.q, x.k, x.v, sequences), expected)
    assert error(x.through(mixer), expected.double()) > 0.1


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
