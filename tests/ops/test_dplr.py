"""Diagonal plus low rank (RWKV-7): brute force, chunked = reference with gradients, states, packing, fla's calling."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybridize.ops import delta, slabs
from hybridize.ops import dplr as op
from hybridize.ops.dplr import fla
from hybridize.ops.sequences import Sequences

# chunks are 64 tokens long
LENGTHS = [1, 3, 16, 63, 64, 65, 127, 128, 129, 200]
SCALE = 0.3
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}
H, D, V = 3, 8, 6


def inputs(
    batch: int,
    length: int,
    *,
    heads: int = H,
    dim: int = D,
    values: int = V,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    decay: float = 0.6,
) -> list[Tensor]:
    """r, w, k, v, a, b as RWKV-7 makes them: a = -kk, b = kk * rate, w above -exp(-1/2)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(sample, width: int) -> Tensor:
        return sample(batch, length, heads, width, generator=generator, dtype=torch.float64)

    r, k, kk, v = (draw(torch.randn, width) for width in (dim, dim, dim, values))
    w, rate = -decay * draw(torch.rand, dim), draw(torch.rand, dim)
    kk = normalize(kk, dim=-1)
    return [x.to(dtype) for x in (r, w, k, v, -kk, kk * rate)]


def start(rows: int, heads: int = H, dtype=torch.float64) -> op.DplrState:
    generator = torch.Generator().manual_seed(9)
    S = torch.randn(rows, heads, D, V, generator=generator, dtype=torch.float64).to(dtype)
    return op.DplrState(lengths_N=torch.arange(rows) * 37, S_NHDV=S)


def run(x: list[Tensor], **options):
    return op.forward(*x, scale=SCALE, **options)


