"""Decaying attention: brute force, chunked = reference with gradients, states, packing, extremes, low precision."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from tests.ops.decay_cases import HEADS, KINDS, SCALE, VALUES, Case, case, random_state, run
from torch import Tensor

from hybridize.ops import decay as op
from hybridize.ops.sequences import Sequences

IMPLS = ["reference", "chunked"]
LENGTHS = [1, 3, 16, 63, 64, 65, 127, 128, 129, 200]
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}


def brute_force(x: Case) -> np.ndarray:
    """`A[b, h, t, s]` pair by pair, the decays multiplied one by one."""
    q, k, log = x.q.numpy(), x.k.numpy(), x.log.numpy()
    batch, length, heads, dim = q.shape
    if log.ndim == 1:
        log = np.broadcast_to(log, (batch, length, heads))
    log = np.broadcast_to(log.reshape(batch, length, heads, -1), q.shape)
    out = np.zeros((batch, heads, length, length))
    for b, h in product(range(batch), range(heads)):
        g = h // (heads // k.shape[2])
        for t in range(length):
            decay = np.ones(dim)
            for s in range(t, -1, -1):
                out[b, h, t, s] = SCALE * (q[b, t, h] * k[b, s, g] * decay).sum()
                decay = decay * np.exp(log[b, s, h])
    return out


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_formula_by_brute_force(kind, groups):
    for length in LENGTHS[:6]:
        x = case(kind, 1, length, groups=groups, dtype=torch.float64)
        weights = brute_force(x)
        v = x.v.repeat_interleave(HEADS // groups, 2).numpy()
        expected = np.einsum("bhts,bshv->bthv", weights, v)
        for impl in IMPLS:
            np.testing.assert_allclose(run(x, impl=impl).o.numpy(), expected, rtol=1e-11, atol=1e-11)
        ours = op.coefficients(x.q, x.k, x.log, scale=SCALE).numpy()
        np.testing.assert_allclose(ours, weights, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_equals_reference_with_gradients(kind):
    for length, groups in zip(LENGTHS, [4, 2, 1, 2, 4, 2, 1, 2, 4, 2], strict=True):
        results = []
        for impl in IMPLS:
            x = case(kind, 2, length, groups=groups, dtype=torch.float64).map(lambda y: y.requires_grad_())
            state = random_state(2, dtype=torch.float64, seen=length % 7)
            state.S_NHDV.requires_grad_()
            result = run(x, impl=impl, state=state, return_state=True)
            outputs = [result.o, result.state.S_NHDV]
            generator = torch.Generator().manual_seed(1)
            loss = sum((y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in outputs)
            results.append([*outputs, *torch.autograd.grad(loss, [*x.leaves, state.S_NHDV])])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_equals_chunks_equals_decode_equals_prefix(kind):
    x = case(kind, 2, 200)
    whole = run(x, impl="reference").o
    for length in LENGTHS:
        torch.testing.assert_close(run(x.tokens(0, length)).o, whole[:, :length], **TOLERANCE)
    for impl, sizes in product(IMPLS, ([63, 1, 1, 135], [5, 0, 1, 70, 2, 122])):
        outputs, state, begin = [], None, 0
        for size in sizes:
            result = run(x.tokens(begin, begin + size), state=state, return_state=True, impl=impl)
            state, begin = result.state, begin + size
            outputs.append(result.o)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, **TOLERANCE)
        assert state.lengths_N.tolist() == [200, 200]
    before = run(x.tokens(0, 60), return_state=True).state
    kept, state = before.snapshot(), before
    for t in range(60, 70):
        y = x.tokens(t, t + 1)
        result = op.step(y.q, y.k, y.v, y.log, state, scale=SCALE)
        state = result.state
        torch.testing.assert_close(result.o[:, 0], whole[:, t], **TOLERANCE)
    other = run(x.tokens(0, 70), return_state=True, impl="reference").state
    torch.testing.assert_close(state.S_NHDV, other.S_NHDV, **TOLERANCE)
    assert state.lengths_N.tolist() == [70, 70]
    torch.testing.assert_close(before.S_NHDV, kept.S_NHDV, rtol=0, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_continued_apart_nothing_leaks(kind, impl):
    documents, more = [1, 70, 0, 64, 5, 0], [3, 1, 4, 0, 65, 0]
    singles = [case(kind, 1, n + m, seed=n) for n, m in zip(documents, more, strict=True)]
    for y in singles[1].leaves[:3]:
        y.fill_(torch.nan)
    whole = [run(x).o[0] for x in singles]
    state, begins = None, [0] * len(documents)
    for counts in (documents, more):
        ends = [b + n for b, n in zip(begins, counts, strict=True)]
        pieces = [x.tokens(b, e).leaves for x, b, e in zip(singles, begins, ends, strict=True)]
        packed = Case(*(torch.cat(xs, 1) if xs[0].dim() > 1 else xs[0] for xs in zip(*pieces, strict=True)))
        sequences = Sequences.packed(torch.tensor([0, *np.cumsum(counts)]), begins)
        result = run(packed, sequences=sequences, state=state, return_state=True, impl=impl)
        for piece, o, b, e in zip(result.o[0].split(counts), whole, begins, ends, strict=True):
            torch.testing.assert_close(piece, o[b:e], equal_nan=True, **TOLERANCE)
        state, begins = result.state, ends
    assert state.lengths_N.tolist() == begins
    assert state.S_NHDV.isfinite().flatten(1).all(1).tolist() == [True, False, True, True, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_packed_rows_equal_those_of_their_documents(kind):
    lengths = [70, 0, 3, 130]
    x = case(kind, 1, sum(lengths), dtype=torch.float64).map(lambda y: y.requires_grad_())
    bounds = np.cumsum([0, *lengths])
    packed = run(x, sequences=Sequences.packed(torch.tensor(bounds)), impl="chunked").o
    alone = torch.cat([run(x.tokens(a, b), impl="reference").o for a, b in pairwise(bounds)], 1)
    for ours, theirs in zip(
        torch.autograd.grad(packed.square().sum(), x.leaves),
        torch.autograd.grad(alone.square().sum(), x.leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_slabs_of_long_rows_equal_the_reference(kind):
    x = case(kind, 1, 2200, groups=1, dtype=torch.float64)
    result = run(x, return_state=True, state=random_state(1, dtype=torch.float64, seen=5))
    other = run(x, return_state=True, state=random_state(1, dtype=torch.float64, seen=5), impl="reference")
    torch.testing.assert_close(result.o, other.o)
    torch.testing.assert_close(result.state.S_NHDV, other.state.S_NHDV)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_bounded_by_the_inputs_rounding(dim, dtype):
    for kind in KINDS:
        x = case(kind, 1, 150, dim=dim, dtype=dtype, strength=0.1)
        exact = run(x.map(Tensor.double), impl="reference").o
        for impl in IMPLS:
            result = run(x, return_state=True, impl=impl)
            assert result.o.dtype == dtype and result.state.S_NHDV.dtype == torch.float32
            error = (result.o.double() - exact).norm() / exact.norm()
            assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype], (
                kind,
                impl,
            )


@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_float32_serve_inputs_of_bfloat16_under_autocast(kind):
    x = case(kind, 1, 70, strength=0.01)
    low = Case(x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), x.log)
    with torch.autocast("cpu", torch.bfloat16):
        o = run(low).o
    exact = run(Case(low.q.double(), low.k.double(), low.v.double(), x.log.double()), impl="reference").o
    assert o.dtype == torch.bfloat16 and (o.double() - exact).norm() / exact.norm() < 4e-3


def extremes(kind, length):
    """No decay, a complete one, and both by turns."""
    x = case(kind, 1, length, groups=4)
    turns = torch.rand(x.log.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    return {
        "none": Case(x.q, x.k, x.v, torch.zeros_like(x.log)),
        "complete": Case(x.q, x.k, x.v, torch.full_like(x.log, -50)),
        "by turns": Case(x.q, x.k, x.v, torch.where(turns, 0.0, -50.0)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_decays_stay_finite_and_right(kind):
    for name, x in extremes(kind, 140).items():
        x.map(lambda y: y.requires_grad_())
        state = random_state(1)
        state.S_NHDV.requires_grad_()
        result = run(x, state=state, return_state=True)
        loss = result.o.square().sum() + result.state.S_NHDV.square().sum()
        grads = torch.autograd.grad(loss, [*x.leaves, state.S_NHDV])
        assert all(y.isfinite().all() for y in (result.o, result.state.S_NHDV, *grads)), name
        exact = run(
            x.map(lambda y: y.detach().double()), state=random_state(1, dtype=torch.float64), impl="reference"
        ).o
        torch.testing.assert_close(
            result.o.double(), exact, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
        weights = op.coefficients(x.q, x.k, x.log, scale=SCALE)
        (grad,) = torch.autograd.grad(weights.square().sum(), [x.log])
        assert weights.isfinite().all() and grad.isfinite().all(), name
    held = extremes(kind, 140)["complete"]
    alone = SCALE * (held.q * held.k).sum(-1, keepdim=True) * held.v
    torch.testing.assert_close(run(held).o, alone, **TOLERANCE)


@pytest.mark.parametrize("rows", [slice(None), slice(3, 9), slice(40, None, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_give_the_output(kind, rows):
    x = case(kind, 2, 70, dtype=torch.float64).map(lambda y: y.requires_grad_())
    weights = op.coefficients(x.q, x.k, x.log, rows, scale=SCALE)
    assert op.coefficients(x.q, x.k, x.log, slice(5, 5), scale=SCALE).shape == (2, HEADS, 0, 70)
    o = torch.einsum("bhqs,bshv->bqhv", weights, x.v.repeat_interleave(2, 2))
    expected = run(x, impl="reference").o[:, rows]
    torch.testing.assert_close(o, expected)
    assert not weights[..., torch.arange(70) > torch.arange(70)[rows, None]].any()
    seed = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad((o * seed).sum(), x.leaves),
        torch.autograd.grad((expected * seed).sum(), x.leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_leave_the_state(kind, impl):
    x = case(kind, 2, 0)
    state = random_state(2, seen=3)
    result = run(x, state=state, return_state=True, impl=impl)
    assert result.o.shape == (2, 0, HEADS, VALUES) and result.state.lengths_N.tolist() == [3, 3]
    torch.testing.assert_close(result.state.S_NHDV, state.S_NHDV, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@torch.no_grad()
def test_a_strong_decay_costs_its_neighbours_no_digits(kind):
    """Tokens that forget everything among tokens that forget little: no exponent is a difference of long sums."""
    x = case(kind, 1, 200, strength=0.01)
    x.log[:, ::7] = -500.0
    exact = run(x.map(Tensor.double), impl="reference").o
    assert (run(x, impl="chunked").o - exact).norm() < 1e-6 * exact.norm()


def test_lightnings_decay_by_hand():
    log = -(2.0 ** (-8 * torch.arange(1, 5, dtype=torch.float64) / 4))
    one = torch.ones(1, 300, 4, 1, dtype=torch.float64)
    o = op.forward(one, one, one, log, scale=1.0).o[0, -1, :, 0]
    torch.testing.assert_close(o, (1 - (300 * log).exp()) / (1 - log.exp()))


def test_bad_input_is_refused():
    x = case("scalar", 2, 5)
    with pytest.raises(
        ValueError, match=r"log_decay has shape \[2, 5\]; allowed are \[4\], \[2, 5, 4\], \[2, 5, 4, 6\]"
    ):
        op.forward(x.q, x.k, x.v, x.log[..., 0], scale=SCALE)
    with pytest.raises(ValueError, match="log_decay reaches 0.5; it must be at most 0"):
        op.forward(x.q, x.k, x.v, torch.tensor([-1, 0.5, 0, -2]), scale=SCALE)
    with pytest.raises(ValueError, match="q has 4 heads, not a multiple of k's 3 heads"):
        op.forward(
            x.q, x.k.repeat(1, 1, 2, 1)[:, :, :3], x.v.repeat(1, 1, 2, 1)[:, :, :3], x.log, scale=SCALE
        )
    with pytest.raises(
        ValueError, match=r"state holds S of shape \(3, 4, 6, 5\); the call needs \(2, 4, 6, 5\)"
    ):
        run(x, state=random_state(3), sequences=Sequences.dense(2, 5))
    with pytest.raises(
        ValueError, match="impl is 'triton'; available here are 'auto', 'chunked', 'reference'"
    ):
        run(x, impl="triton")
    with pytest.raises(ValueError, match="impl is 'fla'; it needs tensors on CUDA, these are on cpu"):
        run(x, impl="fla")
    with pytest.raises(ValueError, match="q has 5 tokens a row; a step takes 1"):
        op.step(x.q, x.k, x.v, x.log, random_state(2), scale=SCALE)
