"""Which held-out texts are measured, and under which names, where a recipe trains on several."""

import pytest

from hybridize import api, diagnosis
from hybridize.convert import measure
from hybridize.convert.run_folder import RunFolder
from hybridize.data import DataSpec, batching
from hybridize.recipe import Recipe, load_recipe

OVERRIDES = {
    "data.source": ["docstrings", "package_code"],
    "data.seed": 7,
    "data.length": 512,
    "evaluation.texts": ["code", "docstrings"],
}
OWN = {name: DataSpec(source=name, seed=7, length=512) for name in ("docstrings", "package_code")}


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("demo", OVERRIDES)


def test_a_run_measures_every_text_of_its_own_then_the_others_once(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(batching, "held_out_batches", lambda spec, *_: spec)
    milestones = measure.Milestones(RunFolder(tmp_path), recipe, None, progress=False)
    measured = milestones._held_out(lambda *_: None)
    assert list(measured) == ["docstrings", "package_code", "code"]
    assert measured == {**OWN, "code": DataSpec(source="code", length=512)}


def test_a_diagnosis_does_too(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    specs, parts = diagnosis._texts(tmp_path, None, 512, quick=False)
    assert specs == {**OWN, "code": DataSpec(source="code", length=512)} and parts == tuple(OWN)
    assert diagnosis._texts(tmp_path, None, 512, quick=True) == ({"docstrings": OWN["docstrings"]}, ())
    assert diagnosis._texts(tmp_path, ["essays"], 64, False) == (
        {"essays": DataSpec(source="essays", length=64)},
        (),
    )


@pytest.mark.parametrize("overrides", [None, ["data.seed=7"], {"data.seed": 7}])
def test_convert_takes_several_texts(overrides, tmp_path, monkeypatch):
    recipes = []
    monkeypatch.setattr(api.pipeline, "convert", lambda _, recipe, out, **__: recipes.append(recipe) or out)
    names = ["docstrings", "a folder: with 'names'.txt"]
    api.convert("model", "demo", tmp_path, data=names, overrides=overrides)
    api.convert("model", "demo", tmp_path, data="[docstrings, package_code]", overrides=overrides)
    assert [recipe.data.sources for recipe in recipes] == [tuple(names), ("docstrings", "package_code")]
