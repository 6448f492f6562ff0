"""A whole conversion: what the run folder holds, that every stage helps, and that its parts agree."""

import os
from pathlib import Path

import pytest
import torch
from tests.convert import bench
from tests.convert.bench import read, same, weights

import hybridize
from hybridize.convert import pipeline
from hybridize.convert.budget_notes import budget_notes
from hybridize.report.schema import load_results

EVALUATION = {"texts": [], "rows": 4, "passkey": [96], "samples": 2, "control": True, "new_tokens": 4}


@pytest.fixture(scope="module")
def run(teacher: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = bench.recipe(text, {"evaluation": EVALUATION})
    return hybridize.convert(
        str(teacher), chosen, tmp_path_factory.mktemp("runs") / "run", device="cpu", progress=False
    )


def test_the_run_folder_holds_what_its_docstring_says(run):
    for name in (
        "recipe.yaml", "run.json", "student.json", "evaluations.json", "results.json", "report.html",
        "model/config.json", "model/model.safetensors", "model/tokenizer.json", "control/results.json",
        "steps/0-transfer/trained.safetensors", "steps/0-transfer/outcome.json", "steps/0-transfer/config.json",
        "steps/0-transfer/train.csv", "steps/1-finetune/adapter/adapter_model.safetensors",
        "steps/1-finetune/outcome.json", "steps/1-finetune/validation.csv",
    ):  # fmt: skip
        assert (run / name).is_file(), name
    assert not (run / "adapter").exists()  # it is merged
    record = read(run / "run.json")
    assert record["identity"]["recipe"]["seed"] == 42 and record["versions"]["torch"] == torch.__version__


def test_every_stage_helps(run):
    layers = read(run / "steps" / "0-transfer" / "layers.json")
    assert all(after < before for before, after in zip(layers["before"], layers["after"], strict=True))
    rows = [line.split(",") for line in (run / "steps/1-finetune/validation.csv").read_text().splitlines()]
    column = rows[0].index("loss")
    assert float(rows[-1][column]) < float(rows[1][column])
    by_name = {row.name: row for row in load_results(run).rows}
    (name,) = by_name["teacher"].perplexity
    assert by_name["after LoRA"].perplexity[name].perplexity < by_name["swapped"].perplexity[name].perplexity


def test_results_fit_the_schema_and_name_every_milestone(run):
    results = load_results(run)
    assert [(row.name, row.kind) for row in results.rows] == [
        ("teacher", "teacher"),
        ("swapped", "stage"),
        ("after transfer", "stage"),
        ("after LoRA", "stage"),
        ("teacher, same fine-tuning", "control"),
    ]
    assert [entry["name"] for entry in read(run / "evaluations.json")] == [row.name for row in results.rows]
    assert [curve.unit for curve in results.curves] == ["1000 x output MSE", "nats a token"]
    assert results.layers is not None and len(results.layers.after) == 4
    assert all(row.passkey[96].samples == 2 for row in results.rows)
    assert "<html" in (run / "report.html").read_text()


def test_the_control_reads_the_text_of_the_student(run):
    ours, control = (read(folder / "run.json")["identity"]["data"] for folder in (run, run / "control"))
    assert ours == control


def test_the_student_opens_through_auto_classes_and_equals_load(run, teacher, text):
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    loaded, tokenizer = hybridize.load(run, device="cpu")
    ids = bench.batch(text).input_ids_BT
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, loaded(ids).logits)
    assert type(opened) is type(loaded) is hybridize.HybridForCausalLM
    assert len(tokenizer) == len(bench.tokenizer())


