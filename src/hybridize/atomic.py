"""Files and folders that appear whole or not at all, and what is said when the disk is full.

Both context managers write to a hidden sibling on the same file system, flush it to the disk and rename it. A process that
dies at any moment leaves the former file or folder; its stale sibling is removed by the next writer of the same path.
Siblings have names of their own, so processes may write one path at the same time: the last to finish is seen.
"""

import ctypes
import errno
import hashlib
import itertools
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}  # what renaming a folder onto another thing gives
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h

_HOST = platform.node() or "localhost"
_LIFE = secrets.token_hex(4)  # tells this process from an earlier one that had the same number
_count = itertools.count()
_SIBLING = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)-(?P<life>[0-9a-f]{8})-\d+@(?P<host>.+)\.tmp")


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
    temporary = _sibling(path)
    try:
        with full_disk_explained(temporary, bytes_needed):
            _make_room(path, bytes_needed)
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

    Args:
        path: the folder; its parents are made.
        bytes_needed: the size, where known: a disk too small is then refused before anything is written.

    Raises:
        DiskFullError: in one line, with the folder and the bytes needed; also for errors of safetensors, which are none
            of Python's own.
    """
    path = Path(path)
    temporary = _sibling(path)
    try:
        with full_disk_explained(temporary, bytes_needed):
            _make_room(path, bytes_needed)
            temporary.mkdir()
            yield temporary
            for entry in [*temporary.rglob("*"), temporary]:
                _sync(entry)
            _publish(temporary, path)
            _sync(path.parent)
    finally:
        _remove(temporary)


def sha256_file(path: Path | str) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Remove what writers of `name` (None: of anything) in `folder` left when they were killed.

    What a living process, or any process of another machine, is writing stays.
    """
    for entry in folder.glob(".*.tmp"):
        sibling = _SIBLING.fullmatch(entry.name)
        if sibling and name in (None, sibling["name"]) and not _may_live(sibling):
            _remove(entry)


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{_LIFE}-{next(_count)}@{_HOST}.tmp")


def _may_live(sibling: re.Match[str]) -> bool:
    """Whether the process that made this sibling may still be writing it."""
    pid = int(sibling["pid"])
    if sibling["host"] != _HOST or os.name != "posix":  # elsewhere signal 0 is not a question
        return True
    if pid == os.getpid():
        return sibling["life"] == _LIFE
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's process
        return True
    return True


def _make_room(path: Path, bytes_needed: int | None) -> None:
    """Prepare the folder of `path`: it exists, holds nothing stale and has the space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent, path.name)
    if bytes_needed is not None and shutil.disk_usage(path.parent).free < bytes_needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _publish(temporary: Path, path: Path) -> None:
    """Rename a folder to `path`, also while other processes do the same; what was there before goes."""
    try:
        os.rename(temporary, path)
        return
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
    if _exchange(temporary, path):
        return
    # No atomic exchange here, so the former folder is moved away first. Another process may do that before us, or
    # publish its own folder before we do: then it is our turn again.
    former = _sibling(path)
    with suppress(FileNotFoundError):
        os.rename(path, former)
    _publish(temporary, path)
    _remove(former)


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
