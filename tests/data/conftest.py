"""A tiny word-level chat tokenizer and a cache of its own for every test."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(400)]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} \n {{ m['content'] }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant \n{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(folder))
    monkeypatch.delenv("HYBRIDIZE_WHEELS", raising=False)
    return folder


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {
        word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "user", "assistant", *WORDS])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
