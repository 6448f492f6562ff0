"""The process around a run: random seeds, the peak of memory, Ctrl-C and the command line."""

import random
import resource
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def peak_memory(device: torch.device) -> int:
    """Peak bytes allocated on a CUDA device, or resident in this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes everywhere but on macOS


def command_line() -> str:
    """The command line that was typed, as far as it can be known."""
    program, *arguments = sys.argv
    start = ["python", program] if program.endswith(".py") else [Path(program).name]
    return shlex.join([*start, *arguments])


@contextmanager
def hold_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold the first Ctrl-C until the step under way is complete; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = False

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    former = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, former)
