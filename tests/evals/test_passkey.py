"""Prompts of an exact length, and scores of models whose answers are known."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from hybridize.evals import passkey as module
from hybridize.evals.passkey import (
    FILLER,
    KEYS,
    grade,
    make_prompt,
    make_prompts,
    parse_answer,
    passkey,
    spread,
)

TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the prompts' own words, with a BOS token, digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = [module.INSTRUCTION, *FILLER, module.NEEDLE, module.QUESTION]
    special = ["<s>", "</s>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


class Speaker(nn.Module):
    """A model whose text is a function of its prompt's text; it keeps the batches it was given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.tokenizer, self.answer = tokenizer, answer
        self.anchor = nn.Parameter(torch.zeros(1))
        self.batches: list[tuple[Tensor, Tensor]] = []

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, pad_token_id: int, **_: object
    ) -> Tensor:
        assert not torch.is_grad_enabled() and not self.training
        self.batches.append((input_ids, attention_mask))
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            text = self.tokenizer.decode(ids[mask.bool()])
            new = self.tokenizer(self.answer(text), add_special_tokens=False).input_ids[:max_new_tokens]
            rows.append(new + [pad_token_id] * (max_new_tokens - len(new)))
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)


def copied(text: str) -> str:
    found = re.search(r"The pass key is (\d+)\. Remember", text)
    assert found
    return f" {found.group(1)}."


@pytest.mark.parametrize("form", ["raw", "chat"])
@pytest.mark.parametrize("length", [120, 121, 122, 123, 124, 125, 126, 127, 512, 3000])
def test_length_is_the_longest_that_fits(tokenizer: PreTrainedTokenizerFast, length: int, form: str) -> None:
    longest_sentence = max(len(tokenizer(" " + s, add_special_tokens=False).input_ids) for s in FILLER)
    for depth in (0.0, 0.4, 1.0):
        prompt = make_prompt(tokenizer, length, depth, 54321, form=form)
        assert length - longest_sentence < len(prompt.input_ids) <= length
        assert list(prompt.input_ids) == tokenizer(prompt.text, add_special_tokens=form == "raw").input_ids


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_key_stands_once_at_its_depth(tokenizer: PreTrainedTokenizerFast, depth: float) -> None:
    prompt = make_prompt(tokenizer, 2000, depth, 80818, form="raw")
    assert len(re.findall(r"\d+", prompt.text)) == 1 and prompt.text.count("80818") == 1
    assert prompt.text.startswith(module.INSTRUCTION)
    assert prompt.text.endswith("What is the pass key? The pass key is")
    filler = prompt.text[len(module.INSTRUCTION) : prompt.text.index(module.QUESTION)]
    before, after = filler.split(module.NEEDLE.format(key=80818))
    sentences = [part.count(".") for part in (before, after)]
    assert sentences[0] / sum(sentences) == pytest.approx(depth, abs=1 / sum(sentences))
    # Filler runs on across the key as if it were not there.
    cycle = [FILLER[i % len(FILLER)] for i in range(sum(sentences))]
    assert (before.strip() + " " + after.strip()).strip() == " ".join(cycle)


def test_chat_form_begins_the_assistant_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = make_prompt(tokenizer, 300, 0.5, 12345, form="chat")
    assert prompt.text.startswith("<user>A pass key") and prompt.text.endswith("<assistant>\nThe pass key is")
    user, assistant = (tokenizer.convert_tokens_to_ids(name) for name in ("<user>", "<assistant>"))
    assert prompt.input_ids.count(user) == prompt.input_ids.count(assistant) == 1
    assert tokenizer.bos_token_id not in prompt.input_ids, "the template writes its own special tokens"
    assert make_prompt(tokenizer, 300, 0.5, 12345, form="raw").input_ids[0] == tokenizer.bos_token_id


def test_form_is_checked(tokenizer: PreTrainedTokenizerFast) -> None:
    assert make_prompt(tokenizer, 300, 0.5, 12345) == make_prompt(tokenizer, 300, 0.5, 12345, form="raw")
    with pytest.raises(ValueError, match="no chat template"):
        make_prompt(make_tokenizer(template=None), 300, 0.5, 12345, form="chat")
    with pytest.raises(ValueError, match="form is 'auto'; allowed are 'raw' and 'chat'"):
        make_prompt(tokenizer, 300, 0.5, 12345, form="auto")  # type: ignore[arg-type]


