"""Lightning attention: linear attention whose memory fades by a fixed factor a head (HypeNet, arXiv 2601.22156, Eq. 18-19).

Legend: B rows, T tokens, E width, H query heads of the group, D head dim, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.mixers.recurrent import Operands, RecurrentMixer
from hybridize.mixers.types import GroupShape
from hybridize.ops import decay
from hybridize.spec import GroupSpec, LightningDecay


def log_decay(decay: LightningDecay, heads: int, layer: int, layers: int) -> Tensor:
    """ln gamma of each head, `[H]` float32; see `LightningDecay` for the conventions."""
    h = torch.arange(1, heads + 1, dtype=torch.float64)
    hypenet = -torch.exp2(-8 * h / heads)
    if decay.convention == "minimax":
        return (hypenet * (1 - layer / (layers - 1 + 1e-5) + 1e-5)).float()
    if decay.convention == "layer_scaled":
        return (-(8 / heads) * (1 - layer / layers) * (h - 1)).float()
    return hypenet.float()


class LightningMixer(RecurrentMixer):
    operation = decay

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        self.scale = shape.head_dim**-0.5
        self._decay: dict[torch.device, Tensor] = {}

    def log_decay(self, device: torch.device) -> Tensor:
        """`[H]` on `device`, made once."""
        if device not in self._decay:
            assert self.spec.decay is not None
            made = log_decay(self.spec.decay, self.shape.heads, self.shape.layer, self.shape.layers)
            self._decay[device] = made.to(device)
        return self._decay[device]

    def operands(self, q_BTHD: Tensor, k_BTHD: Tensor, x_BTE: Tensor | None) -> Operands:
        return Operands((q_BTHD, k_BTHD), (self.log_decay(q_BTHD.device),))
