"""`hybridize extend`: a hybrid computes something else, with the same weights and without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridize.cli.common import (
    DeviceOption,
    LogitScaleOption,
    MixOption,
    RunArgument,
    WindowOption,
    print_table,
)


def extend(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="New checkpoint folder.")],
    window: WindowOption = None,
    mix: MixOption = None,
    logit_scale: LogitScaleOption = None,
    search_base: Annotated[
        str | None,
        typer.Option(
            metavar="BASES",
            help="Find the base of log_position: comma-separated, 100,300,500; the one with the lowest held-out loss is "
            "kept. +everywhere behind them: on attention with positions too.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str,
        typer.Option(
            help="Of the search: docstrings, package_code, recall, code, essays, or a file or folder."
        ),
    ] = "docstrings",
    length: Annotated[int, typer.Option(min=2, help="Of the search: tokens a row.")] = 8192,
    rows: Annotated[int, typer.Option(min=1, help="Of the search: rows, at most.")] = 16,
    device: DeviceOption = None,
) -> None:
    """Give linear attention a softmax window ("inference-time hybrid"), or full softmax attention a logit scale."""
    import hybridize

    hybridize.extend(
        run,
        out,
        window=window,
        mix=mix,
        logit_scale=logit_scale,
        search_bases=() if search_base is None else search_base,
        text=text,
        length=length,
        rows=rows,
        device=device,
    )
    if search_base is not None:
        _print_search(json.loads((out / "extend.json").read_text("utf-8"))["search"])
    typer.echo(f"written: {out}")
    typer.echo(f"next: hybridize diagnose {out}    hybridize eval {out}")


def _print_search(search: dict[str, Any]) -> None:
    """The loss by base, and which one was kept."""
    columns = ("base", "loss", "standard_error", "change", "low", "high")
    table = [
        ["no scale" if point["base"] is None else point["base"], *(point[name] for name in columns[1:])]
        for point in search["curve"]
    ]
    title = f"loss in nats on {search['rows']} rows of {search['length']:,} tokens of {search['text']}"
    print_table(title, columns, table)
    typer.echo(f"kept: {search['best']}")
    bases = [point["base"] for point in search["curve"] if point["base"] is not None]
    best = min(search["curve"], key=lambda point: point["loss"])["base"]
    if len(bases) > 1 and best in (min(bases), max(bases)):
        typer.echo(
            f"{best:g} is the {'smallest' if best == min(bases) else 'largest'} base tried; try beyond it"
        )
