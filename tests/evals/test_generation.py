"""Batched greedy continuations against one forward pass a token."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridize.evals.generation import greedy_ids, left_pad


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def test_equals_argmax_of_each_prompt_alone(model: LlamaForCausalLM) -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(50, (n,), generator=generator).tolist() for n in (3, 9, 1, 6, 6)]
    # A checkpoint's own sampling defaults and penalties must not count.
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 5.0
    expected = []
    model.eval()
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(7):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    for batch_size in (1, 2, 5):
        assert greedy_ids(model, prompts, max_new_tokens=7, pad_token_id=0, batch_size=batch_size) == expected


def test_left_pad() -> None:
    ids, mask = left_pad([[5, 6, 7], [8]], pad_token_id=1)
    assert ids.tolist() == [[5, 6, 7], [1, 1, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_bad_input(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="prompts holds an empty prompt"):
        greedy_ids(model, [[1], []], max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        greedy_ids(model, [[1]], max_new_tokens=2, pad_token_id=0, batch_size=0)
