"""A process whose files cannot grow past a limit, as on a full disk."""

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path


def run_limited(code: str, folder: Path, limit: int) -> str:
    """Run `code` with `folder` as its argument where no file grows past `limit` bytes; returns what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
