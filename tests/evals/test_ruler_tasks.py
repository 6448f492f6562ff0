"""RULER's tasks as they are made: prompts word for word, of the length asked for, the same for the same seed."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.evals.ruler_models import ESSAYS, NEEDLE, UUID, WORDS, make_tokenizer, perfect
from transformers import PreTrainedTokenizerFast

from hybridize.evals.ruler_tasks import (
    DEPTHS,
    NOISE,
    TASKS,
    Form,
    RulerSample,
    distinct,
    longest,
    make_sample,
)
from hybridize.evals.ruler_words import ADJECTIVES, NOUNS


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def form(tokenizer: PreTrainedTokenizerFast) -> Form:
    return Form(tokenizer)


def sample(form: Form, name: str, index: int = 0, length: int = 2500, **options: Any) -> RulerSample:
    return make_sample(name, length, index, form=form, essays=ESSAYS, **options)


def test_single_needle_prompt_is_rulers_word_for_word(form: Form) -> None:
    made = sample(form, "niah_single_1", length=900)
    first, *lines, question = made.text.split("\n")
    assert first == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    (needle,) = [line for line in lines if line != NOISE]
    key, value = NEEDLE.fullmatch(needle).groups()  # type: ignore[union-attr]
    assert needle == f"One of the special magic numbers for {key} is: {value}."
    assert made.references == (value,) and re.fullmatch(r"[1-9]\d{6}", value)
    adjective, noun = key.split("-")
    assert adjective in ADJECTIVES and noun in NOUNS
    assert question == (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )


def test_prompt_for_several_needles_is_rulers_word_for_word(form: Form) -> None:
    made = sample(form, "niah_multiquery")
    needles = dict(NEEDLE.findall(made.text))
    a, b, c, d = (key for value in made.references for key in needles if needles[key] == value)
    assert len(needles) == 4 and made.depth is None
    assert made.text.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    assert made.text.endswith(
        f"\nWhat are all the special magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text? "
        f"The special magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text are"
    )


@pytest.mark.parametrize(
    ("name", "keys", "needles", "references", "key", "value"),
    [
        ("niah_single_2", 1, 1, 1, r"\w+-\w+", r"\d{7}"),
        ("niah_single_3", 1, 1, 1, r"\w+-\w+", UUID),
        ("niah_multikey_1", 4, 4, 1, r"\w+-\w+", r"\d{7}"),
        ("niah_multivalue", 1, 4, 4, r"\w+-\w+", r"\d{7}"),
        ("niah_multiquery", 4, 4, 4, r"\w+-\w+", r"\d{7}"),
        ("niah_multikey_2", None, None, 1, r"\w+-\w+", r"\d{7}"),
        ("niah_multikey_3", None, None, 1, UUID, UUID),
    ],
)
def test_needles_of_each_task(
    form: Form, name: str, keys: int | None, needles: int | None, references: int, key: str, value: str
) -> None:
    made = sample(form, name, 3)
    found = NEEDLE.findall(made.text)
    assert all(re.fullmatch(key, k) and re.fullmatch(value, v) for k, v in found)
    assert len({v for _, v in found}) == len(found)
    assert len(made.references) == references and set(made.references) <= {v for _, v in found}
    assert ("The old ship" in made.text) == (TASKS[name].haystack == "essays")
    if keys is None:
        # Every line is a needle, and no key stands twice.
        assert len({k for k, _ in found}) == len(found) == made.text.count("\n") - 1 > 5
    else:
        assert len({k for k, _ in found}) == keys and len(found) == needles


def test_variable_tracking_is_an_example_and_a_chain(form: Form) -> None:
    made = sample(form, "vt", 1, length=3000)
    example, question = made.text.split("\n\nMemorize", 1)
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    assert example.startswith(intro) and ("Memorize" + question).startswith(intro)
    assert len(form.encode(example)) <= 500
    for part, letters in ((example, 3), (question, 5)):
        (value,) = re.findall(rf"VAR [A-Z]{{{letters}}} = (\d{{5}})\n", part)
        names = perfect(part).split()
        lines = [line for line in part.split("\n") if line.startswith("VAR ")]
        assert lines == [
            f"VAR {names[0]} = {value}",
            *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)),
        ]
        tail = (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"5 variables are assigned the value {value}, they are: "
        )
        assert part.endswith(tail + " " + " ".join(names) if part == example else tail)
    assert made.references == tuple(perfect(made.text).split()) and len(set(made.references)) == 5


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("chat", [False, True])
def test_samples_fill_the_length(tokenizer: PreTrainedTokenizerFast, name: str, chat: bool) -> None:
    form = Form(tokenizer, chat)
    for length in (1800, 4000):
        made = sample(form, name, length=length)
        assert list(made.input_ids) == tokenizer(made.text, add_special_tokens=not chat).input_ids
        used = len(made.input_ids) + TASKS[name].new_tokens
        assert 0.95 * length <= used <= length


@pytest.mark.parametrize(
    "count", [lambda n: 40 + 3 * n, lambda n: 40 + n + n // 3, lambda n: 40 + max(n, 9 * (n - 150))]
)
@pytest.mark.parametrize("room", [43, 44, 50, 399, 1000, 20_000])
def test_longest_finds_the_last_that_fits(count: Callable[[int], int], room: int) -> None:
    asked: list[int] = []

    def tokens(n: int) -> int:
        asked.append(n)
        return count(n)

    n = longest(tokens, 1, room, slack=0)
    assert count(n) <= room < count(n + 1)
    assert len(asked) < 25 and max(asked) < room
    loose = longest(tokens, 1, room, slack=20)
    assert count(n) - 20 <= count(loose) <= room
    # A unit without tokens ends the search all the same.
    assert longest(lambda n: 5, 1, room, slack=0) <= room


def test_samples_are_fixed_by_seed_and_index(form: Form) -> None:
    for name in TASKS:
        made = sample(form, name, 5)
        assert made == sample(form, name, 5)
        assert made.references != sample(form, name, 6).references
        assert made.references != sample(form, name, 5, seed=1).references
        longer = sample(form, name, 5, length=4000)
        assert longer.references == made.references and longer.depth == made.depth
        assert len(longer.text) > len(made.text)


def test_single_needles_take_every_depth_once_in_forty(form: Form) -> None:
    assert len(set(DEPTHS)) == 40 and DEPTHS[0] == 0 and DEPTHS[-1] == 100
    assert DEPTHS[:4] == (0, 3, 5, 8)
    for first in (0, 40):
        depths = [
            TASKS["niah_single_1"].draft("niah_single_1", first + i, 0, None, form).depth for i in range(40)
        ]
        assert sorted(round(100 * depth) for depth in depths if depth is not None) == list(DEPTHS)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"])
def test_the_needle_asked_for_stands_at_its_depth(form: Form, name: str) -> None:
    for index in range(12):
        made = sample(form, name, index, length=6000)
        context = made.text[made.text.index("afterwards.\n") + 12 : made.text.rindex("\nWhat is")]
        needle = next(m for m in NEEDLE.finditer(context) if m[2] == made.references[0])
        assert made.depth is not None
        assert needle.start() / len(context) == pytest.approx(made.depth, abs=0.04)
        # Nothing of the haystack is lost or out of order.
        rest = NEEDLE.sub("", context) if name != "niah_multikey_2" else ""
        assert (
            rest.split() == ((NOISE if name == "niah_single_1" else WORDS).split() * 999)[: len(rest.split())]
        )


def test_values_are_distinct_and_words_end() -> None:
    rng = random.Random(0)
    numbers = distinct(rng, "numbers")
    assert len({next(numbers) for _ in range(2000)}) == 2000
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) and len(set(NOUNS)) == len(NOUNS)
    assert len(ADJECTIVES) * len(NOUNS) > 200_000, "a needle a line of a million tokens needs 60,000 keys"


def test_chat_form_begins_the_answer_in_the_assistants_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    made = sample(Form(tokenizer, chat=True), "niah_single_2")
    assert made.text.startswith("<user>A special magic number")
    assert re.search(
        r"mentioned in the provided text\?</s>\n<assistant>\nThe special magic number for", made.text
    )
    assert tokenizer.bos_token_id not in made.input_ids, "the template writes its own special tokens"
    assert sample(Form(tokenizer), "niah_single_2").input_ids[0] == tokenizer.bos_token_id
    with pytest.raises(ValueError, match="no chat template"):
        Form(make_tokenizer(template=None), chat=True)
