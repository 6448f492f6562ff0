"""The text of a run: one set of rows for each length that its steps train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridize.convert.drift import validation_rows
from hybridize.convert.status import Say
from hybridize.data import PackedRows, build_rows
from hybridize.data.batching import Batch, make_batch
from hybridize.recipe import Recipe, TrainingStep

Budgets = dict[int, int | None]
"""Training text in tokens by the length of its rows; None: all there is."""


def corpus_tokens(recipe: Recipe, length: int | None = None) -> int | None:
    """How much training text the steps on rows of `length` tokens (default: the recipe's) need; None (all there is) where
    one counts in epochs."""
    length = length or recipe.data.length
    steps = [step for step in recipe.training_steps if step.row_length(recipe.data.length) == length]
    budgets = [step.tokens for step in steps]
    if any(tokens is None for tokens in budgets):
        return None
    return max((tokens for tokens in budgets if tokens is not None), default=length)


def budgets(recipe: Recipe) -> Budgets:
    """The recipe's own length comes first, whether or not a step trains on it."""
    lengths = [step.row_length(recipe.data.length) for step in recipe.training_steps]
    return {length: corpus_tokens(recipe, length) for length in dict.fromkeys([recipe.data.length, *lengths])}


@dataclass(frozen=True)
class Text:
    """Rows of one length, to train on and to validate on (None where no step does)."""

    rows: PackedRows
    held_out: PackedRows | None

    @property
    def regular(self) -> bool:
        """Whether documents are joined: no row holds the start of another."""
        return len(self.rows.starts) == 0

    def validation(self, step: TrainingStep) -> list[Batch]:
        """The step's first validation rows, in its micro-batches."""
        assert self.held_out is not None
        count, micro = min(step.validation_rows, len(self.held_out)), step.batch.micro_rows
        return [make_batch(self.held_out, range(i, min(i + micro, count))) for i in range(0, count, micro)]

    def identity(self) -> dict[str, Any]:
        """What a run folder keeps to know the text again."""
        return {
            "rows": len(self.rows),
            "fingerprint": self.rows.fingerprint,
            "validation": self.held_out.fingerprint if self.held_out is not None else None,
        }


class Texts:
    """All of a run's text. A control is given its student's `budgets`, so that it reads the same."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, budgets: Budgets, say: Say
    ) -> None:
        self.recipe = recipe
        wanted = [step.row_length(recipe.data.length) for step in recipe.training_steps]
        self.by_length = {
            length: Text(
                build_rows(
                    recipe.data.model_copy(update={"length": length}),
                    tokenizer,
                    "train",
                    tokens,
                    progress=say,
                ),
                validation_rows(recipe, tokenizer, say, length),
            )
            for length, tokens in budgets.items()
            if length in (recipe.data.length, *wanted)
        }

    @property
    def base(self) -> Text:
        """Rows of the recipe's own length."""
        return self.by_length[self.recipe.data.length]

    def of(self, step: TrainingStep) -> Text:
        return self.by_length[step.row_length(self.recipe.data.length)]

    def identity(self) -> dict[str, Any]:
        """The base text's, and the others' by length where there are some."""
        others = {
            str(length): text.identity() for length, text in self.by_length.items() if text is not self.base
        }
        return {**self.base.identity(), **({"by_length": others} if others else {})}
