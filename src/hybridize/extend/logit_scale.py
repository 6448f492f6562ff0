"""A factor on q of full softmax attention, chosen after training: an edit of the spec, and the search of its base.

Without positions the softmax of a query at position t flattens as its keys grow in number. HyPE (arXiv 2601.22156)
sharpens it by s_t = ln(t + a) / ln a and takes the a that reads long documents best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from hybridize.data import DataSpec, build_rows
from hybridize.data.batching import ordered_batches
from hybridize.data.corpora import Progress as Say
from hybridize.evals.aggregate import paired_difference
from hybridize.evals.generation import Progress
from hybridize.evals.perplexity import PerplexityResult, perplexity
from hybridize.problems import nearest
from hybridize.spec import GroupSpec, HybridSpec, LayerSpec, LogitScale, LogPosition, ResolvedSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spec = TypeVar("Spec", HybridSpec, ResolvedSpec)

BASES = (100.0, 200.0, 300.0, 500.0, 900.0, 1500.0)
_NUMBERS = {
    "log_position": ("base",),
    "log_length": ("length",),
    "log_declared": ("length", "declared"),
    "constant": ("value",),
}
_TOKENS_AT_ONCE = 8192
_SCALE: TypeAdapter[LogitScale] = TypeAdapter(LogitScale)


def parse_logit_scale(text: str) -> tuple[LogitScale | None, bool]:
    """The scale that a text names (None: no scale), and whether groups with positions have it too.

    Texts are `none`, `log_position:BASE`, `log_length:LENGTH`, `log_declared:LENGTH:DECLARED` and `constant:VALUE`, with
    `+always` (in training too) and `+everywhere` (groups with positions too) behind them; `none` means every group.

    Raises ValueError for anything else.
    """
    head, *options = text.split("+")
    if unknown := [option for option in options if option not in ("always", "everywhere")]:
        raise ValueError(f"logit_scale has the option {unknown[0]!r}; allowed are +always and +everywhere")
    kind, *numbers = head.split(":")
    if text == "none":
        return None, True
    if kind not in _NUMBERS:
        raise ValueError(f"logit_scale is {text!r}; {nearest(kind, [*_NUMBERS, 'none'])}")
    names = _NUMBERS[kind]
    if len(numbers) != len(names):
        raise ValueError(f"logit_scale is {text!r}; write {':'.join([kind, *map(str.upper, names)])}")
    values = dict(zip(names, numbers, strict=True))
    when = "always" if "always" in options else "inference"
    try:
        scale = _SCALE.validate_python({"kind": kind, "when": when, **values})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"logit_scale is {text!r}; {first['loc'][-1]}: {first['msg']}") from error
    if not all(math.isfinite(float(number)) for number in numbers):
        raise ValueError(f"logit_scale is {text!r}; its numbers must be finite")
    return scale, "everywhere" in options


def parse_bases(bases: str | Sequence[float]) -> tuple[list[float], bool]:
    """Bases of `log_position`, as numbers or as `100,300,500` with `+everywhere` behind it (see `parse_logit_scale`).

    Raises ValueError for anything else, and for bases of 1 or less.
    """
    everywhere = False
    if isinstance(bases, str):
        head, plus, option = bases.partition("+")
        if plus and option != "everywhere":
            raise ValueError(f"bases has the option {option!r}; allowed is +everywhere")
        everywhere = bool(plus)
        try:
            bases = [float(part) for part in head.split(",")]
        except ValueError:
            raise ValueError(f"bases is {head!r}; write numbers above 1 such as 100,300,500") from None
    if not all(math.isfinite(base) and base > 1 for base in bases):
        raise ValueError(f"bases is {list(bases)}; each must be above 1")
    return list(dict.fromkeys(map(float, bases))), everywhere


def with_logit_scale(spec: Spec, scale: LogitScale | None, everywhere: bool = False) -> Spec:
    """The spec with `scale` (None: without one) in every group of full softmax attention without positions.

    `everywhere`: in those with positions too, whose distances a model has learnt without a scale. Raises ValueError where
    no group can have the scale.
    """

    def fits(group: GroupSpec) -> bool:
        full = group.attention == "softmax" and group.window is None
        return full and (everywhere or group.position == "none")

    def layer(before: LayerSpec) -> LayerSpec:
        return LayerSpec(
            groups=tuple(
                group.model_copy(update={"logit_scale": scale}) if fits(group) else group
                for group in before.groups
            )
        )

    if scale is not None and not any(fits(group) for one in _layers(spec) for group in one.groups):
        missing = "" if everywhere else " without positions; +everywhere takes that with positions too"
        raise ValueError(f"logit_scale: the spec has no full softmax attention{missing}")
    if isinstance(spec, ResolvedSpec):
        return spec.model_copy(update={"layers": tuple(layer(one) for one in spec.layers)})
    changes = {
        "all": layer(spec.all),
        "layers": {name: layer(one) for name, one in spec.layers.items()},
        "kept": layer(spec.kept) if spec.kept is not None else None,
    }
    return spec.model_copy(update=changes)


def search_base(
    model: Any,
    rows: Tensor | Iterable[Any],
    bases: Sequence[float] = BASES,
    *,
    everywhere: bool = False,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the held-out loss of a hybrid under `log_position` with each base and without any scale, on the same rows.

    Nothing is loaded again, and the model computes its own spec afterwards. Every position of a row counts: give long rows.

    Args:
        rows: batches, or token ids, as `perplexity` takes them.
        bases: each above 1. everywhere: see `with_logit_scale`.
        on_progress: called with rows done and to do, over all bases.

    Returns:
        `best`, the base of the lowest loss, None where that is the one without a scale; `curve`, the one without first:
        `base, loss, standard_error` (nats a token; the error over rows) and `change, low, high`, the change of the loss
        against no scale, paired row by row, with its 95% interval (None where there is a single row).

    Raises:
        ValueError: no hybrid, a base that is 1 or less, nothing that takes a scale, or no rows.
    """
    if not hasattr(model, "respec"):
        raise ValueError(
            f"model is a {type(model).__name__}; only a hybrid's softmax attention takes a logit scale"
        )
    bases, _ = parse_bases(bases)
    if not bases:
        raise ValueError("bases is empty; give at least one number above 1")
    if not isinstance(rows, Tensor):
        rows = list(rows)
    count = sum(len(row.input_ids_BT) if hasattr(row, "input_ids_BT") else 1 for row in rows)
    own: ResolvedSpec = model.spec
    arms: list[float | None] = [None, *bases]
    edits = [
        with_logit_scale(own, None, True)
        if a is None
        else with_logit_scale(own, LogPosition(base=a), everywhere)
        for a in arms
    ]
    results: list[PerplexityResult] = []
    try:
        for spec in edits:
            model.respec(spec)
            before, to_do = len(results) * count, len(arms) * count
            results.append(
                perplexity(model, rows, batch_size=1, on_progress=_after(on_progress, before, to_do))
            )
    finally:
        model.respec(own)
    curve = [_point(arm, result, results[0]) for arm, result in zip(arms, results, strict=True)]
    return {"curve": curve, "best": min(curve, key=lambda point: point["loss"])["base"]}


