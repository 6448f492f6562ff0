"""What is computed: everything of a call to windowed linear attention besides its tensors and sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridize.ops.feature_map import FeatureMap
from hybridize.ops.types import Ablation
from hybridize.ops.windowed_linear.mix import Mix
from hybridize.windows import Window


@dataclass(frozen=True)
class Definition:
    """Maps, window, mix, and the softmax's `scale` and `softcap`; `ablation` says which branches are removed."""

    map_q: FeatureMap
    map_k: FeatureMap
    window: Window
    mix: Mix
    scale: float
    softcap: float | None
    ablation: Ablation

    def where(self, q_BTHD: Tensor) -> Tensor | None:
        """Queries and heads that the ablation concerns, `[B, T, H]`; None: all."""
        where = self.ablation.where
        return where.to(q_BTHD.device).expand(q_BTHD.shape[:3]) if where is not None else None
