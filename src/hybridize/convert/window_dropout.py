"""Scheduled sliding-window dropout (SSD, arXiv 2510.05901 section 4.3; DESIGN D11): which queries lose their window.

Legend: B rows, T tokens, N sequences (documents) of a batch, L layers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hybridize.data.batching import Batch
from hybridize.extend.window import with_window_size
from hybridize.models.modeling import HybridForCausalLM
from hybridize.recipe import WindowDropout


class Dropper:
    """Draws for one fine-tuning; `epoch` sets the probability and the window in force."""

    def __init__(self, model: HybridForCausalLM, schedule: WindowDropout) -> None:
        self.model, self.schedule = model, schedule
        self.p, self.window = schedule.at(0)

    def begin(self, epoch: int) -> None:
        self.p, self.window = self.schedule.at(epoch)

    def training(self, batch: Batch) -> AbstractContextManager[HybridForCausalLM]:
        """The model with windows dropped for this batch; new draws at every call, from torch's CPU generator."""
        return self.model.override(
            "far_only" if self.schedule.far_when_dropped == "own" else "linear_only",
            self.schedule.removal,
            where=self.draw(batch.position_ids_BT),
            keep_empty=self.schedule.far_when_dropped == "own",
            window_size=self.window,
        )

    def evaluation(self) -> AbstractContextManager[HybridForCausalLM]:
        """The model under the window in force, nothing dropped."""
        return self.model.override(window_size=self.window)

    def draw(self, position_ids_BT: Tensor) -> Tensor | list[Tensor]:
        """Which tokens lose their window: bool `[B, T, 1]`, or one such tensor a layer."""
        if self.schedule.per == "batch":
            return torch.rand(1, 1, 1) < self.p
        begins_BT = position_ids_BT.cpu() == 0
        begins_BT[:, 0] = True
        sequence_BT = begins_BT.flatten().cumsum(0).sub(1).view(begins_BT.shape)
        count = int(sequence_BT[-1, -1]) + 1
        if self.schedule.per == "sequence":
            return (torch.rand(count) < self.p)[sequence_BT][..., None]
        return [(torch.rand(count) < self.p)[sequence_BT][..., None] for _ in self.model.mixers]

    def settle(self) -> None:
        """Give the model the last epoch's window for good."""
        if self.window is not None:
            self.model.respec(with_window_size(self.model.spec, self.window))
