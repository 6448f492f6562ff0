"""Bad input and bad luck: one line that names the field, and nothing lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tests.convert import bench, worker
from tests.convert.bench import weights
from tests.convert.test_kill_and_resume import CONTEXT
from transformers import GPT2Config, LlamaConfig

import hybridize
from hybridize.convert import pipeline
from hybridize.convert.transfer import TransferStage
from hybridize.train import NonFiniteError

TRANSFER = {"transfer": {"tokens": 4 * 64, "batch": {"rows": 2}, "eval_every": 1, "validation_rows": 2}}
FINETUNE = {"finetune": {"tokens": 4 * 64, "batch": {"rows": 2}, "eval_every": 1, "validation_rows": 2}}
SHORT = {"steps": [TRANSFER, FINETUNE]}


def convert(teacher: Path, text: Path, out: Path, changes: dict | None = None, **options) -> Path:
    chosen = bench.recipe(text, SHORT | (changes or {}))
    return hybridize.convert(str(teacher), chosen, out, **{"device": "cpu", "progress": False} | options)


def refusal(call, kind: type[Exception] = ValueError) -> str:
    """The message of a refusal, which must be one line."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and message
    return message


@pytest.fixture(scope="module")
def begun(teacher: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run after transfer."""
    return convert(teacher, text, tmp_path_factory.mktemp("begun") / "run", stop_after="transfer")


@pytest.fixture(scope="module")
def whole(teacher: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, finished."""
    return convert(teacher, text, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "recipe.seed is 1"),
        ({"steps.0.transfer.lr": 0.5}, "recipe.steps[0].transfer.lr is 0.5"),
        ({"steps.1.finetune.lora": {"rank": 2}}, "recipe.steps[1].finetune.lora.rank is 2"),
        ({"spec.all.window.size": 4}, "recipe.spec.all.groups[0].window.size is 4"),
        ({"data.length": 32}, "recipe.data.length is 32"),
    ],
)
def test_a_changed_recipe(run, teacher, text, changes, field):
    said = refusal(lambda: convert(teacher, text, run, changes))
    assert said.startswith(field) and str(run) in said
    convert(teacher, text, run)  # and the run goes on


def test_another_model_and_other_data(run, teacher, text, whole, tmp_path):
    other = bench.write_teacher(tmp_path / "other", seed=1)
    assert refusal(lambda: convert(other, text, run)).startswith("model.name is ")
    copy = Path(shutil.copytree(text, tmp_path / "text"))
    assert "recipe.data.source" in refusal(lambda: convert(teacher, copy, run))
    convert(teacher, text, run)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(run).items())


@pytest.mark.parametrize(
    ("name", "field"), [("train-000", "data.fingerprint"), ("validation-000", "data.validation")]
)
def test_text_that_changed_under_its_name(teacher, text, tmp_path, name, field):
    copy = Path(shutil.copytree(text, tmp_path / "text"))
    step = {"transfer": {"epochs": 1, "batch": {"rows": 64}, "validation_rows": 100}}
    steps = {"steps": [step, FINETUNE]}
    convert(teacher, copy, tmp_path / "run", steps, stop_after="transfer")
    file = copy / f"{name}.txt"
    kept = file.read_text()
    file.write_text("baba " + kept.split(" ", 1)[1])
    assert refusal(lambda: convert(teacher, copy, tmp_path / "run", steps)).startswith(f"{field} is ")
    file.write_text(kept)
    convert(teacher, copy, tmp_path / "run", steps)


def test_weights_that_changed_under_their_name(teacher, text, tmp_path):
    model = Path(shutil.copytree(teacher, tmp_path / "model"))
    convert(model, text, tmp_path / "run", stop_after="transfer")
    bench.write_teacher(model, seed=3)
    assert refusal(lambda: convert(model, text, tmp_path / "run")).startswith("model.fingerprint is ")


def test_recipe_mistakes_are_told_at_once(text):
    raw = bench.plain(text)
    raw["stpes"] = raw["steps"]
    raw["steps"] = [{"tranfer": {"tokens": "20M"}}, {"finetune": {"tokens": "20M", "lora": {"rnk": 3}}}]
    raw["precision"] = "fp23"
    raw["spec"]["all"]["window"]["size"] = 0
    with pytest.raises(hybridize.RecipeError) as caught:
        hybridize.Recipe.from_dict(raw)
    said = caught.value.problems
    for part in (
        "did you mean 'steps'",
        "did you mean 'transfer'",
        "did you mean 'rank'",
        "'fp23'",
        "window.size",
    ):
        assert any(part in problem for problem in said), part
    assert all(len(problem.splitlines()) == 1 for problem in said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec.all.window.size": 32}, "data.length: with 64 tokens no query has a far key"),
        (
            {"steps.0.transfer.train": "mix", "steps.0.transfer.objective": {"against": "linear_only"}},
            "add maps",
        ),
    ],
)
def test_a_recipe_that_cannot_train(text, changes, words):
    assert words in refusal(lambda: bench.recipe(text, changes))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [{"heads": "1/4", "attention": "softmax"}, {"heads": "3/4", **bench.WINDOWED}],
            "whole KV groups of 2",
        ),
        ([{"heads": 2, "attention": "softmax"}, {"heads": 4, **bench.WINDOWED}], "hold 6 query heads"),
    ],
)
def test_head_counts_that_do_not_fit(teacher, text, tmp_path, groups, words):
    assert words in refusal(
        lambda: convert(teacher, text, tmp_path / "run", {"spec": {"all": {"groups": groups}}})
    )
    assert not (tmp_path / "run").exists()


