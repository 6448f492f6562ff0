"""What these tests convert: a tiny random teacher with a word tokenizer, a small text, a recipe of a few steps."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.models.tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridize.data import DataSpec, build_rows
from hybridize.data.batching import Batch, make_batch
from hybridize.recipe import Recipe

LENGTH = 64
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
WORDS = [a + b for a in ("ba", "de", "fi", "go", "lu", "ma", "ne", "ri", "so") for b in "bdfglmnrst"]
WINDOWED = {
    "attention": "windowed_linear",
    "window": {"kind": "terraced", "size": 8},
    "normalizer": {"kind": "shared", "gamma": 0.1},
    "feature_map": {"kind": "hedgehog"},
}
RECIPE: dict[str, Any] = {
    "spec": {"all": WINDOWED},
    "data": {"length": LENGTH},
    "precision": "fp32",
    "steps": [
        {
            "transfer": {
                "tokens": 12 * 4 * LENGTH,
                "batch": {"rows": 4},
                "eval_every": 6,
                "validation_rows": 4,
            }
        },
        {
            "finetune": {
                "tokens": 8 * 4 * LENGTH,
                "batch": {"rows": 4},
                "eval_every": 4,
                "validation_rows": 4,
                "lr": 0.01,
            }
        },
    ],
    "evaluation": None,
}


def tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """A word is a token; `extra` more words than the tiny model has embeddings for where they exceed its 128."""
    words = [*SPECIAL, *WORDS, *(f"extra{i}" for i in range(extra))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def write_teacher(folder: Path, model_type: str = "llama", extra: int = 0, **overrides: Any) -> Path:
    """A random model and its tokenizer, as a folder."""
    tiny_model(model_type, **overrides).save_pretrained(folder)
    tokenizer(extra).save_pretrained(folder)
    return folder


def sentences(seed: int, words: int) -> str:
    """A text with something to learn: each word has two likely successors."""
    drawn = random.Random(seed)
    here, text = drawn.randrange(len(WORDS)), []
    for _ in range(words):
        text.append(WORDS[here])
        here = (7 * here + drawn.choice((1, 1, 1, 5))) % len(WORDS)
    return " ".join(text)


def write_text(folder: Path, documents: int = 60) -> Path:
    """A folder of documents of uneven lengths that declare their splits."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", documents), ("validation", 8), ("test", 8)):
        for i in range(count):
            words = 20 + (37 * i) % 180
            (folder / f"{split}-{i:03d}.txt").write_text(sentences(hash_of(split, i), words))
    return folder


def write_questions(folder: Path) -> Path:
    """Prompts and responses as jsonl, for the masking of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 24), ("validation", 6), ("test", 6)):
        records = (
            {"prompt": sentences(hash_of(split, i), 15), "response": sentences(hash_of(split, i) + 1, 9)}
            for i in range(count)
        )
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return folder


def hash_of(split: str, i: int) -> int:
    return {"train": 0, "validation": 10_000, "test": 20_000}[split] + 10 * i


def plain(source: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """`RECIPE` on the text in `source`; `changes` by dotted path, list indices as numbers."""
    raw = copy.deepcopy(RECIPE)
    raw["data"]["source"] = str(source)
    for path, value in (changes or {}).items():
        here: Any = raw
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            here = here[part]
        here[last] = copy.deepcopy(value)
    return raw


def recipe(source: Path, changes: dict[str, Any] | None = None) -> Recipe:
    return Recipe.from_dict(plain(source, changes))


def batch(source: Path, rows: int = 4, split: str = "train", length: int = LENGTH) -> Batch:
    """The first rows of the text."""
    packed = build_rows(DataSpec(source=str(source), length=length), tokenizer(), split, rows * length)
    return make_batch(packed, range(rows))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The student's weights as a run has saved them."""
    return load_file(run / "model" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all weights are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
