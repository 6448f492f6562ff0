"""What a sweep has measured so far: a file of JSON lines that the same sweep goes on with.

The first line holds what the numbers depend on. Half a line that a kill left at the end does not count (see
`hybridize.json_lines`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridize import json_lines
from hybridize.select.table import LayerScores

log = logging.getLogger(__name__)


class Journal:
    """Entries by layer (None: the teacher), in memory and on disk."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, restart: bool = False) -> None:
        """Read what `path` holds. Raises ValueError where it was made under another identity, unless `restart` discards it."""
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.entries: dict[int | None, LayerScores] = {}
        if path.exists():
            self._read(restart)
        self._rewrite()

    def add(self, entry: LayerScores) -> None:
        """Keep an entry; on return it is on the disk. Raises DiskFullError where that is full."""
        self.entries[entry.layer] = entry
        json_lines.append(self.path, [entry.plain()])

    def _read(self, restart: bool) -> None:
        lines = [
            json_lines.parse(line)
            for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        ]
        header = (lines[0] or {}).get("identity")
        header = header if isinstance(header, dict) else None
        if header is None and not any(line is not None and "layer" in line for line in lines):
            return  # nothing was ever finished here
        if header != self.identity:
            differing = sorted(
                key
                for key in self.identity.keys() | (header or {}).keys()
                if self.identity.get(key) != (header or {}).get(key)
            )
            what = f"{self.path} holds scores made with other {', '.join(differing)}"
            if not restart:
                raise ValueError(f"{what}; use another folder, or restart=True to discard them")
            log.warning("%s; they are discarded and the sweep starts anew", what)
            return
        try:
            entries = [LayerScores.read(line) for line in lines if line is not None and "layer" in line]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: {error}; remove that line, its layer is scored again") from error
        self.entries = {entry.layer: entry for entry in entries}

    def _rewrite(self) -> None:
        entries = (entry.plain() for entry in self.entries.values())
        json_lines.rewrite(self.path, [{"identity": self.identity}, *entries])
