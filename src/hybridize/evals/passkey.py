"""Five-digit passkey retrieval by length and depth.

A prompt is: an instruction, filler sentences, the sentence with the key at a depth, more filler, a question whose answer
is begun. The model continues greedily; the first five-digit number of what it writes must be the key. The task is the
field's usual one (Mohtashami and Jaggi, arXiv 2305.16300, Section 4.2).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridize.evals.aggregate import Proportion
from hybridize.evals.generation import Progress, greedy_ids, padding_id

Form = Literal["raw", "chat"]

INSTRUCTION = (
    "A pass key is hidden in the text below. Find it and remember it. I will ask you for it at the end."
)
FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NEEDLE = "The pass key is {key}. Remember it."
QUESTION = "What is the pass key?"
ANSWER_PREFIX = "The pass key is"

KEYS = range(10_000, 100_000)
# Five digits are at most six tokens; the rest shows where a longer number ends and lets a model clear its throat.
MAX_NEW_TOKENS = 12
FIVE_DIGITS = re.compile(r"(?<!\d)\d{5}(?!\d)")


@dataclass(frozen=True)
class PasskeyPrompt:
    """One prompt: its text, its token ids (`len(input_ids) <= length`), the depth in 0..1 and the key."""

    text: str
    input_ids: tuple[int, ...]
    length: int
    depth: float
    key: int


@dataclass(frozen=True)
class PasskeyCell:
    """`correct` of `samples` keys found at one length and depth."""

    length: int
    depth: float
    correct: int
    samples: int


@dataclass(frozen=True)
class PasskeyAccuracy(Proportion):
    """Accuracy over all depths of one length, in 0..1, with Wilson's 95% interval."""

    length: int
    correct: int
    samples: int


@dataclass(frozen=True)
class PasskeyExample:
    """A prompt as the model saw it, what the model wrote, and whether the key was right."""

    length: int
    depth: float
    prompt: str
    prompt_tokens: int
    key: int
    output: str
    answer: int | None
    correct: bool


@dataclass(frozen=True)
class PasskeyResult:
    """`cells` in the order of lengths, then depths. `examples` holds the first hit and the first miss of each length."""

    form: Form
    seed: int
    cells: tuple[PasskeyCell, ...]
    examples: tuple[PasskeyExample, ...]

    @property
    def by_length(self) -> tuple[PasskeyAccuracy, ...]:
        lengths = dict.fromkeys(cell.length for cell in self.cells)
        return tuple(
            PasskeyAccuracy(
                length,
                sum(cell.correct for cell in self.cells if cell.length == length),
                sum(cell.samples for cell in self.cells if cell.length == length),
            )
            for length in lengths
        )


def passkey(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    depths: int | Sequence[float] = 10,
    *,
    samples: int = 5,
    seed: int = 0,
    batch_size: int = 8,
    form: Form = "raw",
    on_progress: Progress | None = None,
) -> PasskeyResult:
    """Measure passkey retrieval.

    lengths: prompt lengths in tokens; a prompt has at most that many, and lacks less than one filler sentence of it.
    depths: positions of the key in the filler, in 0 (first) .. 1 (last); a number n means n evenly spaced ones.
    samples: keys per length and depth, all different over the whole run and fixed by `seed`.
    form: `raw` continues plain text; `chat` uses the tokenizer's chat template and begins the answer. Compare models in
        one form. Raw is the default for instruct models too: students are trained on plain text, and
        SmolLM2-135M-Instruct finds no fewer keys that way.
    Raises ValueError for a length that the frame of the prompt does not fit into, and for `chat` without a template.
    """
    depths = spread(depths)
    prompts = make_prompts(tokenizer, lengths, depths, samples=samples, seed=seed, form=form)
    outputs = greedy_ids(
        model,
        [prompt.input_ids for prompt in prompts],
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=padding_id(tokenizer),
        batch_size=batch_size,
        on_progress=on_progress,
    )
    graded = [
        grade(prompt, tokenizer.decode(ids, skip_special_tokens=True))
        for prompt, ids in zip(prompts, outputs, strict=True)
    ]
    cells = tuple(
        PasskeyCell(
            length, depth, sum(g.correct for g in graded if (g.length, g.depth) == (length, depth)), samples
        )
        for length in dict.fromkeys(lengths)
        for depth in depths
    )
    firsts = {(example.length, example.correct): example for example in reversed(graded)}
    examples = tuple(firsts[name] for name in sorted(firsts))
    return PasskeyResult(form, seed, cells, examples)


