"""Parts of head groups on their own."""

from __future__ import annotations

import pytest
import torch

from hybridize.mixers.parts import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_rms_norm_is_computed_wide_and_rounded_once(dtype, weight):
    norm = RMSNorm(96).to(weight)
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(96))
    x = 3 * torch.randn(2, 40, 96, dtype=torch.float64).to(dtype)
    exact = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    )
    y = norm(x)
    assert y.dtype == dtype
    info = torch.finfo(dtype)
    bound = max(0.51 * info.eps, 3e-7) * exact.abs() + info.smallest_normal * info.eps
    assert ((y.double() - exact).abs() <= bound).all()
