"""Greedy continuations in batches.

Shapes: B rows of a batch, T tokens of the longest prompt, N new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Progress = Callable[[int, int], None]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; the training flag of the model returns afterwards."""
    was_training = model.training
    model.eval()
    try:
        # Not inference_mode: a buffer that a model caches there could not take part in training later.
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def greedy_ids(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    pad_token_id: int,
    batch_size: int = 8,
    on_progress: Progress | None = None,
) -> list[list[int]]:
    """Greedy continuations of token id prompts, in their order; the new ids only, with what follows an end token.

    Prompts are taken as given (`batch_size` at a time, left-padded): put those of similar length side by side.
    `on_progress(done, total)` is called after every batch. Raises ValueError for an empty prompt.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompts holds an empty prompt; each needs at least 1 token")
    continuations: list[list[int]] = []
    with evaluating(model):
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            input_ids_BT, mask_BT = left_pad(batch, pad_token_id)
            # Penalties and beams of the checkpoint's generation config would make this something else than greedy.
            output_BN = model.generate(
                input_ids=input_ids_BT.to(model.device),
                attention_mask=mask_BT.to(model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                pad_token_id=pad_token_id,
            )
            continuations += output_BN[:, input_ids_BT.shape[1] :].tolist()
            if on_progress is not None:
                on_progress(len(continuations), len(prompts))
    return continuations


def greedy(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 64, batch_size: int = 8
) -> list[str]:
    """Greedy continuations of text prompts, without the prompts and without special tokens."""
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    continuations = greedy_ids(
        model, ids, max_new_tokens=max_new_tokens, pad_token_id=padding_id(tokenizer), batch_size=batch_size
    )
    return [tokenizer.decode(new, skip_special_tokens=True) for new in continuations]


def left_pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] with the padding on the left, and the mask [B, T] that is 1 on the tokens."""
    length = max(len(row) for row in rows)
    input_ids_BT = torch.full((len(rows), length), pad_token_id, dtype=torch.long)
    mask_BT = torch.zeros_like(input_ids_BT)
    for b, row in enumerate(rows):
        input_ids_BT[b, length - len(row) :] = torch.as_tensor(row, dtype=torch.long)
        mask_BT[b, length - len(row) :] = 1
    return input_ids_BT, mask_BT


def padding_id(tokenizer: Any) -> int:
    """The id that fills rows; it is masked, so a tokenizer without one lends its end token, or id 0."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0
