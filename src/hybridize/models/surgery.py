"""From a teacher and a spec to a hybrid model."""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig, PreTrainedModel

from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.configuration import HybridConfig
from hybridize.models.families import get_family
from hybridize.models.modeling import HybridForCausalLM
from hybridize.spec import SOFTMAX, HybridSpec, LayerSpec, ResolvedSpec


def resolve_spec(spec: HybridSpec, config: PreTrainedConfig) -> ResolvedSpec:
    """The spec checked against a base config; every problem in one `ValueError`."""
    shapes = get_family(config).shapes(config)
    first = shapes[0]
    return spec.resolve(
        layers=len(shapes), heads=first.heads, kv_heads=first.kv_heads, head_dim=first.head_dim
    )


def hybridize_model(teacher: PreTrainedModel, spec: HybridSpec | ResolvedSpec) -> HybridForCausalLM:
    """A hybrid around the teacher's own weights; the teacher object must not be used again afterwards.

    Raises `ValueError` for unsupported families and for specs that do not fit the model.
    """
    resolved = spec if isinstance(spec, ResolvedSpec) else resolve_spec(spec, teacher.config)
    return HybridForCausalLM.from_teacher(teacher, HybridConfig.from_base(teacher.config, resolved))


def softmax_teacher(teacher: PreTrainedModel) -> HybridForCausalLM:
    """The teacher itself behind our layouts of padded and packed rows: every layer computes its own softmax attention.

    The teacher object must not be used again afterwards.
    """
    return hybridize_model(teacher, SOFTMAX)


def replace_layers(student: HybridForCausalLM, teacher: HybridForCausalLM, spec: ResolvedSpec) -> None:
    """Make `student` compute `spec`: layers that differ from its own are rebuilt from copies of `teacher`'s attention.

    The other layers keep what they have learnt. Raises ValueError for a spec of another number of layers, and for a teacher
    whose layers are not its own softmax any more; the student is then as before.
    """
    if len(spec.layers) != len(student.spec.layers):
        raise ValueError(f"spec has {len(spec.layers)} layers; the model has {len(student.spec.layers)}")
    made = {
        index: _rebuilt(student, teacher.mixers[index], index, new)
        for index, (new, old) in enumerate(zip(spec.layers, student.spec.layers, strict=True))
        if new != old
    }
    for index, mixer in made.items():
        student.family.replace_attention(student, index, mixer)
    student.spec = spec
    student.config.hybrid_spec = spec.model_dump(mode="json")


def _rebuilt(student: HybridForCausalLM, source: TokenMixer, index: int, layer: LayerSpec) -> TokenMixer:
    """Layer `index` of the student from a copy of the teacher's attention, in the student's dtype and mode."""
    if not source.is_the_teachers:
        raise ValueError(f"layer {index} of the teacher is not its own softmax attention any more")
    like = next(student.mixers[index].parameters())
    children = copy.deepcopy(source)
    del children.groups, children._sinks_only
    # cast before the groups are made: maps and gates stay float32 whatever the model's dtype
    children.to(like.device, like.dtype)
    mixer = TokenMixer(children, student.family, student.shapes[index], layer)
    mixer.groups.to(like.device)
    return mixer.train(student.training)
