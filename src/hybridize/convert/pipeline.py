"""Run the steps of a recipe: teacher, swap, every stage, the finished student; resumable at any moment.

The same call on the same folder continues: finished steps are re-applied from their outcome, the step under way from its
last checkpoint. A changed model, recipe or data is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridize.atomic import atomic_folder, full_disk_explained, sha256_file
from hybridize.convert.finetune import FinetuneStage, attach_adapter, merge
from hybridize.convert.measure import Milestones
from hybridize.convert.run_folder import RunFolder, read_json, write_json
from hybridize.convert.transfer import TransferStage
from hybridize.data import PackedRows, build_rows, check_tokenizer
from hybridize.data.batching import Batch, batches, make_batch
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
from hybridize.recipe import Constant, Cosine, FinetuneStep, Recipe, TrainingStep, TransferStep
from hybridize.train import TrainConfig, optim, train
from hybridize.train.process import seed_all

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

TRAINED = "trained.safetensors"
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
    recipe.check_supported()
    last = _last_step(recipe, stop_after)
    source = resolve_model(model)
    config = load_base_config(source)
    resolve_spec(recipe.spec, config)
    for note in notes(config):
        log.warning("%s", note)
    run = RunFolder(out)
    with run.locked():
        tokenizer = load_tokenizer(source)
        check_tokenizer(tokenizer, config.vocab_size)
        most = max((_tokens(step, recipe) or 0 for step in recipe.steps), default=0)
        rows = build_rows(recipe.data, tokenizer, "train", most or None)
        trained_by = {key: value for key, value in recipe.to_dict().items() if key != "evaluation"}
        identity = {
            "model": {"name": model, "fingerprint": fingerprint(source)},
            "recipe": trained_by,
            "data": {"rows": len(rows), "fingerprint": rows.fingerprint},
        }
        run.claim(identity)
        (out / "recipe.yaml").write_text(recipe.to_yaml(), "utf-8")
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if target.type == "cuda":
            torch.set_float32_matmul_precision("high")
        teacher = load_teacher(source, dtype=DTYPES[recipe.precision], device=str(target))
        conversion = _Conversion(run, recipe, tokenizer, rows, teacher, progress)
        conversion.run(last)
        if recipe.evaluation is not None and recipe.evaluation.control:
            control = recipe.control()
            conversion.milestones.lend_teacher(out / "control")
            convert(model, control, out / "control", device=device, stop_after=None, progress=progress)
            conversion.milestones.adopt_control(out / "control")
        conversion.milestones.write_results(recipe, identity)
    return out


class _Conversion:
    """One run in progress: the student is built up step by step."""

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        rows: PackedRows,
        teacher: PreTrainedModel,
        progress: bool,
    ) -> None:
        self.folder, self.recipe, self.tokenizer, self.rows = run, recipe, tokenizer, rows
        self.teacher: PreTrainedModel | None = teacher
        self.progress = progress
        self.milestones = Milestones(run, recipe, tokenizer)

    def run(self, last: int) -> None:
        assert self.teacher is not None
        self.milestones.measure("teacher", "teacher", self.teacher)
        model = hybridize_model(self.teacher, self.recipe.spec)
        self.teacher = None  # its modules are the student's now
        if any(layer.has_linear for layer in model.spec.layers):
            self.milestones.measure("swapped", "stage", model)
        adapted: PeftModel | None = None
        for index, step in enumerate(self.recipe.steps[: last + 1]):
            if adapted is not None:
                model, adapted = merge(adapted), None
            folder = self.folder.step(index, step.kind)
            if read_json(folder / "outcome.json") is None:
                adapted = self._train(model, step, index, folder)
            else:
                adapted = _reapply(model, step, folder)
            if (
                adapted is not None
                and isinstance(step, FinetuneStep)
                and step.lora is not None
                and step.lora.merge
            ):
                model, adapted = merge(adapted), None
            model.eval().requires_grad_(False)
            self.milestones.measure(_after(self.recipe, index), "stage", model)
        self._save(model, adapted)

    def _train(
        self, model: HybridForCausalLM, step: TrainingStep, index: int, folder: Path
    ) -> PeftModel | None:
        seed_all(self.recipe.seed + index)
        validation = self._validation(step)
        if isinstance(step, TransferStep):
            stage: TransferStage | FinetuneStage = TransferStage(model, step, validation)
        else:
            assert isinstance(step, FinetuneStep)
            stage = FinetuneStage(model, step, validation, autocast=self.recipe.precision == "bf16")
        if isinstance(stage, TransferStage) and read_json(folder / "layers.json") is None:
            write_json(folder / "layers.json", {"before": stage.layer_errors()})
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
        _store(folder, model, stage, adapted)
        write_json(folder / "outcome.json", {**asdict(result), "device": _device_name(model.device)})
        return adapted

    def _batches(self, step: TrainingStep, start: int) -> Iterator[Batch]:
        micro = step.batch.micro_rows
        first = start * step.batch.accumulation
        return batches(self.rows, micro, seed=self.recipe.seed, start_step=first)

    def _validation(self, step: TrainingStep) -> list[Batch]:
        wanted = step.validation_rows
        rows = build_rows(self.recipe.data, self.tokenizer, "validation", wanted * self.recipe.data.length)
        count, micro = min(wanted, len(rows)), step.batch.micro_rows
        return [make_batch(rows, range(i, min(i + micro, count))) for i in range(0, count, micro)]

    def _save(self, model: HybridForCausalLM, adapted: PeftModel | None) -> None:
        """The student as it stands, as a folder that opens by itself."""
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
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


def _store(
    folder: Path, model: HybridForCausalLM, stage: TransferStage | FinetuneStage, adapted: PeftModel | None
) -> None:
    """What the step trained, so that it can be re-applied without training."""
    with full_disk_explained(folder):
        model.config.save_pretrained(folder)
        if adapted is not None:
            with atomic_folder(folder / "adapter") as fresh:
                adapted.save_pretrained(str(fresh))
        tensors = {
            name: parameter.detach().contiguous().cpu()
            for name, parameter in stage.parameters().items()
            if "lora_" not in name
        }
        if isinstance(stage, FinetuneStage) and adapted is None:
            tensors = {name: p.detach().contiguous().cpu() for name, p in model.named_parameters()}
        if tensors:
            save_file(tensors, folder / TRAINED)
            write_json(folder / "trained.json", {"sha256": sha256_file(folder / TRAINED)})


def _reapply(model: HybridForCausalLM, step: TrainingStep, folder: Path) -> PeftModel | None:
    """Put a finished step's outcome into the model again. Raises ValueError for a damaged file."""
    if (folder / TRAINED).is_file():
        if sha256_file(folder / TRAINED) != read_json(folder / "trained.json")["sha256"]:
            raise ValueError(f"{folder / TRAINED} is damaged; remove {folder} to train this step again")
        tensors = load_file(folder / TRAINED)
        if isinstance(step, FinetuneStep) and step.full:
            model.float()
        missing = set(tensors) - set(dict(model.named_parameters()))
        if missing:
            raise ValueError(f"{folder / TRAINED} holds {min(missing)}, which the model has not")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
    return attach_adapter(model, folder / "adapter") if (folder / "adapter").is_dir() else None


