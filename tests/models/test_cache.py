"""The cache object: rows, sizes, snapshots; what a failed call leaves behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.models.hybrids import KEPT, LIGHTNING, LINEAR, MIXTURE, SPECS, WINDOWED, W, hybrid, tokens

from hybridize.models.cache import HybridCache
from hybridize.models.modeling import CACHE
from hybridize.ops.types import State
from hybridize.plan.bytes import state_bytes


@torch.no_grad()
def filled(model, rows: int = 2, length: int = 3 * W + 2) -> HybridCache:
    return getattr(model(tokens(rows, length), use_cache=True), CACHE)


def counters(cache: HybridCache) -> int:
    """Bytes of the row counters, which the closed forms leave out."""

    def count(state: State) -> int:
        nested = [value for value in vars(state).values() if isinstance(value, State)]
        return state.lengths_N.numel() * 8 + sum(map(count, nested))

    return sum(count(state) for layer in cache.states for state in layer)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_match_the_plans_closed_forms(spec):
    model = hybrid(spec)
    for length in (3 * W, 40):
        cache = filled(model, 1, length)
        assert cache.nbytes - counters(cache) == state_bytes(model.spec, model.shapes, length, dtype_bytes=4)


GROWING = ("softmax", "kept-half", "every-kind", "halo", "recurrent")


@pytest.mark.parametrize("spec", [name for name in SPECS if name not in GROWING] + ["lightning", "mixture"])
def test_state_is_constant_in_the_length(spec):
    model = hybrid({"lightning": {"all": LIGHTNING}, "mixture": {"all": MIXTURE}}.get(spec, spec))
    assert len({filled(model, 2, length).nbytes for length in (1, W, 3 * W, 100, 300)}) == 1
    full = {**({"all": KEPT})}
    grown = [filled(hybrid(full), 2, length).nbytes for length in (100, 300)]
    assert grown[1] > 2.9 * grown[0]


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_the_models_own_window_bounds_kept_layers(family):
    """Softmax kept as it was: where the model slides, so does its cache."""
    model = hybrid({"all": KEPT}, family)
    grown = filled(model, 1, 200).nbytes - filled(model, 1, 100).nbytes
    full_layers = sum(shape.window is None for shape in model.shapes)
    assert grown == full_layers * 100 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["every-kind", "recurrent"])
def test_sums_are_float32_and_keys_have_the_models_dtype(spec, dtype):
    model = hybrid(spec).to(dtype)
    kinds = set()
    for state in (state for layer in filled(model).states for state in layer):
        for name, value in [
            *vars(state).items(),
            *vars(getattr(state, "far", state)).items(),
            *vars(getattr(state, "ring", state)).items(),
        ]:
            if name.startswith(("S_", "z_")):
                assert value.dtype == torch.float32
                kinds.add("sum")
            if name.startswith(("k_", "v_", "sink_")):
                assert value.dtype == dtype
                kinds.add("key")
    assert kinds == {"sum", "key"}


@pytest.mark.parametrize("spec", ["every-kind", "recurrent"])
@torch.no_grad()
def test_rows_are_reordered_repeated_and_moved(spec):
    model = hybrid(spec)
    rows = tokens(3, 11)
    cache = getattr(model(rows), CACHE)
    nxt = tokens(3, 2, seed=4)
    expected = model(torch.cat([rows, nxt], 1), use_cache=False).logits[:, -2:]
    chosen = torch.tensor([2, 0, 0])
    reordered = cache.snapshot()
    reordered.reorder_cache(chosen)
    torch.testing.assert_close(
        model(nxt[chosen], **{CACHE: reordered}).logits, expected[chosen], rtol=1e-4, atol=1e-4
    )
    fewer = cache.snapshot()
    fewer.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(model(nxt[1:2], **{CACHE: fewer}).logits, expected[1:2], rtol=1e-4, atol=1e-4)
    twice = cache.snapshot()
    twice.batch_repeat_interleave(2)
    torch.testing.assert_close(
        model(nxt.repeat_interleave(2, 0), **{CACHE: twice}).logits,
        expected.repeat_interleave(2, 0),
        rtol=1e-4,
        atol=1e-4,
    )
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache), cache.snapshot().to("cpu")):
        torch.testing.assert_close(model(nxt, **{CACHE: other}).logits, expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 11
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    torch.testing.assert_close(
        model(rows, **{CACHE: cache}).logits[:, -1], model(rows, use_cache=False).logits[:, -1]
    )


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was():
    model, rows = hybrid("every-kind"), tokens(2, 9)
    cache = getattr(model(rows), CACHE)
    nxt = tokens(2, 3, seed=4)
    expected = model(nxt, **{CACHE: cache.snapshot()}).logits
    last = model.mixers[-1]
    healthy, last.family = last.family, None
    with pytest.raises(AttributeError):
        model(nxt, **{CACHE: cache})
    last.family = healthy
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(model(nxt, **{CACHE: cache}).logits, expected, rtol=0, atol=0)


@torch.no_grad()
def test_rows_of_a_call_must_be_the_caches():
    model = hybrid("terraced")
    with pytest.raises(ValueError, match="the cache holds 2 rows and input_ids has 3"):
        model(tokens(3, 1), **{CACHE: filled(model)})


@torch.no_grad()
def test_all_kinds_cross_the_window_one_token_at_a_time():
    """Layers of different windows in one cache: a cache one token past the smallest window once crashed peers."""
    spec = {
        "all": LINEAR,
        "layers": {
            "0": {**WINDOWED, "window": {"kind": "sliding", "size": 3}},
            "1": {**WINDOWED, "window": {"kind": "terraced", "size": 5}},
            "2": KEPT,
        },
    }
    model, ids = hybrid(spec, layers=4), tokens(1, 13)
    whole = model(ids, use_cache=False).logits
    cache = model.new_cache()
    for t in range(13):
        torch.testing.assert_close(
            model(ids[:, t : t + 1], **{CACHE: cache}).logits[:, 0], whole[:, t], rtol=1e-4, atol=1e-4
        )
