"""Schedules against torch's, AdamW's groups, and gradient norms and clipping."""

import math

import pytest
import torch
from torch import nn

from hybridize.train import Constant, Cosine, Plateau, optim


def test_plateau_follows_torch() -> None:
    torch.manual_seed(0)
    metrics = (1 + torch.rand(200) * torch.linspace(1, 0.2, 200)).tolist()
    ours = Plateau(1e-2, factor=0.3, patience=3, final=1e-5)
    reference = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(reference, factor=0.3, patience=3, min_lr=1e-5, eps=0)
    rates = []
    for metric in metrics:
        ours.observe(metric)
        theirs.step(metric)
        rates.append(ours.lr(0.5))
        assert math.isclose(rates[-1], reference.param_groups[0]["lr"], rel_tol=1e-9)
    assert len({round(rate, 9) for rate in rates}) > 3 and min(rates) == 1e-5


def test_plateau_goes_on_from_its_state() -> None:
    first, second = Plateau(1.0, patience=1), Plateau(1.0, patience=1)
    for metric in (3.0, 4.0):
        first.observe(metric)
    second.load_state_dict(first.state_dict())
    for schedule in (first, second):
        schedule.observe(5.0)
        assert math.isclose(schedule.lr(0), 0.1)


def test_cosine_and_warmup() -> None:
    schedule = Cosine(1.0, warmup=0.2, final=0.1)
    assert [round(schedule.lr(p), 6) for p in (0, 0.1, 0.2, 0.6, 1.0, 1.5)] == [0, 0.5, 1.0, 0.55, 0.1, 0.1]
    assert Constant(3.0).lr(0) == 3.0
    assert Constant(3.0, warmup=0.5).lr(0.25) == 1.5
    assert optim.schedule(0.5) == Constant(0.5)


def test_a_schedule_in_a_configuration_is_not_shared() -> None:
    given = Plateau(1.0)
    optim.schedule(given).observe(1.0)
    assert given.best == math.inf


def test_vectors_do_not_decay() -> None:
    parameters = {"bias": nn.Parameter(torch.zeros(3)), "weight": nn.Parameter(torch.zeros(3, 3))}
    groups = optim.adamw(parameters, weight_decay=0.1).param_groups
    decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decay[parameters["bias"]] == 0 and decay[parameters["weight"]] == 0.1


def test_optimizer_tensors_round_trip() -> None:
    torch.manual_seed(0)

    def make() -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
        parameters = {
            "a": nn.Parameter(torch.ones(3)),
            "b": nn.Parameter(torch.ones(2, 2)),
            "c": nn.Parameter(torch.ones(1)),
        }
        return parameters, optim.adamw(parameters, weight_decay=0.1)

    def step(
        parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW, gradients: dict[str, torch.Tensor]
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.clone()
        optimizer.step()

    first, second = make(), make()
    step(*first, {"a": torch.randn(3), "b": torch.randn(2, 2)})
    for name, parameter in first[0].items():
        second[0][name].data.copy_(parameter.data)
    tensors = {name: tensor.clone() for name, tensor in optim.optimizer_tensors(first[1], first[0]).items()}
    optim.load_optimizer_tensors(second[1], second[0], tensors)
    gradients = {"a": torch.randn(3), "b": torch.randn(2, 2), "c": torch.randn(1)}
    for side in (first, second):
        step(*side, gradients)
    for name, parameter in first[0].items():
        assert torch.equal(parameter, second[0][name])


def test_norms_and_clipping_equal_torch() -> None:
    torch.manual_seed(0)
    parameters = {f"p{i}": nn.Parameter(torch.zeros(i + 1, 3)) for i in range(4)}
    parameters["unused"] = nn.Parameter(torch.zeros(2))
    for i in range(4):
        parameters[f"p{i}"].grad = torch.randn(i + 1, 3) * 10
    copies = [p.grad.clone() for p in parameters.values() if p.grad is not None]
    names, norms = optim.gradient_norms(parameters)
    assert names == ["p0", "p1", "p2", "p3"]
    torch.testing.assert_close(norms, torch.stack([g.norm() for g in copies]))
    total = optim.clip(parameters, norms, 1.0)
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in copies]).norm())
    for name, gradient in zip(names, copies, strict=True):
        torch.testing.assert_close(parameters[name].grad, gradient / (total + 1e-6))
    assert optim.clip(parameters, norms, None) == total


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="parameters is empty"):
        optim.adamw({})
    with pytest.raises(ValueError, match=r"parameter x is torch.bfloat16"):
        optim.adamw({"x": nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))})
    with pytest.raises(ValueError, match=r"parameter x does not require"):
        optim.adamw({"x": nn.Parameter(torch.zeros(1), requires_grad=False)})
    with pytest.raises(ValueError, match="no trainable parameter received a gradient"):
        optim.gradient_norms({"x": nn.Parameter(torch.zeros(1))})
