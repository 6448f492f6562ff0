"""Which layers keep softmax, from numbers alone. Layers count from 0; ties go to the lower layer.

halo     (max_j R_j - R_i) / (max_j C_j - C_i + 1e-6): what a layer's replacement costs in recall, against what it costs
         in knowledge (arXiv 2601.22156, Eq. 8), which a `floor` can bound below. R and C are the scores of the L models with
         one layer replaced.
jet      R_teacher - R_i: the drop of recall alone.
kl       the loss of an all-linear student after a short distillation with softmax in layer i alone; lowest first.
uniform  layers ⌊(j+1) L / k⌋ - 1, j = 0 .. k-1: the last of each of k even blocks.
tail     the same over the second half, which holds the last ⌈L/2⌉ layers.
given    what the caller names.

`spread` (halo, jet, kl; not in the papers) keeps the best layer of each of the k even blocks of `uniform` in place of the k
best anywhere: scores of one replaced layer cannot see that neighbours stand in for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Real
from typing import Any

EPSILON = 1e-6
STANDARD_ERROR = "standard_error"
"""The floor that is each layer's own error of C."""
SCORED = ("halo", "jet", "kl")
RULES = (*SCORED, "uniform", "tail", "given")

Keep = str | int | float | Fraction


@dataclass(frozen=True)
class Ranking:
    """`order`: layers, the most worth keeping first (all, or those that the rule names). `scores`: one a layer, larger is
    kept first; empty for rules that measure nothing. `kept`: ascending, the first of `order` or, spread, the first of each block."""

    order: tuple[int, ...]
    scores: tuple[float, ...]
    kept: tuple[int, ...]


