"""Help answers at once: no verb's help may pull in a heavy library."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hybridize.cli.main import app

VERBS = ["demo", "recipes", "plan", "convert", "eval", "generate", "chat"]


def test_help_names_every_verb():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for verb in VERBS:
        assert f" {verb} " in result.output


@pytest.mark.parametrize("verb", [*VERBS, "recipes list", "recipes show", "recipes copy", "recipes schema"])
def test_verb_help(verb):
    result = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert result.exit_code == 0 and "Usage" in result.output
    assert "''" not in result.output  # an example in brackets, taken for markup


def test_no_help_imports_a_heavy_library():
    program = f"""
import sys
import hybridize
from typer.testing import CliRunner
from hybridize.cli.main import app
for arguments in [[], *([verb] for verb in {VERBS!r})]:
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0
heavy = {{"torch", "transformers", "datasets", "matplotlib", "peft", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_no_verb_shows_help():
    result = CliRunner().invoke(app, [])
    assert "Usage" in result.output
