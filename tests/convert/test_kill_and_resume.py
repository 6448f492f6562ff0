"""kill -9 at any moment, the same command again: the weights of an uninterrupted run, bit for bit."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.convert import bench, worker
from tests.convert.bench import same, weights

import hybridize

STEPS = [
    {"transfer": {"tokens": 30 * 4 * 64, "batch": {"rows": 4, "micro": 2}, "eval_every": 7, "validation_rows": 2,
                  "schedule": {"kind": "plateau", "patience": 1}}},
    {"finetune": {"tokens": 24 * 4 * 64, "batch": {"rows": 4}, "eval_every": 6, "validation_rows": 2, "lr": 0.01,
                  "lora": {"dropout": 0.1}}},
]  # fmt: skip
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.convert.worker"])


@pytest.fixture(scope="module")
def job(teacher: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe file, and a run of it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("job")
    evaluation = {"texts": [], "rows": 2, "new_tokens": 2}
    raw = bench.plain(text, {"steps": STEPS, "evaluation": evaluation})
    (folder / "mine.yaml").write_text(yaml.safe_dump(raw))
    hybridize.convert(str(teacher), folder / "mine.yaml", folder / "whole", device="cpu", progress=False)
    return folder / "mine.yaml", folder / "whole"


def start(arguments: list[str], log: Path, save_every_s: float = 0.1) -> multiprocessing.Process:
    process = CONTEXT.Process(target=worker.run, args=(arguments, str(log), save_every_s))
    process.start()
    return process


def command(teacher: Path, recipe: Path, run: Path) -> list[str]:
    return ["convert", str(teacher), "-r", str(recipe), "-o", str(run), "--device", "cpu"]


def wait_for(condition: Callable[[], bool], process: multiprocessing.Process, log: Path) -> bool:
    """Whether `condition` came true while the process lived."""
    began = time.monotonic()
    while process.is_alive() and time.monotonic() - began < 60:
        if condition():
            return True
        time.sleep(0.002)
    assert not process.is_alive(), worker.text_of(log)
    return False


def newest_checkpoint(step: Path) -> int:
    """The optimizer step from which a kill now would go on; 0 without a checkpoint."""
    return max((int(path.name.split("-")[1]) for path in step.glob("checkpoints/step-*")), default=0)


def test_kill_9_at_any_moment(job, teacher, tmp_path, capsys):
    recipe, whole = job
    run, log = tmp_path / "run", tmp_path / "log"
    steps = run / "steps"

    def checkpoints(name: str, at_least: int) -> Callable[[], bool]:
        return lambda: len(list((steps / name / "checkpoints").glob("step-*"))) >= at_least

    moments: dict[str, Callable[[], bool]] = {
        "in transfer, before a checkpoint": lambda: (steps / "0-transfer" / "layers.json").exists(),
        "in transfer": checkpoints("0-transfer", 2),
        "between the steps": lambda: (steps / "0-transfer" / "trained.safetensors").exists(),
        "in finetune": checkpoints("1-finetune", 1),
        "in finetune again": checkpoints("1-finetune", 2),
        "while saving": lambda: bool(list(run.glob(".model.*.tmp"))),
    }
    seed = time.time_ns()
    drawn, killed = random.Random(seed), []
    for name, moment in moments.items():
        process = start(command(teacher, recipe, run), log)
        if wait_for(moment, process, log):
            time.sleep(drawn.uniform(0, 0.08))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            newest = {folder.name: newest_checkpoint(folder) for folder in sorted(steps.glob("*-*"))}
            killed.append(f"{name} {newest}")
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), worker.text_of(log)
    with capsys.disabled():
        print(f"\nkilled (seed {seed}): {'; '.join(killed)}")
    assert len(killed) >= 3
    process = start(command(teacher, recipe, run), log)
    process.join()
    assert process.exitcode == 0, worker.text_of(log)
    assert same(weights(run), weights(whole))
    assert not list(run.rglob("*.tmp"))
    assert (run / "results.json").is_file() and (run / "report.html").is_file()


def test_ctrl_c_names_the_command_that_goes_on(job, teacher, tmp_path):
    recipe, whole = job
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(command(teacher, recipe, run), log, save_every_s=60)
    assert wait_for(lambda: (run / "steps/0-transfer/validation.csv").exists(), process, log)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    said = worker.text_of(log)
    assert process.exitcode == 130 and "Traceback" not in said
    assert f"hybridize convert {teacher} -r {recipe} -o {run}" in said and "is saved" in said
    process = start(command(teacher, recipe, run), log)
    process.join()
    assert process.exitcode == 0 and same(weights(run), weights(whole))


def test_ctrl_c_outside_training_says_it_too(job, teacher, tmp_path):
    recipe, _ = job
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(command(teacher, recipe, run), log)
    assert wait_for(lambda: (run / "run.json").exists(), process, log)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    said = worker.text_of(log)
    assert process.exitcode == 130 and "Traceback" not in said
    assert "same command" in said or "Continue with" in said


def test_a_folder_in_use_is_refused(job, teacher, tmp_path):
    recipe, _ = job
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(command(teacher, recipe, run), log)
    try:
        assert wait_for(lambda: (run / "steps/0-transfer").exists(), process, log)
        with pytest.raises(ValueError, match="is in use by another conversion"):
            hybridize.convert(str(teacher), recipe, run, device="cpu", progress=False)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("damage", ["step-", "best-"])
def test_a_damaged_checkpoint_falls_back_or_says_so(job, teacher, tmp_path, damage):
    recipe, whole = job
    run, log = tmp_path / "run", tmp_path / "log"
    folder = run / "steps/0-transfer/checkpoints"
    process = start(command(teacher, recipe, run), log)
    assert wait_for(
        lambda: bool(list(folder.glob("step-*")) and list(folder.glob(f"{damage}*"))), process, log
    )
    process.kill()
    process.join()
    newest = max(folder.glob(f"{damage}*"))
    tensors = newest / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    process = start(command(teacher, recipe, run), log)
    process.join()
    said = worker.text_of(log)
    assert "Traceback" not in said
    if process.exitcode == 0:
        assert same(weights(run), weights(whole))
    else:
        assert str(tensors) in said