def is_share(value: Any) -> bool:
    """Whether a value is a number in [0, 1]; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1


def count_kept(layers: int, keep: Keep) -> int:
    """How many of `layers` are kept: a count (`7`), or a share (`"1/4"`, `0.25`), rounded down, one at least.

    Raises ValueError for what is neither, a share outside (0, 1], and a count outside 1..layers.
    """
    if layers < 1:
        raise ValueError(f"layers is {layers}; it must be at least 1")
    number = _number(keep)
    if isinstance(number, Fraction):
        if not 0 < number <= 1:
            raise ValueError(f"keep is {keep!r}; a share must lie in (0, 1]")
        return max(1, math.floor(layers * number))
    if not 1 <= number <= layers:
        raise ValueError(f"keep is {keep!r}; a number of layers must lie in 1..{layers}")
    return number


def halo(
    recall: Sequence[float],
    knowledge: Sequence[float],
    *,
    keep: Keep = "1/4",
    cap: float | None = None,
    floor: float | Sequence[float] = 0.0,
    spread: bool = False,
    recall_se: float | Sequence[float | None] | None = None,
) -> Ranking:
    """Rank by recall lost over knowledge lost.

    The best layers for knowledge have a denominator of 1e-6, so that a small drop of recall ranks them first. `cap` bounds
    all scores (the published code takes 50), and ties among those that reach it go to the lower layer. `floor` is what a layer
    loses of knowledge at least: where C differs by less than its probe can tell, chance decides who stands at the top
    (not in the paper).

    Args:
        recall, knowledge: R and C in [0, 1], one a layer.
        floor: one for all layers or one a layer, such as the standard errors of C.
        recall_se: standard errors of R, one a layer (None where it is unknown) or one for all.

    Raises:
        ValueError: numbers outside [0, 1] or of different length; a cap that is not positive, a floor outside [0, 1]; R that hardly
            varies: its largest and smallest value are equal or less than three times the largest known standard error apart.
    """
    _check_scores("recall", recall)
    _check_scores("knowledge", knowledge)
    if len(knowledge) != len(recall):
        raise ValueError(
            f"knowledge has {len(knowledge)} values and recall {len(recall)}; each needs one a layer"
        )
    if cap is not None and not (isinstance(cap, int | float) and 0 < cap < math.inf):
        raise ValueError(
            f"cap is {cap}; it must be positive (the published code takes 50), or None for no cap"
        )
    floors = list(floor) if isinstance(floor, Sequence) else [floor] * len(recall)
    if len(floors) != len(recall) or not all(map(is_share, floors)):
        raise ValueError(f"floor is {floor}; it needs numbers in [0, 1], one for all layers or one a layer")
    _check_spread(recall, recall_se)
    best_recall, best_knowledge = max(recall), max(knowledge)
    scores = [
        (best_recall - r) / (max(best_knowledge - c, least) + EPSILON)
        for r, c, least in zip(recall, knowledge, floors, strict=True)
    ]
    if cap is not None:
        scores = [min(score, cap) for score in scores]
    return _rank(scores, keep, spread)


def jet(
    recall: Sequence[float],
    teacher_recall: float,
    *,
    keep: Keep = "1/4",
    spread: bool = False,
    recall_se: float | Sequence[float | None] | None = None,
) -> Ranking:
    """Rank by the drop of recall against the teacher, all in [0, 1]. Raises ValueError as `halo` does."""
    _check_scores("recall", recall)
    _check_scores("teacher_recall", [teacher_recall])
    _check_spread(recall, recall_se)
    return _rank([teacher_recall - value for value in recall], keep, spread)


def kl(losses: Sequence[float], *, keep: Keep = "1/4", spread: bool = False) -> Ranking:
    """Rank by the loss with softmax in that layer alone, lowest first; scores are the losses with their sign turned."""
    if len(losses) == 0 or not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"losses is {list(losses)}; it needs one finite number a layer")
    return _rank([-loss for loss in losses], keep, spread)


def uniform(layers: int, keep: Keep = "1/4") -> Ranking:
    """Layers ⌊(j+1) L / k⌋ - 1: for 28 layers and 7 kept, 3, 7, ..., 27."""
    kept = _ends(layers, count_kept(layers, keep))
    return Ranking(kept, (), kept)


def tail(layers: int, keep: Keep = "1/4") -> Ranking:
    """As `uniform`, over the last ⌈L/2⌉ layers: for 28 layers and 7 kept, 15, 17, ..., 27.

    Raises ValueError for more than those.
    """
    count, first = count_kept(layers, keep), layers // 2
    if count > layers - first:
        raise ValueError(
            f"keep is {keep!r}, {count} layers; the second half of {layers} holds {layers - first}, take the rule 'uniform'"
        )
    kept = tuple(first + layer for layer in _ends(layers - first, count))
    return Ranking(kept, (), kept)


def given(layers: int, chosen: Sequence[int]) -> Ranking:
    """The layers that the caller names, in its order. Raises ValueError for none, doubles, and layers that do not exist."""
    order = tuple(chosen)
    if not order or len(set(order)) < len(order):
        raise ValueError(f"given is {list(order)}; name at least one layer, and each once")
    for layer in order:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise ValueError(f"given names layer {layer!r}; the model has layers 0 to {layers - 1}")
    return Ranking(order, (), tuple(sorted(order)))


def _number(keep: Keep) -> int | Fraction:
    """An int is a count, anything else a share."""
    if isinstance(keep, int) and not isinstance(keep, bool):
        return keep
    if isinstance(keep, str) and keep.strip().isascii() and keep.strip().isdigit():
        return int(keep)
    try:
        # Through its shortest text: 0.1 is then a tenth, and ten layers keep one.
        number = Fraction(str(keep)) if not isinstance(keep, bool) else None
    except (ValueError, ZeroDivisionError):
        number = None
    if number is None:
        raise ValueError(f"keep is {keep!r}; write a share such as '1/4' or a number of layers")
    # 1.0 could be all layers, or one
    if number >= 1 and not isinstance(keep, Fraction) and "/" not in str(keep):
        raise ValueError(f"keep is {keep!r}; write a share below 1, or a whole number of layers")
    return number


def _ends(layers: int, count: int) -> tuple[int, ...]:
    """The last layer of each of `count` even blocks."""
    return tuple((j + 1) * layers // count - 1 for j in range(count))


def _rank(scores: Sequence[float], keep: Keep, spread: bool) -> Ranking:
    order = sorted(range(len(scores)), key=lambda layer: (-scores[layer], layer))
    count = count_kept(len(scores), keep)
    if spread:
        blocks = pairwise((-1, *_ends(len(scores), count)))
        kept = [next(layer for layer in order if before < layer <= end) for before, end in blocks]
    else:
        kept = sorted(order[:count])
    return Ranking(tuple(order), tuple(scores), tuple(kept))


def _check_scores(name: str, values: Sequence[float]) -> None:
    if len(values) == 0:
        raise ValueError(f"{name} is empty; it needs one value a layer")
    for layer, value in enumerate(values):
        # Not in per cent: the epsilon is made for scores of at most 1. NaN fails the comparison too.
        if not 0 <= value <= 1:
            raise ValueError(f"{name} holds {value} (layer {layer}); scores must lie in [0, 1]")


def _check_spread(recall: Sequence[float], recall_se: float | Sequence[float | None] | None) -> None:
    """Refuse a ranking by noise (see `halo`)."""
    given = [recall_se] if recall_se is None or isinstance(recall_se, int | float) else list(recall_se)
    errors = [error for error in given if error is not None]
    if not given or not all(math.isfinite(error) and error >= 0 for error in errors):
        raise ValueError(f"recall_se is {recall_se}; it needs standard errors of 0 or more")
    if len(given) not in (1, len(recall)):
        raise ValueError(
            f"recall_se has {len(given)} values and recall {len(recall)}; give one a layer, or one for all"
        )
    spread, error = max(recall) - min(recall), max(errors, default=0.0)
    if len(recall) > 1 and (spread == 0 or spread < 3 * error):
        middle = sum(recall) / len(recall)
        harder = "harder (longer texts, more keys)" if middle > 0.5 else "easier (shorter texts, fewer keys)"
        raise ValueError(
            f"recall hardly varies over layers: from {min(recall):.4g} to {max(recall):.4g}, a spread of {spread:.2g} where "
            f"3 standard errors are {3 * error:.2g}, so a ranking would be noise; ask more samples or {harder} ones, "
            "or take the rule 'uniform'"
        )
