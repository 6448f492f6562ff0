"""The console script in this process."""

import sys

import pytest

from hybridize.cli.main import run as console_script


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run the console script in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hybridize", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            console_script()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call
