"""Transfer of whole mixers (HALO stage 1, arXiv 2601.22156, Sec. 4.2; DESIGN D9, D10): every candidate learns the output of
the attention that it may replace, on the teacher's own inputs.

Teacher-forced: the teacher runs, a candidate sees what its attention sees, and the candidate's backward runs at once; the
memory held is one layer's.

Legend: B rows, T tokens, E width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridize import losses
from hybridize.convert.compiled import Compiled
from hybridize.convert.teacher_forced import TeacherForced
from hybridize.data.batching import Batch
from hybridize.evals.generation import Progress
from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.modeling import HybridForCausalLM
from hybridize.recipe import TransferStep
from hybridize.recipe.checks import trains_whole
from hybridize.train import StepResult

INPUTS = ("hidden_states", "position_embeddings", "hybrid_call")
Meet = Callable[[int, dict[str, Any], Tensor], None]


class MixerTransferStage(TeacherForced):
    """Trains all parameters of the candidate layers of `model`; the teacher is another model, frozen, in its own dtype."""

    def __init__(
        self,
        model: HybridForCausalLM,
        teacher: HybridForCausalLM,
        step: TransferStep,
        validation: Iterable[Batch],
        *,
        autocast: bool,
    ) -> None:
        self.model, self.objective, self.autocast = model, step.objective, autocast
        self.teacher = teacher.eval().requires_grad_(False)
        self.validation = list(validation)
        self.compiled = Compiled((), regular=False)
        self.layers = [index for index, layer in enumerate(model.spec.layers) if trains_whole(layer)]
        model.float().requires_grad_(False)  # float32 masters; autocast computes in bf16
        for layer in self.layers:
            model.mixers[layer].requires_grad_(True)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def compile(self, *, regular: bool) -> None:
        """Run the candidates through torch.compile in steps; `regular` as `Compiled` has it."""
        self.compiled = Compiled([self.model.mixers[layer] for layer in self.layers], regular=regular)

    def step(self, batch: Batch, scale: float) -> StepResult:
        self.model.train()
        with self.compiled.step():
            return super().step(batch, scale)

    def validate(self) -> dict[str, float]:
        self.model.eval()
        return super().validate()

    def layer_errors(self, on_progress: Progress | None = None) -> list[float]:
        self.model.eval()
        return super().layer_errors(on_progress)

    def _run(self, batch: Batch, scale: float | None) -> tuple[Tensor, Tensor]:
        """Loss (mean over the candidate layers) and normalised MSE `[L]`.

        With `scale`, backward of `scale * loss`, layer by layer.
        """
        device = self.model.device
        total = torch.zeros((), device=device)
        nmse_L = torch.zeros(len(self.model.spec.layers), device=device)

        def meet(layer: int, seen: dict[str, Any], teacher_BTE: Tensor) -> None:
            with torch.set_grad_enabled(scale is not None):
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast):
                    student_BTE, _ = self.model.mixers[layer](**seen)
                loss, nmse = self.layer_loss(student_BTE, teacher_BTE)
                if scale is not None:
                    (loss * (scale / len(self.layers))).backward()
            total.add_(loss.detach() / len(self.layers))
            nmse_L[layer] = nmse.detach()

        with torch.no_grad(), watched(self.teacher, self.layers, meet):
            ids_BT = batch.input_ids_BT.to(self.teacher.device)
            self.teacher.hidden_states(ids_BT, position_ids=batch.position_ids_BT)
        return total, nmse_L

    def layer_loss(self, student_BTE: Tensor, teacher_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """The objective of one layer, and the normalised MSE."""
        mse, nmse = losses.output_mse(student_BTE, teacher_BTE)
        loss = self.objective.mixer_mse * mse
        if self.objective.hidden_l2:
            distance_BT = torch.linalg.vector_norm(student_BTE.float() - teacher_BTE.float(), dim=-1)
            loss = loss + self.objective.hidden_l2 * distance_BT.mean()
        return loss, nmse


@contextmanager
def watched(teacher: HybridForCausalLM, layers: Iterable[int], meet: Meet) -> Iterator[None]:
    """`meet(layer, keyword arguments, output)` after every call of these layers' token mixers."""

    def hook(
        mixer: TokenMixer, args: tuple[Any, ...], seen: dict[str, Any], output: tuple[Tensor, None]
    ) -> None:
        meet(mixer.shape.layer, {name: seen[name] for name in INPUTS}, output[0])

    handles = [teacher.mixers[layer].register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
