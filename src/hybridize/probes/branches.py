"""What each layer's two branches carry, and what the loss says about removing the far one.

Legend: B rows, T tokens, H query heads, V value dim, L layers, P tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridize import losses
from hybridize.layers.token_mixer import TokenMixer
from hybridize.mixers.windowed_linear import WindowedLinearMixer
from hybridize.models.modeling import HybridForCausalLM
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Removal
from hybridize.probes.token_losses import Estimate, Progress, TokenLosses, token_losses

BUCKETS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass
class BranchStatistics:
    """Means over far-eligible tokens and heads, one value a layer (None in layers without both branches).

    near_norm, far_norm: root mean square of each branch's part of the output; the two parts add up to it. cosine: between
    the parts, head by head. far_share: share of the weights on far keys. by_position: (start, end, shares).
    """

    near_norm: list[float | None] = field(default_factory=list)
    far_norm: list[float | None] = field(default_factory=list)
    cosine: list[float | None] = field(default_factory=list)
    far_share: list[float | None] = field(default_factory=list)
    by_position: list[tuple[int, int | None, list[float | None]]] = field(default_factory=list)


@torch.no_grad()
def branch_statistics(model: HybridForCausalLM, batches: Sequence[Any]) -> BranchStatistics:
    """Norms, cosine and far share of every layer's branches on some batches."""
    layers = len(model.mixers)
    sums = torch.zeros(layers, 4, dtype=torch.float64)  # near^2, far^2, cosine, share
    counts = torch.zeros(layers, dtype=torch.float64)
    share_LK = torch.zeros(layers, len(BUCKETS), dtype=torch.float64)
    count_LK = torch.zeros(layers, len(BUCKETS), dtype=torch.float64)
    edges = torch.tensor(BUCKETS)

    def look(mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        layer = mixer.shape.layer
        position_P = sequences.tensor("position").cpu()
        for group, (heads, kv_heads) in zip(mixer.mixers, mixer.slices, strict=True):
            if not isinstance(group, WindowedLinearMixer):
                continue
            near, far, share = group.parts(q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads], sequences)
            eligible = group.window.has_far(position_P)
            if not eligible.any():
                continue
            near, far = (x.flatten(0, 1).double().cpu()[eligible] for x in (near, far))
            share = share.flatten(0, 1).double().cpu()[eligible]
            cosine = torch.nn.functional.cosine_similarity(near, far, dim=-1, eps=1e-12)
            means = [near.square().mean(-1), far.square().mean(-1), cosine, share]
            sums[layer] += torch.stack([mean.sum() for mean in means])
            counts[layer] += share.numel()
            bucket = torch.bucketize(position_P[eligible], edges, right=True) - 1
            share_LK[layer].index_add_(0, bucket, share.sum(1))
            count_LK[layer].index_add_(0, bucket, torch.full_like(share[:, 0], share.shape[1]))
        return mixer.attend(q, k, v, sequences)

    for batch in batches:
        with model.intercepted(look):
            model.hidden_states(batch.input_ids_BT.to(model.device), position_ids=batch.position_ids_BT)
    mean = sums / counts[:, None]
    shares = share_LK / count_LK

    def column(values: Tensor) -> list[float | None]:
        return [float(value) if value.isfinite() else None for value in values]

    ends = [*BUCKETS[1:], None]
    return BranchStatistics(
        column(mean[:, 0].sqrt()),
        column(mean[:, 1].sqrt()),
        column(mean[:, 2]),
        column(mean[:, 3]),
        [
            (start, end, column(shares[:, i]))
            for i, (start, end) in enumerate(zip(BUCKETS, ends, strict=True))
            if count_LK[:, i].any()
        ],
    )


def loss_rises(
    model: HybridForCausalLM,
    batches: Sequence[Any],
    whole: TokenLosses,
    where_NT: Tensor,
    removal: Removal,
    on_progress: Progress | None = None,
) -> list[Estimate | None]:
    """For every layer with both branches: the rise of the loss on some tokens when its linear branch alone is removed."""
    rises: list[Estimate | None] = []
    for layer, mixer in enumerate(model.mixers):
        if on_progress is not None:
            on_progress(layer, len(model.mixers))
        if not mixer.mixed:
            rises.append(None)
            continue
        with model.override("softmax_only", removal, layers=[layer]):
            rises.append(token_losses(model, batches).less(whole, where_NT))
    return rises


def estimated_rises(
    model: HybridForCausalLM, batches: Sequence[Any], first: int, removal: Removal
) -> tuple[list[list[float] | None], int]:
    """The same head by head, to first order: `[layer][head]`, None in layers without both branches; and the tokens counted.

    With o + a (o_removed - o) in place of every head's output, the derivative of the loss in a at 0 is the linear part of
    the rise that removing the head's far branch would cause; one backward pass gives all heads. `first` is the first
    far-eligible position; the mean is over the far-eligible tokens of all batches.
    """
    gates = {
        layer: torch.zeros(mixer.shape.heads, device=model.device, requires_grad=True)
        for layer, mixer in enumerate(model.mixers)
        if mixer.mixed
    }

    def mix(mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        o = mixer.attend(q, k, v, sequences)
        gate = gates.get(mixer.shape.layer)
        if gate is None:
            return o
        before = mixer.effective
        mixer.effective = replace(before, mode="softmax_only", removal=removal)
        removed = mixer.attend(q, k, v, sequences)
        mixer.effective = before
        return o + gate.to(o.dtype)[:, None] * (removed - o)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    tokens = 0
    try:
        for batch in batches:
            for row in range(len(batch.input_ids_BT)):
                ids_1T, position_1T = batch.input_ids_BT[row : row + 1], batch.position_ids_BT[row : row + 1]
                labels_1T = batch.labels_BT[row : row + 1].clone()
                labels_1T[:, 1:][position_1T[:, :-1] < first] = (
                    losses.IGNORE
                )  # target t + 1 belongs to query t
                labels_1T[:, 0] = losses.IGNORE
                if not losses.count_targets(labels_1T):
                    continue
                with torch.enable_grad(), model.intercepted(mix):
                    hidden, _ = model.hidden_states(ids_1T.to(model.device), position_ids=position_1T)
                    loss, count = losses.next_token_ce(
                        hidden, model.lm_head, labels_1T, softcap=model.final_softcap
                    )
                    loss.backward()
                tokens += int(count)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    if tokens == 0:
        return [None] * len(model.mixers), 0
    return [
        [float(x) / tokens for x in gates[layer].grad.tolist()]  # type: ignore[union-attr]
        if layer in gates and gates[layer].grad is not None
        else None
        for layer in range(len(model.mixers))
    ], tokens
