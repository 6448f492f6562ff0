"""RULER's needle and variable-tracking tasks (arXiv 2404.06654), made here for any length, tokenizer and seed.

task             haystack  key    value   keys  values  queries
niah_single_1    noise     words  number  1     1       1
niah_single_2    essays    words  number  1     1       1
niah_single_3    essays    words  uuid    1     1       1
niah_multikey_1  essays    words  number  4     1       1
niah_multikey_2  needles   words  number  1     1       1        every line of the haystack is another needle
niah_multikey_3  needles   uuid   uuid    1     1       1
niah_multivalue  essays    words  number  1     4       1
niah_multiquery  essays    words  number  4     1       4
vt               noise     a chain VAR A = 12345, VAR B = VAR A, ... of four hops after a solved example of 500 tokens

Every sentence of a prompt is RULER's own, word for word; the answer's beginning is part of the prompt. What differs from
its generator, on purpose:

- A sample depends on seed, task and index alone, so more samples add to the former ones; needles and depths are the
  same at every length, so lengths compare pairwise.
- Needles of every haystack stand at RULER's 40 depths; it has them for essays, and draws a line for the other two. A
  single needle takes each depth once in every 40 samples.
- The haystack is sized for each sample by its own tokens. RULER sizes it once and shortens it where a sample is too long.
- Keys come from other words (`ruler_words`), values and keys are distinct, sentences end where a simple rule says.
"""

from __future__ import annotations

import bisect
import itertools
import random
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hybridize.evals.haystacks import Haystack
from hybridize.evals.ruler_words import ADJECTIVES, NOUNS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER = " The special magic {kind} for {query} mentioned in the provided text are"
QUESTION_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER_ONE = " The special magic {kind} for {query} mentioned in the provided text is"
NIAH_NEW_TOKENS = 128
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # per cent of the haystack before a needle

VT_QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
# The space at the end is RULER's; its example has two there, so that a name keeps the space that tokenizers join to it.
VT_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are: "
)
VT_NEW_TOKENS = 30
VT_HOPS = 4
VT_EXAMPLE_TOKENS = 500

_PROBE = 64  # units that show how many tokens one has

Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class RulerSample:
    """A prompt as the model sees it, begun answer included, and the strings that a right answer contains.

    `len(input_ids) + new_tokens <= length`. `depth` is the share (0..1) of the haystack before the needle asked for,
    None where several are.
    """

    task: str
    index: int
    length: int
    text: str
    input_ids: tuple[int, ...]
    references: tuple[str, ...]
    depth: float | None


@dataclass(frozen=True)
class Draft:
    """A sample without its length: `question(n)` holds n units of haystack, at least `least` of them.

    A unit is a word of essays, else a line.
    """

    question: Callable[[int], str]
    least: int
    answer: str
    references: tuple[str, ...]
    depth: float | None = None


@dataclass(frozen=True)
class Form:
    """How questions become tokens: as plain text, or as a turn of the tokenizer's chat template."""

    tokenizer: Any
    chat: bool = False

    def __post_init__(self) -> None:
        if self.chat and getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("chat is True but the tokenizer has no chat template; leave it False")

    def prompt(self, question: str, answer: str) -> str:
        if not self.chat:
            return question + answer
        turn = [{"role": "user", "content": question}]
        begun = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        # A turn begins on a fresh line or after a marker: the space that parted question and answer has no place there.
        return begun + answer.removeprefix(" ")

    def encode(self, prompt: str) -> list[int]:
        # A chat template writes its own special tokens.
        return self.tokenizer(prompt, add_special_tokens=not self.chat, verbose=False).input_ids


