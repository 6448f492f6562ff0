"""Softmax attention: no parameters; the teacher's own window unless the spec names one."""

from __future__ import annotations

from torch import Tensor

from hybridize.mixers.types import GroupShape, Mixer
from hybridize.ops import softmax
from hybridize.ops.ring import RingState
from hybridize.ops.sequences import Sequences
from hybridize.ops.softmax import KVState
from hybridize.ops.types import HYBRID, Ablation, State
from hybridize.spec import GroupSpec
from hybridize.windows import Window


class SoftmaxMixer(Mixer):
    near, far = True, False

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        teacher = Window("sliding", shape.window) if shape.window is not None else None
        self.window = spec.window or teacher

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
        assert state is None or isinstance(state, KVState | RingState)
        result = softmax.forward(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            self.window,
            scale=self.shape.scale,
            softcap=self.shape.softcap,
            sequences=sequences,
            state=state,
            return_state=keep_state,
        )
        return result.o, result.state

    def coefficients(
        self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice, x_BTE: Tensor | None = None
    ) -> Tensor:
        return softmax.coefficients(
            q_BTHD, k_BTGD, self.window, scale=self.shape.scale, softcap=self.shape.softcap, rows=rows
        )
