"""On a GPU: delta and dplr by `chunked` and by fla's kernels = the float64 reference; states and gradients too."""

from __future__ import annotations

import pytest
import torch
from tests.ops import test_delta, test_dplr
from torch import Tensor

from hybridize.ops import delta, dplr
from hybridize.ops.sequences import Sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# errors of outputs and states, in norm; those of gradients may be GRADIENTS times as large. The kernels multiply in the
# inputs' dtype, float32 as TF32.
CHUNKED = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
GRADIENTS = 4
KERNELS = {torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
CASES = [  # each costs a compilation
    (64, torch.bfloat16),
    (96, torch.bfloat16),
    (128, torch.bfloat16),
    (64, torch.float16),
    (64, torch.float32),
]
LENGTHS = [1, 70, 0, 64, 5, 130]


def inputs(kind: str, rows: int, length: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """As the mixers give them: decays (and beta) in float32 whatever the dtype of the rest."""
    if kind == "dplr":
        x = test_dplr.inputs(rows, length, dim=dim, values=dim, dtype=torch.float64)
        full = (1,)
    else:
        x = test_delta.inputs(rows, length, kind, dim=dim, values=dim, dtype=torch.float64)
        full = (3, 4)
    wide = torch.promote_types(dtype, torch.float32)
    return [y.to(wide if i in full else dtype).cuda() for i, y in enumerate(x)]


def run(kind: str, x: list[Tensor], state: Tensor, sequences: Sequences, impl: str):
    """o, the state after the call, and the gradients of x and of the initial state."""
    op, made = (dplr, dplr.DplrState) if kind == "dplr" else (delta, delta.DeltaState)
    leaves = [y.detach().requires_grad_() for y in (*x, state)]
    lengths_N = torch.zeros(len(sequences), dtype=torch.int64, device="cuda")
    result = op.forward(
        *leaves[:-1],
        scale=x[0].shape[-1] ** -0.5,
        sequences=sequences,
        state=made(lengths_N=lengths_N, S_NHDV=leaves[-1]),
        return_state=True,
        impl=impl,
    )
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=generator).to(y) for y in (result.o, result.state.S_NHDV)]
    loss = (result.o * seeds[0]).sum() + (result.state.S_NHDV * seeds[1]).sum()
    return [result.o, result.state.S_NHDV, *torch.autograd.grad(loss, leaves)]


def compare(kind: str, impl: str, dtype: torch.dtype, dim: int, packed: bool, bound: float) -> None:
    if packed:
        sequences = Sequences.packed(torch.tensor([0, *LENGTHS]).cumsum(0).cuda())
        x = inputs(kind, 1, sum(LENGTHS), dim, dtype)
    else:
        sequences = Sequences.dense(2, 130, device="cuda")
        x = inputs(kind, 2, 130, dim, dtype)
    heads = x[0].shape[2]
    generator = torch.Generator().manual_seed(2)
    state = torch.randn(len(sequences), heads, dim, dim, generator=generator).to("cuda")
    state = state.double() if dtype == torch.float64 else state
    ours = run(kind, x, state, sequences, impl)
    exact = run(kind, [y.double() for y in x], state.double(), sequences, "reference")
    assert ours[0].dtype == dtype
    for i, (mine, theirs) in enumerate(zip(ours, exact, strict=True)):
        assert (mine.double() - theirs).norm() <= bound * (GRADIENTS if i > 1 else 1) * theirs.norm(), i


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", list(CHUNKED))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["head", "channel", "dplr"])
def test_chunked_equals_the_float64_reference(kind, dim, dtype, packed):
    compare(kind, "chunked", dtype, dim, packed, CHUNKED[dtype])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dim,dtype", CASES)
@pytest.mark.parametrize("kind", ["head", "channel", "dplr"])
def test_kernels_equal_the_float64_reference(kind, dim, dtype, packed):
    pytest.importorskip("fla")
    if kind == "dplr" and dtype == torch.float32:
        pytest.skip("fla says that this kernel is for 16-bit values")
    compare(kind, "fla", dtype, dim, packed, KERNELS[dtype])


@pytest.mark.parametrize("kind", ["head", "channel", "dplr"])
def test_auto_takes_the_kernels_for_16_bit_values_alone(kind, monkeypatch):
    pytest.importorskip("fla")
    op = dplr if kind == "dplr" else delta
    called = []
    forward = op.fla.forward
    monkeypatch.setattr(op.fla, "forward", lambda *args: called.append(1) or forward(*args))
    for dtype, times in ((torch.float32, 0), (torch.bfloat16, 1)):
        op.forward(*inputs(kind, 1, 70, 64, dtype), scale=0.1)
        assert len(called) == times


def test_prefill_by_the_kernels_continues_in_steps():
    for kind in ("head", "channel"):
        x = inputs(kind, 2, 140, 64, torch.bfloat16)
        exact = delta.forward(*(y.double() for y in x), scale=0.1, impl="reference").o
        state = delta.forward(*(y[:, :130] for y in x), scale=0.1, return_state=True).state
        for t in range(130, 140):
            result = delta.step(*(y[:, t : t + 1] for y in x), state, scale=0.1)
            state = result.state
            error = (result.o[:, 0].double() - exact[:, t]).norm()
            assert error < KERNELS[torch.bfloat16] * exact[:, t].norm()
