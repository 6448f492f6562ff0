"""Run the steps of a recipe: teacher, swap, every stage, the finished student; resumable at any moment.

The same call on the same folder continues: finished steps are re-applied from their outcome, the step under way from its
last checkpoint. A changed model, recipe or data is refused.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybridize.atomic import atomic_folder, atomic_write, full_disk_explained
from hybridize.convert.budget_notes import budget_notes, epoch_notes, far_notes
from hybridize.convert.calibrate import calibrate_mass
from hybridize.convert.calibrate_output import calibrate_output, layers_with_norms
from hybridize.convert.compiled import check_compiler
from hybridize.convert.finetune import merge
from hybridize.convert.measure import Milestones
from hybridize.convert.outcome import reapply, store
from hybridize.convert.run_folder import OUTCOME, RunFolder, read_json, write_json
from hybridize.convert.selection import Selector, check_probes, keep_layers, selected
from hybridize.convert.stages import lora_of, make_stage, step_seed, train_config
from hybridize.convert.status import status
from hybridize.convert.teacher_forced import TeacherForced
from hybridize.convert.texts import Budgets, Texts, budgets
from hybridize.convert.texts import corpus_tokens as _corpus_tokens  # noqa: F401
from hybridize.data import PackedRows, check_tokenizer
from hybridize.data.batching import Batch, batches, make_batch
from hybridize.devices import bf16_note, choose_device, device_name
from hybridize.extend.window import with_window
from hybridize.models.configuration import HybridConfig
from hybridize.models.families import notes
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model, resolve_spec, softmax_teacher
from hybridize.models.teacher import (
    fingerprint,
    load_base_config,
    load_teacher,
    load_tokenizer,
    resolve_model,
)
from hybridize.recipe import EditStep, FinetuneStep, Recipe, SelectStep, TrainingStep, TransferStep
from hybridize.train import train
from hybridize.train.process import seed_all

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

CALIBRATION_ROWS = 4

SAVE_EVERY_S = 60.0
"""Seconds of training between checkpoints."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def convert(
    model: str,
    recipe: Recipe,
    out: Path,
    *,
    device: str | None = None,
    stop_after: str | None = None,
    progress: bool = True,
) -> Path:
    """Convert `model` by `recipe` into the run folder `out`; call again to continue. Returns `out`.

    `stop_after` names a step (`transfer`, `finetune` or its number) after which to stop; the student so far is in
    `out/model`. Raises ValueError (RecipeError) for what cannot be done, before any weights load where possible.
    """
    return _convert(model, recipe, out, budgets(recipe), choose_device(device), stop_after, progress)


def _convert(
    model: str,
    recipe: Recipe,
    out: Path,
    corpus: Budgets,
    device: torch.device,
    stop_after: str | None,
    progress: bool,
) -> Path:
    """`corpus` limits the training text; the control reads the same text as the student."""
    recipe.check_supported()
    last = _last_step(recipe, stop_after)
    source = resolve_model(model)
    config = load_base_config(source)
    if config.model_type == HybridConfig.model_type:
        raise ValueError(f"MODEL {model!r} is a hybrid already; give the pretrained model it was made from")
    _check_spec(recipe, config)
    run = RunFolder(out)
    check_probes(recipe, run, config)
    left = [
        index for index, step in enumerate(recipe.steps[: last + 1]) if not run.finished(index, step.kind)
    ]
    check_compiler(recipe, device, left)
    with run.locked():
        tokenizer = load_tokenizer(source)
        check_tokenizer(tokenizer, config.vocab_size)
        with status(progress) as say:
            texts = Texts(recipe, tokenizer, corpus, say)
        trained_by = {key: value for key, value in recipe.to_dict().items() if key != "evaluation"}
        identity = {
            "model": {"name": model, "fingerprint": fingerprint(source)},
            "recipe": trained_by,
            "data": texts.identity(),
        }
        run.claim(identity, _undecided(run, recipe))
        with atomic_write(out / "recipe.yaml", "w") as file:
            file.write(recipe.to_yaml())
        slow = bf16_note(device) if recipe.precision == "bf16" else None
        said = [
            *notes(config),
            *([slow] if slow else []),
            *budget_notes(recipe),
            *epoch_notes(recipe, texts),
            *far_notes(recipe, texts.base.rows),
        ]
        for note in said:
            log.warning("%s", note)
        if (after := run.student_after()) is not None and after > last:
            log.warning("stop_after: the run is past that step already; the student in %s stays", run.model)
            last = after

        def load() -> PreTrainedModel:
            return load_teacher(source, dtype=DTYPES[recipe.precision], device=device)

        conversion = _Conversion(run, recipe, tokenizer, texts, load, progress)
        if not conversion.finished(last):
            conversion.run(last)
        if recipe.wants_control and last == len(recipe.steps) - 1:
            control = recipe.control()
            conversion.milestones.lend_teacher(out / "control")
            _convert(model, control, out / "control", corpus, device, None, progress)
            conversion.milestones.adopt_control(out / "control")
        conversion.milestones.write_results(recipe, identity, said)
    return out


