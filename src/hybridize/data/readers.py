"""Documents from local .txt, .jsonl and .parquet files, and from hub datasets (streamed).

Local files are read into memory, because whole documents are divided and shuffled; a hub dataset is not.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridize.data.documents import SPLITS, Document, Split, unit_hash
from hybridize.data.spec import DataSpec, Role

SUFFIXES = (".txt", ".jsonl", ".parquet")

# A text file becomes several documents, so that a part of a book can be held out: about a hundred, of so many characters.
_PIECES, _SHORTEST, _LONGEST = 100, 4_000, 400_000
_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_DECLARES = re.compile(rf"({'|'.join(_SPLIT_NAMES)})(?![a-z])")
_KNOWN_LAYOUTS: tuple[dict[Role, str], ...] = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"text": "text"},
    {"text": "content"},
    {"prompt": "prompt", "response": "response"},
    {"prompt": "prompt", "response": "completion"},
    {"prompt": "instruction", "input": "input", "response": "output"},
    {"prompt": "instruction", "response": "output"},
    {"prompt": "instruction", "response": "response"},
    {"prompt": "question", "response": "answer"},
)
_ROLES_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system"}


def read_files(path: Path, fields: Mapping[Role, str] | None = None) -> list[Document]:
    """Documents of a file, or of all files under a folder in the order of their names.

    A file named train*, validation* (val*, dev*) or test* declares its documents' split.

    Raises:
        ValueError: no such file, no readable file, a broken line, or a field that is not there.
    """
    check_there(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"data source {str(path)!r}: the folder holds no {', '.join(SUFFIXES)} file")
    documents = [document for file in files for document in _read_file(file, fields)]
    if not documents:
        raise ValueError(f"data source {str(path)!r} holds no text")
    return documents


def check_there(path: Path) -> None:
    """Raises ValueError where there is no such file or folder."""
    if not path.exists():
        raise ValueError(f"data source {str(path)!r}: there is no such file or folder")


def _read_file(file: Path, fields: Mapping[Role, str] | None) -> Iterator[Document]:
    declared = _DECLARES.match(file.stem.lower())
    split = _SPLIT_NAMES[declared[1]] if declared else None
    if file.suffix == ".txt":
        for piece in _pieces(_decode(file)):
            yield Document(group=_digest(piece), text=piece, split=split)
    elif file.suffix == ".jsonl":
        yield from from_records(_jsonl(file), fields, split)
    elif file.suffix == ".parquet":
        yield from from_records(_parquet(file), fields, split)
    else:
        raise ValueError(
            f"data source {str(file)!r}: {file.suffix or 'no suffix'} is not one of {', '.join(SUFFIXES)}"
        )


def _decode(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: byte {error.start} is not UTF-8; convert the file first") from error


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at empty lines into about `_PIECES` pieces, none longer than `_LONGEST` or cut below `_SHORTEST`."""
    most = min(max(len(text) // _PIECES, _SHORTEST), _LONGEST)
    while len(text) > most:
        cut = max(text.rfind("\n\n", most // 2, most), 0) or max(text.rfind(" ", most // 2, most), 0) or most
        yield text[:cut].strip()
        text = text[cut:].strip()
    if text:
        yield text


def _jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}:{number}: not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{file}:{number}: must be a JSON object, not {type(record).__name__}")
            yield f"{file}:{number}", record


def _parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in table.iter_batches())
        for number, record in enumerate(rows, start=1):
            yield f"{file}: row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable parquet file ({str(error).splitlines()[0]})") from error


def from_records(
    records: Iterable[tuple[str, Mapping[str, Any]]], fields: Mapping[Role, str] | None, split: Split | None
) -> Iterator[Document]:
    """Documents from (place, record) pairs. Without `fields` the first record decides which known layout it is."""
    layout: Mapping[Role, str] | None = None
    for place, record in records:
        if layout is None:
            layout = resolve_fields(list(record), fields, place)
        document = _document(record, layout, place, split)
        if document is not None:
            yield document


def resolve_fields(columns: list[str], fields: Mapping[Role, str] | None, place: str) -> Mapping[Role, str]:
    """The mapping from roles to fields, checked against the fields that exist.

    Raises:
        ValueError: a named field does not exist, or nothing is named and no known layout fits.
    """
    if fields is None:
        for layout in _KNOWN_LAYOUTS:
            if set(layout.values()) <= set(columns):
                return layout
        raise ValueError(
            f"{place}: cannot tell which field holds the text; the fields are {', '.join(columns) or 'none'}. "
            f"Name it, as in fields: {{text: {columns[0] if columns else 'NAME'}}}"
        )
    for role, field in fields.items():
        if field not in columns:
            near = difflib.get_close_matches(field, columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{place}: no field {field!r} for {role}; the fields are {', '.join(columns)}{hint}"
            )
    return fields


def _document(
    record: Mapping[str, Any], layout: Mapping[Role, str], place: str, split: Split | None
) -> Document | None:
    """A record's document, or None where it holds no text (or no response)."""
    for field in layout.values():
        if field not in record:
            raise ValueError(f"{place}: the field {field!r} is missing; this record has {', '.join(record)}")
    if "messages" in layout:
        messages = _messages(record[layout["messages"]], place)
        if not messages:
            return None
        document = Document(group="", messages=messages, split=split)
    elif "text" in layout:
        text = _string(record, layout["text"], place)
        if not text.strip():
            return None
        document = Document(group="", text=text, split=split)
    else:
        prompt = _string(record, layout["prompt"], place)
        context = _string(record, layout["input"], place) if "input" in layout else ""
        response = _string(record, layout["response"], place)
        if not response.strip():
            return None
        prompt = f"{prompt}\n\n{context}" if context.strip() else prompt
        document = Document(group="", prompt=prompt, response=response, split=split)
    object.__setattr__(document, "group", _digest(document.content))
    return document


def _string(record: Mapping[str, Any], field: str, place: str) -> str:
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{place}: field {field!r} must hold a string, not {type(value).__name__}")
    return value


def _messages(value: Any, place: str) -> tuple[dict[str, str], ...]:
    """Messages with role and content; `from`/`value` pairs are taken for the same thing."""
    messages = []
    for message in value or ():
        message = message if isinstance(message, Mapping) else {}
        role = message.get("role") or _ROLES_OF_SHAREGPT.get(str(message.get("from")))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{place}: every message needs a role and a content, both strings")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def stream_hub(spec: DataSpec, split: Split) -> Iterator[Document]:
    """Documents of a hub dataset, streamed, shuffled through a buffer of 10,000 where the spec asks for it.

    A split the dataset does not have is carved out of its train split by a hash of the content, which needs no
    second pass; then train leaves those documents out.

    Raises:
        ValueError: the dataset cannot be opened, or has neither this split nor one to carve it from.
    """
    import datasets

    (source,) = spec.sources
    try:
        own = datasets.get_dataset_split_names(source, spec.name)
        declared = (
            {_SPLIT_NAMES[name]: name for name in own if name in _SPLIT_NAMES} if spec.split is None else {}
        )
        name = declared.get(split) or spec.split or declared.get("train")
        if name is None:
            raise ValueError(f"it has the splits {', '.join(own)}; name one with split:")
        stream = datasets.load_dataset(source, spec.name, split=name, streaming=True)
        if spec.shuffle:
            stream = stream.shuffle(seed=spec.seed, buffer_size=10_000)
        records = ((f"{source} ({name}): record {number}", record) for number, record in enumerate(stream))
        for document in from_records(records, spec.fields, None):
            whole = split != "train" and declared.get(split) == name
            if whole or _carved(document.group, spec, set(declared)) == split:
                yield document
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"data source {source!r} (hub dataset): {lines[0]}") from error


def _carved(group: str, spec: DataSpec, declared: set[Split]) -> Split:
    """The split of a document of the train split: by its hash, among train and the splits the dataset lacks."""
    position, edge = unit_hash(group), 0.0
    for split in SPLITS[1:]:
        if split in declared:
            continue
        edge += spec.validation if split == "validation" else spec.test
        if position < edge:
            return split
    return "train"
