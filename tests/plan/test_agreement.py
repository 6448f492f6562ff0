"""The closed forms say what the real mixers hold: parameters exactly, states exactly but for their row counters."""

import pytest
import torch

from hybridize.mixers.registry import build_mixer
from hybridize.mixers.types import GroupShape
from hybridize.models.families import AttentionShape
from hybridize.ops.sequences import Sequences
from hybridize.plan.bytes import map_parameters, mix_parameters, state_bytes
from hybridize.spec import HybridSpec

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

GROUPS = [
    {"attention": "softmax"},
    {"attention": "softmax", "window": {"kind": "sliding", "size": 4}},
    {"attention": "softmax", "window": {"kind": "terraced", "size": 4, "sinks": 2}},
    {"attention": "linear"},
    {"attention": "linear", "feature_map": {"kind": "t2r", "features": 12, "k_map_heads": "kv"}},
    {"attention": "windowed_linear", "window": {"kind": "terraced", "size": 4}},
    {"attention": "windowed_linear", "window": {"kind": "sliding", "size": 4, "sinks": 3}},
    {"attention": "windowed_linear", "window": {"kind": "sliding", "size": 4}, "normalizer": {"kind": "separate"}},
    {"attention": "windowed_linear", "window": {"kind": "terraced", "size": 4},
     "normalizer": {"kind": "separate", "mix": "mass"}, "feature_map": {"kind": "hedgehog", "features": 6, "k_map_heads": "kv"}},
]  # fmt: skip


def build(group):
    spec = HybridSpec.model_validate({"all": group}).resolve(
        layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    shape = GroupShape(0, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, None, None)
    attention = AttentionShape(
        0, HEADS * HEAD_DIM, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, None, None, True
    )
    return spec, [attention], build_mixer(spec.layers[0].groups[0], shape)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_parameters(group):
    spec, shapes, mixer = build(group)
    held = sum(parameter.numel() for parameter in mixer.parameters())
    assert map_parameters(spec, shapes) + mix_parameters(spec) == held


@pytest.mark.parametrize("length", [23, 40])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_state_bytes(group, length):
    spec, shapes, mixer = build(group)
    torch.manual_seed(0)
    q = torch.randn(1, length, HEADS, HEAD_DIM)
    k, v = torch.randn(2, 1, length, KV_HEADS, HEAD_DIM)
    _, state = mixer.attend(q, k, v, Sequences.dense(1, length), keep_state=True)
    counters = 64
    assert 0 <= state.nbytes - state_bytes(spec, shapes, length, dtype_bytes=4) <= counters
