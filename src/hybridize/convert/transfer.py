"""Attention transfer (LoLCATs section 3.1; DESIGN D9, D10): every layer learns its teacher's attention.

Teacher-forced: each layer passes the teacher's output on, so a layer's loss depends on its own new parameters alone and
its backward runs at once; the memory held is one layer's.

Legend: B rows, T tokens, P tokens of all rows, N sequences, n sequences of a tile, Q queries, S keys, H query heads, G KV heads,
D head dim, V value dim, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hybridize import losses
from hybridize.convert.teacher_forced import TeacherForced
from hybridize.data.batching import Batch
from hybridize.layers.token_mixer import TokenMixer
from hybridize.mixers.types import Mixer
from hybridize.mixers.windowed_linear import WindowedLinearMixer
from hybridize.models.modeling import HybridForCausalLM
from hybridize.ops import softmax
from hybridize.ops.sequences import Sequences
from hybridize.recipe import Objective, TransferStep

QUERIES = {False: 128, True: 512}
"""Most queries of a tile of the weight cross-entropy. All of them are computed against the last one's keys, and every tile
computes the features of its keys anew: fewer cost more features than they save weights, in time and in memory. On CUDA
(True) a tile costs milliseconds of launches whatever its size."""
BUDGET = {False: 2**20, True: 2**26}
"""Elements of a tile of several sequences."""
PARTS = {"maps": ("map_q.", "map_k."), "mix": ("mix.",)}


class TransferStage(TeacherForced):
    """Trains feature maps and mixing weights; everything else is frozen and may be bf16."""

    def __init__(self, model: HybridForCausalLM, step: TransferStep, validation: Iterable[Batch]) -> None:
        self.model, self.objective = model, step.objective
        self.validation = list(validation)
        wanted = tuple(prefix for part in step.train for prefix in PARTS[part])
        model.requires_grad_(False)
        self.layers = [index for index, layer in enumerate(model.spec.layers) if layer.has_linear]
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if ".groups." in name and any(f".{prefix}" in name for prefix in wanted):
                parameter.requires_grad_(True)
                self._parameters[name] = parameter

    def _run(self, batch: Batch, scale: float | None) -> tuple[Tensor, Tensor]:
        """Loss (mean over the layers with a linear branch) and normalised MSE `[L]`.

        With `scale`, backward of `scale * loss`, layer by layer.
        """
        layers = len(self.layers)
        device = self.model.device
        total = torch.zeros((), device=device)
        nmse_L = torch.zeros(len(self.model.spec.layers), device=device)

        def intercept(mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
            teacher = mixer.teacher(q, k, v, sequences)
            if not mixer.spec.has_linear:
                return teacher
            with torch.set_grad_enabled(scale is not None):
                loss, nmse = self.layer_loss(mixer, q, k, v, teacher, sequences)
                if scale is not None:
                    (loss * (scale / layers)).backward()
            total.add_(loss.detach().to(device) / layers)
            nmse_L[mixer.shape.layer] = nmse.detach().to(device)
            return teacher

        with torch.no_grad(), self.model.intercepted(intercept):
            self.model.hidden_states(batch.input_ids_BT.to(device), position_ids=batch.position_ids_BT)
        return total, nmse_L

    def layer_loss(
        self, mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, teacher: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """The objective of one layer over its linear groups' heads, and the normalised output MSE."""
        students, teachers, entropies = [], [], []
        for group, (heads, kv_heads) in zip(mixer.mixers, mixer.slices, strict=True):
            if not group.far:
                continue
            qkv = q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads]
            # where the outputs only make the logged error, no gradient through them is worth its cost
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.objective.output_mse > 0):
                students.append(self._output(group, qkv, sequences))
            teachers.append(teacher[:, :, heads])
            if self.objective.weight_ce:
                ce = weight_cross_entropy(mixer, group, qkv[0], qkv[1], sequences, self.objective)
                entropies.append(ce * group.shape.heads)
        mse, nmse = losses.output_mse(torch.cat(students, 2), torch.cat(teachers, 2))
        loss = self.objective.output_mse * mse
        if entropies:
            count = sum(group.shape.heads for group in mixer.mixers if group.far)
            loss = loss + self.objective.weight_ce * sum(entropies, torch.zeros_like(mse)) / count
        return loss, nmse

    def _output(
        self,
        group: Mixer,
        qkv: tuple[Tensor, Tensor, Tensor],
        sequences: Sequences,
    ) -> Tensor:
        if self.objective.against == "linear_only" and isinstance(group, WindowedLinearMixer):
            return group.linear_only(*qkv, sequences)
        return group.attend(*qkv, sequences)[0]


