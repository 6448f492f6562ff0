"""The evaluations on a hybrid model: packed, padded and alone give the same numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridize.evals.generation import greedy_ids
from hybridize.evals.perplexity import perplexity
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.spec import HybridSpec

SPEC = {
    "all": {
        "attention": "windowed_linear",
        "window": {"kind": "terraced", "size": 4},
        "normalizer": {"kind": "shared", "gamma": 0.1},
        "feature_map": {"kind": "hedgehog", "features": 16},
    },
    "layers": {"1": {"attention": "softmax"}},
}


@pytest.fixture(scope="module")
def model() -> HybridForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    return hybridize_model(LlamaForCausalLM(config), HybridSpec.model_validate(SPEC))


def documents(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(61, (n,), generator=generator).tolist() for n in lengths]


def test_packed_and_padded_perplexity_equal_documents_alone(model: HybridForCausalLM) -> None:
    texts = documents(13, 17, 30, 9, 21)
    alone = [perplexity(model, torch.tensor([text]), split_at=8) for text in texts]
    packed = torch.tensor([texts[0] + texts[1], texts[2], texts[3] + texts[4]])
    positions = torch.tensor([[*range(13), *range(17)], [*range(30)], [*range(9), *range(21)]])
    for result in (
        perplexity(model, packed, position_ids=positions, split_at=8, batch_size=2),
        perplexity(model, texts, split_at=8, batch_size=3),
    ):
        assert result.tokens == sum(part.tokens for part in alone)
        assert result.nll_sum == pytest.approx(sum(part.nll_sum for part in alone), rel=1e-5)
        assert result.far_eligible is not None
        far = [part.far_eligible for part in alone]
        assert result.far_eligible.tokens == sum(part.tokens for part in far if part)
        assert result.far_eligible.nll_sum == pytest.approx(
            sum(part.nll_sum for part in far if part), rel=1e-5
        )


def test_far_split_matches_the_window(model: HybridForCausalLM) -> None:
    """Terraced 4 has far keys from position 8 on: removing them changes those predictions and no other."""
    rows = torch.tensor(documents(30, 30))
    hybrid = perplexity(model, rows, split_at=8)
    with model.override(mode="softmax_only"):
        near = perplexity(model, rows, split_at=8)
    assert near.near_only is not None and hybrid.near_only is not None
    assert near.far_eligible is not None and hybrid.far_eligible is not None
    assert near.near_only.nll_sum == pytest.approx(hybrid.near_only.nll_sum, rel=1e-6)
    assert abs(near.far_eligible.nll - hybrid.far_eligible.nll) > 1e-3


def test_batched_generation_equals_prompts_alone(model: HybridForCausalLM) -> None:
    prompts = documents(3, 19, 8, 12)
    alone = [greedy_ids(model, [prompt], max_new_tokens=9, pad_token_id=0)[0] for prompt in prompts]
    assert greedy_ids(model, prompts, max_new_tokens=9, pad_token_id=0, batch_size=3) == alone