def make_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    samples: int,
    seed: int,
    form: Form = "raw",
) -> list[PasskeyPrompt]:
    """All prompts, by length, then sample, then depth. More lengths or samples of the last length add prompts and
    leave the earlier ones as they were."""
    lengths = list(dict.fromkeys(lengths))
    if not lengths:
        raise ValueError("lengths is empty; give at least one prompt length in tokens, for example 1024")
    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1")
    total = len(lengths) * samples * len(depths)
    if total > len(KEYS):
        raise ValueError(
            f"samples is {samples}, which asks for {total} keys; there are {len(KEYS)} five-digit ones"
        )
    keys = list(KEYS)
    random.Random(seed).shuffle(keys)
    wanted = [(length, depth) for length in lengths for _ in range(samples) for depth in depths]
    return [
        make_prompt(tokenizer, length, depth, key, form=form)
        for (length, depth), key in zip(wanted, keys, strict=False)
    ]


def make_prompt(tokenizer: Any, length: int, depth: float, key: int, *, form: Form = "raw") -> PasskeyPrompt:
    """The longest prompt of at most `length` tokens, special tokens and chat template included, with the key at `depth`.

    Filler is added sentence by sentence, so fewer tokens than the longest filler sentence are missing.
    """
    check_form(tokenizer, form)

    def build(sentences: int) -> tuple[str, list[int]]:
        text = prompt_text(tokenizer, sentences, depth, key, form)
        # A chat template writes its own special tokens.
        return text, tokenizer(text, add_special_tokens=form == "raw").input_ids

    shortest = len(build(0)[1])
    if shortest > length:
        raise ValueError(
            f"lengths contains {length}; the prompt without filler already has {shortest} tokens, so ask for more"
        )
    per_sentence = (len(build(20 * len(FILLER))[1]) - shortest) / (20 * len(FILLER))
    sentences = int((length - shortest) / per_sentence)
    while len(build(sentences)[1]) > length:
        sentences -= 1
    while len(build(sentences + 1)[1]) <= length:
        sentences += 1
    text, input_ids = build(sentences)
    return PasskeyPrompt(text, tuple(input_ids), length, depth, key)


def prompt_text(tokenizer: Any, sentences: int, depth: float, key: int, form: Form) -> str:
    """The text with `sentences` filler sentences, of which the fraction `depth` (rounded) stands before the key."""
    filler = [FILLER[i % len(FILLER)] for i in range(sentences)]
    filler.insert(round(depth * sentences), NEEDLE.format(key=key))
    body = f"{INSTRUCTION}\n\n{' '.join(filler)}\n\n{QUESTION}"
    if form == "raw":
        return f"{body} {ANSWER_PREFIX}"
    turn = [{"role": "user", "content": body}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) + ANSWER_PREFIX


def grade(prompt: PasskeyPrompt, output: str) -> PasskeyExample:
    """Exact match of the first five-digit number in the output."""
    answer = parse_answer(output)
    return PasskeyExample(
        length=prompt.length,
        depth=prompt.depth,
        prompt=prompt.text,
        prompt_tokens=len(prompt.input_ids),
        key=prompt.key,
        output=output,
        answer=answer,
        correct=answer == prompt.key,
    )


def parse_answer(output: str) -> int | None:
    """The first number of exactly five digits, None where there is none."""
    match = FIVE_DIGITS.search(output)
    return int(match.group()) if match else None


def check_form(tokenizer: Any, form: Form) -> None:
    """Raise ValueError for an unknown form, and for `chat` without a template."""
    if form not in ("raw", "chat"):
        raise ValueError(f"form is {form!r}; allowed are 'raw' and 'chat'")
    if form == "chat" and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("form is 'chat' but the tokenizer has no chat template; use 'raw'")


def spread(depths: int | Sequence[float]) -> tuple[float, ...]:
    """A number of depths as evenly spaced fractions from 0 to 1 (one alone: the middle); fractions are checked."""
    if isinstance(depths, int):
        if depths < 1:
            raise ValueError(f"depths is {depths}; it must be at least 1, or a list of fractions in 0..1")
        return (0.5,) if depths == 1 else tuple(i / (depths - 1) for i in range(depths))
    if not depths or any(not 0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths is {list(depths)}; it needs fractions between 0 (first) and 1 (last)")
    return tuple(dict.fromkeys(depths))