def search_on_text(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    bases: Sequence[float],
    everywhere: bool,
    text: str,
    length: int,
    rows: int,
    say: Say,
) -> dict[str, Any]:
    """`search_base` on the validation split of a text, its documents joined to at most `rows` rows of `length` tokens.

    Not the test split: what was chosen on a text must not be measured on it.

    Returns:
        what was read (`text, length, rows`), `curve`, and `best` as `parse_logit_scale` reads it.

    Raises:
        ValueError: as `build_rows` and `search_base`.
    """
    spec = DataSpec(source=text, length=length, documents="joined")
    tokens = rows * length
    packed = build_rows(spec, tokenizer, "validation", tokens, progress=say)
    batches = list(ordered_batches(packed, max(1, _TOKENS_AT_ONCE // length), tokens))
    found = search_base(model, batches, bases, everywhere=everywhere, on_progress=partial(say, "searching"))
    best = "none" if found["best"] is None else f"log_position:{found['best']:.17g}"
    if everywhere and found["best"] is not None:
        best += "+everywhere"
    read = sum(len(batch.input_ids_BT) for batch in batches)
    return {"text": text, "length": length, "rows": read, "curve": found["curve"], "best": best}


def _layers(spec: HybridSpec | ResolvedSpec) -> list[LayerSpec]:
    if isinstance(spec, ResolvedSpec):
        return list(spec.layers)
    kept = [spec.kept] if spec.kept is not None else []
    return [spec.all, *spec.layers.values(), *kept]


def _point(base: float | None, result: PerplexityResult, plain: PerplexityResult) -> dict[str, Any]:
    change, interval = paired_difference(result.row_nll_sums, plain.row_nll_sums, result.row_tokens)
    low, high = interval or (None, None)
    return {
        "base": base,
        "loss": result.nll,
        "standard_error": result.standard_error,
        "change": change,
        "low": low,
        "high": high,
    }


def _after(progress: Progress | None, before: int, to_do: int) -> Progress | None:
    """Progress of one of several passes."""
    return None if progress is None else lambda done, _: progress(before + done, to_do)
