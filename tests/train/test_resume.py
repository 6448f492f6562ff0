"""A run that is killed, interrupted or damaged continues to the very weights of an undisturbed one."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toy import Toy, batches, config

from hybridize.train import TrainConfig, TrainResult, checkpoint, train
from hybridize.train.checkpoint import CorruptCheckpointError


def run(folder: Path, settings: TrainConfig | None = None) -> tuple[Toy, TrainResult]:
    stage = Toy()
    return stage, train(stage, batches, settings or config(), folder, progress=False)


def assert_same_outcome(folder: Path, other: Path) -> None:
    """Weights, best weights and optimizer bit for bit; logs but for the clock."""
    ours, theirs = (
        checkpoint.load_latest(folder / "checkpoints"),
        checkpoint.load_latest(other / "checkpoints"),
    )
    assert ours is not None and theirs is not None
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name
    for name in ("step", "tokens", "best_step", "best_metric", "final_metric", "schedule", "rng", "window"):
        assert ours.state[name] == theirs.state[name], name
    if ours.state["best_step"] is not None:
        best, other_best = (
            checkpoint.load(checkpoint.best_path(path / "checkpoints", ours.state["best_step"]))
            for path in (folder, other)
        )
        for name, tensor in best.tensors.items():
            assert torch.equal(tensor, other_best.tensors[name]), name
    for log in ("train.csv", "validation.csv", "layers.csv"):
        assert rows(folder / log) == rows(other / log), log


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [
            {k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}
            for row in csv.DictReader(file)
        ]


def start(folder: Path, schedule: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "toy.py"
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), schedule],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(("schedule", "kills"), [("plateau", 4), ("cosine", 1)])
def test_killed_at_any_moment_the_weights_are_the_same(schedule: str, kills: int, tmp_path: Path) -> None:
    run(tmp_path / "whole", config(schedule))
    chance = random.Random()
    reached = []
    for _ in range(kills):
        process = start(tmp_path / "killed", schedule)
        assert process.stdout is not None
        for _ in range(
            chance.randint(8, 24)
        ):  # micro-batches: 4 to 12 steps, a checkpoint after every second one
            assert process.stdout.readline() == "micro-batch\n"
        time.sleep(
            chance.uniform(0, 0.03)
        )  # and then anywhere: in a step, in a validation, inside a checkpoint
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        reached.append(max(int(path.name[5:]) for path in checkpoint.steps(tmp_path / "killed/checkpoints")))
    out, error = start(tmp_path / "killed", schedule).communicate()
    assert out.endswith("done\n"), error
    assert reached == sorted(set(reached)) and reached[-1] < 60
    assert_same_outcome(tmp_path / "killed", tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.tmp"))


@pytest.mark.parametrize("stop", [1, 7, 10, 29])
def test_stopping_at_each_kind_of_step(stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two checkpoints, on a validation, on an epoch's boundary and before the end; saved at every step."""
    settings = config(save_every=1, steps=30)
    run(tmp_path / "whole", settings)

    class Stopped(Exception):
        pass

    class Stopping(Toy):
        steps = 0

        def step(self, batch, scale):  # type: ignore[no-untyped-def]
            self.steps += 1
            if self.steps > 2 * stop:
                raise Stopped
            return super().step(batch, scale)

    with pytest.raises(Stopped):
        train(Stopping(), batches, settings, tmp_path / "stopped", progress=False)
    stage, result = run(tmp_path / "stopped", settings)
    assert result.steps == 30
    assert stage.epochs == list(range(stop // 10, 3))
    assert_same_outcome(tmp_path / "stopped", tmp_path / "whole")


def test_how_often_one_saves_or_looks_changes_nothing(tmp_path: Path) -> None:
    often, _ = run(tmp_path / "often", config("cosine", save_every=1, keep_best=False))
    seldom, _ = run(tmp_path / "seldom", config("cosine", save_every=None, eval_every=None, keep_best=False))
    for name, value in often.parameters().items():
        assert torch.equal(value, seldom.parameters()[name])


def test_a_plain_iterable_is_skipped_to_its_place(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole", config(keep_best=False))
    data = [batch for batch, _ in zip(batches(0), range(120), strict=False)]
    stopped = data[:60]
    train(Toy(), stopped, config(keep_best=False), tmp_path / "list", progress=False)
    # the data ended at step 30, which validated and saved; with more data the run goes on
    stage = Toy()
    result = train(stage, data, config(keep_best=False), tmp_path / "list", progress=False)
    assert result.steps == 60
    for name, value in stage.parameters().items():
        assert torch.equal(value, whole.parameters()[name])


def test_a_finished_run_returns_at_once(tmp_path: Path) -> None:
    first, result = run(tmp_path)
    again, second = run(tmp_path)
    assert second.steps == result.steps and second.best_step == result.best_step
    assert (again.validations, second.final_metric) == (0, result.final_metric)
    for name, value in first.parameters().items():
        assert torch.equal(value, again.parameters()[name])


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Interrupted(Toy):
        interrupted = False

        def step(self, batch, scale):  # type: ignore[no-untyped-def]
            result = super().step(batch, scale)
            if not self.interrupted and (tmp_path / "it/checkpoints/step-00000007").exists():
                self.interrupted = True
                os.kill(os.getpid(), signal.SIGINT)
            return result

    settings = config(save_every=7)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(), batches, settings, tmp_path / "it", progress=True)
    out = capfd.readouterr().out
    assert "step 8 is saved" in out and "Continue with: " in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run(tmp_path / "it", settings)
    run(tmp_path / "whole", settings)
    assert_same_outcome(tmp_path / "it", tmp_path / "whole")


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_falls_back(
    how: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if (how, file) == ("flipped", "manifest.json"):
        how = "cut"  # a flipped bit in white space harms nobody
    run(tmp_path / "run", config(steps=12))
    last = checkpoint.steps(tmp_path / "run/checkpoints")[-1]
    damage(last / file, how)
    run(tmp_path / "run", config(steps=12))
    assert str(last / file) in caplog.text
    run(tmp_path / "whole", config(steps=12))
    assert_same_outcome(tmp_path / "run", tmp_path / "whole")


def test_all_checkpoints_damaged_is_an_error(tmp_path: Path) -> None:
    run(tmp_path, config(steps=12))
    for path in checkpoint.steps(tmp_path / "checkpoints"):
        damage(path / "tensors.safetensors", "flipped")
    with pytest.raises(
        CorruptCheckpointError, match=r"step-00000012/tensors.safetensors is damaged.*no sound"
    ) as error:
        run(tmp_path, config(steps=12))
    assert "\n" not in str(error.value)


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    run(tmp_path, config(steps=4))
    with pytest.raises(ValueError, match=r"steps is 8, but .* was trained with 4"):
        run(tmp_path, config(steps=8))
    with pytest.raises(ValueError, match=r"lr is .*Constant.*was trained with .*Plateau"):
        run(tmp_path, config("constant", steps=4))
    run(tmp_path, config(steps=4, log_every=1, save_every=1))


def test_a_changed_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path, config(steps=4))
    stage = Toy()
    stage.last = torch.nn.Parameter(torch.zeros(9, 1))
    with pytest.raises(ValueError, match=r"layers.1.weight has shape \(9, 1\).*\(8, 1\)"):
        train(stage, batches, config(steps=4), tmp_path, progress=False)