@dataclass(frozen=True)
class Niah:
    """Needles in a haystack: see the table above."""

    haystack: Literal["noise", "essays", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    new_tokens: int = NIAH_NEW_TOKENS

    def draft(self, name: str, index: int, seed: int, essays: Haystack | None, form: Form) -> Draft:
        rng = random.Random(f"{seed}:{name}:{index}")
        keys, values = distinct(rng, self.key), distinct(rng, self.value)
        pairs = [
            (key, next(values)) for key in [next(keys) for _ in range(self.keys)] for _ in range(self.values)
        ]
        asked = rng.sample(list(dict(pairs)), self.queries)
        references = tuple(value for query in asked for key, value in pairs if key == query)
        rng.shuffle(pairs)
        depths = (
            [_nth_depth(name, index, seed)] if len(pairs) == 1 else sorted(rng.sample(DEPTHS, len(pairs)))
        )
        needles = [self._needle(*pair) for pair in pairs]
        others: list[str] = []

        def context(units: int) -> str:
            if self.haystack == "essays":
                if essays is None:
                    raise ValueError(f"{name} hides its needles in essays; give it a haystack")
                return " ".join(_hidden(essays.sentences(units), needles, depths))
            if self.haystack == "noise":
                return "\n".join(_hidden([NOISE] * units, needles, depths))
            while len(others) < units:
                others.append(self._needle(next(keys), next(values)))
            return "\n".join(_hidden(others[:units], needles, depths))

        one = len(references) == 1
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        kind = self.value.removesuffix("s") if one else self.value
        template = QUESTION_ONE if one else QUESTION
        return Draft(
            lambda units: template.format(kind=kind, context=context(units), query=query),
            least=1,
            answer=(ANSWER_ONE if one else ANSWER).format(kind=kind, query=query),
            references=references,
            depth=depths[[key for key, _ in pairs].index(asked[0])] / 100 if one else None,
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)


@dataclass(frozen=True)
class VariableTracking:
    """One chain of assignments amid noise, after a solved example; all variables of the chain are asked for."""

    haystack: Literal["noise"] = "noise"
    new_tokens: int = VT_NEW_TOKENS

    def draft(self, name: str, index: int, seed: int, essays: Haystack | None, form: Form) -> Draft:
        rng = random.Random(f"{seed}:{name}:{index}")
        example = _solved(_chain(rng, letters=3), form)
        chain = _chain(rng, letters=5)
        return Draft(
            lambda units: f"{example}\n\n{chain.question(units)}",
            least=len(chain.names),
            answer=chain.answer,
            references=chain.names,
        )


@dataclass(frozen=True)
class _Chain:
    names: tuple[str, ...]
    value: str
    seed: int

    def question(self, lines: int) -> str:
        """The question over `lines` lines of noise, between which the assignments stand in their order."""
        assigned = [f"VAR {self.names[0]} = {self.value}"]
        # The space at the end is RULER's.
        assigned += [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(self.names)]
        context = [NOISE] * lines
        places = sorted(random.Random(f"{self.seed}:{lines}").sample(range(lines), len(assigned)))
        for count, (place, line) in enumerate(zip(places, assigned, strict=True)):
            context.insert(place + count, line)
        return VT_QUESTION.format(context="\n".join(context), value=self.value)

    @property
    def answer(self) -> str:
        return VT_ANSWER.format(count=len(self.names), value=self.value)


def _chain(rng: random.Random, letters: int) -> _Chain:
    names: list[str] = []
    while len(names) <= VT_HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names and name != "VAR":
            names.append(name)
    return _Chain(tuple(names), str(rng.randrange(10_000, 100_000)), rng.getrandbits(32))


def _solved(chain: _Chain, form: Form) -> str:
    """A chain with its answer, in at most 500 tokens where they hold a line of noise for each assignment."""

    def text(lines: int) -> str:
        return f"{chain.question(lines)}{chain.answer} {' '.join(chain.names)}"

    return text(
        longest(lambda lines: len(form.encode(text(lines))), len(chain.names), VT_EXAMPLE_TOKENS, slack=0)
    )


Task = Niah | VariableTracking
TASKS: dict[str, Task] = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essays"),
    "niah_single_3": Niah("essays", value="uuids"),
    "niah_multikey_1": Niah("essays", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essays", values=4),
    "niah_multiquery": Niah("essays", keys=4, queries=4),
    "vt": VariableTracking(),
}


def make_sample(
    name: str, length: int, index: int, *, form: Form, essays: Haystack | None = None, seed: int = 0
) -> RulerSample:
    """Sample `index` of a task: the longest prompt that leaves room for the new tokens within `length` tokens.

    It lacks less than one unit of haystack (a word of essays, else a line), or less than 1/256 of the length.
    Raises ValueError where `length` is below `least_length`.
    """
    task = TASKS[name]
    draft = task.draft(name, index, seed, essays, form)

    def tokens(units: int) -> int:
        return len(form.encode(form.prompt(draft.question(units), draft.answer)))

    room = length - task.new_tokens
    if (least := tokens(draft.least)) > room:
        raise ValueError(
            f"length is {length}; sample {index} of {name} needs at least {least + task.new_tokens} tokens, "
            f"{task.new_tokens} of them for the answer"
        )
    units = longest(tokens, draft.least, room, slack=length // 256)
    text = form.prompt(draft.question(units), draft.answer)
    return RulerSample(name, index, length, text, tuple(form.encode(text)), draft.references, draft.depth)


def least_length(
    name: str, samples: int, *, form: Form, essays: Haystack | None = None, seed: int = 0
) -> int:
    """The shortest length, new tokens included, that the first `samples` samples of a task all fit into."""
    task = TASKS[name]
    drafts = (task.draft(name, index, seed, essays, form) for index in range(samples))
    prompts = (form.prompt(draft.question(draft.least), draft.answer) for draft in drafts)
    return max(len(form.encode(prompt)) for prompt in prompts) + task.new_tokens


def longest(tokens: Callable[[int], int], least: int, room: int, *, slack: int) -> int:
    """The most units n with `tokens(n) <= room`, or fewer if no more than `slack` tokens stay free.

    Tokens grow nearly evenly with the units, so guesses by proportion save most of a bisection's counting, which takes
    a second a time for a prompt of a million tokens. Every third guess between two counts halves, whatever the tokens do.
    """
    first = tokens(least)
    low, used = least, first
    high, steps = least + room - first + 1, 0  # a unit has at least one token
    guess, bounded = least + _PROBE, False
    while high - low > 1 and room - used > slack:
        guess = min(max(guess, low + 1), high - 1)
        count = tokens(guess)
        per_unit = max((count - first) / (guess - least), 1.0)
        if count <= room:
            low, used = guess, count
        else:
            high, bounded = guess, True
        steps += bounded
        if bounded and steps % 3 == 0:
            guess = (low + high) // 2
        else:
            guess = low + int((room - slack // 2 - used) / per_unit)
    return low


def distinct(rng: random.Random, kind: Kind) -> Iterator[str]:
    """Values of a kind without end, none twice. Raises ValueError when the words have no more pairs."""
    seen: set[str] = set()
    while True:
        if kind == "words":
            if len(seen) == len(ADJECTIVES) * len(NOUNS):
                raise ValueError(f"there are no more than {len(seen):,} keys; ask for a shorter length")
            value = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        elif kind == "numbers":
            value = str(rng.randrange(10**6, 10**7))
        else:
            value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if value not in seen:
            seen.add(value)
            yield value


def _nth_depth(name: str, index: int, seed: int) -> int:
    """The depth of a single needle: 40 samples in a row take every depth once, in an order of their own."""
    order = random.Random(f"{seed}:{name}:depths:{index // len(DEPTHS)}").sample(DEPTHS, len(DEPTHS))
    return order[index % len(DEPTHS)]


def _hidden(units: list[str], needles: list[str], depths: list[int]) -> list[str]:
    """`units` with each needle before the unit at its depth; depths ascend."""
    places = [int(len(units) * depth / 100) for depth in depths]
    text: list[str] = []
    for i in range(len(units) + 1):
        text += needles[bisect.bisect_left(places, i) : bisect.bisect_right(places, i)]
        text += units[i : i + 1]
    return text
