"""Whether a run's text is still what it was: the corpora of installed packages change with the packages."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridize.convert.run_folder import read_json
from hybridize.convert.status import Say
from hybridize.data import PackedRows, build_rows
from hybridize.recipe import Recipe, TrainingStep, load_recipe


def validation_rows(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Say, length: int | None = None
) -> PackedRows | None:
    """The validation text of the steps on rows of `length` tokens (default: the recipe's), which decides their schedules
    and best checkpoints; None where no such step trains."""
    length = length or recipe.data.length
    wanted = [step.validation_rows for step in recipe.training_steps if _length(step, recipe) == length]
    if not wanted:
        return None
    spec = recipe.data.model_copy(update={"length": length})
    return build_rows(spec, tokenizer, "validation", max(wanted) * length, progress=say)


def _length(step: TrainingStep, recipe: Recipe) -> int:
    return step.row_length(recipe.data.length)


def drift_note(run: Path, tokenizer: PreTrainedTokenizerBase, say: Say) -> str | None:
    """A sentence where the text of a run folder has changed since it was trained; None where it has not, and for what is no run.

    The validation rows stand for the whole: all splits are made at once, so text that has moved between them shows.
    """
    record = read_json(run / "run.json")
    known = record["identity"]["data"].get("validation") if isinstance(record, dict) else None
    if known is None:
        return None
    recipe = load_recipe(run / "recipe.yaml")
    try:
        rows = validation_rows(recipe, tokenizer, say)
    except ValueError as error:
        return f"the text that this run was trained on is not there ({error}); what is held out now may have been trained on"
    if rows is None or rows.fingerprint == known:
        return None
    return (
        f"{recipe.data.label} is not the text it was when this run was trained (other packages are installed, or files have "
        "changed): what is held out now may have been trained on"
    )
