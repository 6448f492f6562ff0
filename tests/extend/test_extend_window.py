"""Edits of a spec: what gains a window, what keeps its mix, and how a window is written."""

from __future__ import annotations

import pytest
import torch
from tests.models.hybrids import hybrid, tokens

import hybridize
from hybridize.extend.window import parse_window, with_window
from hybridize.spec import HybridSpec, SharedNormalizer
from hybridize.windows import Window

SPEC = HybridSpec.model_validate(
    {
        "all": {"attention": "linear"},
        "layers": {
            "1": {"attention": "softmax"},
            "2": {"attention": "windowed_linear", "window": {"kind": "terraced", "size": 8}},
        },
    }
)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("sliding:64", Window("sliding", 64)),
        ("terraced:32+sinks:4", Window("terraced", 32, sinks=4)),
        ("sliding:1+sinks:2+overlap", Window("sliding", 1, sinks=2, overlap=True)),
    ],
)
def test_windows_as_they_are_written(text, window):
    assert parse_window(text) == window


@pytest.mark.parametrize(
    "text", ["", "64", "sliding", "sliding:0", "sliding:-4", "round:8", "sliding:8+sink:4", "sliding:8+sinks:x", "sliding:8+overlap:1"]
)  # fmt: skip
def test_windows_that_nobody_can_read(text):
    with pytest.raises(ValueError, match="window"):
        parse_window(text)


@pytest.mark.parametrize("resolved", [False, True])
def test_linear_groups_gain_a_window_and_mixing_ones_another(resolved):
    spec = SPEC.resolve(layers=4, heads=4, kv_heads=2, head_dim=8) if resolved else SPEC
    edited = with_window(spec, Window("sliding", 16))
    layers = edited.layers if resolved else [edited.all, edited.layers["1"], edited.layers["2"]]
    first, kept, mixing = (layer.groups[0] for layer in layers[:3])
    assert (first.attention, first.window.size, first.normalizer.kind, first.normalizer.gate) == (
        "windowed_linear",
        16,
        "separate",
        0.5,
    )
    assert kept.attention == "softmax" and kept.window is None
    assert mixing.window == Window("sliding", 16)
    assert (mixing.normalizer or SharedNormalizer()).kind == "shared"
    shared = with_window(spec, Window("sliding", 16), SharedNormalizer(gamma=0.3))
    groups = shared.groups if resolved else shared.all.groups
    assert {group.normalizer.gamma for group in groups if group.attention != "softmax"} == {0.3}


def test_a_spec_without_linear_attention_has_nothing_to_edit():
    spec = HybridSpec.model_validate({"all": {"attention": "softmax"}})
    with pytest.raises(ValueError, match="no linear attention"):
        with_window(spec, Window("sliding", 16))


@torch.no_grad()
def test_a_checkpoint_is_edited_as_it_is_loaded_or_written(tmp_path):
    from tests.convert import bench

    hybrid("linear").save_pretrained(tmp_path / "linear")
    bench.tokenizer().save_pretrained(tmp_path / "linear")
    ids = tokens(2, 23)
    loaded, _ = hybridize.load(tmp_path / "linear", device="cpu", window="sliding:4", mix=0.25)
    hybridize.extend(tmp_path / "linear", tmp_path / "out", window="sliding:4", mix=0.25)
    written, _ = hybridize.load(tmp_path / "out", device="cpu")
    assert written.spec == loaded.spec and written.spec.groups[0].normalizer.gate == 0.25
    torch.testing.assert_close(loaded(ids).logits, written(ids).logits, rtol=0, atol=0)
    plain, _ = hybridize.load(tmp_path / "linear", device="cpu")
    assert (plain(ids).logits - loaded(ids).logits).abs().amax() > 1e-3


def test_a_teacher_has_no_linear_attention(tmp_path):
    from tests.convert import bench

    teacher = bench.write_teacher(tmp_path / "teacher")
    with pytest.raises(ValueError, match="is no hybrid"):
        hybridize.load(teacher, device="cpu", window="sliding:4")
