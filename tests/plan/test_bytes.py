"""Closed forms of state bytes and new parameters, against numbers worked out by hand."""

import pytest

from hybridize.models.families import AttentionShape
from hybridize.plan.bytes import map_parameters, mix_parameters, softmax_spec, state_bytes
from hybridize.spec import HybridSpec

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16


def shapes(layers=2, window=None):
    return [
        AttentionShape(layer, 128, HEADS, KV_HEADS, HEAD_DIM, 0.25, None, window, True)
        for layer in range(layers)
    ]


def resolve(group, layers=2):
    spec = HybridSpec.model_validate({"all": group})
    return spec.resolve(layers=layers, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def windowed(kind="terraced", size=4, **more):
    return {"attention": "windowed_linear", "window": {"kind": kind, "size": size, **more}}


def test_full_softmax_grows_with_every_token():
    one_token = 2 * KV_HEADS * HEAD_DIM * 2  # k and v, bf16
    assert state_bytes(softmax_spec(shapes()), shapes(), 100) == 2 * 100 * one_token
    assert state_bytes(softmax_spec(shapes()), shapes(), 100, dtype_bytes=4) == 4 * 100 * one_token


def test_the_models_own_window_bounds_its_softmax():
    assert state_bytes(softmax_spec(shapes()), shapes(window=10), 100) == 2 * 10 * 2 * KV_HEADS * HEAD_DIM * 2


@pytest.mark.parametrize(
    ("window", "keys"),
    [(windowed("terraced", 4), 8), (windowed("sliding", 4), 4), (windowed("terraced", 4, sinks=3), 11)],
)
def test_windowed_linear_is_a_ring_and_a_state(window, keys):
    linear = HEADS * HEAD_DIM * (HEAD_DIM + 1) * 4  # S and z of every query head, float32
    ring = 2 * keys * KV_HEADS * HEAD_DIM * 2
    for length in (1, 50, 10**6):  # the ring is allocated whole by the first token
        assert state_bytes(resolve(window), shapes(), length) == 2 * (ring + linear)


def test_kv_maps_shrink_the_state_by_the_group_size():
    def linear(k_map_heads):
        group = {"attention": "linear", "feature_map": {"features": 32, "k_map_heads": k_map_heads}}
        return state_bytes(resolve(group), shapes(), 1000)

    assert linear("query") == 2 * HEADS * 32 * (HEAD_DIM + 1) * 4
    assert linear("kv") * (HEADS // KV_HEADS) == linear("query")


def test_groups_add_up_to_their_layer():
    halves = {"groups": [{"heads": "1/2", **windowed()}, {"heads": "1/2", "attention": "softmax"}]}
    whole = state_bytes(resolve(windowed()), shapes(), 100) + state_bytes(
        softmax_spec(shapes()), shapes(), 100
    )
    assert 2 * state_bytes(resolve(halves), shapes(), 100) == whole


@pytest.mark.parametrize(
    ("feature_map", "one_head"),
    [
        ({"kind": "hedgehog", "features": 16}, HEAD_DIM * 8),
        ({"kind": "hedgehog"}, HEAD_DIM * HEAD_DIM // 2),
        ({"kind": "t2r", "features": 16}, HEAD_DIM * 16 + 16),
    ],
)
@pytest.mark.parametrize(("k_map_heads", "k_heads"), [("query", HEADS), ("kv", KV_HEADS)])
def test_map_parameters(feature_map, one_head, k_map_heads, k_heads):
    group = {**windowed(), "feature_map": {**feature_map, "k_map_heads": k_map_heads}}
    assert map_parameters(resolve(group), shapes()) == 2 * (HEADS + k_heads) * one_head


@pytest.mark.parametrize(
    ("normalizer", "count"),
    [
        ({"kind": "shared"}, 2 * HEADS),
        ({"kind": "separate", "mix": "fixed"}, 0),
        ({"kind": "separate", "mix": "learnt"}, 2 * HEADS),
        ({"kind": "separate", "mix": "mass"}, 2 * HEADS),
    ],
)
def test_mix_parameters(normalizer, count):
    assert mix_parameters(resolve({**windowed(), "normalizer": normalizer})) == count
    assert mix_parameters(softmax_spec(shapes())) == 0
