"""The loop: token-weighted accumulation, budgets, epochs, the best checkpoint, what is not finite, and its logs."""

import builtins
import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Toy, batch_at, batches, config

from hybridize.train import Constant, NonFiniteError, Plateau, StepResult, TrainConfig, checkpoint, train


class Mean(Toy):
    """The toy without noise, in float64: its loss is a plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.bias = (
            nn.Parameter(p.detach().double()) for p in (self.first, self.last, self.bias)
        )

    def step(self, batch: tuple[Tensor, Tensor], scale: float) -> StepResult:
        x, y = (value.double() for value in batch)
        error = (self.output(x) - y).square()
        (error.sum() * scale).backward()
        return StepResult(error.detach().sum(), len(x), {"half": error.detach().mean() / 2})

    def validate(self) -> dict[str, float]:
        return {"loss": 1.0}


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_accumulated_micro_batches_equal_the_concatenated_batch(tmp_path: Path) -> None:
    """Micro-batches of 2, 3, 4, 5 and 6 tokens weigh by their tokens, in the gradient, the loss and the metrics."""
    parts = [[batch_at(5 * step + i) for i in range(5)] for step in range(6)]
    joined = [tuple(torch.cat(values) for values in zip(*step, strict=True)) for step in parts]
    settings: dict[str, Any] = dict(steps=6, lr=Constant(0.05), log_every=1, eval_every=None, clip=0.5)
    outcomes = []
    for name, data, micro_batches in (("parts", itertools.chain(*parts), 5), ("joined", joined, 1)):
        stage = Mean()
        train(stage, data, config(**settings, micro_batches=micro_batches), tmp_path / name, progress=False)
        outcomes.append((stage, rows(tmp_path / name / "train.csv")))
    for ours, theirs in zip(
        outcomes[0][0].parameters().values(), outcomes[1][0].parameters().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(outcomes[0][1], outcomes[1][1], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for name in ("loss", "half", "grad_norm"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-6)


def test_a_step_in_which_nothing_counts_changes_nothing(tmp_path: Path) -> None:
    empty = (torch.zeros(0, 4), torch.zeros(0))
    data = [batch_at(3), batch_at(4), empty, empty, batch_at(5), empty]
    stage = Mean()
    result = train(stage, data, config("constant", steps=3, eval_every=None), tmp_path / "a", progress=False)
    other = Mean()
    train(
        other,
        [batch_at(3), batch_at(4), batch_at(5)],
        config("constant", steps=2, eval_every=None),
        tmp_path / "b",
        progress=False,
    )
    assert result.steps == 3 and result.tokens == sum(len(x) for x, _ in data)
    for ours, theirs in zip(stage.parameters().values(), other.parameters().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_stage_that_counts_differently_is_refused(tmp_path: Path) -> None:
    class Wrong(Toy):
        def count(self, batch: Any) -> int:
            return 1

    with pytest.raises(ValueError, match=r"counted 2 tokens in step\(\) and 1 in count\(\)"):
        train(Wrong(), batches, config(), tmp_path, progress=False)


def test_token_budget_and_epochs(tmp_path: Path) -> None:
    stage = Toy()
    data = ((torch.ones(5, 4), torch.ones(5)) for _ in itertools.count())
    result = train(
        stage,
        data,
        config(steps=None, tokens=95, epoch_steps=None, epoch_tokens=40),
        tmp_path,
        progress=False,
    )
    assert (result.steps, result.tokens) == (10, 100)
    assert stage.epochs == [0, 1, 2]


def test_training_ends_with_its_data(tmp_path: Path) -> None:
    result = train(Toy(), [batch_at(i) for i in range(7)], config(), tmp_path / "run", progress=False)
    assert result.steps == 4  # three full steps and one of a single micro-batch
    with pytest.raises(ValueError, match="batches is empty"):
        train(Toy(), [], config(), tmp_path / "empty", progress=False)


class Worsening(Toy):
    """Validates best after the second validation."""

    def validate(self) -> dict[str, float]:
        self.validations += 1
        return {"perplexity": abs(self.validations - 2.0) + 1, "accuracy": 0.5}


def test_the_best_parameters_are_restored(tmp_path: Path) -> None:
    stage, last = Worsening(), Worsening()
    result = train(
        stage, batches, config("constant", steps=20, monitor="perplexity"), tmp_path / "best", progress=False
    )
    settings = config("constant", steps=20, monitor="perplexity", keep_best=False)
    other = train(last, batches, settings, tmp_path / "last", progress=False)
    assert (result.best_step, result.best_metric, result.final_metric, result.restored) == (
        10,
        1.0,
        3.0,
        "best",
    )
    assert (other.best_step, other.restored) == (10, "final")
    best = checkpoint.load(tmp_path / "best/checkpoints/best-00000010")
    final = checkpoint.load(tmp_path / "last/checkpoints/step-00000020")
    for name, value in stage.parameters().items():
        assert torch.equal(value, best.tensors[name])
        assert torch.equal(last.parameters()[name], final.tensors[f"parameters/{name}"])
        assert not torch.equal(value, last.parameters()[name])
    assert sorted(path.name for path in (tmp_path / "best/checkpoints").iterdir()) == [
        "best-00000010",
        "step-00000018",
        "step-00000020",
    ]
    assert json.loads((tmp_path / "best/result.json").read_text())["best_step"] == 10


def test_plateau_lowers_the_rate(tmp_path: Path) -> None:
    settings = config(lr=Plateau(0.1, patience=1), steps=30, monitor="perplexity", log_every=1)
    train(Worsening(), batches, settings, tmp_path, progress=False)
    rates = {int(row["step"]): float(row["lr"]) for row in rows(tmp_path / "train.csv")}
    assert rates[20] == 0.1 and rates[21] == pytest.approx(0.01) and rates[30] == pytest.approx(0.01)


def test_an_unknown_monitor_names_the_metrics(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"monitor is 'loss': validation gives accuracy, perplexity"):
        train(Worsening(), batches, config(), tmp_path, progress=False)


class Breaking(Toy):
    """From step 8 on, the last layer's gradient, the loss or one layer's error is not finite."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.calls = what, 0

    def step(self, batch: tuple[Tensor, Tensor], scale: float) -> StepResult:
        result = super().step(batch, scale)
        self.calls += 1
        if self.calls < 15:
            return result
        if self.what == "gradient":
            self.last.grad[0] = float("inf")  # type: ignore[index]
        else:
            result.loss = torch.tensor(float("nan"))
            result.metrics["layers/nmse"][1] = float("nan")  # type: ignore[index]
        return result

    def check(self) -> str:
        return "attention of layer 1"


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    stage = Breaking("gradient")
    with pytest.raises(NonFiniteError) as caught:
        train(stage, batches, config(save_every=7), tmp_path, progress=False)
    error = caught.value
    assert (error.step, error.parameters) == (8, ["layers.1.weight"])
    for part in (
        "toy, step 8",
        "gradient in layers.1.weight (1 of 3",
        "attention of layer 1",
        "step-00000007",
    ):
        assert part in str(error)
    assert "\n" not in str(error)
    kept = checkpoint.load_latest(tmp_path / "checkpoints")
    assert kept is not None and kept.state["step"] == 7
    for name, value in stage.parameters().items():
        assert torch.equal(value, kept.tensors[f"parameters/{name}"])  # the bad step was not taken


