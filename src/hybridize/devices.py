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


def device_name(device: torch.device) -> str:
    """The GPU's own name; a CPU with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
