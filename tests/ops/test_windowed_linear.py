"""Windowed linear attention: brute force, chunked = reference with gradients, prefill = chunks = decode, packing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from tests.ops import brute_force
from tests.ops.cases import W, inputs, lengths, mixes

from hybridize.ops import windowed_linear as op
from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Ablation
from hybridize.windows import Window

WINDOWS = {
    "sliding": Window("sliding", W),
    "terraced": Window("terraced", W),
    "sliding-sinks": Window("sliding", W, sinks=3),
    "terraced-sinks": Window("terraced", W, sinks=6),
    "sliding-overlap": Window("sliding", W, overlap=True),
    "terraced-overlap-sinks": Window("terraced", W, sinks=2, overlap=True),
    "one": Window("sliding", 1),
}
MODES = [
    ("hybrid", "zero"),
    *product(("softmax_only", "far_only", "linear_only"), ("zero", "renormalize")),
]
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def run(x, window, mix, **kwargs):
    return op.forward(x.q, x.k, x.v, x.map_q, x.map_k, window, mix, **kwargs)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("mix_name", ["shared", "shared-1mg", "separate", "separate-zero", "mass"])
@pytest.mark.parametrize("window_name", WINDOWS)
def test_formula_by_brute_force(window_name, mix_name, impl):
    """Both implementations equal the formula, evaluated by loops in float64 numpy, to 1e-10."""
    window = WINDOWS[window_name]
    x = inputs(1, 3 * W + 5, dtype=torch.float64, kv_maps=mix_name == "shared-1mg")
    mix = mixes(4, torch.float64)[mix_name]
    plain = {
        "shared": {"kind": "shared", "gamma": getattr(mix, "gamma_H", None), "eta": "one"},
        "shared-1mg": {"kind": "shared", "gamma": getattr(mix, "gamma_H", None), "eta": "one_minus_gamma"},
        "separate": {"kind": "separate", "gate": getattr(mix, "gate_H", None), "empty_far": "renormalize"},
        "separate-zero": {"kind": "separate", "gate": getattr(mix, "gate_H", None), "empty_far": "zero"},
        "mass": {"kind": "separate", "bias": getattr(mix, "mass_bias_H", None), "empty_far": "renormalize"},
    }[mix_name]
    plain = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in plain.items()}
    for (mode, removal), softcap in zip(MODES, [None, 2.0] * 4, strict=False):
        expected = brute_force.windowed_linear(
            x.q[0].numpy(),
            x.k[0].numpy(),
            x.v[0].numpy(),
            x.map_q.weight_HDQ.numpy(),
            x.map_k.weight_HDQ.numpy(),
            kind=window.kind,
            w=window.size,
            sinks=window.sinks,
            overlap=window.overlap,
            mix=plain,
            softcap=softcap,
            mode=mode,
            removal=removal,
        )
        ours = run(x, window, mix, ablation=Ablation(mode, removal), softcap=softcap, impl=impl).o[0].numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-10, err_msg=f"{mode} {removal}")


@pytest.mark.parametrize("mix_name", ["shared", "mass"])
@pytest.mark.parametrize(
    "window",
    [
        Window("sliding", 64, sinks=3),
        Window("terraced", 64),
        Window("terraced", 24, sinks=30),
        Window("sliding", 70, overlap=True),
    ],
    ids=str,
)
def test_formula_by_brute_force_over_several_chunks(window, mix_name):
    """Chunks hold at least 64 keys: only windows and texts of this size leave the first one."""
    x = inputs(1, 3 * 64 + 5, heads=2, groups=1, dim=4, features=4, dtype=torch.float64)
    mix = mixes(2, torch.float64)[mix_name]
    if mix_name == "shared":
        plain = {"kind": "shared", "gamma": mix.gamma_H.numpy(), "eta": "one"}
    else:
        plain = {"kind": "separate", "bias": mix.mass_bias_H.numpy(), "empty_far": "renormalize"}
    tensors = [y.numpy() for y in (x.q[0], x.k[0], x.v[0], x.map_q.weight_HDQ, x.map_k.weight_HDQ)]
    shape = {"kind": window.kind, "w": window.size, "sinks": window.sinks, "overlap": window.overlap}
    for mode, removal in (("hybrid", "zero"), ("linear_only", "renormalize")):
        expected = brute_force.windowed_linear(*tensors, **shape, mix=plain, mode=mode, removal=removal)
        ours = run(x, window, mix, ablation=Ablation(mode, removal)).o[0].numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-10, err_msg=mode)


@pytest.mark.parametrize("window_name", WINDOWS)
@pytest.mark.parametrize("mix_name", ["shared", "separate", "mass"])
def test_chunked_equals_reference_with_gradients(window_name, mix_name):
    for length in lengths(W):
        results = []
        for impl in ("reference", "chunked"):
            x = inputs(2, length, dtype=torch.float64, grad=True)
            mix = mixes(4, torch.float64, grad=True)[mix_name]
            o = run(x, WINDOWS[window_name], mix, impl=impl).o
            leaves = [x.q, x.k, x.v, x.map_q.weight_HDQ, x.map_k.weight_HDQ]
            leaves += [value for value in vars(mix).values() if isinstance(value, torch.Tensor)]
            weights = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1))
            grads = torch.autograd.grad((o * weights).sum(), leaves, allow_unused=True)
            results.append([o, *[torch.zeros(1) if g is None else g for g in grads]])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_gradients_are_right():
    """Finite differences; the row maximum is differentiated (it is part of the shared normalizer's model)."""
    x = inputs(1, 7, heads=2, groups=1, dim=2, features=2, dtype=torch.float64, grad=True)
    mix = mixes(2, torch.float64, grad=True)["shared"]

    def function(q, k, v, w_q, w_k, gamma):
        maps = FeatureMap(w_q, "softmax"), FeatureMap(w_k, "softmax")
        return op.forward(q, k, v, *maps, Window("terraced", 2), op.SharedMix(gamma)).o

    leaves = (x.q, x.k, x.v, x.map_q.weight_HDQ, x.map_k.weight_HDQ, mix.gamma_H)
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("kv_maps", [False, True])
@pytest.mark.parametrize("mix_name", ["shared", "mass", "separate-zero"])
@pytest.mark.parametrize("window_name", WINDOWS)
def test_prefill_equals_chunks_equals_decode_equals_prefix(window_name, mix_name, kv_maps):
    window, mix = WINDOWS[window_name], mixes(4)[mix_name]
    longest = 5 * W + 3
    x = inputs(2, longest, kv_maps=kv_maps)
    for mode in ("hybrid", "linear_only"):
        options = {"ablation": Ablation(mode)}
        whole = run(x, window, mix, impl="reference", **options).o
        for length in lengths(W):
            prefix = run(x.rows(slice(None), slice(0, length)), window, mix, **options).o
            torch.testing.assert_close(prefix, whole[:, :length], **TOLERANCE)
        for impl in ("chunked", "reference"):
            for pieces in ([1] * longest, [3, 1, 7, 2, longest - 13], [W, W + 1, longest - 2 * W - 1]):
                outputs, state, begin = [], None, 0
                for size in pieces:
                    piece = x.rows(slice(None), slice(begin, begin + size))
                    result = run(piece, window, mix, state=state, return_state=True, impl=impl, **options)
                    state, begin = result.state, begin + size
                    outputs.append(result.o)
                torch.testing.assert_close(torch.cat(outputs, 1), whole, **TOLERANCE)
        state = run(x.rows(slice(None), slice(0, 2)), window, mix, return_state=True).state
        outputs = [whole[:, :2]]
        for t in range(2, longest):
            piece = x.rows(slice(None), slice(t, t + 1))
            result = op.step(piece.q, piece.k, piece.v, x.map_q, x.map_k, window, mix, state, **options)
            state = result.state
            outputs.append(result.o)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, **TOLERANCE)
        final = run(x, window, mix, return_state=True, impl="reference", **options).state
        torch.testing.assert_close(state.far.S_NJFV, final.far.S_NJFV, **TOLERANCE)
        torch.testing.assert_close(state.ring.k_NRGD, final.ring.k_NRGD)


