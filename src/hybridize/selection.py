"""`select` as a function: which layers of a hybrid keep softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridize import json_lines
from hybridize.atomic import atomic_write
from hybridize.select import Selection, choose, load_scores
from hybridize.select.rules import SCORED

JSON, PLOT = "selection.json", "selection.svg"


def select(
    source: str | Path,
    recipe: Any = None,
    out: str | Path | None = None,
    *,
    rule: str | None = None,
    keep: str | int | None = None,
    cap: float | None = None,
    floor: float | str | None = None,
    spread: bool | None = None,
    data: str | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Selection:
    """Rank the layers of a model and say which keep softmax (HALO, arXiv 2601.22156, section 4.3; DESIGN D13).

    With a `recipe`, `source` is a MODEL and `out` the run folder: the recipe runs up to and including its `select` step
    (`convert` with the same arguments goes on from there). Without one, `source` is a run whose layers were scored, or a
    file of single-layer scores: they are ranked anew by `rule`, nothing is measured.

    Args:
        rule, keep, cap, floor, spread: for a ranking anew (see `hybridize.select.choose`); by default what the scores were
            ranked by or the run's recipe asks, else halo, 1/4, no cap, no floor and the best anywhere.
        out: the run folder; for a ranking anew a folder for selection.json and selection.svg.
        data, overrides, device: see `convert`.

    Raises:
        ValueError: naming the argument; also scores that a rule refuses (a recall that hardly varies over the layers).
    """
    if recipe is None:
        for name, value in (("data", data), ("overrides (--set)", overrides), ("device", device)):
            if value:
                raise ValueError(f"{name} goes with a recipe, and no recipe is given")
        return _again(Path(source), out, rule, keep, cap, floor, spread)
    if any(value is not None for value in (rule, keep, cap, floor, spread)):
        raise ValueError(
            "rule, keep, cap, floor and spread rank existing scores; with a recipe set them there: --set select.rule=jet"
        )
    if out is None:
        raise ValueError("out is missing; it names the run folder")
    return _run(source, recipe, Path(out), data, overrides, device, progress)


def print_selection(selection: Selection) -> None:
    """The table of layers, on the terminal."""
    from hybridize.report.selection_plot import selection_table

    print(selection_table(selection.to_dict()))


def _run(
    model: str | Path,
    recipe: Any,
    out: Path,
    data: str | None,
    overrides: Mapping[str, Any] | Sequence[str] | None,
    device: str | None,
    progress: bool,
) -> Selection:
    from hybridize.api import convert

    convert(
        str(model),
        recipe,
        out,
        data=data,
        overrides=overrides,
        device=device,
        stop_after="select",
        progress=progress,
    )
    folder = _folder(out)
    selection = _read(folder / JSON)
    _draw(selection, folder)
    return selection


def _again(
    source: Path,
    out: str | Path | None,
    rule: str | None,
    keep: str | int | None,
    cap: float | None,
    floor: float | str | None,
    spread: bool | None,
) -> Selection:
    of_a_run = (source / "run.json").is_file() or not (source.is_file() or (source / JSON).is_file())
    folder = _folder(source) if of_a_run else source
    path = folder / JSON if (folder / JSON).is_file() else folder
    scores = load_scores(path)
    before = _stored(path) or (_asked(source, folder) if of_a_run else {})
    chosen = rule or before.get("rule") or "halo"
    if chosen == "given":
        raise ValueError(
            f"{path} holds the layers that its recipe names, by no rule; give one: uniform or tail"
        )
    if chosen == before.get("rule"):
        cap = before.get("cap") if cap is None else cap
        floor = before.get("floor") if floor is None else floor
        spread = before.get("spread") if spread is None else spread
    if keep is None:
        keep = before.get("keep", "1/4")
    spread = False if spread is None else spread
    selection = choose(chosen, len(scores.layers), keep, scores=scores, cap=cap, floor=floor, spread=spread)
    if out is not None:
        write_selection(selection, out)
    return selection


def _asked(run: Path, folder: Path) -> dict[str, Any]:
    """What the recipe of a run asks of its selection, which has not chosen yet."""
    from hybridize.recipe import load_recipe

    step: Any = load_recipe(run / "recipe.yaml").steps[int(folder.name.partition("-")[0])]
    return {name: getattr(step, name) for name in ("rule", "keep", "cap", "floor", "spread")}


def write_selection(selection: Selection, folder: str | Path) -> None:
    """`selection.json` and, where something was measured, its plot by layer, `selection.svg`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out is {str(folder)!r}, which is no folder; name one")
    if any((part / "run.json").exists() for part in (folder, *folder.resolve().parents)):
        raise ValueError(
            f"out is {str(folder)!r}, in a run, whose selection says what its model keeps; name a folder outside"
        )
    folder.mkdir(parents=True, exist_ok=True)
    selection.save(folder / JSON)
    _draw(selection, folder)


def _draw(selection: Selection, folder: Path) -> None:
    from hybridize.report.selection_plot import selection_plot

    plot = selection_plot(selection.to_dict())
    if plot:
        with atomic_write(folder / PLOT, "w") as file:
            file.write(plot)


def _folder(run: Path) -> Path:
    """The folder of a run's `select` step."""
    if not run.exists():
        raise ValueError(f"{str(run)!r} is no run and no file of scores: there is nothing of that name")
    folders = sorted(run.glob("steps/*-select"))
    if not folders:
        raise ValueError(
            f"{str(run)!r} holds no selection; run its recipe up to there: hybridize select MODEL -r RECIPE -o {run}"
        )
    return folders[-1]


def _stored(path: Path) -> dict[str, Any]:
    """A selection's JSON; nothing for the scores of a sweep, and where there is no such file."""
    whole = json_lines.parse(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    return whole if whole is not None and "by_layer" in whole else {}


def _read(path: Path) -> Selection:
    """The selection of a run that has just been found whole."""
    whole = _stored(path)
    scored = whole["rule"] in SCORED
    return choose(
        whole["rule"],
        whole["layers"],
        whole["keep"],
        scores=load_scores(path) if scored else None,
        given=whole["given"],
        cap=whole["cap"],
        floor=whole.get("floor"),  # not in files of earlier versions, as `spread`
        spread=whole.get("spread", False),
    )
