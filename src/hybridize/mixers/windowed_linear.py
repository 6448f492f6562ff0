"""A softmax window with linear attention over the far past: maps and the weights that mix the branches."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridize.mixers.linear import build_maps
from hybridize.mixers.parts import OwnStart
from hybridize.mixers.types import GroupShape, Mixer
from hybridize.ops import linear, windowed_linear
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import HYBRID, Ablation, Result, State
from hybridize.ops.windowed_linear import Mix, SeparateMix, SharedMix, WindowedLinearState
from hybridize.spec import GroupSpec, SeparateNormalizer, SharedNormalizer


class MixWeights(OwnStart):
    """One learnt number a head: the logit of gamma (shared), of g (separate, learnt), or the mass bias."""

    def __init__(self, normalizer: SharedNormalizer | SeparateNormalizer, heads: int) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.fixed = isinstance(normalizer, SeparateNormalizer) and normalizer.mix == "fixed"
        self.logit = None if self.fixed else nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.heads = heads
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.logit is None:
            return
        if isinstance(self.normalizer, SharedNormalizer):
            first = self.normalizer.gamma
        elif self.normalizer.mix == "learnt":
            first = min(max(self.normalizer.gate, 1e-4), 1 - 1e-4)
        else:
            first = 0.5
        self.logit.fill_(math.log(first / (1 - first)))

    def mix(self, device: torch.device) -> Mix:
        if isinstance(self.normalizer, SharedNormalizer):
            assert self.logit is not None
            return SharedMix(torch.sigmoid(self.logit), self.normalizer.eta)
        empty_far = self.normalizer.empty_far
        if self.logit is None:
            return SeparateMix(
                torch.full((self.heads,), self.normalizer.gate, device=device), empty_far=empty_far
            )
        if self.normalizer.mix == "learnt":
            return SeparateMix(torch.sigmoid(self.logit), empty_far=empty_far)
        return SeparateMix(mass_bias_H=self.logit, empty_far=empty_far)


class WindowedLinearMixer(Mixer):
    near, far = True, True

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        assert spec.window is not None and spec.normalizer is not None
        self.window = spec.window
        self.map_q, self.map_k = build_maps(spec, shape)
        self.mix = MixWeights(spec.normalizer, shape.heads)

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
        assert state is None or isinstance(state, WindowedLinearState)
        if sequences.is_step and state is not None:
            result = windowed_linear.step(
                q_BTHD,
                k_BTGD,
                v_BTGV,
                self.map_q.map(),
                self.map_k.map(),
                self.window,
                self.mix.mix(q_BTHD.device),
                state,
                scale=self.shape.scale,
                softcap=self.shape.softcap,
                ablation=ablation,
                starts=sequences.starts,
            )
            return result.o, result.state
        result = self._forward(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            ablation=ablation,
            sequences=sequences,
            state=state,
            return_state=keep_state,
        )
        return result.o, result.state

    def _forward(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, **options: Any) -> Result:
        return windowed_linear.forward(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            self.map_q.map(),
            self.map_k.map(),
            self.window,
            self.mix.mix(q_BTHD.device),
            scale=self.shape.scale,
            softcap=self.shape.softcap,
            **options,
        )

    def parts(
        self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The near and the far branch's part of the output `[B, T, H, V]`, which add up to it, and the share of the weights
        that lies on far keys `[B, T, H]`."""

        def run(mode: Literal["softmax_only", "far_only"]) -> Result:
            return self._forward(
                q_BTHD, k_BTGD, v_BTGV, ablation=Ablation(mode), sequences=sequences, return_aux=True
            )

        near = run("softmax_only")
        return near.o, run("far_only").o, near.aux["far_share"]

    def linear_only(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, sequences: Sequences) -> Tensor:
        """The maps' own linear attention over every key <= t, the window left out: the `linear_only` objective."""
        return linear.forward(
            q_BTHD, k_BTGD, v_BTGV, self.map_q.map(), self.map_k.map(), sequences=sequences
        ).o

    def coefficients(
        self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice, x_BTE: Tensor | None = None
    ) -> Tensor:
        return windowed_linear.coefficients(
            q_BTHD,
            k_BTGD,
            self.map_q.map(),
            self.map_k.map(),
            self.window,
            self.mix.mix(q_BTHD.device),
            scale=self.shape.scale,
            softcap=self.shape.softcap,
            rows=rows,
        )

    def linear_coefficients(self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice) -> Tensor:
        """Weights of `linear_only`."""
        return linear.coefficients(q_BTHD, k_BTGD, self.map_q.map(), self.map_k.map(), rows)
