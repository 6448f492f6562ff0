"""Measurements as plain data, in the schema of `hybridize.report.diagnosis`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridize.evals.offline import TaskResult
from hybridize.evals.passkey import PasskeyResult
from hybridize.probes.need import Need
from hybridize.probes.token_losses import Estimate, TokenLosses
from hybridize.probes.verdict import Judgement
from hybridize.spec import GroupSpec, ResolvedSpec


@dataclass
class Measured:
    """One model's losses by text, and its answers."""

    losses: dict[str, TokenLosses]
    keys: PasskeyResult | None = None
    tasks: list[TaskResult] = field(default_factory=list)


def far_tokens(losses: TokenLosses, split_at: int | None) -> Tensor:
    """Far-eligible tokens; every counted one where no layer has two branches."""
    return losses.from_position(split_at or 0)


def text_entry(
    losses: TokenLosses, base: TokenLosses, split_at: int | None, need: Need | None
) -> dict[str, Any]:
    """A `TextEntry`; `base` are the student's losses on the same text."""
    result = losses.summary(split_at)
    far_NT = far_tokens(losses, split_at)
    far = losses.mean(far_NT)
    entry: dict[str, Any] = {
        "perplexity": {
            "perplexity": result.perplexity,
            "low": result.low,
            "high": result.high,
            "tokens": result.tokens,
        },
        "by_position": [
            {"start": b.start, "end": b.end, "perplexity": b.perplexity, "tokens": b.tokens}
            for b in result.by_position
        ],
        "far_nll": far.value if far is not None else None,
        "far_tokens": int(far_NT.sum()),
        "delta": plain_estimate(losses.less(base)),
        "far_delta": plain_estimate(losses.less(base, far_NT)),
    }
    if need is not None:
        entry["useful_delta"] = plain_estimate(losses.less(base, need.useful_NT))
        entry["other_delta"] = plain_estimate(losses.less(base, far_NT & ~need.useful_NT))
    return entry


def answers(measured: Measured) -> dict[str, Any]:
    """Passkeys and tasks of a `ModelEntry`."""
    entry: dict[str, Any] = {}
    if measured.keys is not None:
        entry["passkey"] = {
            a.length: {"accuracy": a.accuracy, "low": a.low, "high": a.high, "samples": a.samples}
            for a in measured.keys.by_length
        }
        entry["passkey_cells"] = [
            {"length": c.length, "depth": c.depth, "correct": c.correct, "samples": c.samples}
            for c in measured.keys.cells
        ]
    entry["tasks"] = {
        task.name: {
            "accuracy": task.accuracy,
            "low": task.low,
            "high": task.high,
            "samples": task.samples,
            "chance": task.chance,
            "reach": task.reach,
        }
        for task in measured.tasks
    }
    return entry


def verdict_entry(judgement: Judgement) -> dict[str, Any]:
    figures = {name: estimate.to_dict() for name, estimate in judgement.figures.items()}
    return {
        "linear": judgement.linear,
        "window": judgement.window,
        "sentence": judgement.sentence,
        "reasons": judgement.reasons,
        "thresholds": judgement.thresholds,
        "figures": figures,
    }


def need_entry(need: Need) -> dict[str, Any]:
    return {
        "context": need.context,
        "threshold": need.threshold,
        "need": need.need.to_dict(),
        "tokens": need.need.tokens,
        "useful_share": need.useful_share,
    }


def plain_estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.to_dict()


def describe_spec(spec: ResolvedSpec) -> str:
    """The spec in a line: how many layers compute what."""
    counts: dict[str, int] = {}
    for layer in spec.layers:
        words = " | ".join(_group(group, len(layer.groups) > 1) for group in layer.groups)
        counts[words] = counts.get(words, 0) + 1
    return "; ".join(f"{count} x {words}" for words, count in counts.items())


def _group(group: GroupSpec, several: bool) -> str:
    words = [f"{group.heads} heads" if several else "", group.attention.replace("_", " ")]
    if group.window is not None:
        sinks = f" + {group.window.sinks} sinks" if group.window.sinks else ""
        words.append(
            f"{group.window.kind} {group.window.size}{sinks}{', overlapping' if group.window.overlap else ''}"
        )
    if group.normalizer is not None:
        kind = group.normalizer.kind
        words.append(kind if kind == "shared" else f"separate, {group.normalizer.mix}")  # type: ignore[union-attr]
    return " ".join(word for word in words if word)
