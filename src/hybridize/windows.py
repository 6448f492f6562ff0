"""Which keys a softmax window sees, which ones are far, and what a cache must keep.

Positions count from the first real token of a sequence, so membership never depends on padding, packing or the length
of the text. Query `t` has near keys (seen by the softmax) and far keys (left to the linear branch):

- `sliding`: the last `size` keys, the query's own included.
- `terraced`: the query's block of `size` positions and the block before it, causally (LoLCATs, arXiv 2410.10254, Fig. 9).

Draw one with `python -m hybridize.windows terraced 4 --sinks 1`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class Window:
    """Near and far keys of each query.

    `sinks` leading positions stay near for ever and never become far. With `overlap` the far set is every key up to and
    including the query, sinks too. `size` 0 (internal) leaves only the sinks near.
    """

    kind: Literal["sliding", "terraced"]
    size: int
    sinks: int = 0
    overlap: bool = False

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.kind not in ("sliding", "terraced"):
            raise ValueError(f"window.kind is {self.kind!r}; allowed are 'sliding' and 'terraced'")
        if self.size < 0 or (self.kind == "terraced" and self.size == 0):
            raise ValueError(f"window.size is {self.size}; it must be at least 1 key")
        if self.sinks < 0:
            raise ValueError(f"window.sinks is {self.sinks}; it must be 0 or more positions")

    def near(self, t: Tensor, i: Tensor) -> Tensor:
        """Whether query position `t` sees key position `i` through the softmax; bool, broadcast of `t` and `i`."""
        if self.kind == "sliding":
            inside = i > t - self.size
        else:
            inside = i // self.size >= t // self.size - 1
        return (i <= t) & (inside | (i < self.sinks))

    def far(self, t: Tensor, i: Tensor) -> Tensor:
        """Whether key position `i` reaches query position `t` through the linear branch; bool, broadcast."""
        if self.overlap:
            return i <= t
        return (i <= t) & ~self.near(t, i)

    def has_far(self, t: Tensor) -> Tensor:
        """Whether query position `t` has any far key; bool, shape of `t`."""
        if self.overlap:
            return t >= 0
        return self.kept_from(t + 1) > self.sinks

    def kept_from(self, length: Position) -> Position:
        """First position whose key is still near the last of `length` tokens (sinks aside); earlier ones are folded."""
        if self.kind == "sliding":
            first = length - self.size
        else:
            first = ((length - 1) // self.size - 1) * self.size
        return first.clamp_min(0) if isinstance(first, Tensor) else max(0, first)

    @property
    def ring(self) -> int:
        """Keys a cache must hold besides the sinks: w for a sliding window, up to 2w for a terraced one."""
        return self.size if self.kind == "sliding" else 2 * self.size

    @property
    def first_far_position(self) -> int:
        """The first query position that has a far key: training on shorter texts never uses the linear branch."""
        if self.overlap:
            return 0
        if self.kind == "sliding":
            return self.size + self.sinks
        return (self.sinks // self.size + 2) * self.size

    def chunk(self, at_least: int = 64) -> int:
        """A chunk length that `size` divides, so that near keys lie in a query's own chunk or the one before."""
        if self.size == 0:
            return at_least
        return self.size * -(-at_least // self.size)


def draw(window: Window, length: int) -> str:
    """The first `length` queries (rows) by keys (columns): `#` near, `o` near as a sink, `.` far, blank future."""
    t = torch.arange(length)[:, None]
    i = torch.arange(length)[None, :]
    near, far = window.near(t, i), window.far(t, i)

    def cell(row: int, column: int) -> str:
        if near[row, column]:
            return "o" if column < window.sinks else "#"
        return "." if far[row, column] else " "

    return "\n".join("".join(cell(row, column) for column in range(length)) for row in range(length))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hybridize.windows", description="Draw a window.")
    parser.add_argument("kind", choices=["sliding", "terraced"])
    parser.add_argument("size", type=int)
    parser.add_argument("--sinks", type=int, default=0)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--length", type=int, default=24)
    arguments = parser.parse_args()
    print(draw(Window(arguments.kind, arguments.size, arguments.sinks, arguments.overlap), arguments.length))


if __name__ == "__main__":
    main()
