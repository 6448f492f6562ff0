"""The public functions: thin compositions of the layers below. `hybridize` itself re-exports them lazily."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridize.atomic import atomic_folder, full_disk_explained
from hybridize.convert import pipeline
from hybridize.convert.drift import drift_note
from hybridize.convert.run_folder import versions, write_json
from hybridize.convert.status import status
from hybridize.evals.length_tricks import positions_note, with_longer_positions
from hybridize.evals.questions import TASKS, Questions
from hybridize.extend.logit_scale import parse_bases, parse_logit_scale, search_on_text, with_logit_scale
from hybridize.extend.window import parse_window, with_window
from hybridize.models.modeling import HybridForCausalLM
from hybridize.opening import open_model
from hybridize.recipe import Recipe, load_recipe
from hybridize.spec import ResolvedSpec, SeparateNormalizer, first_far_position
from hybridize.windows import Window

log = logging.getLogger(__name__)


def convert(
    model: str,
    recipe: str | Path | Mapping[str, Any] | Recipe,
    out: str | Path,
    *,
    data: str | Path | Sequence[str] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    device: str | None = None,
    stop_after: str | None = None,
    progress: bool = True,
) -> Path:
    """Convert `model` by `recipe` into the run folder `out` and write its report; call again to continue.

    Args:
        model: hub id, local folder, GGUF file or alias.
        recipe: a recipe, its file, the name of one that ships, or plain data; `overrides` change it (see `load_recipe`).
        data: text, or several, in place of the recipe's source.
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
        source = _source(data)
        if isinstance(changes, list):
            changes.append(f"data.source={json.dumps(source, ensure_ascii=False)}")
        else:
            changes["data.source"] = source
    if isinstance(recipe, Recipe):
        if changes:
            raise ValueError(
                "overrides and data need a recipe's name, file or plain data, not a Recipe object; change the object instead"
            )
        chosen = recipe
    else:
        chosen = load_recipe(recipe, changes)
    run = pipeline.convert(model, chosen, Path(out), device=device, stop_after=stop_after, progress=progress)
    if (run / "results.json").is_file():
        write_report(run)
    return run


def _source(data: str | Path | Sequence[str]) -> str | list[str]:
    """A text or a list of them; `[a, b]` in one string is a list, as on the command line, unless there is a file of that name."""
    if not isinstance(data, str | Path):
        return list(data)
    name = str(data)
    if not (name[:1] == "[" and name[-1:] == "]") or Path(name).exists():
        return name
    try:
        listed = yaml.safe_load(name)
    except yaml.YAMLError as error:
        raise ValueError(f"data is {name!r}, which is no list of texts; write [one, other]") from error
    return listed if isinstance(listed, list) else name