def test_keys_are_unique_and_fixed_by_the_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    def keys(lengths: list[int], samples: int = 4, seed: int = 5) -> list[int]:
        return [p.key for p in make_prompts(tokenizer, lengths, spread(3), samples=samples, seed=seed)]

    both = keys([150, 200])
    assert len(set(both)) == len(both) == 24 and all(key in KEYS for key in both)
    assert both == keys([150, 200]) == keys([150, 200, 150])
    assert both[:12] == keys([150]), "another length leaves the earlier ones as they were"
    assert both[:6] == keys([150], samples=2)
    assert both != keys([150, 200], seed=6)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (" 12345.", 12345),
        ("12345", 12345),
        (" the number 99999, not 11111", 99999),
        (" 1234", None),
        (" 123456 or 54321", 54321),
        (" 12 345", None),
        ("", None),
        (" 00123.", 123),
    ],
)
def test_answer_is_the_first_five_digit_number(output: str, answer: int | None) -> None:
    assert parse_answer(output) == answer


def test_a_copying_model_is_perfect(tokenizer: PreTrainedTokenizerFast) -> None:
    model = Speaker(tokenizer, copied).train()
    done: list[tuple[int, int]] = []
    result = passkey(
        model,
        tokenizer,
        [150, 200],
        4,
        samples=3,
        batch_size=5,
        on_progress=lambda *state: done.append(state),
    )
    assert model.training
    assert [(c.length, c.correct, c.samples) for c in result.cells] == [(150, 3, 3)] * 4 + [(200, 3, 3)] * 4
    assert [c.depth for c in result.cells[:4]] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [(a.length, a.accuracy, a.samples, a.high) for a in result.by_length] == [
        (150, 1.0, 12, 1.0),
        (200, 1.0, 12, 1.0),
    ]
    assert result.by_length[0].low == pytest.approx(12 / (12 + 1.96**2), rel=1e-3)
    assert done == [(5, 24), (10, 24), (15, 24), (20, 24), (24, 24)]
    for input_ids, mask in model.batches:
        assert (mask.diff(dim=1) >= 0).all() and (mask[:, -1] == 1).all(), "padding is on the left"
        assert (input_ids[mask == 0] == tokenizer.eos_token_id).all(), (
            "an absent pad token is lent by the end token"
        )


def test_errors_land_in_the_right_cells(tokenizer: PreTrainedTokenizerFast) -> None:
    """A model that sees only the last 400 characters finds late keys only."""

    def nearsighted(text: str) -> str:
        found = re.search(r"The pass key is (\d{5})\.", text[-400:])
        return f" {found.group(1)}" if found else " a secret."

    result = passkey(
        Speaker(tokenizer, nearsighted), tokenizer, [600], [0.0, 0.5, 1.0], samples=2, form="raw"
    )
    assert [(c.depth, c.correct) for c in result.cells] == [(0.0, 0), (0.5, 0), (1.0, 2)]
    assert result.by_length[0].accuracy == pytest.approx(1 / 3)
    assert [(e.depth, e.correct, e.output, e.answer) for e in result.examples] == [
        (0.0, False, " a secret.", None),
        (1.0, True, f" {result.examples[1].key}", result.examples[1].key),
    ]
    assert (
        passkey(Speaker(tokenizer, nearsighted), tokenizer, [600], [0.0, 0.5, 1.0], samples=2, form="raw")
        == result
    )


def test_another_key_is_wrong(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = make_prompt(tokenizer, 150, 0.5, 55555)
    assert grade(prompt, " 55555").correct
    assert not grade(prompt, " 44444, no: 55555").correct


def test_evenly_spread_depths() -> None:
    assert spread(1) == (0.5,)
    assert spread(5) == (0, 0.25, 0.5, 0.75, 1)
    assert spread([0.1, 0.1, 0.9]) == (0.1, 0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [10]}, "lengths contains 10; the prompt without filler already has"),
        ({"lengths": []}, "lengths is empty"),
        ({"depths": 0}, "depths is 0"),
        ({"depths": [1.5]}, r"depths is \[1.5\]"),
        ({"samples": 0}, "samples is 0"),
        ({"samples": 10_000}, "asks for 100000 keys"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_input(tokenizer: PreTrainedTokenizerFast, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        passkey(Speaker(tokenizer, copied), tokenizer, **{"lengths": [150], **arguments})
