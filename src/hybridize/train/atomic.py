"""Files and folders that appear whole or not at all, and what is said when the disk is full.

Both context managers write to a hidden sibling on the same file system, flush it to the disk and rename it. A process that
dies at any moment leaves the former file or folder; the stale sibling is removed by the next writer. One writer at a time.
"""

import ctypes
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class DiskFullError(OSError):
    """The disk, the quota or the file-size limit does not hold what was to be written. The former state is intact."""


@contextmanager
def atomic_write(path: Path | str, mode: str = "wb", *, bytes_needed: int | None = None) -> Iterator[IO[Any]]:
    """Open a file for writing that replaces `path` when the block ends, and only then.

    Args:
        path: the file; its folder is made.
        mode: `"wb"`, or `"w"` for UTF-8 text.
        bytes_needed: the size, where known: a disk too small is then refused before anything is written.

    Raises:
        DiskFullError: in one line, with the folder and the bytes needed.
    """
    path = Path(path)
    temporary = _sibling(path, "tmp")
    try:
        with full_disk_explained(temporary, bytes_needed):
            path.parent.mkdir(parents=True, exist_ok=True)
            _require_space(path.parent, bytes_needed)
            with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path | str, *, bytes_needed: int | None = None) -> Iterator[Path]:
    """Give an empty folder that becomes `path` when the block ends; an existing `path` is replaced.

    Raises:
        DiskFullError: in one line, with the folder and the bytes needed; also for errors of safetensors, which are none
            of Python's own.
    """
    path = Path(path)
    temporary = _sibling(path, "tmp")
    try:
        with full_disk_explained(temporary, bytes_needed):
            path.parent.mkdir(parents=True, exist_ok=True)
            _require_space(path.parent, bytes_needed)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            for entry in [*temporary.rglob("*"), temporary]:
                _sync(entry)
            _publish(temporary, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_file(path: Path | str) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_stale(folder: Path) -> None:
    """Remove what writers that were killed left in `folder`."""
    for entry in folder.glob(".*.tmp"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _publish(temporary: Path, path: Path) -> None:
    if not path.exists():
        os.rename(temporary, path)
    elif not _exchange(temporary, path):
        # no atomic exchange here: between the two renames the former folder lies under its other name
        former = _sibling(path, "former.tmp")
        shutil.rmtree(former, ignore_errors=True)
        os.rename(path, former)
        os.rename(temporary, path)
        shutil.rmtree(former)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, where the system can (Linux: renameat2)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return rename(*arguments) == 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_space(folder: Path, needed: int | None) -> None:
    if needed is not None and shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk_explained(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn what a full disk raises while `path` is written into a `DiskFullError`; `needed` is its size in bytes."""
    folder = path.parent
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        least = max(_size(path), free if _code(error) == errno.ENOSPC else 0)
        size = f"{needed:,}" if needed is not None else f"more than {least:,}"
        explained = DiskFullError(
            f"no room to write in {folder}: {size} bytes are needed, {free:,} are free ({os.strerror(_code(error))});"
            " what was there before is intact: free some space and run the same command again"
        )
        explained.errno = _code(error)
        raise explained from error


def _code(error: Exception) -> int:
    """The operating system's error number, also out of an error raised in Rust (safetensors) that only prints it."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else 0


def _is_full(error: Exception) -> bool:
    return not isinstance(error, DiskFullError) and _code(error) in _FULL


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    return path.stat().st_size if path.exists() else 0