def _train_config(step: TrainingStep, recipe: Recipe, rows: PackedRows, index: int) -> TrainConfig:
    steps = step.optimizer_steps(recipe.data.length, rows.tokens_available)
    assert steps is not None
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
        save_every_s=60.0,
        seed=recipe.seed + index,
    )


def _tokens(step: TrainingStep, recipe: Recipe) -> int | None:
    return step.tokens if step.epochs is None else None


def _last_step(recipe: Recipe, stop_after: str | None) -> int:
    if stop_after is None:
        return len(recipe.steps) - 1
    names = [step.kind for step in recipe.steps]
    if stop_after in names:
        return names.index(stop_after)
    if stop_after.isdigit() and int(stop_after) < len(names):
        return int(stop_after)
    allowed = ", ".join(f"{index} or {name}" for index, name in enumerate(names))
    raise ValueError(f"stop_after is {stop_after!r}; the recipe's steps are {allowed}")


def _after(recipe: Recipe, index: int) -> str:
    """A name for the state after a step, unique in the recipe."""
    step = recipe.steps[index]
    kinds = [other.kind for other in recipe.steps]
    kind = "LoRA" if isinstance(step, FinetuneStep) and step.lora is not None else step.kind
    return f"after {kind}" if kinds.count(step.kind) == 1 else f"after {kind} ({index})"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
