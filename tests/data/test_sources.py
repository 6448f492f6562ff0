"""Several texts at once, and the code of installed packages: what is held out stays held out."""

import hashlib
import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from hybridize.data import DataSpec, batching, build_rows, corpora
from hybridize.data.documents import SPLITS, Document, Originals, divide, pool
from hybridize.data.packing import open_documents
from hybridize.recipe import RecipeError, json_schema, load_recipe

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")


def write_texts(path: Path, first: int, count: int) -> Path:
    """One text a number from `first` on; its first word is the number's own, and the tokenizer knows it."""
    generator = random.Random(first)
    texts = (
        " ".join([f"w{n}", *(f"w{generator.randrange(300, 400)}" for _ in range(20))])
        for n in range(first, first + count)
    )
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    return str(write_texts(tmp_path / "one.jsonl", 0, 100)), str(
        write_texts(tmp_path / "two.jsonl", 100, 200)
    )


def contents(spec: DataSpec, split: str) -> set[str]:
    return {document.content for document in open_documents(spec, split)[0]}  # type: ignore[arg-type]


def test_several_texts_are_divided_alone_then_pooled_and_shuffled(two, tokenizer):
    spec = DataSpec(source=list(two), length=16, validation=0.1, test=0.1)
    for split in SPLITS:
        alone = [contents(each, split) for each in spec.by_source().values()]
        assert all(alone) and contents(spec, split) == alone[0] | alone[1]
    rows = build_rows(spec, tokenizer, "train")
    firsts = np.asarray(rows.tokens_NT).ravel()[rows.starts] - 5
    early = (firsts[: len(firsts) // 2] < 100).mean()
    assert 0.2 < early < 0.5, "a third of the text, and as much of it in the first half as in the second"
    unshuffled = build_rows(spec.model_copy(update={"shuffle": False}), tokenizer, "train")
    firsts = np.asarray(unshuffled.tokens_NT).ravel()[unshuffled.starts] - 5
    assert (np.diff((firsts >= 100).astype(int)) >= 0).all(), "in the order of the list"


def test_what_one_text_holds_out_no_other_trains_on():
    def source(**splits: str) -> dict:
        return divide([Document(group=g, text=g, split=s) for g, s in splits.items()], validation=0, test=0)

    both = [
        source(a="train", b="validation", c="test"),
        source(a="validation", b="test", c="train", d="train"),
    ]
    groups = {split: [document.group for document in pool(both, split)] for split in SPLITS}
    assert groups == {"train": ["d"], "validation": ["a"], "test": ["c", "b"]}
    assert [document.group for document in pool(both[:1], "train")] == ["a"]


def test_a_list_of_one_is_that_text(two, tokenizer, cache):
    plain, listed = DataSpec(source=two[0], length=16), DataSpec(source=[two[0]], length=16)
    assert listed == plain and listed.source == two[0]
    assert (
        build_rows(listed, tokenizer, "train").fingerprint
        == build_rows(plain, tokenizer, "train").fingerprint
    )
    assert len(list((cache / "rows").iterdir())) == 1, "one entry of the cache serves both"
    pooled = build_rows(DataSpec(source=two, length=16), tokenizer, "train")
    assert pooled.fingerprint != build_rows(plain, tokenizer, "train").fingerprint


def test_the_identity_of_a_plain_text_is_what_it_was():
    """Written down before lists were allowed: runs and caches of that time must be found again."""
    dump = json.dumps(DataSpec().model_dump(mode="json"), sort_keys=True)
    assert (
        hashlib.sha256(dump.encode()).hexdigest()
        == "f8c0d9d7cc0710ef81ca425df7bb849520643c10606fb31b3b1c43255c94ca85"
    )


def test_a_text_by_two_names_is_refused(two, tmp_path):
    one, other = two
    (tmp_path / "link").symlink_to(tmp_path)
    for again, how in (
        (tmp_path / "link" / "one.jsonl", "the same as"),
        (tmp_path / "x" / ".." / "one.jsonl", "the same as"),
    ):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"{again}' is {how} '{one}', listed too; list every text once"):
            open_documents(DataSpec(source=[one, other, str(again)]), "train")
    with pytest.raises(ValueError, match=f"'{one}' is in '{tmp_path}', listed too"):
        open_documents(DataSpec(source=[one, str(tmp_path)]), "train")


def test_texts_joined_by_commas_are_told_how_lists_are_written():
    with pytest.raises(ValueError, match=r"did you mean the list \[docstrings, code\]\?"):
        open_documents(DataSpec(source="docstrings, code"), "train")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ([], "is an empty list"),
        (["code", "docstrings", "code"], "names 'code' twice"),
        (["a.txt", "./a.txt"], "names './a.txt' twice"),
        (["code", 5], r"a list of names .* not \['code', 5\]"),
        (5, "must be a name or a list of names .* not 5"),
        ("", "holds '', which names no text"),
        (["code", " "], "holds ' ', which names no text"),
    ],
)
def test_refused_lists(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        DataSpec(source=source)


def test_texts_that_cannot_be_pooled_are_named(two, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"'org/name': a hub dataset is streamed and cannot be pooled"):
        build_rows(DataSpec(source=[two[0], "org/name"]), tokenizer, "train")
    with pytest.raises(ValueError, match=r"did you mean 'package_code'"):
        build_rows(DataSpec(source=[two[0], "packagecode"]), tokenizer, "train")
    tested = write_texts(tmp_path / "test.jsonl", 300, 30)
    spec = DataSpec(source=[two[0], str(tested)], length=16)
    with pytest.raises(ValueError, match=r"test.jsonl' has no train text: 30 documents, all in other splits"):
        build_rows(spec, tokenizer, "train")
    assert contents(spec, "validation") and contents(spec, "test") > contents(
        spec.by_source()[two[0]], "test"
    )


def test_overrides_name_one_text_or_several():
    recipe = load_recipe("demo", ["data.source=[docstrings, package_code]"])
    assert recipe.data.sources == ("docstrings", "package_code")
    assert recipe.data.label == "docstrings + package_code"
    again = type(recipe).from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again.data == recipe.data, "as a run folder keeps it"
    with pytest.raises(RecipeError) as refused:
        load_recipe("demo", ["data.source=[]"])
    assert refused.value.problems == ["data.source: is an empty list; name at least one text"]
    allowed = json_schema()["$defs"]["DataSpec"]["properties"]["source"]["anyOf"]
    assert {each["type"] for each in allowed} == {"string", "array"}


def module(name: str, *, documented: bool) -> str:
    """A module whose code and documentation are its own."""
    generator = random.Random(name)
    doc = " ".join(generator.choice(WORDS) for _ in range(120))
    lines = [
        f"{name}_{generator.choice(WORDS)}_{n} = compute({generator.random()}, '{name}')" for n in range(25)
    ]
    return "\n".join([f'"""About {name}: {doc}."""'] * documented + lines)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty packages of one module, every fourth without documentation; two of them hold a standard library's module."""

    def written(sources: Iterable[tuple[str, str]]) -> list[corpora.SourceFile]:
        files = []
        for group, text in sources:
            path = tmp_path / f"{group.replace(':', '-')}{len(text)}.py"
            path.write_text(text)
            files.append(corpora.SourceFile(path, group, group))
        return files

    library = {f"std:m{n}": module(f"m{n}", documented=True) for n in range(3)}
    packages = {f"p{n}": module(f"p{n}", documented=n % 4 != 0) for n in range(60)}
    imports = "\n".join(f"from fork.compat.{word} import {word}_{word} as {word}_alias" for word in WORDS)
    copies = {"backport": library["std:m0"], "fork": imports + "\n" + library["std:m1"].replace("0 =", "0=")}
    monkeypatch.setattr(corpora, "_library_files", lambda: written(library.items()))
    monkeypatch.setattr(corpora, "_package_files", lambda: written({**packages, **copies}.items()))
    monkeypatch.setattr(corpora, "_topics", list)


def test_packages_held_out_in_docstrings_are_held_out_in_package_code(installed):
    docstrings = divide(corpora.load_docstrings(), validation=0.04, test=0.04)
    code = divide(corpora.load_package_code(), validation=0.2, test=0.0)
    groups = {split: {document.group for document in code[split]} for split in SPLITS}
    documented = {split: {document.group for document in docstrings[split]} for split in SPLITS}
    for split in SPLITS:
        packages = {group for group in documented[split] if group.startswith("p")}
        assert packages and packages <= groups[split]
        assert not any(packages & groups[other] for other in SPLITS if other != split)
        assert groups[split] - packages, "packages without documentation are divided too"
    assert sum(map(len, groups.values())) == 60
    assert corpora.load_package_code() == corpora.load_package_code()


def test_other_shares_train_on_no_package_that_either_text_holds_out(installed):
    spec = DataSpec(source=["docstrings", "package_code"], validation=0.2, test=0.2)
    train = {document.group for document in open_documents(spec, "train")[0]}
    for alone in spec.by_source().values():
        for split in ("validation", "test"):
            assert not train & {document.group for document in open_documents(alone, split)[0]}
    assert train


def test_package_code_holds_no_copy_of_the_standard_library(installed):
    found = {document.group for document in corpora.load_package_code()}
    assert {"p0", "p59"} <= found
    assert "backport" not in found and "fork" not in found
    assert {document.group for document in corpora.load_code()} == {"std:m0", "std:m1", "std:m2"}


def test_package_code_holds_no_table(installed, monkeypatch):
    longest = max(corpora.load_package_code(), key=lambda document: len(document.content))
    monkeypatch.setattr(corpora, "_LARGEST", len(longest.content) - 1)
    found = corpora.load_package_code()
    assert found and longest not in found


def test_copies_are_found_by_their_lines():
    original, other = module("m1", documented=False), module("m2", documented=False)
    originals = Originals([original])
    lines = original.splitlines()
    assert originals.has_copy(other + "\n" + original), "the whole of it in a longer text"
    assert originals.has_copy("\n".join(lines[:9])), "a part of it"
    assert not originals.has_copy(other + "\n" + "\n".join(lines[:7])), "seven lines in common with 25"
    assert not originals.has_copy("\n".join(lines[:4])), "too few lines to tell"


def test_a_text_without_a_full_row_is_left_out_where_it_may(tmp_path, tokenizer, caplog):
    def spec(name: str, documents: int) -> DataSpec:
        lines = (
            json.dumps({"text": f"Document {i} of {name} says what it says. " * 4}) for i in range(documents)
        )
        (tmp_path / name).write_text("\n".join(lines))
        return DataSpec(source=str(tmp_path / name), length=64)

    specs = {
        "long": spec("long.jsonl", 400),
        "short": spec("short.jsonl", 8),
        "one": spec("one.jsonl", 1),  # all of it is trained on
        "other": spec("other.jsonl", 400),
    }
    found, notes = batching.held_out_texts(specs, tokenizer, 2, 2, optional=("long", "short", "one"))
    assert list(found) == ["long", "other"] and found["long"][0].input_ids_BT.shape == (2, 64)
    assert "which is no full row" in notes[0] and "has no test text" in notes[1]
    assert all(note in caplog.text for note in notes)
    few = {name: specs[name] for name in ("short", "long", "other")}
    assert list(batching.held_out_texts(few, tokenizer, 2, 2, optional=("short",), count=1)[0]) == ["long"]
    with pytest.raises(ValueError, match="which is no full row"):
        batching.held_out_texts(specs, tokenizer, 2, 2, optional=("one",))
    with pytest.raises(ValueError, match="which is no full row"):
        batching.held_out_texts({"short": specs["short"]}, tokenizer, 2, 2, optional=("short",))


def test_a_missing_file_among_several_is_found_before_any_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridize.data.packing.load_docstrings", lambda _: pytest.fail("loaded"))
    spec = DataSpec(source=["docstrings", str(tmp_path / "missing.txt")], length=64)
    with pytest.raises(ValueError, match="missing.txt': there is no such file or folder"):
        open_documents(spec, "train")
