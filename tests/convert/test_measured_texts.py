"""Which held-out texts are measured, and under which names, where a recipe trains on several."""

import pytest

from hybridize import api, diagnosis
from hybridize.convert import measure
from hybridize.convert.run_folder import RunFolder
from hybridize.data import DataSpec, batching
from hybridize.data.packing import TooLittleText
from hybridize.recipe import Recipe, load_recipe

OVERRIDES = {
    "data.source": ["docstrings", "package_code"],
    "data.seed": 7,
    "data.length": 512,
    "evaluation.texts": ["code", "docstrings"],
}
OWN = {name: DataSpec(source=name, seed=7, length=512) for name in ("docstrings", "package_code")}


def short(monkeypatch, *names: str) -> None:
    """Texts give their specs as their batches; those named have no full row."""

    def batches(spec, *_):
        if spec.source in names:
            raise TooLittleText(f"the test text of {spec.source} is no full row")
        return spec

    monkeypatch.setattr(batching, "held_out_batches", batches)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("demo", OVERRIDES)


def test_a_run_measures_every_text_of_its_own_then_the_others_once(recipe, tmp_path, monkeypatch):
    short(monkeypatch)
    milestones = measure.Milestones(RunFolder(tmp_path), recipe, None, progress=False)
    measured = milestones._held_out(lambda *_: None)
    assert list(measured) == ["docstrings", "package_code", "code"]
    assert measured == {**OWN, "code": DataSpec(source="code", length=512)}


def test_a_short_text_of_a_run_is_left_out_and_named(recipe, tmp_path, monkeypatch):
    short(monkeypatch, "package_code")
    milestones = measure.Milestones(RunFolder(tmp_path), recipe, None, progress=False)
    assert list(milestones._held_out(lambda *_: None)) == ["docstrings", "code"]
    assert milestones._left_out == [
        "nothing is measured on one of the run's texts: the test text of package_code is no full row"
    ]
    short(monkeypatch, "docstrings")  # asked for by name too
    with pytest.raises(TooLittleText):
        measure.Milestones(RunFolder(tmp_path), recipe, None, progress=False)._held_out(lambda *_: None)
    alone = load_recipe("demo", {"data.source": "docstrings", "evaluation.texts": ["code"]})
    with pytest.raises(TooLittleText):
        measure.Milestones(RunFolder(tmp_path), alone, None, progress=False)._held_out(lambda *_: None)


def test_a_diagnosis_reads_the_texts_of_its_first_run(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert diagnosis._texts(tmp_path, None, 512) == {**OWN, "code": DataSpec(source="code", length=512)}
    assert diagnosis._texts(tmp_path, ["essays"], 64) == {"essays": DataSpec(source="essays", length=64)}


@pytest.mark.parametrize(
    ("left", "quick", "measured"),
    [
        ((), False, ["docstrings", "package_code", "code"]),
        ((), True, ["docstrings"]),
        (("docstrings",), False, ["package_code", "code"]),
        (("docstrings",), True, ["package_code"]),
    ],
)
def test_every_run_of_a_diagnosis_is_measured_on_the_same_texts(
    recipe, tmp_path, monkeypatch, left, quick, measured
):
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    short(monkeypatch, *left)
    subjects, seen = [], []

    def open_run(name, *_):
        subjects.append(diagnosis.Subject(str(name), str(name), lambda: None))
        return subjects[-1], None

    def stop(subject, tokenizer, batches, *_):
        seen.append(list(batches))
        if len(seen) == 2:
            raise KeyboardInterrupt
        short(monkeypatch)  # the second run's tokenizer makes a row of every text
        return {}

    monkeypatch.setattr(diagnosis, "_subject", open_run)
    monkeypatch.setattr(diagnosis, "drift_note", lambda *_: None)
    monkeypatch.setattr(diagnosis, "plain_texts", lambda *_: [])
    monkeypatch.setattr(diagnosis, "measure", stop)
    monkeypatch.setattr(diagnosis.RunDiagnosis, "model_validate", lambda raw: raw)
    with pytest.raises(KeyboardInterrupt):
        diagnosis.diagnose([tmp_path, tmp_path], quick=quick, device="cpu", progress=False)
    assert seen == [measured] * 2
    assert [len(subject.notes) for subject in subjects] == [len(left), 0]


@pytest.mark.parametrize("overrides", [None, ["data.seed=7"], {"data.seed": 7}])
def test_convert_takes_several_texts(overrides, tmp_path, monkeypatch):
    recipes = []
    monkeypatch.setattr(api.pipeline, "convert", lambda _, recipe, out, **__: recipes.append(recipe) or out)
    names = ["docstrings", "a folder: with 'names'.txt"]
    api.convert("model", "demo", tmp_path, data=names, overrides=overrides)
    api.convert("model", "demo", tmp_path, data="[docstrings, package_code]", overrides=overrides)
    assert [recipe.data.sources for recipe in recipes] == [tuple(names), ("docstrings", "package_code")]
    for broken in ("[a, {b]", "[*x]", "[a\tb: ]]"):
        with pytest.raises(
            ValueError, match=r"^data is .*, which is no list of texts; write \[one, other\]$"
        ):
            api.convert("model", "demo", tmp_path, data=broken, overrides=overrides)
