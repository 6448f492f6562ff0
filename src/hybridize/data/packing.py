"""Packing: documents as one stream of tokens, cut into rows of exactly T tokens, kept in the cache as flat files.

Legend: N rows, T tokens a row. A document that a row's end cuts goes on in the next row as a piece of its own.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import logging
import math
import random
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybridize.atomic import atomic_folder
from hybridize.data.corpora import (
    Progress,
    load_code,
    load_docstrings,
    load_essays,
    load_package_code,
    load_recall,
)
from hybridize.data.documents import Document, Split, corpus_fingerprint, divide, pool
from hybridize.data.encoding import encode, segments, starts_with_bos, tokenizer_fingerprint
from hybridize.data.readers import SUFFIXES, check_there, read_files, stream_hub
from hybridize.data.spec import DataSpec
from hybridize.fetch import cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token that is no target, Hugging Face's convention."""

_VERSION = 1  # raise it when cached rows of an older version must be made again
_BATCH_DOCUMENTS = 64
_CORPORA = ("docstrings", "package_code", "recall", "code", "essays")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class TooLittleText(ValueError):
    """A split without text, or without one full row."""


@dataclass(frozen=True)
class Row:
    """T tokens. Labels are not shifted; `starts` are the offsets at which documents, or pieces of them, begin."""

    input_ids: np.ndarray
    labels: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class PackedRows:
    """Rows of one split; arrays are memory maps.

    Attributes:
        tokens_NT: int32.
        targets_NT: uint8, 1 where the document wants the token predicted (0 in masked prompts).
        starts: int64, positions in the flat stream at which documents begin, ascending.
        documents: how many documents the stream holds, the last one maybe cut.
        fingerprint: sha256 of the spec and all three arrays.
    """

    tokens_NT: np.ndarray
    targets_NT: np.ndarray
    starts: np.ndarray
    documents: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.tokens_NT)

    @property
    def length(self) -> int:
        return self.tokens_NT.shape[1]

    @property
    def tokens_available(self) -> int:
        return self.tokens_NT.size

    def epochs(self, tokens: int) -> float:
        """How often a budget of `tokens` reads all rows."""
        return tokens / self.tokens_available

    def share_from(self, position: int) -> float:
        """The share of tokens that stand at `position` or later in their document (or their piece of it in a row)."""
        begins = np.union1d(self.starts, np.arange(len(self) + 1) * self.length)
        lengths = np.diff(begins[begins <= self.tokens_available])
        return float(np.maximum(lengths - position, 0).sum() / max(self.tokens_available, 1))

    def row(self, index: int) -> Row:
        """Row `index` in [0, N); the first token of every document or piece is no target.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        begin = index * self.length
        low, high = np.searchsorted(self.starts, [begin + 1, begin + self.length])
        starts = np.concatenate([[0], self.starts[low:high] - begin])
        input_ids = np.asarray(self.tokens_NT[index], dtype=np.int64)
        labels = np.where(self.targets_NT[index] == 1, input_ids, IGNORED)
        labels[starts] = IGNORED
        return Row(input_ids, labels, starts)


def build_rows(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    tokens: int | None = None,
    *,
    progress: Progress | None = None,
) -> PackedRows:
    """Tokenise and pack one split, or take it from the cache.

    Args:
        tokens: stop after this many, rounded up to whole rows; None takes all there is. Fewer may be available:
            see `PackedRows.epochs`.
        progress: called with what is done, how much, and of how much.

    Raises:
        ValueError: the source is unknown, missing, broken or empty, or gives no full row.
    """
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens is {tokens}; it must be at least 1, or None for all")
    documents, identity = open_documents(spec, split, progress)
    parts = [
        _VERSION,
        spec.model_dump(mode="json"),
        identity,
        tokenizer_fingerprint(tokenizer),
        split,
        tokens,
    ]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    folder = cache_root() / "rows" / key[:32]
    rows = _open_rows(folder)
    if rows is not None:
        return _joined(rows, spec)
    cap = None if tokens is None else math.ceil(tokens / spec.length) * spec.length
    with atomic_folder(folder) as fresh:
        _write_rows(fresh, spec, split, cap, _encoded(documents, tokenizer, spec), progress)
    rows = _open_rows(folder)
    assert rows is not None, "rows that were just written can be read"
    return _joined(rows, spec)


def _joined(rows: PackedRows, spec: DataSpec) -> PackedRows:
    """The rows as one text each, where the spec asks for it."""
    return replace(rows, starts=rows.starts[:0]) if spec.documents == "joined" else rows


def open_documents(
    spec: DataSpec, split: Split, progress: Progress | None = None
) -> tuple[Iterable[Document], str]:
    """Documents of a split in the order of packing, and what identifies them. Raises ValueError as `build_rows`."""
    on_hub = [source for source in spec.sources if _on_hub(source)]
    if on_hub and len(spec.sources) > 1:
        raise ValueError(
            f"data source {on_hub[0]!r}: a hub dataset is streamed and cannot be pooled with other texts; "
            f"save its text to a file and name that, or name the dataset alone"
        )
    if on_hub:
        return stream_hub(spec, split), f"hub:{_commit(on_hub[0])}"
    _refuse_twice(spec.sources)
    divided = []
    for source in spec.sources:
        documents = _load(source, spec, progress)
        divided.append(divide(documents, validation=spec.validation, test=spec.test))
    _refuse_empty(spec, divided, split)
    chosen = pool(divided, split)
    if spec.shuffle:
        random.Random(spec.seed).shuffle(chosen)
    return chosen, corpus_fingerprint(chosen)


def _on_hub(source: str) -> bool:
    """Whether a source names a hub dataset. Raises ValueError where it can name nothing."""
    path = Path(source).expanduser()
    if source in _CORPORA:
        return False
    if path.exists() or path.suffix in SUFFIXES:
        check_there(path)  # before another of several texts is loaded
        return False
    if _HUB_ID.fullmatch(source):
        return True
    near = difflib.get_close_matches(source, _CORPORA, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if {part.strip() for part in source.split(",")} <= {*_CORPORA}:
        hint = f"; did you mean the list [{source}]?"
    raise ValueError(
        f"data source {source!r} is neither {', '.join(_CORPORA)}, an existing file or folder, "
        f"nor a hub dataset id such as 'org/name'{hint}"
    )


def _refuse_twice(sources: Iterable[str]) -> None:
    """Raises ValueError for a file or folder that is listed by two names, or lies in a folder that is listed too."""
    places = {source: Path(source).expanduser().resolve() for source in sources if source not in _CORPORA}
    for source, other in itertools.permutations(places, 2):
        if places[other].is_relative_to(places[source]):
            how = "the same as" if places[other] == places[source] else "in"
            raise ValueError(f"data source {other!r} is {how} {source!r}, listed too; list every text once")


def _load(source: str, spec: DataSpec, progress: Progress | None) -> list[Document]:
    if source == "docstrings":
        return load_docstrings(progress)
    if source == "package_code":
        return load_package_code(progress)
    if source == "recall":
        return load_recall(progress)
    if source == "code":
        return load_code(progress)
    if source == "essays":
        return load_essays()
    return read_files(Path(source).expanduser(), spec.fields)


def _refuse_empty(spec: DataSpec, divided: list[dict[Split, list[Document]]], split: Split) -> None:
    """Raises ValueError where no source has text of a split, or one that is to be trained on has none to train on."""
    empty = {source: parts for source, parts in zip(spec.sources, divided, strict=True) if not parts[split]}
    if len(empty) < len(divided) and not (empty and split == "train"):
        return
    count = sum(len(documents) for parts in empty.values() for documents in parts.values())
    raise TooLittleText(
        f"data source {' + '.join(empty)!r} has no {split} text: {count} documents, all in other splits; "
        f"give it more documents, a larger share ({split}: ...), or a file named {split}*"
    )


def plain_texts(spec: DataSpec, split: Split) -> Iterator[str]:
    """The plain texts of a split; chats and prompts are left out. Raises ValueError as `build_rows`."""
    documents, _ = open_documents(spec, split)
    return (document.text for document in documents if document.text)


def _commit(hub_id: str) -> str:
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(hub_id, timeout=20).sha)
    except Exception as error:  # the client's many error classes share no narrower base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"data source {hub_id!r}: no local file, and the hub does not give this dataset ({first})"
        ) from error


def _encoded(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, spec: DataSpec
) -> Iterator[tuple[list[int], list[bool]]]:
    bos = starts_with_bos(tokenizer)
    for batch in _batched(documents, _BATCH_DOCUMENTS):
        cut = [
            segments(document, tokenizer, chat_template=spec.chat_template, mask_prompt=spec.mask_prompt)
            for document in batch
        ]
        for document in encode(cut, tokenizer, bos):
            yield document.tokens, document.targets


def _batched(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _write_rows(
    folder: Path,
    spec: DataSpec,
    split: Split,
    cap: int | None,
    documents: Iterable[tuple[list[int], list[bool]]],
    progress: Progress | None,
) -> None:
    """Write the stream as it comes, so that memory does not grow with it."""
    starts, total = array("q"), 0
    with (
        (folder / "tokens.bin").open("wb") as tokens_file,
        (folder / "targets.bin").open("wb") as targets_file,
    ):
        for tokens, targets in documents:
            room = len(tokens) if cap is None else min(len(tokens), cap - total)
            starts.append(total)
            np.asarray(tokens[:room], dtype=np.int32).tofile(tokens_file)
            np.asarray(targets[:room], dtype=np.uint8).tofile(targets_file)
            total += room
            if progress:
                progress(f"tokenising {split} text", total, cap or 0)
            if total == cap:
                break
    rows = total // spec.length
    if rows == 0:
        raise TooLittleText(
            f"length is {spec.length}, but the {split} text of {spec.label!r} has {total} tokens, "
            f"which is no full row; use a smaller length or more text"
        )
    whole = rows * spec.length
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(4 * whole)
    with (folder / "targets.bin").open("r+b") as file:
        file.truncate(whole)
    kept = np.asarray(starts, dtype=np.int64)
    kept = kept[kept < whole]
    kept.tofile(folder / "starts.bin")

    digest = hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode())
    for name in ("tokens.bin", "targets.bin", "starts.bin"):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    meta = {"rows": rows, "length": spec.length, "starts": len(kept), "fingerprint": digest.hexdigest()}
    (folder / "meta.json").write_text(json.dumps(meta))


def _open_rows(folder: Path) -> PackedRows | None:
    """Rows in the cache; None where there are none, or where their files do not have the sizes they must have."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text())
        shape = (meta["rows"], meta["length"])
        sizes = {
            "tokens.bin": 4 * shape[0] * shape[1],
            "targets.bin": shape[0] * shape[1],
            "starts.bin": 8 * meta["starts"],
        }
        for name, size in sizes.items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{name} is truncated")
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is broken (%s); tokenising again", folder, error)
        return None
    return PackedRows(
        tokens_NT=np.memmap(folder / "tokens.bin", np.int32, "r", shape=shape),
        targets_NT=np.memmap(folder / "targets.bin", np.uint8, "r", shape=shape),
        starts=np.fromfile(folder / "starts.bin", np.int64),
        documents=meta["starts"],
        fingerprint=meta["fingerprint"],
    )
