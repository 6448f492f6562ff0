"""`hybridize convert`: every step of a recipe; the same command continues an interrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridize.cli.common import DeviceOption, RecipeOption, SetOption, continued


def convert(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file or alias such as smollm2-135m.")
    ],
    recipe: RecipeOption,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="RUN", help="Run folder.")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="Text in place of the recipe's: docstrings, package_code, recall, code, a file, a folder or a hub dataset; or "
            "several: '\\[docstrings, package_code]'.",
        ),
    ] = None,
    set_: SetOption = None,
    device: DeviceOption = None,
    stop_after: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Stop after this step of the recipe: its kind (transfer, select, distill, ...) or its number.",
        ),
    ] = None,
) -> None:
    """Make a hybrid of MODEL. Kill it at any moment: the same command continues from the last checkpoint."""
    import hybridize

    with continued():
        hybridize.convert(
            model, recipe, out, data=data, overrides=set_ or [], device=device, stop_after=stop_after
        )
    typer.echo(f"finished: {out}")
    typer.echo(f'next: hybridize eval {out}    hybridize generate {out} "The moon is"')
