"""What transfer inside layers and of whole mixers share (DESIGN D10): the teacher's hidden states go in everywhere, every layer's
loss stands alone, and validation gives the mean over layers and each layer's normalised error.

Legend: L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from hybridize.data.batching import Batch
from hybridize.evals.generation import Progress
from hybridize.models.modeling import HybridForCausalLM
from hybridize.train import StepResult


class TeacherForced(ABC):
    """A stage without its loss. `layers` are those that learn, `_parameters` what trains."""

    name = "transfer"
    model: HybridForCausalLM
    layers: list[int]
    validation: list[Batch]
    _parameters: dict[str, nn.Parameter]

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def count(self, batch: Batch) -> int:
        """Every token's output counts."""
        return batch.input_ids_BT.numel()

    def on_boundary(self, k: int) -> None:  # noqa: B027 (not abstract: nothing is what all of them do)
        """Epochs change nothing here."""

    def step(self, batch: Batch, scale: float) -> StepResult:
        tokens = self.count(batch)
        loss, nmse = self._run(batch, scale * tokens)
        return StepResult(loss * tokens, tokens, {"layers/nmse": nmse})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and normalised MSE, means over the layers that learn."""
        totals, tokens = torch.zeros(2), 0
        for batch in self.validation:
            loss, nmse = self._run(batch, None)
            count = self.count(batch)
            totals += count * torch.stack([loss, nmse[self.layers].mean()]).cpu()
            tokens += count
        mean = (totals / max(tokens, 1)).tolist()
        return {"loss": mean[0], "nmse": mean[1]}

    @torch.no_grad()
    def layer_errors(self, on_progress: Progress | None = None) -> list[float]:
        """Normalised MSE of every layer on the validation batches (0 in layers that do not learn)."""
        sums = []
        for done, batch in enumerate(self.validation):
            if on_progress is not None:
                on_progress(done, len(self.validation))
            sums.append(self.count(batch) * self._run(batch, None)[1].cpu())
        tokens = sum(self.count(batch) for batch in self.validation)
        return (torch.stack(sums).sum(0) / tokens).tolist()

    def finish(self) -> None:
        """Leave the model ready to run."""
        self.model.eval().requires_grad_(False)

    @abstractmethod
    def _run(self, batch: Batch, scale: float | None) -> tuple[Tensor, Tensor]:
        """Loss (mean over the layers that learn) and normalised MSE `[L]`; with `scale`, backward of `scale * loss`, layer by
        layer."""
