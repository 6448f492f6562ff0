"""The texts that needles are hidden in: essays that the user has, or prose of what is installed here.

RULER hides needles in Paul Graham's essays, which may not be shipped. Given as a file they are used as RULER uses them:
white space becomes one space each, and every sample begins at the first word. Without them the sentences of the
held-out documentation strings do: other words, as long and as plain. A result says which it was (`kind`).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from hybridize.data import DataSpec, plain_texts

Kind = Literal["essays", "local prose"]

SHORTEST_SENTENCE, LONGEST_SENTENCE = 5, 60  # words of a sentence that counts as prose
FEWEST_WORDS = 1_000

# A closing quote or bracket belongs to its sentence; "e.g." and "i.e." end none.
_ENDS_SENTENCE = re.compile(r"""(?<!e\.g)(?<!i\.e)[.!?]["')\]]*$""")
_PLAIN_WORD = re.compile(r"""["'(]?[A-Za-z]+(?:['-][A-Za-z]+)*[,;:.!?)"']*""")


@dataclass(frozen=True)
class Haystack:
    """`words` in their order; a text of any length is made of them, begun again where they end."""

    kind: Kind
    words: tuple[str, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """For each sentence the number of words up to its end; the last word always ends one."""
        following = (*self.words[1:], "A")
        return tuple(
            i
            for i, (word, after) in enumerate(zip(self.words, following, strict=True), 1)
            if i == len(self.words) or (_ENDS_SENTENCE.search(word) and not after[0].islower())
        )

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the text."""
        return hashlib.sha256(" ".join(self.words).encode("utf-8", "surrogatepass")).hexdigest()

    def sentences(self, count: int) -> list[str]:
        """The first `count` words as sentences, the last one maybe cut."""
        rounds, rest = divmod(count, len(self.words))
        return self._whole * rounds + self._first(rest)

    @cached_property
    def _whole(self) -> list[str]:
        return self._first(len(self.words))

    def _first(self, count: int) -> list[str]:
        bounds = [0, *self.ends[: bisect.bisect_left(self.ends, count)], count]
        return [" ".join(self.words[a:b]) for a, b in itertools.pairwise(bounds) if a < b]


def find_haystack(essays: Path | str | None = None) -> Haystack:
    """The essays of a file or folder (see `read_essays`), without one `local_prose()`."""
    return local_prose() if essays is None else read_essays(Path(essays))


def read_essays(path: Path) -> Haystack:
    """Essays from a `.json` file whose `text` is one string (RULER's own `PaulGrahamEssays.json`), from a text file, or
    from the `.txt` files of a folder in the order of their names.

    Raises ValueError for a path that is missing or holds fewer than 1,000 words.
    """
    if not path.exists():
        raise ValueError(f"essays is {str(path)!r}; there is no such file or folder")
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    words = [word for file in files for word in _text(file).split()]
    if len(words) < FEWEST_WORDS:
        raise ValueError(
            f"essays is {str(path)!r}, which holds {len(words)} words; it needs at least {FEWEST_WORDS:,}"
        )
    return Haystack("essays", tuple(words))


def _text(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".json":
        return text
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"essays is {str(file)!r}, which is no JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise ValueError(f"essays is {str(file)!r}, a JSON file; it must be an object with a string `text`")
    return content["text"]


@lru_cache(maxsize=1)
def local_prose() -> Haystack:
    """The prose of the held-out documentation strings. Raises ValueError where the installation has too little."""
    words = [word for sentence in prose(plain_texts(DataSpec(), "test")) for word in sentence.split()]
    if len(words) < FEWEST_WORDS:
        raise ValueError(
            f"the held-out documentation strings hold {len(words)} words of prose; give a file or folder of essays"
        )
    return Haystack("local prose", tuple(words))


def prose(texts: Iterable[str]) -> Iterator[str]:
    """The sentences of `texts` that read as prose, each once: begun with a capital, ended, of plain words.

    What documentation holds besides (signatures, examples, tables, lists of parameters) would make a haystack harder
    or easier for reasons that have nothing to do with its length.
    """
    seen: set[str] = set()
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in _split(paragraph.split()):
                if _is_prose(sentence) and sentence not in seen:
                    seen.add(sentence)
                    yield sentence


def _split(words: list[str]) -> Iterator[str]:
    first = 0
    for i, word in enumerate(words, 1):
        if _ENDS_SENTENCE.search(word):
            yield " ".join(words[first:i])
            first = i


def _is_prose(sentence: str) -> bool:
    words = sentence.split()
    if not SHORTEST_SENTENCE <= len(words) <= LONGEST_SENTENCE or not words[0][0].isupper():
        return False
    return all(_PLAIN_WORD.fullmatch(word) for word in words)
