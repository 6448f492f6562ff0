"""Scores from lm-eval tasks: by name, in [0, 1], and for a model with a layer swapped in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.evals.ruler_models import make_tokenizer
from tests.models.hybrids import KEPT, hybrid

from hybridize.evals.harness import run_harness
from hybridize.select.scores import scores_from_harness
from hybridize.select.sweep import sweep

pytest.importorskip("lm_eval")
FOLDER = Path(__file__).parents[1] / "evals" / "local_tasks"
LIGHTNING = {
    "attention": "lightning",
    "position": "rope",
    "qk_norm": True,
    "output_norm": True,
    "output_gate": True,
}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    import datasets
    from lm_eval import evaluator

    monkeypatch.setattr(
        evaluator, "add_env_info", lambda results: None
    )  # seconds go into describing the machine
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_a_sweep_by_harness_tasks(tmp_path):
    """Generation too (`continue`), which needs the cache of the layers that are there."""
    tokenizer = make_tokenizer()
    teacher = hybrid({"all": KEPT}, vocab_size=512)
    student = hybrid({"all": {**LIGHTNING, "heads": "expand"}}, vocab_size=512)
    recall = scores_from_harness(tokenizer, ["continue"], include_path=FOLDER, limit=3)
    knowledge = scores_from_harness(tokenizer, ["arc_easy:acc_norm", "lights"], include_path=FOLDER, limit=4)
    found = sweep(teacher, student.mixers, recall, knowledge, tmp_path)
    direct = run_harness(teacher, tokenizer, ["arc_easy:acc_norm", "lights"], include_path=FOLDER, limit=4)
    assert found.teacher is not None and found.teacher.knowledge is not None
    assert found.teacher.knowledge.value == pytest.approx(direct.average / 100)
    assert [part.name for part in found.teacher.knowledge.parts] == ["arc_easy", "lights"]
    for entry in found.layers:
        assert entry.recall is not None and 0 <= entry.recall.value <= 1 and entry.recall.samples == 3
        assert entry.knowledge is not None and 0 <= entry.knowledge.value <= 1
        assert entry.knowledge.standard_error is not None


def test_no_tasks_are_refused_at_once():
    with pytest.raises(ValueError, match="tasks is"):
        scores_from_harness(make_tokenizer(), [], include_path=FOLDER)
