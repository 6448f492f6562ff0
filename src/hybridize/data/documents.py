"""Documents, their removal as duplicates, their fingerprint, and the division into train, validation and test.

A group is what must not be split: all documents of one package, or all copies of one text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_SALT = "hybridize split 1"
_PREFIX = 200  # normalised characters that two near-duplicates share
_LINE = 30  # characters of a line that tells one text from another
_SHARED = 5  # lines shared with an original from which on a text may be its copy
_SHARE = 1 / 3  # of the lines of the shorter of the two, from which on it is


@dataclass(frozen=True)
class Document:
    """One text: plain `text`, or `prompt` and `response`, or `messages` (dicts with `role` and `content`).

    `split` is where the source itself puts the document (a file named test.jsonl), None where it does not say.
    """

    group: str
    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    split: Split | None = None

    @property
    def content(self) -> str:
        """Everything it says, as one string: for hashes and sizes."""
        if self.text is not None:
            return self.text
        if self.messages is not None:
            return json.dumps(
                [dict(message) for message in self.messages], sort_keys=True, ensure_ascii=False
            )
        return f"{self.prompt}\0{self.response}"


class Deduplicator:
    """Says whether a text is new: exact copies are not, nor texts alike in their first 200 normalised characters."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, text: str) -> bool:
        normalised = re.sub(r"\W+", " ", text[: 4 * _PREFIX]).strip().lower()[:_PREFIX]
        key = hashlib.blake2b(normalised.encode(), digest_size=16).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


class Originals:
    """Finds edited and partial copies of some texts by their longer lines, which changed imports and names leave alone.

    A vendored or forked module mostly begins with other lines than its original, so `Deduplicator` takes it for new.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._holders: dict[str, list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            lines = _long_lines(text)
            self._sizes.append(len(lines))
            for line in lines:
                self._holders[line].append(number)

    def has_copy(self, text: str) -> bool:
        """Whether a text shares a third of its lines, or of an original's, and no fewer than five, with one original."""
        lines = _long_lines(text)
        shared = Counter(number for line in lines for number in self._holders.get(line, ()))
        return any(
            count >= max(_SHARED, _SHARE * min(len(lines), self._sizes[number]))
            for number, count in shared.items()
        )


def _long_lines(text: str) -> set[str]:
    return {line for each in text.splitlines() if len(line := each.strip()) >= _LINE}


def unit_hash(text: str) -> float:
    """Hash of a text as a number in [0, 1), the same on every machine."""
    digest = hashlib.sha256(f"{_SALT}:{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def assign_splits(sizes: Mapping[str, int], *, validation: float, test: float) -> dict[str, Split]:
    """Divide whole groups, deterministically, so that held-out splits get their share of the text.

    Groups are taken in the order of their hash: first into test until it holds `test` of all characters, then into
    validation. A group above half the share is left for train, so that no large package makes up a split alone;
    where no group is that small the smallest is taken. At least one group always stays in train.

    Args:
        sizes: characters of each group.
        validation, test: shares of all characters, in [0, 0.5).
    """
    total = sum(sizes.values())
    order = sorted(sizes, key=lambda group: (unit_hash(group), group))
    assigned: dict[str, Split] = {}
    shares: tuple[tuple[Split, float], ...] = (("test", test), ("validation", validation))
    for split, share in shares:
        filled = 0
        free = [group for group in order if group not in assigned]
        fitting = [group for group in free if sizes[group] <= share * total / 2]
        for group in fitting or sorted(free, key=lambda group: sizes[group])[:1]:
            if filled >= share * total or len(assigned) >= len(sizes) - 1:
                break
            assigned[group] = split
            filled += sizes[group]
    return {group: assigned.get(group, "train") for group in sizes}


def divide(documents: Iterable[Document], *, validation: float, test: float) -> dict[Split, list[Document]]:
    """Documents by split. What the source declares holds; a split it does not declare is carved out of train."""
    documents = list(documents)
    declared = {document.split for document in documents} - {None}
    pool: dict[str, int] = {}
    for document in documents:
        if document.split in (None, "train"):
            pool[document.group] = pool.get(document.group, 0) + len(document.content)
    assigned = assign_splits(
        pool,
        validation=0.0 if "validation" in declared else validation,
        test=0.0 if "test" in declared else test,
    )
    parts: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    for document in documents:
        if document.split in ("validation", "test"):
            parts[document.split].append(document)
        else:
            parts[assigned[document.group]].append(document)
    return parts


def pool(divided: Sequence[Mapping[Split, list[Document]]], split: Split) -> list[Document]:
    """One split of several sources that were divided each alone, in their order.

    A group that another source keeps for validation or test is left out of train, and one that it keeps for the test out
    of validation: what one source is measured on must not be learnt from another.
    """
    later = SPLITS[SPLITS.index(split) + 1 :]
    chosen: list[Document] = []
    for parts in divided:
        others = [other for other in divided if other is not parts]
        kept_back = {document.group for other in others for name in later for document in other[name]}
        chosen += [document for document in parts[split] if document.group not in kept_back]
    return chosen


def corpus_fingerprint(documents: Iterable[Document]) -> str:
    """sha256 of all documents in their order."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.group, document.content):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
    return digest.hexdigest()
