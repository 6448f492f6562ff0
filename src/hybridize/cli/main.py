"""`hybridize`: the app, its verbs, and how errors end."""

from __future__ import annotations

import os
import sys

import typer

from hybridize.cli import chat, convert, demo, diagnose, evaluate, extend, generate, plan, recipes, select

app = typer.Typer(
    name="hybridize",
    help="Turn a pretrained Transformer into a hybrid linear-attention model, and see what each part does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.add_typer(recipes.app, name="recipes")
app.command("plan")(plan.plan)
app.command("convert")(convert.convert)
app.command("select")(select.select)
app.command("diagnose")(diagnose.diagnose)
app.command("extend")(extend.extend)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)

BAD_INPUT, FAILED = 2, 1


def run() -> None:
    """The console script: known errors become red lines on stderr, without a traceback.

    Exit codes: 2 for wrong input (`ValueError`, `OSError` such as a missing file or a full disk), 1 for a run that failed
    (`RuntimeError` such as a non-finite loss or a damaged checkpoint). HYBRIDIZE_DEBUG=1 shows tracebacks.
    """
    try:
        app()
    except (ValueError, OSError) as error:
        _end(error, BAD_INPUT)
    except RuntimeError as error:
        _end(error, FAILED)


def _end(error: Exception, code: int) -> None:
    if os.environ.get("HYBRIDIZE_DEBUG") == "1":
        raise error
    for line in _lines(error):
        _say(line)
    sys.exit(code)


def _lines(error: Exception) -> list[str]:
    """One line a problem: an error with `problems` (a recipe's) holds several."""
    problems = getattr(error, "problems", None)
    if problems:
        return [f"{getattr(error, 'source', 'recipe')}: {problem}" for problem in problems]
    text = " ".join(str(error).split())
    return [text or type(error).__name__]


def _say(line: str) -> None:
    typer.secho(f"error: {line}", fg="red", err=True)


if __name__ == "__main__":
    run()
