"""Small hybrids for the model tests: two or three layers, all attentions, every family."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.tiny import tiny_model
from torch import Tensor

from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.spec import HybridSpec, parse_layers

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
# HALO's student and the layers that it keeps
LIGHTNING = {
    "attention": "lightning",
    "position": "rope",
    "qk_norm": True,
    "output_norm": True,
    "output_gate": True,
    "heads": "expand",
}
HYPE = {
    "attention": "softmax",
    "position": "none",
    "logit_scale": {"kind": "log_position", "base": 5},
    "output_gate": True,
}


def head_by_head(*groups: dict[str, Any]) -> dict[str, Any]:
    """Groups of one query head each, with keys and values of its own."""
    return {"groups": [{**group, "heads": 1, "expand": True} for group in groups]}


MIXTURE = head_by_head(
    {"attention": "gla", "position": "none", "output_norm": True},
    {"attention": "gdn", "qk_norm": True},
    {"attention": "mamba2", "output_gate": "half"},
    {**TERRACED, "position": {"rope": 30}, "output_gate": "open", "qk_norm": True},
)
MIXTURE_2 = head_by_head(
    {"attention": "rwkv7", "position": {"rope": 30}},
    {"attention": "kda"},
    {"attention": "softmax", "logit_scale": {"kind": "log_length", "length": 6}},
    {"attention": "lightning", "decay": {"convention": "layer_scaled"}, "output_norm": True},
)
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
    "halo": {"all": LIGHTNING, "layers": {"1": HYPE}},
    "recurrent": {"all": MIXTURE, "layers": {"1": MIXTURE_2}},
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
    named = [index for text in chosen.get("layers", {}) for index in parse_layers(text)]
    layers = max([layers - 1, *named]) + 1
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


def realigned(model: HybridForCausalLM) -> HybridForCausalLM:
    """The model with its weights in fresh memory. As they come from a file they lie at any address, and a CPU's kernels may
    add in another order there: the same weights then differ in the last bit of a logit."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
