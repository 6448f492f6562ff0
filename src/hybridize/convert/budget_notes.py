"""What a run says about its budgets before it trains: what is too short, read again and again, or has no far key."""

from __future__ import annotations

from hybridize.convert.texts import Texts
from hybridize.data import PackedRows
from hybridize.recipe import Recipe, TrainingStep


def budget_notes(recipe: Recipe) -> list[str]:
    """One sentence for every step whose budget is smaller than one batch, which it trains on all the same, and for every step
    that ends while its learning rate still grows."""
    said = []
    for _, path, step in recipe.stages:
        if step.tokens is None:
            continue
        length = step.row_length(recipe.data.length)
        if step.tokens < step.batch.rows * length:
            said.append(
                f"{path}: {step.tokens:,} tokens are less than one batch of {step.batch.rows} x {length}, so "
                f"the stage is one optimizer step on {step.batch.rows * length:,}; lower batch.rows, or give more tokens"
            )
        steps, warmup = step.optimizer_steps(length), getattr(step.rate, "warmup", 0)
        if steps is not None and warmup >= steps:
            said.append(
                f"{path}: its warm-up of {warmup} optimizer steps does not end within the stage's {steps}, so "
                "the rate asked for is never reached; lower warmup, or give more tokens"
            )
    return said


def epoch_notes(recipe: Recipe, texts: Texts) -> list[str]:
    """One sentence for every step whose budget is larger than the text."""
    said = []
    for index, step in enumerate(recipe.steps):
        if not isinstance(step, TrainingStep) or step.tokens is None:
            continue
        rows = texts.of(step).rows
        if step.tokens > max(rows.tokens_available, rows.length):
            said.append(
                f"steps[{index}].{step.kind}: {step.tokens:,} tokens are {rows.epochs(step.tokens):.3g} epochs "
                f"of the {rows.tokens_available:,} tokens that {recipe.data.label} has"
            )
    return said


def far_notes(recipe: Recipe, rows: PackedRows) -> list[str]:
    """How much of the text has a far key. Raises ValueError where none has: the linear branch would never train."""
    first = recipe.first_far_position
    if not recipe.training_steps or not first:
        return []
    share = rows.share_from(first)
    if share == 0:
        raise ValueError(
            f"data.source {recipe.data.label!r}: no document has a token at position {first} or later, where the linear branch"
            " first has a key; give longer documents, or data.documents: joined"
        )
    return [
        f"{share:.0%} of the training tokens stand at position {first} or later, where the linear branch has keys"
    ]
