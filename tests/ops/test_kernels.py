"""One rule for `impl` in the recurrences: the kernels for 16-bit values where they run, `chunked` otherwise."""

from __future__ import annotations

import pytest
import torch

from hybridize.ops import decay, delta, dplr, kernels
from hybridize.ops.sequences import Sequences


@pytest.mark.parametrize("op", [decay, delta, dplr], ids=["decay", "delta", "dplr"])
def test_auto_takes_the_kernels_for_16_bit_values_where_they_run(op, monkeypatch):
    implementations = op.api.IMPLEMENTATIONS

    def chosen(impl: str, dtype: torch.dtype) -> object:
        x = torch.zeros(1, 5, 4, 8, dtype=dtype)
        return kernels.select(impl, implementations, x, x)

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert chosen("auto", dtype) is op.chunked
        assert chosen("reference", dtype) is op.reference
        with pytest.raises(ValueError, match="impl is 'fla'; it needs tensors on CUDA, these are on cpu"):
            chosen("fla", dtype)
    monkeypatch.setattr(kernels, "refusal", lambda load, q, v: None)  # as on a GPU
    assert chosen("auto", torch.float32) is chosen("auto", torch.float64) is op.chunked
    assert chosen("auto", torch.bfloat16) is chosen("auto", torch.float16) is op.fla
    assert chosen("fla", torch.float32) is op.fla
    with pytest.raises(
        ValueError, match="impl is 'triton'; available here are 'auto', 'chunked', 'reference'"
    ):
        chosen("triton", torch.float32)


def test_scalar_decays_of_the_delta_rule_take_the_channels_kernel_where_triton_miscompiles(monkeypatch):
    taken = []

    def kernel(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        taken.append(g.dim())
        result = delta.forward(q, k, v, g, beta, scale=scale, impl="reference")
        return result.o, None

    monkeypatch.setattr(delta.fla, "load", lambda: (kernel, kernel))
    monkeypatch.setattr(kernels, "scalar_backward_refused", lambda device: True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 4, generator=generator) for _ in range(3))
    g, beta = -torch.rand(1, 9, 2, generator=generator), torch.rand(1, 9, 2, generator=generator)

    def run(q, g):
        rest = (k, v, g, beta, 0.5, Sequences.dense(1, 9), None, False)
        return delta.fla.forward(q, *rest).o

    run(q, g)
    expected = delta.forward(q, k, v, g, beta, scale=0.5, impl="reference").o
    torch.testing.assert_close(run(q.clone().requires_grad_(), g), expected)
    torch.testing.assert_close(run(q, g.clone().requires_grad_()), expected)
    assert taken == [3, 4, 4]
