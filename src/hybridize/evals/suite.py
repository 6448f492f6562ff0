"""The measurements of one model: perplexity on several texts by position, passkeys by length and depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridize.evals.generation import Progress
from hybridize.evals.passkey import PasskeyResult, passkey
from hybridize.evals.perplexity import Batch, PerplexityResult, perplexity

DEPTHS = 10


@dataclass(frozen=True)
class SuiteResult:
    """Perplexity by name of the text, and passkeys (None where none were asked for)."""

    perplexity: dict[str, PerplexityResult]
    passkey: PasskeyResult | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values: per text its perplexity, interval and position buckets; per length its passkey accuracy."""
        plain: dict[str, Any] = {"perplexity": {name: text_values(r) for name, r in self.perplexity.items()}}
        if self.passkey is not None:
            plain["passkey"] = {
                "lengths": [
                    {
                        "length": a.length,
                        "accuracy": a.accuracy,
                        "low": a.low,
                        "high": a.high,
                        "samples": a.samples,
                    }
                    for a in self.passkey.by_length
                ],
                "cells": [dataclasses.asdict(cell) for cell in self.passkey.cells],
            }
        return plain


def text_values(result: PerplexityResult) -> dict[str, Any]:
    """Plain values of one text's perplexity."""
    buckets = [
        {"start": b.start, "end": b.end, "perplexity": b.perplexity, "tokens": b.tokens}
        for b in result.by_position
    ]
    values: dict[str, Any] = {
        "perplexity": result.perplexity,
        "low": result.low,
        "high": result.high,
        "nll": result.nll,
        "tokens": result.tokens,
        "by_position": buckets,
        "row_nll_sums": list(result.row_nll_sums),
        "row_tokens": list(result.row_tokens),
    }
    if result.far_eligible is not None:
        values["far_share"] = result.far_share
        values["far_eligible_nll"] = result.far_eligible.nll
    return values


def ask_passkeys(
    model: Any, tokenizer: Any, lengths: Sequence[int], samples: int, **options: Any
) -> PasskeyResult:
    """`samples` passkeys a length, spread over 10 depths (fewer where samples are fewer); `options`: see `passkey`."""
    depths = min(DEPTHS, samples)
    return passkey(model, tokenizer, lengths, depths, samples=max(1, round(samples / depths)), **options)


def run_suite(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Sequence[Batch]],
    *,
    passkey_lengths: Sequence[int] = (),
    samples: int = 20,
    split_at: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> SuiteResult:
    """Measure `model` on batches of held-out texts and on passkeys.

    `samples` passkeys a length (see `ask_passkeys`); `split_at` is the first position with a far key (see `perplexity`).
    """
    results = {
        name: perplexity(model, batches, split_at=split_at, on_progress=on_progress)
        for name, batches in texts.items()
    }
    keys = None
    if passkey_lengths:
        keys = ask_passkeys(
            model,
            tokenizer,
            passkey_lengths,
            samples,
            seed=seed,
            batch_size=batch_size,
            on_progress=on_progress,
        )
    return SuiteResult(results, keys)