def load(
    run_or_model: str | Path,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    window: str | Window | None = None,
    mix: float | None = None,
    logit_scale: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a run folder, a hybrid checkpoint folder, or a teacher (hub id, folder, GGUF file, alias), ready to run.

    Args:
        dtype: of the weights; by default the checkpoint's. Feature maps and mixing weights of a hybrid stay float32.
        window, mix, logit_scale: edits of a hybrid's spec without training; see `extend`.

    Raises:
        ValueError: nothing there, a checkpoint that lacks parameters of the model, or an edit that does not fit.
    """
    edits = _edits(window, mix, logit_scale)
    model, tokenizer = open_model(run_or_model, device, dtype)
    if edits:
        if not isinstance(model, HybridForCausalLM):
            raise ValueError(
                f"{' and '.join(edits)}: {run_or_model} is no hybrid; there is no spec to be edited"
            )
        spec = model.spec
        for edit in edits.values():
            spec = edit(spec)
        model.respec(spec)
    return model, tokenizer


def extend(
    run_or_model: str | Path,
    out: str | Path,
    *,
    window: str | Window | None = None,
    mix: float | None = None,
    logit_scale: str | None = None,
    search_bases: str | Sequence[float] = (),
    text: str = "docstrings",
    length: int = 8192,
    rows: int = 16,
    device: str | None = None,
    progress: bool = True,
) -> Path:
    """Write a copy of a hybrid that computes something else, without training; `extend.json` in it says what was done.

    Args:
        window: a softmax window for linear attention ("inference-time hybrid"): `sliding:64`, `terraced:32`, with
            `+sinks:4` or `+overlap` behind it, or a `Window`.
        mix: weight of the window's output, 1 - `mix` that of the linear branch; by default 0.5 for layers that were
            linear, and as it was for layers that mix already.
        logit_scale: a factor on q of full softmax attention: see `parse_logit_scale`.
        search_bases: bases of `log_position`, of which the one with the lowest held-out loss (or no scale, where that reads
            best) is kept, see `search_base`; as text, `100,300,500`, with `+everywhere` behind it.
        text, length, rows: what the search reads: the validation split of a text, documents joined to rows of `length`
            tokens. device: where it runs.

    Returns:
        `out`, a checkpoint folder that every verb opens.

    Raises:
        ValueError: nothing to change, no hybrid, no attention of the kind, or `out` exists.
    """
    folder = Path(out)
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"out is {str(out)!r}, which exists; name a new folder")
    bases, everywhere = parse_bases(search_bases)
    if bases and logit_scale is not None:
        raise ValueError("logit_scale and search_bases exclude each other; the search finds the scale")
    if not bases and window is None and mix is None and logit_scale is None:
        raise ValueError("nothing to change: give a window, a logit_scale or search_bases")
    model, tokenizer = load(
        run_or_model, device=device if bases else "cpu", window=window, mix=mix, logit_scale=logit_scale
    )
    if bases and not isinstance(model, HybridForCausalLM):
        raise ValueError(
            f"search_bases, but {str(run_or_model)!r} is no hybrid; give a converted run or checkpoint"
        )
    record: dict[str, Any] = {"source": str(run_or_model), "window": str(window) if window else None}
    record |= {"mix": mix, "logit_scale": logit_scale}
    if bases:
        with status(progress) as say:
            found = search_on_text(model, tokenizer, bases, everywhere, text, length, rows, say)
        if note := positions_note(model.config, length):
            log.warning("%s", note)
            found["length_note"] = note
        record |= {"logit_scale": found["best"], "search": found}
        model.respec(_edits(None, None, found["best"])["logit_scale"](model.spec))  # type: ignore[operator, arg-type]
    with atomic_folder(folder) as fresh, full_disk_explained(folder):
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        write_json(fresh / "extend.json", record | {"versions": versions()})
    return folder


def _edits(
    window: str | Window | None, mix: float | None, logit_scale: str | None
) -> dict[str, Callable[[ResolvedSpec], ResolvedSpec]]:
    """Edits of a spec by the argument that asks for them; what cannot be read is refused before anything is loaded."""
    edits: dict[str, Callable[[ResolvedSpec], ResolvedSpec]] = {}
    if window is None and mix is not None:
        raise ValueError(f"mix is {mix}, but no window is given; name one such as sliding:64")
    if mix is not None and not 0 <= mix <= 1:
        raise ValueError(f"mix is {mix}; it must lie in 0..1")
    if window is not None:
        parsed = parse_window(window) if isinstance(window, str) else window
        normalizer = SeparateNormalizer(gate=mix) if mix is not None else None
        edits["window"] = lambda spec: with_window(spec, parsed, normalizer)
    if logit_scale is not None:
        scale, everywhere = parse_logit_scale(logit_scale)
        edits["logit_scale"] = lambda spec: with_logit_scale(spec, scale, everywhere)
    return edits


@dataclass(frozen=True)
class Evaluation:
    """Plain values of an evaluation: what was evaluated, how, and the measurements."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.values


def evaluate(
    run_or_model: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    mode: str = "hybrid",
    removal: str = "zero",
    scope: str = "mixed",
    texts: Sequence[str] = ("docstrings", "code"),
    lengths: Sequence[int] = (512, 1024),
    samples: int | None = None,
    include_path: str | Path | None = None,
    limit: float | None = None,
    shots: int | None = None,
    ruler: Sequence[str] = (),
    ruler_scorer: str = "nvidia",
    essays: str | Path | None = None,
    chat: bool = False,
    batch_tokens: int | None = None,
    records: str | Path | None = None,
    length_trick: str = "none",
    window: str | None = None,
    mix: float | None = None,
    logit_scale: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Held-out perplexity by position (rows of the longest of `lengths`), passkeys by length, tasks, RULER.

    Args:
        tasks: `perplexity`, `passkey`, `offline` (see `evals.offline`), and suites (`imbalance`, `lolcats`) or names of
            lm-eval tasks, which need the extra `eval`. By default perplexity and passkey, or none where `ruler` is given.
        mode, removal, scope: ablate a hybrid (DESIGN D12); a teacher has nothing to remove and takes `hybrid` only.
        samples: rows of each text (default 100), keys a length (20), questions of each offline task (50) and of each RULER
            task and length (40).
        include_path, limit, shots: of lm-eval: a folder of local task files, the first samples of each task only, examples
            before each question.
        ruler, ruler_scorer, essays, chat, batch_tokens: RULER tasks and groups (`niah`, `vt`, ...) and how they are asked: see
            `evals.ruler.run_ruler`.
        records: folder of RULER's answers, from which a stopped evaluation goes on; by default `ruler` in a hybrid's
            folder, and none for teachers.
        length_trick: positions of a teacher, or a control, up to the longest of `lengths`: `yarn` or `dynamic_ntk`, see
            `evals.length_tricks`.
        window, mix, logit_scale: see `extend`.
    """
    if tasks is None:
        tasks = () if ruler else TASKS[:2]
    questions = Questions(
        tasks=tasks,
        texts=texts,
        lengths=lengths,
        samples=samples,
        include_path=include_path,
        limit=limit,
        shots=shots,
        ruler=ruler,
        ruler_scorer=ruler_scorer,  # type: ignore[arg-type]
        essays=essays,
        chat=chat,
        batch_tokens=batch_tokens,
        records=records,
    )
    edits = {"window": window, "mix": mix, "logit_scale": logit_scale}
    model, tokenizer = load(run_or_model, device=device, dtype=dtype, **edits)  # type: ignore[arg-type]
    hybrid = model if isinstance(model, HybridForCausalLM) else None
    if hybrid is None and mode != "hybrid":
        raise ValueError(f"mode is {mode!r}, but {run_or_model} is no hybrid: there is no branch to remove")
    if hybrid is not None and length_trick != "none":
        if not hybrid.is_a_control:
            raise ValueError(
                f"length_trick is {length_trick!r}, but {run_or_model} is a hybrid, whose spec says what its positions are; "
                "tricks are for teachers and controls"
            )
        if mode != "hybrid":
            raise ValueError(
                f"mode is {mode!r} with length_trick {length_trick!r}: a control has no branch to remove"
            )
    folder = Path(run_or_model) / "ruler" if hybrid is not None else None
    model, loaded = with_longer_positions(model, length_trick, max(lengths)), model  # type: ignore[arg-type]
    stretched = model is not loaded
    hybrid = None if stretched else hybrid
    dtype_name = str(next(model.parameters()).dtype).removeprefix("torch.")
    values: dict[str, Any] = {"model": str(run_or_model), "dtype": dtype_name}
    values |= {"mode": mode, "removal": removal, "scope": scope}
    values |= {name: value for name, value in edits.items() if value is not None}
    if stretched:
        values["length_trick"] = length_trick
    with ExitStack() as stack:
        say = stack.enter_context(status(progress))
        if note := drift_note(Path(run_or_model), tokenizer, say):
            log.warning("%s", note)
            values["note"] = note
        if length_trick != "none" and not stretched:
            log.warning(
                "length_trick %s: all lengths are within the model's positions; nothing is stretched",
                length_trick,
            )
        if note := positions_note(model.config, max(lengths)):
            log.warning("%s", note)
            values["length_note"] = note
        split_at = None
        if hybrid is not None:
            if mode != "hybrid" and scope == "mixed" and not any(mixer.mixed for mixer in hybrid.mixers):
                raise ValueError(
                    f"mode is {mode!r} with scope 'mixed', which concerns layers with a softmax and a linear branch; this model "
                    "has none: give scope 'all' (--scope all) to remove whole layers"
                )
            stack.enter_context(hybrid.override(mode, removal, scope))  # type: ignore[arg-type]
            values["effective_spec"] = hybrid.effective_spec["override"]
            split_at = first_far_position(hybrid.spec.groups)
        values |= questions.ask(model, tokenizer, split_at=split_at, folder=folder, say=say)
        return Evaluation(values)


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
