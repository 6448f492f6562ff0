"""`hybridize plan`: what a recipe needs on a model, computed on the meta device from the config alone.

Nothing is downloaded but the config (and, for an alias, the file that holds it), and no weight is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from hybridize.models.families import AttentionShape, get_family, notes
from hybridize.models.teacher import load_base_config, resolve_model
from hybridize.plan.bytes import FLOAT32, qkv_channels, softmax_spec, state_bytes
from hybridize.plan.count import Student, count_student, lora_parameters
from hybridize.recipe import (
    DistillStep,
    FinetuneStep,
    Recipe,
    TrainingStep,
    TransferStep,
    load_recipe,
)
from hybridize.spec import GroupSpec, ResolvedSpec

LENGTHS = (1024, 8192, 65536, 131072)
CACHE_BYTES = 2  # keys and values at decoding, bf16
ADAMW_BYTES = 2 * FLOAT32  # two moments a trainable parameter
RECURRENT_CHUNK = 64
LOSS_LOGITS = 2**26  # logits that the chunked loss holds at once, twice (values and gradients)


@dataclass(frozen=True)
class StateRow:
    """Bytes of one sequence's cache at a context length, bf16 keys and values, float32 linear states."""

    length: int
    teacher: int
    student: int


@dataclass(frozen=True)
class Memory:
    """Bytes on the training device, one process. Activations are an estimate; `MEMORY_FORMULA` states it."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class StagePlan:
    """One step. `tokens` and `optimizer_steps` are None where the length is in epochs of data not yet counted."""

    name: str
    trainable: int
    tokens: int | None
    epochs: float | None
    optimizer_steps: int | None
    memory: Memory


@dataclass(frozen=True)
class Plan:
    """Needs of one recipe on one model. `unsupported` names what `convert` would refuse.

    `own_parameters` are those that the student has beyond the teacher's, its maps and mixing weights: expanded projections,
    norms, gates, decays, convolutions.
    """

    model: str
    recipe: str
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    map_parameters: int
    mix_parameters: int
    own_parameters: int
    states: tuple[StateRow, ...]
    stages: tuple[StagePlan, ...]
    student_disk: int
    checkpoint_disk: int
    notes: tuple[str, ...]
    unsupported: tuple[str, ...]

    @property
    def peak_memory(self) -> int:
        """Bytes of the hungriest stage; 0 for a recipe without steps."""
        return max((stage.memory.total for stage in self.stages), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, totals included."""
        raw = asdict(self)
        for stage, written in zip(self.stages, raw["stages"], strict=True):
            written["memory"]["total"] = stage.memory.total
        return {**raw, "peak_memory": self.peak_memory, "memory_formula": MEMORY_FORMULA}


MEMORY_FORMULA = (
    "weights: frozen parameters at the recipe's precision, trainable ones in float32 (the whole student where weights of the "
    "base model train), and the teacher where a stage reads it; gradients 4 and AdamW 8 bytes a "
    "trainable parameter; activations for n = micro rows x length tokens: a hybrid layer keeps "
    "m = 4(2 H 2w + 2(H + Hk)F + H F D / chunk) bytes a token for its near scores, features and chunk states; transfer holds "
    "n (b(4E + 3I) + 2m) of one layer; finetuning keeps n (b(8E + 2(H + 2G)D + 3I) + m) a layer (b n E a layer and one whole "
    "layer with activation checkpointing), a quarter more for what the backward adds, and 8 bytes for each of the loss's logits, "
    "2^26 at most. Measured on an H200 (lolcats-smollm2-135m, 32 rows of 1,024): 1.92 GiB transfer, 48.9 GiB finetune"
)


