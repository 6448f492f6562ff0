"""Recipes: the schema, the files that ship, and errors that name the nearest valid word."""

from hybridize.recipe.files import (
    RecipeFile,
    copy_recipe,
    list_recipes,
    load_recipe,
    recipe_path,
)
from hybridize.recipe.schema import (
    Batch,
    Constant,
    Cosine,
    Evaluation,
    FinetuneStep,
    Header,
    Lora,
    Objective,
    Plateau,
    Recipe,
    RecipeError,
    TrainingStep,
    TransferStep,
    json_schema,
)

__all__ = [
    "Batch",
    "Constant",
    "Cosine",
    "Evaluation",
    "FinetuneStep",
    "Header",
    "Lora",
    "Objective",
    "Plateau",
    "Recipe",
    "RecipeError",
    "RecipeFile",
    "TrainingStep",
    "TransferStep",
    "copy_recipe",
    "json_schema",
    "list_recipes",
    "load_recipe",
    "recipe_path",
]