def test_a_finished_run_is_left_alone(run, teacher, text, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    monkeypatch.setattr(pipeline, "load_teacher", lambda *a, **k: pytest.fail("the teacher was loaded"))
    hybridize.convert(
        str(teacher), bench.recipe(text, {"evaluation": EVALUATION}), run, device="cpu", progress=False
    )
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")} == before


def test_stopping_and_going_on_equals_one_go(run, teacher, text, tmp_path):
    chosen = bench.recipe(text)
    hybridize.convert(str(teacher), chosen, tmp_path, device="cpu", stop_after="transfer", progress=False)
    assert (
        read(tmp_path / "student.json") == {"after_step": 0} and not (tmp_path / "steps/1-finetune").exists()
    )
    assert not same(weights(tmp_path), weights(run))
    hybridize.convert(str(teacher), chosen, tmp_path, device="cpu", progress=False)
    assert same(weights(tmp_path), weights(run))
    # going on never goes back: the finished student stays
    hybridize.convert(str(teacher), chosen, tmp_path, device="cpu", stop_after="0", progress=False)
    assert same(weights(tmp_path), weights(run)) and read(tmp_path / "student.json") == {"after_step": 1}


def test_no_control_before_the_last_step(teacher, text, tmp_path):
    chosen = bench.recipe(text, {"evaluation": EVALUATION | {"passkey": [], "rows": 2}})
    hybridize.convert(str(teacher), chosen, tmp_path, device="cpu", stop_after="transfer", progress=False)
    assert [row.name for row in load_results(tmp_path).rows] == ["teacher", "swapped", "after transfer"]
    assert not (tmp_path / "control").exists()


def test_a_changed_evaluation_is_measured_again_and_trains_nothing(teacher, text, tmp_path):
    few = EVALUATION | {"passkey": [], "rows": 2, "control": False}
    changes = {"steps": [bench.RECIPE["steps"][0]], "evaluation": few}
    hybridize.convert(str(teacher), bench.recipe(text, changes), tmp_path, device="cpu", progress=False)
    trained = (tmp_path / "steps/0-transfer/outcome.json").stat().st_mtime_ns
    first = load_results(tmp_path)
    changes["evaluation"] = few | {"rows": 5, "prompts": ["baba deba"]}
    hybridize.convert(str(teacher), bench.recipe(text, changes), tmp_path, device="cpu", progress=False)
    second = load_results(tmp_path)
    (name,) = first.texts
    assert [row.name for row in first.rows] == [row.name for row in second.rows]
    assert second.rows[0].perplexity[name].tokens > first.rows[0].perplexity[name].tokens
    assert [generation.prompt for generation in second.generations] == ["baba deba"]
    assert (tmp_path / "steps/0-transfer/outcome.json").stat().st_mtime_ns == trained


def test_a_budget_larger_than_the_text_is_told_in_epochs(teacher, text, tmp_path, caplog):
    few = {"texts": [], "rows": 2, "new_tokens": 1}
    step = {"transfer": {"tokens": 256 * bench.LENGTH, "batch": {"rows": 64}, "validation_rows": 2}}
    hybridize.convert(
        str(teacher), bench.recipe(text, {"steps": [step], "evaluation": few}), tmp_path, device="cpu",
        progress=False,
    )  # fmt: skip
    (note,) = (note for note in load_results(tmp_path).notes if "epochs" in note)
    rows = read(tmp_path / "run.json")["identity"]["data"]["rows"]
    assert note.startswith("steps[0].transfer: 16,384 tokens are") and f"{256 / rows:.3g} epochs" in note
    assert note in caplog.text


def test_bf16_on_a_cpu_that_is_slow_at_it_is_told(teacher, text, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for precision in ("bf16", "fp32"):
        caplog.clear()
        recipe = bench.recipe(text, {"precision": precision})
        hybridize.convert(
            str(teacher), recipe, tmp_path / precision, stop_after="0", progress=False, device="cpu"
        )
        assert ("precision is bf16, which this CPU" in caplog.text) == (precision == "bf16")


def test_a_budget_smaller_than_one_batch_is_told(teacher, text, tmp_path, caplog):
    few = {"tokens": 3 * bench.LENGTH, "validation_rows": 2}
    steps = [{"transfer": few | {"batch": {"rows": 4}}}, {"finetune": few | {"batch": {"rows": 3}}}]
    changes = {"steps": steps, "evaluation": {"texts": [], "rows": 2, "new_tokens": 1}}
    hybridize.convert(str(teacher), bench.recipe(text, changes), tmp_path, device="cpu", progress=False)
    (note,) = (note for note in load_results(tmp_path).notes if "batch" in note)
    assert note == (
        "steps[0].transfer: 192 tokens are less than one batch of 4 x 64, so the stage is one optimizer step on 256; lower "
        "batch.rows, or give more tokens"
    )
    assert note in caplog.text
    assert read(tmp_path / "steps/0-transfer/outcome.json")["steps"] == 1


@pytest.mark.parametrize(("warmup", "told"), [(0, False), (2, False), (3, True), (9, True)])
def test_a_warmup_that_does_not_end_is_told(text, warmup, told):
    step = {
        "tokens": 3 * 4 * bench.LENGTH,
        "batch": {"rows": 4},
        "lr": {"cosine": [1e-3, 1e-4], "warmup": warmup},
    }
    said = budget_notes(bench.recipe(text, {"steps": [{"transfer": step}]}))
    assert bool(said) == told
    if told:
        assert said == [
            f"steps[0].transfer: its warm-up of {warmup} optimizer steps does not end within the stage's 3, so the rate asked for "
            "is never reached; lower warmup, or give more tokens"
        ]


def test_an_epoch_is_the_whole_text_whatever_another_step_reads(text):
    epochs = {"finetune": {"epochs": 1, "batch": {"rows": 4}}}
    few = {"transfer": {"tokens": bench.LENGTH}}
    assert pipeline._corpus_tokens(bench.recipe(text, {"steps": [few, epochs]})) is None
    assert pipeline._corpus_tokens(bench.recipe(text, {"steps": [few]})) == bench.LENGTH
    assert pipeline._corpus_tokens(bench.recipe(text, {"steps": []})) == bench.LENGTH


def test_the_same_model_by_another_path_continues(teacher, text, tmp_path):
    chosen = bench.recipe(text, {"steps": [bench.RECIPE["steps"][0]]})
    hybridize.convert(str(teacher), chosen, tmp_path, device="cpu", progress=False)
    hybridize.convert(os.path.relpath(teacher), chosen, tmp_path, device="cpu", progress=False)


def test_what_takes_long_is_said_on_stderr(teacher, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(tmp_path / "cache"))
    few = {"texts": [], "rows": 2, "new_tokens": 1}
    chosen = bench.recipe(text, {"steps": [], "evaluation": few})
    hybridize.convert(str(teacher), chosen, tmp_path / "loud", device="cpu")
    said = capsys.readouterr().err.splitlines()
    assert {"tokenising train text ...", "measuring teacher ...", "measuring swapped ..."} <= set(said)
    hybridize.convert(str(teacher), chosen, tmp_path / "quiet", device="cpu", progress=False)
    assert "measuring" not in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["phi3", "gemma2", "smollm3"])
def test_other_families(model_type, text, tmp_path):
    """Fused qkv; softcaps, windows and tied embeddings; layers without RoPE: through every step and back from disk."""
    model = bench.write_teacher(tmp_path / "model", model_type, tied=model_type == "gemma2")
    changes = {
        "precision": "bf16",
        "steps.0.transfer.objective": {"output_mse": 1000, "weight_ce": 1},
        "steps.1.finetune.tokens": 512,
        "steps.1.finetune.activation_checkpointing": True,
    }
    run = hybridize.convert(
        str(model), bench.recipe(text, changes), tmp_path / "run", device="cpu", progress=False
    )
    layers = read(run / "steps" / "0-transfer" / "layers.json")
    assert sum(layers["after"]) < sum(layers["before"])
    with torch.no_grad():
        logits = hybridize.load(run, device="cpu")[0](bench.batch(text).input_ids_BT).logits
    assert logits.isfinite().all()


def test_a_swap_alone(teacher, text, tmp_path):
    hybridize.convert(str(teacher), bench.recipe(text, {"steps": []}), tmp_path, device="cpu", progress=False)
    model, _ = hybridize.load(tmp_path, device="cpu")
    assert isinstance(model, hybridize.HybridForCausalLM)
