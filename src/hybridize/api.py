"""The public functions: thin compositions of the layers below. `hybridize` itself re-exports them lazily."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hybridize.atomic import atomic_folder, full_disk_explained
from hybridize.convert import pipeline
from hybridize.convert.drift import drift_note
from hybridize.convert.finetune import attach_adapter
from hybridize.convert.run_folder import RunFolder, read_json
from hybridize.convert.status import Say, status
from hybridize.data import DataSpec, plain_texts
from hybridize.data.batching import held_out_batches
from hybridize.devices import choose_device
from hybridize.evals.harness import run_harness
from hybridize.evals.offline import run_offline
from hybridize.evals.suite import run_suite
from hybridize.evals.suites import expand
from hybridize.extend.window import parse_window, with_window
from hybridize.models.configuration import HybridConfig
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.teacher import load_teacher, load_tokenizer, resolve_model
from hybridize.recipe import Recipe, load_recipe
from hybridize.spec import ResolvedSpec, SeparateNormalizer, first_far_position, reach_of
from hybridize.windows import Window

log = logging.getLogger(__name__)

TASKS = ("perplexity", "passkey", "offline")
"""Tasks of our own; every other name is a suite or task of lm-eval."""
OFFLINE_SAMPLES = 50
BATCH = 4


def convert(
    model: str,
    recipe: str | Path | Recipe,
    out: str | Path,
    *,
    data: str | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    device: str | None = None,
    stop_after: str | None = None,
    progress: bool = True,
) -> Path:
    """Convert `model` by `recipe` into the run folder `out` and write its report; call again to continue.

    Args:
        model: hub id, local folder, GGUF file or alias.
        recipe: a recipe, its file, or the name of one that ships; `overrides` change it (see `load_recipe`).
        data: text in place of the recipe's source.
        device: `cpu`, `cuda`, ...; by default the GPU where there is one.
        stop_after: a step's name or number.

    Returns:
        `out`: the student is in `out/model`, the report in `out/report.html`.

    Raises:
        ValueError: naming the argument or field, before weights load where possible.
    """
    from hybridize.report.html import write_report

    changes: dict[str, Any] | list[str] = (
        list(overrides or []) if not isinstance(overrides, Mapping) else dict(overrides)
    )
    if data is not None:
        if isinstance(changes, list):
            changes.append(f"data.source={data}")
        else:
            changes["data.source"] = data
    if isinstance(recipe, Recipe):
        if changes:
            raise ValueError(
                "overrides and data need a recipe's name or file, not a Recipe object; change the object instead"
            )
        chosen = recipe
    else:
        chosen = load_recipe(recipe, changes)
    run = pipeline.convert(model, chosen, Path(out), device=device, stop_after=stop_after, progress=progress)
    if (run / "results.json").is_file():
        write_report(run)
    return run


def load(
    run_or_model: str | Path,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    window: str | Window | None = None,
    mix: float | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a run folder, a hybrid checkpoint folder, or a teacher (hub id, folder, GGUF file, alias), ready to run.

    Args:
        dtype: of the weights; by default the checkpoint's. Feature maps and mixing weights of a hybrid stay float32.
        window, mix: an edit of the spec without training (see `extend`): linear attention gains this window, such as
            `sliding:64`, whose output counts `mix` and that of the linear branch 1 - `mix`.

    Raises:
        ValueError: nothing there, or a checkpoint that lacks parameters of the model.
    """
    model, tokenizer = _load(run_or_model, device, dtype)
    if window is not None or mix is not None:
        if not isinstance(model, HybridForCausalLM):
            raise ValueError(
                f"window is {window!r}, but {run_or_model} is no hybrid: it has no linear attention"
            )
        model.respec(_edited(model.spec, window, mix))
    return model, tokenizer


def extend(
    run_or_model: str | Path, out: str | Path, *, window: str | Window, mix: float | None = None
) -> Path:
    """Write a copy of a hybrid whose linear attention has a softmax window, without training ("inference-time hybrid").

    Args:
        window: `sliding:64`, `terraced:32`, with `+sinks:4` or `+overlap` behind it, or a `Window`.
        mix: weight of the window's output, 1 - `mix` that of the linear branch; by default 0.5 for layers that were
            linear, and as it was for layers that mix already.

    Returns:
        `out`, a checkpoint folder that every verb opens.

    Raises:
        ValueError: no hybrid, no linear attention, or `out` exists.
    """
    folder = Path(out)
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"out is {str(out)!r}, which exists; name a new folder")
    model, tokenizer = load(run_or_model, device="cpu", window=window, mix=mix)
    with atomic_folder(folder) as fresh, full_disk_explained(folder):
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    return folder


def _edited(spec: ResolvedSpec, window: str | Window | None, mix: float | None) -> ResolvedSpec:
    if window is None:
        raise ValueError(f"mix is {mix}, but no window is given; name one such as sliding:64")
    if mix is not None and not 0 <= mix <= 1:
        raise ValueError(f"mix is {mix}; it must lie in 0..1")
    parsed = parse_window(window) if isinstance(window, str) else window
    return with_window(spec, parsed, SeparateNormalizer(gate=mix) if mix is not None else None)


