"""One answer, however the tokens arrive: whole, one by one, in chunks, as a prefix, padded left or right, packed."""

from __future__ import annotations

import pytest
import torch
from tests.models.hybrids import SPECS, W, hybrid, shift_own_parameters, tokens
from tests.models.tiny import MODEL_TYPES, tiny_model
from tests.ops.cases import lengths
from tests.pairwise import label, pairwise

from hybridize.models.modeling import CACHE, HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.spec import HybridSpec

LONGEST = 3 * W + 5
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
ROWS = pairwise(
    {"family": MODEL_TYPES, "spec": ("head-wise", "kept-half", "sliding", "linear"), "tied": (False, True)}
)
ROWS += [{"family": "llama", "spec": spec, "tied": False} for spec in SPECS]


def build(row: dict) -> HybridForCausalLM:
    return hybrid(row["spec"], row["family"], tied=row["tied"])


@pytest.mark.parametrize("row", ROWS, ids=label)
@torch.no_grad()
def test_prefill_decode_chunks_and_prefixes_agree(row):
    model, ids_BT = build(row), tokens(2, LONGEST)
    whole = model(ids_BT, use_cache=False).logits
    for length in lengths(W):
        torch.testing.assert_close(
            model(ids_BT[:, :length], use_cache=False).logits, whole[:, :length], **TOLERANCE
        )
    for sizes in ([1] * LONGEST, [2, 1, 6, 1, LONGEST - 10], [LONGEST - 1, 1]):
        cache, outputs, begin = None, [], 0
        for size in sizes:
            result = model(ids_BT[:, begin : begin + size], **{CACHE: cache}, use_cache=True)
            cache, begin = getattr(result, CACHE), begin + size
            outputs.append(result.logits)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, **TOLERANCE)
        assert cache.get_seq_length() == LONGEST and cache.lengths == [LONGEST] * 2


@pytest.mark.parametrize(
    "row",
    [{**row, "longest": LONGEST} for row in ROWS] + [{**row, "longest": 160} for row in ROWS[-len(SPECS) :]],
    ids=label,
)
@torch.no_grad()
def test_padding_and_packing_change_nothing(row):
    """Rows of 160 tokens cross chunks, which hold 64."""
    model, longest = build(row), row["longest"]
    rows = [tokens(1, n, seed=n) for n in (longest, 1, W + 1, longest // 2)]
    alone = [model(ids, use_cache=False).logits[0] for ids in rows]
    for side in ("left", "right"):
        ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for n, ids in enumerate(rows):
            place = slice(longest - ids.shape[1], None) if side == "left" else slice(0, ids.shape[1])
            ids_BT[n, place], mask_BT[n, place] = ids[0], 1
        logits = model(ids_BT, attention_mask=mask_BT, use_cache=False).logits
        for n in range(len(rows)):
            torch.testing.assert_close(logits[n][mask_BT[n].bool()], alone[n], **TOLERANCE)
        # padded prompts, then the rest through the cache, the mask growing as `generate` grows it
        if side == "left":
            cut = longest - 1  # the shortest row is one token: all padding in the prompt
            cache = model.new_cache()
            first = model(ids_BT[:, :cut], attention_mask=mask_BT[:, :cut], **{CACHE: cache}).logits
            rest = [
                model(ids_BT[:, t : t + 1], attention_mask=mask_BT[:, : t + 1], **{CACHE: cache}).logits
                for t in range(cut, longest)
            ]
            joined = torch.cat([first, *rest], 1)
            for n in range(len(rows)):
                torch.testing.assert_close(joined[n][mask_BT[n].bool()], alone[n], **TOLERANCE)
    packed = torch.cat(rows, 1)
    sizes = [ids.shape[1] for ids in rows]
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in sizes])[None]
    ways = {
        "cu_seqlens": {"cu_seqlens": bounds},
        "position_ids": {"position_ids": positions},
        "both": {"cu_seqlens": bounds, "position_ids": positions},
        "position_ids under a mask of ones": {
            "position_ids": positions,
            "attention_mask": torch.ones_like(packed),
        },
    }
    for name, how in ways.items():
        for n, piece in enumerate(model(packed, **how).logits[0].split(sizes)):
            torch.testing.assert_close(piece, alone[n], **TOLERANCE, msg=lambda m, w=name: f"{w}: {m}")


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_nothing_leaks_between_documents_or_rows(spec):
    """NaN embeddings in one document, one padded row and the padding itself stay where they are."""
    model = hybrid(spec)
    x_BTE = model.get_input_embeddings()(tokens(1, 30))
    bounds = torch.tensor([0, 7, 19, 30])
    clean = model(inputs_embeds=x_BTE, cu_seqlens=bounds).logits
    poisoned = x_BTE.clone()
    poisoned[:, 7:19] = torch.nan
    logits = model(inputs_embeds=poisoned, cu_seqlens=bounds).logits
    assert logits[:, 7:19].isnan().all()
    torch.testing.assert_close(logits[:, :7], clean[:, :7], rtol=0, atol=0)
    torch.testing.assert_close(logits[:, 19:], clean[:, 19:], rtol=0, atol=0)
    rows = x_BTE.view(2, 15, -1).clone()
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, :4] = 0
    clean = model(inputs_embeds=rows, attention_mask=mask).logits
    rows[0], rows[1, :4] = torch.nan, torch.nan
    logits = model(inputs_embeds=rows, attention_mask=mask).logits
    torch.testing.assert_close(logits[1, 4:], clean[1, 4:], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["terraced", "sliding", "kept-half", "head-wise", "halo", "recurrent"])
