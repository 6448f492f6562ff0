"""Sweeps: the layer that is swapped in is the one that is measured, all is as before afterwards, a cut sweep goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from tests.models.hybrids import KEPT, LINEAR, hybrid, tokens
from torch import nn

from hybridize.select import Score, choose, load_scores
from hybridize.select.journal import Journal
from hybridize.select.rows import Row
from hybridize.select.scores import TokenProbe
from hybridize.select.sweep import kl_sweep, swapped, sweep

L = 3
ROWS = [Row(tuple(ids), tuple(range(1, len(ids)))) for ids in tokens(3, 24).tolist()]
PROBE = TokenProbe({"probe": "rows", "seed": 0}, {"rows": {24: ROWS}})


@dataclass
class Fingers:
    """A probe that counts its calls and scores by the hidden states, so that any change of the model shows."""

    identity: dict = field(default_factory=lambda: {"probe": "fingers", "samples": 3})
    calls: int = 0
    fail_at: int | None = None

    def score(self, model) -> Score:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        with torch.no_grad():
            hidden, _ = model.hidden_states(tokens(2, 20))
        return Score(hidden.double().abs().sum(-1).frac().mean().item(), 0.001, 40)


@pytest.fixture
def teacher():
    return hybrid("softmax", layers=L)


@pytest.fixture
def student():
    return hybrid("linear", layers=L)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_every_layer_is_measured_with_its_candidate(tmp_path, teacher, student):
    found = sweep(teacher, student.mixers, Fingers(), PROBE, tmp_path)
    assert found.teacher == type(found.teacher)(None, Fingers().score(teacher), PROBE.score(teacher))
    for layer, entry in enumerate(found.layers):
        mixed = hybrid({"all": KEPT, "layers": {str(layer): LINEAR}}, layers=L)
        mixed.mixers[layer].load_state_dict(student.mixers[layer].state_dict())
        assert entry.layer == layer
        assert entry.recall == Fingers().score(mixed) and entry.knowledge == PROBE.score(mixed)
    assert len({entry.recall.value for entry in [*found.layers, found.teacher]}) == L + 1


def test_both_models_are_as_before_bit_for_bit(tmp_path, teacher, student):
    teacher.eval()
    student.train()
    mixers, candidates, spec = teacher.mixers, student.mixers, teacher.spec
    before = state(teacher), state(student)
    progress = []
    sweep(teacher, candidates, Fingers(), PROBE, tmp_path, progress=lambda *step: progress.append(step))
    assert progress == [(i + 1, L + 1) for i in range(L + 1)]
    assert all(a is b for a, b in zip(teacher.mixers, mixers, strict=True))
    assert all(a is b for a, b in zip(student.mixers, candidates, strict=True))
    assert same(before[0], state(teacher)) and same(before[1], state(student))
    assert teacher.spec is spec and not teacher.training
    assert all(module.training for mixer in candidates for module in mixer.modules())


def test_swapped_says_so_and_generates(teacher, student):
    expected = hybrid({"all": KEPT, "layers": {"1": LINEAR}}, layers=L)
    expected.mixers[1].load_state_dict(student.mixers[1].state_dict())
    prompt = tokens(2, 9)
    with swapped(teacher, 1, student.mixers[1]):
        assert teacher.spec == expected.spec
        assert torch.equal(
            teacher.generate(prompt, max_new_tokens=6, do_sample=False),
            expected.generate(prompt, max_new_tokens=6, do_sample=False),
        )


def test_the_original_comes_back_after_errors(tmp_path, teacher, student):
    mixers, before = teacher.mixers, state(teacher)
    with pytest.raises(KeyboardInterrupt):
        sweep(teacher, student.mixers, Fingers(fail_at=3), PROBE, tmp_path)
    assert all(a is b for a, b in zip(teacher.mixers, mixers, strict=True)) and same(before, state(teacher))
    student.mixers[2].o_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 2 with its candidate: the model gives NaN"):
        sweep(teacher, student.mixers, PROBE, PROBE, tmp_path / "other")
    assert all(a is b for a, b in zip(teacher.mixers, mixers, strict=True)) and same(before, state(teacher))


@pytest.mark.parametrize("cut", ["", '{"layer": 1, "recall": {"val', "\x00\x00"])
def test_a_cut_sweep_goes_on(tmp_path, teacher, student, cut):
    whole = sweep(teacher, student.mixers, Fingers(), PROBE, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        sweep(teacher, student.mixers, Fingers(fail_at=3), PROBE, tmp_path)
    path = tmp_path / "scores.jsonl"
    assert len(path.read_text().splitlines()) == 3  # identity, teacher, layer 0
    with pytest.raises(ValueError, match="lacks layers 1, 2 of 3"):
        load_scores(tmp_path)
    with open(path, "a") as file:
        file.write(cut)
    probe = Fingers()
    assert sweep(teacher, student.mixers, probe, PROBE, tmp_path) == whole and probe.calls == 2
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert sweep(teacher, student.mixers, probe, PROBE, tmp_path) == whole and probe.calls == 2
    assert load_scores(tmp_path) == whole


def test_changed_settings_are_refused_or_start_anew(tmp_path, teacher, student, caplog):
    first = sweep(teacher, student.mixers, Fingers(), PROBE, tmp_path)
    other = Fingers({"probe": "fingers", "samples": 4})
    with pytest.raises(ValueError, match="made with other recall; use another folder, or restart=True"):
        sweep(teacher, student.mixers, other, PROBE, tmp_path)
    next(student.mixers[1].groups.parameters()).data.add_(0.1)
    with pytest.raises(ValueError, match="other candidates, recall"):
        sweep(teacher, student.mixers, other, PROBE, tmp_path)
    assert load_scores(tmp_path) == first and other.calls == 0
    again = sweep(teacher, student.mixers, other, PROBE, tmp_path, restart=True)
    assert "discarded" in caplog.text and other.calls == L + 1
    assert again.layers[1] != first.layers[1] and again.layers[0] == first.layers[0]


def test_ranking_from_the_file_equals_ranking_from_the_sweep(tmp_path, teacher, student):
    found = sweep(teacher, student.mixers, Fingers(), PROBE, tmp_path)
    for rule in ("halo", "jet"):
        chosen = choose(rule, L, 2, scores=found)
        chosen.save(tmp_path / f"{rule}.json")
        for source in (tmp_path, tmp_path / "scores.jsonl", tmp_path / f"{rule}.json"):
            assert choose(rule, L, 2, scores=source).to_dict() == chosen.to_dict()


def test_what_does_not_fit_is_named(tmp_path, teacher, student):
    with pytest.raises(ValueError, match="candidates has 2 layers; the model has 3"):
        sweep(teacher, student.mixers[:2], PROBE, PROBE, tmp_path)
    with pytest.raises(ValueError, match=r"candidates\[0\] was made for layer 2"):
        sweep(teacher, student.mixers[::-1], PROBE, PROBE, tmp_path)
    with pytest.raises(ValueError, match="teacher computes linear in layer 0"):
        sweep(student, student.mixers, PROBE, PROBE, tmp_path)
    assert not (tmp_path / "scores.jsonl").exists()


class Training:
    """A distillation that moves every parameter of the model it is given and loses by where softmax is."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.seen, self.before = losses, [], []

    def __call__(self, model) -> float:
        kinds = [mixer.spec.groups[0].attention for mixer in model.mixers]
        (layer,) = [i for i, kind in enumerate(kinds) if kind == "softmax"]
        self.seen.append(layer)
        self.before.append(state(model))
        model.train().requires_grad_(True)
        model(tokens(2, 12), labels=tokens(2, 12), use_cache=False).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 if parameter.grad is None else parameter.grad + 0.1)
        return self.losses[layer]


