"""hybridize: turn a pretrained Transformer into a hybrid linear-attention model.

The public API, loaded on first use: `import hybridize` and `hybridize --help` import no heavy library.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hybridize.registration import register_lazily

if TYPE_CHECKING:
    from hybridize.api import convert as convert
    from hybridize.api import demo as demo
    from hybridize.api import evaluate as evaluate
    from hybridize.api import extend as extend
    from hybridize.api import load as load
    from hybridize.diagnosis import diagnose as diagnose
    from hybridize.diagnosis import print_diagnosis as print_diagnosis
    from hybridize.models.modeling import HybridForCausalLM as HybridForCausalLM
    from hybridize.models.surgery import hybridize_model as hybridize_model
    from hybridize.plan.plan import Plan as Plan
    from hybridize.plan.plan import plan as plan
    from hybridize.recipe import Recipe as Recipe
    from hybridize.recipe import RecipeError as RecipeError
    from hybridize.recipe import copy_recipe as copy_recipe
    from hybridize.recipe import json_schema as recipe_schema  # noqa: F401
    from hybridize.recipe import list_recipes as list_recipes
    from hybridize.recipe import load_recipe as load_recipe
    from hybridize.recipe import recipe_path as recipe_path
    from hybridize.selection import print_selection as print_selection
    from hybridize.selection import select as select
    from hybridize.spec import HybridSpec as HybridSpec

__version__ = "0.1.0"

_HOMES = {
    "HybridForCausalLM": ("models.modeling", "HybridForCausalLM"),
    "HybridSpec": ("spec", "HybridSpec"),
    "Plan": ("plan", "Plan"),
    "convert": ("api", "convert"),
    "demo": ("api", "demo"),
    "diagnose": ("diagnosis", "diagnose"),
    "evaluate": ("api", "evaluate"),
    "extend": ("api", "extend"),
    "hybridize_model": ("models.surgery", "hybridize_model"),
    "load": ("api", "load"),
    "plan": ("plan", "plan"),
    "print_diagnosis": ("diagnosis", "print_diagnosis"),
    "Recipe": ("recipe", "Recipe"),
    "RecipeError": ("recipe", "RecipeError"),
    "copy_recipe": ("recipe", "copy_recipe"),
    "list_recipes": ("recipe", "list_recipes"),
    "load_recipe": ("recipe", "load_recipe"),
    "recipe_path": ("recipe", "recipe_path"),
    "recipe_schema": ("recipe", "json_schema"),
    "print_selection": ("selection", "print_selection"),
    "select": ("selection", "select"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridize' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(f"hybridize.{module}"), attribute)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps the verbs `plan` and `convert` callable: importing the subpackage of that name would put it in their place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
register_lazily()
