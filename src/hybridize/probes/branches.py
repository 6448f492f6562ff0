"""What each layer's two branches carry, and what the loss says about removing the far one.

Legend: B rows, T tokens, H query heads, V value dim, L layers, P tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Removed:
    """One removal: the linear branch of a layer, or of one of its heads."""

    layer: int
    head: int | None = None


def loss_rises(
    model: HybridForCausalLM,
    batches: Sequence[Any],
    first: int,
    removal: Removal,
    *,
    heads: bool = False,
    on_progress: Progress | None = None,
) -> dict[Removed, Estimate | None]:
    """The rise of the loss on far-eligible tokens (queries from position `first` on) when the linear branch of one layer
    alone is removed; with `heads`, of one head alone.

    Layers below the removal are computed once. (First-order estimates from one backward pass were tried: they get the sign
    of large effects wrong.)
    """
    removals = [
        Removed(layer, head)
        for layer, mixer in enumerate(model.mixers)
        if mixer.mixed
        for head in (range(mixer.shape.heads) if heads else (None,))
    ]
    wholes: list[TokenLosses] = []
    ablated: dict[Removed, list[TokenLosses]] = {removed: [] for removed in removals}
    for number, batch in enumerate(batches):
        with _recorded(model) as outputs:
            wholes.append(token_losses(model, [batch]))
        for done, removed in enumerate(removals):
            if on_progress is not None:
                on_progress(number * len(removals) + done, len(batches) * len(removals))
            where = None
            if removed.head is not None:
                where = torch.zeros(1, 1, model.mixers[removed.layer].shape.heads, dtype=torch.bool)
                where[..., removed.head] = True
            with (
                model.override("softmax_only", removal, layers=[removed.layer], where=where),
                _starting_at(model, removed.layer, outputs),
            ):
                ablated[removed].append(token_losses(model, [batch]))
    whole = _together(wholes)
    far_NT = whole.from_position(first)
    return {removed: _together(parts).less(whole, far_NT) for removed, parts in ablated.items()}


def _together(parts: list[TokenLosses]) -> TokenLosses:
    return TokenLosses(
        torch.cat([part.nll_NT for part in parts]), torch.cat([part.position_NT for part in parts])
    )


def _layers(model: HybridForCausalLM) -> list[nn.Module]:
    return list(cast(nn.ModuleList, model.model.layers))


@contextmanager
def _recorded(model: HybridForCausalLM) -> Iterator[list[Any]]:
    """What every decoder layer gives in the forward pass inside."""
    outputs: list[Any] = [None] * len(_layers(model))

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[index] = output

        return hook

    handles = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(_layers(model))]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _starting_at(model: HybridForCausalLM, layer: int, outputs: Sequence[Any]) -> Iterator[None]:
    """Forward passes inside compute decoder layers from `layer` on; those below give what they gave before."""
    below = _layers(model)[:layer]
    for module, output in zip(below, outputs, strict=False):
        module.forward = lambda *args, output=output, **kwargs: output
    try:
        yield
    finally:
        for module in below:
            del module.forward
