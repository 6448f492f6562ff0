"""HALO from start to end on a tiny teacher: transfer, selection, distillation, long rows; stopped anywhere and gone on with."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.convert import halo
from tests.convert.bench import read, same, weights

import hybridize
from hybridize.convert import compiled, pipeline
from hybridize.convert.distill import DistillStage
from hybridize.convert.selection import Selector
from hybridize.recipe import Recipe, load_recipe
from hybridize.report.schema import load_results
from hybridize.select import Score, scores
from hybridize.train import NonFiniteError

PLAIN = {
    "transfer": "0-transfer",
    "select": "1-select",
    "distill": "2-distill",
    "long_context": "3-long_context",
}


def convert(teacher: Path, text: Path, out: Path, steps=None, *, stop_after=None, **changes) -> Path:
    chosen = halo.recipe(text, steps, **changes)
    return hybridize.convert(str(teacher), chosen, out, device="cpu", stop_after=stop_after, progress=False)


@pytest.fixture(scope="module")
def run(teacher, text, tmp_path_factory) -> Path:
    evaluation = halo.MEASURE | {"control": True}
    return convert(teacher, text, tmp_path_factory.mktemp("halo") / "run", evaluation=evaluation)


def test_the_run_says_what_it_did(run):
    results = load_results(run)
    assert [row.name for row in results.rows] == [
        "teacher", "after transfer", "after select", "after distill", "after long_context", "teacher, same fine-tuning",
    ]  # fmt: skip
    assert not results.rows[1].passkey and all(
        row.passkey for row in results.rows if row.name != "after transfer"
    )
    assert [curve.unit for curve in results.curves] == ["1 x mixer MSE", "KL, nats a token", "nats a token"]
    assert "select by rule uniform: layers 1, 3 keep softmax" in results.notes
    layers = read(run / "steps/0-transfer/layers.json")
    assert all(after < before for before, after in zip(layers["before"], layers["after"], strict=True))
    selection = read(run / "steps/1-select/selection.json")
    assert selection["kept"] == [1, 3] and selection["rule"] == "uniform"
    assert read(run / "run.json")["identity"]["data"]["by_length"].keys() == {"128"}
    matrix, keys = 4 * 8 * 8 * 4, 2 * 65536 * 2 * 8 * 4  # a layer's S of 4 heads; its keys and values of 2
    assert [row.state_bytes[65536] for row in results.rows[1:3]] == [4 * matrix, 2 * matrix + 2 * keys]


def test_the_student_computes_what_the_recipe_says(run, text):
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    loaded, _ = hybridize.load(run, device="cpu")
    attention = [layer.groups[0].attention for layer in loaded.spec.layers]
    assert attention == ["lightning", "softmax", "lightning", "softmax"]
    assert loaded.spec.layers[1].groups[0].logit_scale.base == 500
    batch = halo.batch(text)
    with torch.no_grad():
        assert torch.equal(opened(batch.input_ids_BT).logits, loaded(batch.input_ids_BT).logits)


def test_the_control_is_the_teacher_with_the_same_next_token_steps(run):
    assert [path.name for path in sorted((run / "control" / "steps").iterdir())] == ["0-long_context"]
    ours, control = (read(folder / "run.json")["identity"]["data"] for folder in (run, run / "control"))
    assert all(ours[key] == control[key] for key in ("rows", "fingerprint", "by_length"))
    model, _ = hybridize.load(run / "control", device="cpu")
    assert all(layer.is_softmax for layer in model.spec.layers)


def test_a_finished_run_is_left_alone(run, teacher, text, monkeypatch):
    monkeypatch.setattr(pipeline, "load_teacher", lambda *a, **k: pytest.fail("the teacher was loaded"))
    convert(teacher, text, run, evaluation=halo.MEASURE | {"control": True})


def test_stopping_after_every_step_equals_one_go(run, teacher, text, tmp_path):
    before = None
    for name in PLAIN:
        convert(teacher, text, tmp_path, stop_after=name)
        now = weights(tmp_path)
        assert before is None or not same(before, now)
        before = now
        model, _ = hybridize.load(tmp_path, device="cpu")  # whatever the step, the student so far runs
        kept = sum(layer.is_softmax for layer in model.spec.layers)
        assert kept == (0 if name == "transfer" else 2)
    assert same(weights(tmp_path), weights(run))


def test_finished_steps_are_applied_again_as_they_were(run, teacher, text, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "student.json").unlink()
    shutil.rmtree(copy / "steps/3-long_context")
    convert(teacher, text, copy)
    assert same(weights(copy), weights(run))
    (copy / "student.json").unlink()
    convert(teacher, text, copy)
    assert same(weights(copy), weights(run))


def test_a_damaged_selection_says_what_to_do(run, teacher, text, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "student.json").unlink()
    path = copy / "steps/1-select/selection.json"
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.raises(ValueError, match=r"selection\.json is missing or damaged; remove .*outcome\.json"):
        convert(teacher, text, copy)


def test_a_selection_that_lost_its_outcome_is_made_again_and_no_other(
    run, teacher, text, tmp_path, monkeypatch
):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    outcome = copy / "steps/1-select/outcome.json"
    outcome.unlink()
    other = [halo.STEPS[0], {"select": {"rule": "tail", "keep": 2}}, *halo.STEPS[2:]]
    for lost in (None, copy / "student.json"):
        if lost is not None:
            lost.unlink()
        with pytest.raises(
            ValueError, match=r"steps.*but .* was begun with .*restore it or choose another folder"
        ):
            convert(teacher, text, copy, other)  # what came after it was trained on what it kept
    with monkeypatch.context() as patched:
        patched.setattr(Selector, "run", lambda self, say: [0, 2])
        with pytest.raises(
            ValueError, match=r"trained with other layers on softmax than the selection keeps \(layer 0\)"
        ):
            convert(teacher, text, copy)
    convert(teacher, text, copy)
    assert outcome.is_file() and same(weights(copy), weights(run))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kept_layers_start_as_the_teachers(teacher, text, tmp_path, precision):
    given = [halo.STEPS[0], {"select": {"rule": "given", "layers": [2]}}]
    convert(teacher, text, tmp_path, given, precision=precision)
    ours, theirs = weights(tmp_path), load_file(teacher / "model.safetensors")
    for name, tensor in theirs.items():
        if ".layers.2.self_attn." in name:
            exact = tensor if precision == "fp32" else tensor.bfloat16()
            assert torch.equal(ours[name].float(), exact.float()), name


@dataclass
class Fake:
    """A probe that reads a fixed number from the layer that is replaced."""

    name: str
    values: list[float]
    calls: list[int | None]

    @property
    def identity(self):
        return {"probe": self.name}

    def score(self, model):
        replaced = [i for i, layer in enumerate(model.spec.layers) if not layer.is_softmax]
        with torch.no_grad():  # it runs, whatever the dtypes
            assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
        self.calls.append(replaced[0] if replaced else None)
        return Score(self.values[replaced[0]] if replaced else 0.95, 0.001, 100)


@pytest.fixture
def probes(monkeypatch):
    recall, knowledge = Fake("r", [0.9, 0.5, 0.8, 0.2], []), Fake("c", [0.5, 0.5, 0.4, 0.5], [])
    monkeypatch.setattr(scores, "recall_probe", lambda *a, **k: recall)
    monkeypatch.setattr(scores, "knowledge_probe", lambda *a, **k: knowledge)
    return recall


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_halo_measures_one_replaced_layer_at_a_time(teacher, text, tmp_path, probes, precision):
    steps = [halo.STEPS[0], {"select": {"rule": "halo", "keep": 1}}]
    convert(teacher, text, tmp_path, steps, precision=precision)
    assert probes.calls == [None, 0, 1, 2, 3]
    assert read(tmp_path / "steps/1-select/selection.json")["kept"] == [3]
    model, _ = hybridize.load(tmp_path, device="cpu")
    assert [layer.is_softmax for layer in model.spec.layers] == [False, False, False, True]


def test_knowledge_is_asked_on_the_first_of_several_texts(teacher, text, tmp_path, probes, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("\n\n".join(f"somewhere else {i} " + "word " * 1200 for i in range(60)))
    asked: list[list[str]] = []
    probe = scores.knowledge_probe
    monkeypatch.setattr(
        scores, "knowledge_probe", lambda *a, **k: asked.append(k["documents"]) or probe(*a, **k)
    )
    steps = [halo.STEPS[0], {"select": {"rule": "halo", "keep": 1}}]
    raw = halo.plain(text, steps)
    for sources in ([str(text), str(other)], [str(other), str(text)]):
        raw["data"]["source"] = sources
        chosen = Recipe.from_dict(raw)
        hybridize.convert(str(teacher), chosen, tmp_path / f"run{len(asked)}", device="cpu", progress=False)
    elsewhere = [[document.startswith("somewhere else") for document in documents] for documents in asked]
    assert not any(elsewhere[0]) and all(elsewhere[1]) and elsewhere[0] and elsewhere[1]


def test_a_sweep_that_was_stopped_goes_on(teacher, text, tmp_path, probes, monkeypatch):
    steps = [halo.STEPS[0], {"select": {"rule": "halo", "keep": 2}}]
    score = Fake.score

    def failing(self, model):
        if len(self.calls) == 3 and self.name == "r":
            raise KeyboardInterrupt
        return score(self, model)

    monkeypatch.setattr(Fake, "score", failing)
    with pytest.raises(KeyboardInterrupt):
        convert(teacher, text, tmp_path, steps)
    monkeypatch.setattr(Fake, "score", score)
    probes.calls.clear()
    convert(teacher, text, tmp_path, steps)
    assert probes.calls == [2, 3]
    assert read(tmp_path / "steps/1-select/selection.json")["kept"] == [1, 3]
    by_file = [
        {"select": {"rule": "jet", "keep": 2, "scores": str(tmp_path / "steps/1-select/scores.jsonl")}}
    ]
    convert(teacher, text, tmp_path / "second", by_file)
    assert read(tmp_path / "second/steps/0-select/selection.json")["kept"] == [1, 3]


def test_scores_that_hardly_vary_are_refused_and_stay(teacher, text, tmp_path, probes):
    probes.values = [0.5, 0.5, 0.5, 0.5]
    steps = [halo.STEPS[0], {"select": {"rule": "halo"}}]
    with pytest.raises(ValueError, match=r"^steps\[1\]\.select: recall hardly varies"):
        convert(teacher, text, tmp_path, steps)
    assert len((tmp_path / "steps/1-select/scores.jsonl").read_text().splitlines()) == 6
    trained = (tmp_path / "steps/0-transfer/outcome.json").stat().st_mtime_ns
    steps[1] = {"select": {"rule": "tail", "keep": 1}}
    convert(teacher, text, tmp_path, steps)  # another rule, the same folder
    assert read(tmp_path / "steps/1-select/selection.json")["kept"] == [3]
    assert (tmp_path / "steps/0-transfer/outcome.json").stat().st_mtime_ns == trained
    steps[1] = {"select": {"rule": "uniform", "keep": 2}}
    with pytest.raises(ValueError, match=r"recipe\.steps\[1\]\.select\.rule is 'uniform'"):
        convert(teacher, text, tmp_path, steps)


def test_kl_restores_softmax_layer_by_layer(teacher, text, tmp_path):
    short = {"tokens": 2 * halo.STEP, "lr": 1e-3, "batch": {"rows": 2}, "validation_rows": 2}
    steps = [halo.STEPS[0], {"select": {"rule": "kl", "keep": 2, "distill": short}}]
    convert(teacher, text, tmp_path / "a", steps)
    selection = read(tmp_path / "a/steps/1-select/selection.json")
    losses = [layer["loss"] for layer in selection["by_layer"]]
    assert len(set(losses)) == 4 and selection["kept"] == sorted(sorted(range(4), key=losses.__getitem__)[:2])
    assert not list((tmp_path / "a/steps/1-select").glob("layer-*"))
    convert(teacher, text, tmp_path / "b", [halo.STEPS[0]], spec={"all": halo.LIGHTNING})
    transferred, chosen = weights(tmp_path / "b"), weights(tmp_path / "a")
    moved = tuple(f".layers.{layer}." for layer in selection["kept"])
    for name, tensor in chosen.items():  # the trials left no trace
        if not any(part in name for part in moved):
            assert torch.equal(tensor, transferred[name]), name


def test_more_layers_than_there_are(teacher, text, tmp_path):
    for select in ({"rule": "uniform", "keep": 5}, {"rule": "given", "layers": [1, 7]}):
        with pytest.raises(ValueError, match=r"keep is 5|layer 7"):
            convert(teacher, text, tmp_path, [halo.STEPS[0], {"select": select}])
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("step", [
    {"distill": {"tokens": 4 * halo.STEP, "lora": {"rank": 2}, **halo.FEW}},
    {"distill": {"tokens": 4 * halo.STEP, "lora": {"rank": 2, "merge": False}, **halo.FEW}},
    {"distill": {"tokens": 4 * halo.STEP, "train": "mixers", **halo.FEW}},
    {"long_context": {"tokens": 2 * 2 * halo.STEP, "length": 128, "objective": "kl", **halo.FEW}},
    {"finetune": {"tokens": 4 * halo.STEP, "full": True, **halo.FEW}},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_ways_to_go_on(teacher, text, tmp_path, step, precision):
    steps = [*halo.STEPS[:2], step]
    convert(teacher, text, tmp_path, steps, precision=precision)
    first = weights(tmp_path)
    (tmp_path / "student.json").unlink()
    convert(teacher, text, tmp_path, steps, precision=precision)
    assert same(weights(tmp_path), first)
    model, _ = hybridize.load(tmp_path, device="cpu")
    with torch.no_grad():
        assert model(halo.batch(text).input_ids_BT).logits.isfinite().all()


def test_gradients_that_explode_end_training_with_the_checkpoint_before(teacher, text, tmp_path, monkeypatch):
    """The paper's KDA case: the gradient norm turns infinite after a few steps of distillation."""
    monkeypatch.setattr(pipeline, "SAVE_EVERY_S", 0.0)
    real = DistillStage.step

    def step(self, batch, scale):
        result = real(self, batch, scale)
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 4:
            next(iter(self.parameters().values())).grad.fill_(float("inf"))
        return result

    monkeypatch.setattr(DistillStage, "step", step)
    with pytest.raises(
        NonFiniteError, match=r"distill, step 4: not finite: .*gradient.*step-00000003"
    ) as caught:
        convert(teacher, text, tmp_path)
    assert caught.value.step == 4 and len(str(caught.value).splitlines()) == 1
    checkpoints = tmp_path / "steps/2-distill/checkpoints"
    assert (checkpoints / "best-00000003").is_dir() and (checkpoints / "step-00000003").is_dir()
    monkeypatch.setattr(DistillStage, "step", real)
    convert(teacher, text, tmp_path)  # gone on with from there
    assert (tmp_path / "steps/3-long_context/outcome.json").is_file()


