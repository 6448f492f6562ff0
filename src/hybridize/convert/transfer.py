"""Attention transfer (LoLCATs section 3.1; DESIGN D9, D10): every layer learns its teacher's attention.

Teacher-forced: each layer passes the teacher's output on, so a layer's loss depends on its own new parameters alone and
its backward runs at once; the memory held is one layer's.

Legend: B rows, T tokens, P tokens of all rows, H query heads, D head dim, V value dim, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hybridize import losses
from hybridize.data.batching import Batch
from hybridize.layers.token_mixer import TokenMixer
from hybridize.mixers.types import Mixer
from hybridize.mixers.windowed_linear import WindowedLinearMixer
from hybridize.models.modeling import HybridForCausalLM
from hybridize.ops import softmax
from hybridize.ops.sequences import Sequences
from hybridize.recipe import Objective, TransferStep
from hybridize.train import StepResult

TILE = 128
"""Queries of a tile of the weight cross-entropy."""
PARTS = {"maps": ("map_q.", "map_k."), "mix": ("mix.",)}


class TransferStage:
    """Trains feature maps and mixing weights; everything else is frozen and may be bf16."""

    name = "transfer"

    def __init__(self, model: HybridForCausalLM, step: TransferStep, validation: Iterable[Batch]) -> None:
        self.model, self.objective = model, step.objective
        self.validation = list(validation)
        wanted = tuple(prefix for part in step.train for prefix in PARTS[part])
        model.requires_grad_(False)
        self.layers = [index for index, layer in enumerate(model.spec.layers) if layer.has_linear]
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if ".groups." in name and any(f".{prefix}" in name for prefix in wanted):
                parameter.requires_grad_(True)
                self._parameters[name] = parameter

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def count(self, batch: Batch) -> int:
        """Every token's attention output counts."""
        return batch.input_ids_BT.numel()

    def on_boundary(self, k: int) -> None:
        """Epochs change nothing here."""

    def step(self, batch: Batch, scale: float) -> StepResult:
        tokens = self.count(batch)
        loss, nmse = self._run(batch, scale * tokens)
        return StepResult(loss * tokens, tokens, {"layers/nmse": nmse})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        totals, tokens = torch.zeros(2), 0
        for batch in self.validation:
            loss, nmse = self._run(batch, None)
            count = self.count(batch)
            totals += count * torch.stack([loss, nmse[self.layers].mean()]).cpu()
            tokens += count
        mean = (totals / max(tokens, 1)).tolist()
        return {"loss": mean[0], "nmse": mean[1]}

    def layer_errors(self) -> list[float]:
        """Normalised MSE of every layer on the validation batches (0 in layers that keep softmax)."""
        with torch.no_grad():
            sums = [self.count(batch) * self._run(batch, None)[1].cpu() for batch in self.validation]
        tokens = sum(self.count(batch) for batch in self.validation)
        return (torch.stack(sums).sum(0) / tokens).tolist()

    def _run(self, batch: Batch, scale: float | None) -> tuple[Tensor, Tensor]:
        """Loss (mean over the layers with a linear branch) and normalised MSE `[L]`.

        With `scale`, backward of `scale * loss`, layer by layer.
        """
        layers = len(self.layers)
        device = self.model.device
        total = torch.zeros((), device=device)
        nmse_L = torch.zeros(len(self.model.spec.layers), device=device)

        def intercept(mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
            teacher = mixer.teacher(q, k, v, sequences)
            if not mixer.spec.has_linear:
                return teacher
            with torch.set_grad_enabled(scale is not None):
                loss, nmse = self.layer_loss(mixer, q, k, v, teacher, sequences)
                if scale is not None:
                    (loss * (scale / layers)).backward()
            total.add_(loss.detach().to(device) / layers)
            nmse_L[mixer.shape.layer] = nmse.detach().to(device)
            return teacher

        with torch.no_grad(), self.model.intercepted(intercept):
            self.model.hidden_states(batch.input_ids_BT.to(device), position_ids=batch.position_ids_BT)
        return total, nmse_L

    def layer_loss(
        self, mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, teacher: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """The objective of one layer over its linear groups' heads, and the normalised output MSE."""
        students, teachers, entropies = [], [], []
        for group, (heads, kv_heads) in zip(mixer.mixers, mixer.slices, strict=True):
            if not group.far:
                continue
            qkv = q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads]
            students.append(self._output(group, qkv, sequences))
            teachers.append(teacher[:, :, heads])
            if self.objective.weight_ce:
                ce = weight_cross_entropy(mixer, group, qkv[0], qkv[1], sequences, self.objective)
                entropies.append(ce * group.shape.heads)
        mse, nmse = losses.output_mse(torch.cat(students, 2), torch.cat(teachers, 2))
        loss = self.objective.output_mse * mse
        if entropies:
            count = sum(group.shape.heads for group in mixer.mixers if group.far)
            loss = loss + self.objective.weight_ce * sum(entropies, torch.zeros_like(mse)) / count
        return loss, nmse

    def _output(
        self,
        group: Mixer,
        qkv: tuple[Tensor, Tensor, Tensor],
        sequences: Sequences,
    ) -> Tensor:
        if self.objective.against == "linear_only" and isinstance(group, WindowedLinearMixer):
            return group.linear_only(*qkv, sequences)
        return group.attend(*qkv, sequences)[0]


def weight_cross_entropy(
    mixer: TokenMixer,
    group: Mixer,
    q: Tensor,
    k: Tensor,
    sequences: Sequences,
    objective: Objective,
) -> Tensor:
    """-sum_i A_ti ln A'_ti, mean over heads and queries of all sequences; tile by tile, never `[T, T]` in memory."""
    student_weights = group.coefficients
    if objective.against == "linear_only" and isinstance(group, WindowedLinearMixer):
        student_weights = group.linear_coefficients
    window = mixer.teacher_window
    q_PHD, k_PGD = q.flatten(0, 1), k.flatten(0, 1)
    total, rows = q.new_zeros((), dtype=torch.float32), 0
    for begin, length in zip(sequences.bounds, sequences.lengths, strict=False):
        q_1THD, k_1TGD = q_PHD[None, begin : begin + length], k_PGD[None, begin : begin + length]

        def teacher(tile: slice, q_1THD: Tensor = q_1THD, k_1TGD: Tensor = k_1TGD) -> Tensor:
            return softmax.coefficients(
                q_1THD, k_1TGD, window, scale=mixer.shape.scale, softcap=mixer.shape.softcap, rows=tile
            )

        def student(tile: slice, q_1THD: Tensor = q_1THD, k_1TGD: Tensor = k_1TGD) -> Tensor:
            return student_weights(q_1THD, k_1TGD, tile)

        tiles = [slice(first, min(first + TILE, length)) for first in range(0, length, TILE)]
        if tiles:
            total = total + length * losses.tiled_weight_cross_entropy(teacher, student, tiles)[0]
            rows += length
    return total / max(rows, 1)