def _load(
    run_or_model: str | Path, device: str | None, dtype: str | torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
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


@dataclass(frozen=True)
class Evaluation:
    """Plain values of an evaluation: what was evaluated, how, and the measurements."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.values


def evaluate(
    run_or_model: str | Path,
    *,
    tasks: Sequence[str] = TASKS[:2],
    mode: str = "hybrid",
    removal: str = "zero",
    scope: str = "mixed",
    texts: Sequence[str] = ("docstrings", "code"),
    lengths: Sequence[int] = (512, 1024),
    samples: int | None = None,
    include_path: str | Path | None = None,
    limit: float | None = None,
    shots: int | None = None,
    window: str | None = None,
    mix: float | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Held-out perplexity by position (rows of the longest of `lengths`), passkeys by length, tasks.

    Args:
        tasks: `perplexity`, `passkey`, `offline` (see `evals.offline`), and suites (`imbalance`, `lolcats`) or names of
            lm-eval tasks, which need the extra `eval`.
        mode, removal, scope: ablate a hybrid (DESIGN D12); a teacher has nothing to remove and takes `hybrid` only.
        samples: rows of each text (default 100), keys a length (20), questions of each offline task (50).
        include_path, limit, shots: of lm-eval: a folder of local task files, the first samples of each task only, examples
            before each question.
        window, mix: see `load`.
    """
    if not tasks:
        raise ValueError(f"tasks is empty; name some of {', '.join(TASKS)}, or tasks of lm-eval")
    harness = [task for task in tasks if task not in TASKS]
    for name in harness:
        if close := difflib.get_close_matches(name, TASKS, n=1, cutoff=0.75):
            raise ValueError(f"tasks contains {name!r}; did you mean {close[0]!r}?")
    if harness:
        expand(harness, shots)
    if not lengths or min(lengths) < 2:
        raise ValueError(f"lengths is {list(lengths)}; give at least one number of tokens, each 2 or more")
    if samples is not None and samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1")
    model, tokenizer = load(run_or_model, device=device, dtype=dtype, window=window, mix=mix)
    hybrid = model if isinstance(model, HybridForCausalLM) else None
    if hybrid is None and mode != "hybrid":
        raise ValueError(f"mode is {mode!r}, but {run_or_model} is no hybrid: there is no branch to remove")
    dtype_name = str(next(model.parameters()).dtype).removeprefix("torch.")
    values: dict[str, Any] = {"model": str(run_or_model), "dtype": dtype_name}
    values |= {"mode": mode, "removal": removal, "scope": scope}
    with ExitStack() as stack:
        say = stack.enter_context(status(progress))
        if note := drift_note(Path(run_or_model), tokenizer, say):
            log.warning("%s", note)
            values["note"] = note
        split_at = None
        if hybrid is not None:
            stack.enter_context(hybrid.override(mode, removal, scope))  # type: ignore[arg-type]
            values["effective_spec"] = hybrid.effective_spec["override"]
            split_at = first_far_position(hybrid.spec.groups)
        rows = samples or 100
        batches = {}
        for source in texts if "perplexity" in tasks else ():
            spec = DataSpec(source=source, length=max(lengths))
            batches[source] = held_out_batches(spec, tokenizer, rows, BATCH, say)
        suite = run_suite(
            model,
            tokenizer,
            batches,
            passkey_lengths=lengths if "passkey" in tasks else (),
            samples=samples or 20,
            split_at=split_at,
            on_progress=partial(say, f"measuring {run_or_model}"),
        )
        values |= suite.to_dict()
        if "offline" in tasks:
            values["offline"] = _offline(model, tokenizer, texts[0], samples or OFFLINE_SAMPLES, say)
        if harness:
            result = run_harness(
                model,
                tokenizer,
                harness,
                include_path=include_path,
                limit=limit,
                num_fewshot=shots,
                on_progress=partial(say, "lm-eval"),
            )
            values["lm_eval"] = result.to_dict()
        return Evaluation(values)


def _offline(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, samples: int, say: Say
) -> list[dict[str, Any]]:
    """Every offline task on the held-out documents of a text."""
    reach = reach_of(model.spec.groups if isinstance(model, HybridForCausalLM) else ())
    results = run_offline(
        model,
        tokenizer,
        list(plain_texts(DataSpec(source=source), "test")),
        samples=samples,
        reach_tokens=reach,
        max_length=4 * reach,
        on_progress=partial(say, "offline tasks"),
    )
    keep = ("name", "reach", "accuracy", "low", "high", "chance", "samples")
    return [{name: getattr(result, name) for name in keep} for result in results]


def demo(out: str | Path = "runs/demo", *, quick: bool = False, progress: bool = True) -> Path:
    """Convert SmolLM2-135M by the recipe `demo` and print its table; `quick` takes a few steps only."""
    from rich.console import Console

    from hybridize.report.html import render_table
    from hybridize.report.schema import load_results
    from hybridize.report.summary import stage_sentences

    few = {
        "data.length": 160,
        "transfer.tokens": 960,
        "finetune.tokens": 960,
        "evaluation.rows": 2,
        "evaluation.passkey": [],
        "evaluation.new_tokens": 8,
    }
    run = convert(
        "smollm2-135m", "demo", out, overrides=few if quick else None, device=None, progress=progress
    )
    results = load_results(run)
    console = Console()
    console.print(render_table(results))
    for sentence in stage_sentences(results):
        console.print(sentence)
    for generation in results.generations:
        console.print(
            f"\n[bold]{generation.prompt}[/bold]\n  teacher: {generation.teacher}\n  student: {generation.student}"
        )
    console.print(f"\nreport: {run / 'report.html'}    student: {run / 'model'}")
    return run
