"""From a teacher and a spec to a hybrid model."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from hybridize.models.configuration import HybridConfig
from hybridize.models.families import get_family
from hybridize.models.modeling import HybridForCausalLM
from hybridize.spec import HybridSpec, ResolvedSpec


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
