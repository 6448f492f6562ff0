"""Softmax attention, full and in windows: chunked = reference with gradients, lse, states, packing, low precision."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from tests.ops.brute_force import near_keys
from tests.ops.cases import W, inputs, lengths

from hybridize.ops import softmax as op
from hybridize.ops.sequences import Sequences
from hybridize.ops.softmax import state as kv_state
from hybridize.windows import Window

WINDOWS = {
    "full": None,
    "sliding": Window("sliding", W),
    "terraced": Window("terraced", W),
    "sliding-sinks": Window("sliding", W, sinks=6),
    "terraced-sinks": Window("terraced", W, sinks=3),
    "one": Window("sliding", 1),
    "sinks-alone": Window("sliding", 0, sinks=8),
}
CASES = list(product(WINDOWS, [None, 2.0]))
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def run(x, window, **kwargs):
    return op.forward(x.q, x.k, x.v, window, **kwargs)


def brute(x, window, softcap):
    """o [T, H, V] and lse [T, H] of row 0, a loop a query."""
    q, k, v = (y[0].double().numpy() for y in (x.q, x.k, x.v))
    length, heads, dim = q.shape
    o, lse = np.zeros((length, heads, v.shape[-1])), np.full((length, heads), -np.inf)
    for t, h in product(range(length), range(heads)):
        g = h // (heads // k.shape[1])
        if window is None:
            keys = list(range(t + 1))
        elif window.size == 0:
            keys = list(range(min(window.sinks, t + 1)))
        else:
            keys = near_keys(window.kind, window.size, window.sinks, t)
        s = np.array([q[t, h] @ k[i, g] / math.sqrt(dim) for i in keys])
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        lse[t, h] = np.log(np.exp(s).sum())
        o[t, h] = np.exp(s - lse[t, h]) @ v[keys, g]
    return o, lse


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("name,softcap", CASES)
def test_formula_by_brute_force(name, softcap, impl):
    x = inputs(1, 3 * W + 5, dtype=torch.float64, values=6)
    for return_aux in (False, True):  # with and without lse are different kernels
        result = run(x, WINDOWS[name], softcap=softcap, impl=impl, return_aux=return_aux)
        o, lse = brute(x, WINDOWS[name], softcap)
        np.testing.assert_allclose(result.o[0].numpy(), o, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(result.aux["lse"][0].numpy(), lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name,softcap", CASES)
def test_chunked_equals_reference_with_gradients(name, softcap):
    for length in lengths(W):
        results = []
        for impl in ("reference", "chunked"):
            x = inputs(2, length, dtype=torch.float64, grad=True)
            result = run(x, WINDOWS[name], softcap=softcap, impl=impl, return_aux=length % 2 == 0)
            seed = torch.randn(
                result.o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
            )
            loss = (result.o * seed).sum()
            if result.aux:
                loss = loss + result.aux["lse"].sum()
            grads = torch.autograd.grad(loss, [x.q, x.k, x.v])
            assert all(g.isfinite().all() for g in grads)
            results.append([result.o, *grads])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name,softcap", CASES)
def test_prefill_equals_chunks_equals_decode_equals_prefix(name, softcap):
    window, longest = WINDOWS[name], 3 * W + 5
    x = inputs(2, longest)
    whole = run(x, window, softcap=softcap, impl="reference").o
    for length in lengths(W):
        prefix = run(x.rows(slice(None), slice(0, length)), window, softcap=softcap).o
        torch.testing.assert_close(prefix, whole[:, :length], **TOLERANCE)
    for impl, sizes in product(
        ("chunked", "reference"), ([1] * longest, [3, 1, 7, 2, longest - 13], [longest])
    ):
        outputs, state, begin = [], None, 0
        for size in sizes:
            piece = x.rows(slice(None), slice(begin, begin + size))
            result = run(piece, window, softcap=softcap, state=state, return_state=True, impl=impl)
            state, begin = result.state, begin + size
            outputs.append(result.o)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, **TOLERANCE)
        assert state.lengths_N.tolist() == [longest] * 2
    state = run(x.rows(slice(None), slice(0, 2)), window, softcap=softcap, return_state=True).state
    for t in range(2, longest):
        piece = x.rows(slice(None), slice(t, t + 1))
        result = op.step(piece.q, piece.k, piece.v, window, state, softcap=softcap)
        state = result.state
        torch.testing.assert_close(result.o[:, 0], whole[:, t], **TOLERANCE)


@pytest.mark.parametrize("return_aux", [False, True])
@pytest.mark.parametrize("name,softcap", CASES)
def test_packed_and_continued_apart_nothing_leaks(name, softcap, return_aux):
    """Documents in one row, then each goes on from its own length; the second is poison."""
    window, documents, more = WINDOWS[name], [1, 3 * W + 5, 0, W, 2 * W + 1], [2, 1, 4, 0, 9]
    singles = [inputs(1, n + m, seed=n) for n, m in zip(documents, more, strict=True)]
    for poison in (False, True):
        if poison:
            for y in (singles[1].q, singles[1].k, singles[1].v):
                y.fill_(torch.nan)
        whole = [run(x, window, softcap=softcap).o[0] for x in singles]
        state, begins = None, [0] * len(documents)
        for counts in (documents, more):
            ends = [b + n for b, n in zip(begins, counts, strict=True)]
            q, k, v = (
                torch.cat(
                    [getattr(x, part)[:, b:e] for x, b, e in zip(singles, begins, ends, strict=True)], 1
                )
                for part in "qkv"
            )
            sequences = Sequences.packed(torch.tensor([0, *np.cumsum(counts)]), begins)
            options = {"softcap": softcap, "sequences": sequences, "state": state, "return_aux": return_aux}
            result = op.forward(q, k, v, window, return_state=True, **options)
            other = op.forward(q, k, v, window, return_state=True, impl="reference", **options)
            torch.testing.assert_close(result.o, other.o, equal_nan=True, **TOLERANCE)
            for piece, o, b, e in zip(result.o[0].split(counts), whole, begins, ends, strict=True):
                torch.testing.assert_close(piece, o[b:e], equal_nan=True, **TOLERANCE)
            state, begins = result.state, ends
        assert state.lengths_N.tolist() == begins


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["full", "terraced"])
def test_low_precision_error_is_bounded(name, dtype, dim):
    x = inputs(1, 3 * 16 + 5, dim=dim, dtype=dtype)
    window = None if name == "full" else Window("terraced", 16, sinks=2)
    exact = op.forward(x.q.double(), x.k.double(), x.v.double(), window, impl="reference").o
    for return_aux in (False, True):
        o = run(x, window, return_aux=return_aux).o
        assert o.dtype == dtype
        error = (o.double() - exact).norm() / exact.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]


@pytest.mark.parametrize("name,softcap", CASES)
def test_coefficients_give_the_output(name, softcap):
    x = inputs(2, 3 * W + 5, dtype=torch.float64)
    weights = op.coefficients(x.q, x.k, WINDOWS[name], softcap=softcap)
    v = x.v.repeat_interleave(2, 2)
    torch.testing.assert_close(
        torch.einsum("bhqs,bshv->bqhv", weights, v), run(x, WINDOWS[name], softcap=softcap).o
    )
    rows = op.coefficients(x.q, x.k, WINDOWS[name], softcap=softcap, rows=slice(3, 9))
    torch.testing.assert_close(rows, weights[:, :, 3:9])
    if WINDOWS[name] is None or WINDOWS[name].size:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_a_query_without_keys_gives_zero_and_a_finite_gradient():
    """Only a window of no keys and no sinks leaves a query bare; used where ablations remove the rest."""
    x = inputs(1, 5, dtype=torch.float64, grad=True)
    for impl in ("chunked", "reference"):
        result = run(x, Window("sliding", 0), return_aux=True, impl=impl)
        assert not result.o.any()
        assert (result.aux["lse"] < -27).all()  # ln of the guard, or -inf
        for g in torch.autograd.grad(result.o.sum(), [x.q, x.k, x.v]):
            assert not g.any()


def test_large_scores_stay_finite():
    x = inputs(1, 70)
    x.q, x.k = x.q * 200, x.k * 200
    for window, softcap in product(WINDOWS.values(), (None, 50.0)):
        result = run(x, window, softcap=softcap, return_aux=True)
        assert result.o.isfinite().all() and result.aux["lse"].isfinite().all()


def test_bad_input_is_refused():
    x = inputs(1, 5)
    with pytest.raises(
        ValueError, match="impl is 'flash'; available here are 'auto', 'chunked', 'reference'"
    ):
        run(x, None, impl="flash")
    with pytest.raises(ValueError, match="q has head dim 8 and k has 4"):
        op.forward(x.q, x.k[..., :4], x.v)
    with pytest.raises(ValueError, match="q has 3 heads, not a multiple of k's 2 heads"):
        op.forward(x.q[:, :, :3], x.k, x.v)
    with pytest.raises(ValueError, match="the sequences hold 4 tokens; the tensors hold 1 x 5"):
        run(x, None, sequences=Sequences([4], shape=(1, 5)))


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_q_and_k_wider_than_v_as_autocast_gives_them(name, grouped):
    x = inputs(2, 3 * W + 5, heads=4, groups=2 if grouped else 4)
    o = op.forward(x.q, x.k, x.v.bfloat16(), WINDOWS[name]).o
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), run(x, WINDOWS[name]).o, rtol=0, atol=4e-2)
    state = op.forward(
        x.q[:, :-1], x.k[:, :-1], x.v[:, :-1].bfloat16(), WINDOWS[name], return_state=True
    ).state
    step = op.step(x.q[:, -1:], x.k[:, -1:], x.v[:, -1:].bfloat16(), WINDOWS[name], state=state).o
    torch.testing.assert_close(step[:, 0], o[:, -1], rtol=0, atol=4e-2)


@pytest.mark.parametrize("kind", ["sliding", "terraced"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_a_window_far_larger_than_the_text_costs_no_more_than_the_text(kind, sinks):
    """A grid of the window's size would be `[16384, 32768]` a head, at every decoded token too."""
    x = inputs(2, 9)
    window = Window(kind, 1 << 14, sinks)
    whole = op.forward(x.q, x.k, x.v, None, scale=0.3).o
    result = op.forward(
        x.q[:, :5],
        x.k[:, :5],
        x.v[:, :5],
        window,
        scale=0.3,
        sequences=Sequences.dense(2, 5),
        return_state=True,
    )
    outputs, state = [result.o], result.state
    for t in range(5, 9):
        piece = slice(t, t + 1)
        result = op.forward(
            x.q[:, piece], x.k[:, piece], x.v[:, piece], window, scale=0.3,
            sequences=Sequences.dense(2, 1, [t, t]), state=state, return_state=True,
        )  # fmt: skip
        outputs.append(result.o)
        state = result.state
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-5, rtol=1e-5)


