"""Perplexity against a plain float64 computation, one document at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hybridize.evals import perplexity as module
from hybridize.evals.perplexity import PerplexityResult, perplexity
from hybridize.losses import IGNORE

VOCABULARY = 61


@dataclass(frozen=True)
class Rows:
    input_ids_BT: Tensor
    labels_BT: Tensor
    position_ids_BT: Tensor


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attention_dropout=0.5,
    )
    return LlamaForCausalLM(config)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def oracle(model: LlamaForCausalLM, document_T: Tensor, labels_T: Tensor | None = None) -> dict[int, float]:
    """Query position -> nll of one document alone, log-softmax in float64."""
    labels_T = document_T if labels_T is None else labels_T
    model.eval()
    with torch.no_grad():
        log_p_TV = model(input_ids=document_T[None]).logits[0].double().log_softmax(-1)
    targets = labels_T.tolist()
    return {
        t: -log_p_TV[t, targets[t + 1]].item() for t in range(len(targets) - 1) if targets[t + 1] != IGNORE
    }


def assert_equals(result: PerplexityResult, nlls: list[dict[int, float]]) -> None:
    flat = [value for nll in nlls for value in nll.values()]
    assert result.tokens == len(flat)
    assert result.nll_sum == pytest.approx(math.fsum(flat), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(math.fsum(flat) / len(flat)), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 64])
def test_rows_with_masked_labels(model: LlamaForCausalLM, batch_size: int) -> None:
    rows_NT = tokens(7, 23)
    labels_NT = rows_NT.clone()
    labels_NT[torch.rand(7, 23, generator=torch.Generator().manual_seed(2)) < 0.4] = IGNORE
    labels_NT[3] = IGNORE
    result = perplexity(model, rows_NT, labels=labels_NT, batch_size=batch_size)
    assert_equals(result, [oracle(model, row, label) for row, label in zip(rows_NT, labels_NT, strict=True)])
    assert result.rows == 7


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_packed_batches_equal_documents_alone(
    model: LlamaForCausalLM, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENS_PER_CHUNK", chunk)
    lengths = [[5, 1, 14], [20], [9, 11], [2, 2, 16], [7, 13]]
    documents = [[tokens(n, seed=17 * i + j) for j, n in enumerate(row)] for i, row in enumerate(lengths)]
    ids = torch.stack([torch.cat(row) for row in documents])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    batches = [Rows(ids[:2], ids[:2], positions[:2]), Rows(ids[2:], ids[2:], positions[2:])]
    nlls = [oracle(model, document) for row in documents for document in row]
    assert_equals(perplexity(model, batches), nlls)
    assert_equals(perplexity(model, iter(batches)), nlls)
    assert_equals(perplexity(model, ids, position_ids=positions, batch_size=2), nlls)
    # Without positions the documents leak into each other, so that this test could fail.
    assert perplexity(model, ids).tokens > len(lengths) and perplexity(model, ids).tokens != sum(
        map(len, nlls)
    )


def test_documents_of_any_length_equal_documents_alone(model: LlamaForCausalLM) -> None:
    documents = [tokens(n, seed=n) for n in (3, 17, 2, 30, 1, 8)]
    result = perplexity(model, [document.tolist() for document in documents], batch_size=4)
    assert_equals(result, [oracle(model, document) for document in documents])


def test_buckets_add_up_and_follow_positions(model: LlamaForCausalLM) -> None:
    rows_NT = tokens(4, 40)
    nlls = [oracle(model, row) for row in rows_NT]
    result = perplexity(model, rows_NT, buckets=(0, 8, 16, 30), split_at=13)
    assert [(b.start, b.end) for b in result.by_position] == [(0, 8), (8, 16), (16, 30), (30, None)]
    for bucket in result.by_position:
        inside = [v for nll in nlls for p, v in nll.items() if bucket.start <= p < (bucket.end or 99)]
        assert bucket.tokens == len(inside)
        assert bucket.nll_sum == pytest.approx(math.fsum(inside), rel=1e-5)
        assert bucket.perplexity == pytest.approx(math.exp(math.fsum(inside) / len(inside)), rel=1e-5)
    assert sum(b.tokens for b in result.by_position) == result.tokens
    assert math.fsum(b.nll_sum for b in result.by_position) == pytest.approx(result.nll_sum, rel=1e-12)

    near, far = result.near_only, result.far_eligible
    assert near is not None and far is not None
    assert (near.tokens, far.tokens) == (4 * 13, 4 * 26)
    assert near.nll_sum + far.nll_sum == pytest.approx(result.nll_sum, rel=1e-12)
    assert far.nll_sum == pytest.approx(
        math.fsum(v for nll in nlls for p, v in nll.items() if p >= 13), rel=1e-5
    )
    assert result.far_share == pytest.approx(26 / 39)


def test_default_buckets_omit_empty_ones(model: LlamaForCausalLM) -> None:
    result = perplexity(model, tokens(1, 150))
    assert [(b.start, b.end, b.tokens) for b in result.by_position] == [
        (0, 64, 64),
        (64, 128, 64),
        (128, 256, 21),
    ]


def test_interval_and_error_come_from_rows(model: LlamaForCausalLM) -> None:
    rows_NT = tokens(12, 20)
    result = perplexity(model, rows_NT, byte_count=1000)
    again = perplexity(model, rows_NT, byte_count=1000, batch_size=12)
    assert (again.low, again.high) == pytest.approx((result.low, result.high), rel=1e-5)
    assert result.low is not None and result.high is not None
    assert result.low < result.perplexity < result.high
    means = torch.tensor([sum(nll.values()) / len(nll) for nll in (oracle(model, row) for row in rows_NT)])
    assert result.standard_error == pytest.approx((means.std() / 12**0.5).item(), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(result.nll_sum / math.log(2) / 1000)

    single = perplexity(model, rows_NT[:1])
    assert (single.low, single.high, single.standard_error, single.bits_per_byte) == (None, None, None, None)


def test_training_flag_and_gradients_are_left_alone(model: LlamaForCausalLM) -> None:
    """Attention dropout is on in training: evaluation must switch it off and restore it."""
    rows_NT = tokens(3, 16)
    model.train()
    first, second = perplexity(model, rows_NT), perplexity(model, rows_NT)
    assert model.training
    assert first == second
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert perplexity(model, rows_NT) == first


def test_half_precision_logits_are_summed_in_float32(model: LlamaForCausalLM) -> None:
    rows_NT = tokens(3, 50)
    half = LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    assert_equals(perplexity(half, rows_NT), [oracle(half, row) for row in rows_NT])


def test_progress_counts_rows(model: LlamaForCausalLM) -> None:
    seen: list[tuple[int, int]] = []
    perplexity(model, tokens(5, 8), batch_size=2, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_nan_logits_are_refused(model: LlamaForCausalLM) -> None:
    broken = LlamaForCausalLM(model.config).eval()
    with torch.no_grad():
        broken.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN logits"):
        perplexity(broken, tokens(2, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": tokens(2, 1)}, "no token that counts"),
        ({"rows": tokens(0, 8)}, "no token that counts"),
        ({"rows": []}, "no token that counts"),
        ({"rows": tokens(2, 8), "labels": torch.full((2, 8), IGNORE)}, "no token that counts"),
        ({"rows": tokens(8)}, r"rows has shape \(8,\)"),
        ({"rows": tokens(2, 8), "labels": tokens(2, 7)}, r"labels has shape \(2, 7\)"),
        ({"rows": [[1, 2]], "labels": tokens(1, 2)}, "labels and position_ids go with rows"),
        ({"rows": tokens(2, 8), "buckets": (1, 4)}, "edges must start at 0"),
        ({"rows": tokens(2, 8), "buckets": (0, 4, 4)}, "edges must start at 0"),
        ({"rows": tokens(2, 8), "split_at": -1}, "split_at is -1"),
        ({"rows": tokens(2, 8), "batch_size": 0}, "batch_size is 0"),
        ({"rows": tokens(2, 8), "byte_count": 0}, "byte_count is 0"),
    ],
)
def test_bad_input(model: LlamaForCausalLM, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(model, **arguments)
