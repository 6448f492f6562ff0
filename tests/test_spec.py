"""Specs: shorthand, ranges, shares of heads, defaults written out, the stored form, and what is refused."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from hybridize.spec import RECURRENT, SPEC_VERSION, GroupSpec, HybridSpec, ResolvedSpec, parse_layers

MIXED = {"attention": "windowed_linear", "window": {"kind": "terraced", "size": 64}}
SOFTMAX = {"attention": "softmax"}
SCALES = {
    "log_position": {"kind": "log_position", "base": 300},
    "log_length": {"kind": "log_length", "length": 4096},
    "log_declared": {"kind": "log_declared", "length": 4096, "declared": 65536},
    "constant": {"kind": "constant", "value": 1.2},
}
HALO = {
    "all": {
        "attention": "lightning",
        "position": "rope",
        "qk_norm": True,
        "output_norm": True,
        "output_gate": True,
        "heads": "expand",
    },
    "kept": {**SOFTMAX, "position": "none", "logit_scale": SCALES["log_position"], "output_gate": True},
}


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


def test_a_halo_spec_is_written_out():
    (lightning,) = resolve(HALO, layers=1).groups
    assert lightning.heads == 8 and lightning.expand and lightning.position == "rope"
    assert lightning.decay.convention == "hypenet" and lightning.output_gate == "half"
    kept = HybridSpec.model_validate(HALO).kept.groups[0]
    assert kept.output_gate == "open" and kept.position == "none" and not kept.expand
    assert kept.logit_scale.base == 300 and kept.logit_scale.when == "inference"
    assert GroupSpec(attention="softmax", logit_scale={"kind": "log_position"}).logit_scale.base == 500
    for written, meant in ((True, "half"), (False, None), ("open", "open"), (None, None)):
        assert GroupSpec(attention="lightning", output_gate=written).output_gate == meant


EVERYTHING = [
    *({**SOFTMAX, "logit_scale": scale, "position": "none"} for scale in SCALES.values()),
    *({"attention": kind, "position": {"rope": 1e6}, "output_norm": True} for kind in RECURRENT),
    {"attention": "lightning", "decay": {"convention": "minimax"}, "qk_norm": True},
    HALO["all"],
    {**MIXED, "heads": "expand", "output_gate": "open"},
]


@pytest.mark.parametrize("number", range(len(EVERYTHING)))
def test_new_words_survive_the_stored_form(number):
    resolved = resolve({"all": EVERYTHING[number]})
    stored = json.loads(json.dumps(resolved.model_dump(mode="json")))
    assert ResolvedSpec.model_validate(stored) == resolved
    assert resolve({"all": stored["layers"][0]}) == resolved


def test_expanded_groups_may_hold_any_number_of_heads():
    """SmolLM2-135M: 9 heads on 3 key and value heads."""
    groups = [{**SOFTMAX, "heads": 7, "expand": True}, {"attention": "gla", "heads": 2, "expand": True}]
    (layer,) = resolve({"all": {"groups": groups}}, layers=1, heads=9, kv_heads=3).layers
    assert [group.heads for group in layer.groups] == [7, 2] and layer.expand
    with pytest.raises(ValueError, match="a group holds whole KV groups of 3 query heads"):
        resolve({"all": {"groups": [{**group, "expand": False} for group in groups]}}, heads=9, kv_heads=3)


def test_odd_head_dims_take_no_rope():
    for position in ("rope", {"rope": 1e4}):
        with pytest.raises(ValueError, match="rotates pairs of channels; the head dim is 15"):
            resolve({"all": {**SOFTMAX, "position": position}}, head_dim=15)
    assert resolve({"all": {**SOFTMAX, "position": "none"}}, head_dim=15)


@pytest.mark.parametrize(
    "group,own,keeps",
    [
        (SOFTMAX, False, True),
        (MIXED, False, True),
        ({**SOFTMAX, "position": "rope"}, False, True),
        ({**SOFTMAX, "position": "none"}, False, False),
        ({**SOFTMAX, "position": {"rope": 1e4}}, False, False),
        ({**SOFTMAX, "logit_scale": SCALES["constant"]}, False, False),
        ({**SOFTMAX, "qk_norm": True}, True, False),
        ({**SOFTMAX, "output_norm": True}, True, True),
        ({**SOFTMAX, "output_gate": True}, True, True),
        ({**SOFTMAX, "heads": "expand"}, True, False),
        ({"attention": "lightning"}, True, False),
    ],
)
def test_what_a_group_adds_and_what_it_keeps_of_the_teacher(group, own, keeps):
    """Parameters of its own, which a whole-mixer transfer trains; the teacher's own q, k and v."""
    layer = HybridSpec.model_validate({"all": group}).all
    assert layer.groups[0].own_parameters == own and layer.groups[0].keeps_projections == keeps
    assert layer.keeps_projections == keeps and layer.groups[0].recurrent == (group["attention"] in RECURRENT)


