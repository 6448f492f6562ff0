"""Tasks of lm-eval that a selection names are looked up before anything trains."""

import copy

import pytest
from tests.convert import halo

import hybridize


@pytest.mark.parametrize("probe", ["recall", "knowledge"])
def test_an_unknown_task_is_refused_before_training(probe, teacher, text, tmp_path):
    steps = copy.deepcopy(halo.STEPS)
    steps[1]["select"] = {"rule": "halo", probe: {"lm_eval": ["no_such_task"]}}
    with pytest.raises(ValueError, match=r"steps\[1\].select: .*no_such_task"):
        hybridize.convert(
            str(teacher), halo.recipe(text, steps), tmp_path / "run", device="cpu", progress=False
        )
    assert not list((tmp_path / "run").glob("steps/*"))
