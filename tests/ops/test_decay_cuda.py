"""On a GPU: flash-linear-attention = the float64 reference (values, states, gradients); when `auto` takes it; chunked too."""

from __future__ import annotations

import pytest
import torch
from tests.ops.decay_cases import KINDS, SCALE, Case, case, random_state, run
from torch import Tensor

from hybridize.ops import decay as op
from hybridize.ops.decay import fla as adapter
from hybridize.ops.sequences import Sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
needs_fla = pytest.mark.skipif(
    not torch.cuda.is_available() or adapter.load() is None, reason="no flash-linear-attention"
)

# the kernels multiply float32 as TF32 (10 bits of mantissa), bfloat16 with 8
BOUND = {torch.float32: 2e-3, torch.bfloat16: 1e-2}
LENGTHS = {"dense": None, "packed": [1, 0, 130, 64, 0, 5]}


def results(kind, lengths, dim, dtype, impl, wide):
    """Output, final state, and gradients of q, k, v, the decays and the initial state, from inputs rounded to `dtype`."""
    rows, length = (2, 200) if lengths is None else (1, sum(lengths))
    x = case(kind, rows, length, dim=dim, values=dim, strength=0.2)
    x.q, x.k, x.v = (y.to(dtype) for y in (x.q, x.k, x.v))
    x = x.map(lambda y: (y.double() if wide else y).cuda().requires_grad_())
    sequences = None if lengths is None else Sequences.packed(torch.tensor([0, *lengths]).cumsum(0).cuda())
    state = random_state(2 if lengths is None else len(lengths), dim, values=dim).to("cuda")
    state.S_NHDV = (state.S_NHDV.double() if wide else state.S_NHDV).requires_grad_()
    result = run(x, sequences=sequences, state=state, return_state=True, impl=impl)
    outputs = [result.o.double(), result.state.S_NHDV.double()]
    generator = torch.Generator().manual_seed(1)
    loss = sum((y * torch.randn(y.shape, generator=generator, dtype=y.dtype).cuda()).sum() for y in outputs)
    grads = torch.autograd.grad(loss, [*x.leaves, state.S_NHDV])
    return dict(zip(("o", "S", "dq", "dk", "dv", "dlog", "dS"), [*outputs, *grads], strict=True))


def compare(ours, exact, bound):
    for name, theirs in exact.items():
        error = float((ours[name].double() - theirs).norm() / theirs.norm())
        # the decays' gradient is a running sum of differences
        assert error < bound * (3 if name == "dlog" else 1), f"{name}: {error:.2e}"


@needs_fla
@pytest.mark.parametrize("dtype,dim", [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_fla_equals_the_float64_reference(kind, lengths, dtype, dim):
    ours = results(kind, LENGTHS[lengths], dim, dtype, "fla", wide=False)
    compare(ours, results(kind, LENGTHS[lengths], dim, dtype, "reference", wide=True), BOUND[dtype])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_equals_the_float64_reference(kind, lengths):
    ours = results(kind, LENGTHS[lengths], 64, torch.float64, "chunked", wide=True)
    compare(ours, results(kind, LENGTHS[lengths], 64, torch.float64, "reference", wide=True), 1e-12)
    low = results(kind, LENGTHS[lengths], 64, torch.bfloat16, "chunked", wide=False)
    compare(low, results(kind, LENGTHS[lengths], 64, torch.bfloat16, "reference", wide=True), 5e-3)


@needs_fla
@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_fla_for_16_bit_values_alone(kind, monkeypatch):
    called = []
    forward = adapter.forward
    monkeypatch.setattr(adapter, "forward", lambda *args: called.append(1) or forward(*args))
    for dtype, times in ((torch.float32, 0), (torch.bfloat16, 1)):
        x = case(kind, 2, 70, dim=64, values=64).map(Tensor.cuda)
        run(Case(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), x.log))
        assert len(called) == times


@needs_fla
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_goes_on_from_its_state(kind):
    x = case(kind, 2, 150, dim=64, values=64).map(Tensor.cuda)
    whole = run(x, impl="fla").o
    state = run(x.tokens(0, 140), return_state=True, impl="fla").state
    for t in range(140, 150):
        y = x.tokens(t, t + 1)
        result = op.step(y.q, y.k, y.v, y.log, state, scale=SCALE)
        state = result.state
        assert (result.o[:, 0] - whole[:, t]).norm() / whole[:, t].norm() < BOUND[torch.float32]


@needs_fla
@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays_stay_finite(kind):
    x = case(kind, 1, 140, dim=64, values=64).map(Tensor.cuda)
    for value in (0.0, -50.0):
        x.log = torch.full_like(x.log, value)
        leaves = [y.detach().requires_grad_() for y in x.leaves]
        o = op.forward(*leaves, scale=SCALE, impl="fla").o
        assert o.isfinite().all()
        assert all(y.isfinite().all() for y in torch.autograd.grad(o.square().sum(), leaves))


@needs_fla
def test_float64_is_refused():
    x = case("fixed", 1, 3, dtype=torch.float64).map(Tensor.cuda)
    with pytest.raises(ValueError, match="impl is 'fla'; v has dtype torch.float64; allowed are bfloat16"):
        run(x, impl="fla")
