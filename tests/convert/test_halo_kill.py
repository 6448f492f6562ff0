"""kill -9 in and between the steps of HALO, the same command again: the weights of an uninterrupted run, bit for bit."""

import os
import signal

import pytest
import yaml
from tests.convert import bench, halo, worker
from tests.convert.bench import same, weights
from tests.convert.test_kill_and_resume import command, start, wait_for

import hybridize

MORE = {"batch": {"rows": 4, "micro": 2}, "eval_every": 5, "validation_rows": 2}
STEPS = [
    {"transfer": {"tokens": 20 * 4 * bench.LENGTH, "train": "mixer", **MORE}},
    {"select": {"rule": "uniform", "keep": "1/4"}},
    {"distill": {"tokens": 20 * 4 * bench.LENGTH, **MORE}},
    {"long_context": {"tokens": 12 * 4 * 2 * bench.LENGTH, "length": 2 * bench.LENGTH, **MORE}},
]


@pytest.fixture(scope="module")
def job(teacher, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "mine.yaml").write_text(yaml.safe_dump(halo.plain(text, STEPS)))
    hybridize.convert(str(teacher), folder / "mine.yaml", folder / "whole", device="cpu", progress=False)
    return folder / "mine.yaml", folder / "whole"


def test_kill_9_in_and_between_the_steps(job, teacher, tmp_path, capsys):
    recipe, whole = job
    run, log = tmp_path / "run", tmp_path / "log"
    steps = run / "steps"

    def checkpoint(name):
        return lambda: bool(list((steps / name / "checkpoints").glob("step-*")))

    moments = {
        "in transfer": checkpoint("0-transfer"),
        "after transfer": lambda: (steps / "0-transfer/trained.safetensors").exists(),
        "after select": lambda: (steps / "1-select/selection.json").exists(),
        "in distill": checkpoint("2-distill"),
        "after distill": lambda: (steps / "2-distill/trained.safetensors").exists(),
        "in long_context": checkpoint("3-long_context"),
    }
    killed = []
    for name, moment in moments.items():
        # a hundredth of a second: float32 masters are saved five times less often
        process = start(command(teacher, recipe, run), log, save_every_s=0.01)
        wait_for(moment, process, log)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            killed.append(name)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), worker.text_of(log)
    with capsys.disabled():
        print(f"\nkilled {', '.join(killed)}")
    assert len(killed) >= 4
    process = start(command(teacher, recipe, run), log)
    process.join()
    assert process.exitcode == 0, worker.text_of(log)
    assert same(weights(run), weights(whole))
    assert not list(run.rglob("*.tmp"))
