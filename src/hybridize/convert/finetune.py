"""Fine-tuning of the whole student by next-token loss: low-rank updates through peft, or every weight.

Legend: B rows, T tokens, E width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from hybridize import losses
from hybridize.convert.whole import WholeStudent
from hybridize.convert.window_dropout import Dropper
from hybridize.data.batching import Batch, first_rows
from hybridize.models.modeling import HybridForCausalLM
from hybridize.recipe import FinetuneStep, Lora
from hybridize.train import StepResult

MAPS = ("map_q.", "map_k.", "mix.")
"""Parameters of feature maps and mixing weights, which train with `train_maps` alone."""


class FinetuneStage(WholeStudent):
    """Next-token cross-entropy; the prompt and the first token of a document are no targets (labels are -100 there)."""

    name = "finetune"

    def __init__(
        self, model: HybridForCausalLM, step: FinetuneStep, validation: Iterable[Batch], *, autocast: bool
    ) -> None:
        super().__init__(model, validation, autocast=autocast, checkpointing=step.activation_checkpointing)
        self.adapted: PeftModel | None = None
        if step.lora is not None:
            self.adapted = add_lora(model, step.lora)
        else:
            model.float().requires_grad_(True)  # float32 masters; autocast computes in bf16
        for name, parameter in model.named_parameters():
            if ".groups." in name:
                maps = any(f".{part}" in name for part in MAPS)
                parameter.requires_grad_(step.train_maps if maps else step.full)
        self.begin()
        self.dropper = Dropper(model, step.window_dropout) if step.window_dropout is not None else None
        self.gain_rows = step.gain_rows if model.first_far_position is not None else 0

    def on_boundary(self, k: int) -> None:
        """Epoch k's window and drop probability, where they are scheduled."""
        if self.dropper is not None:
            self.dropper.begin(k)

    def step(self, batch: Batch, scale: float) -> StepResult:
        self.model.train()
        # the backward pass is inside: activation checkpointing computes layers again there
        dropping = self.dropper.training(batch) if self.dropper is not None else nullcontext()
        with dropping, self.compiled.step():
            loss, _ = self._loss(batch)
            (loss * scale).backward()
        return StepResult(loss.detach(), self.count(batch), {})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss on the validation rows and, with `gain_rows`, the linear gain on the first of them: the loss without the
        linear branch less the loss with it, on tokens whose query has a far key; `linear_gain_renormalized` likewise, the
        window's weights then summing to 1. Nothing is dropped."""
        self.model.eval()
        total, tokens = 0.0, 0
        with self.dropper.evaluation() if self.dropper is not None else nullcontext():
            for batch in self.validation:
                loss, count = self._loss(batch)
                total, tokens = total + loss.item(), tokens + int(count)
            gains = self._gains()
        return {"loss": total / max(tokens, 1), **gains}

    def _gains(self) -> dict[str, float]:
        batches = first_rows(self.validation, self.gain_rows)
        if not batches:
            return {}
        whole = self._far_loss(batches)
        gains = {}
        for name, removal in (("linear_gain", "zero"), ("linear_gain_renormalized", "renormalize")):
            with self.model.override("softmax_only", removal):  # type: ignore[arg-type]
                gains[name] = self._far_loss(batches) - whole
        return gains

    def _far_loss(self, batches: list[Batch]) -> float:
        """Mean loss of the tokens whose query has a far key in some layer; 0 where there is none."""
        first = self.model.first_far_position
        assert first is not None
        total, tokens = 0.0, 0
        for batch in batches:
            with self.casting():
                hidden_BTE = self.hidden(batch)
                nll_BT = losses.token_nll(
                    hidden_BTE, self.model.lm_head, batch.labels_BT, softcap=self.model.final_softcap
                )
            counts_BT = (losses.shift(batch.labels_BT) != losses.IGNORE) & (batch.position_ids_BT >= first)
            total += nll_BT.cpu()[counts_BT].sum().item()
            tokens += int(counts_BT.sum())
        return total / max(tokens, 1)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self.casting():
            return losses.next_token_ce(
                self.hidden(batch), self.model.lm_head, batch.labels_BT, softcap=self.model.final_softcap
            )

    def finish(self) -> None:
        """Leave the model ready to run, with the window that it was last trained with."""
        if self.dropper is not None:
            self.dropper.settle()
        super().finish()


def add_lora(model: HybridForCausalLM, lora: Lora) -> PeftModel:
    """Low-rank updates on the projections of every layer. `model` itself is changed; adapters are float32."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=model.family.lora_targets(list(lora.on)),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")  # peft asks by a deprecated name
        return cast(PeftModel, get_peft_model(cast(Any, model), config))


def attach_adapter(model: HybridForCausalLM, folder: Path) -> PeftModel:
    """The adapter stored in `folder` on top of `model`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")
        return PeftModel.from_pretrained(cast(Any, model), str(folder), is_trainable=False)


def merge(adapted: PeftModel) -> HybridForCausalLM:
    """W' = W + (alpha / r) B A in the weights' own dtype; the model without adapters."""
    return cast(HybridForCausalLM, cast(Any, adapted).merge_and_unload())
