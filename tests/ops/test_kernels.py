"""One rule for `impl` in the recurrences: the kernels for 16-bit values where they run, `chunked` otherwise."""

from __future__ import annotations

import pytest
import torch

from hybridize.ops import decay, delta, dplr, kernels


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
    monkeypatch.setattr(op.fla, "refusal", lambda q, v: None)  # as on a GPU
    assert chosen("auto", torch.float32) is chosen("auto", torch.float64) is op.chunked
    assert chosen("auto", torch.bfloat16) is chosen("auto", torch.float16) is op.fla
    assert chosen("fla", torch.float32) is op.fla
    with pytest.raises(
        ValueError, match="impl is 'triton'; available here are 'auto', 'chunked', 'reference'"
    ):
        chosen("triton", torch.float32)
