"""`generate` with the hybrid cache: greedy, sampled, beams, padded batches, chunked prefill, continued caches."""

from __future__ import annotations

import pytest
import torch
from tests.models.hybrids import SPECS, hybrid, tokens
from tests.models.tiny import MODEL_TYPES
from tests.pairwise import label, pairwise
from transformers import DynamicCache

from hybridize.models.cache import HybridCache
from hybridize.models.modeling import CACHE

STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False},
    "beam-samples": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
}
PLAIN = {"pad_token_id": 0, "eos_token_id": None}
ROWS = pairwise({"strategy": tuple(STRATEGIES), "spec": tuple(SPECS)})
ROWS += [{"strategy": "greedy", "spec": "head-wise", "family": family} for family in MODEL_TYPES]


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(ids.shape[1] for ids in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for n, ids in enumerate(rows):
        ids_BT[n, longest - ids.shape[1] :], mask_BT[n, longest - ids.shape[1] :] = ids[0], 1
    return ids_BT, mask_BT


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_cached_equals_uncached(row):
    """On a left-padded batch; the same seed for samples."""
    model = hybrid(row["spec"], row.get("family", "llama"))
    ids_BT, mask_BT = left_padded([tokens(1, n, seed=n) for n in (9, 3)])
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        outputs.append(
            model.generate(
                ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=9,
                use_cache=use_cache,
                **STRATEGIES[row["strategy"]],
                **PLAIN,
            )
        )
    assert outputs[0].shape[1] == 18
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("spec", SPECS)
def test_rows_that_finish_apart_equal_their_own_generation(spec):
    model = hybrid(spec)
    rows = [tokens(1, n, seed=n) for n in (12, 1, 5)]
    ids_BT, mask_BT = left_padded(rows)
    free = model.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=12, do_sample=False, **PLAIN)[:, 12:]
    stop = int(free[1, 4])  # ends row 1 early, the others where they happen to say it
    together = model.generate(
        ids_BT, attention_mask=mask_BT, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=stop
    )[:, 12:]
    for n, ids in enumerate(rows):
        alone = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=stop)[
            0, ids.shape[1] :
        ]
        torch.testing.assert_close(together[n, : len(alone)], alone)
        assert (together[n, len(alone) :] == 0).all()
    assert (together[1] == stop).any()


@pytest.mark.parametrize("spec", ["terraced", "every-kind", "recurrent"])
@pytest.mark.parametrize("size", [1, 3, 5, 11, 64])
def test_chunked_prefill(spec, size):
    model = hybrid(spec)
    ids_BT, mask_BT = left_padded([tokens(1, n, seed=n) for n in (11, 4)])
    options = {"max_new_tokens": 6, "do_sample": False, **PLAIN}
    whole = model.generate(ids_BT, attention_mask=mask_BT, **options)
    chunked = model.generate(ids_BT, attention_mask=mask_BT, prefill_chunk_size=size, **options)
    torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize("spec", ["terraced", "every-kind", "recurrent"])
def test_a_cache_of_the_callers_own_goes_on_over_several_calls(spec):
    model, ids_BT = hybrid(spec), tokens(2, 7)
    options = {"do_sample": False, **PLAIN}
    cache = model.new_cache()
    first = model.generate(ids_BT, max_new_tokens=4, **{CACHE: cache}, **options)
    assert cache.get_seq_length() == 10  # the last token of an answer is not in the cache yet
    question = torch.cat([first, tokens(2, 5, seed=9)], 1)
    second = model.generate(question, max_new_tokens=5, **{CACHE: cache}, **options)
    torch.testing.assert_close(second, model.generate(question, max_new_tokens=5, **options))
    assert cache.get_seq_length() == 7 + 4 + 5 + 4


@pytest.mark.parametrize("spec", SPECS)
def test_a_prefix_is_computed_once(spec):
    """Several continuations of one prefix from a snapshot; one row repeated; the prefix itself stays as it was."""
    model, prefix = hybrid(spec), tokens(1, 9)
    options = {"max_new_tokens": 5, "do_sample": False, **PLAIN}
    cache = model.new_cache()
    with torch.no_grad():
        model(prefix, **{CACHE: cache})
    kept = cache.snapshot()
    for seed in (1, 2):
        ids = torch.cat([prefix, tokens(1, 4, seed=seed)], 1)
        ours = model.generate(ids, **{CACHE: kept.snapshot()}, **options)
        torch.testing.assert_close(ours, model.generate(ids, **options))
        torch.testing.assert_close(model.generate(ids, **{CACHE: cache}, **options), ours)
        cache.restore(kept)
    assert cache.get_seq_length() == kept.get_seq_length() == 9
    cache.batch_repeat_interleave(2)
    ids = torch.cat([prefix.repeat(2, 1), tokens(2, 4, seed=3)], 1)
    torch.testing.assert_close(
        model.generate(ids, **{CACHE: cache}, **options), model.generate(ids, **options)
    )


def test_generation_from_embeddings():
    model, ids_BT = hybrid("every-kind"), tokens(2, 7)
    options = {"max_new_tokens": 6, "do_sample": False, **PLAIN}
    x_BTE = model.get_input_embeddings()(ids_BT)
    torch.testing.assert_close(
        model.generate(inputs_embeds=x_BTE, **options), model.generate(ids_BT, **options)[:, 7:]
    )


def test_what_cannot_work_is_refused():
    model, other, ids = hybrid("terraced"), hybrid("linear"), tokens(1, 7)
    options = {"max_new_tokens": 3, "do_sample": False, **PLAIN}
    with pytest.raises(ValueError, match="(?i)assisted"):
        model.generate(ids, assistant_model=other, **options)
    with pytest.raises(ValueError, match="(?i)assisted|prompt lookup|stateful"):
        model.generate(ids, prompt_lookup_num_tokens=2, **options)
    with pytest.raises(ValueError, match="DynamicCache; a hybrid model takes a HybridCache"):
        model.generate(ids, **{CACHE: DynamicCache()}, **options)
    with pytest.raises(ValueError, match="DynamicCache; a hybrid model takes a HybridCache"):
        model(ids, **{CACHE: DynamicCache()})
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        model.generate(ids, cache_implementation="static", **options)
    with pytest.raises(
        ValueError, match=r"the cache has \[1, 1\] states by layer; this model needs \[2, 2\]"
    ):
        hybrid("head-wise")(ids, **{CACHE: model.new_cache()})
    with pytest.raises(ValueError, match="cannot be cropped"):
        HybridCache([1]).crop(3)


@torch.no_grad()
def test_the_teacher_inside_generates_without_a_cache_only():
    """Attention that is intercepted keeps no state: a cached step would see one token."""
    model, ids = hybrid("terraced"), tokens(1, 7)
    options = {"max_new_tokens": 5, "do_sample": False, **PLAIN}
    with model.as_teacher():
        assert getattr(model(ids), CACHE) is None
        with pytest.raises(ValueError, match="use_cache=False"):
            model.generate(ids, **options)
        answer = model.generate(ids, use_cache=False, **options)
        for t in range(7, 12):
            assert int(model(answer[:, :t]).logits[0, -1].argmax()) == int(answer[0, t])
