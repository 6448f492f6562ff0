"""`hybridize extend`: a hybrid computes something else, with the same weights and without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridize.cli.common import MixOption, RunArgument


def extend(
    run: RunArgument,
    window: Annotated[
        str,
        typer.Option(
            metavar="KIND:SIZE",
            help="Window for linear attention: sliding:64, terraced:32; +sinks:4, +overlap.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="New checkpoint folder.")],
    mix: MixOption = None,
) -> None:
    """Give linear attention a softmax window ("inference-time hybrid"), or other windows to layers that have one."""
    import hybridize

    hybridize.extend(run, out, window=window, mix=mix)
    typer.echo(f"written: {out}")
    typer.echo(f"next: hybridize diagnose {out}    hybridize eval {out}")
