"""How many parameters a student has, and where: counted on the meta device, where nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from hybridize.models.configuration import HybridConfig
from hybridize.models.families import AttentionShape
from hybridize.models.modeling import HybridForCausalLM
from hybridize.plan.bytes import map_parameters, mix_parameters
from hybridize.recipe import Lora
from hybridize.recipe.checks import trains_whole
from hybridize.spec import ResolvedSpec


@dataclass(frozen=True)
class Student:
    """Parameters of a hybrid: all of them; those of its feature maps and mixing weights; of its token mixers, of the ones
    that a transfer of whole mixers trains, and of what its head groups have of their own. `model` holds no values."""

    model: HybridForCausalLM
    spec: ResolvedSpec
    total: int
    maps: int
    mix: int
    mixers: int
    candidates: int
    groups: int


def count_student(config: PretrainedConfig, spec: ResolvedSpec, shapes: Sequence[AttentionShape]) -> Student:
    """The student that `spec` makes of the base model of `config`."""
    with torch.device("meta"):
        model = HybridForCausalLM(HybridConfig.from_base(config, spec))
    mixers = [_count(mixer.parameters()) for mixer in model.mixers]
    chosen = [trains_whole(layer) for layer in spec.layers]
    return Student(
        model=model,
        spec=spec,
        total=_count(model.parameters()),
        maps=map_parameters(spec, shapes),
        mix=mix_parameters(spec),
        mixers=sum(mixers),
        candidates=sum(count for count, whole in zip(mixers, chosen, strict=True) if whole),
        groups=sum(_count(mixer.groups.parameters()) for mixer in model.mixers),
    )


def lora_parameters(student: Student, lora: Lora | None) -> int:
    """rank·(in + out) for each adapted projection of each layer."""
    if lora is None:
        return 0
    projections = [
        mixer.get_submodule(name)
        for mixer in student.model.mixers
        for name in student.model.family.lora_targets(lora.on)
    ]
    return sum(
        lora.rank * (projection.in_features + projection.out_features)
        for projection in projections
        if isinstance(projection, nn.Linear)
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
