"""Recipes: the schema, the files that ship, and errors that name the nearest valid word."""

from hybridize.recipe.files import (
    RecipeFile,
    copy_recipe,
    list_recipes,
    load_recipe,
    recipe_path,
)
from hybridize.recipe.schema import Evaluation, Header, Recipe, RecipeError, json_schema
from hybridize.recipe.stages import (
    DistillStep,
    EarlyStopping,
    FinetuneStep,
    LongContextStep,
    Lora,
    Objective,
    TransferStep,
    WindowDropout,
)
from hybridize.recipe.steps import AnyStep, EditStep, KnowledgeProbe, RecallProbe, SelectStep
from hybridize.recipe.training import Batch, Constant, Cosine, Plateau, TrainingStep

__all__ = [
    "AnyStep",
    "Batch",
    "Constant",
    "Cosine",
    "DistillStep",
    "EarlyStopping",
    "EditStep",
    "Evaluation",
    "FinetuneStep",
    "Header",
    "KnowledgeProbe",
    "LongContextStep",
    "Lora",
    "Objective",
    "Plateau",
    "RecallProbe",
    "Recipe",
    "RecipeError",
    "RecipeFile",
    "SelectStep",
    "TrainingStep",
    "TransferStep",
    "WindowDropout",
    "copy_recipe",
    "json_schema",
    "list_recipes",
    "load_recipe",
    "recipe_path",
]
