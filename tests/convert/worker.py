"""One conversion in a process of its own, made to be killed: `python worker.py` or the target of a forked process.

Forking a server that has imported everything saves each process some ten seconds of imports.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hybridize.api import convert as _warm  # noqa: F401
from hybridize.cli import main
from hybridize.convert import pipeline
from hybridize.report import html as _html  # noqa: F401


def run(arguments: Sequence[str], output: str, save_every_s: float = 60.0) -> None:
    """The console script with `arguments`, its output in a file; ends the process with the script's exit code."""
    torch.set_num_threads(1)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    pipeline.SAVE_EVERY_S = save_every_s
    sys.argv = ["hybridize", *arguments]
    main.run()


def size_limited(arguments: Sequence[str], output: str, limit: int) -> None:
    """As `run`, where no file grows past `limit` bytes, as on a full disk."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run(arguments, output)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