class _Conversion:
    """One run in progress: the student is built up step by step."""

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        texts: Texts,
        load: Callable[[], PreTrainedModel],
        progress: bool,
    ) -> None:
        self.folder, self.recipe, self.tokenizer, self.texts = run, recipe, tokenizer, texts
        self.load, self.progress = load, progress
        self.milestones = Milestones(run, recipe, tokenizer, progress)
        self._teacher: HybridForCausalLM | None = None

    def teacher(self) -> HybridForCausalLM:
        """The frozen teacher beside the student, loaded when a step first asks for it."""
        if self._teacher is None:
            self._teacher = softmax_teacher(self.load()).eval().requires_grad_(False)
        return self._teacher

    def finished(self, last: int) -> bool:
        """Whether the student after step `last` is saved and everything up to there is measured."""
        steps = list(enumerate(self.recipe.steps[: last + 1]))
        folders = (
            self.folder.step(index, step.kind) for index, step in steps if isinstance(step, SelectStep)
        )
        chosen = all(selected(folder) is not None for folder in folders)
        names = ["teacher", *(_after(self.recipe, index) for index, _ in steps)]
        return chosen and self.folder.student_after() == last and all(map(self.milestones.measured, names))

    def run(self, last: int) -> None:
        """From the teacher to the saved student after step `last`."""
        loaded = self.load()
        self.milestones.measure("teacher", "teacher", loaded)
        model = hybridize_model(loaded, self.recipe.spec)  # the modules are the student's from here on
        del loaded
        self._calibrate(model, first=True)
        if any(layer.has_linear for layer in model.spec.layers):
            self.milestones.measure("swapped", "stage", model)
        adapted: PeftModel | None = None
        for index, step in enumerate(self.recipe.steps[: last + 1]):
            if adapted is not None:
                model, adapted = merge(adapted), None
            folder = self.folder.step(index, step.kind)
            if isinstance(step, EditStep):
                model.respec(with_window(model.spec, step.window, step.normalizer))
                self._calibrate(model)
            elif isinstance(step, SelectStep):
                self._select(model, index, folder)
            elif read_json(folder / OUTCOME) is None:
                adapted = self._train(model, step, index, folder)
            else:
                adapted = reapply(model, step, folder)
            if adapted is not None and (lora := lora_of(step)) is not None and lora.merge:
                model, adapted = merge(adapted), None
            if not any(later.needs_teacher for later in self.recipe.steps[index + 1 : last + 1]):
                self._teacher = None
            model.eval().requires_grad_(False)
            # candidates for every layer find no passkey yet, and generation with them is slow
            aligned = isinstance(step, TransferStep) and step.whole_mixers
            self.milestones.measure(_after(self.recipe, index), "stage", model, passkeys=not aligned)
        self._save(model, adapted, last)

    def _calibrate(self, model: HybridForCausalLM, first: bool = False) -> None:
        """First values that depend on data; those of output norms at the swap only."""
        rows = self.texts.base.rows
        batch = make_batch(rows, range(min(CALIBRATION_ROWS, len(rows))))
        calibrate_mass(model, batch)
        if first and layers_with_norms(model):
            calibrate_output(model, self.teacher(), batch)

    def _select(self, model: HybridForCausalLM, index: int, folder: Path) -> None:
        kept = selected(folder)
        if kept is None:
            selector = Selector(
                model, self.teacher, self.recipe, index, self.tokenizer, self.texts.base, folder
            )
            with status(self.progress) as say:
                kept = selector.run(say)
        keep_layers(model, self.teacher(), self.recipe, index, kept)

    def _train(
        self, model: HybridForCausalLM, step: TrainingStep, index: int, folder: Path
    ) -> PeftModel | None:
        seed = step_seed(self.recipe, index)
        seed_all(seed)
        text = self.texts.of(step)
        stage = make_stage(model, self.teacher, step, text, self.recipe.precision)
        aligns = stage if isinstance(stage, TeacherForced) else None
        if aligns is not None and read_json(folder / "layers.json") is None:
            write_json(folder / "layers.json", {"before": self._layer_errors(aligns)})
        with _tensor_float32(self.recipe.precision == "bf16"):
            result = train(
                stage,
                partial(self._batches, text.rows, step),
                train_config(step, self.recipe, text.rows, seed, SAVE_EVERY_S),
                folder,
                progress=self.progress,
            )
        if aligns is not None:
            layers = read_json(folder / "layers.json")
            write_json(folder / "layers.json", {**layers, "after": self._layer_errors(aligns)})
        stage.finish()
        adapted = getattr(stage, "adapted", None)
        outcome = {**asdict(result), "device": device_name(model.device)}
        write_json(folder / OUTCOME, {**outcome, "files": store(folder, model, stage, adapted)})
        return adapted

    def _layer_errors(self, stage: TeacherForced) -> list[float]:
        with status(self.progress) as say:
            return stage.layer_errors(partial(say, "measuring layers"))

    def _batches(self, rows: PackedRows, step: TrainingStep, start: int) -> Iterator[Batch]:
        first = start * step.batch.accumulation
        return batches(rows, step.batch.micro_rows, seed=self.recipe.seed, start_step=first)

    def _save(self, model: HybridForCausalLM, adapted: PeftModel | None, step: int) -> None:
        """The student after `step`, as a folder that opens by itself, and its adapter where that is not merged."""
        self.folder.student.unlink(missing_ok=True)
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        if adapted is None and self.folder.adapter.is_dir():
            shutil.rmtree(self.folder.adapter)  # an earlier step's: it is in the weights by now
        if adapted is not None:
            with atomic_folder(self.folder.adapter) as fresh, full_disk_explained(self.folder.adapter):
                adapted.save_pretrained(str(fresh))
            model = adapted.unload()
        with (
            atomic_folder(self.folder.model, bytes_needed=needed) as fresh,
            full_disk_explained(self.folder.model, needed),
        ):
            model.save_pretrained(fresh)
            self.tokenizer.save_pretrained(fresh)
        write_json(self.folder.student, {"after_step": step})