def test_a_layer_that_the_model_has_not(teacher, text, tmp_path):
    changes = {"spec": {"all": bench.WINDOWED, "layers": {"4": {"attention": "softmax"}}}}
    assert "layers 0 to 3" in refusal(lambda: convert(teacher, text, tmp_path / "run", changes))


def test_text_that_is_not_enough(teacher, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "train.txt").write_text("  \n")
    assert "holds no text" in refusal(lambda: convert(teacher, empty, tmp_path / "run"))
    short = bench.write_text(tmp_path / "short", documents=1)
    assert "is no full row" in refusal(
        lambda: convert(teacher, short, tmp_path / "run", {"data.length": 512})
    )
    missing = tmp_path / "nowhere.txt"
    assert "no such file" in refusal(lambda: convert(teacher, missing, tmp_path / "run"))


def test_a_tokenizer_with_more_tokens_than_the_model(text, tmp_path):
    model = bench.write_teacher(tmp_path / "model", extra=100)
    said = refusal(lambda: convert(model, text, tmp_path / "run"))
    assert said.startswith("tokenizer has ids up to 193, but the model's vocab_size is 128")


def test_an_unsupported_family_needs_no_weights(text, tmp_path):
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    said = refusal(lambda: convert(tmp_path / "gpt2", text, tmp_path / "run"))
    assert said.startswith("model_type 'gpt2' cannot be converted") and "families.py" in said
    assert not (tmp_path / "run").exists()


def test_what_a_later_version_will_do(teacher, tmp_path, text):
    shipped = hybridize.load_recipe("lolcats-llama3.1-405b")
    said = refusal(lambda: hybridize.convert(str(teacher), shipped, tmp_path / "run"), hybridize.RecipeError)
    assert "devices: the recipe needs 24 GPUs" in said and "steps[0].transfer.block" in said
    LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99
    ).save_pretrained(tmp_path / "config")
    assert hybridize.plan(str(tmp_path / "config"), shipped).unsupported


def test_a_folder_that_is_no_run_is_left_alone(teacher, text, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("kept")
    said = refusal(lambda: convert(teacher, text, tmp_path))
    assert said.startswith(f"{tmp_path} holds model but no run.json")
    assert (tmp_path / "model" / "precious").read_text() == "kept"
    file = tmp_path / "model" / "precious"
    assert refusal(lambda: convert(teacher, text, file)) == f"out is '{file}', a file; name a folder"
    before = sorted(path.name for path in teacher.iterdir())
    assert "which holds a model" in refusal(lambda: convert(teacher, text, teacher))
    assert sorted(path.name for path in teacher.iterdir()) == before


def test_a_hybrid_is_no_teacher(whole, text, tmp_path):
    assert "is a hybrid already" in refusal(lambda: convert(whole / "model", text, tmp_path / "run"))
    assert "has no config.json" in refusal(lambda: convert(whole, text, tmp_path / "run"))


@pytest.mark.parametrize("device", ["cuad", "cuda:99"])
def test_a_device_that_is_not_there(teacher, text, tmp_path, device):
    assert refusal(lambda: convert(teacher, text, tmp_path, device=device)).startswith(
        f"device is '{device}'"
    )
    assert refusal(lambda: hybridize.load(teacher, device=device)).startswith(f"device is '{device}'")


@pytest.mark.parametrize("stop_after", ["distill", "7"])
def test_a_step_that_is_not_there(teacher, text, tmp_path, stop_after):
    said = refusal(lambda: convert(teacher, text, tmp_path / "run", stop_after=stop_after))
    assert said == f"stop_after is '{stop_after}'; the recipe's steps are 0 or transfer, 1 or finetune"


def test_a_step_that_is_there_twice(teacher, text, tmp_path):
    said = refusal(
        lambda: convert(teacher, text, tmp_path / "run", {"steps": [TRANSFER] * 2}, stop_after="transfer")
    )
    assert "0 (transfer), 1 (transfer)" in said


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("steps/0-transfer/trained.safetensors", "truncate"),
        ("steps/0-transfer/trained.safetensors", "remove"),
        ("steps/1-finetune/adapter/adapter_model.safetensors", "truncate"),
        ("steps/1-finetune/adapter", "remove"),
        ("steps/0-transfer/outcome.json", "truncate"),
    ],
)
def test_a_damaged_outcome_is_named_and_made_again(whole, teacher, text, tmp_path, name, damage):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    expected = weights(run)
    (run / "student.json").unlink()  # as if killed before the student was saved
    file = run / name
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-20])
    elif file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink()
    said = refusal(lambda: convert(teacher, text, run))
    assert name in said and "remove" in said
    (file.parents[1] if "adapter_" in name else file.parent).joinpath("outcome.json").unlink()
    convert(teacher, text, run)
    assert all(torch.equal(value, expected[key]) for key, value in weights(run).items())