def test_a_loss_that_is_not_finite_names_the_layer(tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteError, match=r"step 8: not finite: loss nan; layers/nmse is not finite from layer 1 on"
    ):
        train(Breaking("loss"), batches, config(), tmp_path, progress=False)


def test_a_validation_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    class Bad(Toy):
        def validate(self) -> dict[str, float]:
            return {"loss": float("nan")}

    with pytest.raises(NonFiniteError, match=r"step 5: not finite: validation loss is nan; .*step-00000004"):
        train(Bad(), batches, config(), tmp_path, progress=False)


def test_late_detection_names_the_first_bad_step(tmp_path: Path) -> None:
    """On an accelerator the check waits for the next log line; the norms kept until then still tell step and parameter."""
    from hybridize.train.loop import _Run

    run = _Run(Toy(), config(), tmp_path)
    names = ["a", "b", "c"]
    for step, bad in ((3, ()), (4, ()), (5, (1, 2)), (6, (0, 1, 2))):
        norms = torch.ones(3)
        norms[list(bad)] = float("nan")
        run.pending.append((step, names, torch.tensor(1.0), norms))
    with pytest.raises(NonFiniteError) as caught:
        run.check_finite()
    assert (caught.value.step, caught.value.parameters) == (5, ["b", "c"])


def test_logs(tmp_path: Path) -> None:
    train(Toy(), batches, config(steps=7), tmp_path, progress=False)
    log = rows(tmp_path / "train.csv")
    assert list(log[0]) == [
        "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds", "absolute",
    ]  # fmt: skip
    assert [row["step"] for row in log] == ["3", "6", "7"]
    assert [row["step"] for row in rows(tmp_path / "validation.csv")] == ["5", "7"]
    layers = rows(tmp_path / "layers.csv")
    assert [(row["step"], row["metric"], row["layer"]) for row in layers[:2]] == [
        ("3", "layers/nmse", "0"),
        ("3", "layers/nmse", "1"),
    ]
    assert float(log[1]["tokens_per_second"]) > 0


def test_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(Toy(), batches, config(steps=6, tensorboard=True), tmp_path, progress=False)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "validation/loss", "train/layers/nmse/001"} <= set(events.Tags()["scalars"])


def test_without_tensorboard_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level("INFO", "hybridize.train"):
        train(Toy(), batches, config(steps=2, tensorboard=True), tmp_path, progress=False)
    assert [record.message for record in caplog.records if "TensorBoard" in record.message] == [
        "TensorBoard is not installed (pip install tensorboard): the logs are CSV only"
    ]


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is None and tokens is None"):
        TrainConfig()
    with pytest.raises(ValueError, match="micro_batches is 0"):
        TrainConfig(steps=1, micro_batches=0)
    with pytest.raises(ValueError, match="eval_every is None: a plateau"):
        TrainConfig(steps=1, lr=Plateau(0.1), eval_every=None)


def test_a_total_norm_that_overflows_is_found_though_every_gradient_is_finite(tmp_path: Path) -> None:
    from hybridize.train.loop import _Run

    run = _Run(Toy(), config(), tmp_path)
    run.pending.append((4, ["a", "b"], torch.tensor(1.0), torch.tensor([3e38, 3e38])))
    with pytest.raises(NonFiniteError, match="step 4: not finite: loss 1; gradient norm inf"):
        run.check_finite()
