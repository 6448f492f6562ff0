"""`hybridize demo`: the whole job on a real, small teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridize.cli.common import continued


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Run folder; the same command continues it.")
    ] = Path("runs/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps only, to see that everything works.")
    ] = False,
) -> None:
    """Convert SmolLM2-135M on this machine: teacher, swap, transfer, LoRA, report.

    No account and no GPU needed; the teacher is fetched once (about 90 MB) and kept in a cache.
    """
    import hybridize

    with continued():
        hybridize.demo(out, quick=quick)
