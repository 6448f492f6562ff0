"""Documentation strings and bare code from parsed source."""

import ast
from types import SimpleNamespace

from hybridize.data import corpora
from hybridize.data.extract import code, docstrings

SOURCE = b'''"""The module."""
import os

class A(object):
    """Class A."""

    x = """not documentation"""

    def method(self, a, /, b=1, *rest, c, **more):
        """A method."""
        def inner():
            """Inside a function."""
        return a  # a comment

if True:
    async def conditional(x, *, y=2):
        """Defined under a condition."""

raise RuntimeError("importing this file would fail")
'''


def test_docstrings_in_source_order_with_headings():
    assert docstrings(SOURCE, "pkg.mod", minimum=0) == [
        ("pkg.mod", "The module."),
        ("class pkg.mod.A", "Class A."),
        ("pkg.mod.A.method(a, b, *rest, c, **more)", "A method."),
        ("pkg.mod.conditional(x, *, y)", "Defined under a condition."),
    ]


def test_short_and_broken_files_give_nothing():
    assert docstrings(SOURCE, "m", minimum=1000) == []
    assert docstrings(b'"""doc"""\ndef broken(:', "m", minimum=0) == []
    assert docstrings(b'"""doc"""\n\x00', "m", minimum=0) == []
    assert code(b"def broken(:") == ""


def test_code_has_neither_comments_nor_docstrings():
    bare = code(SOURCE)
    assert "comment" not in bare and "Class A." not in bare and "Inside" not in bare
    assert "not documentation" in bare, "a string that is assigned is code"
    assert code(b'def f():\n    """only this"""\n') == "def f():\n    pass"
    ast.parse(bare)


def test_workers_give_results_in_the_order_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_BATCH", 2)
    files = []
    for number in range(7):
        path = tmp_path / f"m{number}.py"
        path.write_text(f'"""{"text " * 100}number {number} \\ud800."""\n')
        files.append(corpora.SourceFile(path, f"m{number}", f"g{number % 3}"))
    files.append(corpora.SourceFile(tmp_path / "missing.py", "missing", "g"))
    seen = []
    results = list(corpora._extract(files, "docstrings", lambda what, done, of: seen.append((done, of))))
    assert [pairs[0][1].split()[-2] for pairs in results[:7]] == [str(number) for number in range(7)]
    assert results[7] == []
    assert seen == [(2, 8), (4, 8), (6, 8), (8, 8)]


def test_corpus_is_deduplicated_cached_and_repaired(tmp_path, monkeypatch, cache, caplog):
    shared = "The same documentation in two packages. " * 20
    files = []
    for name in ("one", "two", "three"):
        path = tmp_path / f"{name}.py"
        own = f"All about {name} in particular. " * 20
        path.write_text(f'"""{shared}"""\ndef f(x):\n    """{own}"""\n')
        files.append(corpora.SourceFile(path, name, name))
    (tmp_path / "short.py").write_text('"""Short."""')
    files.append(corpora.SourceFile(tmp_path / "short.py", "short", "short"))
    monkeypatch.setattr(corpora, "_library_files", lambda: files)
    monkeypatch.setattr(corpora, "_package_files", list)

    first = corpora.load_docstrings()
    packages = [document for document in first if not document.group.startswith("std:")]
    assert [document.group for document in packages] == ["one", "two", "three"]
    assert sum(shared.strip() in document.content for document in packages) == 1
    assert packages[1].content.startswith("two.f(x)\n\nAll about two")
    assert any("print" in document.content for document in first if document.group == "std:pydoc_data")

    for file in files:
        file.path.unlink()
    assert corpora.load_docstrings() == first, "the second time comes from the cache"
    (stored,) = (cache / "corpora").glob("docstrings-*.parquet")
    stored.write_bytes(stored.read_bytes()[:100])
    monkeypatch.setattr(corpora, "_library_files", list)
    assert {document.group for document in corpora.load_docstrings()} == {"std:pydoc_data"}
    assert "is broken" in caplog.text
    assert not list((cache / "corpora").glob(".*")), "no temporary file stays"


def test_installed_packages_are_found_without_this_one_and_the_benchmarks(monkeypatch):
    groups = {file.group for file in corpora._package_files()}
    assert {"torch", "pydantic"} <= groups and not groups & {"hybridize", "lm_eval"}
    for name in ("lm_eval", "lm-eval", "LM_Eval"):  # as wheels of different ages write it
        named = SimpleNamespace(metadata={"Name": name})
        monkeypatch.setattr(corpora.importlib.metadata, "distributions", lambda named=named: [named])
        assert corpora._distributions() == {}
    library = corpora._library_files()
    assert {"std:json", "std:email"} <= {file.group for file in library}
    assert not any("site-packages" in file.path.parts for file in library)
    assert not any("tests" in file.path.parts or "_vendor" in file.path.parts for file in library)
