"""Every recipe of the component-balance paper that ships runs from start to end, scaled down, on a tiny teacher."""

from __future__ import annotations

import json

import pytest

import hybridize
from hybridize.recipe import load_recipe

SHIPPED = [
    "separate",
    "hedgecats",
    "mass",
    "linear",
    "inference-hybrid",
    "ssd-dropout",
    "ssd-window",
    "ssd-fixed",
]
LARGE = ["hedgecats-mistral-7b", "ssd-dropout-mistral-7b", "inference-hybrid-mistral-7b"]
LENGTH = 192


def scaled(name: str, text) -> dict:
    recipe = load_recipe(name)
    changes = {"data.source": str(text), "data.length": LENGTH, "precision": "fp32"}
    changes["evaluation"] = {"texts": [], "rows": 2, "new_tokens": 2}
    for step in recipe.training_steps:
        kind = step.kind
        changes |= {
            f"{kind}.tokens": 5 * 2 * LENGTH,
            f"{kind}.batch": {"rows": 2},
            f"{kind}.validation_rows": 2,
        }
        if kind == "finetune":
            changes["finetune.eval_every"] = 2
            if step.window_dropout is not None:
                changes["finetune.window_dropout.epoch"] = 2 * LENGTH
    return changes


@pytest.mark.parametrize("name", [*(f"{method}-smollm2-135m" for method in SHIPPED), *LARGE])
def test_a_shipped_method_runs(name, teacher, text, tmp_path):
    run = hybridize.convert(
        str(teacher), name, tmp_path, overrides=scaled(name, text), device="cpu", progress=False
    )
    entries = json.loads((run / "evaluations.json").read_text())
    steps = len(load_recipe(name).steps)
    assert len(entries) == 2 + steps and (run / "report.html").is_file()
    model, _ = hybridize.load(run, device="cpu")
    sizes = {group.window.size if group.window else None for group in model.spec.groups}
    assert sizes == {
        {"linear": None, "ssd-dropout": 32, "ssd-fixed": 16}.get(
            name.rsplit("-smollm2", 1)[0].rsplit("-mistral", 1)[0], 64
        )
    }
    if "hedgecats" in name or "ssd" in name:
        validation = (run / "steps/1-finetune/validation.csv").read_text()
        assert "linear_gain" in validation.splitlines()[0]
