"""`hybridize select`: which layers keep softmax."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hybridize.cli.common import DeviceOption, SetOption, continued


class Rule(StrEnum):
    halo = "halo"
    jet = "jet"
    kl = "kl"
    uniform = "uniform"
    tail = "tail"


def select(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN|FILE",
            help="With a recipe: the model to convert. Else a run or a file with single-layer scores, to rank anew.",
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="Run this recipe up to its select step.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="The run folder; for a ranking anew, where selection.json and selection.svg go.",
        ),
    ] = None,
    rule: Annotated[
        Rule | None, typer.Option(help="Rank existing scores by this rule.", show_default=False)
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="A share such as 1/4, or a number of layers.", show_default=False)
    ] = None,
    cap: Annotated[
        float | None,
        typer.Option(help="Largest score of halo; the published code takes 50.", show_default=False),
    ] = None,
    floor: Annotated[
        str | None,
        typer.Option(
            help="Least loss of knowledge that halo divides by: a number, or standard_error.",
            show_default=False,
        ),
    ] = None,
    spread: Annotated[
        bool | None,
        typer.Option(
            "--spread/--no-spread", help="Keep the best layer of each even block.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="SRC", help="Text in place of the recipe's.", show_default=False)
    ] = None,
    set_: SetOption = None,
    device: DeviceOption = None,
) -> None:
    """Rank the layers by what their replacement costs, and say which keep softmax."""
    import hybridize

    with continued():
        selection = hybridize.select(
            source,
            recipe,
            out,
            rule=rule.value if rule else None,
            keep=keep,
            cap=cap,
            floor=_number(floor),
            spread=spread,
            data=data,
            overrides=set_ or [],
            device=device,
        )
    hybridize.print_selection(selection)


def _number(text: str | None) -> float | str | None:
    """A number where the text is one."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
