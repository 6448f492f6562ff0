"""The gated delta rule: brute force, chunked = reference with gradients, states, packing, precision, fla's calling."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybridize.ops import delta as op
from hybridize.ops import kernels, slabs
from hybridize.ops.delta import fla
from hybridize.ops.sequences import Sequences

# chunks are 64 tokens long
LENGTHS = [1, 3, 16, 63, 64, 65, 127, 128, 129, 200]
SCALE = 0.3
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}
GATES = ["head", "channel"]


def inputs(
    batch: int,
    length: int,
    gate: str = "head",
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 8,
    values: int = 6,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    decay: float = 1.0,
    max_beta: float = 1.0,
) -> list[Tensor]:
    """q, k, v, g, beta with unit keys."""
    generator = torch.Generator().manual_seed(seed)

    def draw(sample, *shape: int) -> Tensor:
        return sample(batch, length, *shape, generator=generator, dtype=torch.float64)

    q, k = draw(torch.randn, heads, dim), normalize(draw(torch.randn, groups, dim), dim=-1)
    v = draw(torch.randn, groups, values)
    g = -decay * draw(torch.rand, heads, *([dim] if gate == "channel" else []))
    beta = max_beta * draw(torch.rand, heads)
    return [x.to(dtype) for x in (q, k, v, g, beta)]


def start(rows: int, heads: int = 4, dim: int = 8, values: int = 6, dtype=torch.float64) -> op.DeltaState:
    generator = torch.Generator().manual_seed(9)
    S = torch.randn(rows, heads, dim, values, generator=generator, dtype=torch.float64).to(dtype)
    return op.DeltaState(lengths_N=torch.arange(rows) * 37, S_NHDV=S)


def run(x: list[Tensor], **options):
    return op.forward(*x, scale=SCALE, **options)


def tokens(x: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [y[:, begin:end] for y in x]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_formula_by_brute_force(gate, impl):
    x, state = inputs(1, 70, gate, dtype=torch.float64, max_beta=2), start(1)
    q, k, v, g, beta = (y[0].numpy() for y in x)
    expected, final = np.zeros((70, 4, 6)), np.zeros((4, 8, 6))
    for h in range(4):
        moves = []
        for t in range(70):
            key = k[t, h // 2]
            moves.append(
                (np.eye(8) - beta[t, h] * np.outer(key, key)) @ np.diag(np.exp(g[t, h]) * np.ones(8))
            )
        for t in range(70):
            total = np.zeros((8, 6))
            product = np.eye(8)  # of the moves after token j
            for j in range(t, -1, -1):
                total += product @ (beta[j, h] * np.outer(k[j, h // 2], v[j, h // 2]))
                product = product @ moves[j]
            total += product @ state.S_NHDV[0, h].numpy()
            expected[t, h] = SCALE * q[t, h] @ total
        final[h] = total
    result = run(x, state=state, return_state=True, impl=impl)
    np.testing.assert_allclose(result.o[0].numpy(), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(result.state.S_NHDV[0].numpy(), final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("gate", GATES)
def test_chunked_equals_reference_with_gradients(gate, groups):
    for length in LENGTHS if groups == 2 else (3, 65):
        results = []
        for impl in ("reference", "chunked"):
            x = inputs(2, length, gate, groups=groups, dtype=torch.float64, max_beta=2)
            state = start(2)
            leaves = [y.requires_grad_() for y in (*x, state.S_NHDV)]
            before = state.snapshot()
            result = run(x, state=state, return_state=True, impl=impl)
            torch.testing.assert_close(state.S_NHDV, before.S_NHDV, rtol=0, atol=0)
            seed = torch.randn(
                result.o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
            )
            loss = (result.o * seed).sum() + result.state.S_NHDV.square().sum()
            results.append([result.o, result.state.S_NHDV, *torch.autograd.grad(loss, leaves)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gate", GATES)
def test_prefill_equals_chunks_equals_decode_equals_prefix(gate):
    x = inputs(2, 130, gate)
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


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_packed_and_continued_apart_nothing_leaks(gate, impl):
    documents, more = [1, 70, 0, 64, 5, 130], [3, 1, 4, 0, 65, 2]
    singles = [inputs(1, n + m, gate, seed=n) for n, m in zip(documents, more, strict=True)]
    for y in singles[1]:
        y.fill_(torch.nan)
    whole = [run(x).o[0] for x in singles]
    state, begins = None, [0] * len(documents)
    for counts in (documents, more):
        ends = [b + n for b, n in zip(begins, counts, strict=True)]
        packed = [
            torch.cat([x[part][:, b:e] for x, b, e in zip(singles, begins, ends, strict=True)], 1)
            for part in range(5)
        ]
        sequences = Sequences.packed(torch.tensor([0, *np.cumsum(counts)]), begins)
        result = run(packed, sequences=sequences, state=state, return_state=True, impl=impl)
        for piece, o, b, e in zip(result.o[0].split(counts), whole, begins, ends, strict=True):
            torch.testing.assert_close(piece, o[b:e], equal_nan=True, **TOLERANCE)
        state, begins = result.state, ends
    assert state.lengths_N.tolist() == begins
    assert state.S_NHDV[[0, 2, 3, 4, 5]].isfinite().all() and state.S_NHDV[1].isnan().all()


@pytest.mark.parametrize("gate", GATES)
def test_gradients_of_packed_sequences_are_their_own(gate):
    lengths = [5, 130, 0, 1, 64]
    x = inputs(1, sum(lengths), gate, dtype=torch.float64)
    leaves = [y.requires_grad_() for y in x]
    bounds = [0, *np.cumsum(lengths)]
    packed = run(x, sequences=Sequences.packed(torch.tensor(bounds))).o
    alone = torch.cat([run(tokens(x, a, b), impl="reference").o for a, b in pairwise(bounds)], 1)
    torch.testing.assert_close(packed, alone)
    ours = torch.autograd.grad(packed.square().sum(), leaves)
    for mine, theirs in zip(ours, torch.autograd.grad(alone.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gate", GATES)
def test_slabs_change_nothing(gate, monkeypatch):
    x, state = inputs(2, 200, gate, dtype=torch.float64), start(2)
    whole = run(x, state=state, return_state=True)
    monkeypatch.setattr(slabs, "SLAB", 130)
    slabbed = run(x, state=state, return_state=True)
    torch.testing.assert_close(slabbed.o, whole.o)
    torch.testing.assert_close(slabbed.state.S_NHDV, whole.state.S_NHDV)


@pytest.mark.parametrize("decay", [20.0, 1e3, 1e6, torch.inf])
@pytest.mark.parametrize("gate", GATES)
def test_strong_decay_is_exact_and_gradients_finite(gate, decay):
    x = inputs(1, 70, gate, seed=3)
    x[3] = torch.where(torch.arange(70).view(1, -1, *[1] * (x[3].dim() - 2)) % 7 == 3, -decay, 0.01 * x[3])
    leaves = [y.requires_grad_() for y in x]
    o = run(x).o
    exact = op.forward(*(y.detach().double() for y in x), scale=SCALE, impl="reference").o
    torch.testing.assert_close(o, exact.float(), rtol=1e-5, atol=1e-6)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(o.square().sum(), leaves))


@pytest.mark.parametrize("gate", GATES)
def test_long_texts_stay_finite_and_right(gate):
    x = inputs(1, 1500, gate, heads=2, groups=1, decay=1e-3, max_beta=2)
    exact = run([y.double() for y in x], impl="reference").o
    torch.testing.assert_close(run(x).o, exact.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_bounded_by_the_outputs_rounding(dim, dtype):
    for gate in GATES if dim == 64 else GATES[:1]:
        x = inputs(1, 150, gate, dim=dim, values=dim, dtype=dtype)
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


@pytest.mark.parametrize("gate", GATES)
def test_coefficients_give_the_output_and_its_gradients(gate):
    x = inputs(2, 130, gate, dtype=torch.float64, max_beta=2)
    q, k, v, g, beta = x
    leaves = [y.requires_grad_() for y in (q, k, g, beta)]
    A = op.coefficients(q, k, g, beta, scale=SCALE)
    torch.testing.assert_close(torch.einsum("bhqs,bshv->bqhv", A, v.repeat_interleave(2, 2)), run(x).o)
    assert (A.triu(1) == 0).all()
    for rows in (slice(3, 9), slice(60, 130, 7), slice(129, None), slice(5, 5)):
        torch.testing.assert_close(op.coefficients(q, k, g, beta, rows, scale=SCALE), A[:, :, rows])
    # the oracle's coefficients are its outputs for one-hot values
    one_hot = torch.eye(130, dtype=torch.float64).view(1, 130, 1, 130).expand(2, -1, 2, -1)
    oracle = run([q, k, one_hot, g, beta], impl="reference").o.transpose(1, 2)
    torch.testing.assert_close(A, oracle)
    ours = torch.autograd.grad(A.square().sum(), leaves)
    for mine, theirs in zip(ours, torch.autograd.grad(oracle.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_associative_recall(impl):
    keys = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    v = torch.randn(1, 16, 1, 5, dtype=torch.float64)
    k = keys.repeat(2, 1).view(1, 16, 1, 8)  # every key is written twice: the second value replaces the first
    ones, zeros = torch.ones(1, 16, 1, dtype=torch.float64), torch.zeros(1, 16, 1, dtype=torch.float64)
    S = op.forward(k, k, v, zeros, ones, scale=1.0, return_state=True, impl=impl).state.S_NHDV
    torch.testing.assert_close(keys @ S[0, 0], v[0, 8:, 0])


def test_fla_is_called_with_what_it_takes(monkeypatch):
    """The kernels' place is taken by the reference, called as they are."""
    calls = []

    def kernel(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        calls.append((q, k, v, g, beta, cu_seqlens))
        assert q.shape[2] == k.shape[2] == v.shape[2] and g.dtype == beta.dtype == torch.float32
        lengths = [q.shape[1]] * q.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        assert min(lengths) > 0
        state = None
        if initial_state is not None:
            assert initial_state.dtype == torch.float32
            state = op.DeltaState(
                lengths_N=torch.zeros(len(lengths), dtype=torch.int64), S_NHDV=initial_state
            )
        sequences = Sequences(lengths, shape=tuple(q.shape[:2]))
        result = op.reference.forward(q, k, v, g, beta, scale, sequences, state, output_final_state)
        return result.o, result.state.S_NHDV if output_final_state else None

    monkeypatch.setattr(fla, "load", lambda: (kernel, kernel))
    lengths = [0, 5, 0, 9, 1]
    for gate in GATES:
        for sequences, rows, x in (
            (Sequences(lengths, [3] * 5, shape=(1, 15)), 5, inputs(1, 15, gate)),
            (Sequences(lengths, shape=(3, 5)), 5, inputs(3, 5, gate)),
            (Sequences([5, 10], shape=(1, 15)), 2, inputs(1, 15, gate)),
            (Sequences.dense(2, 7), 2, inputs(2, 7, gate, dtype=torch.bfloat16)),
            (Sequences.dense(2, 0), 2, inputs(2, 0, gate)),
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


def test_kernels_say_why_they_do_not_run():
    def on_cuda(dtype: torch.dtype, dim: int) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 5, 4, dim))

    def why(
        dtype: torch.dtype = torch.bfloat16, dim: int = 64, values: int = 64, found: object = "kernel"
    ) -> str | None:
        return kernels.refusal(lambda: found, on_cuda(dtype, dim), on_cuda(dtype, values))

    assert why() is why(dim=16, values=512) is None
    assert why(torch.float64) == "v has dtype torch.float64; allowed are bfloat16, float16, float32"
    assert why(dim=512) == "the head dim is 512; allowed are 16 to 256"
    assert why(dim=8) == "the head dim is 8; allowed are 16 to 256"
    assert why(values=8) == "the value dim is 8; allowed are 16 and more"
    assert "flash-linear-attention is not installed here" in why(found=None)


def test_what_does_not_fit_is_refused():
    q, k, v, g, beta = inputs(1, 5)
    with pytest.raises(
        ValueError, match=r"g has shape \(1, 5, 2\); allowed are \(1, 5, 4\) .* \(1, 5, 4, 8\)"
    ):
        run([q, k, v, g[..., :2], beta])
    with pytest.raises(ValueError, match=r"beta has shape \(1, 4, 4\); it must be \(1, 5, 4\)"):
        run([q, k, v, g, beta[:, :4]])
    with pytest.raises(ValueError, match="q has 4 heads, not a multiple of k's 3 heads"):
        run([q, k[:, :, [0, 1, 1]], v[:, :, [0, 1, 1]], g, beta])
    with pytest.raises(
        ValueError, match=r"state holds S of shape \(1, 2, 8, 6\); the call needs \(1, 4, 8, 6\)"
    ):
        run([q, k, v, g, beta], state=start(1, heads=2))
    with pytest.raises(ValueError, match="q has 5 tokens a row; a step takes 1"):
        op.step(q, k, v, g, beta, start(1), scale=SCALE)
    with pytest.raises(ValueError, match="impl is 'triton'; available here are 'auto', 'chunked'"):
        run([q, k, v, g, beta], impl="triton")
