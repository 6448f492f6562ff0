"""`hybridize diagnose`: does the linear branch do anything, and where."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hybridize.cli.common import (
    DeviceOption,
    DtypeOption,
    IncludePathOption,
    LimitOption,
    LogitScaleOption,
    MixOption,
    Scope,
    WindowOption,
    parse_lengths,
    split_list,
)


class Label(StrEnum):
    balanced = "balanced"
    weak = "weak"
    bypassed = "bypassed"
    inconclusive = "inconclusive"


FAILED = 3


def diagnose(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Run folders, checkpoint folders or models; several side by side."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="For report.json and report.html; by default RUN/diagnosis."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One text, few rows, no passkeys and tasks: under a minute on a small model."
        ),
    ] = False,
    texts: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated held-out texts; by default the run's own and code.", show_default=False
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=2, help="Rows of each text.", show_default=False)] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a row.", show_default=False)] = None,
    passkey: Annotated[
        str | None, typer.Option(help="Comma-separated prompt lengths; 0: none.", show_default=False)
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=0, help="Samples a task; 0: none.", show_default=False)
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=0, help="Rows for the scan head by head; 0: none.", show_default=False)
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated suites (imbalance, lolcats) or tasks of lm-eval.", show_default=False
        ),
    ] = None,
    include_path: IncludePathOption = None,
    limit: LimitOption = None,
    scope: Annotated[
        Scope, typer.Option(help="mixed: remove branches in layers that have both; all: whole layers too.")
    ] = Scope.mixed,
    window: WindowOption = None,
    mix: MixOption = None,
    logit_scale: LogitScaleOption = None,
    fail_on: Annotated[
        list[Label] | None,
        typer.Option(
            help=f"Exit with {FAILED} where a run has this verdict. Repeatable.", show_default=False
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Ablations, layers, distances and controls of a hybrid on held-out text; a verdict; report.json and report.html."""
    import hybridize

    lengths = None if passkey is None else [] if passkey.strip() == "0" else parse_lengths(passkey)
    diagnosis = hybridize.diagnose(
        runs,
        out,
        quick=quick,
        texts=split_list(texts) if texts is not None else None,
        rows=rows,
        length=length,
        passkey=lengths,
        tasks=tasks,
        heads=heads,
        harness=split_list(lm_eval) if lm_eval else (),
        include_path=include_path,
        limit=limit,
        scope=scope.value,
        window=window,
        mix=mix,
        logit_scale=logit_scale,
        device=device,
        dtype=dtype.value if dtype else None,
    )
    hybridize.print_diagnosis(diagnosis)
    found = {run.verdict.linear for run in diagnosis.runs}
    if found & {label.value for label in fail_on or []}:
        raise typer.Exit(FAILED)