@dataclass(frozen=True)
class Tile:
    """Queries `first` .. `last` - 1 of n sequences, given by where they begin in the flat tokens and their lengths `[n, 1]`.

    Its keys are the positions before `last`. A position past a sequence's end holds its last token: no query before the
    end sees it, and queries past the end do not count.
    """

    begin_n1: Tensor
    length_n1: Tensor
    first: int
    last: int

    def lay(self, x_PHD: Tensor) -> Tensor:
        """`[n, last, H, D]`."""
        position = torch.arange(self.last, device=x_PHD.device)
        index = self.begin_n1 + torch.minimum(position, self.length_n1 - 1)
        return x_PHD.index_select(0, index.flatten()).unflatten(0, index.shape)

    def counted(self) -> Tensor:
        """`[n, 1, Q]`: which queries are tokens."""
        return (torch.arange(self.first, self.last, device=self.length_n1.device) < self.length_n1)[:, None]


def cut(sequences: Sequences, heads: int, budget: int, queries: int) -> list[Tile]:
    """All queries in tiles `[n, heads, Q, S]`, Q at most `queries`, of at most `budget` elements, or of one sequence where
    that has more.

    Longest sequences first: a tile's sequences have about the same length, and those that are over drop out.
    """
    lengths = sequences.array("lengths")
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    begin_N1 = sequences.move(np.asarray(sequences.bounds)[order, None])
    length_N1 = sequences.move(lengths[:, None])
    longest = int(lengths.max(initial=0))
    tiles, first = [], 0
    while first < longest:
        n, alive = 0, int((lengths > first).sum())
        while n < alive:
            last = min(first + queries, int(lengths[n]))
            end = min(n + max(1, budget // (heads * (last - first) * last)), alive)
            tiles.append(Tile(begin_N1[n:end], length_N1[n:end], first, last))
            n = end
        first += queries
    return tiles


def weight_cross_entropy(
    mixer: TokenMixer,
    group: Mixer,
    q: Tensor,
    k: Tensor,
    sequences: Sequences,
    objective: Objective,
) -> Tensor:
    """-sum_i A_ti ln A'_ti, mean over heads and queries of all sequences; tile by tile, never `[T, T]` in memory.

    The gradient reaches the group's own parameters; `q` and `k` are constants, as transfer has them.
    """
    student_weights: Callable[[Tensor, Tensor, slice], Tensor] = group.coefficients
    if objective.against == "linear_only" and isinstance(group, WindowedLinearMixer):
        student_weights = group.linear_coefficients
    window, scale, softcap = mixer.teacher_window, mixer.shape.scale, mixer.shape.softcap
    q_PHD, k_PGD = q.detach().flatten(0, 1), k.detach().flatten(0, 1)
    heads, budget, queries = group.shape.heads, BUDGET[q.is_cuda], QUERIES[q.is_cuda]
    tiles = sequences.once(("tiles", heads, budget), lambda: cut(sequences, heads, budget, queries))
    if not tiles:
        return q.new_zeros((), dtype=torch.float32)

    def weights(tile: Tile) -> tuple[Tensor, Tensor]:
        rows, q_nSHD, k_nSGD = slice(tile.first, tile.last), tile.lay(q_PHD), tile.lay(k_PGD)
        teacher = softmax.coefficients(q_nSHD, k_nSGD, window, scale=scale, softcap=softcap, rows=rows)
        return teacher, student_weights(q_nSHD, k_nSGD, rows)

    learnt = [parameter for parameter in group.parameters() if parameter.requires_grad]
    total = losses.tiled_weight_cross_entropy(weights, tiles, learnt, counted=Tile.counted)
    return total / (heads * sequences.total)