@pytest.mark.parametrize("content", ["{", "3", "[]", "{}", "\udcff"])
def test_a_broken_run_json(run, teacher, text, content):
    kept = (run / "run.json").read_bytes()
    (run / "run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert str(run / "run.json") in refusal(lambda: convert(teacher, text, run))
    (run / "run.json").write_bytes(kept)
    convert(teacher, text, run)


def test_a_damaged_student_is_named_and_written_again(whole, teacher, text, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    file = run / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    said = refusal(lambda: hybridize.load(run, device="cpu"))
    assert str(run / "model") in said and "student.json" in said
    shutil.rmtree(run / "model")
    (run / "student.json").unlink()
    convert(teacher, text, run)
    hybridize.load(run, device="cpu")


def test_a_loss_that_is_not_finite(teacher, text, tmp_path):
    steps = [{"transfer": TRANSFER["transfer"] | {"tokens": 8 * 128, "lr": 1e30, "eval_every": 100}}]
    spec = {"all": bench.WINDOWED | {"feature_map": {"kind": "t2r"}}}
    said = refusal(lambda: convert(teacher, text, tmp_path, {"steps": steps, "spec": spec}), NonFiniteError)
    assert said.startswith("transfer, step ") and "layers.0." in said
    steps = [TRANSFER, {"finetune": FINETUNE["finetune"] | {"tokens": 8 * 128, "lr": 1e30}}]
    said = refusal(lambda: convert(teacher, text, tmp_path / "b", {"steps": steps}), NonFiniteError)
    assert said.startswith("finetune, step ") and ("layers." in said or "validation loss" in said)
    assert (tmp_path / "b" / "steps/0-transfer/outcome.json").is_file()


def limited(arguments: list[str], log: Path, limit: int) -> tuple[int, str]:
    process = CONTEXT.Process(target=worker.size_limited, args=(arguments, str(log), limit))
    process.start()
    process.join()
    return process.exitcode, worker.text_of(log)


@pytest.mark.parametrize("limit", [9_000, 40_000, 120_000])
def test_a_full_disk_while_saving(teacher, text, whole, tmp_path, limit):
    """The limits stop a checkpoint of transfer, one of finetune, and the student in model/."""
    recipe, run, log = tmp_path / "mine.yaml", tmp_path / "run", tmp_path / "log"
    recipe.write_text(yaml.safe_dump(bench.plain(text, SHORT)))
    arguments = ["convert", str(teacher), "-r", str(recipe), "-o", str(run), "--device", "cpu"]
    code, said = limited(arguments, log, limit)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 2 and "Traceback" not in said and len(errors) == 1
    assert "no room to write" in errors[0] and str(run) in errors[0]
    assert not list(run.rglob("*.tmp")) and not (run / "model").exists()
    convert(teacher, text, run)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(run).items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "seed=1"], "recipe.seed is 1"),
        (["--set", "spec.all.window.size=0"], "window.size is 0"),
        (["--set", "spec.all.window.sise=4"], "did you mean 'size'"),
        (["--data", "nowhere.txt"], "no such file"),
        (["--stop-after", "distill"], "stop_after is 'distill'"),
        (["--device", "cuad"], "device is 'cuad'"),
    ],
)
def test_the_command_ends_in_one_line(run, teacher, text, tmp_path, monkeypatch, capsys, arguments, words):
    from hybridize.cli import main

    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump(bench.plain(text, SHORT)))
    full = [
        "hybridize",
        "convert",
        str(teacher),
        "-r",
        str(recipe),
        "-o",
        str(run),
        "--device",
        "cpu",
        *arguments,
    ]
    monkeypatch.setattr("sys.argv", full)
    with pytest.raises(SystemExit) as ended:
        main.run()
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert ended.value.code == 2 and len(lines) == 1 and words in lines[0] and "Traceback" not in said


def test_checkpoints_are_kept_when_a_step_fails(teacher, text, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "SAVE_EVERY_S", 0.0)
    step = TRANSFER["transfer"] | {"tokens": 24 * 128, "eval_every": 100}
    fail = {"count": 0}
    real = TransferStage.step

    def failing(self, batch, scale):
        fail["count"] += 1
        result = real(self, batch, scale)
        if fail["count"] == 10:
            result.loss = result.loss * float("nan")
        return result

    monkeypatch.setattr(TransferStage, "step", failing)
    said = refusal(lambda: convert(teacher, text, tmp_path, {"steps": [{"transfer": step}]}), NonFiniteError)
    assert "step-00000009" in said and (tmp_path / "steps/0-transfer/checkpoints/step-00000009").is_dir()
    convert(teacher, text, tmp_path, {"steps": [{"transfer": step}]})
    assert json.loads((tmp_path / "steps/0-transfer/outcome.json").read_text())["steps"] == 24
