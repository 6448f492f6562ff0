"""Long rows in slabs: the same output, state, masses and gradients as in one piece."""

import pytest
import torch
from tests.ops.cases import inputs, mixes

from hybridize.ops import linear, slabs, windowed_linear
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
