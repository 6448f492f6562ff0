"""What a user names as a model, opened: a run folder, a hybrid checkpoint, or a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hybridize.convert.finetune import attach_adapter
from hybridize.convert.run_folder import RunFolder, read_json
from hybridize.devices import choose_device
from hybridize.models.configuration import HybridConfig
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.teacher import load_teacher, load_tokenizer, resolve_model


def open_model(
    run_or_model: str | Path, device: str | None, dtype: str | torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on its device and in eval mode, and its tokenizer. Raises ValueError as `hybridize.load` does."""
    target = choose_device(device)
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; allowed are float32, bfloat16, float16")
    folder = Path(run_or_model)
    if (folder / "run.json").is_file():
        run = RunFolder(folder)
        if not (run.model / "config.json").is_file():
            raise ValueError(
                f"{folder} has no finished student yet; run the same convert command to continue it"
            )
        model, tokenizer = _load_hybrid(run.model, wanted), AutoTokenizer.from_pretrained(run.model)
        if run.adapter.is_dir():
            with _one_line(run.adapter):
                attach_adapter(model, run.adapter)
        return model.to(target).eval(), tokenizer  # type: ignore[arg-type]
    config = read_json(folder / "config.json") if folder.is_dir() else None
    if config is not None and config.get("model_type") == HybridConfig.model_type:
        return _load_hybrid(folder, wanted).to(target).eval(), AutoTokenizer.from_pretrained(folder)  # type: ignore[arg-type]
    source = resolve_model(str(run_or_model))
    return load_teacher(source, dtype=wanted or torch.float32, device=target), load_tokenizer(source)


def _load_hybrid(folder: Path, dtype: torch.dtype | None) -> HybridForCausalLM:
    with _one_line(folder):
        model: HybridForCausalLM = HybridForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    return model


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """What readers of damaged weights raise as a ValueError that names the folder."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{folder} cannot be loaded: {first}; in a run folder, remove {folder.name} and student.json there and run "
            "the same convert command to have it written again"
        ) from error
