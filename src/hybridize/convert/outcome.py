"""What a finished step trained, kept in its folder so that it can be applied again without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from hybridize.atomic import atomic_folder, full_disk_explained, sha256_file
from hybridize.convert.finetune import attach_adapter
from hybridize.convert.run_folder import OUTCOME, read_json
from hybridize.convert.stages import AnyStage
from hybridize.models.configuration import HybridConfig
from hybridize.models.modeling import HybridForCausalLM
from hybridize.recipe import TrainingStep

if TYPE_CHECKING:
    from peft import PeftModel

TRAINED, ADAPTER = "trained.safetensors", "adapter"


def store(
    folder: Path, model: HybridForCausalLM, stage: AnyStage, adapted: PeftModel | None
) -> dict[str, str]:
    """Write what the step trained, so that it can be re-applied without training; gives the files' checksums."""
    files = []
    with full_disk_explained(folder):
        model.config.save_pretrained(folder)
        if adapted is not None:
            with atomic_folder(folder / ADAPTER) as fresh:
                adapted.save_pretrained(str(fresh))
            files += sorted((folder / ADAPTER).iterdir())
        tensors = {
            name: parameter.detach().contiguous().cpu()
            for name, parameter in stage.parameters().items()
            if "lora_" not in name
        }
        if tensors:
            save_file(tensors, folder / TRAINED)
            files.append(folder / TRAINED)
    return {file.relative_to(folder).as_posix(): sha256_file(file) for file in files}


def reapply(model: HybridForCausalLM, step: TrainingStep, folder: Path) -> PeftModel | None:
    """Put a finished step's outcome into the model again.

    Raises ValueError for a file that is missing, damaged or does not fit.
    """
    path = folder / OUTCOME
    remedy = f"remove {path} and run the same command again: the step's last checkpoint gives it anew"
    outcome = read_json(path)
    files = outcome.get("files") if isinstance(outcome, dict) else None
    if files is None:
        raise ValueError(f"{path} names no files; {remedy}")
    for name, checksum in files.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != checksum:
            raise ValueError(f"{folder / name} is missing or damaged; {remedy}")
    spec = HybridConfig.from_pretrained(folder).spec
    for layer, (now, then) in enumerate(zip(model.spec.layers, spec.layers, strict=True)):
        if [group.attention for group in now.groups] != [group.attention for group in then.groups]:
            raise ValueError(
                f"{folder} was trained with other layers on softmax than the selection keeps (layer {layer}); restore the "
                "selection's selection.json and outcome.json, or take a new run folder"
            )
    model.respec(spec)  # a schedule of windows ends with another one
    if TRAINED in files:
        if step.trains_masters:
            model.float()
        parameters = dict(model.named_parameters())
        tensors = load_file(folder / TRAINED)
        if strange := set(tensors) - set(parameters):
            raise ValueError(f"{folder / TRAINED} holds {min(strange)}, which the model has not; {remedy}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
    return attach_adapter(model, folder / ADAPTER) if (folder / ADAPTER).is_dir() else None
