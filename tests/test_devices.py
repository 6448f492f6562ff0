"""What is said about a device."""

from __future__ import annotations

import pytest
import torch

from hybridize.devices import bf16_note


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512", "SVE256"])
def test_bf16_on_a_cpu_without_instructions_for_it(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    slow = capability in ("DEFAULT", "AVX2")
    assert (bf16_note(torch.device("cpu")) is not None) == slow
    assert bf16_note(torch.device("cuda")) is None