def tokens(x: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [y[:, begin:end] for y in x]


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_formula_by_brute_force(impl):
    x, state = inputs(1, 70, dtype=torch.float64), start(1)
    r, w, k, v, a, b = (y[0].numpy() for y in x)
    expected, final = np.zeros((70, H, V)), np.zeros((H, D, V))
    for h in range(H):
        moves = [np.diag(np.exp(w[t, h])) + np.outer(b[t, h], a[t, h]) for t in range(70)]
        for t in range(70):
            total, product = np.zeros((D, V)), np.eye(D)  # the product of the moves after token j
            for j in range(t, -1, -1):
                total += product @ np.outer(k[j, h], v[j, h])
                product = product @ moves[j]
            total += product @ state.S_NHDV[0, h].numpy()
            expected[t, h] = SCALE * r[t, h] @ total
        final[h] = total
    result = run(x, state=state, return_state=True, impl=impl)
    np.testing.assert_allclose(result.o[0].numpy(), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(result.state.S_NHDV[0].numpy(), final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_delta_rule_is_one_of_these(impl):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 70, H, D, generator=generator, dtype=torch.float64) for _ in range(3))
    k, beta = normalize(k, dim=-1), torch.rand(2, 70, H, generator=generator, dtype=torch.float64)
    g = -torch.rand(2, 70, H, D, generator=generator, dtype=torch.float64)
    expected = delta.forward(q, k, v, g, beta, scale=SCALE, impl="reference").o
    beta = beta[..., None]
    torch.testing.assert_close(run([q, g, beta * k, v, k * g.exp(), -beta * k], impl=impl).o, expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_equals_reference_with_gradients(length):
    results = []
    for impl in ("reference", "chunked"):
        x, state = inputs(2, length, dtype=torch.float64), start(2)
        leaves = [y.requires_grad_() for y in (*x, state.S_NHDV)]
        before = state.snapshot()
        result = run(x, state=state, return_state=True, impl=impl)
        torch.testing.assert_close(state.S_NHDV, before.S_NHDV, rtol=0, atol=0)
        seed = torch.randn(result.o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        loss = (result.o * seed).sum() + result.state.S_NHDV.square().sum()
        results.append([result.o, result.state.S_NHDV, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_prefill_equals_chunks_equals_decode_equals_prefix():
    x = inputs(2, 130)
    whole = run(x, impl="reference", return_state=True)
    for length in [*LENGTHS[:-3], 130]:
        torch.testing.assert_close(run(tokens(x, 0, length)).o, whole.o[:, :length], **TOLERANCE)
    for impl in ("chunked", "reference"):
        for sizes in ([63, 1, 1, 65], [5, 0, 1, 70, 2, 52]):
            outputs, state = [], None
            for begin, end in pairwise([0, *np.cumsum(sizes)]):
                result = run(tokens(x, begin, end), state=state, return_state=True, impl=impl)
                state = result.state
                outputs.append(result.o)
            torch.testing.assert_close(torch.cat(outputs, 1), whole.o, **TOLERANCE)
            torch.testing.assert_close(state.S_NHDV, whole.state.S_NHDV, **TOLERANCE)
            assert state.lengths_N.tolist() == [130, 130]
    state = run(tokens(x, 0, 60), return_state=True).state
    for t in range(60, 130):
        before = state.snapshot()
        result = op.step(*tokens(x, t, t + 1), state, scale=SCALE)
        torch.testing.assert_close(state.S_NHDV, before.S_NHDV, rtol=0, atol=0)
        state = result.state
        torch.testing.assert_close(result.o[:, 0], whole.o[:, t], **TOLERANCE)
    torch.testing.assert_close(state.S_NHDV, whole.state.S_NHDV, **TOLERANCE)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_packed_and_continued_apart_nothing_leaks(impl):
    documents, more = [1, 70, 0, 64, 5, 130], [3, 1, 4, 0, 65, 2]
    singles = [inputs(1, n + m, seed=n) for n, m in zip(documents, more, strict=True)]
    for y in singles[1]:
        y.fill_(torch.nan)
    whole = [run(x).o[0] for x in singles]
    state, begins = None, [0] * len(documents)
    for counts in (documents, more):
        ends = [b + n for b, n in zip(begins, counts, strict=True)]
        packed = [
            torch.cat([x[part][:, b:e] for x, b, e in zip(singles, begins, ends, strict=True)], 1)
            for part in range(6)
        ]
        sequences = Sequences.packed(torch.tensor([0, *np.cumsum(counts)]), begins)
        result = run(packed, sequences=sequences, state=state, return_state=True, impl=impl)
        for piece, o, b, e in zip(result.o[0].split(counts), whole, begins, ends, strict=True):
            torch.testing.assert_close(piece, o[b:e], equal_nan=True, **TOLERANCE)
        state, begins = result.state, ends
    assert state.lengths_N.tolist() == begins
    assert state.S_NHDV[[0, 2, 3, 4, 5]].isfinite().all() and state.S_NHDV[1].isnan().all()


def test_gradients_of_packed_sequences_are_their_own():
    lengths = [5, 130, 0, 1, 64]
    x = inputs(1, sum(lengths), dtype=torch.float64)
    leaves = [y.requires_grad_() for y in x]
    bounds = [0, *np.cumsum(lengths)]
    packed = run(x, sequences=Sequences.packed(torch.tensor(bounds))).o
    alone = torch.cat([run(tokens(x, a, b), impl="reference").o for a, b in pairwise(bounds)], 1)
    torch.testing.assert_close(packed, alone)
    ours = torch.autograd.grad(packed.square().sum(), leaves)
    for mine, theirs in zip(ours, torch.autograd.grad(alone.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_slabs_change_nothing(monkeypatch):
    x, state = inputs(2, 200, dtype=torch.float64), start(2)
    whole = run(x, state=state, return_state=True)
    monkeypatch.setattr(slabs, "SLAB", 130)
    slabbed = run(x, state=state, return_state=True)
    torch.testing.assert_close(slabbed.o, whole.o)
    torch.testing.assert_close(slabbed.state.S_NHDV, whole.state.S_NHDV)


@pytest.mark.parametrize("decay", [20.0, 1e3, 1e6, torch.inf])
def test_strong_decay_is_exact_and_gradients_finite(decay):
    x = inputs(1, 70, seed=3)
    x[1] = torch.where(torch.arange(70).view(1, -1, 1, 1) % 7 == 3, -decay, 0.01 * x[1])
    leaves = [y.requires_grad_() for y in x]
    o = run(x).o
    exact = op.forward(*(y.detach().double() for y in x), scale=SCALE, impl="reference").o
    torch.testing.assert_close(o, exact.float(), **TOLERANCE)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(o.square().sum(), leaves))


def test_long_texts_stay_finite_and_right():
    x = inputs(1, 1500, heads=2, decay=0.05)
    exact = run([y.double() for y in x], impl="reference").o
    o = run(x).o
    assert (o - exact).norm() / exact.norm() < 1e-5


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_bounded_by_the_outputs_rounding(dim, dtype):
    x = inputs(1, 150, heads=2, dim=dim, values=dim, dtype=dtype)
    exact = run([y.double() for y in x], impl="reference").o
    result = run(x, return_state=True)
    assert result.o.dtype == dtype and result.state.S_NHDV.dtype == torch.float32
    error = (result.o.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


def test_autocast_leaves_states_in_float32():
    x = inputs(1, 20)
    with torch.autocast("cpu", torch.bfloat16):
        result = run(x, return_state=True)
    assert result.o.dtype == result.state.S_NHDV.dtype == torch.float32
    torch.testing.assert_close(result.o, run(x, impl="reference").o, **TOLERANCE)


def test_coefficients_give_the_output_and_its_gradients():
    x = inputs(2, 130, dtype=torch.float64)
    r, w, k, v, a, b = x
    leaves = [y.requires_grad_() for y in (r, w, k, a, b)]
    A = op.coefficients(r, w, k, a, b, scale=SCALE)
    torch.testing.assert_close(torch.einsum("bhqs,bshv->bqhv", A, v), run(x).o)
    assert (A.triu(1) == 0).all()
    for rows in (slice(3, 9), slice(60, 130, 7), slice(129, None), slice(5, 5)):
        torch.testing.assert_close(op.coefficients(r, w, k, a, b, rows, scale=SCALE), A[:, :, rows])
    # the oracle's coefficients are its outputs for one-hot values
    one_hot = torch.eye(130, dtype=torch.float64).view(1, 130, 1, 130).expand(2, -1, H, -1)
    oracle = run([r, w, k, one_hot, a, b], impl="reference").o.transpose(1, 2)
    torch.testing.assert_close(A, oracle)
    ours = torch.autograd.grad(A.square().sum(), leaves)
    for mine, theirs in zip(ours, torch.autograd.grad(oracle.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_fla_is_called_with_what_it_takes(monkeypatch):
    """The kernel's place is taken by the reference, called as it is."""

    def kernel(r, w, k, v, a, b, *, scale, initial_state, output_final_state, cu_seqlens):
        assert w.dtype == torch.float32 and r.dtype == k.dtype == a.dtype == b.dtype == v.dtype
        lengths = [r.shape[1]] * r.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        assert min(lengths) > 0
        state = None
        if initial_state is not None:
            assert initial_state.dtype == torch.float32
            state = op.DplrState(lengths_N=torch.zeros(len(lengths), dtype=torch.int64), S_NHDV=initial_state)
        sequences = Sequences(lengths, shape=tuple(r.shape[:2]))
        result = op.reference.forward(r, w, k, v, a, b, scale, sequences, state, output_final_state)
        return result.o, result.state.S_NHDV if output_final_state else None

    monkeypatch.setattr(fla, "load", lambda: kernel)
    lengths = [0, 5, 0, 9, 1]
    for sequences, rows, x in (
        (Sequences(lengths, [3] * 5, shape=(1, 15)), 5, inputs(1, 15)),
        (Sequences(lengths, shape=(3, 5)), 5, inputs(3, 5)),
        (Sequences.dense(2, 7), 2, inputs(2, 7, dtype=torch.bfloat16)),
        (Sequences.dense(2, 0), 2, inputs(2, 0)),
    ):
        for state in (None, start(rows, dtype=torch.float32)):
            for return_state in (False, True):
                ours = fla.forward(*x, SCALE, sequences, state, return_state)
                expected = run(x, sequences=sequences, state=state, return_state=True)
                torch.testing.assert_close(ours.o, expected.o, **TOLERANCE)
                if return_state:
                    torch.testing.assert_close(ours.state.S_NHDV, expected.state.S_NHDV, **TOLERANCE)
                    assert torch.equal(ours.state.lengths_N, expected.state.lengths_N)
                else:
                    assert ours.state is None
    with pytest.raises(ValueError, match="impl is 'fla'; it needs tensors on CUDA, these are on cpu"):
        run(inputs(1, 5), impl="fla")


def test_what_does_not_fit_is_refused():
    r, w, k, v, a, b = inputs(1, 5)
    with pytest.raises(ValueError, match=r"w has shape \(1, 5, 3\); it must be r's, \(1, 5, 3, 8\)"):
        run([r, w[..., 0], k, v, a, b])
    with pytest.raises(ValueError, match=r"b has shape \(1, 5, 3, 4\); it must be r's"):
        run([r, w, k, v, a, b[..., :4]])
    with pytest.raises(ValueError, match=r"v has shape \(1, 4, 3, 6\); it must be \(1, 5, 3, V\)"):
        run([r, w, k, v[:, :4], a, b])
    with pytest.raises(ValueError, match=r"r has shape \(5, 3, 8\); it must be \[B, T, heads, dim\]"):
        run([r[0], w, k, v, a, b])
    with pytest.raises(
        ValueError, match=r"state holds S of shape \(1, 2, 8, 6\); the call needs \(1, 3, 8, 6\)"
    ):
        run([r, w, k, v, a, b], state=start(1, heads=2))
    with pytest.raises(ValueError, match="r has 5 tokens a row; a step takes 1"):
        op.step(r, w, k, v, a, b, start(1), scale=SCALE)
    with pytest.raises(ValueError, match="impl is 'triton'; available here are 'auto', 'chunked'"):
        run([r, w, k, v, a, b], impl="triton")
