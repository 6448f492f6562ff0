"""The adapter to flash-linear-attention, its kernels replaced by stand-ins that take what its kernels take."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.ops.decay_cases import HEADS, KINDS, SCALE, VALUES, Case, case, random_state, run

from hybridize.ops import kernels
from hybridize.ops.decay import fla as adapter
from hybridize.ops.decay import forward
from hybridize.ops.sequences import Sequences

CALLS = []


def stand_in(q, k, v, log, scale, initial_state, output_final_state, cu_seqlens):
    CALLS.append(log)
    assert q.dtype == k.dtype == v.dtype and q.shape == k.shape and log.dtype == torch.float32
    sequences = None
    if cu_seqlens is not None:
        assert q.shape[0] == 1 and cu_seqlens.dtype == torch.int64 and (cu_seqlens.diff() > 0).all()
        sequences = Sequences.packed(cu_seqlens)
    rows = q.shape[0] if sequences is None else len(sequences)
    state = None
    if initial_state is not None:
        assert initial_state.dtype == torch.float32 and initial_state.shape[0] == rows
        state = random_state(rows, q.shape[-1])
        state.S_NHDV = initial_state
    result = forward(
        q, k, v, log, scale=scale, sequences=sequences, state=state, return_state=True, impl="reference"
    )
    return result.o, result.state.S_NHDV if output_final_state else None


@pytest.fixture(autouse=True)
def library(monkeypatch):
    def chunk_simple_gla(
        q, k, v, g=None, g_gamma=None, *, scale, initial_state, output_final_state, cu_seqlens
    ):
        assert (g is None) != (g_gamma is None)
        log = g.reshape(q.shape[:3]) if g is not None else g_gamma.detach()  # no gradient of a fixed decay
        return stand_in(q, k, v, log, scale, initial_state, output_final_state, cu_seqlens)

    def chunk_gla(q, k, v, g, *, scale, initial_state, output_final_state, cu_seqlens):
        assert g.shape == q.shape
        return stand_in(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)

    monkeypatch.setattr(adapter, "load", lambda: (chunk_simple_gla, chunk_gla))
    CALLS.clear()


def through_adapter(x: Case, sequences=None, state=None, return_state=False):
    sequences = sequences or Sequences.dense(*x.q.shape[:2])
    return adapter.forward(x.q, x.k, x.v, x.log, SCALE, sequences, state, return_state)


@pytest.mark.parametrize("lengths", [None, [5, 0, 9, 1, 0], [15]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_adapter_equals_reference(kind, lengths):
    sequences = None if lengths is None else Sequences.packed(torch.tensor([0, *lengths]).cumsum(0))
    rows = 2 if lengths is None else len(lengths)
    results = []
    for function in (partial(run, impl="reference"), through_adapter):
        x = case(kind, 2 if lengths is None else 1, 15).map(lambda y: y.requires_grad_())
        state = random_state(rows)
        state.S_NHDV.requires_grad_()
        result = function(x, sequences=sequences, state=state, return_state=True)
        assert result.state.lengths_N.tolist() == (lengths or [15, 15])
        loss = result.o.square().sum() + result.state.S_NHDV.square().sum()
        grads = torch.autograd.grad(loss, [*x.leaves, state.S_NHDV])
        results.append([result.o, result.state.S_NHDV, *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        result = through_adapter(x, sequences)
    assert result.state is None
    torch.testing.assert_close(result.o, run(x, sequences=sequences, impl="reference").o)
    assert CALLS[-1].dim() == {"fixed": 1, "scalar": 3, "vector": 4}[kind]


def test_no_tokens_call_no_kernel():
    state = random_state(2, seen=3)
    result = through_adapter(case("scalar", 2, 0), state=state, return_state=True)
    assert result.o.shape == (2, 0, HEADS, VALUES) and result.state.lengths_N.tolist() == [3, 3] and not CALLS


def test_inputs_of_several_dtypes_meet_in_that_of_the_values():
    x = case("scalar", 1, 9)
    result = through_adapter(Case(x.q, x.k.bfloat16(), x.v.bfloat16(), x.log.bfloat16()))
    assert result.o.dtype == torch.bfloat16


def test_scalar_decays_take_the_channels_kernel_where_triton_miscompiles(monkeypatch):
    monkeypatch.setattr(kernels, "scalar_backward_refused", lambda device: True)
    x = case("scalar", 1, 9)
    through_adapter(x)
    assert CALLS[-1].dim() == 3
    x.q.requires_grad_()
    torch.testing.assert_close(through_adapter(x).o, run(x).o)
    assert CALLS[-1].dim() == 4


def test_what_the_kernels_cannot_take_is_refused():
    x = case("fixed", 1, 3)
    assert kernels.refusal(adapter.load, x.q, x.v) == "it needs tensors on CUDA, these are on cpu"
    with pytest.raises(ValueError, match="impl is 'fla'; it needs tensors on CUDA, these are on cpu"):
        run(x, impl="fla")
