"""Linear attention: brute force, chunked = reference with gradients, states, packing, low precision, every map."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from tests.ops.brute_force import guard, hedgehog
from tests.ops.cases import W, inputs, lengths

from hybridize.ops import linear as op
from hybridize.ops.feature_map import CLAMP, EXP_BOUND, FeatureMap
from hybridize.ops.sequences import Sequences

MAPS = [("softmax", True), ("exp", True), ("relu", True), ("relu", False), ("elu", True), ("identity", True)]
HEADS = [
    {"heads": 4, "groups": 4},
    {"heads": 4, "groups": 2},
    {"heads": 4, "groups": 2, "kv_maps": True},
    {"heads": 4, "groups": 1, "kv_maps": True},
]
# chunks are 64 tokens long: lengths around their edges, and around the windows of the other operations
LENGTHS = sorted({*lengths(W), 63, 64, 65, 130})
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}


def run(x, **kwargs):
    return op.forward(x.q, x.k, x.v, x.map_q, x.map_k, **kwargs)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_formula_by_brute_force(heads, impl):
    x = inputs(1, 70, dtype=torch.float64, values=6, **heads)
    q, k, v = (y[0].numpy() for y in (x.q, x.k, x.v))
    expected = np.zeros((70, 4, 6))
    for h in range(4):
        g = h // (4 // heads["groups"])
        w_k = x.map_k.weight_HDQ.numpy()
        phi_k = [hedgehog(k[i, g], w_k[h if len(w_k) == 4 else g]) for i in range(70)]
        for t in range(70):
            weights = np.array(
                [hedgehog(q[t, h], x.map_q.weight_HDQ[h].numpy()) @ phi_k[i] for i in range(t + 1)]
            )
            expected[t, h] = weights @ v[: t + 1, g] / guard(weights.sum())
    np.testing.assert_allclose(run(x, impl=impl).o[0].numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("activation,two_sided", MAPS)
def test_chunked_equals_reference_with_gradients(activation, two_sided, heads):
    for length in (1, 5, 64, 70):
        results = []
        for impl in ("reference", "chunked"):
            x = inputs(
                2, length, activation=activation, two_sided=two_sided, dtype=torch.float64, grad=True, **heads
            )
            o = run(x, impl=impl).o
            seed = torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            leaves = [x.q, x.k, x.v, x.map_q.weight_HDQ, x.map_k.weight_HDQ]
            leaves += [b for b in (x.map_q.bias_HQ, x.map_k.bias_HQ) if b is not None]
            results.append([o, *torch.autograd.grad((o * seed).sum(), leaves)])
        for ours, theirs in zip(*results, strict=True):
            scale = theirs.abs().max().clamp_min(1)  # signed maps divide by small sums
            torch.testing.assert_close(ours / scale, theirs / scale, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("activation,two_sided", MAPS[:-1])
def test_prefill_equals_chunks_equals_decode_equals_prefix(activation, two_sided, heads):
    longest = 130
    x = inputs(2, longest, activation=activation, two_sided=two_sided, **heads)
    whole = run(x, impl="reference").o
    for length in LENGTHS:
        torch.testing.assert_close(
            run(x.rows(slice(None), slice(0, length))).o, whole[:, :length], **TOLERANCE
        )
    for impl, sizes in product(("chunked", "reference"), ([63, 1, 1, 65], [5, 1, 70, 2, 52])):
        outputs, state, begin = [], None, 0
        for size in sizes:
            piece = x.rows(slice(None), slice(begin, begin + size))
            result = run(piece, state=state, return_state=True, impl=impl)
            state, begin = result.state, begin + size
            outputs.append(result.o)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, **TOLERANCE)
    state = run(x.rows(slice(None), slice(0, 60)), return_state=True).state
    for t in range(60, 70):
        piece = x.rows(slice(None), slice(t, t + 1))
        result = op.step(piece.q, piece.k, piece.v, x.map_q, x.map_k, state)
        state = result.state
        torch.testing.assert_close(result.o[:, 0], whole[:, t], **TOLERANCE)
    other = run(x.rows(slice(None), slice(0, 70)), return_state=True, impl="reference").state
    torch.testing.assert_close(state.S_NJFV, other.S_NJFV, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.z_NJF, other.z_NJF, rtol=1e-4, atol=1e-4)


def test_packed_and_continued_apart_nothing_leaks():
    documents, more = [1, 70, 0, 64, 5], [3, 1, 4, 0, 65]
    singles = [inputs(1, n + m, seed=n) for n, m in zip(documents, more, strict=True)]
    maps = singles[0].map_q, singles[0].map_k
    for y in (singles[1].q, singles[1].k, singles[1].v):
        y.fill_(torch.nan)
    whole = [op.forward(x.q, x.k, x.v, *maps).o[0] for x in singles]
    state, begins = None, [0] * len(documents)
    for counts in (documents, more):
        ends = [b + n for b, n in zip(begins, counts, strict=True)]
        q, k, v = (
            torch.cat([getattr(x, part)[:, b:e] for x, b, e in zip(singles, begins, ends, strict=True)], 1)
            for part in "qkv"
        )
        sequences = Sequences.packed(torch.tensor([0, *np.cumsum(counts)]), begins)
        result = op.forward(q, k, v, *maps, sequences=sequences, state=state, return_state=True)
        for piece, o, b, e in zip(result.o[0].split(counts), whole, begins, ends, strict=True):
            torch.testing.assert_close(piece, o[b:e], equal_nan=True, **TOLERANCE)
        state, begins = result.state, ends
    assert state.lengths_N.tolist() == begins


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_bounded_by_the_inputs_rounding(dim, dtype):
    x = inputs(1, 150, dim=dim, features=dim, dtype=dtype)
    maps = [FeatureMap(m.weight_HDQ.double(), "softmax") for m in (x.map_q, x.map_k)]
    exact = op.forward(x.q.double(), x.k.double(), x.v.double(), *maps, impl="reference").o
    result = run(x, return_state=True)
    assert result.o.dtype == dtype and result.state.S_NJFV.dtype == result.state.z_NJF.dtype == torch.float32
    error = (result.o.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize("activation,two_sided", MAPS)
def test_coefficients_give_the_output(activation, two_sided):
    x = inputs(2, 20, activation=activation, two_sided=two_sided, dtype=torch.float64)
    weights = op.coefficients(x.q, x.k, x.map_q, x.map_k)
    v = x.v.repeat_interleave(2, 2)
    torch.testing.assert_close(torch.einsum("bhqs,bshv->bqhv", weights, v), run(x).o)
    torch.testing.assert_close(op.coefficients(x.q, x.k, x.map_q, x.map_k, slice(3, 9)), weights[:, :, 3:9])
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_maps():
    x = torch.randn(3, 5, 2, 8)
    weight = torch.randn(4, 8, 6)
    y = torch.einsum("btgd,gxdq->btgxq", x, weight.unflatten(0, (2, 2))).flatten(2, 3)
    phi = FeatureMap(weight, "softmax")(x)
    torch.testing.assert_close(phi, torch.cat([y.softmax(-1), (-y).softmax(-1)], -1))
    assert FeatureMap(weight, "softmax").features == 12
    one_sided = FeatureMap(weight, "relu", two_sided=False, bias_HQ=torch.full((4, 6), 0.5))
    torch.testing.assert_close(one_sided(x), (y + 0.5).clamp_min(CLAMP))
    assert one_sided.features == 6
    assert FeatureMap(weight, "relu")(x).min() == CLAMP
    torch.testing.assert_close(FeatureMap(weight, "elu")(x)[..., :6], torch.nn.functional.elu(y) + 1)
    assert FeatureMap(weight, "identity")(x).min() < 0
    assert FeatureMap(100 * weight, "exp")(100 * x).max() <= np.exp(EXP_BOUND) * 1.001
    assert FeatureMap(weight.bfloat16(), "exp")(x.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match="activation is 'gelu'; allowed are 'softmax', 'exp'"):
        FeatureMap(weight, "gelu")
    with pytest.raises(
        ValueError, match="the feature map has 4 heads, not a multiple of its input's 3 heads"
    ):
        FeatureMap(weight, "exp")(torch.randn(1, 3, 8))


def test_long_texts_stay_finite():
    for activation, two_sided in MAPS:
        x = inputs(1, 2000, heads=2, groups=1, activation=activation, two_sided=two_sided)
        x.q, x.k = 50 * x.q, 50 * x.k
        assert run(x).o.isfinite().all(), activation


def test_maps_that_do_not_fit_are_refused():
    x = inputs(1, 5)
    with pytest.raises(ValueError, match="map_q has 2 heads; q has 4"):
        op.forward(x.q, x.k, x.v, inputs(1, 1, heads=2).map_q, x.map_k)
    with pytest.raises(
        ValueError, match=r"map_k has 3 heads; allowed are 4 \(query heads\) and 2 \(KV heads\)"
    ):
        op.forward(x.q, x.k, x.v, x.map_q, inputs(1, 1, heads=3, groups=1).map_k)
    with pytest.raises(ValueError, match="map_q gives 8 features and map_k 6"):
        op.forward(x.q, x.k, x.v, x.map_q, inputs(1, 1, features=6).map_k)
