"""Lightning attention: linear attention whose memory fades by a fixed factor a head (HypeNet, arXiv 2601.22156, Eq. 18-19).

Legend: B rows, T tokens, H query heads of the group, G its KV heads, D head dim, V value dim, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.mixers.types import GroupShape, Mixer
from hybridize.ops import decay
from hybridize.ops.decay import DecayState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import HYBRID, Ablation, State
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


class LightningMixer(Mixer):
    near, far = False, True

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
        assert state is None or isinstance(state, DecayState)
        log_H = self.log_decay(q_BTHD.device)
        if sequences.is_step and state is not None:
            result = decay.step(q_BTHD, k_BTGD, v_BTGV, log_H, state, scale=self.scale)
            return result.o, result.state
        result = decay.forward(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            log_H,
            scale=self.scale,
            sequences=sequences,
            state=state,
            return_state=keep_state,
        )
        return result.o, result.state

    def coefficients(self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice) -> Tensor:
        return decay.coefficients(q_BTHD, k_BTGD, self.log_decay(q_BTHD.device), rows, scale=self.scale)
