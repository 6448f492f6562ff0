"""One diagnosis: every measurement on one model, in an order in which each feeds the next, and the verdict.

The outcome is plain data in the schema of `hybridize.report.diagnosis.RunDiagnosis`, which is written down there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from hybridize.data.batching import first_rows
from hybridize.devices import device_name
from hybridize.evals.harness import run_harness
from hybridize.evals.offline import run_offline
from hybridize.evals.suite import ask_passkeys
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model, softmax_teacher
from hybridize.ops.types import Removal
from hybridize.plan.bytes import softmax_spec, state_bytes
from hybridize.probes.branches import Removed, branch_statistics, loss_rises
from hybridize.probes.controls import SINKS, window_control, window_sizes
from hybridize.probes.entries import (
    Measured,
    Points,
    answers,
    describe_spec,
    far_tokens,
    need_entry,
    plain_estimate,
    points,
    text_entry,
    verdict_entry,
)
from hybridize.probes.need import Need, measure_need
from hybridize.probes.token_losses import Estimate, TokenLosses, token_losses
from hybridize.probes.verdict import Evidence, Judgement, judge, not_applicable
from hybridize.spec import ResolvedSpec, reach_of

Say = Callable[[str, int, int], None]
STATE_LENGTHS = (1024, 65536)
REMOVAL: Removal = "renormalize"
"""How single layers and heads are removed: the window's weights then sum to 1, so that only information is taken away."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    tasks: samples of each offline task (0: none). harness: lm-eval suites or tasks, with local files from `include_path` and
        `limit` samples each. layer_rows, head_rows: rows of text for the scans layer by layer and head by head (0: none).
    ablations: (mode, removal) pairs besides the model as it is.
    """

    passkey_lengths: tuple[int, ...] = (512, 1024)
    passkey_samples: int = 20
    tasks: int = 50
    harness: tuple[str, ...] = ()
    include_path: str | None = None
    limit: float | None = None
    layer_rows: int = 8
    head_rows: int = 2
    ablations: tuple[tuple[str, Removal], ...] = (
        ("softmax_only", "zero"),
        ("softmax_only", "renormalize"),
        ("far_only", "zero"),
        ("far_only", "renormalize"),
        ("linear_only", "zero"),
        ("sinks_only", "zero"),
        ("none", "zero"),
    )
    scope: Literal["mixed", "all"] = "mixed"
    seed: int = 0


QUICK = Plan(
    passkey_lengths=(),
    tasks=0,
    layer_rows=1,
    head_rows=0,
    ablations=(("softmax_only", "zero"), ("softmax_only", "renormalize"), ("far_only", "zero")),
)
WINDOW_CONTROL, TUNED = "teacher, window of the same bytes", "teacher, same fine-tuning"
ALSO_ASKED = ("softmax_only, zero",)
"""Ablations that are also asked for passkeys and tasks."""


@dataclass
class Subject:
    """What is diagnosed, and its teacher. `load_teacher` gives a fresh teacher each time; None where it is not known.

    tuned: loads the teacher with the same fine-tuning, where there is one. gain: `GainCurve`s of its training.
    """

    name: str
    source: str
    load: Callable[[], Any]
    load_teacher: Callable[[], Any] | None = None
    tuned: Callable[[], Any] | None = None
    teacher_name: str = ""
    recipe: str = ""
    gain: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Control = tuple[dict[str, Any], ResolvedSpec, Measured]


def diagnose(
    subject: Subject,
    tokenizer: Any,
    texts: Mapping[str, Sequence[Any]],
    documents: Sequence[str],
    plan: Plan,
    say: Say,
) -> dict[str, Any]:
    """Diagnose one model on held-out `texts` (batches by name; the first decides the verdict); `documents` for tasks."""
    began = time.monotonic()
    student = subject.load()
    plain = not isinstance(student, HybridForCausalLM)
    if plain:  # a teacher: as a hybrid of which nothing can be removed
        student = softmax_teacher(student)
    reach = reach_of(group for group in student.spec.groups if group.attention == "windowed_linear")
    run = _Run(tokenizer, texts, documents, plan, say, student.first_far_position, reach)
    notes = list(subject.notes)
    teacher: Measured | None = None
    needs: dict[str, Need] = {}
    controls: list[Control] = []
    if not plain:
        teacher, needs, controls, more = _teachers(subject, student, run)
        notes += more
    measured = run.measure("student", student)
    base = measured.losses
    models: list[dict[str, Any]] = []
    if teacher is not None:
        about = {"name": subject.teacher_name or "teacher", "kind": "teacher"}
        models.append(run.entry(about, teacher, base, needs, softmax_spec(student.shapes), student))
    models.append(
        run.entry({"name": subject.name, "kind": "student"}, measured, base, needs, student.spec, student)
    )
    first = next(iter(texts))
    far_NT = far_tokens(base[first], run.split_at)
    deltas: dict[tuple[str, str], Estimate | None] = {}
    averages: list[Points] = []
    for mode, removal in plan.ablations:
        name = f"{mode}, {removal}"
        with student.override(mode, removal, plan.scope):
            ablated = run.measure(name, student, everything=name in ALSO_ASKED)
        about = {"name": name, "kind": "ablation", "mode": mode, "removal": removal}
        models.append(run.entry(about, ablated, base, needs, student.spec, student))
        if name in ALSO_ASKED:
            averages = points(measured, ablated, teacher)
        deltas[mode, removal] = ablated.losses[first].less(base[first], far_NT)
        if mode == "softmax_only" and first in needs:
            useful_NT = needs[first].useful_NT
            deltas["useful", removal] = ablated.losses[first].less(base[first], useful_NT)
            deltas["other", removal] = ablated.losses[first].less(base[first], far_NT & ~useful_NT)
    for about, spec, control in controls:
        models.append(run.entry(about, control, base, needs, spec, student))
        deltas["control", about["name"]] = control.losses[first].less(base[first], far_NT)
    mixed = student.first_far_position is not None
    beside = any(mixer.mixed for mixer in student.mixers)
    return {
        "name": subject.name,
        "source": subject.source,
        "teacher": subject.teacher_name,
        "recipe": subject.recipe,
        "spec": describe_spec(student.spec),
        "verdict": verdict_entry(
            _judge(plain, mixed, beside, first, base[first].mean(far_NT), deltas, needs), averages
        ),
        "models": models,
        "layers": run.layers(student, first, base[first]) if mixed else None,
        "far_from": run.split_at,
        "need": {name: need_entry(need) for name, need in needs.items()},
        "gain": subject.gain,
        "seconds": time.monotonic() - began,
        "device": device_name(student.device),
        "notes": notes,
    }


def _teachers(
    subject: Subject, hybrid: HybridForCausalLM, run: _Run
) -> tuple[Measured | None, dict[str, Need], list[Control], list[str]]:
    """The teacher's measurements (None where there is no teacher), what it needs of the far past, and the controls made
    from it."""
    needs: dict[str, Need] = {}
    controls: list[Control] = []
    notes = []
    if subject.load_teacher is None and not all(mixer.keeps_projections for mixer in hybrid.mixers):
        notes.append("the teacher is not known, so there is nothing to compare with and no control")
        return None, needs, controls, notes
    if subject.load_teacher is None:
        notes.append(
            "the teacher is not known: the student's own weights under full softmax stand in for it, and there are no controls"
        )
        with hybrid.as_teacher():
            losses = {name: run.losses("teacher", hybrid, name) for name in run.texts}
            for name in run.texts:
                run.add_need(needs, name, hybrid, losses[name])
        return Measured(losses), needs, controls, notes
    teacher = subject.load_teacher()
    measured = run.measure("teacher", teacher)
    for name in run.texts:
        run.add_need(needs, name, teacher, measured.losses[name])
    width = next(teacher.parameters()).element_size()
    spec = window_control(hybrid.spec, hybrid.shapes, width)
    if spec is None:
        notes.append(
            "the student's state is smaller than a single key, so there is no window of the same bytes"
        )
    else:
        sizes = window_sizes(spec)
        keys = f"{', '.join(map(str, sizes))} keys and {SINKS} sinks" if sizes else "its own keys"
        notes.append(f"{WINDOW_CONTROL}: {keys} in every layer that is not plain softmax")
        windowed = hybridize_model(teacher, spec)
        controls.append(
            ({"name": WINDOW_CONTROL, "kind": "control"}, spec, run.measure(WINDOW_CONTROL, windowed))
        )
        del windowed
    del teacher
    _free()
    if subject.tuned is not None:
        tuned = subject.tuned()
        about = {"name": TUNED, "kind": "control"}
        controls.append((about, softmax_spec(hybrid.shapes), run.measure(TUNED, tuned)))
        del tuned
        _free()
    return measured, needs, controls, notes


@dataclass
class _Run:
    """What every measurement shares."""

    tokenizer: Any
    texts: Mapping[str, Sequence[Any]]
    documents: Sequence[str]
    plan: Plan
    say: Say
    split_at: int | None
    reach: int

    def losses(self, name: str, model: Any, text: str) -> TokenLosses:
        return token_losses(model, self.texts[text], partial(self.say, f"{name} on {text}"))

    def measure(self, name: str, model: Any, everything: bool = True) -> Measured:
        """Losses on all texts and, with `everything`, passkeys and tasks."""
        measured = Measured({text: self.losses(name, model, text) for text in self.texts})
        if not everything:
            return measured
        if self.plan.passkey_lengths:
            measured.keys = ask_passkeys(
                model,
                self.tokenizer,
                self.plan.passkey_lengths,
                self.plan.passkey_samples,
                seed=self.plan.seed,
                on_progress=partial(self.say, f"{name}: passkeys"),
            )
        if self.plan.tasks and self.documents:
            measured.tasks = run_offline(
                model,
                self.tokenizer,
                self.documents,
                samples=self.plan.tasks,
                reach_tokens=self.reach,
                max_length=4 * self.reach,
                seed=self.plan.seed,
                on_progress=partial(self.say, f"{name}: tasks"),
            )
        if self.plan.harness:
            measured.harness = run_harness(
                model,
                self.tokenizer,
                self.plan.harness,
                include_path=self.plan.include_path,
                limit=self.plan.limit,
                seed=self.plan.seed,
                on_progress=partial(self.say, f"{name}: lm-eval"),
            )
        return measured

    def add_need(self, needs: dict[str, Need], text: str, teacher: Any, whole: TokenLosses) -> None:
        if self.split_at is None:
            return
        progress = partial(self.say, f"what {text} needs of its far past")
        need = measure_need(teacher, self.texts[text], whole, self.split_at, self.reach, progress)
        if need is not None:
            needs[text] = need

    def entry(
        self,
        about: dict[str, Any],
        measured: Measured,
        base: Mapping[str, TokenLosses],
        needs: Mapping[str, Need],
        spec: ResolvedSpec,
        model: HybridForCausalLM,
    ) -> dict[str, Any]:
        """A `ModelEntry`; `base` are the student's losses, `spec` what the measured model keeps."""
        width = next(model.parameters()).element_size()
        held = {length: state_bytes(spec, model.shapes, length, width) for length in STATE_LENGTHS}
        texts = {
            text: text_entry(losses, base[text], self.split_at, needs.get(text))
            for text, losses in measured.losses.items()
        }
        return {"mode": "hybrid", **about, "texts": texts, "state_bytes": held, **answers(measured)}

    def layers(self, hybrid: HybridForCausalLM, text: str, base: TokenLosses) -> dict[str, Any]:
        """A `LayerEntry`."""
        assert self.split_at is not None
        batches = self.texts[text]
        self.say("branches of every layer", 0, 0)
        statistics = branch_statistics(hybrid, first_rows(batches, max(2, self.plan.layer_rows)))
        chosen = first_rows(batches, self.plan.layer_rows)
        count = sum(len(batch.input_ids_BT) for batch in chosen)
        tokens = int(
            TokenLosses(base.nll_NT[:count], base.position_NT[:count]).from_position(self.split_at).sum()
        )
        layers = range(len(hybrid.mixers))
        rises = loss_rises(
            hybrid, chosen, self.split_at, REMOVAL, on_progress=partial(self.say, "layer by layer")
        )
        heads = None
        if self.plan.head_rows:
            by_head = loss_rises(
                hybrid,
                first_rows(batches, self.plan.head_rows),
                self.split_at,
                REMOVAL,
                heads=True,
                on_progress=partial(self.say, "head by head"),
            )
            heads = [_row_of(by_head, layer) for layer in layers]
        return {
            "text": text,
            "tokens": tokens,
            "removal": REMOVAL,
            "loss_rise": [plain_estimate(rises.get(Removed(layer))) for layer in layers],
            "heads": heads,
            "near_norm": statistics.near_norm,
            "far_norm": statistics.far_norm,
            "cosine": statistics.cosine,
            "far_share": statistics.far_share,
            "far_share_by_position": [
                {"start": start, "end": end, "share": share} for start, end, share in statistics.by_position
            ],
        }


