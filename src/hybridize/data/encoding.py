"""Documents to tokens: which tokens are targets, and whether tokenizer and model fit together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridize.data.documents import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Segment:
    """Part of a document; `target` says whether its tokens are to be predicted."""

    text: str
    target: bool


@dataclass(frozen=True)
class EncodedDocument:
    tokens: list[int]
    targets: list[bool]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids the model has no embedding for.

    Raises:
        ValueError: the largest id is `vocab_size` or more. A smaller vocabulary is fine: models pad theirs.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise ValueError(
            f"tokenizer has ids up to {largest}, but the model's vocab_size is {vocab_size}; "
            f"use the tokenizer that belongs to the model, or resize the model's embeddings first"
        )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of everything that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = (
        json.loads(backend.to_str()) if backend else {"vocab": sorted(tokenizer.get_vocab().items())}
    )
    # The last call's padding and truncation stay in the backend; they change no token here.
    state |= {"padding": None, "truncation": None}
    state |= {"special": tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(state, sort_keys=True, default=str).encode()).hexdigest()


def segments(
    document: Document, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool, mask_prompt: bool
) -> list[Segment]:
    """Cut a document where prompts end and replies begin.

    Without a chat template the response follows the prompt after an empty line. Segments are tokenised apart, as they
    are in generation, where the prompt is complete before the first token of the reply exists.

    Raises:
        ValueError: a chat template is needed and the tokenizer has none, or it renders no reply after its prompt.
    """
    if document.text is not None:
        return [Segment(document.text, True)]
    messages = [dict(message) for message in document.messages or ()]
    if chat_template and not messages:
        messages = [
            {"role": "user", "content": str(document.prompt)},
            {"role": "assistant", "content": str(document.response)},
        ]
    if messages:
        return _chat_segments(messages, tokenizer, mask_prompt)
    prompt = str(document.prompt)
    gap = "" if prompt.endswith(("\n", " ")) or not prompt else "\n\n"
    return [Segment(prompt + gap, not mask_prompt), Segment(str(document.response), True)]


def _chat_segments(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, mask_prompt: bool
) -> list[Segment]:
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; use a chat model's tokenizer, or prompt and response fields"
        )

    def render(upto: int, generation_prompt: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages[:upto], tokenize=False, add_generation_prompt=generation_prompt
            )
        )

    # White space after the last turn's end mark, mostly eos itself, would stand between it and the next document.
    whole = render(len(messages)).rstrip()
    if not mask_prompt:
        return [Segment(whole, True)]
    parts, end = [], 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head, reply = render(index, generation_prompt=True), render(index + 1).rstrip()
        # Some templates show earlier turns differently (they drop the thinking); those are read but not learnt.
        if not (reply.startswith(head) and whole.startswith(reply) and len(head) >= end):
            continue
        parts += [Segment(whole[end : len(head)], False), Segment(whole[len(head) : len(reply)], True)]
        end = len(reply)
    if not parts:
        raise ValueError(
            "no assistant reply can be found behind its prompt in what the chat template renders; "
            "every conversation needs an assistant message, or set mask_prompt: false"
        )
    return [*parts, Segment(whole[end:], False)]


def encode(
    documents: Sequence[list[Segment]], tokenizer: PreTrainedTokenizerBase, bos: bool
) -> list[EncodedDocument]:
    """Tokenise documents in one call. Each ends with eos, once, which is a target; `bos` puts bos in front."""
    texts = [segment.text for document in documents for segment in document]
    if not texts:
        return []
    ids = iter(
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    )
    eos = tokenizer.eos_token_id
    encoded = []
    for document in documents:
        tokens: list[int] = []
        targets: list[bool] = []
        for segment in document:
            piece = next(ids)
            tokens += piece
            targets += [segment.target] * len(piece)
        if bos and tokens[:1] != [tokenizer.bos_token_id]:
            tokens.insert(0, int(tokenizer.bos_token_id))
            targets.insert(0, False)
        if eos is not None and tokens[-1:] != [eos]:
            tokens.append(int(eos))
            targets.append(True)
        encoded.append(EncodedDocument(tokens, targets))
    return encoded


def starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts bos in front of plain text (Llama's and Gemma's do, Qwen's and SmolLM2's not)."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos]
