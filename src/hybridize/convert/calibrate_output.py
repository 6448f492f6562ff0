"""First values of output norms: a recurrent layer starts with outputs as large as those of the attention it replaces.

A norm gives the channels a mean square of 1, where SmolLM2's attention has some hundredths; weights of 1 would take hundreds of steps
to come down. The papers start from 1 and train long enough not to care.

Legend: P tokens of all rows, H heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybridize.data.batching import Batch
from hybridize.models.modeling import HybridForCausalLM

SMALLEST = 1e-4
HALF_GATE = 0.5
"""What a gate of kind `half` lets through at first."""


def layers_with_norms(model: HybridForCausalLM) -> list[int]:
    """Layers in which a group normalises its output."""
    return [
        index
        for index, mixer in enumerate(model.mixers)
        if any(group.output_norm is not None for group in mixer.mixers)
    ]


@torch.no_grad()
def calibrate_output(model: HybridForCausalLM, teacher: HybridForCausalLM, batch: Batch) -> None:
    """Set the weight of every output norm to the root mean square of its channel in the teacher's attention output before
    o_proj, over the batch's tokens, divided by what the gate lets through at first."""
    layers = layers_with_norms(model)
    rms = _channels(teacher, layers, batch)
    for layer in layers:
        mixer = model.mixers[layer]
        dim = mixer.shape.head_dim
        for group, (heads, _) in zip(mixer.mixers, mixer.slices, strict=True):
            if group.output_norm is None:
                continue
            gate = HALF_GATE if group.spec.output_gate == "half" else 1.0
            wanted = rms[layer][heads.start * dim : heads.stop * dim] / gate
            group.output_norm.weight.copy_(wanted.clamp_min(SMALLEST))


def _channels(teacher: HybridForCausalLM, layers: Iterable[int], batch: Batch) -> dict[int, Tensor]:
    """Root mean square of each channel `[H V]` that enters the output projections of some layers."""
    found: dict[int, Tensor] = {}

    def note(layer: int) -> Any:
        def hook(projection: Any, args: tuple[Tensor, ...]) -> None:
            found[layer] = args[0].float().flatten(0, -2).square().mean(0).sqrt()

        return hook

    handles = [
        cast(nn.Module, teacher.mixers[layer].o_proj).register_forward_pre_hook(note(layer))
        for layer in layers
    ]
    try:
        teacher.hidden_states(batch.input_ids_BT.to(teacher.device), position_ids=batch.position_ids_BT)
    finally:
        for handle in handles:
            handle.remove()
    return found
