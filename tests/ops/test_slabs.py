"""Long rows in slabs: the same output, state, masses and gradients as in one piece."""

import pytest
import torch
from tests.ops.cases import inputs, mixes

from hybridize.ops import linear, slabs, windowed_linear
from hybridize.ops.types import Ablation
from hybridize.windows import Window

WINDOWS = [Window("terraced", 24), Window("sliding", 64, sinks=3), Window("sliding", 24, overlap=True)]
OPERATIONS = [*WINDOWS, None]


def run(x, window, **options):
    if window is None:
        return linear.forward(x.q, x.k, x.v, x.map_q, x.map_k, return_state=True, **options)
    mix = mixes(4, torch.float64)["shared"]
    return windowed_linear.forward(
        x.q, x.k, x.v, x.map_q, x.map_k, window, mix, return_state=True, return_aux=True, **options
    )


@pytest.mark.parametrize("window", OPERATIONS, ids=str)
@pytest.mark.parametrize("begin", [0, 37])
def test_slabs_change_nothing(window, begin, monkeypatch):
    results = []
    for slab in (10**9, 2 * 96):
        monkeypatch.setattr(slabs, "SLAB", slab)
        x = inputs(2, 500, dtype=torch.float64)
        state = run(x.rows(slice(None), slice(0, begin)), window).state if begin else None
        x = x.rows(slice(None), slice(begin, None))
        leaves = [x.q.requires_grad_(), x.k.requires_grad_(), x.v.requires_grad_()]
        result = run(x, window, state=state)
        grads = torch.autograd.grad(result.o.square().sum(), leaves)
        far = result.state if window is None else result.state.far
        results.append([result.o, far.S_NJFV, *result.aux.values(), *grads])
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("mode", ["softmax_only", "far_only", "linear_only"])
def test_removals_confined_to_queries_and_heads(window, mode, monkeypatch):
    """Reference, one piece and slabs: there the ablation, elsewhere the whole; with `keep_empty` not where nothing is far."""
    x = inputs(2, 300, dtype=torch.float64)
    where = torch.rand(2, 300, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = run(x, window).o
    removed = run(x, window, ablation=Ablation(mode)).o
    for keep_empty in (False, True):
        there = where & window.has_far(torch.arange(300))[:, None] if keep_empty else where
        expected = torch.where(there[..., None], removed, whole)
        ablation = Ablation(mode, "zero", where, keep_empty)
        torch.testing.assert_close(run(x, window, ablation=ablation, impl="reference").o, expected)
        for slab in (10**9, 2 * 96):
            monkeypatch.setattr(slabs, "SLAB", slab)
            torch.testing.assert_close(run(x, window, ablation=ablation).o, expected)
    heads = Ablation(mode, "zero", where[:1, :1])
    torch.testing.assert_close(
        run(x, window, ablation=heads).o, torch.where(where[:1, :1, :, None], removed, whole)
    )
    state = run(x.rows(slice(None), slice(0, 299)), window).state
    last = x.rows(slice(None), slice(299, None))
    mix = mixes(4, torch.float64)["shared"]
    step = windowed_linear.step(
        last.q,
        last.k,
        last.v,
        x.map_q,
        x.map_k,
        window,
        mix,
        state,
        ablation=Ablation(mode, "zero", where[:, 299:]),
    )
    torch.testing.assert_close(
        step.o[:, 0], torch.where(where[:, 299, :, None], removed[:, 299], whole[:, 299])
    )


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_far_share_is_the_sum_of_far_coefficients(window):
    x = inputs(1, 120, dtype=torch.float64)
    mix = mixes(4, torch.float64)["shared"]
    t, i = torch.arange(120)[:, None], torch.arange(120)
    a_BHQS = windowed_linear.coefficients(x.q, x.k, x.map_q, x.map_k, window, mix)
    if window.overlap:
        near = run(x, window).aux["far_share"]
        assert ((near > 0) & (near < 1)).all()
        return
    expected = (a_BHQS * window.far(t, i)).sum(-1).transpose(1, 2)
    for impl in ("reference", "chunked"):
        torch.testing.assert_close(run(x, window, impl=impl).aux["far_share"], expected)
