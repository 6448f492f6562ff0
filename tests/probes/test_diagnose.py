"""`diagnose` end to end: on converted tiny runs, on plain teachers, and on the real teacher with a branch forced off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.convert import bench
from typer.testing import CliRunner

import hybridize
from hybridize.cli.main import app
from hybridize.evals.offline import TaskResult
from hybridize.models.surgery import hybridize_model
from hybridize.probes.entries import Measured, points
from hybridize.recipe import Recipe
from hybridize.report.diagnosis import load_diagnosis

SEPARATE = {
    "attention": "windowed_linear",
    "window": {"kind": "sliding", "size": 8},
    "normalizer": {"kind": "separate", "gate": 0.5},
}
EVALUATION = {"texts": [], "rows": 2, "new_tokens": 2, "control": True}


@pytest.fixture(scope="module")
def run(teacher, text, tmp_path_factory):
    raw = bench.plain(
        text, {"spec.all": SEPARATE, "evaluation": EVALUATION, "steps.0.transfer.train": "maps"}
    )
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return hybridize.convert(str(teacher), Recipe.from_dict(raw), folder, device="cpu", progress=False)


def diagnose(*runs, out, **options):
    options = {
        "rows": 4,
        "length": bench.LENGTH,
        "passkey": [],
        "tasks": 0,
        "device": "cpu",
        "progress": False,
    } | options
    return hybridize.diagnose(list(runs), out, **options)


@pytest.fixture(scope="module")
def diagnosis(run, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("diagnosis")
    return diagnose(run, out=out, texts=[str(text)], heads=1), out


def models_of(diagnosis):
    return {model.name: model for model in diagnosis.runs[0].models}


def test_everything_is_measured_and_written(diagnosis, teacher, text):
    found, out = diagnosis
    (entry,) = found.runs
    names = [model.name for model in entry.models]
    assert names[:2] == [str(teacher), "tiny"]
    assert {
        "softmax_only, zero",
        "softmax_only, renormalize",
        "far_only, zero",
        "linear_only, zero",
        "none, zero",
    } < set(names)
    assert names[-2] == "teacher, window of the same bytes" and names[-1] == "teacher, same fine-tuning"
    assert load_diagnosis(out) == found
    page = (out / "report.html").read_text()
    assert entry.verdict.sentence.split(":")[0] in page and "http" not in page.replace(
        "http://www.w3.org", ""
    )
    assert entry.recipe == "recipe" and entry.gain[0].stage == "1-finetune" and len(entry.gain[0].steps) == 2
    assert entry.layers is not None and len(entry.layers.loss_rise) == 4 and len(entry.layers.heads[0]) == 4
    assert entry.need[str(text)].tokens == entry.student.texts[str(text)].far_tokens > 50


def test_the_control_holds_as_many_bytes(diagnosis):
    models = models_of(diagnosis[0])
    (control,) = (model for name, model in models.items() if name == "teacher, window of the same bytes")
    assert 0.8 < control.state_bytes[65536] / models["tiny"].state_bytes[65536] <= 1
    assert models["softmax_only, zero"].state_bytes == models["tiny"].state_bytes


def test_deltas_are_differences_of_losses(diagnosis, text):
    models = models_of(diagnosis[0])
    student = models["tiny"].texts[str(text)]
    assert (student.far_delta.value, student.far_delta.low, student.far_delta.high) == (0, 0, 0)
    for model in models.values():
        entry = model.texts[str(text)]
        assert entry.far_delta.value == pytest.approx(entry.far_nll - student.far_nll, abs=1e-9)
        far, need = entry.far_tokens, diagnosis[0].runs[0].need[str(text)]
        if 0 < need.useful_share < 1:
            share = need.useful_share
            parts = share * entry.useful_delta.value + (1 - share) * entry.other_delta.value
            assert parts == pytest.approx(entry.far_delta.value, abs=1e-6) and far == need.tokens
    assert models["none, zero"].texts[str(text)].delta.value != 0


def test_the_window_is_held_against_the_students_loss_on_the_same_tokens(diagnosis, text):
    verdict = diagnosis[0].runs[0].verdict
    loss = models_of(diagnosis[0])["tiny"].texts[str(text)].far_nll
    assert any(f"beside a loss of {loss:.3f}" in reason for reason in verdict.reasons)
    cost, unused = verdict.figures["window"], verdict.thresholds["window_unused_share"] * loss
    expected = "unused" if cost.high < unused else "used" if cost.low >= unused else "inconclusive"
    assert verdict.window == expected


def test_a_plain_teacher_has_nothing_to_remove(teacher, text, tmp_path):
    found = diagnose(teacher, out=tmp_path, texts=[str(text)])
    (entry,) = found.runs
    assert entry.verdict.linear == entry.verdict.window == "not_applicable"
    for model in entry.models:
        delta = model.texts[str(text)].delta
        assert (delta.value, delta.low, delta.high) == (0, 0, 0)


def test_a_control_run_of_ours_has_nothing_to_remove_either(run, text, tmp_path):
    found = diagnose(run / "control", out=tmp_path, texts=[str(text)])
    assert found.runs[0].verdict.linear == "not_applicable"
    ablated = models_of(found)["softmax_only, zero"].texts[str(text)].delta
    assert (ablated.value, ablated.low, ablated.high) == (0, 0, 0)


def test_a_checkpoint_without_its_run_stands_in_for_its_teacher(run, text, tmp_path):
    copy = shutil.copytree(run / "model", tmp_path / "copy")
    found = diagnose(copy, out=tmp_path / "out", texts=[str(text)], quick=True)
    assert any("stand in for it" in note for note in found.runs[0].notes)
    assert [model.kind for model in found.runs[0].models[:2]] == ["teacher", "student"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"all": {"attention": "lightning"}, "layers": {"1": {"attention": "softmax"}}}, "No layer has both"),
        (
            {
                "all": {
                    "groups": [
                        {"attention": "lightning", "heads": "1/2"},
                        {"attention": "softmax", "heads": "1/2", "position": "none"},
                    ]
                }
            },
            "stand in different heads",
        ),
    ],
)
def test_hybrids_of_whole_layers_and_of_heads_have_no_branch_to_bypass(teacher, text, tmp_path, spec, said):
    step = {"transfer": {"tokens": 256, "train": "mixer", "batch": {"rows": 2}, "validation_rows": 2}}
    raw = bench.plain(text) | {"spec": spec, "steps": [step]}
    run = hybridize.convert(
        str(teacher), Recipe.from_dict(raw), tmp_path / "run", device="cpu", progress=False
    )
    found = diagnose(run, out=tmp_path / "out", texts=[str(text)], scope="all", quick=True)
    verdict = found.runs[0].verdict
    assert verdict.linear == "not_applicable" and said in verdict.sentence
    names = {model.name for model in found.runs[0].models}
    assert "teacher, window of the same bytes" in names


def test_several_runs_side_by_side(run, text, tmp_path):
    extended = hybridize.extend(run, tmp_path / "wider", window="sliding:12", mix=0.3)
    found = diagnose(run, extended, out=tmp_path / "out", texts=[str(text)], quick=True)
    assert [entry.name for entry in found.runs] == ["tiny", str(extended)]
    assert "sliding 12" in found.runs[1].spec and "sliding 8" in found.runs[0].spec
    with pytest.raises(ValueError, match="exists"):
        hybridize.extend(run, tmp_path / "wider", window="sliding:12")


def test_the_command_line_fails_on_a_verdict_that_was_asked_for(run, text, tmp_path):
    command = ["diagnose", str(run), "--quick", "-o", str(tmp_path), "--texts", str(text), "--rows", "4"]
    command += ["--length", str(bench.LENGTH), "--device", "cpu"]
    plain = CliRunner().invoke(app, command)
    assert plain.exit_code == 0, plain.output
    label = json.loads((tmp_path / "report.json").read_text())["runs"][0]["verdict"]["linear"]
    assert label in plain.output
    other = "weak" if label != "weak" else "bypassed"
    assert CliRunner().invoke(app, [*command, "--fail-on", other]).exit_code == 0
    assert CliRunner().invoke(app, [*command, "--fail-on", other, "--fail-on", label]).exit_code == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 1}, "rows is 1"),
        ({"scope": "some"}, "scope is 'some'"),
        ({"texts": ["no such text"]}, "no such text"),
        ({"window": "sliding"}, "write sliding:64"),
        ({"window": "sliding:8", "mix": 2.0}, "mix is 2.0"),
        ({"mix": 0.5}, "no window is given"),
    ],
)
def test_wrong_input_is_named(run, text, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        diagnose(run, out=tmp_path, **{"texts": [str(text)]} | options)


def test_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="runs is empty"):
        hybridize.diagnose([], tmp_path)


@pytest.mark.slow  # five minutes on one thread: pytest -m slow tests/probes
@pytest.mark.teacher
@pytest.mark.parametrize(("gate", "linear"), [(1.0, "bypassed"), (0.0, None)])
def test_a_branch_of_the_real_teacher_that_is_forced_off_is_seen(gate, linear, tmp_path):
    """g = 1 leaves the linear branch no weight, g = 0 the window none, but for the first 64 queries, which have no far keys and
    pass on what they saw: later tokens then miss a little of the window too, on some texts more than the verdict's bound."""
    model, tokenizer = hybridize.load("smollm2-135m", device="cpu")
    spec = {"attention": "windowed_linear", "window": {"kind": "sliding", "size": 64},
            "normalizer": {"kind": "separate", "gate": gate}, "feature_map": {"features": 16}}  # fmt: skip
    hybrid = hybridize_model(model, hybridize.HybridSpec.model_validate({"all": spec}))
    hybrid.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    del model, hybrid
    torch.manual_seed(0)
    found = diagnose(tmp_path / "model", out=tmp_path, texts=["docstrings"], quick=True, rows=3, length=384)
    (entry,) = found.runs
    if linear is None:
        assert entry.verdict.figures["window"].value < 0.5  # 4.9 to 5.6 in conversions that use it
        return
    assert entry.verdict.window == "used"
    assert entry.verdict.linear == linear
    removed = models_of(found)["softmax_only, zero"].texts["docstrings"].far_delta
    assert (removed.value, removed.low, removed.high) == (0, 0, 0)
    assert all(rise is None or abs(rise.value) < 1e-6 for rise in entry.layers.loss_rise)


