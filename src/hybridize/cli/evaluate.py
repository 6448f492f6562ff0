"""`hybridize eval`: perplexity by position and passkey retrieval, with parts of the model left out on request."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridize.cli.common import (
    DeviceOption,
    DtypeOption,
    IncludePathOption,
    LimitOption,
    MixOption,
    RunArgument,
    Scope,
    WindowOption,
    parse_lengths,
    print_table,
    split_list,
    write_json,
)


class Mode(StrEnum):
    hybrid = "hybrid"
    softmax_only = "softmax_only"
    far_only = "far_only"
    linear_only = "linear_only"
    sinks_only = "sinks_only"
    none = "none"


class Removal(StrEnum):
    zero = "zero"
    renormalize = "renormalize"


def evaluate(
    run: RunArgument,
    mode: Annotated[Mode, typer.Option(help="Which parts of the attention take part.")] = Mode.hybrid,
    removal: Annotated[
        Removal,
        typer.Option(
            help="zero: a removed part leaves the denominator as it is; renormalize: it leaves that too."
        ),
    ] = Removal.zero,
    scope: Annotated[
        Scope,
        typer.Option(
            help="mixed: only layers with both branches change; all: whole softmax or linear layers too."
        ),
    ] = Scope.mixed,
    texts: Annotated[
        str,
        typer.Option(help="Comma-separated held-out texts: docstrings, code, essays, or a file or folder."),
    ] = "docstrings,code",
    tasks: Annotated[
        str,
        typer.Option(
            help="Comma-separated: perplexity, passkey, offline; suites (imbalance, lolcats) and tasks of lm-eval."
        ),
    ] = "perplexity,passkey",
    include_path: IncludePathOption = None,
    limit: LimitOption = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="lm-eval: examples before each question.", show_default=False)
    ] = None,
    lengths: Annotated[str, typer.Option(help="Comma-separated context lengths of the tasks.")] = "512,1024",
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Rows (perplexity) or prompts a length (passkey).", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results as JSON ('-': print them)."),
    ] = None,
    window: WindowOption = None,
    mix: MixOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Perplexity by position on held-out text and 5-digit passkeys, for a run or its teacher."""
    import hybridize

    result = hybridize.evaluate(
        run,
        tasks=split_list(tasks),
        mode=mode.value,
        removal=removal.value,
        scope=scope.value,
        texts=split_list(texts),
        lengths=parse_lengths(lengths),
        samples=samples,
        include_path=include_path,
        limit=limit,
        shots=shots,
        window=window,
        mix=mix,
        device=device,
        dtype=dtype.value if dtype else None,
    )
    plain = result.to_dict()
    brief = {**plain, "lm_eval": _brief(plain["lm_eval"])} if "lm_eval" in plain else plain
    title = f"{run}, {mode.value}" + (f" ({removal.value})" if mode is not Mode.hybrid else "")
    if json_file is not None:
        write_json(plain, json_file)
    if str(json_file) != "-":
        print_result(brief, title=title)


def _brief(result: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's outcome without the scores of single samples."""
    keep = ("name", "metric", "shots", "score", "samples")
    rows = [
        {
            **{key: task[key] for key in keep},
            **dict(zip(("low", "high"), task["interval"] or (None, None), strict=True)),
        }
        for task in result["tasks"]
    ]
    return {"average": result["average"], "lm_eval": result["lm_eval"], "tasks": rows}


def print_result(result: Mapping[str, Any], title: str) -> None:
    """Plain values as one table; every list of mappings and every mapping as a table of its own."""
    values = [
        (name, value) for name, value in result.items() if not isinstance(value, Mapping | list | tuple)
    ]
    if values:
        print_table(title, ("", "value"), values)
    for name, value in result.items():
        if isinstance(value, Mapping):
            print_result(value, title=f"{title}: {name}")
        elif isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
            columns = [key for key, cell in value[0].items() if not isinstance(cell, Mapping | list | tuple)]
            print_table(
                f"{title}: {name}", columns, [[row.get(column) for column in columns] for row in value]
            )