def _row_of(rises: Mapping[Removed, Estimate | None], layer: int) -> list[float] | None:
    """The rises of a layer's heads, None for a layer without both branches."""
    row = [rise for removed, rise in rises.items() if removed.layer == layer]
    return [rise.value if rise is not None else 0.0 for rise in row] or None


def _judge(
    plain: bool,
    mixed: bool,
    beside: bool,
    text: str,
    loss: Estimate | None,
    deltas: Mapping[tuple[str, str], Estimate | None],
    needs: Mapping[str, Need],
) -> Judgement:
    if plain:
        return not_applicable("This is a plain Transformer: nothing of it can be removed.")
    if not mixed and beside:
        return not_applicable(
            "Softmax and linear attention stand in different heads of a layer, and no head has both, so there is no window that "
            "could bypass a branch; look at what removing either costs, and at the controls."
        )
    if not mixed:
        return not_applicable(
            "No layer has both a softmax and a linear branch, so there is no branch to bypass; look at the controls."
        )
    gains = {
        name: delta for (mode, name), delta in deltas.items() if mode == "softmax_only" and delta is not None
    }
    if not gains or loss is None:
        return not_applicable("No text has a token whose query has a far key; measure longer documents.")
    control = deltas.get(("control", WINDOW_CONTROL))
    need = needs[text].need if text in needs else None
    evidence = Evidence(text, loss.value, gains, need, deltas.get(("far_only", "zero")), control)
    removal = evidence.smallest_gain[0]
    useful, other = deltas.get(("useful", removal)), deltas.get(("other", removal))
    return judge(replace(evidence, useful=useful, other=other))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