@pytest.mark.parametrize("window_name", WINDOWS)
def test_packed_equals_separate_and_nothing_leaks(window_name):
    """Documents in one row, and the same continued from states of uneven lengths; poison stays in its document."""
    window, mix = WINDOWS[window_name], mixes(4)["shared"]
    documents = [1, 3 * W + 5, 0, W, 2 * W + 1]
    singles = [inputs(1, n + 9, seed=n).rows(slice(None), slice(0, n + 9)) for n in documents]
    maps = singles[0].map_q, singles[0].map_k

    def packed(pieces, **kwargs):
        bounds = torch.tensor([0, *np.cumsum([p[0].shape[1] for p in pieces])])
        sequences = Sequences.packed(bounds, kwargs.pop("starts", None))
        q, k, v = (torch.cat([p[i] for p in pieces], 1) for i in range(3))
        return op.forward(q, k, v, *maps, window, mix, sequences=sequences, **kwargs)

    def cut(x, a, b):
        return x.q[:, a:b], x.k[:, a:b], x.v[:, a:b]

    whole = [op.forward(x.q, x.k, x.v, *maps, window, mix).o for x in singles]
    first = packed([cut(x, 0, n) for x, n in zip(singles, documents, strict=True)], return_state=True)
    second = packed(
        [cut(x, n, n + 9) for x, n in zip(singles, documents, strict=True)],
        state=first.state,
        starts=documents,
    )
    expected = torch.cat([o[:, :n] for o, n in zip(whole, documents, strict=True)], 1)
    torch.testing.assert_close(first.o, expected, **TOLERANCE)
    expected = torch.cat([o[:, n:] for o, n in zip(whole, documents, strict=True)], 1)
    torch.testing.assert_close(second.o, expected, **TOLERANCE)
    assert first.state.lengths_N.tolist() == documents
    poisoned = [cut(x, 0, n) for x, n in zip(singles, documents, strict=True)]
    poisoned[1] = tuple(torch.full_like(x, torch.nan) for x in poisoned[1])
    o = packed(poisoned).o
    edge = documents[0] + documents[1]
    assert torch.isnan(o[:, 1:edge]).all()
    torch.testing.assert_close(o[:, edge:], first.o[:, edge:], rtol=0, atol=0)
    torch.testing.assert_close(o[:, :1], first.o[:, :1], rtol=0, atol=0)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_bounded_by_the_inputs_rounding(dim, dtype):
    """Against the float64 oracle on the same rounded inputs: only the output's own rounding may show."""
    window = Window("terraced", 16)
    x = inputs(1, 16 * 3 + 5, dim=dim, features=dim, dtype=dtype)
    mix = mixes(4)["shared"]
    o = run(x, window, mix).o
    wide = inputs(1, 1, dim=dim, features=dim)  # the maps' shapes; replaced below
    wide.q, wide.k, wide.v = x.q.double(), x.k.double(), x.v.double()
    wide.map_q = FeatureMap(x.map_q.weight_HDQ.double(), "softmax")
    wide.map_k = FeatureMap(x.map_k.weight_HDQ.double(), "softmax")
    exact = run(wide, window, mixes(4, torch.float64)["shared"], impl="reference").o
    assert o.dtype == dtype
    error = (o.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize(
    "activation,two_sided",
    [("exp", True), ("relu", True), ("elu", True), ("relu", False), ("identity", True)],
)
def test_every_activation(activation, two_sided):
    mix = mixes(4, torch.float64)["separate" if activation == "identity" else "shared"]
    x = inputs(2, 3 * W + 5, activation=activation, two_sided=two_sided, dtype=torch.float64)
    window = Window("sliding", W)
    torch.testing.assert_close(
        run(x, window, mix, impl="chunked").o, run(x, window, mix, impl="reference").o, rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("mix_name", ["shared", "separate", "mass"])
@pytest.mark.parametrize("window_name", WINDOWS)
def test_coefficients_give_the_output(window_name, mix_name):
    x = inputs(2, 3 * W + 5, dtype=torch.float64)
    window, mix = WINDOWS[window_name], mixes(4, torch.float64)[mix_name]
    weights = op.coefficients(x.q, x.k, x.map_q, x.map_k, window, mix)
    v = x.v.repeat_interleave(2, 2)
    torch.testing.assert_close(torch.einsum("bhqs,bshv->bqhv", weights, v), run(x, window, mix).o)
    torch.testing.assert_close(
        op.coefficients(x.q, x.k, x.map_q, x.map_k, window, mix, rows=slice(3, 9)), weights[:, :, 3:9]
    )


def test_large_scores_and_long_texts_stay_finite():
    x = inputs(1, 300, heads=2, groups=1)
    x.q, x.k = x.q * 100, x.k * 100
    for mix in mixes(2).values():
        assert run(x, Window("sliding", 16), mix).o.isfinite().all()


def test_state_operations():
    window, mix = Window("terraced", W, sinks=1), mixes(4)["shared"]
    x = inputs(3, 2 * W + 1)
    state = run(x, window, mix, return_state=True).state
    chosen = state.select(torch.tensor([2, 0]))
    assert chosen.lengths_N.tolist() == [9, 9]
    torch.testing.assert_close(chosen.far.S_NJFV, state.far.S_NJFV[[2, 0]])
    torch.testing.assert_close(state.repeat(2).ring.k_NRGD, state.ring.k_NRGD.repeat_interleave(2, 0))
    held = 3 * (8 * 2 * 8 * 2 + 1 * 2 * 8 * 2 + 4 * 8 * 8 + 4 * 8) * 4 + 3 * 3 * 8
    assert state.nbytes == held
    copy = state.snapshot()
    state.far.S_NJFV.zero_()
    assert copy.far.S_NJFV.abs().sum() > 0


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": (2, 5, 4, 6)}, "head dim"),
        ({"k": (2, 5, 3, 8), "v": (2, 5, 3, 8)}, "multiple"),
        ({"v": (2, 4, 2, 8)}, "agree"),
        ({"q": (2, 5, 32)}, r"\[B, T, heads, dim\]"),
    ],
)
def test_bad_shapes_are_refused(change, message):
    x = inputs(2, 5)
    for name, shape in change.items():
        setattr(x, name, torch.randn(*shape))
    with pytest.raises(ValueError, match=message):
        run(x, Window("sliding", W), mixes(4)["shared"])


def test_bad_choices_are_refused():
    x = inputs(1, 5)
    mix = mixes(4)["shared"]
    with pytest.raises(ValueError, match="window.size is 0"):
        run(x, Window("sliding", 0), mix)
    with pytest.raises(ValueError, match="impl is 'triton'"):
        run(x, Window("sliding", 2), mix, impl="triton")
    with pytest.raises(ValueError, match="parameters of shape"):
        run(x, Window("sliding", 2), mixes(3)["shared"])
    signed = inputs(1, 5, activation="identity")
    for name in ("shared", "mass"):
        with pytest.raises(ValueError, match="identity"):
            run(signed, Window("sliding", 2), mixes(4)[name])
    with pytest.raises(ValueError, match="must start at 0"):
        Sequences.packed(torch.tensor([1, 5]))
