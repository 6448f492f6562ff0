"""What an evaluation asks of one model: checked before the model is loaded, then asked of it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hybridize.data import DataSpec, plain_texts
from hybridize.data.batching import held_out_batches
from hybridize.data.corpora import Progress as Say
from hybridize.evals.harness import run_harness
from hybridize.evals.haystacks import Haystack
from hybridize.evals.offline import offline_values
from hybridize.evals.ruler import BATCH_TOKENS, Scorer, check_ruler, run_ruler
from hybridize.evals.suite import run_suite
from hybridize.evals.suites import expand

TASKS = ("perplexity", "passkey", "offline")
"""Tasks of our own; every other name is a suite or task of lm-eval."""
ROWS = 100
PASSKEYS = 20
OFFLINE_SAMPLES = 50
RULER_SAMPLES = 40  # a single needle stands at each depth once
BATCH, TOKENS_AT_ONCE = 4, 16_384
"""Rows of a batch for perplexity, and fewer where they are long: logits of all their tokens exist at once."""


@dataclass(frozen=True)
class Questions:
    """The arguments of `hybridize.evaluate` that say what is asked; see there. Raises ValueError for what cannot be asked."""

    tasks: Sequence[str]
    texts: Sequence[str]
    lengths: Sequence[int]
    samples: int | None = None
    include_path: str | Path | None = None
    limit: float | None = None
    shots: int | None = None
    ruler: Sequence[str] = ()
    ruler_scorer: Scorer = "nvidia"
    essays: str | Path | None = None
    chat: bool = False
    batch_tokens: int | None = None
    records: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.tasks and not self.ruler:
            raise ValueError(f"tasks is empty; name some of {', '.join(TASKS)}, or tasks of lm-eval")
        for name in self.harness:
            if close := difflib.get_close_matches(name, TASKS, n=1, cutoff=0.75):
                raise ValueError(f"tasks contains {name!r}; did you mean {close[0]!r}?")
        of_ruler = {
            "ruler_scorer": self.ruler_scorer != "nvidia",
            "essays": self.essays is not None,
            "chat": self.chat,
            "batch_tokens": self.batch_tokens is not None,
            "records": self.records is not None,
        }
        for name, given in of_ruler.items():
            if given and not self.ruler:
                raise ValueError(
                    f"{name} is of RULER's tasks, and none is asked; name some (ruler: niah) or leave it out"
                )
        for name in ("include_path", "limit", "shots"):
            if getattr(self, name) is not None and not self.harness:
                raise ValueError(
                    f"{name} is of lm-eval's tasks, and none is asked; name some (tasks: lolcats) or leave it out"
                )
        if self.harness:
            expand(self.harness, self.shots)
        if not self.lengths or min(self.lengths) < 2:
            raise ValueError(
                f"lengths is {list(self.lengths)}; give at least one number of tokens, each 2 or more"
            )
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples is {self.samples}; it must be at least 1")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError(f"batch_tokens is {self.batch_tokens}; it must be at least 1")
        _ = self.haystack

    @property
    def harness(self) -> list[str]:
        return [task for task in self.tasks if task not in TASKS]

    @cached_property
    def haystack(self) -> Haystack | None:
        return check_ruler(self.ruler, self.lengths, self.ruler_scorer, self.essays) if self.ruler else None

    def ask(
        self, model: Any, tokenizer: Any, *, split_at: int | None, folder: Path | None, say: Say
    ) -> dict[str, Any]:
        """The measurements as plain values.

        `split_at` is the first position with a far key (see `perplexity`), `folder` where RULER's answers are kept unless
        `records` says otherwise (see `run_ruler`).
        """
        batches = {}
        at_once = max(1, min(BATCH, TOKENS_AT_ONCE // max(self.lengths)))
        for source in self.texts if "perplexity" in self.tasks else ():
            spec = DataSpec(source=source, length=max(self.lengths))
            batches[source] = held_out_batches(spec, tokenizer, self.samples or ROWS, at_once, say)
        suite = run_suite(
            model,
            tokenizer,
            batches,
            passkey_lengths=self.lengths if "passkey" in self.tasks else (),
            samples=self.samples or PASSKEYS,
            split_at=split_at,
            on_progress=partial(say, "measuring"),
        )
        values = suite.to_dict()
        if "offline" in self.tasks:
            documents = list(plain_texts(DataSpec(source=self.texts[0]), "test"))
            values["offline"] = offline_values(
                model, tokenizer, documents, self.samples or OFFLINE_SAMPLES, partial(say, "offline tasks")
            )
        if self.harness:
            result = run_harness(
                model,
                tokenizer,
                self.harness,
                include_path=self.include_path,
                limit=self.limit,
                num_fewshot=self.shots,
                on_progress=partial(say, "lm-eval"),
            )
            values["lm_eval"] = result.to_dict()
        if self.ruler:
            records = folder if self.records is None else Path(self.records)
            answers = run_ruler(
                model,
                tokenizer,
                self.ruler,
                self.lengths,
                samples=self.samples or RULER_SAMPLES,
                batch_tokens=BATCH_TOKENS if self.batch_tokens is None else self.batch_tokens,
                folder=records,
                essays=self.haystack,
                chat=self.chat,
                scorer=self.ruler_scorer,
                progress=partial(say, "RULER"),
            )
            values["ruler"] = {**answers, "records": str(records) if records is not None else None}
        return values