def _undecided(run: RunFolder, recipe: Recipe) -> list[int]:
    """Selections without an outcome: where a rule refuses its scores, another may be asked in the same folder. Not where a
    later step has begun, which trains what the selection kept."""

    def begun(index: int) -> bool:
        return any(
            run.step(later, step.kind).exists()
            for later, step in enumerate(recipe.steps[index + 1 :], index + 1)
        )

    return [
        index
        for index, step in enumerate(recipe.steps)
        if isinstance(step, SelectStep) and not run.finished(index, step.kind) and not begun(index)
    ]


def _check_spec(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raises ValueError where the spec, with a selection's layers as far as these are known, does not fit the model."""
    layers = len(resolve_spec(recipe.spec, config).layers)
    try:
        final = recipe.assumed_before(len(recipe.steps), layers)
    except ValueError as error:
        raise ValueError(f"select: {error}") from None
    resolve_spec(final, config)


@contextmanager
def _tensor_float32(enabled: bool) -> Iterator[None]:
    """Matrix products of float32 tensors in TF32 on CUDA, while training in bf16 only; measurements stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _last_step(recipe: Recipe, stop_after: str | None) -> int:
    if stop_after is None:
        return len(recipe.steps) - 1
    names = [step.kind for step in recipe.steps]
    if names.count(stop_after) == 1:
        return names.index(stop_after)
    if stop_after.isdigit() and int(stop_after) < len(names):
        return int(stop_after)
    allowed = ", ".join(
        f"{index} or {name}" if names.count(name) == 1 else f"{index} ({name})"
        for index, name in enumerate(names)
    )
    raise ValueError(f"stop_after is {stop_after!r}; the recipe's steps are {allowed}")


def _after(recipe: Recipe, index: int) -> str:
    """A name for the state after a step, unique in the recipe."""
    step = recipe.steps[index]
    kinds = [other.kind for other in recipe.steps]
    kind = "LoRA" if isinstance(step, FinetuneStep) and step.lora is not None else step.kind
    return f"after {kind}" if kinds.count(step.kind) == 1 else f"after {kind} ({index})"