def steps(q, k, v, state, start: int, mode=torch.no_grad):
    """Token by token from `start`: outputs and the states after every token."""
    outputs, states = [], []
    for t in range(start, q.shape[1]):
        one = slice(t, t + 1)
        with mode():
            result = op.step(q[:, one], k[:, one], v[:, one], None, state, scale=0.3)
        state = result.state
        outputs.append(result.o)
        states.append(state)
    return torch.cat(outputs, 1), states


def decode_case(tokens: int = 40, rows: int = 2):
    case = inputs(rows, tokens)
    q, k, v = case.q, case.k, case.v
    first = op.forward(q[:, :9], k[:, :9], v[:, :9], None, scale=0.3, return_state=True).state
    whole = op.forward(q, k, v, None, scale=0.3).o
    return (q, k, v), first, whole


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_decode_copies_keys_and_values_once_in_many_steps(mode, monkeypatch):
    monkeypatch.setattr(kv_state, "ROOM", 12)
    qkv, first, whole = decode_case()
    with mode():
        first = first.snapshot()
    o, states = steps(*qkv, first, 9, mode=mode)
    torch.testing.assert_close(o, whole[:, 9:])
    places = {state.k_NSGD.untyped_storage().data_ptr() for state in states}
    assert len(places) == (31 if mode is torch.enable_grad else 3)  # 31 tokens, room for 13 then 13 then 13
    for t, state in enumerate(states, 10):  # the last token did not touch what earlier states show
        torch.testing.assert_close(state.k_NSGD, qkv[1][:, :t], rtol=0, atol=0)
        torch.testing.assert_close(state.v_NSGV, qkv[2][:, :t], rtol=0, atol=0)
        assert state.nbytes == 2 * qkv[1][:, :t].numel() * 4 + state.lengths_N.numel() * 8


