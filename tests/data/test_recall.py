"""Made-up facts: each is asked for after it was said, documents come back the same, and no form of an evaluation is among them."""

from __future__ import annotations

import re

from hybridize.data import recall
from hybridize.data.recall import paragraphs, recall_document

PROSE = ["Every paragraph of this prose stands between two facts, as a reader would expect it to."]
LOOKUP = re.compile(r"(?:^A:|\bhave\?| ->|^Look up the [a-z ]+ of [^:]+:) (.+)$", re.MULTILINE)


def documents(count: int, prose=PROSE) -> list[str]:
    return [recall_document(index, prose) for index in range(count)]


def test_what_is_asked_for_was_said_before():
    asked = 0
    for text in documents(60):
        for match in LOOKUP.finditer(text):
            assert match[1] in text[: match.start()], match[0]
            asked += 1
    assert asked > 200


def test_lists_come_back_in_another_order():
    text = next(text for text in documents(40) if text.count(" = ") > 20 and "\n\n" in text)
    lines = [line for line in text.splitlines() if line]
    values = [re.split(r" = |: |\t", line)[-1].strip('|", ') for line in lines]
    assert len(set(values)) < len(values)


def test_a_document_depends_on_its_index_and_seed_alone():
    first = documents(8)
    assert documents(8) == first and len(set(first)) == 8
    assert recall_document(3, PROSE, seed=1) != first[3]
    assert PROSE[0] in "".join(documents(20)) and PROSE[0] not in "".join(documents(20, prose=[]))


def test_lengths():
    lengths = [len(text) for text in documents(60)]
    assert min(lengths) >= recall.SHORTEST and max(lengths) < 2 * recall.LONGEST
    assert max(lengths) > 2 * min(lengths)


def test_no_form_of_an_evaluation_is_trained_on():
    templates = " ".join(
        (*recall._FACTS, *recall._LOOKUPS, *recall._FORMATS, *recall._NOISE, *recall._THINGS)
    ).lower()
    for word in ("magic", "pass key", "passkey", "special", "uuid", "variable", "grass", "sky"):
        assert word not in templates


def test_paragraphs():
    good = "A paragraph of prose that is long enough to stand between two of the facts."
    text = f"short.\n\n{good}\n\n    >>> code(that='is no prose', although_it='is long enough')\n\nno capital but an end, and long enough as well."
    assert paragraphs([text]) == [good]
