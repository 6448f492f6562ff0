"""Ablations (DESIGN D12) at model level: what is removed where, with a cache, and that nothing else changes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.models.hybrids import KEPT, SPECS, W, hybrid, tokens

from hybridize.models.modeling import CACHE

MODES = ("hybrid", "softmax_only", "far_only", "linear_only", "sinks_only", "none")
LONGEST = 3 * W + 5
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@torch.no_grad()
def logits(model, ids_BT):
    return model(ids_BT, use_cache=False).logits


@pytest.mark.parametrize("scope", ["mixed", "all"])
@pytest.mark.parametrize("spec", ["terraced", "sliding", "head-wise", "every-kind", "halo", "recurrent"])
@torch.no_grad()
def test_decode_and_padding_under_every_mode(spec, scope):
    model, ids_BT = hybrid(spec), tokens(2, LONGEST)
    for mode, removal in product(MODES, ("zero", "renormalize")):
        with model.override(mode, removal, scope):
            whole = logits(model, ids_BT)
            cache, outputs = model.new_cache(), []
            for begin, end in ((0, 5), (5, 6), (6, 7), (7, 15), *((t, t + 1) for t in range(15, LONGEST))):
                outputs.append(model(ids_BT[:, begin:end], **{CACHE: cache}).logits)
            torch.testing.assert_close(
                torch.cat(outputs, 1), whole, **TOLERANCE, msg=lambda m, k=mode: f"{k}: {m}"
            )
            mask_BT = torch.ones_like(ids_BT)
            mask_BT[1, :6] = 0
            padded = model(ids_BT, attention_mask=mask_BT, use_cache=False).logits
            torch.testing.assert_close(padded[0], whole[0], **TOLERANCE)
            torch.testing.assert_close(padded[1, 6:], logits(model, ids_BT[1:, 6:])[0], **TOLERANCE)


@pytest.mark.parametrize("spec", ["terraced", "sliding"])
def test_delta_is_exactly_zero_where_nothing_is_removed(spec):
    """Up to the first far key a hybrid is its own softmax_only, bit for bit, however the term is removed."""
    model = hybrid(spec)
    first = model.spec.layers[0].groups[0].window.first_far_position
    ids_BT = tokens(2, first + 6)
    whole = logits(model, ids_BT)
    for removal in ("zero", "renormalize"):
        with model.override("softmax_only", removal):
            ablated = logits(model, ids_BT)
            alone = logits(model, ids_BT[:, :first])
        torch.testing.assert_close(ablated[:, :first], whole[:, :first], rtol=0, atol=0)
        torch.testing.assert_close(alone, logits(model, ids_BT[:, :first]), rtol=0, atol=0)
        assert (ablated[:, first:] - whole[:, first:]).abs().amax() > 1e-3


def test_modes_that_remove_nothing_from_a_model_change_nothing():
    ids_BT = tokens(2, LONGEST)
    for spec in ("softmax", "softmax-window", "linear"):
        model = hybrid(spec)
        whole = logits(model, ids_BT)
        for mode, removal in product(MODES, ("zero", "renormalize")):
            with model.override(mode, removal, "mixed"):  # no layer has both branches
                torch.testing.assert_close(logits(model, ids_BT), whole, rtol=0, atol=0)
    for spec, mode in (("softmax", "softmax_only"), ("linear", "far_only"), ("linear", "linear_only")):
        model = hybrid(spec)
        whole = logits(model, ids_BT)
        with model.override(mode, scope="all"):
            torch.testing.assert_close(logits(model, ids_BT), whole, rtol=0, atol=0)


def attention_outputs(model, ids_BT):
    outputs = []
    handles = [m.register_forward_hook(lambda _m, _i, out: outputs.append(out[0])) for m in model.mixers]
    logits(model, ids_BT)
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize(
    "mode,scope,silent",
    [
        ("none", "mixed", {0, 2}),
        ("none", "all", {0, 1, 2, 3}),
        ("softmax_only", "mixed", set()),
        ("softmax_only", "all", {3}),
        ("far_only", "all", {1}),
        ("linear_only", "mixed", set()),
        ("linear_only", "all", {1}),
        ("sinks_only", "all", {3}),
    ],
)
def test_scope_says_which_layers_are_touched(mode, scope, silent):
    """Layers: mixed, softmax, head-wise (mixed as a whole), linear. A layer left without keys outputs 0."""
    spec = {
        **SPECS["terraced"],
        "layers": {"1": KEPT, "2": SPECS["head-wise"]["all"], "3": SPECS["linear"]["all"]},
    }
    model, ids_BT = hybrid(spec, layers=4), tokens(1, LONGEST)
    with model.override(mode, scope=scope):
        outputs = attention_outputs(model, ids_BT)
    assert {layer for layer, o in enumerate(outputs) if not o.any()} == silent


def test_head_groups_are_removed_one_by_one():
    model, ids_BT = hybrid("head-wise", layers=1), tokens(1, LONGEST)
    mixer, seen = model.mixers[0], {}

    def keep(name):
        def finish(module, inputs, output=None):
            seen[name] = inputs[0].unflatten(-1, (4, -1))

        return finish

    for mode in ("hybrid", "softmax_only", "far_only", "linear_only"):
        handle = mixer.o_proj.register_forward_pre_hook(keep(mode))
        with model.override(mode):
            logits(model, ids_BT)
        handle.remove()
    near, far = slice(0, 2), slice(2, 4)
    assert torch.equal(seen["softmax_only"][:, :, near], seen["hybrid"][:, :, near])
    assert not seen["softmax_only"][:, :, far].any()
    for mode in ("far_only", "linear_only"):
        assert torch.equal(seen[mode][:, :, far], seen["hybrid"][:, :, far])
        assert not seen[mode][:, :, near].any()


def test_branches_add_up_under_zero_removal():
    """softmax_only + far_only = hybrid in one mixed layer: coefficients stay where the term is zero."""
    for spec in ("terraced", "sliding"):
        model, ids_BT = hybrid(spec, layers=1), tokens(2, LONGEST)
        parts = {}
        for mode in ("hybrid", "softmax_only", "far_only"):
            with model.override(mode, "zero"):
                parts[mode] = attention_outputs(model, ids_BT)[0]
        torch.testing.assert_close(
            parts["softmax_only"] + parts["far_only"], parts["hybrid"], rtol=1e-5, atol=1e-5
        )


def test_sinks_only_sees_eight_positions():
    model = hybrid("terraced", layers=1)
    ids_BT = tokens(1, 20).repeat(2, 1)
    ids_BT[1, 8:19] = tokens(1, 11, seed=5)
    with model.override("sinks_only"):
        one, two = attention_outputs(model, ids_BT)[0]
        torch.testing.assert_close(one[19], two[19])
        ids_BT[1, 3] = (ids_BT[1, 3] + 1) % 100 + 3
        one, two = attention_outputs(model, ids_BT)[0]
        assert (one[19] - two[19]).abs().amax() > 1e-4


def test_the_override_ends_nests_and_is_recorded():
    model, ids_BT = hybrid("terraced"), tokens(1, LONGEST)
    whole = logits(model, ids_BT)
    with pytest.raises(RuntimeError, match="inside"), model.override("none"):
        raise RuntimeError("inside")
    assert torch.equal(logits(model, ids_BT), whole)
    with model.override("far_only", "renormalize"):
        outer = logits(model, ids_BT)
        with model.override("softmax_only"):
            assert model.effective_spec["override"]["mode"] == "softmax_only"
        assert torch.equal(logits(model, ids_BT), outer)
        recorded = {"mode": "far_only", "removal": "renormalize", "scope": "mixed"}
        assert model.effective_spec["override"] == recorded
    assert model.effective_spec["override"]["mode"] == "hybrid"
    assert model.effective_spec["spec"] == model.config.hybrid_spec


@pytest.mark.parametrize(
    "choice,message",
    [
        ({"mode": "near_only"}, "mode is 'near_only'; allowed are 'hybrid', 'softmax_only'"),
        ({"removal": "drop"}, "removal is 'drop'; allowed are 'zero', 'renormalize'"),
        ({"scope": "some"}, "scope is 'some'; allowed are 'mixed', 'all'"),
    ],
)
def test_other_choices_are_refused(choice, message):
    with pytest.raises(ValueError, match=message), hybrid("terraced").override(**choice):
        pass


@torch.no_grad()
def test_a_cache_does_not_cross_into_another_mode():
    """States of sinks_only are of another kind; taking them for the window's would be silent nonsense."""
    model, ids_BT = hybrid("terraced"), tokens(1, 9)
    with model.override("sinks_only"):
        cache = getattr(model(ids_BT), CACHE)
    with pytest.raises(ValueError, match="override"):
        model(ids_BT[:, :1], **{CACHE: cache})


