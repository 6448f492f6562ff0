"""Made-up texts that ask for what they said before: facts among prose or in lists, and further on what one of them was.

Documentation and code seldom need a token from a thousand tokens back, so distillation on them leaves exact recall to chance. Here
every document does, at every distance up to its length. Forms, words and values are made from a seed; the prose between facts is the
caller's. None of the forms is one of the passkeys or needles that `hybridize.evals` asks for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

SHORTEST, LONGEST = 1_500, 8_000
"""Characters of a document, about: a row of 2,048 tokens holds whole ones."""
PARAGRAPH = 60, 800
"""Shortest and longest paragraph between facts, in characters."""

_ONSETS = (
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
_ENDS = ("", "l", "m", "n", "r", "s", "t", "nd", "rk", "ss")
_THINGS = (
    "code",
    "serial number",
    "port",
    "room",
    "price",
    "colour",
    "owner",
    "licence",
    "batch",
    "address",
    "label",
    "account",
)
_KINDS = (
    "item",
    "host",
    "locker",
    "order",
    "sensor",
    "parcel",
    "desk",
    "route",
    "valve",
    "sample",
    "ticket",
    "crate",
)
_FACTS = (
    "The {thing} of {key} is {value}.",
    "For {key}, the {thing} was set to {value}.",
    "{key} has the {thing} {value}.",
    "Note: {thing} of {key}: {value}",
    "Somebody wrote down that {key} uses {value} as its {thing}.",
    "{value} is the {thing} that belongs to {key}.",
)
_LOOKUPS = (
    "Q: What is the {thing} of {key}?\nA: {value}",
    "Which {thing} does {key} have? {value}",
    "As said before, the {thing} of {key} is {value}.",
    "{key}, {thing} -> {value}",
    "Look up the {thing} of {key}: {value}",
    "What was the {thing} of {key} again? It was {value}.",
    "Question: which {thing} was given for {key}? Answer: {value}",
    "To repeat the {thing} that was noted for {key}: {value}",
    "The {thing} of {key}, according to what was said above, is {value}.",
)
_FORMATS = (
    "{key} = {value}",
    "{key}: {value}",
    '"{key}": "{value}",',
    "{key}\t{value}",
    "| {key} | {value} |",
    "set {key} {value}",
)
_NOISE = (
    "The road goes on. Rain falls at night.",
    "Nothing was found. We kept walking.",
    "A door closed somewhere. It was quiet again.",
    "The clock ticks. The kettle boils.",
)


def paragraphs(texts: Iterable[str]) -> list[str]:
    """The paragraphs of `texts` that read as prose by their length, first letter and last sign."""
    found = []
    for text in texts:
        for part in text.split("\n\n"):
            flat = " ".join(part.split())
            if PARAGRAPH[0] <= len(flat) <= PARAGRAPH[1] and flat[0].isupper() and flat[-1] in ".!?":
                found.append(flat)
    return found


def recall_document(index: int, prose: Sequence[str], seed: int = 0) -> str:
    """Document `index`; `prose` are paragraphs to stand between the facts (an empty one gives made-up sentences)."""
    generator = random.Random(f"hybridize recall {seed} {index}")
    size = generator.randint(SHORTEST, LONGEST)
    form: Callable[[random.Random, int, Sequence[str]], str] = generator.choice(
        (_notes, _notes, _listing, _copies)
    )
    return form(generator, size, prose)


def _notes(generator: random.Random, size: int, prose: Sequence[str]) -> str:
    """Facts among paragraphs, each asked for once or twice at any later place."""
    parts: list[str] = []
    open_facts: list[dict[str, str]] = []
    length = 0
    noise = generator.random() < 0.25
    sentence = generator.choice(_NOISE)
    while length < size:
        draw = generator.random()
        if draw < 0.3 or not open_facts:
            fact = {"thing": generator.choice(_THINGS), "key": _key(generator), "value": _value(generator)}
            open_facts.append(fact)
            part = generator.choice(_FACTS).format(**fact)
        elif draw < 0.6:
            fact = generator.choice(open_facts)
            if generator.random() < 0.7:
                open_facts.remove(fact)
            part = generator.choice(_LOOKUPS).format(**fact)
        elif noise:
            part = " ".join([sentence] * generator.randint(2, 24))
        else:
            part = generator.choice(prose) if prose else _sentences(generator)
        parts.append(part)
        length += len(part) + 1
    rest = generator.sample(open_facts, len(open_facts))
    parts += [generator.choice(_LOOKUPS).format(**fact) for fact in rest]
    return "\n".join(parts)


def _listing(generator: random.Random, size: int, prose: Sequence[str]) -> str:
    """Lists of entries, then the same entries in another order."""
    parts: list[str] = []
    length = 0
    while length < size:
        line = generator.choice(_FORMATS)
        entries = {_key(generator): _value(generator) for _ in range(generator.randint(4, 40))}
        lines = [line.format(key=key, value=value) for key, value in entries.items()]
        asked = generator.sample(sorted(entries), generator.randint(2, len(entries)))
        again = generator.choice(_FORMATS)
        lines += ["", *(again.format(key=key, value=entries[key]) for key in asked), ""]
        if prose and generator.random() < 0.3:
            lines.append(generator.choice(prose))
        parts += lines
        length += sum(len(line) + 1 for line in lines)
    return "\n".join(parts)


def _copies(generator: random.Random, size: int, prose: Sequence[str]) -> str:
    """Lines that come back word by word."""
    parts: list[str] = []
    length = 0
    while length < size:
        if parts and generator.random() < 0.5:
            start = generator.randrange(len(parts))
            block = parts[start : start + generator.randint(1, 6)]
        else:
            block = [_words(generator, generator.randint(3, 14))]
            if generator.random() < 0.3:
                block.append(_value(generator) + " " + _value(generator))
        parts += block
        length += sum(len(line) + 1 for line in block)
    return "\n".join(parts)


def _key(generator: random.Random) -> str:
    draw = generator.random()
    if draw < 0.4:
        return f"{generator.choice(_KINDS)} {generator.randint(1, 9999)}"
    if draw < 0.6:
        return f"{generator.choice(_KINDS)}-{_word(generator)}"
    if draw < 0.8:
        return _word(generator).capitalize() + " " + _word(generator).capitalize()
    return f"{_word(generator)}_{_word(generator)}"


def _value(generator: random.Random) -> str:
    draw = generator.random()
    if draw < 0.4:
        return str(generator.randrange(10 ** generator.randint(2, 10)))
    if draw < 0.55:
        return f"{generator.getrandbits(4 * generator.randint(4, 16)):x}"
    if draw < 0.7:
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
        blocks = ("".join(generator.choices(letters, k=4)) for _ in range(generator.randint(2, 4)))
        return "-".join(blocks)
    return _words(generator, generator.randint(1, 3))


def _word(generator: random.Random) -> str:
    syllables = generator.randint(2, 3)
    return "".join(
        generator.choice(_ONSETS) + generator.choice(_VOWELS) + (generator.choice(_ENDS) if last else "")
        for last in (n == syllables - 1 for n in range(syllables))
    )


def _words(generator: random.Random, count: int) -> str:
    return " ".join(_word(generator) for _ in range(count))


def _sentences(generator: random.Random) -> str:
    return " ".join(
        _words(generator, generator.randint(4, 12)).capitalize() + "." for _ in range(generator.randint(1, 5))
    )
