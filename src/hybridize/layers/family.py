"""What a layer needs to know of its model's family; `models.families` has it.

Legend: B rows, T tokens, E width, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn


class LayerShape(Protocol):
    """A layer's attention in numbers; see `models.families.AttentionShape`."""

    @property
    def layer(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def rope(self) -> bool: ...
    @property
    def layers(self) -> int: ...
    @property
    def normed(self) -> bool: ...


class Projections(Protocol):
    """How a family projects into and out of its attention; see `models.families.Family`."""

    def heads(self, mixer: Any, shape: Any, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def rotate(
        self, q_BTHD: Tensor, k_BTGD: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]: ...

    def expand(self, mixer: nn.Module, shape: Any) -> None: ...

    def finish(self, mixer: Any, o_BTHD: Tensor) -> Tensor: ...