SHIPPED = {"halo-smollm2-135m": "lightning", "halo-qwen3-1.7b": "lightning", "radlads-smollm2-135m": "rwkv7"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_runs(name, teacher, text, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")  # needs no compiler
    changes = {
        "data.source": str(text), "data.name": None, "data.length": 64, "precision": "fp32",
        "evaluation": {"texts": [], "rows": 2, "new_tokens": 2},
    }  # fmt: skip
    for step in load_recipe(name).steps:
        if step.kind == "select":
            changes |= {"select": {"rule": "uniform"}}
            continue
        length = 128 if step.kind == "long_context" else 64
        changes |= {f"{step.kind}.tokens": 3 * 2 * length, f"{step.kind}.batch": {"rows": 2},
                    f"{step.kind}.validation_rows": 2}  # fmt: skip
        if step.kind == "long_context":
            changes["long_context.length"] = length
        if isinstance(step.lr, float):
            changes[f"{step.kind}.schedule"] = {"kind": "constant", "warmup": 1}
    run = hybridize.convert(str(teacher), name, tmp_path, overrides=changes, device="cpu", progress=False)
    model, _ = hybridize.load(run, device="cpu")
    kept = 0 if name.startswith("radlads") else 1
    assert [layer.groups[0].attention for layer in model.spec.layers].count(SHIPPED[name]) == 4 - kept
    assert (run / "report.html").is_file()
