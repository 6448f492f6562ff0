"""`hybridize recipes`: what ships, and how to make it one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The recipes that ship: list, show or copy them.", no_args_is_help=False)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name, or a file.")]


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """The recipes that ship: list, show or copy them."""
    if context.invoked_subcommand is None:
        list_all()


@app.command("list")
def list_all() -> None:
    """Name, source and cost of every recipe."""
    import hybridize
    from hybridize.cli.common import print_table

    rows = [(file.name, file.header.source, file.header.cost) for file in hybridize.list_recipes()]
    print_table("recipes", ("name", "source", "cost"), rows, text=3)


@app.command()
def show(name: NameArgument) -> None:
    """Print a recipe's file, after checking it."""
    import hybridize

    hybridize.load_recipe(name)
    typer.echo(hybridize.recipe_path(name).read_text("utf-8"), nl=False)


@app.command()
def copy(
    name: NameArgument,
    destination: Annotated[Path, typer.Argument(metavar="[DEST]", help="A folder or a new file.")] = Path(
        "."
    ),
) -> None:
    """Copy a recipe, to change it."""
    import hybridize

    typer.echo(f"wrote {hybridize.copy_recipe(name, destination)}")


@app.command()
def schema() -> None:
    """The format as JSON Schema, for editors."""
    import hybridize

    typer.echo(json.dumps(hybridize.recipe_schema(), indent=2))
