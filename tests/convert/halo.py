"""What the tests of HALO's stages convert: the tiny teacher, whole recurrent layers, and a choice of layers that keep softmax."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.convert import bench
from tests.models.hybrids import HYPE, LIGHTNING
from tests.models.tiny import tiny_model

from hybridize.data.batching import Batch
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model, softmax_teacher
from hybridize.recipe import Recipe
from hybridize.spec import HybridSpec

KEPT = {**HYPE, "logit_scale": {"kind": "log_position", "base": 500}}
FEW = {"batch": {"rows": 2}, "eval_every": 3, "validation_rows": 2}
STEP = 2 * bench.LENGTH
STEPS: list[dict[str, Any]] = [
    {"transfer": {"tokens": 6 * STEP, "train": "mixer", **FEW}},
    {"select": {"rule": "uniform", "keep": "1/2"}},
    {"distill": {"tokens": 6 * STEP, "lr": {"cosine": [1e-3, 1e-4]}, **FEW}},
    {"long_context": {"tokens": 4 * 2 * STEP, "length": 2 * bench.LENGTH, "lr": 1e-3, **FEW}},
]
MEASURE = {"texts": [], "rows": 2, "passkey": [96], "samples": 2, "new_tokens": 2}


def plain(text: Path, steps: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """The recipe as plain data; `changes` replace top-level keys."""
    raw = bench.plain(text)
    raw["spec"] = {"all": copy.deepcopy(LIGHTNING), "kept": copy.deepcopy(KEPT)}
    raw["steps"] = copy.deepcopy(STEPS if steps is None else steps)
    return {**raw, **changes}


def recipe(text: Path, steps: list[dict[str, Any]] | None = None, **changes: Any) -> Recipe:
    return Recipe.from_dict(plain(text, steps, **changes))


def student(
    spec: dict[str, Any] | None = None, model_type: str = "llama", **overrides: Any
) -> HybridForCausalLM:
    return hybridize_model(
        tiny_model(model_type, **overrides), HybridSpec.model_validate(spec or {"all": LIGHTNING})
    )


def teacher(model_type: str = "llama", **overrides: Any) -> HybridForCausalLM:
    return softmax_teacher(tiny_model(model_type, **overrides))


def batch(text: Path, rows: int = 2) -> Batch:
    return bench.batch(text, rows=rows)
