"""Devices: which one to use, and what it is called in results."""

from __future__ import annotations

import torch


def choose_device(device: str | None) -> torch.device:
    """`device`, or by default the GPU where there is one. Raises ValueError for a device this machine has not."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"device is {name!r}, which cannot be used here ({reason}); leave it out to take what there is"
        ) from None


def bf16_note(device: torch.device) -> str | None:
    """What to know about bfloat16 on a CPU that has no instructions for it (products there are 5 to 17 times slower than float32's)."""
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2"):
        return None
    return "precision is bf16, which this CPU computes several times slower than fp32: --set precision=fp32"


def device_name(device: torch.device) -> str:
    """The GPU's own name; a CPU with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
