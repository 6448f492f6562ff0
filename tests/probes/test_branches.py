"""Parts of the output, shares, layers and heads: each against the formula or a finite difference; the control's bytes."""

from __future__ import annotations

import pytest
import torch
from tests.convert import bench
from tests.models.hybrids import SPECS, hybrid

from hybridize.models.surgery import resolve_spec
from hybridize.ops.sequences import Sequences
from hybridize.plan.bytes import state_bytes
from hybridize.probes.branches import Removed, branch_statistics, loss_rises
from hybridize.probes.controls import LONG, SINKS, window_control, window_sizes
from hybridize.probes.token_losses import token_losses
from hybridize.spec import HybridSpec

TWO_BRANCHES = ["terraced", "sliding"]


@pytest.fixture(scope="module")
def batches(text):
    return [bench.batch(text, rows=2, split="test")]


@pytest.mark.parametrize("spec", TWO_BRANCHES)
@torch.no_grad()
def test_parts_add_up_and_shares_are_sums_of_coefficients(spec):
    mixer = hybrid(spec).mixers[0].mixers[0]
    q, k, v = (torch.randn(1, 23, heads, mixer.shape.head_dim) for heads in (4, 2, 2))
    sequences = Sequences.dense(1, 23)
    near, far, share = mixer.parts(q, k, v, sequences)
    torch.testing.assert_close(near + far, mixer.attend(q, k, v, sequences)[0], rtol=1e-4, atol=1e-5)
    t, i = torch.arange(23)[:, None], torch.arange(23)
    weights = mixer.coefficients(q, k, slice(None)) * mixer.window.far(t, i)
    torch.testing.assert_close(share[0].T, weights[0].sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", TWO_BRANCHES)
def test_statistics(spec, batches):
    model = hybrid(spec)
    found = branch_statistics(model, batches)
    assert len(found.near_norm) == len(model.mixers)
    assert all(0 < share < 1 for share in found.far_share) and all(-1 <= c <= 1 for c in found.cosine)
    assert found.by_position[0][0] == 0 and all(
        0 < s < 1 for _, _, shares in found.by_position for s in shares
    )
    mixed = branch_statistics(hybrid("kept-half"), batches)
    assert mixed.far_norm[1] is None and mixed.far_norm[0] is not None


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_one_layer_or_head_removed_is_its_override(batches, family):
    model = hybrid("kept-half", family, layers=3)
    whole = token_losses(model, batches)
    first = model.first_far_position
    far = whole.from_position(first)
    rises = loss_rises(model, batches, first, "renormalize")
    assert list(rises) == [Removed(0), Removed(2)]
    for layer in (0, 2):
        with model.override("softmax_only", "renormalize", layers=[layer]):
            expected = token_losses(model, batches).less(whole, far)
        assert rises[Removed(layer)] == expected and abs(expected.value) > 1e-6
    heads = loss_rises(model, batches, first, "zero", heads=True)
    assert len(heads) == 2 * model.shapes[0].heads
    where = torch.zeros(1, 1, model.shapes[0].heads, dtype=torch.bool)
    where[..., 1] = True
    with model.override("softmax_only", "zero", layers=[2], where=where):
        expected = token_losses(model, batches).less(whole, far)
    assert heads[Removed(2, 1)] == expected and abs(expected.value) > 1e-7
    assert torch.equal(token_losses(model, batches).nll_NT.nan_to_num(), whole.nll_NT.nan_to_num())


@pytest.mark.parametrize("spec", ["terraced", "sliding", "linear", "kept-half", "head-wise", "every-kind"])
def test_the_control_has_the_students_bytes(spec):
    model = hybrid(spec, head_dim=64)
    control = window_control(model.spec, model.shapes, 2)
    ours, theirs = (state_bytes(s, model.shapes, LONG, 2) for s in (model.spec, control))
    one_key = 2 * model.shapes[0].kv_heads * model.shapes[0].head_dim * 2
    assert ours - one_key * len(model.shapes) < theirs <= ours
    assert all(size > 0 for size in window_sizes(control))
    full = HybridSpec.model_validate(SPECS["softmax"])
    resolved = resolve_spec(full, model.config.base_config())
    assert window_control(resolved, model.shapes, 2) == resolved


def test_heads_of_full_softmax_beside_others_stay_the_teachers():
    groups = [
        {"attention": "lightning", "heads": "1/2"},
        {"attention": "softmax", "heads": "1/2", "position": "none"},
    ]
    model = hybrid({"all": {"groups": groups}}, head_dim=64)
    control = window_control(model.spec, model.shapes, 2)
    assert [group.window for group in control.layers[0].groups][1] is None
    (size,) = window_sizes(control)
    assert 0 < size < 1000  # not as many keys as the full heads hold at some length
    at = (state_bytes(spec, model.shapes, 4096, 2) for spec in (model.spec, control))
    ours, theirs = at
    one_key = 2 * model.shapes[0].head_dim * 2  # of the one KV head
    assert ours - one_key * len(model.shapes) < theirs <= ours


def test_a_state_smaller_than_a_key_has_no_control():
    model = hybrid({"all": {"attention": "softmax", "window": {"kind": "sliding", "size": SINKS}}})
    assert window_control(model.spec, model.shapes, 2) is None
