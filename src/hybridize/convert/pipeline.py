"""Run the steps of a recipe: teacher, swap, every stage, the finished student; resumable at any moment.

The same call on the same folder continues: finished steps are re-applied from their outcome, the step under way from its
last checkpoint. A changed model, recipe or data is refused.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridize.atomic import atomic_folder, atomic_write, full_disk_explained
from hybridize.convert.calibrate import calibrate_mass
from hybridize.convert.drift import validation_rows
from hybridize.convert.finetune import FinetuneStage, merge
from hybridize.convert.measure import Milestones
from hybridize.convert.outcome import reapply, store
from hybridize.convert.run_folder import RunFolder, read_json, write_json
from hybridize.convert.status import status
from hybridize.convert.transfer import TransferStage
from hybridize.data import PackedRows, build_rows, check_tokenizer
from hybridize.data.batching import Batch, batches, make_batch
from hybridize.devices import choose_device, device_name
from hybridize.extend.window import with_window
from hybridize.models.configuration import HybridConfig
from hybridize.models.families import notes
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model, resolve_spec
from hybridize.models.teacher import (
    fingerprint,
    load_base_config,
    load_teacher,
    load_tokenizer,
    resolve_model,
)
from hybridize.recipe import Constant, Cosine, EditStep, FinetuneStep, Recipe, TrainingStep, TransferStep
from hybridize.train import TrainConfig, optim, train
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
    return _convert(model, recipe, out, _corpus_tokens(recipe), choose_device(device), stop_after, progress)


def _convert(
    model: str,
    recipe: Recipe,
    out: Path,
    corpus: int | None,
    device: torch.device,
    stop_after: str | None,
    progress: bool,
) -> Path:
    """`corpus` limits the training text in tokens; the control reads the same text as the student."""
    recipe.check_supported()
    last = _last_step(recipe, stop_after)
    source = resolve_model(model)
    config = load_base_config(source)
    if config.model_type == HybridConfig.model_type:
        raise ValueError(f"MODEL {model!r} is a hybrid already; give the pretrained model it was made from")
    resolve_spec(recipe.spec, config)
    run = RunFolder(out)
    with run.locked():
        tokenizer = load_tokenizer(source)
        check_tokenizer(tokenizer, config.vocab_size)
        with status(progress) as say:
            rows = build_rows(recipe.data, tokenizer, "train", corpus, progress=say)
            held_out = validation_rows(recipe, tokenizer, say)
        trained_by = {key: value for key, value in recipe.to_dict().items() if key != "evaluation"}
        identity = {
            "model": {"name": model, "fingerprint": fingerprint(source)},
            "recipe": trained_by,
            "data": {
                "rows": len(rows),
                "fingerprint": rows.fingerprint,
                "validation": held_out.fingerprint if held_out is not None else None,
            },
        }
        run.claim(identity)
        with atomic_write(out / "recipe.yaml", "w") as file:
            file.write(recipe.to_yaml())
        said = [*notes(config), *_epoch_notes(recipe, rows), *_far_notes(recipe, rows)]
        for note in said:
            log.warning("%s", note)
        if (after := run.student_after()) is not None and after > last:
            log.warning("stop_after: the run is past that step already; the student in %s stays", run.model)
            last = after
        conversion = _Conversion(run, recipe, tokenizer, rows, held_out, progress)
        if not conversion.finished(last):
            conversion.run(load_teacher(source, dtype=DTYPES[recipe.precision], device=device), last)
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
        rows: PackedRows,
        held_out: PackedRows | None,
        progress: bool,
    ) -> None:
        self.folder, self.recipe, self.tokenizer = run, recipe, tokenizer
        self.rows, self.held_out = rows, held_out
        self.progress = progress
        self.milestones = Milestones(run, recipe, tokenizer, progress)

    def finished(self, last: int) -> bool:
        """Whether the student after step `last` is saved and everything up to there is measured."""
        measured = all(self.milestones.measured(_after(self.recipe, index)) for index in range(last + 1))
        return self.folder.student_after() == last and self.milestones.measured("teacher") and measured

    def run(self, teacher: PreTrainedModel, last: int) -> None:
        """From the teacher (whose modules become the student's) to the saved student after step `last`."""
        self.milestones.measure("teacher", "teacher", teacher)
        model = hybridize_model(teacher, self.recipe.spec)
        self._calibrate(model)
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
            elif read_json(folder / "outcome.json") is None:
                adapted = self._train(model, step, index, folder)
            else:
                adapted = reapply(model, step, folder)
            if (
                adapted is not None
                and isinstance(step, FinetuneStep)
                and step.lora is not None
                and step.lora.merge
            ):
                model, adapted = merge(adapted), None
            model.eval().requires_grad_(False)
            self.milestones.measure(_after(self.recipe, index), "stage", model)
        self._save(model, adapted, last)

    def _calibrate(self, model: HybridForCausalLM) -> None:
        calibrate_mass(model, make_batch(self.rows, range(min(CALIBRATION_ROWS, len(self.rows)))))

    def _train(
        self, model: HybridForCausalLM, step: TrainingStep, index: int, folder: Path
    ) -> PeftModel | None:
        seed_all(_seed(self.recipe, index))
        validation = self._validation(step)
        if isinstance(step, TransferStep):
            stage: TransferStage | FinetuneStage = TransferStage(model, step, validation)
        else:
            assert isinstance(step, FinetuneStep)
            stage = FinetuneStage(model, step, validation, autocast=self.recipe.precision == "bf16")
        if isinstance(stage, TransferStage) and read_json(folder / "layers.json") is None:
            write_json(folder / "layers.json", {"before": stage.layer_errors()})
        with _tensor_float32(self.recipe.precision == "bf16"):
            result = train(
                stage,
                lambda start: self._batches(step, start),
                _train_config(step, self.recipe, self.rows, index),
                folder,
                progress=self.progress,
            )
        if isinstance(stage, TransferStage):
            write_json(
                folder / "layers.json", {**read_json(folder / "layers.json"), "after": stage.layer_errors()}
            )
        else:
            stage.finish()
        adapted = stage.adapted if isinstance(stage, FinetuneStage) else None
        outcome = {**asdict(result), "device": device_name(model.device)}
        write_json(folder / "outcome.json", {**outcome, "files": store(folder, model, stage, adapted)})
        return adapted

    def _batches(self, step: TrainingStep, start: int) -> Iterator[Batch]:
        micro = step.batch.micro_rows
        first = start * step.batch.accumulation
        return batches(self.rows, micro, seed=self.recipe.seed, start_step=first)

    def _validation(self, step: TrainingStep) -> list[Batch]:
        assert self.held_out is not None
        count, micro = min(step.validation_rows, len(self.held_out)), step.batch.micro_rows
        return [make_batch(self.held_out, range(i, min(i + micro, count))) for i in range(0, count, micro)]

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


def _train_config(step: TrainingStep, recipe: Recipe, rows: PackedRows, index: int) -> TrainConfig:
    steps = step.optimizer_steps(recipe.data.length, rows.tokens_available)
    assert steps is not None
    stopping = step.early_stopping if isinstance(step, FinetuneStep) else None
    rate: optim.Schedule
    match step.rate:
        case Cosine(cosine=(highest, lowest), warmup=warmup):
            rate = optim.Cosine(highest, final=lowest, warmup=warmup / steps)
        case Constant():
            rate = optim.Constant(step.max_lr)
        case plateau:
            rate = optim.Plateau(
                step.max_lr, factor=plateau.factor, patience=plateau.patience, final=plateau.min_lr
            )
    return TrainConfig(
        steps=steps,
        micro_batches=step.batch.accumulation,
        lr=rate,
        betas=step.betas,
        weight_decay=step.weight_decay,
        clip=step.clip,
        eval_every=step.eval_every,
        keep_best=step.keep_best,
        epoch_steps=_epoch_steps(step, recipe, rows),
        patience=stopping.patience if stopping else None,
        guard="linear_gain" if stopping and stopping.min_gain > 0 else None,
        guard_share=stopping.min_gain if stopping and stopping.min_gain > 0 else None,
        save_every_s=SAVE_EVERY_S,
        seed=_seed(recipe, index),
    )


def _epoch_steps(step: TrainingStep, recipe: Recipe, rows: PackedRows) -> int | None:
    """Optimizer steps of an epoch where a schedule counts in epochs; None elsewhere."""
    dropout = step.window_dropout if isinstance(step, FinetuneStep) else None
    if dropout is None:
        return None
    tokens = dropout.epoch or rows.tokens_available
    return max(1, math.ceil(tokens / (step.batch.rows * recipe.data.length)))


def _corpus_tokens(recipe: Recipe) -> int | None:
    """How much training text the steps need; None (all there is) where one counts in epochs."""
    budgets = [step.tokens for step in recipe.training_steps]
    if any(tokens is None for tokens in budgets):
        return None
    return max((tokens for tokens in budgets if tokens is not None), default=recipe.data.length)


def _epoch_notes(recipe: Recipe, rows: PackedRows) -> list[str]:
    """One sentence for every step whose budget is larger than the text."""
    return [
        f"steps[{index}].{step.kind}: {step.tokens:,} tokens are {rows.epochs(step.tokens):.3g} epochs "
        f"of the {rows.tokens_available:,} tokens that {recipe.data.source} has"
        for index, step in enumerate(recipe.steps)
        if isinstance(step, TrainingStep)
        and step.tokens is not None
        and step.tokens > max(rows.tokens_available, recipe.data.length)
    ]


def _far_notes(recipe: Recipe, rows: PackedRows) -> list[str]:
    """How much of the text has a far key. Raises ValueError where none has: the linear branch would never train."""
    first = recipe.first_far_position
    if not recipe.training_steps or not first:
        return []
    share = rows.share_from(first)
    if share == 0:
        raise ValueError(
            f"data.source {recipe.data.source!r}: no document has a token at position {first} or later, where the linear branch"
            " first has a key; give longer documents, or data.documents: joined"
        )
    return [
        f"{share:.0%} of the training tokens stand at position {first} or later, where the linear branch has keys"
    ]


def _seed(recipe: Recipe, index: int) -> int:
    """The same for the n-th step of a kind, whatever stands between: a control draws what its student drew."""
    kind = recipe.steps[index].kind
    earlier = sum(step.kind == kind for step in recipe.steps[:index])
    return recipe.seed + 2 * earlier + (kind == "finetune")


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
