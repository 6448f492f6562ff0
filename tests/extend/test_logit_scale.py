"""Logit scales: how they are written, which groups take them, and the search of a base on a model whose loss is known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.convert import bench
from tests.models.hybrids import hybrid, tokens
from torch import nn

import hybridize
from hybridize.convert.run_folder import read_json
from hybridize.extend import logit_scale
from hybridize.extend.logit_scale import parse_bases, parse_logit_scale, search_base, with_logit_scale
from hybridize.models.modeling import HybridForCausalLM
from hybridize.spec import ConstantScale, HybridSpec, LogDeclared, LogLength, LogPosition, ResolvedSpec

SPEC = HybridSpec.model_validate(
    {
        "all": {"attention": "linear"},
        "layers": {
            "1": {"attention": "softmax", "position": "none"},
            "2": {"attention": "softmax"},
            "3": {"attention": "softmax", "window": {"kind": "sliding", "size": 8}, "position": "none"},
        },
        "kept": {"attention": "softmax", "position": "none"},
    }
)
SCALE = LogPosition(base=300)


@pytest.mark.parametrize(
    ("text", "scale", "everywhere"),
    [
        ("log_position:500", LogPosition(base=500), False),
        ("log_position:500+everywhere+always", LogPosition(base=500, when="always"), True),
        ("log_length:4096", LogLength(length=4096), False),
        ("log_declared:4096:65536", LogDeclared(length=4096, declared=65536), False),
        ("constant:1.25", ConstantScale(value=1.25), False),
        ("none", None, True),
    ],
)
def test_scales_as_they_are_written(text, scale, everywhere):
    assert parse_logit_scale(text) == (scale, everywhere)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "allowed are log_position"),
        ("log_positon:500", "did you mean 'log_position'"),
        ("log_position", "write log_position:BASE"),
        ("log_declared:4096", "write log_declared:LENGTH:DECLARED"),
        ("log_position:1", "base: .* greater than 1"),
        ("log_position:inf", "must be finite"),
        ("constant:x", "value: .* number"),
        ("none+always", "did you mean .none."),
        ("log_position:500+every", "option 'every'"),
    ],
)
def test_scales_that_nobody_can_read(text, words):
    with pytest.raises(ValueError, match=f"^logit_scale .*{words}") as caught:
        parse_logit_scale(text)
    assert len(str(caught.value).splitlines()) == 1


def test_bases_as_they_are_written():
    assert parse_bases("100, 300,100") == ([100, 300], False)
    assert parse_bases("100+everywhere") == ([100], True)
    assert parse_bases((2, 5.5)) == ([2, 5.5], False) and parse_bases(()) == ([], False)
    for bad in ("", "100,x", "100,1", "100+all", [0.5], "100,inf"):
        with pytest.raises(ValueError, match="^bases "):
            parse_bases(bad)


@pytest.mark.parametrize("resolved", [False, True])
def test_full_softmax_without_positions_takes_the_scale(resolved):
    spec: Any = SPEC.resolve(layers=4, heads=4, kv_heads=2, head_dim=8) if resolved else SPEC

    def scales(edited: Any) -> list[Any]:
        layers = edited.layers if resolved else [edited.all, *edited.layers.values()]
        return [layer.groups[0].logit_scale for layer in layers]

    edited = with_logit_scale(spec, SCALE)
    assert scales(edited) == [None, SCALE, None, None]
    assert type(edited).model_validate(edited.model_dump(mode="json")) == edited
    if not resolved:
        assert edited.kept.groups[0].logit_scale == SCALE
    everywhere = with_logit_scale(spec, SCALE, everywhere=True)
    assert scales(everywhere) == [None, SCALE, SCALE, None]
    assert scales(with_logit_scale(everywhere, None)) == [None, None, SCALE, None]
    assert with_logit_scale(everywhere, None, everywhere=True) == spec


def test_a_spec_that_cannot_have_a_scale():
    rotary = HybridSpec.model_validate({"all": {"attention": "softmax"}})
    with pytest.raises(ValueError, match=r"no full softmax attention without positions; \+everywhere"):
        with_logit_scale(rotary, SCALE)
    linear = HybridSpec.model_validate({"all": {"attention": "linear"}})
    with pytest.raises(ValueError, match="no full softmax attention$"):
        with_logit_scale(linear, SCALE, everywhere=True)
    assert with_logit_scale(linear, None) == linear


class Known(nn.Module):
    """A model of two tokens whose loss is lowest at the base 300 (or without a scale), and which counts its specs."""

    def __init__(self, best: float | None) -> None:
        super().__init__()
        self.best, self.device = best, torch.device("cpu")
        self.spec: ResolvedSpec = SPEC.resolve(layers=4, heads=4, kv_heads=2, head_dim=8)
        self.seen: list[float | None] = []

    def respec(self, spec: ResolvedSpec) -> None:
        self.spec = spec

    def forward(self, input_ids: Any, **_: Any) -> Any:
        scale: Any = self.spec.layers[1].groups[0].logit_scale
        base = scale.base if scale else None
        self.seen.append(base)
        distance = (
            0.0 if base == self.best else 1.0 if base is None else abs(math.log(base / (self.best or 1)))
        )
        logits = torch.zeros(*input_ids.shape, 2)
        logits[..., 1] = 5 - distance  # the next token is always 1
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("best", [300.0, None])
def test_the_search_finds_the_base_of_the_lowest_loss(best):
    model = Known(best)
    own, told = model.spec, []
    rows = torch.ones(3, 7, dtype=torch.long)
    found = search_base(model, rows, (100, 300, 900), on_progress=lambda *at: told.append(at))
    assert found["best"] == best and model.spec == own
    assert [point["base"] for point in found["curve"]] == [None, 100, 300, 900]
    assert model.seen == [base for base in (None, 100, 300, 900) for _ in range(3)]
    assert told[-1] == (12, 12) and told == sorted(told)
    plain, *others = found["curve"]
    assert plain["change"] == 0 and plain["standard_error"] == pytest.approx(0)
    for point in others:
        assert point["change"] == pytest.approx(point["loss"] - plain["loss"])
        assert point["low"] == pytest.approx(point["change"]) == point["high"]


def test_no_scale_is_none_at_all_as_it_is_written():
    """Layers with positions that have a scale of their own keep it under every base, and lose it where `none` wins."""
    model = Known(None)
    spec = {"attention": "softmax", "position": "rope", "logit_scale": SCALE}
    both = HybridSpec.model_validate(
        {"all": spec, "layers": {"1": {"attention": "softmax", "position": "none"}}}
    )
    model.spec = both.resolve(layers=2, heads=4, kv_heads=2, head_dim=8)
    seen: list[tuple[Any, ...]] = []
    model.respec = lambda spec: seen.append(tuple(group.logit_scale for group in spec.groups))  # type: ignore[method-assign]
    search_base(model, torch.ones(1, 7, dtype=torch.long), (100,))
    assert seen[:2] == [(None, None), (SCALE, LogPosition(base=100))]
    assert (
        tuple(group.logit_scale for group in with_logit_scale(model.spec, *parse_logit_scale("none")).groups)
        == seen[0]
    )


def test_the_best_base_is_written_as_it_was_asked(monkeypatch):
    monkeypatch.setattr(logit_scale, "build_rows", lambda *_, **__: None)
    monkeypatch.setattr(logit_scale, "ordered_batches", lambda *_: [])
    for base in (1234567.0, 1.0000001, 500.0):
        monkeypatch.setattr(
            logit_scale, "search_base", lambda *_, base=base, **__: {"best": base, "curve": []}
        )
        best = logit_scale.search_on_text(None, None, (base,), False, "text", 8, 1, lambda *_: None)["best"]
        assert parse_logit_scale(best) == (LogPosition(base=base), False)
    assert best == "log_position:500"


def test_an_interrupted_search_leaves_the_model_as_it_was():
    model = Known(300.0)
    own = model.spec

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_base(model, torch.ones(1, 5, dtype=torch.long), (100, 300), on_progress=stop)
    assert model.spec == own


def test_what_cannot_be_searched():
    rows = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="only a hybrid's"):
        search_base(nn.Linear(2, 2), rows)
    with pytest.raises(ValueError, match="bases is empty"):
        search_base(Known(None), rows, ())
    with pytest.raises(ValueError, match="no token that counts"):
        search_base(Known(None), rows[:, :1], (100,))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A hybrid with one full softmax layer without positions, as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    nope(hybrid("linear")).save_pretrained(folder)
    bench.tokenizer().save_pretrained(folder)
    return folder


def nope(model: HybridForCausalLM) -> HybridForCausalLM:
    groups = [{"attention": "softmax", "position": "none", "heads": model.shapes[0].heads}]
    first = type(model.spec.layers[0]).model_validate({"groups": groups})
    model.respec(model.spec.model_copy(update={"layers": (first, *model.spec.layers[1:])}))
    return model


@torch.no_grad()
def test_a_checkpoint_gains_a_scale_as_it_is_loaded_or_written(checkpoint, tmp_path):
    ids = tokens(2, 23)
    loaded, _ = hybridize.load(checkpoint, device="cpu", logit_scale="log_position:20")
    hybridize.extend(checkpoint, tmp_path / "out", logit_scale="log_position:20")
    written, _ = hybridize.load(tmp_path / "out", device="cpu")
    assert written.spec == loaded.spec and written.spec.groups[0].logit_scale == LogPosition(base=20)
    torch.testing.assert_close(loaded(ids).logits, written(ids).logits, rtol=0, atol=0)
    plain, _ = hybridize.load(checkpoint, device="cpu")
    assert (plain(ids).logits - loaded(ids).logits).abs().amax() > 1e-4
    without, _ = hybridize.load(tmp_path / "out", device="cpu", logit_scale="none")
    torch.testing.assert_close(plain(ids).logits, without(ids).logits, rtol=0, atol=0)
    record = read_json(tmp_path / "out" / "extend.json")
    assert record["source"] == str(checkpoint) and record["logit_scale"] == "log_position:20"


def test_a_searched_checkpoint_keeps_the_best_base(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(tmp_path / "cache"))
    text = bench.write_text(tmp_path / "text")
    out = hybridize.extend(
        checkpoint, tmp_path / "out", search_bases="5,50", text=str(text), length=96, rows=3, device="cpu", progress=False
    )  # fmt: skip
    search = read_json(out / "extend.json")["search"]
    assert (search["length"], search["rows"], search["text"]) == (96, 3, str(text))
    losses = {point["base"]: point["loss"] for point in search["curve"]}
    best = min(losses, key=lambda base: losses[base])
    assert list(losses) == [None, 5, 50] and len(set(losses.values())) == 3
    assert "length_note" not in search
    assert search["best"] == ("none" if best is None else f"log_position:{best:g}")
    student, _ = hybridize.load(out, device="cpu")
    assert student.spec.groups[0].logit_scale == (None if best is None else LogPosition(base=best))


def test_a_search_beyond_the_positions_says_so(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(tmp_path / "cache"))
    text = bench.write_text(tmp_path / "text")
    beyond = hybridize.load(checkpoint, device="cpu")[0].config.max_position_embeddings + 8
    out = hybridize.extend(
        checkpoint, tmp_path / "out", search_bases="5", text=str(text), length=beyond, rows=1, device="cpu", progress=False
    )  # fmt: skip
    assert f"beyond the {beyond - 8} positions" in read_json(out / "extend.json")["search"]["length_note"]


def test_extend_refuses(checkpoint, tmp_path):
    for options, words in (
        ({}, "nothing to change"),
        ({"logit_scale": "log_position:5", "search_bases": "5"}, "exclude each other"),
        ({"search_bases": "5,one"}, "^bases is '5,one'"),
        ({"search_bases": "", "logit_scale": "log_position:5"}, "^bases is ''"),
        ({"logit_scale": "log_position:"}, "^logit_scale is 'log_position:'"),
    ):
        with pytest.raises(ValueError, match=words):
            hybridize.extend(checkpoint, tmp_path / "out", device="cpu", progress=False, **options)
    teacher = bench.write_teacher(tmp_path / "teacher")
    for options in ({"logit_scale": "none"}, {"search_bases": "5"}):
        with pytest.raises(ValueError, match="hybrid"):
            hybridize.extend(teacher, tmp_path / "out", device="cpu", progress=False, **options)
    assert not (tmp_path / "out").exists()
