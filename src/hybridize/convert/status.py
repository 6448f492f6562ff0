"""What is being done outside training: a line that moves on a terminal, elsewhere one plain line for each new thing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Say = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and of how much (0 where that is not known)."""


@contextmanager
def status(enabled: bool = True) -> Iterator[Say]:
    """A function to report progress with, on stderr; it does nothing where `enabled` is false."""
    console = Console(stderr=True)
    if not enabled:
        yield lambda what, done, total: None
    elif console.is_terminal:
        with console.status("") as line:
            yield lambda what, done, total: line.update(_text(what, done, total))
    else:
        yield _plain()


def _plain() -> Say:
    said: set[str] = set()

    def say(what: str, done: int, total: int) -> None:
        if what not in said:
            said.add(what)
            print(f"{what} ...", file=sys.stderr, flush=True)

    return say


def _text(what: str, done: int, total: int) -> str:
    if total:
        return f"{what}: {done:,} of {total:,}"
    return f"{what}: {done:,}" if done else what