@torch.no_grad()
def test_where_confines_a_removal_to_queries_heads_and_layers():
    model, ids_BT = hybrid("sliding"), tokens(2, LONGEST)
    whole = logits(model, ids_BT)
    with model.override("softmax_only"):
        removed = logits(model, ids_BT)
    heads = model.shapes[0].heads
    nothing = torch.zeros(1, 1, heads, dtype=torch.bool)
    for where, expected in ((nothing, whole), (~nothing, removed)):
        with model.override("softmax_only", where=where):
            assert torch.equal(logits(model, ids_BT), expected)
    rows = torch.tensor([True, False])[:, None, None]
    with model.override("softmax_only", where=rows):
        mixed = logits(model, ids_BT)
    torch.testing.assert_close(mixed[0], removed[0], **TOLERANCE)
    torch.testing.assert_close(mixed[1], whole[1], **TOLERANCE)
    one = nothing.clone()
    one[..., 1] = True
    with model.override("softmax_only", layers=[1], where=one):
        single = logits(model, ids_BT)
        assert (
            model.effective_spec["override"] | {"mode": "softmax_only", "layers": [1]}
            == model.effective_spec["override"]
        )
    assert (single - whole).abs().amax() > 1e-5 and (single - removed).abs().amax() > 1e-4
    with model.override("softmax_only", where=[nothing, ~nothing, *[nothing] * (len(model.mixers) - 2)]):
        by_layer = logits(model, ids_BT)
    with model.override("softmax_only", layers=[1]):
        torch.testing.assert_close(by_layer, logits(model, ids_BT))
    with pytest.raises(ValueError, match="layers is"), model.override("softmax_only", layers=[99]):
        pass


