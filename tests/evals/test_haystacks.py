"""Haystacks: sentences of any count of words, essays from files, and prose out of documentation strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridize.evals import haystacks as module
from hybridize.evals.haystacks import Haystack, find_haystack, local_prose, prose, read_essays

TEXT = 'It rains, e.g. in May. "Why?" she asked. Nobody (not even he) knew! It was no. 3 of 7'
SENTENCES = [
    "It rains, e.g. in May.",
    '"Why?" she asked.',
    "Nobody (not even he) knew!",
    "It was no.",
    "3 of 7",
]
HAYSTACK = Haystack("essays", tuple(TEXT.split()))


def test_sentences_are_the_first_words() -> None:
    size = len(HAYSTACK.words)
    assert HAYSTACK.sentences(size) == SENTENCES
    for count in range(3 * size + 2):
        sentences = HAYSTACK.sentences(count)
        assert " ".join(sentences).split() == list(HAYSTACK.words * 4)[:count]
        assert all(sentences), "no sentence is empty"
    assert HAYSTACK.sentences(7) == [SENTENCES[0], '"Why?" she']
    assert HAYSTACK.sentences(size + 5) == [*SENTENCES, SENTENCES[0]]


def test_fingerprint_is_the_texts() -> None:
    assert HAYSTACK.fingerprint == Haystack("local prose", HAYSTACK.words).fingerprint
    assert HAYSTACK.fingerprint != Haystack("essays", HAYSTACK.words[:-1]).fingerprint


def test_essays_come_from_json_text_and_folders(tmp_path: Path) -> None:
    (tmp_path / "essays.json").write_text(json.dumps({"text": "One\n\n two\tthree. " * 400}))
    (tmp_path / "b.txt").write_text("later words. " * 600)
    (tmp_path / "a.txt").write_text("early words. " * 600)
    assert read_essays(tmp_path / "essays.json").words == ("One", "two", "three.") * 400
    assert read_essays(tmp_path / "b.txt").words == ("later", "words.") * 600
    folder = find_haystack(tmp_path)
    assert folder.kind == "essays" and folder.words == ("early", "words.") * 600 + ("later", "words.") * 600


def test_unreadable_essays_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("short.txt", "a few words", "holds 3 words; it needs at least 1,000"),
        ("broken.json", "{", "is no JSON"),
        ("list.json", "[]", "must be an object with a string `text`"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            read_essays(tmp_path / name)
    with pytest.raises(ValueError, match="no such file or folder"):
        read_essays(tmp_path / "missing.txt")


DOCUMENTATION = """module.function(x, y)

Return the sum of both arguments. It never raises. The result is kept
in a cache, so that a second call is fast.

    >>> function(1, 2)
    3

Parameters: x (int) -- the first one. see also `other_function` for more of it.
Return the sum of both arguments. This uses __dunder__ names and is left out.
"""


def test_prose_is_plain_sentences_each_once() -> None:
    assert list(prose([DOCUMENTATION, DOCUMENTATION])) == [
        "Return the sum of both arguments.",
        "The result is kept in a cache, so that a second call is fast.",
    ]


def test_local_prose_is_held_out_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def texts(spec: object, split: str) -> list[str]:
        asked.append(split)
        return [f"Number {'x' * i} is a word that nobody else has. Now." for i in range(1, 200)]

    monkeypatch.setattr(module, "plain_texts", texts)
    local_prose.cache_clear()
    try:
        found = find_haystack()
        assert found.kind == "local prose" and found.sentences(18)[1].startswith("Number xx is")
        assert asked == ["test"]
        monkeypatch.setattr(module, "plain_texts", lambda spec, split: ["Too little text is here."])
        local_prose.cache_clear()
        with pytest.raises(ValueError, match="hold 5 words of prose; give a file or folder of essays"):
            local_prose()
    finally:
        local_prose.cache_clear()
