"""From a recipe's training step to what the loop drives: the stage, its configuration, its seed."""

from __future__ import annotations

import math
from collections.abc import Callable

from hybridize.convert.distill import DistillStage
from hybridize.convert.finetune import FinetuneStage
from hybridize.convert.mixer_transfer import MixerTransferStage
from hybridize.convert.texts import Text
from hybridize.convert.transfer import TransferStage
from hybridize.data import PackedRows
from hybridize.models.modeling import HybridForCausalLM
from hybridize.recipe import (
    AnyStep,
    Constant,
    Cosine,
    DistillStep,
    FinetuneStep,
    LongContextStep,
    Lora,
    Recipe,
    TrainingStep,
    TransferStep,
)
from hybridize.train import TrainConfig, optim

AnyStage = TransferStage | MixerTransferStage | FinetuneStage | DistillStage
Teacher = Callable[[], HybridForCausalLM]
"""Gives the frozen teacher, loaded when it is first asked for."""

MASTERS_SAVE_LESS = 5
"""A checkpoint of all weights and their two moments takes seconds: it is written this many times less often."""
SEEDS = {"transfer": 0, "finetune": 1, "distill": 1000, "long_context": 2000}


def lora_of(step: AnyStep) -> Lora | None:
    return step.lora if isinstance(step, FinetuneStep | DistillStep) else None


def make_stage(
    model: HybridForCausalLM, teacher: Teacher, step: TrainingStep, text: Text, precision: str
) -> AnyStage:
    """The stage of a step; it marks what trains, and makes masters in float32 where weights of the base model train."""
    validation, autocast = text.validation(step), precision == "bf16"
    stage: MixerTransferStage | FinetuneStage | DistillStage
    match step:
        case TransferStep() if not step.whole_mixers:
            return TransferStage(model, step, validation)
        case TransferStep():
            stage = MixerTransferStage(model, teacher(), step, validation, autocast=autocast)
        case FinetuneStep():
            stage = FinetuneStage(model, step, validation, autocast=autocast)
        case LongContextStep() if step.objective == "ce":
            stage = FinetuneStage(model, step.as_finetune(), validation, autocast=autocast)
        case DistillStep() | LongContextStep():
            stage = DistillStage(model, teacher(), step, validation, autocast=autocast)
        case _:
            raise TypeError(f"{type(step).__name__} has no stage")
    stage.name = step.kind
    if step.compile:
        stage.compile(regular=text.regular)
    return stage


def train_config(
    step: TrainingStep, recipe: Recipe, rows: PackedRows, seed: int, save_every_s: float
) -> TrainConfig:
    """How the loop runs `step` on `rows`."""
    steps = step.optimizer_steps(rows.length, rows.tokens_available)
    assert steps is not None
    stopping = step.early_stopping if isinstance(step, FinetuneStep) else None
    rate: optim.Schedule
    match step.rate:
        case Cosine(cosine=(highest, lowest), warmup=warmup):
            rate = optim.Cosine(highest, final=lowest, warmup=warmup / steps)
        case Constant(warmup=warmup):
            rate = optim.Constant(step.max_lr, warmup=warmup / steps)
        case plateau:
            rate = optim.Plateau(
                step.max_lr, factor=plateau.factor, patience=plateau.patience, final=plateau.min_lr
            )
    return TrainConfig(
        steps=steps,
        micro_batches=step.batch.accumulation,
        lr=rate,
        betas=step.betas,
        weight_decay=step.weight_decay,
        clip=step.clip,
        eval_every=step.eval_every,
        keep_best=step.keep_best,
        epoch_steps=_epoch_steps(step, rows),
        patience=stopping.patience if stopping else None,
        guard="linear_gain" if stopping and stopping.min_gain > 0 else None,
        guard_share=stopping.min_gain if stopping and stopping.min_gain > 0 else None,
        save_every_s=save_every_s * (MASTERS_SAVE_LESS if step.trains_masters else 1),
        seed=seed,
    )


def _epoch_steps(step: TrainingStep, rows: PackedRows) -> int | None:
    """Optimizer steps of an epoch where a schedule counts in epochs; None elsewhere."""
    dropout = step.window_dropout if isinstance(step, FinetuneStep) else None
    if dropout is None:
        return None
    tokens = dropout.epoch or rows.tokens_available
    return max(1, math.ceil(tokens / (step.batch.rows * rows.length)))


def step_seed(recipe: Recipe, index: int) -> int:
    """The same for the n-th step of a kind, whatever stands between: a control draws what its student drew."""
    kind = recipe.steps[index].kind
    earlier = sum(step.kind == kind for step in recipe.steps[:index])
    return recipe.seed + 2 * earlier + SEEDS[kind]
