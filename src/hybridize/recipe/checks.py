"""What is wrong with a recipe whose keys and values are all right: steps that do not fit the spec, or one another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hybridize.recipe.stages import DistillStep, FinetuneStep, LongContextStep, TransferStep
from hybridize.recipe.steps import EditStep, SelectStep
from hybridize.recipe.training import TrainingStep
from hybridize.select.rules import SCORED
from hybridize.spec import LINEAR, LayerSpec, SeparateNormalizer

if TYPE_CHECKING:
    from hybridize.recipe.schema import Recipe


def problems(recipe: Recipe) -> list[str]:
    """Every problem, each with its path."""
    if not recipe.steps:
        return _kept_without_select(recipe)
    return [
        *_far_problems(recipe),
        *_nothing_to_train(recipe),
        *_nothing_to_drop(recipe),
        *_nothing_to_edit(recipe),
        *_selection(recipe),
    ]


def _far_problems(recipe: Recipe) -> list[str]:
    """Windows, of the spec or of a schedule, that would leave the linear branch untrained at this length."""
    windows = {}
    for index, step in enumerate(recipe.steps):
        if not isinstance(step, TrainingStep):
            continue
        length = step.row_length(recipe.data.length)
        path = f"steps[{index}].long_context.length" if isinstance(step, LongContextStep) else "data.length"
        for group in recipe.groups_before(index):
            if group.attention != "windowed_linear" or group.window is None:
                continue
            dropout = step.window_dropout if isinstance(step, FinetuneStep) else None
            for size in (dropout.window if dropout else ()) or (group.window.size,):
                key = (path, group.window.kind, size, group.window.sinks)
                windows[key] = (length, replace(group.window, size=size))
    return [
        f"{path}: with {length} tokens no query has a far key, so the linear branch would never train; "
        f"the {window.kind} window of {window.size} needs at least {window.first_far_position + 1}"
        for (path, *_), (length, window) in sorted(windows.items(), key=lambda item: item[0])
        if window.first_far_position >= length
    ]


def _nothing_to_train(recipe: Recipe) -> list[str]:
    found = []
    for index, step in enumerate(recipe.steps):
        if not isinstance(step, TransferStep):
            continue
        path, layers = f"steps[{index}].transfer.train", recipe.layers_before(index)
        if step.whole_mixers:
            if not any(trains_whole(layer) for layer in layers):
                found.append(
                    f"{path}: nothing to train; train: mixer is for layers with projections, norms or gates of their own "
                    "(recurrent attention, qk_norm, output_norm, output_gate, heads: expand)"
                )
            continue
        trainable = {part for layer in layers for part in _parts(layer)}
        wanted = set(step.train)
        if not trainable & wanted:
            without = f"the spec has no {' and no '.join(step.train)}"
            hint = "; write train: mixer" if any(trains_whole(layer) for layer in layers) else ""
            found.append(f"{path}: nothing to train; {without}{hint}")
        elif step.objective.against == "linear_only" and not (trainable - {"mix"}) & wanted:
            found.append(f"{path}: nothing to train; objective.against: linear_only leaves mix out, add maps")
        elif not all(layer.keeps_projections for layer in layers):
            found.append(
                f"{path}: {' and '.join(step.train)} are compared inside a layer, and some layers no longer have the teacher's "
                "q and k to pass its output on; write train: mixer"
            )
    return found


def trains_whole(layer: LayerSpec) -> bool:
    """Whether a transfer of whole mixers trains the layer: it has parameters that the teacher's attention has not."""
    return any(group.own_parameters or group.attention in LINEAR for group in layer.groups)


def _parts(layer: LayerSpec) -> set[str]:
    """Which of feature maps and mixing weights a layer has."""
    parts = set()
    for group in (group.completed() for group in layer.groups):
        if group.attention in LINEAR:
            parts.add("maps")
        fixed = isinstance(group.normalizer, SeparateNormalizer) and group.normalizer.mix == "fixed"
        if group.attention == "windowed_linear" and not fixed:
            parts.add("mix")
    return parts


def _nothing_to_drop(recipe: Recipe) -> list[str]:
    found = []
    for index, step in enumerate(recipe.steps):
        if not isinstance(step, FinetuneStep):
            continue
        if any(group.attention == "windowed_linear" for group in recipe.groups_before(index)):
            continue
        if step.window_dropout is not None:
            found.append(
                f"steps[{index}].finetune.window_dropout: the spec has no windowed_linear attention to drop windows of"
            )
        if step.early_stopping is not None and step.early_stopping.min_gain > 0:
            found.append(
                f"steps[{index}].finetune.early_stopping: the spec has no layer with a window and a linear branch, so there is no "
                "linear gain to watch; set min_gain: 0"
            )
    return found


def _nothing_to_edit(recipe: Recipe) -> list[str]:
    return [
        f"steps[{index}].edit: window: the spec has no linear attention that could gain one"
        for index, step in enumerate(recipe.steps)
        if isinstance(step, EditStep)
        and all(group.attention not in LINEAR for group in recipe.groups_before(index))
    ]


def _kept_without_select(recipe: Recipe) -> list[str]:
    if recipe.spec.kept is None:
        return []
    return [
        "spec.kept: no select step chooses the layers that compute it; add one, or name them in spec.layers"
    ]


def _selection(recipe: Recipe) -> list[str]:
    found, selects = [], [i for i, step in enumerate(recipe.steps) if isinstance(step, SelectStep)]
    if not selects:
        return _kept_without_select(recipe)
    first = selects[0]
    step = recipe.steps[first]
    assert isinstance(step, SelectStep)
    found += [
        f"steps[{index}].select: the layers have been chosen in steps[{first}] already; one select a recipe"
        for index in selects[1:]
    ]
    if recipe.spec.kept is None:
        found.append(
            f"steps[{first}].select: spec.kept is missing; it says what the chosen layers compute, such as "
            "kept: {attention: softmax, position: none}"
        )
    else:
        found += [
            f"steps[{index}].{other.kind}: trains a model whose kept layers are not chosen yet; put it after steps[{first}].select"
            for index, other in enumerate(recipe.steps[:first])
            if isinstance(other, DistillStep | LongContextStep | FinetuneStep)
        ]
    by_score = step.rule in SCORED and step.scores is None
    if by_score and not any(isinstance(other, TransferStep) for other in recipe.steps[:first]):
        found.append(
            f"steps[{first}].select: rule: {step.rule} measures layers that have learnt something; put a transfer before it, "
            "or give scores"
        )
    return found
