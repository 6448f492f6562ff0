"""A recipe's `select` step: the scores it asks for, the layers they choose, and how both are kept in the step's folder.

steps/1-select/scores.jsonl     of a sweep, a line a layer; a sweep that was stopped goes on with it
steps/1-select/selection.json   rule, scores, ranking and kept layers (see hybridize.select.result)
steps/1-select/outcome.json     what it cost; written last
"""

from __future__ import annotations

import copy
import itertools
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hybridize.atomic import sha256_file
from hybridize.convert.distill import DistillStage
from hybridize.convert.run_folder import OUTCOME, RunFolder, read_json, write_json
from hybridize.convert.stages import Teacher, train_config
from hybridize.convert.status import Say
from hybridize.convert.texts import Text
from hybridize.data import plain_texts
from hybridize.data.batching import Batch, batches
from hybridize.devices import device_name
from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import replace_layers, resolve_spec
from hybridize.recipe import DistillStep, KnowledgeProbe, RecallProbe, Recipe, SelectStep
from hybridize.select import ScoreTable, Selection, choose, load_scores
from hybridize.train import train

SELECTION = "selection.json"
NEVER = 1e9
DOCUMENTS = 5000
"""Held-out documents that the cloze questions are taken from; a hub dataset has no end to wait for."""


def check_probes(recipe: Recipe, run: RunFolder, config: PreTrainedConfig) -> None:
    """Refuse what a selection still to be made would refuse for certain, before anything trains: lm-eval tasks that cannot
    be had, lengths beyond the teacher's positions, stored scores that are missing, of another model, or not to be ranked."""
    for index, step in enumerate(recipe.steps):
        if not isinstance(step, SelectStep) or step.rule not in ("halo", "jet"):
            continue
        if run.finished(index, step.kind):
            continue
        try:
            _check_probe(step, config)
        except ValueError as error:
            raise ValueError(f"steps[{index}].select: {error}") from error


def _choose(step: SelectStep, layers: int, scores: ScoreTable | Path | None) -> Selection:
    """What the step's rule makes of the scores."""
    return choose(
        step.rule,
        layers,
        step.keep,
        scores=scores,
        given=step.layers,
        cap=step.cap,
        floor=step.floor,
        spread=step.spread,
    )


def _check_probe(step: SelectStep, config: PreTrainedConfig) -> None:
    if step.scores is not None:
        _choose(step, config.num_hidden_layers, Path(step.scores).expanduser())
        return
    positions = config.max_position_embeddings
    if step.recall.lengths is not None and max(step.recall.lengths) > positions:
        raise ValueError(
            f"recall.lengths contains {max(step.recall.lengths)}; the teacher has {positions} positions"
        )
    if tasks := [*(step.recall.lm_eval or ()), *(step.knowledge.lm_eval or ())]:
        from hybridize.evals.harness import check_tasks

        check_tasks(tuple(tasks))


def selected(folder: Path) -> list[int] | None:
    """The layers that a finished selection keeps; None where there is none. Raises ValueError for a damaged one."""
    outcome = read_json(folder / OUTCOME)
    if outcome is None:
        return None
    path = folder / SELECTION
    if not path.is_file() or sha256_file(path) != outcome.get("files", {}).get(SELECTION):
        raise ValueError(
            f"{path} is missing or damaged; remove {folder / OUTCOME} and run the same command again: the scores give it anew"
        )
    kept: list[int] = read_json(path)["kept"]
    return kept


def keep_layers(
    model: HybridForCausalLM, teacher: HybridForCausalLM, recipe: Recipe, index: int, kept: list[int]
) -> None:
    """Make the chosen layers of `model` compute the spec's `kept`, from the teacher's weights."""
    spec = resolve_spec(recipe.spec_before(index).with_kept(kept), model.config.base_config())
    replace_layers(model, teacher, spec)
    model.eval().requires_grad_(False)


