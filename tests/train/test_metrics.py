"""Windows of token-weighted means, CSV logs that survive kills, and the progress display off a terminal."""

from pathlib import Path

import pytest
import torch

from hybridize.train.metrics import CsvLog, Display, Window, worst_layers


def test_window_weighs_by_tokens() -> None:
    window = Window()
    for mean, tokens in ((1.0, 1), (4.0, 3)):
        window.add("scalar", mean * tokens, tokens)
        window.add("vector", torch.tensor([mean, 2 * mean]) * tokens, tokens)
    assert window.read() == {"scalar": 3.25, "vector": [3.25, 6.5]}
    assert window.read() == {}


def test_window_goes_on_from_its_state() -> None:
    window, other = Window(), Window()
    window.add("x", torch.tensor(3.0), 2)
    other.load(*window.state(), torch.device("cpu"))
    for side in (window, other):
        side.add("x", torch.tensor(1.0), 2)
        assert side.read() == {"x": 1.0}


def test_csv_is_cut_to_a_step_and_drops_half_a_line(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv")
    log.append([{"step": step, "loss": 0.5} for step in range(1, 6)])
    with open(log.path, "a") as file:
        file.write("6,0.")
    log = CsvLog(log.path)
    log.cut(3)
    assert log.path.read_text() == "step,loss\n1,0.5\n2,0.5\n3,0.5\n"
    log.append([{"step": 4, "loss": 1.0, "extra": 7}])
    assert log.path.read_text() == "step,loss,extra\n1,0.5,\n2,0.5,\n3,0.5,\n4,1.0,7\n"
    again = CsvLog(log.path)
    again.append([{"step": 5, "extra": 1}])
    assert log.path.read_text().endswith("4,1.0,7\n5,,1\n")


def test_worst_layers() -> None:
    assert worst_layers([0.1, 0.5, 0.2, 0.4]) == "mean 0.3, worst L1 0.5  L3 0.4  L2 0.2"


def test_off_a_terminal_plain_lines_appear(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("transfer", 10, 2, enabled=True, unit="steps", interval=0) as display:
        display.show({"loss": 0.25, "lr": 0.01, "tokens_per_second": 1234.0, "layers/nmse": [0.1, 0.5]})
        display.advance(4)
    first = capsys.readouterr().out.splitlines()[0]
    for part in (
        "transfer 4/10 steps",
        "loss 0.25",
        "lr 0.01",
        "1,234 tokens/s",
        "s left",
        "layers/nmse: mean 0.3, worst L1 0.5",
    ):
        assert part in first


def test_a_quiet_display_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("transfer", 10, 0, enabled=False, unit="steps", interval=0) as display:
        display.show({"loss": 0.25, "lr": 0.01})
        display.advance(4)
        display.say("hello")
    assert capsys.readouterr().out == ""