def test_tasks_of_lm_eval_give_delta_la_in_points_and_recovered_performance(run, text, tmp_path):
    pytest.importorskip("lm_eval")
    local = Path(__file__).parents[1] / "evals" / "local_tasks"
    found = diagnose(
        run, out=tmp_path, texts=[str(text)], quick=True, harness=["arc_easy"], include_path=local, limit=8
    )
    (entry,) = found.runs
    models = models_of(found)
    assert {name for name, model in models.items() if model.tasks} >= {"tiny", "softmax_only, zero"}
    student, without = (models[name].tasks["arc_easy"].accuracy for name in ("tiny", "softmax_only, zero"))
    reason = entry.verdict.reasons[-1]
    assert reason.startswith(
        f"lm-eval tasks: AVG {100 * student:.1f} with the linear branch, {100 * without:.1f} without"
    )
    assert "recovered performance" in reason
    delta = entry.verdict.figures["delta_LA, lm-eval tasks (points)"]
    assert delta.value == pytest.approx(100 * (student - without)) and delta.low <= delta.value <= delta.high


def test_averages_are_paired_and_weigh_tasks_alike():
    def results(*scores):
        return Measured(
            {}, tasks=[TaskResult(f"t{i}", sum(s), len(s), 0.5, "far", s) for i, s in enumerate(scores)]
        )

    student, without = results((1, 1, 1, 0), (1, 0)), results((1, 0, 1, 0), (0, 0))
    (found,) = points(student, without, results((1, 1, 1, 1), (1, 1)))
    assert (found.student, found.without, found.teacher) == (62.5, 25.0, 100.0)
    assert found.delta.value == 37.5 and found.delta.tokens == 6
    assert found.delta.low <= 37.5 <= found.delta.high and "62.5% of the teacher's" in found.sentence
    (same,) = points(student, student, None)
    assert (same.delta.value, same.delta.low, same.delta.high) == (0, 0, 0)


def test_a_text_that_has_changed_since_training_is_noted(run, text, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (usual,) = diagnose(copy, out=tmp_path / "a", texts=[str(text)], quick=True).runs[0].notes
    assert usual.startswith("teacher, window of the same bytes: ")
    record = json.loads((copy / "run.json").read_text())
    record["identity"]["data"]["validation"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(record))
    note, _ = diagnose(copy, out=tmp_path / "b", texts=[str(text)], quick=True).runs[0].notes
    assert "may have been trained on" in note
    values = hybridize.evaluate(
        copy, tasks=["perplexity"], texts=[str(text)], lengths=[32], samples=2, device="cpu"
    ).to_dict()
    assert values["note"] == note
