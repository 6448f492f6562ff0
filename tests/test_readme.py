"""The README cannot rot: every command of its bash blocks runs here, the long ones scaled down as `SCALED` says.

A `make` target is checked with `make -n`. A command that is neither cheap nor listed fails the test.
"""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hybridize
from hybridize.cli.main import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def scaled(*steps):
    """Overrides that leave each of these training steps one row of text."""
    keys = [f"{step}.{key}" for step in steps for key in ("tokens=512", "batch.rows=1", "validation_rows=1")]
    keys += ["data.length=256", "evaluation=null", "precision=fp32"]  # many CPUs are slow in bf16
    return [*(part for key in keys for part in ("--set", key)), "--device", "cpu"]


# What a command runs as: extra arguments that scale it down, on a recipe's own keys where it trains. The first that begins
# the command counts.
SCALED: dict[str, list[str]] = {
    "hybridize convert": scaled("transfer", "finetune"),
    "hybridize eval": ["--tasks", "perplexity", "--samples", "1", "--lengths", "256", "--device", "cpu"],
    "hybridize diagnose": ["--rows", "2", "--length", "144", "--device", "cpu"],
    "hybridize generate": ["--max-new-tokens", "4", "--device", "cpu"],
    "hybridize chat": ["--max-new-tokens", "4", "--device", "cpu"],
}
AS_WRITTEN = {"hybridize recipes", "hybridize plan"}
# These load the real teacher; they run in order, the later on what the first one made.
NEEDS_TEACHER = {*(" ".join(command.split()[:2]) for command in SCALED), "hybridize plan"}


def commands(text):
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def kind(command):
    return " ".join(shlex.split(command, comments=True)[:2])


HYBRIDIZE = [command for command in commands(README) if command.startswith("hybridize ")]
CHEAP = [command for command in HYBRIDIZE if kind(command) not in NEEDS_TEACHER]
HEAVY = [command for command in HYBRIDIZE if kind(command) in NEEDS_TEACHER]
MAKE = [command for command in commands(README) if command.startswith("make ")]


def test_every_command_of_the_readme_is_known():
    known = set(HYBRIDIZE) | set(MAKE)
    assert [command for command in commands(README) if command not in known] == []
    assert {kind(command) for command in HYBRIDIZE} <= NEEDS_TEACHER | AS_WRITTEN
    assert CHEAP and HEAVY and MAKE


def call(command, monkeypatch, tmp_path):
    arguments = shlex.split(command, comments=True)[1:]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n/exit\n"))
    extra = next((extra for start, extra in SCALED.items() if command.startswith(start)), [])
    monkeypatch.setattr(sys, "argv", ["hybridize", *arguments, *extra])
    with pytest.raises(SystemExit) as ended:
        run()
    assert not ended.value.code, f"{command} ended with {ended.value.code}"


@pytest.mark.parametrize("command", CHEAP)
def test_cheap_command_runs(command, monkeypatch, tmp_path):
    call(command, monkeypatch, tmp_path)


@pytest.mark.parametrize("command", MAKE)
def test_make_target_exists(command):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.teacher
def test_commands_on_the_real_teacher_run_in_order(monkeypatch, tmp_path):
    for command in HEAVY:
        call(command, monkeypatch, tmp_path)


def test_files_that_the_readme_names_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
    tree = re.search(r"^src/hybridize/\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)[1]
    for name in re.findall(r"^  (\S+)", tree, flags=re.MULTILINE):
        assert (ROOT / "src" / "hybridize" / name).exists(), name


def test_python_names_of_the_readme_exist():
    for name in re.findall(r"hybridize\.([a-z_]+)\(", README):
        assert hasattr(hybridize, name), name
