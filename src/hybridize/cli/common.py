"""Arguments that several verbs share, and plain tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Scope(StrEnum):
    mixed = "mixed"
    all = "all"


RecipeOption = Annotated[
    str,
    typer.Option(
        "--recipe", "-r", help="A recipe file, or the name of one that ships (see `hybridize recipes`)."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a value of the recipe: --set transfer.tokens=1M. Repeatable.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N; by default the GPU where there is one.", show_default=False),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Numbers that the weights are held in; by default the checkpoint's.", show_default=False
    ),
]
IncludePathOption = Annotated[
    Path | None, typer.Option(help="Folder of local lm-eval task files.", show_default=False)
]
LimitOption = Annotated[
    float | None, typer.Option(help="lm-eval: only the first samples of each task.", show_default=False)
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND:SIZE",
        help="Give linear attention this softmax window, without training: sliding:64, terraced:32; +sinks:4, +overlap.",
        show_default=False,
    ),
]
MixOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Weight of the window's output; by default 0.5, or as it was where layers mix already.",
        show_default=False,
    ),
]
LogitScaleOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND:NUMBER",
        help="Factor on the queries of full softmax attention without positions: log_position:500, log_length:4096, "
        "log_declared:4096:65536, constant:1.2, none; +everywhere: with positions too; +always: in training too.",
        show_default=False,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_MODEL", help="A run folder, or a teacher: hub id, folder, GGUF file or alias."
    ),
]


@contextmanager
def continued() -> Iterator[None]:
    """Say on Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command continues from what is saved", err=True)
        raise


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], text: int = 1) -> None:
    """A table whose first `text` columns are text and whose others are numbers."""
    from rich.console import Console
    from rich.table import Table

    table: Table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    # A pipe has no width of its own; wide enough for every table of ours.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def write_json(data: Any, path: Path) -> None:
    """Write `data` to `path`; `-` is the standard output."""
    text = json.dumps(data, indent=2)
    if str(path) == "-":
        typer.echo(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def human_bytes(count: float) -> str:
    """`count` in B, KiB, MiB, ... with three digits that matter."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    index = 0
    while count >= 1024 and index < len(units) - 1:
        count, index = count / 1024, index + 1
    return (
        f"{count:.0f} B"
        if index == 0
        else f"{count:.3g} {units[index]}"
        if count < 1000
        else f"{count:.0f} {units[index]}"
    )


def human_count(count: float | None) -> str:
    """`count` as 16.8M, 8.03B, ..."""
    if count is None:
        return "-"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"


def split_list(text: str) -> list[str]:
    """`a,b, c` as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_lengths(text: str) -> list[int]:
    """`512,1024` as numbers."""
    parts = split_list(text)
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths is {text!r}; write positive numbers of tokens such as 512,1024")
    return [int(part) for part in parts]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
