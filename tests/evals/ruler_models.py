"""A tokenizer, essays and models whose answers are known, for the tests of RULER's tasks."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from hybridize.evals.haystacks import Haystack
from hybridize.evals.ruler_tasks import NOISE, QUESTION, VT_QUESTION

TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
WORDS = "The old ship left its harbor at dawn. Nobody saw it go. Rain fell, and the wind rose. By noon it was far away."
ESSAYS = Haystack("essays", tuple(WORDS.split() * 60))
NEEDLE = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the prompts' own words, with a BOS token, digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<user>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([NOISE, QUESTION, VT_QUESTION, WORDS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


class Speaker(nn.Module):
    """A model whose text is a function of its prompt's text; it keeps the sizes of the batches it was given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.tokenizer, self.answer = tokenizer, answer
        self.anchor = nn.Parameter(torch.zeros(1))
        self.batches: list[int] = []

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, pad_token_id: int, **_: object
    ) -> Tensor:
        self.batches.append(len(input_ids))
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            text = self.tokenizer.decode(ids[mask.bool()])
            new = self.tokenizer(self.answer(text), add_special_tokens=False).input_ids[:max_new_tokens]
            rows.append(new + [pad_token_id] * (max_new_tokens - len(new)))
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)


def perfect(prompt: str) -> str:
    """Reads the prompt as a person would: the keys asked for, or the chain from its value on."""
    if value := re.findall(r"are assigned the value (\d+) in the text", prompt):
        names = [re.findall(rf"VAR (\w+) = {value[-1]}", prompt)[-1]]
        while following := re.findall(rf"VAR (\w+) = VAR {names[-1]} ", prompt):
            names.append(following[-1])
        return " ".join(names)
    asked = re.split(r", and |, ", re.findall(r"special magic \w+ for (.*?) mentioned", prompt)[-1])
    return " " + ", ".join(value for key, value in NEEDLE.findall(prompt) if key in asked)


def noise(prompt: str) -> str:
    return " grass sky sun"
