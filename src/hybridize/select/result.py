"""A selection: which layers keep softmax, by which rule, and all the numbers that decided it.

As JSON (`Selection.to_dict`, version 1):

format, version    "hybridize selection", 1
rule, keep, count  the rule, the share or count asked for, the count that gave
cap, floor, given  the rules' own parameters, null where they do not count
spread             whether the best of each even block is kept in place of the best anywhere
layers             L
kept, ranking      layer numbers from 0: ascending; the most worth keeping first
teacher            {recall, knowledge} of the unchanged teacher, null without a sweep
by_layer           for each layer {layer, kept, score, recall, knowledge, loss}; what was not measured is absent.
                   recall, knowledge: {value, standard_error, samples, parts: [{name, value, standard_error, samples}]}
identity           what the sweep depended on: fingerprints of the models, settings of the probes; null without a sweep

The file is itself a table of scores: `load_scores` reads it back, and the same rule ranks it the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from hybridize.atomic import atomic_write
from hybridize.problems import nearest
from hybridize.select import rules
from hybridize.select.rules import RULES, SCORED, STANDARD_ERROR, Keep, Ranking, count_kept
from hybridize.select.table import FORMAT, VERSION, ScoreTable, load_scores

Floor = float | str
"""What `halo` takes for a loss of knowledge at least: a number, or `standard_error`."""


@dataclass(frozen=True)
class Selection:
    """See the module's head; `keep` is as the caller wrote it."""

    rule: str
    layers: int
    keep: Keep
    ranking: Ranking
    scores: ScoreTable | None = None
    cap: float | None = None
    floor: Floor | None = None
    spread: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers that keep softmax, ascending."""
        return self.ranking.kept

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        teacher = self.scores.teacher if self.scores is not None else None
        return {
            "format": FORMAT,
            "version": VERSION,
            "rule": self.rule,
            "keep": str(self.keep) if isinstance(self.keep, Fraction) else self.keep,
            "count": len(self.kept),
            "cap": self.cap,
            "floor": self.floor,
            "spread": self.spread,
            "given": list(self.ranking.order) if self.rule == "given" else None,
            "layers": self.layers,
            "kept": list(self.kept),
            "ranking": list(self.ranking.order),
            "teacher": {k: v for k, v in teacher.plain().items() if k != "layer"} if teacher else None,
            "by_layer": [self._layer(layer) for layer in range(self.layers)],
            "identity": dict(self.scores.identity) if self.scores and self.scores.identity else None,
        }

    def _layer(self, layer: int) -> dict[str, Any]:
        entry = self.scores.layers[layer].plain() if self.scores is not None else {}
        score = {"score": self.ranking.scores[layer]} if self.ranking.scores else {}
        return {"layer": layer, "kept": layer in self.kept, **score, **entry}

    def save(self, path: Path | str) -> None:
        """Write the JSON; the file appears whole or not at all."""
        with atomic_write(path, "w") as file:
            json.dump(self.to_dict(), file, indent=1, allow_nan=False)
            file.write("\n")


def choose(
    rule: str,
    layers: int,
    keep: Keep = "1/4",
    *,
    scores: ScoreTable | Path | str | None = None,
    given: Sequence[int] | None = None,
    cap: float | None = None,
    floor: Floor | None = None,
    spread: bool = False,
) -> Selection:
    """Which of `layers` layers keep softmax (rules: see `select.rules`).

    Args:
        keep: a share, rounded down, or a number of layers. For `given` the layers named are the answer.
        scores: of a sweep, or the file or folder that holds them; `halo`, `jet` and `kl` need them.
        given: the layers, for the rule `given`.
        cap: largest score of `halo`; the published code takes 50.
        floor: the least loss of knowledge that `halo` counts, in [0, 1], or `standard_error`: each layer's own, as measured.
        spread: keep the best layer of each even block; for the rules that rank by scores.

    Raises:
        ValueError: an unknown rule, an argument that the rule lacks or does not take, scores of another number of layers,
            and what the rule itself refuses.
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; {nearest(rule, RULES)}")
    if (given is not None) != (rule == "given"):
        takes = "it needs the layers to keep" if rule == "given" else "leave `given` out"
        raise ValueError(f"given is {given} under the rule {rule!r}; {takes}")
    for name, value in (("cap", cap), ("floor", floor)):
        if value is not None and rule != "halo":
            raise ValueError(f"{name} is {value} under the rule {rule!r}; only 'halo' takes one")
    if not isinstance(spread, bool):
        raise ValueError(f"spread is {spread!r}; it is True or False")
    if spread and rule not in SCORED:
        raise ValueError(f"spread is on under the rule {rule!r}, which has no scores; {', '.join(SCORED)} do")
    if given is not None:
        ranking = rules.given(layers, given)
        return Selection(rule, layers, len(ranking.kept), ranking)
    count_kept(layers, keep)
    if rule in ("uniform", "tail"):
        place = rules.uniform if rule == "uniform" else rules.tail
        return Selection(rule, layers, keep, place(layers, keep))
    table = _table(scores, rule)
    if len(table.layers) != layers:
        raise ValueError(f"scores has {len(table.layers)} layers; the model has {layers}")
    ranking = _rank(rule, table, cap, floor, keep=keep, spread=spread)
    return Selection(rule, layers, keep, ranking, table, cap, floor, spread)


def _table(scores: Any, rule: str) -> ScoreTable:
    if scores is None:
        raise ValueError(
            f"scores is missing; the rule {rule!r} ranks by the scores of a sweep, or take 'uniform'"
        )
    return scores if isinstance(scores, ScoreTable) else load_scores(scores)


def _floor(floor: Floor | None, table: ScoreTable) -> float | list[float]:
    if floor is None or rules.is_share(floor):
        return float(floor or 0)
    if floor != STANDARD_ERROR:
        raise ValueError(f"floor is {floor!r}; give a number in [0, 1], or {STANDARD_ERROR}")
    errors = [error for error in table.knowledge_errors() if error is not None and rules.is_share(error)]
    if len(errors) < len(table.layers):
        raise ValueError(
            f"floor is {STANDARD_ERROR}, but not every layer's knowledge has one; give a number such as 0.01"
        )
    return errors


def _rank(rule: str, table: ScoreTable, cap: float | None, floor: Floor | None, **kept: Any) -> Ranking:
    if rule == "kl":
        return rules.kl(table.losses(), **kept)
    recall = [score.value for score in table.recall()]
    if rule == "halo":
        knowledge = [score.value for score in table.knowledge()]
        floors = _floor(floor, table)
        return rules.halo(recall, knowledge, cap=cap, floor=floors, recall_se=table.recall_errors(), **kept)
    if table.teacher is None or table.teacher.recall is None:
        raise ValueError(
            "scores has no recall of the teacher (a line with layer null); the rule 'jet' needs it"
        )
    return rules.jet(recall, table.teacher.recall.value, recall_se=table.recall_errors(), **kept)