def test_kl_restores_one_layer_at_a_time_from_the_same_weights(tmp_path, teacher, student):
    student.eval().requires_grad_(False)
    student.mixers[0].requires_grad_(True)
    before, restored = state(student), state(teacher)
    flags = [parameter.requires_grad for parameter in student.parameters()]
    training = Training([2.0, 1.0, 1.5])
    found = kl_sweep(student, teacher.mixers, training, tmp_path, settings={"tokens": 100})
    assert found.losses() == [2.0, 1.0, 1.5] and training.seen == [0, 1, 2]
    assert choose("kl", L, 2, scores=tmp_path).ranking.order == (1, 2, 0)
    assert same(before, state(student)) and same(restored, state(teacher))
    assert [parameter.requires_grad for parameter in student.parameters()] == flags
    assert not student.training and all(parameter.grad is None for parameter in student.parameters())
    for layer, seen in enumerate(training.before):
        for name, x in seen.items():
            source = restored if f"layers.{layer}.self_attn" in name else before
            assert torch.equal(x, source[name]), name


def test_kl_goes_on_and_refuses_other_settings(tmp_path, teacher, student):
    class Cut(Training):
        def __call__(self, model) -> float:
            loss = super().__call__(model)
            if self.seen[-1] == 1:
                raise KeyboardInterrupt
            return loss

    before = state(student)
    with pytest.raises(KeyboardInterrupt):
        kl_sweep(student, teacher.mixers, Cut([2.0, 1.0, 1.5]), tmp_path, settings={"tokens": 100})
    assert same(before, state(student))
    training = Training([9.0, 1.0, 1.5])
    with pytest.raises(ValueError, match="other distill"):
        kl_sweep(student, teacher.mixers, training, tmp_path, settings={"tokens": 200})
    found = kl_sweep(student, teacher.mixers, training, tmp_path, settings={"tokens": 100})
    assert found.losses() == [2.0, 1.0, 1.5] and training.seen == [1, 2]
    with pytest.raises(ValueError, match="loss nan with softmax in layer 0"):
        kl_sweep(student, teacher.mixers, Training([float("nan")] * 3), tmp_path / "other")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"identity": {"layers": 2}}\n{"layer": "x"}\n', r"layer is 'x'.*; remove that line"),
        ('{"identity": 5}\n{"layer": 0, "recall": 0.5}\n', "scores made with other layers"),
    ],
)
def test_a_damaged_journal_is_named(tmp_path, text, said):
    path = tmp_path / "scores.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"scores\.jsonl.*{said}"):
        Journal(path, {"layers": 2})
    path.write_text('{"identity": 5}\n')  # nothing was ever finished there
    assert Journal(path, {"layers": 2}).entries == {}
