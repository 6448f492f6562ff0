"""`hybridize eval`: perplexity by position, passkeys, tasks and RULER, with parts of the model left out on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridize.cli.common import (
    DeviceOption,
    DtypeOption,
    IncludePathOption,
    LimitOption,
    LogitScaleOption,
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


class Scorer(StrEnum):
    nvidia = "nvidia"
    lm_eval = "lm-eval"


class LengthTrick(StrEnum):
    none = "none"
    yarn = "yarn"
    dynamic_ntk = "dynamic_ntk"


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
        typer.Option(
            help="Comma-separated held-out texts: docstrings, package_code, recall, code, essays, or a file or folder."
        ),
    ] = "docstrings,code",
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: perplexity, passkey, offline; suites (imbalance, lolcats) and tasks of lm-eval. "
            "By default perplexity,passkey, or none of these with --ruler.",
            show_default=False,
        ),
    ] = None,
    include_path: IncludePathOption = None,
    limit: LimitOption = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="lm-eval: examples before each question.", show_default=False)
    ] = None,
    lengths: Annotated[str, typer.Option(help="Comma-separated context lengths of the tasks.")] = "512,1024",
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows (perplexity), prompts a length (passkey, RULER), questions (offline).",
            show_default=False,
        ),
    ] = None,
    ruler: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS",
            help="Comma-separated RULER tasks: niah (single needles 1 to 3), niah_multikey_1 to _3, niah_multivalue, "
            "niah_multiquery, vt; ruler: all.",
            show_default=False,
        ),
    ] = None,
    ruler_scorer: Annotated[
        Scorer, typer.Option(help="RULER: round scores as its authors do, or not at all as lm-eval.")
    ] = Scorer.nvidia,
    essays: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="RULER: file or folder of essays to hide needles in; without it, local prose.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="RULER: ask in the chat template.")] = False,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="RULER: tokens of one batch of prompts (16,384 by default); more is faster where memory allows.",
            show_default=False,
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="RULER: keep answers here and go on from them; by default RUN/ruler for hybrids, nowhere for teachers.",
            show_default=False,
        ),
    ] = None,
    length_trick: Annotated[
        LengthTrick,
        typer.Option(help="Stretch a teacher's (or a control's) positions to the longest of --lengths."),
    ] = LengthTrick.none,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results as JSON ('-': print them)."),
    ] = None,
    window: WindowOption = None,
    mix: MixOption = None,
    logit_scale: LogitScaleOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Perplexity by position on held-out text, 5-digit passkeys, tasks and RULER, for a run or its teacher."""
    import hybridize

    for name, value in (("--tasks", tasks), ("--ruler", ruler), ("--texts", texts)):
        if value is not None and not split_list(value):
            raise ValueError(f"{name} is {value!r}; name at least one, or leave it out")
    result = hybridize.evaluate(
        run,
        tasks=split_list(tasks) if tasks is not None else None,
        mode=mode.value,
        removal=removal.value,
        scope=scope.value,
        texts=split_list(texts),
        lengths=parse_lengths(lengths),
        samples=samples,
        include_path=include_path,
        limit=limit,
        shots=shots,
        ruler=split_list(ruler) if ruler is not None else (),
        ruler_scorer=ruler_scorer.value,
        essays=essays,
        chat=chat,
        batch_tokens=batch_tokens,
        records=records,
        length_trick=length_trick.value,
        window=window,
        mix=mix,
        logit_scale=logit_scale,
        device=device,
        dtype=dtype.value if dtype else None,
    )
    plain = result.to_dict()
    brief = {name: value for name, value in plain.items() if name != "ruler"}
    if "lm_eval" in plain:
        brief["lm_eval"] = _brief(plain["lm_eval"])
    title = f"{run}, {mode.value}" + (f" ({removal.value})" if mode is not Mode.hybrid else "")
    if json_file is not None:
        write_json(plain, json_file)
    if str(json_file) != "-":
        print_result(brief, title=title)
        if "ruler" in plain:
            print_ruler(plain["ruler"], title=title)


def print_ruler(ruler: Mapping[str, Any], title: str) -> None:
    """Task by length: scores in per cent with their 95% intervals, and what they rest on."""
    means = [{"task": "niah, mean of single 1-3", **mean} for mean in ruler["niah"]]
    cells = {(row["task"], row["length"]): _score(row) for row in [*ruler["results"], *means]}
    lengths = list(dict.fromkeys(length for _, length in cells))
    rows: list[Sequence[Any]] = [
        [task, *(cells.get((task, length)) for length in lengths)]
        for task in dict.fromkeys(task for task, _ in cells)
    ]
    print_table(f"{title}: RULER, per cent", ("task", *(f"{length:,}" for length in lengths)), rows)
    settings = ruler["settings"]
    words = [f"{settings['samples']} samples a task and length", f"scored as {settings['scorer']}"]
    if ruler["haystack"] is not None:
        words.append(f"needles in {ruler['haystack']}")
    if settings["chat"]:
        words.append("chat template")
    if ruler["records"] is not None:
        words.append(f"answers in {ruler['records']}")
    typer.echo("; ".join(words))


def _score(row: Mapping[str, Any]) -> str:
    return f"{row['score']:.4g} [{row['low']:.3g}, {row['high']:.3g}]"


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