def test_two_continuations_of_one_state_do_not_meet():
    (q, k, v), first, whole = decode_case()
    _, states = steps(q, k, v, first, 9)
    middle = states[5]
    torch.manual_seed(1)
    others = [torch.randn_like(x) for x in (q, k, v)]
    mixed = [torch.cat([x[:, :15], y[:, 15:]], 1) for x, y in zip((q, k, v), others, strict=True)]
    o, _ = steps(*mixed, middle, 15)
    torch.testing.assert_close(o, op.forward(*mixed, None, scale=0.3).o[:, 15:])
    again, _ = steps(q, k, v, middle, 15)
    torch.testing.assert_close(again, whole[:, 15:])
    torch.testing.assert_close(states[-1].k_NSGD, k, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.select(torch.tensor([1, 0])).select(torch.tensor([1, 0])),
        lambda state: state.snapshot(),
        lambda state: state.to("cpu"),
    ],
)
def test_a_changed_state_has_no_room_of_another(change):
    (q, k, v), first, whole = decode_case()
    _, states = steps(q[:, :20], k[:, :20], v[:, :20], first, 9)
    changed = change(states[-1])
    assert changed.room is None
    for start in (changed, states[-1]):
        torch.testing.assert_close(steps(q, k, v, start, 20)[0], whole[:, 20:])


def test_decode_goes_on_in_another_mode():
    """A state of inference mode is continued outside it, and the other way round."""
    (q, k, v), first, whole = decode_case()
    for one, other in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        _, states = steps(q[:, :20], k[:, :20], v[:, :20], first, 9, mode=one)
        torch.testing.assert_close(steps(q, k, v, states[-1], 20, mode=other)[0], whole[:, 20:])
        torch.testing.assert_close(steps(q, k, v, states[-1], 20, mode=torch.enable_grad)[0], whole[:, 20:])


def test_gradients_of_a_continued_call_flow_through_the_state():
    (q, k, v), *_ = decode_case(12)
    for x in (q, k, v):
        x.requires_grad_()
    whole = op.forward(q, k, v, None, scale=0.3).o.square().sum()
    expected = torch.autograd.grad(whole, (q, k, v))
    first = op.forward(q[:, :9], k[:, :9], v[:, :9], None, scale=0.3, return_state=True)
    o, _ = steps(q, k, v, first.state, 9, mode=torch.enable_grad)
    got = torch.autograd.grad(torch.cat([first.o, o], 1).square().sum(), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
