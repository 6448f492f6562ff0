"""What the mixers of all attentions share.

Legend: B rows, T tokens, H query heads of the group, G its KV heads, D head dim, V value dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from hybridize.ops.sequences import Sequences
from hybridize.ops.types import HYBRID, Ablation, State
from hybridize.spec import GroupSpec


@dataclass(frozen=True)
class GroupShape:
    """The heads of a group and its layer's attention numbers; `window` is the teacher's own (None: full)."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None


class Mixer(nn.Module, ABC):
    """Mixes the tokens of one head group. `near` and `far` say which branches it has."""

    near: bool
    far: bool

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__()
        self.spec, self.shape = spec, shape

    @abstractmethod
    def attend(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        state: State | None = None,
        *,
        keep_state: bool = False,
        ablation: Ablation = HYBRID,
    ) -> tuple[Tensor, State | None]:
        """`o_BTHV` and, with `keep_state`, the state after the last token."""

    @abstractmethod
    def coefficients(self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice) -> Tensor:
        """Weights `A_BHQS` of v for the queries in `rows` of dense rows."""
