"""Whether a run's text is still what it was: the corpora of installed packages change with the packages."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridize.convert.run_folder import read_json
from hybridize.convert.status import Say
from hybridize.data import PackedRows, build_rows
from hybridize.recipe import Recipe, load_recipe


def validation_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Say) -> PackedRows | None:
    """The validation text of the steps, which decides their schedules and best checkpoints; None where none trains."""
    if not recipe.training_steps:
        return None
    most = max(step.validation_rows for step in recipe.training_steps)
    return build_rows(recipe.data, tokenizer, "validation", most * recipe.data.length, progress=say)


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
        f"{recipe.data.source} is not the text it was when this run was trained (other packages are installed, or files have "
        "changed): what is held out now may have been trained on"
    )
