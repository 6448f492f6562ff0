"""Losses token by token, pairs of models, and the need of the far past against brute force."""

from __future__ import annotations

import pytest
import torch
from tests.convert import bench
from tests.models.hybrids import hybrid
from tests.models.tiny import tiny_model

from hybridize.evals.perplexity import perplexity
from hybridize.probes.need import USEFUL, measure_need
from hybridize.probes.token_losses import TokenLosses, estimate, token_losses


@pytest.fixture(scope="module")
def batches(text):
    return [bench.batch(text, rows=3, split="test"), bench.batch(text, rows=2, split="validation")]


def test_a_model_less_itself_is_zero_and_its_interval_too(batches):
    losses = token_losses(hybrid("terraced"), batches)
    same = losses.less(losses, losses.from_position(8))
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0) and same.tokens > 0


def test_the_summary_is_what_perplexity_measures(batches):
    model = hybrid("terraced")
    ours, theirs = token_losses(model, batches).summary(8), perplexity(model, batches, split_at=8)
    assert ours == theirs


def test_pairs_are_counted_where_asked():
    nan = float("nan")
    a = TokenLosses(torch.tensor([[1.0, nan, 3.0], [2.0, 2.0, nan]]).double(), torch.arange(3).expand(2, 3))
    b = TokenLosses(torch.tensor([[0.5, nan, 1.0], [2.0, 3.0, nan]]).double(), torch.arange(3).expand(2, 3))
    everything, late = a.less(b), a.less(b, a.from_position(1))
    assert (everything.value, everything.tokens) == ((0.5 + 2 + 0 - 1) / 4, 4)
    assert (late.value, late.tokens) == ((2 - 1) / 2, 2)
    assert late.low <= late.value <= late.high
    assert a.less(b, a.from_position(3)) is None
    assert a.mean(a.from_position(1)).value == 2.5
    assert estimate([2.0], [4]).low is None and estimate([0.0], [4]).low == 0.0


@pytest.mark.parametrize("context", [1, 2, 5, 8])
@torch.no_grad()
def test_need_by_brute_force(batches, context):
    """Every counted token read again with its cut context, one at a time."""
    teacher = tiny_model("llama")
    whole = token_losses(teacher, batches)
    split_at, block = 9, max(1, context // 2)
    need = measure_need(teacher, batches, whole, split_at, context)
    total, useful, tokens, row = 0.0, 0, 0, 0
    for batch in batches:
        for ids, positions in zip(batch.input_ids_BT, batch.position_ids_BT, strict=True):
            for t in range(len(ids) - 1):
                position = int(positions[t])
                if position < split_at or positions[t + 1] == 0:
                    continue
                # the block that the query falls in begins here
                begin = t - (position - split_at) % block
                left = max(t - position, begin - context + 1)
                logits = teacher(ids[None, left : t + 1]).logits[0, -1].double()
                cut = -logits.log_softmax(-1)[ids[t + 1]]
                fall = float(cut - whole.nll_NT[row, t])
                total, useful, tokens = total + fall, useful + (fall >= USEFUL), tokens + 1
                assert context <= t - left + 1 <= context + block or left == t - position
            row += 1
    assert need.need.tokens == tokens > 50
    assert need.need.value == pytest.approx(total / tokens, abs=1e-5)
    assert need.useful_share == pytest.approx(useful / tokens, abs=0.01)


def test_a_text_without_far_tokens_needs_nothing(batches):
    teacher = tiny_model("llama")
    assert measure_need(teacher, batches, token_losses(teacher, batches), 1000, 8) is None
