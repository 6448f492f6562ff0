"""Splits by group, duplicates, fingerprints."""

import random

import pytest

from hybridize.data.documents import Deduplicator, Document, assign_splits, corpus_fingerprint, divide


def test_splits_take_their_share_and_do_not_depend_on_order():
    generator = random.Random(0)
    sizes = {f"package{i}": generator.randint(1_000, 20_000) for i in range(200)}
    assigned = assign_splits(sizes, validation=0.05, test=0.1)
    shares = {
        split: sum(sizes[g] for g in sizes if assigned[g] == split) / sum(sizes.values())
        for split in ("train", "validation", "test")
    }
    assert shares["test"] == pytest.approx(0.1, abs=0.015)
    assert shares["validation"] == pytest.approx(0.05, abs=0.015)
    assert assign_splits(dict(reversed(sizes.items())), validation=0.05, test=0.1) == assigned


def test_a_large_package_stays_in_train():
    sizes = {"huge": 10_000_000} | {f"small{i}": 10_000 for i in range(300)}
    for salt in range(20):
        renamed = {f"{name}-{salt}": size for name, size in sizes.items()}
        assert assign_splits(renamed, validation=0.05, test=0.05)[f"huge-{salt}"] == "train"


def test_three_groups_give_three_splits_and_one_group_is_train():
    assert sorted(assign_splits(dict.fromkeys("abc", 9), validation=0.04, test=0.04).values()) == [
        "test",
        "train",
        "validation",
    ]
    assert assign_splits({"a": 9}, validation=0.04, test=0.04) == {"a": "train"}
    assert set(assign_splits(dict.fromkeys("abcdef", 9), validation=0.0, test=0.0).values()) == {"train"}


def test_groups_are_never_divided_and_declared_splits_hold():
    documents = [Document(group=f"g{i % 17}", text=f"text {i} " * (i + 1)) for i in range(170)]
    parts = divide(documents, validation=0.1, test=0.1)
    groups = {split: {document.group for document in part} for split, part in parts.items()}
    assert all(groups.values())
    assert not groups["train"] & groups["test"] and not groups["train"] & groups["validation"]
    assert not groups["test"] & groups["validation"]
    assert sum(map(len, parts.values())) == len(documents)

    declared = [*documents, Document(group="own", text="mine", split="test")]
    parts = divide(declared, validation=0.1, test=0.1)
    assert [document.group for document in parts["test"]] == ["own"], (
        "a declared split is not mixed with others"
    )
    assert parts["validation"]


def test_duplicates():
    dedupe = Deduplicator()
    long = "A first sentence of some length, with words. " * 10
    assert dedupe.is_new("Return self.") and not dedupe.is_new("Return self.")
    assert not dedupe.is_new("return   SELF"), "case and punctuation do not make it new"
    assert dedupe.is_new(long + "one ending") and not dedupe.is_new(long + "another ending")
    assert dedupe.is_new("Return self, but different.")


def test_fingerprint_sees_every_change():
    base = [Document(group="a", text="x"), Document(group="b", prompt="p", response="r")]
    changed = [
        [Document(group="a", text="y"), base[1]],
        [base[0], Document(group="b", prompt="pr", response="")],
        list(reversed(base)),
        base[:1],
        [Document(group="ax", text=""), base[1]],
    ]
    prints = {corpus_fingerprint(documents) for documents in [base, *changed]}
    assert len(prints) == 6
    assert corpus_fingerprint(list(base)) == corpus_fingerprint(base)
