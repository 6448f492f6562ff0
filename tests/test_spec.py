"""Specs: shorthand, ranges, shares of heads, defaults written out, the stored form, and what is refused."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from hybridize.spec import SPEC_VERSION, HybridSpec, ResolvedSpec, parse_layers

MIXED = {"attention": "windowed_linear", "window": {"kind": "terraced", "size": 64}}


def resolve(
    spec: dict, layers: int = 4, heads: int = 8, kv_heads: int = 4, head_dim: int = 16
) -> ResolvedSpec:
    return HybridSpec.model_validate(spec).resolve(
        layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )


def test_shorthand_and_defaults_are_written_out():
    resolved = resolve({"all": MIXED, "layers": {"1,3": {"attention": "softmax"}}})
    assert [layer.groups[0].attention for layer in resolved.layers] == ["windowed_linear", "softmax"] * 2
    group = resolved.layers[0].groups[0]
    assert group.heads == 8 and group.normalizer.kind == "shared" and group.normalizer.gamma == 0.1
    assert group.feature_map.features == 16 and group.feature_map.activation == "softmax"
    assert resolved.layers[0].has_linear and not resolved.layers[1].has_linear
    t2r = resolve({"all": {"attention": "linear", "feature_map": {"kind": "t2r"}}}).groups[0].feature_map
    assert t2r.activation == "relu" and t2r.bias and not t2r.two_sided


def test_shares_of_heads():
    spec = {"all": {"groups": [{"attention": "softmax", "heads": "3/4"}, {**MIXED, "heads": "1/4"}]}}
    assert [group.heads for group in resolve(spec, heads=8, kv_heads=8).layers[0].groups] == [6, 2]
    assert [group.heads for group in resolve(spec, heads=8, kv_heads=4).layers[0].groups] == [6, 2]
    with pytest.raises(
        ValueError, match="heads '3/4' of 9 query heads is 6.75; a group holds whole KV groups of 3"
    ):
        resolve(spec, heads=9, kv_heads=3)  # SmolLM2-135M


def test_the_stored_form_is_complete_and_resolves_to_itself():
    spec = {
        "all": {"groups": [{"attention": "linear", "heads": 2}, {**MIXED, "heads": 6}]},
        "layers": {"0-1": MIXED},
    }
    resolved = resolve(spec)
    stored = json.loads(json.dumps(resolved.model_dump(mode="json")))
    assert stored["version"] == SPEC_VERSION and len(stored["layers"]) == 4
    assert stored["layers"][0]["groups"][0]["window"] == {
        "kind": "terraced",
        "size": 64,
        "sinks": 0,
        "overlap": False,
    }
    assert ResolvedSpec.model_validate(stored) == resolved
    for layer, entry in zip(resolved.layers, stored["layers"], strict=True):
        assert resolve({"all": entry}, layers=1).layers[0] == layer


def test_layer_ranges():
    assert parse_layers("0-3, 8") == [0, 1, 2, 3, 8]
    for text, message in (
        ("3-1", "runs backwards"),
        ("a", "write numbers and ranges"),
        ("1-", "write numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_layers(text)


IDENTITY = {"activation": "identity"}
BAD = {
    "too few heads": ({"all": {**MIXED, "heads": 6}}, "the groups hold 6 query heads; the model has 8"),
    "too many heads": (
        {"all": {"groups": [{"attention": "linear", "heads": 6}, {"attention": "softmax", "heads": 4}]}},
        "the groups hold 10 query heads; the model has 8",
    ),
    "split KV group": (
        {"all": {**MIXED, "heads": 3}},
        "heads 3 of 8 query heads is 3; a group holds whole KV groups of 2",
    ),
    "no layer": ({"all": MIXED, "layers": {"2-9": MIXED}}, "names layer 4; the model has layers 0 to 3"),
    "twice": ({"all": MIXED, "layers": {"0-2": MIXED, "2": MIXED}}, "names layer 2 a second time"),
    "odd features": (
        {"all": {"attention": "linear", "feature_map": {"features": 7}}},
        "feature_map.features is 7",
    ),
    "no groups": ({"all": {"groups": []}}, "groups is empty"),
    "w 0 terraced": (
        {"all": {**MIXED, "window": {"kind": "terraced", "size": 0}}},
        "window.size is 0; it must be at least 1",
    ),
    "w 0 sliding": (
        {"all": {**MIXED, "window": {"kind": "sliding", "size": 0}}},
        "window.size is 0; it must be at least 1",
    ),
    "no window": ({"all": {"attention": "windowed_linear"}}, "needs a window"),
    "window on linear": ({"all": {**MIXED, "attention": "linear"}}, "takes no window"),
    "normalizer on softmax": (
        {"all": {"attention": "softmax", "normalizer": {"kind": "shared"}}},
        "takes no normalizer",
    ),
    "map on softmax": ({"all": {"attention": "softmax", "feature_map": {}}}, "takes no feature_map"),
    "overlap on softmax": (
        {"all": {"attention": "softmax", "window": {"kind": "sliding", "size": 4, "overlap": True}}},
        "window.overlap concerns the far keys",
    ),
    "identity shared": (
        {"all": {**MIXED, "feature_map": IDENTITY}},
        "activation 'identity' gives signed masses",
    ),
    "identity mass": (
        {"all": {**MIXED, "feature_map": IDENTITY, "normalizer": {"kind": "separate", "mix": "mass"}}},
        "activation 'identity' gives signed masses",
    ),
    "gamma": ({"all": {**MIXED, "normalizer": {"kind": "shared", "gamma": 1}}}, "less than 1"),
    "share": ({"all": {**MIXED, "heads": "5/4"}}, "heads is '5/4'; a share must lie in"),
    "zero heads": ({"all": {**MIXED, "heads": 0}}, "heads is 0; write a share"),
    "attention": ({"all": {"attention": "mamba"}}, "'softmax', 'linear' or 'windowed_linear'"),
    "unknown key": ({"all": {**MIXED, "windows": 3}}, "windows"),
    "unknown window key": ({"all": {**MIXED, "window": {"kind": "sliding", "size": 4, "width": 3}}}, "width"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_specs_are_refused(name):
    spec, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        resolve(spec)


def test_every_problem_is_reported_at_once():
    spec = {"all": {**MIXED, "heads": 3}, "layers": {"0": {"attention": "softmax", "heads": 4}, "9": MIXED}}
    with pytest.raises(ValueError) as caught:
        resolve(spec)
    assert all(part in str(caught.value) for part in ("heads 3 of 8", "hold 4 query heads", "names layer 9"))


def test_another_version_is_refused():
    stored = resolve({"all": MIXED}).model_dump(mode="json")
    with pytest.raises(ValidationError, match="version"):
        ResolvedSpec.model_validate({**stored, "version": 2})
    with pytest.raises(ValidationError, match="frozen"):
        resolve({"all": MIXED}).version = 2
