"""Small hybrids for the model tests: two or three layers, all attentions, every family."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.tiny import tiny_model
from torch import Tensor

from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.spec import HybridSpec

W = 4
TERRACED = {"attention": "windowed_linear", "window": {"kind": "terraced", "size": W}}
SLIDING = {
    "attention": "windowed_linear",
    "window": {"kind": "sliding", "size": W, "sinks": 2},
    "normalizer": {"kind": "separate", "mix": "mass"},
}
WINDOWED = {"attention": "softmax", "window": {"kind": "sliding", "size": W, "sinks": 1}}
LINEAR = {"attention": "linear", "feature_map": {"features": 12, "k_map_heads": "kv"}}
KEPT = {"attention": "softmax"}
HEAD_WISE = {"groups": [{**WINDOWED, "heads": "1/2"}, {"attention": "linear", "heads": "1/2"}]}
SPECS: dict[str, dict[str, Any]] = {
    "terraced": {"all": TERRACED},
    "sliding": {"all": SLIDING},
    "softmax": {"all": KEPT},
    "softmax-window": {"all": WINDOWED},
    "linear": {"all": LINEAR},
    "head-wise": {"all": HEAD_WISE},
    "kept-half": {"all": TERRACED, "layers": {"1": KEPT}},
    "every-kind": {
        "all": TERRACED,
        "layers": {"1": KEPT, "2": HEAD_WISE, "3": SLIDING, "4": LINEAR, "5": WINDOWED},
    },
}


def hybrid(
    spec: str | dict[str, Any] = "terraced",
    family: str = "llama",
    *,
    layers: int = 2,
    tied: bool = False,
    **kwargs: Any,
) -> HybridForCausalLM:
    """A hybrid whose own parameters have left their first values."""
    chosen = SPECS[spec] if isinstance(spec, str) else spec
    layers = 6 if spec == "every-kind" else layers
    teacher = tiny_model(family, tied, num_hidden_layers=layers, **kwargs)
    model = hybridize_model(teacher, HybridSpec.model_validate(chosen))
    shift_own_parameters(model)
    return model


@torch.no_grad()
def shift_own_parameters(model: HybridForCausalLM) -> None:
    generator = torch.Generator().manual_seed(1)
    for mixer in model.mixers:
        for parameter in mixer.groups.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