def plan(model: str, recipe: Recipe | str | Path | Mapping[str, Any]) -> Plan:
    """What `recipe` (or the recipe of this name or path, or plain data) needs on `model` (hub id, folder, GGUF file or alias).

    Raises:
        RecipeError: the recipe has problems.
        ValueError: the model's family is not supported, or the spec does not fit its heads; before any weight is read.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    return plan_config(load_base_config(resolve_model(model)), recipe, model=model)


def plan_config(config: PretrainedConfig, recipe: Recipe, *, model: str = "model") -> Plan:
    """`plan` for a config that is at hand."""
    family = get_family(config)
    shapes = family.shapes(config)
    first = shapes[0]

    known: dict[str, Student] = {}

    def counted(index: int) -> Student:
        spec = recipe.assumed_before(index, len(shapes))
        if (key := spec.model_dump_json(exclude={"kept"})) not in known:
            resolved = spec.resolve(
                layers=len(shapes), heads=first.heads, kv_heads=first.kv_heads, head_dim=first.head_dim
            )
            known[key] = count_student(config, resolved, shapes)
        return known[key]

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in base.parameters())
    student = counted(len(recipe.steps))
    teacher = softmax_spec(shapes)
    stages = tuple(
        _stage(step, recipe, config, counted(index), shapes, parameters)
        for index, step in enumerate(recipe.steps)
        if isinstance(step, TrainingStep)
    )
    masters = any(step.trains_masters for step in recipe.training_steps)
    new = student.maps + student.mix
    return Plan(
        model=model,
        recipe=recipe.name,
        model_type=config.model_type,
        layers=len(shapes),
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        parameters=parameters,
        map_parameters=student.maps,
        mix_parameters=student.mix,
        own_parameters=student.total - parameters - new,
        states=tuple(
            StateRow(
                length,
                state_bytes(teacher, shapes, length, CACHE_BYTES),
                state_bytes(student.spec, shapes, length, CACHE_BYTES),
            )
            for length in LENGTHS
        ),
        stages=stages,
        student_disk=(FLOAT32 if masters else _weight_bytes(recipe)) * (student.total - new) + FLOAT32 * new,
        checkpoint_disk=max(((FLOAT32 + ADAMW_BYTES) * stage.trainable for stage in stages), default=0),
        notes=(*notes(config), *_guesses(recipe, len(shapes))),
        unsupported=tuple(recipe.unsupported()),
    )


def _guesses(recipe: Recipe, layers: int) -> list[str]:
    select = recipe.selected_before(len(recipe.steps))
    if select is None or select.layers is not None:
        return []
    return [
        f"{select.count(layers)} of {layers} layers keep softmax; select finds out which, and the plan takes evenly spaced ones"
    ]


def _stage(
    step: TrainingStep,
    recipe: Recipe,
    config: PretrainedConfig,
    student: Student,
    shapes: Sequence[AttentionShape],
    parameters: int,
) -> StagePlan:
    lora = lora_parameters(student, step.lora if isinstance(step, FinetuneStep | DistillStep) else None)
    trainable = _trainable(step, student, lora)
    frozen = student.total + lora - trainable
    exact = student.maps + student.mix  # float32 in any model
    if step.trains_masters:
        weights = FLOAT32 * (frozen + trainable)
    else:
        low = max(0, frozen - exact)
        weights = _weight_bytes(recipe) * low + FLOAT32 * (frozen - low + trainable)
    if step.needs_teacher:
        weights += _weight_bytes(recipe) * parameters
    length = step.row_length(recipe.data.length)
    memory = Memory(
        weights=weights,
        gradients=FLOAT32 * trainable,
        optimizer=ADAMW_BYTES * trainable,
        activations=_activations(step, recipe, config, student.spec, shapes, length),
    )
    return StagePlan(
        name=step.kind,
        trainable=trainable,
        tokens=step.tokens,
        epochs=step.epochs,
        optimizer_steps=step.optimizer_steps(length),
        memory=memory,
    )


def _trainable(step: TrainingStep, student: Student, lora: int) -> int:
    match step:
        case TransferStep() if step.whole_mixers:
            return student.candidates
        case TransferStep():
            return student.maps * ("maps" in step.train) + student.mix * ("mix" in step.train)
        case FinetuneStep():
            new = student.maps + student.mix
            return new * step.train_maps + (student.total - new if step.full else lora)
        case DistillStep() if step.lora is not None:
            return lora + student.groups
        case DistillStep() if step.train == "mixers":
            return student.mixers
        case _:
            return student.total


def _activations(
    step: TrainingStep,
    recipe: Recipe,
    config: PretrainedConfig,
    spec: ResolvedSpec,
    shapes: Sequence[AttentionShape],
    length: int,
) -> int:
    b = _weight_bytes(recipe)
    tokens = step.batch.micro_rows * length
    mixers = [
        sum(_mixer_bytes(group, shape) for group in layer.groups)
        for layer, shape in zip(spec.layers, shapes, strict=True)
    ]
    hidden = tokens * b * shapes[0].hidden
    if isinstance(step, TransferStep):
        return tokens * (b * (4 * shapes[0].hidden + 3 * config.intermediate_size) + 2 * max(mixers))
    loss = 2 * FLOAT32 * min(tokens * config.vocab_size, LOSS_LOGITS)
    layers = [
        tokens
        * (
            b * (8 * s.hidden + 2 * (s.heads + 2 * s.kv_heads) * s.head_dim + 3 * config.intermediate_size)
            + m
        )
        for s, m in zip(shapes, mixers, strict=True)
    ]
    if step.activation_checkpointing:
        return hidden * len(shapes) + 5 * max(layers) // 4 + loss
    return 5 * sum(layers) // 4 + loss


def _mixer_bytes(group: GroupSpec, shape: AttentionShape) -> int:
    """Bytes a token that the new attention keeps for its backward, all in float32; 0 for a softmax group.

    Recurrent attention: q, k, v, gates and outputs, the states at the chunks' borders, and a short convolution's inputs.
    """
    if group.recurrent:
        heads, dim = int(group.heads), shape.head_dim
        convolved = qkv_channels(group, shape) if group.short_conv else 0
        return FLOAT32 * (6 * heads * dim + heads * dim * dim // RECURRENT_CHUNK + convolved)
    if group.feature_map is None:
        return 0
    assert group.feature_map.features is not None
    heads, features = int(group.heads), group.feature_map.features
    kv_share = shape.kv_heads / shape.heads
    key_maps = heads if group.feature_map.k_map_heads == "query" else int(heads * kv_share)
    near, chunk = 0, 64
    if group.window is not None:
        near, chunk = 2 * heads * 2 * group.window.size, group.window.chunk()
    return FLOAT32 * (near + 2 * (heads + key_maps) * features + heads * features * shape.head_dim // chunk)


def _weight_bytes(recipe: Recipe) -> int:
    return 2 if recipe.precision == "bf16" else FLOAT32