class Selector:
    """One selection in progress."""

    def __init__(
        self,
        model: HybridForCausalLM,
        teacher: Teacher,
        recipe: Recipe,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        text: Text,
        folder: Path,
    ) -> None:
        step = recipe.steps[index]
        assert isinstance(step, SelectStep)
        self.model, self.teacher, self.recipe, self.step = model, teacher, recipe, step
        self.tokenizer, self.text, self.folder, self.index = tokenizer, text, folder, index

    def run(self, say: Say) -> list[int]:
        """Measure what the rule needs, choose, and write it down. Gives the layers to keep.

        Raises ValueError where the rule refuses the scores; these stay in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        scores = self._scores(say)
        step, layers = self.step, len(self.model.spec.layers)
        try:
            chosen = _choose(step, layers, scores)
        except ValueError as error:
            raise ValueError(
                f"steps[{self.index}].select: {error}; a select that has not chosen may be changed, and the same command goes on"
            ) from error
        self._write(chosen, time.monotonic() - began)
        return list(chosen.kept)

    def _write(self, chosen: Selection, seconds: float) -> None:
        chosen.save(self.folder / SELECTION)
        outcome: dict[str, Any] = {
            "kept": list(chosen.kept),
            "seconds": seconds,
            "tokens": 0,
            "device": device_name(self.model.device),
            "peak_memory_bytes": None,
            "files": {SELECTION: sha256_file(self.folder / SELECTION)},
        }
        write_json(self.folder / OUTCOME, outcome)

    def _scores(self, say: Say) -> ScoreTable | None:
        if self.step.rule in ("uniform", "tail", "given"):
            return None
        if self.step.scores is not None:
            return load_scores(Path(self.step.scores).expanduser())
        return self._kl_losses(say) if self.step.rule == "kl" else self._sweep(say)

    def _sweep(self, say: Say) -> ScoreTable:
        from hybridize.select.sweep import sweep

        teacher = self.teacher()
        candidates = [as_candidate(mixer, teacher) for mixer in self.model.mixers]
        say("making the samples of the selection", 0, 0)
        recall, knowledge = self._recall(self.step.recall, teacher), self._knowledge(self.step.knowledge)
        progress = partial(say, "scoring one replaced layer at a time")
        # a changed probe starts anew: scores of another one say nothing
        return sweep(teacher, candidates, recall, knowledge, self.folder, restart=True, progress=progress)

    def _recall(self, asked: RecallProbe, teacher: HybridForCausalLM) -> Any:
        from hybridize.select import scores

        if asked.lm_eval is not None:
            return scores.scores_from_harness(self.tokenizer, asked.lm_eval, limit=asked.samples)
        options: dict[str, Any] = {"tasks": asked.tasks} if asked.tasks is not None else {}
        positions = teacher.config.max_position_embeddings
        return scores.recall_probe(
            self.tokenizer, positions=positions, lengths=asked.lengths, samples=asked.samples, **options
        )

    def _knowledge(self, asked: KnowledgeProbe) -> Any:
        from hybridize.select import scores

        if asked.lm_eval is not None:
            return scores.scores_from_harness(self.tokenizer, asked.lm_eval, limit=asked.samples)
        options: dict[str, Any] = {"tasks": asked.tasks} if asked.tasks is not None else {}
        # of several texts the first, since the others may hold little to know; what is held out for the test decides nothing
        first, *_ = self.recipe.data.by_source().values()
        documents = [*itertools.islice(plain_texts(first, "validation"), DOCUMENTS)] or None
        return scores.knowledge_probe(self.tokenizer, documents=documents, samples=asked.samples, **options)

    def _kl_losses(self, say: Say) -> ScoreTable:
        from hybridize.select.sweep import kl_sweep

        assert self.step.distill is not None
        self.model.float()
        self.before = self.model.spec
        layers = [copy.deepcopy(mixer).float() for mixer in self.teacher().mixers]
        settings = {
            "step": self.step.distill.model_dump(mode="json"),
            "text": self.text.rows.fingerprint,
            "seed": self.recipe.seed,
        }
        return kl_sweep(
            self.model,
            layers,
            partial(self._distill, self.step.distill),
            self.folder,
            settings=settings,
            restart=True,
            progress=partial(say, "distilling with softmax in one layer at a time"),
        )

    def _distill(self, step: DistillStep, model: HybridForCausalLM) -> float:
        """Train as the recipe says and give the final validation loss; nothing of it stays on the disk."""
        pairs = zip(model.spec.layers, self.before.layers, strict=True)
        restored = next((str(layer) for layer, (now, before) in enumerate(pairs) if now != before), "none")
        folder = self.folder / f"layer-{restored}"
        autocast = self.recipe.precision == "bf16"
        stage = DistillStage(model, self.teacher(), step, self.text.validation(step), autocast=autocast)
        if step.compile:
            stage.compile(regular=self.text.regular)
        config = train_config(step, self.recipe, self.text.rows, self.recipe.seed, NEVER)
        config.keep_best, config.tensorboard = False, False
        config.eval_every = config.steps
        result = train(stage, partial(self._batches, step), config, folder, progress=False)
        stage.finish()
        shutil.rmtree(folder, ignore_errors=True)
        assert result.final_metric is not None
        return result.final_metric

    def _batches(self, step: DistillStep, start: int) -> Iterator[Batch]:
        first = start * step.batch.accumulation
        return batches(self.text.rows, step.batch.micro_rows, seed=self.recipe.seed, start_step=first)


def as_candidate(mixer: TokenMixer, teacher: HybridForCausalLM) -> TokenMixer:
    """A copy of a student's layer that runs inside the teacher: in its dtype, but for the parts that are float32 anywhere."""
    copied = copy.deepcopy(mixer).requires_grad_(False).eval()
    exact = teacher._keep_in_fp32_modules_strict or set()
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if not exact & set(name.split(".")):
                parameter.data = parameter.data.to(teacher.dtype)
    return copied
