"""What the mixers of all attentions share.

Legend: B rows, T tokens, E width, H query heads of the group, G its KV heads, D head dim, V value dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from hybridize.mixers.parts import OutputGate, RMSNorm
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import HYBRID, Ablation, State
from hybridize.spec import GroupSpec


@dataclass(frozen=True)
class GroupShape:
    """The heads of a group and its layer's attention numbers; `window` is the teacher's own (None: full), `hidden` the width
    of the residual stream, `layers` the model's number of layers, `normed` whether the teacher normalises q and k itself."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    hidden: int = 0
    layers: int = 1
    normed: bool = False


class Mixer(nn.Module, ABC):
    """Mixes the tokens of one head group. `near` and `far` say which branches it has.

    Around the mixing lie the group's own norms and gate, where its spec asks for them: `normalise` before the positions,
    `dress` on the output.
    """

    near: bool
    far: bool

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__()
        self.spec, self.shape = spec, shape
        own_norms = spec.qk_norm and not shape.normed
        self.q_norm = RMSNorm(shape.head_dim) if own_norms else None
        self.k_norm = RMSNorm(shape.head_dim) if own_norms else None
        channels = shape.heads * shape.head_dim
        self.output_norm = RMSNorm(channels) if spec.output_norm else None
        self.output_gate = (
            OutputGate(spec.output_gate, shape.hidden, channels, shape.layer) if spec.output_gate else None
        )

    def normalise(self, q_BTHD: Tensor, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """q and k after the group's own norms."""
        if self.q_norm is None or self.k_norm is None:
            return q_BTHD, k_BTGD
        return self.q_norm(q_BTHD), self.k_norm(k_BTGD)

    @property
    def dressed(self) -> bool:
        """Whether `dress` does something."""
        return self.output_norm is not None or self.output_gate is not None

    def dress(self, o_BTHV: Tensor, x_BTE: Tensor) -> Tensor:
        """The output after the group's norm and gate; x is the layer's input."""
        if self.output_norm is not None:
            o_BTHV = self.output_norm(o_BTHV.flatten(-2)).unflatten(-1, o_BTHV.shape[-2:])
        return o_BTHV if self.output_gate is None else self.output_gate(o_BTHV, x_BTE)

    @abstractmethod
    def attend(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        state: State | None = None,
        *,
        x_BTE: Tensor | None = None,
        keep_state: bool = False,
        ablation: Ablation = HYBRID,
    ) -> tuple[Tensor, State | None]:
        """`o_BTHV` and, with `keep_state`, the state after the last token. `x_BTE` is the layer's input, which gates read."""

    @abstractmethod
    def coefficients(
        self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice, x_BTE: Tensor | None = None
    ) -> Tensor:
        """Weights `A_BHQS` of v for the queries in `rows` of dense rows. `x_BTE` is the layer's input, which gates read."""
