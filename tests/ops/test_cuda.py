"""On a GPU: chunked = the float64 reference, gradients too; cached = whole; packed softmax = its documents alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.ops.cases import Inputs, inputs, mixes

from hybridize.ops import softmax, windowed_linear
from hybridize.ops.sequences import Sequences
from hybridize.windows import Window

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WINDOWS = [
    Window("terraced", 16),
    Window("sliding", 16, sinks=3),
    Window("sliding", 64),
    Window("terraced", 64),
]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def on_gpu(x: Inputs) -> Inputs:
    def move(feature_map):
        return replace(feature_map, weight_HDQ=feature_map.weight_HDQ.cuda())

    return Inputs(x.q.cuda(), x.k.cuda(), x.v.cuda(), move(x.map_q), move(x.map_k))


def exact(x: Inputs) -> Inputs:
    def widen(feature_map):
        return replace(feature_map, weight_HDQ=feature_map.weight_HDQ.double())

    return Inputs(x.q.double(), x.k.double(), x.v.double(), widen(x.map_q), widen(x.map_k))


def run(x: Inputs, window: Window, mix, **options):
    return windowed_linear.forward(x.q, x.k, x.v, x.map_q, x.map_k, window, mix, **options)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_chunked_equals_the_float64_reference(window, dtype, dim):
    x = on_gpu(inputs(2, 3 * window.size + 5, dim=dim, features=dim, dtype=dtype))
    gamma = mixes(4, torch.float64)["shared"].gamma_H.cuda()
    o = run(x, window, windowed_linear.SharedMix(gamma.to(torch.promote_types(dtype, torch.float32)))).o
    reference = run(exact(x), window, windowed_linear.SharedMix(gamma), impl="reference").o
    assert (o.double() - reference).norm() / reference.norm() < BOUND[dtype]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_gradients_equal_the_references(window):
    grads = []
    for impl in ("chunked", "reference"):
        x = on_gpu(inputs(2, 3 * window.size + 5, dtype=torch.float64))
        leaves = [x.q.requires_grad_(), x.k.requires_grad_(), x.v.requires_grad_()]
        mix = windowed_linear.SharedMix(mixes(4, torch.float64)["shared"].gamma_H.cuda())
        o = run(x, window, mix, impl=impl).o
        weights = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1)).cuda()
        grads.append(torch.autograd.grad((o * weights).sum(), leaves))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_prefill_equals_decode(window):
    x = on_gpu(inputs(2, 2 * window.size + 7))
    mix = windowed_linear.SharedMix(mixes(4)["shared"].gamma_H.cuda())
    whole = run(x, window, mix).o
    first = window.size + 3
    state = run(x.rows(slice(None), slice(0, first)), window, mix, return_state=True).state
    for t in range(first, whole.shape[1]):
        one = x.rows(slice(None), slice(t, t + 1))
        result = windowed_linear.step(one.q, one.k, one.v, x.map_q, x.map_k, window, mix, state)
        state = result.state
        torch.testing.assert_close(result.o, whole[:, t : t + 1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_softmax_equals_its_documents_with_gradients(dtype):
    lengths = [1, 300, 17, 64, 200]
    x = on_gpu(inputs(1, sum(lengths), dim=64, heads=9, groups=3, dtype=dtype))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    leaves = [x.q.requires_grad_(), x.k.requires_grad_(), x.v.requires_grad_()]
    packed = softmax.forward(x.q, x.k, x.v, sequences=Sequences.packed(bounds.cuda())).o
    pieces = [x.rows(slice(None), slice(a, b)) for a, b in itertools.pairwise(bounds)]
    alone = torch.cat([softmax.forward(p.q, p.k, p.v, impl="reference").o for p in pieces], 1)
    tolerance = {"rtol": 5e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(packed, alone, **tolerance)
    for ours, theirs in zip(
        torch.autograd.grad(packed.float().square().sum(), leaves),
        torch.autograd.grad(alone.float().square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **tolerance)