@torch.no_grad()
def test_low_precision_models_agree_with_float64(spec, dtype):
    """Cached and padded runs in low precision are no further from the float64 model than one plain run may be."""

    def build(kind: torch.dtype) -> HybridForCausalLM:
        teacher = tiny_model("llama", num_hidden_layers=2).to(dtype).to(kind)
        model = hybridize_model(teacher, HybridSpec.model_validate(SPECS[spec]))
        shift_own_parameters(model)
        return model.double() if kind == torch.float64 else model

    model, ids_BT = build(dtype), tokens(2, LONGEST)
    exact = build(torch.float64)(ids_BT, use_cache=False).logits
    assert exact.dtype == torch.float64
    cache, outputs = model.new_cache(), []
    for begin, end in ((0, 6), (6, 7), (7, 8), (8, LONGEST)):
        outputs.append(model(ids_BT[:, begin:end], **{CACHE: cache}).logits)
    for state in (s for layer in cache.states for s in layer):
        far = getattr(state, "far", state)
        if hasattr(far, "S_NJFV"):
            assert far.S_NJFV.dtype == far.z_NJF.dtype == torch.float32
    bound = {torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for logits in (model(ids_BT, use_cache=False).logits, torch.cat(outputs, 1)):
        assert logits.dtype == dtype
        assert (logits.double() - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("spec", ["every-kind", "halo", "recurrent"])
def test_uninitialised_memory_is_never_read(spec):
    """`torch.empty` filled with NaN: forward, backward, a padded prefill and decode stay as they were."""
    model, ids_BT = hybrid(spec), tokens(2, LONGEST)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, :5] = 0

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(ids_BT, attention_mask=mask_BT, use_cache=False).logits
        logits[mask_BT.bool()].square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            cache = model.new_cache()
            outputs = [model(ids_BT[:, :11], attention_mask=mask_BT[:, :11], **{CACHE: cache}).logits]
            outputs += [model(ids_BT[:, t : t + 1], **{CACHE: cache}).logits for t in range(11, LONGEST)]
        return [logits.detach(), torch.cat(outputs, 1), *grads]

    plain = run()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        poisoned = run()
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(poisoned, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", ["every-kind", "halo", "recurrent"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, spec):
    ids_BT = tokens(2, LONGEST)

    def gradients(checkpoint: bool) -> dict[str, torch.Tensor]:
        model = hybrid(spec).train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids_BT, labels=ids_BT).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_cache_under_gradient_checkpointing_is_refused():
    """The second forward inside backward would read states that the first one has moved on."""
    model = hybrid("terraced").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(tokens(1, 5), **{CACHE: model.new_cache()})


@torch.no_grad()
def test_loss_counts_no_padding_and_no_step_between_documents():
    model = hybrid("terraced")
    rows = [tokens(1, n, seed=n) for n in (LONGEST, W + 1)]
    sums = [float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in rows]
    expected = sum(sums) / (sum(ids.shape[1] for ids in rows) - 2)
    packed = torch.cat(rows, 1)
    bounds = torch.tensor([0, LONGEST, LONGEST + W + 1])
    assert float(model(packed, labels=packed, cu_seqlens=bounds).loss) == pytest.approx(expected, rel=1e-5)
    for side in ("left", "right"):
        ids_BT = torch.zeros(2, LONGEST, dtype=torch.long)
        ids_BT[0] = rows[0]
        place = slice(LONGEST - W - 1, None) if side == "left" else slice(0, W + 1)
        ids_BT[1, place] = rows[1]
        mask_BT = (ids_BT > 0).long()
        loss = model(ids_BT, attention_mask=mask_BT, labels=ids_BT).loss
        assert float(loss) == pytest.approx(expected, rel=1e-5), side


def test_accumulated_losses_are_a_token_mean_over_the_whole_step():
    """transformers' Trainer hands `num_items_in_batch` to every micro-batch and divides no more itself."""
    model = hybrid("terraced")
    rows = [tokens(1, n, seed=n) for n in (LONGEST, W + 1)]
    count = sum(ids.shape[1] - 1 for ids in rows)
    parts = [model(ids, labels=ids, num_items_in_batch=torch.tensor(count)).loss for ids in rows]
    means = [model(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in rows]
    torch.testing.assert_close(sum(parts), sum(means) / count)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_do_not_depend_on_how_rows_arrive(spec):
    """Packed and padded batches give the gradients of their documents, one by one."""
    rows = [tokens(1, n, seed=n) for n in (LONGEST, 2, 2 * W + 1)]
    count = sum(ids.shape[1] - 1 for ids in rows)
    ids_BT = torch.zeros(len(rows), LONGEST, dtype=torch.long)
    for n, ids in enumerate(rows):
        ids_BT[n, -ids.shape[1] :] = ids[0]
    packed = torch.cat(rows, 1)
    bounds = torch.tensor([0, *(ids.shape[1] for ids in rows)]).cumsum(0)

    def gradients(calls: list[dict]) -> dict[str, torch.Tensor]:
        model = hybrid(spec)
        for call in calls:
            model(**call, num_items_in_batch=count).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    alone = gradients([{"input_ids": ids, "labels": ids} for ids in rows])
    ways = {
        "packed": [{"input_ids": packed, "labels": packed, "cu_seqlens": bounds}],
        "padded": [{"input_ids": ids_BT, "labels": ids_BT, "attention_mask": (ids_BT > 0).long()}],
    }
    for way, calls in ways.items():
        for name, gradient in gradients(calls).items():
            torch.testing.assert_close(
                gradient, alone[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name, w=way: f"{w} {n}: {m}"
            )


@pytest.mark.parametrize("spec", ["every-kind", "recurrent"])
@torch.no_grad()
def test_long_decode_does_not_drift(spec):
    """Sums taken one token at a time stay with the chunked ones over many windows."""
    model, ids_BT = hybrid(spec), tokens(1, 400)
    whole = model(ids_BT, use_cache=False).logits
    cache = model.new_cache()
    for t in range(400):
        logits = model(ids_BT[:, t : t + 1], **{CACHE: cache}).logits
    torch.testing.assert_close(logits[:, 0], whole[:, -1], rtol=1e-3, atol=1e-3)
