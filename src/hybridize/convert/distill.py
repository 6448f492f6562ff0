"""Distillation: the whole student learns the teacher's next-token distributions (HALO stage 2, arXiv 2601.22156, Sec. 4.4).

Legend: B rows, T tokens, E width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridize import losses
from hybridize.convert.compiled import Compiled, layers_of
from hybridize.convert.finetune import add_lora
from hybridize.convert.whole import WholeStudent
from hybridize.data.batching import Batch
from hybridize.models.modeling import HybridForCausalLM
from hybridize.recipe import DistillStep, LongContextStep
from hybridize.train import StepResult

if TYPE_CHECKING:
    from peft import PeftModel


class DistillStage(WholeStudent):
    """KL(teacher || student) on the positions whose next token is a target, those of the next-token loss.

    The teacher is another model, frozen, in its own dtype. Both heads' logits exist a chunk at a time.
    """

    name = "distill"

    def __init__(
        self,
        model: HybridForCausalLM,
        teacher: HybridForCausalLM,
        step: DistillStep | LongContextStep,
        validation: Iterable[Batch],
        *,
        autocast: bool,
    ) -> None:
        super().__init__(model, validation, autocast=autocast, checkpointing=step.activation_checkpointing)
        self.teacher = teacher.eval().requires_grad_(False)
        self.adapted: PeftModel | None = None
        self._stored: dict[str, torch.dtype] = {}
        lora = step.lora if isinstance(step, DistillStep) else None
        if lora is not None:
            self.adapted = add_lora(model, lora)
            self._train_own_parts()
        elif isinstance(step, DistillStep) and step.train == "mixers":
            model.float()
            for mixer in model.mixers:
                mixer.requires_grad_(True)
        else:
            model.float().requires_grad_(True)  # float32 masters; autocast computes in bf16
        self.begin()

    def _train_own_parts(self) -> None:
        """Beside adapters: what head groups have of their own, in float32 while it trains."""
        for name, parameter in self.model.named_parameters():
            if ".groups." in name:
                self._stored[name] = parameter.dtype
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)

    def compile(self, *, regular: bool) -> None:
        self.compiled = Compiled([*layers_of(self.model), *layers_of(self.teacher)], regular=regular)

    def step(self, batch: Batch, scale: float) -> StepResult:
        self.model.train()
        with self.compiled.step():
            loss, _ = self._divergence(batch)
            (loss * scale).backward()  # activation checkpointing computes layers again here
        return StepResult(loss.detach(), self.count(batch), {})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean divergence (`loss`) and mean next-token loss of the student, in nats a token."""
        self.model.eval()
        kl, ce, tokens = 0.0, 0.0, 0
        for batch in self.validation:
            loss, hidden_BTE = self._divergence(batch)
            with self.casting():
                nll, count = losses.next_token_ce(
                    hidden_BTE, self.model.lm_head, batch.labels_BT, softcap=self.model.final_softcap
                )
            kl, ce, tokens = kl + loss.item(), ce + nll.item(), tokens + int(count)
        return {"loss": kl / max(tokens, 1), "next_token_loss": ce / max(tokens, 1)}

    def _divergence(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The divergence summed over the counted positions, and the student's hidden states `[B, T, E]`."""
        with torch.no_grad():
            ids_BT = batch.input_ids_BT.to(self.teacher.device)
            known_BTE, _ = self.teacher.hidden_states(ids_BT, position_ids=batch.position_ids_BT)
        with self.casting():
            hidden_BTE = self.hidden(batch)
            loss, _ = losses.logits_kl(
                known_BTE,
                self.teacher.lm_head,
                hidden_BTE,
                self.model.lm_head,
                mask_BT=losses.shift(batch.labels_BT) != losses.IGNORE,
                softcap=self.model.final_softcap,
                rows=self.compiled.function(losses.kl_rows),
            )
        return loss, hidden_BTE

    def finish(self) -> None:
        """Leave the model ready to run, its parts in the dtype that a checkpoint gives them."""
        parameters = dict(self.model.named_parameters())
        for name, dtype in self._stored.items():
            parameters[name].data = parameters[name].data.to(dtype)
        super().finish()