def test_selected_layers_compute_what_is_kept():
    spec = HybridSpec.model_validate({**HALO, "layers": {"0-1": MIXED, "3": SOFTMAX}})
    selected = spec.with_kept([3, 1])
    assert selected.kept is None and set(selected.layers) == {"0", "1,3"}
    resolved = selected.resolve(layers=5, heads=8, kv_heads=4, head_dim=16)
    kinds = [group.attention for group in resolved.groups]
    assert kinds == ["windowed_linear", "softmax", "lightning", "softmax", "lightning"]
    assert resolved.layers[1] == resolved.layers[3] and resolved.groups[1].logit_scale.base == 300
    assert spec.with_kept([]).layers == spec.layers and spec.with_kept([]).kept is None
    with pytest.raises(ValueError, match="spec.kept is missing; it says what the selected layers compute"):
        selected.with_kept([0])
    with pytest.raises(ValueError, match="names layer 7; the model has layers 0 to 4"):
        spec.with_kept([7]).resolve(layers=5, heads=8, kv_heads=4, head_dim=16)


def test_kept_layers_fit_before_they_are_chosen():
    """A wrong `kept` is told with every other problem, and not only when a selection builds its layers."""
    kept = {"groups": [{**SOFTMAX, "heads": 6}, {**SOFTMAX, "heads": 4}]}
    with pytest.raises(ValueError) as caught:
        resolve({"all": {**MIXED, "heads": 3}, "layers": {"9": SOFTMAX}, "kept": kept})
    assert str(caught.value).split("; ") == [
        "spec.layers['9'] names layer 9",
        "the model has layers 0 to 3",
        "heads 3 of 8 query heads is 3",
        "a group holds whole KV groups of 2 query heads",
        "spec.kept: the groups hold 10 query heads",
        "the model has 8",
    ]
    with pytest.raises(ValueError, match=r"^spec\.kept: position rope rotates pairs of channels"):
        resolve(
            {"all": {**SOFTMAX, "position": "none"}, "kept": {**SOFTMAX, "position": "rope"}}, head_dim=15
        )
    assert [group.attention for group in resolve(HALO).groups] == ["lightning"] * 4


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
    "attention": ({"all": {"attention": "mamba"}}, "'softmax', 'linear', 'windowed_linear', 'lightning', "),
    "unknown key": ({"all": {**MIXED, "windows": 3}}, "windows"),
    "window on recurrent": ({"all": {**MIXED, "attention": "gdn"}}, "'gdn' takes no window; it remembers"),
    "map on recurrent": ({"all": {"attention": "kda", "feature_map": {}}}, "'kda' takes no feature_map"),
    "normalizer on recurrent": (
        {"all": {"attention": "rwkv7", "normalizer": {"kind": "separate"}}},
        "'rwkv7' takes no normalizer",
    ),
    "decay on softmax": ({"all": {**SOFTMAX, "decay": {}}}, "'softmax' takes no decay; only 'lightning'"),
    "decay on gla": ({"all": {"attention": "gla", "decay": {}}}, "'gla' takes no decay; only 'lightning'"),
    "convention": (
        {"all": {"attention": "lightning", "decay": {"convention": "retnet"}}},
        "'hypenet', 'minimax' or 'layer_scaled'",
    ),
    "scale on linear": (
        {"all": {"attention": "linear", "logit_scale": SCALES["log_position"]}},
        "logit_scale is for softmax attention without a window",
    ),
    "scale under a window": (
        {"all": {**SOFTMAX, "window": {"kind": "sliding", "size": 4}, "logit_scale": SCALES["constant"]}},
        "logit_scale is for softmax attention without a window",
    ),
    "scale kind": ({"all": {**SOFTMAX, "logit_scale": {"kind": "log"}}}, "logit_scale"),
    "scale base": (
        {"all": {**SOFTMAX, "logit_scale": {"kind": "log_position", "base": 1}}},
        "greater than 1",
    ),
    "scale length": ({"all": {**SOFTMAX, "logit_scale": {"kind": "log_length"}}}, "length\n  Field required"),
    "scale declared": (
        {"all": {**SOFTMAX, "logit_scale": {"kind": "log_declared", "length": 4096}}},
        "declared\n  Field required",
    ),
    "scale value": ({"all": {**SOFTMAX, "logit_scale": {"kind": "constant", "value": 0}}}, "greater than 0"),
    "scale when": (
        {"all": {**SOFTMAX, "logit_scale": {**SCALES["constant"], "when": "training"}}},
        "'inference' or 'always'",
    ),
    "position": (
        {"all": {**SOFTMAX, "position": "nope"}},
        "position is 'nope'; write rope .*, none or {rope: 10000}",
    ),
    "position base": ({"all": {**SOFTMAX, "position": {"rope": 1}}}, "greater than 1"),
    "position key": ({"all": {**SOFTMAX, "position": {"base": 1e4}}}, "position"),
    "gate": ({"all": {**SOFTMAX, "output_gate": "closed"}}, "'open' or 'half'"),
    "expand in one group": (
        {"all": {"groups": [{**SOFTMAX, "heads": 4, "expand": True}, {**SOFTMAX, "heads": 4}]}},
        "heads: expand concerns a whole layer; write expand: true in each",
    ),
    "heads word": ({"all": {**SOFTMAX, "heads": "all"}}, "heads is 'all'; write a share"),
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
