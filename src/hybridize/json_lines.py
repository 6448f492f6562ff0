"""Files of JSON objects, one a line, that grow while something is measured and are gone on with after a kill.

Lines are added whole and are on the disk when `append` returns. A kill can leave half a line at the end: `parse` gives None for
it, and who goes on writes the file anew before anything is added.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridize.atomic import atomic_write, full_disk_explained


def parse(text: str) -> dict[str, Any] | None:
    """A JSON object, or None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def line(value: Mapping[str, Any]) -> str:
    """An object as one line, its keys in their order."""
    return json.dumps(value) + "\n"


def append(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Add lines; on return they are on the disk. Raises DiskFullError where that is full."""
    with full_disk_explained(path), open(path, "a", encoding="utf-8") as file:
        file.writelines(line(value) for value in values)
        file.flush()
        os.fsync(file.fileno())


def rewrite(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """The whole file anew; it appears whole or not at all."""
    with atomic_write(path, "w") as file:
        file.writelines(line(value) for value in values)