@torch.no_grad()
def test_queries_without_far_keys_can_be_left_alone():
    model, ids_BT = hybrid("sliding"), tokens(2, LONGEST)
    first = model.spec.layers[0].groups[0].window.first_far_position
    whole = logits(model, ids_BT)
    everywhere = torch.ones(1, 1, 1, dtype=torch.bool)
    with model.override("far_only", where=everywhere, keep_empty=True):
        kept = logits(model, ids_BT)
    with model.override("far_only"):
        dropped = logits(model, ids_BT)
    torch.testing.assert_close(kept[:, :first], whole[:, :first], rtol=0, atol=0)
    assert (dropped[:, :first] - whole[:, :first]).abs().amax() > 1e-3
    assert (kept[:, first:] - whole[:, first:]).abs().amax() > 1e-3


@torch.no_grad()
def test_a_window_resized_for_a_while_equals_a_spec_with_that_window():
    model, ids_BT = hybrid("sliding"), tokens(2, LONGEST)
    whole = logits(model, ids_BT)
    with model.override(window_size=W // 2):
        resized = logits(model, ids_BT)
        assert model.effective_spec["override"]["window_sizes"] == [W // 2]
    torch.testing.assert_close(logits(model, ids_BT), whole, rtol=0, atol=0)
    plain = model.spec.model_dump(mode="json")
    for layer in plain["layers"]:
        for group in layer["groups"]:
            group["window"]["size"] = W // 2
    before = model.state_dict()
    model.respec(type(model.spec).model_validate(plain))
    torch.testing.assert_close(logits(model, ids_BT), resized, rtol=0, atol=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.spec == model.spec


@torch.no_grad()
def test_a_linear_model_gains_a_window_by_a_change_of_spec():
    model, ids_BT = hybrid("linear"), tokens(2, LONGEST)
    maps = {name: value.clone() for name, value in model.state_dict().items()}
    plain = model.spec.model_dump(mode="json")
    for layer in plain["layers"]:
        for group in layer["groups"]:
            group |= {"attention": "windowed_linear", "window": {"kind": "sliding", "size": W}}
            group["normalizer"] = {"kind": "separate", "gate": 0.5}
    model.respec(type(model.spec).model_validate(plain))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in maps.items())
    with model.override("linear_only", "renormalize"):
        linear = logits(model, ids_BT)
    torch.testing.assert_close(linear, logits(hybrid("linear"), ids_BT), **TOLERANCE)
    assert (logits(model, ids_BT) - linear).abs().amax() > 1e-3


@torch.no_grad()
def test_a_cache_of_another_window_is_refused():
    model, ids_BT = hybrid("sliding"), tokens(2, LONGEST)
    with model.override(window_size=W // 2):
        whole, cache = logits(model, ids_BT), model.new_cache()
        parts = [
            model(ids_BT[:, begin:end], **{CACHE: cache}).logits for begin, end in ((0, 9), (9, LONGEST))
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **TOLERANCE)
    with pytest.raises(ValueError, match="the cache was filled under"):
        model(ids_BT[:, :1], **{CACHE: cache})
    with model.override(window_size=W // 2, layers=[1]):
        sizes = [mixer.mixers[0].window.size for mixer in model.mixers]
    assert sizes == [W, W // 2] and model.mixers[1].mixers[0].window.size == W
