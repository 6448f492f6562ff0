"""One layer at a time: a candidate in the teacher (`halo`, `jet`), or softmax in the all-linear student (`kl`).

Nothing is loaded again: the layer is swapped in, measured, and what was there before is put back, also after errors.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridize.evals.generation import Progress
from hybridize.evals.ruler_records import model_fingerprint
from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.modeling import HybridForCausalLM
from hybridize.select.journal import Journal
from hybridize.select.scores import Probe
from hybridize.select.table import SCORES_FILE, LayerScores, ScoreTable

_VERSION = 1  # raise it when a change makes former scores incomparable
Distill = Callable[[HybridForCausalLM], float]


def sweep(
    teacher: HybridForCausalLM,
    candidates: Sequence[TokenMixer],
    recall: Probe,
    knowledge: Probe,
    folder: Path | str,
    *,
    restart: bool = False,
    progress: Progress | None = None,
) -> ScoreTable:
    """Score the teacher, and the teacher with each candidate alone in its layer's place.

    Args:
        teacher: a model whose layers all compute softmax; it is as before afterwards.
        candidates: what would replace each layer, in order; an all-linear student's `mixers`, aligned with the teacher.
        folder: `scores.jsonl` is kept here; the same call goes on where it was stopped.
        restart: discard what the folder holds of other models or settings, which is else refused.
        progress: called with models scored and to be scored, the teacher among them.

    Raises:
        ValueError: candidates that do not fit, scores of other settings in the folder, a candidate that gives NaN.
    """
    _check_teacher(teacher)
    _check_layers("candidates", candidates, len(teacher.mixers))
    identity = {
        "version": _VERSION,
        "layers": len(candidates),
        "teacher": model_fingerprint(teacher),
        "candidates": _fingerprint(candidates),
        "recall": recall.identity,
        "knowledge": knowledge.identity,
    }
    journal = Journal(Path(folder) / SCORES_FILE, identity, restart=restart)
    todo: list[int | None] = [None, *range(len(candidates))]
    for done, layer in enumerate(todo):
        if layer not in journal.entries:
            journal.add(_scored(teacher, layer, candidates, recall, knowledge))
        if progress is not None:
            progress(done + 1, len(todo))
    return ScoreTable.of(list(journal.entries.values()), journal.identity)


def _scored(
    teacher: HybridForCausalLM,
    layer: int | None,
    candidates: Sequence[TokenMixer],
    recall: Probe,
    knowledge: Probe,
) -> LayerScores:
    if layer is None:
        return LayerScores(None, recall.score(teacher), knowledge.score(teacher))
    with swapped(teacher, layer, candidates[layer]):
        try:
            return LayerScores(layer, recall.score(teacher), knowledge.score(teacher))
        except ValueError as error:
            raise ValueError(f"layer {layer} with its candidate: {error}") from error


def kl_sweep(
    student: HybridForCausalLM,
    teacher_layers: Sequence[TokenMixer],
    distill: Distill,
    folder: Path | str,
    *,
    settings: Mapping[str, Any] | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> ScoreTable:
    """Restore softmax in one layer of an all-linear student, distill for a short while, note the final loss; for each layer.

    Args:
        student: every distillation begins from its weights, which are as before afterwards.
        teacher_layers: the softmax layers, in order; copies of them are trained.
        distill: trains the model it is given in place and returns the final loss. Modules and parameters must stay the
            same objects.
        folder, restart, progress: as in `sweep`.
        settings: plain values that say what `distill` does; with others, former losses are refused.

    Raises:
        ValueError: layers that do not fit, losses of other settings in the folder, a loss that is not finite.
    """
    _check_layers("teacher_layers", teacher_layers, len(student.mixers))
    identity = {
        "version": _VERSION,
        "layers": len(teacher_layers),
        "student": model_fingerprint(student),
        "teacher_layers": _fingerprint(teacher_layers),
        "distill": dict(settings or {}),
    }
    journal = Journal(Path(folder) / SCORES_FILE, identity, restart=restart)
    for layer, restored in enumerate(teacher_layers):
        if layer not in journal.entries:
            with _restored_afterwards(student), swapped(student, layer, copy.deepcopy(restored)):
                loss = float(distill(student))
            if not math.isfinite(loss):
                raise ValueError(
                    f"distill gave the loss {loss} with softmax in layer {layer}; it must be finite"
                )
            journal.add(LayerScores(layer, loss=loss))
        if progress is not None:
            progress(layer + 1, len(teacher_layers))
    return ScoreTable.of(list(journal.entries.values()), journal.identity)


@contextmanager
def swapped(model: HybridForCausalLM, layer: int, mixer: TokenMixer) -> Iterator[HybridForCausalLM]:
    """`mixer` in the place of a layer's own, on its device and in the model's mode, and the spec says so; afterwards both are
    as before."""
    original, spec = model.mixers[layer], model.spec
    device, home = _device(original), _device(mixer)
    modes = [(module, module.training) for module in mixer.modules()]
    if home != device:
        mixer.to(device)
    layers = (*spec.layers[:layer], mixer.spec, *spec.layers[layer + 1 :])
    model.family.replace_attention(model, layer, mixer.train(model.training))
    model.spec = spec.model_copy(update={"layers": layers})
    try:
        yield model
    finally:
        model.family.replace_attention(model, layer, original)
        model.spec = spec
        if home != device:
            mixer.to(home)
        for module, training in modes:
            module.training = training


@contextmanager
def _restored_afterwards(model: nn.Module) -> Iterator[None]:
    """Values, gradients and flags of all parameters and buffers, and the modules' modes, are put back. Copies lie on the CPU."""
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    tensors = [*model.parameters(), *model.buffers()]
    values = [x.detach().to("cpu", copy=True) for x in tensors]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, *_ in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in zip(tensors, values, strict=True):
                x.copy_(value)
        for parameter, wanted, gradient in parameters:
            parameter.requires_grad_(wanted)
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _fingerprint(mixers: Sequence[TokenMixer]) -> str:
    """sha256 of what the mixers compute."""
    parts = [[mixer.spec.model_dump(mode="json"), model_fingerprint(mixer)] for mixer in mixers]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _check_teacher(teacher: HybridForCausalLM) -> None:
    for layer, mixer in enumerate(teacher.mixers):
        others = [group.attention for group in mixer.spec.groups if group.attention != "softmax"]
        if others:
            raise ValueError(
                f"teacher computes {others[0]} in layer {layer}; a sweep replaces layers of a model that is softmax throughout"
            )


def _check_layers(name: str, mixers: Sequence[TokenMixer], count: int) -> None:
    if len(mixers) != count:
        raise ValueError(f"{name} has {len(mixers)} layers; the model has {count}")
    for layer, mixer in enumerate(mixers):
        if mixer.shape.layer != layer:
            raise ValueError(f"{name}[{layer}] was made for layer {mixer.shape.layer}; give them in order")
