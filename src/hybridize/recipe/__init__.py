"""Recipes: the schema, the files that ship, and errors that name the nearest valid word."""

from hybridize.recipe.files import (
    RecipeFile,
    copy_recipe,
    list_recipes,
    load_recipe,
    recipe_path,
)
from hybridize.recipe.schema import Evaluation, Header, Recipe, RecipeError, json_schema
from hybridize.recipe.steps import (
    Batch,
    Constant,
    Cosine,
    EarlyStopping,
    EditStep,
    FinetuneStep,
    Lora,
    Objective,
    Plateau,
    TrainingStep,
    TransferStep,
    WindowDropout,
)

__all__ = [
    "Batch",
    "Constant",
    "Cosine",
    "EarlyStopping",
    "EditStep",
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
    "WindowDropout",
    "copy_recipe",
    "json_schema",
    "list_recipes",
    "load_recipe",
    "recipe_path",
]
