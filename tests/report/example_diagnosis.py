"""Made-up diagnoses in the shape of real ones: a full run, three side by side, one with most parts missing, a plain teacher."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from hybridize.report.diagnosis import (
    Diagnosis,
    GainCurve,
    Interval,
    LayerEntry,
    ModelEntry,
    NeedEntry,
    PasskeyCellEntry,
    RunDiagnosis,
    ShareByPosition,
    TaskEntry,
    TextEntry,
    Verdict,
)
from hybridize.report.diagnosis_html import render_diagnosis_html
from hybridize.report.schema import PasskeyEntry, PerplexityEntry, PositionEntry

EDGES = (0, 64, 128, 256, 512, 1024)
LENGTHS = (512, 1024)
DEPTHS = tuple(i / 9 for i in range(10))
LAYERS, HEADS, FAR_FROM = 30, 9, 128
GROWING = {1024: 23_592_960, 65_536: 1_509_949_440}
FIXED = {1024: 7_464_960, 65_536: 7_464_960}


@dataclass(frozen=True)
class Shape:
    """What a made-up run is like: `gain` of the linear branch in nats on far-eligible tokens, shares of keys found."""

    name: str
    recipe: str
    label: str
    sentence: str
    gain: float
    keys: float
    perplexity: float


BYPASSED = Shape(
    "runs/lolcats",
    "lolcats-smollm2-135m",
    "bypassed",
    "Without its linear branch the model is as good as with it: 0.001 nats on text that needs its far past by 0.31.",
    0.001,
    0.0,
    8.63,
)
WEAK = Shape(
    "runs/hedgecats",
    "hedgecats-smollm2-135m",
    "weak",
    "The linear branch lowers the loss by 0.024 nats, 8% of what the far past is worth to the teacher.",
    0.024,
    0.05,
    8.41,
)
BALANCED = Shape(
    "runs/ssd",
    "ssd-smollm2-135m",
    "balanced",
    "The linear branch lowers the loss by 0.118 nats, 38% of what the far past is worth to the teacher.",
    0.118,
    0.4,
    7.96,
)


def interval(value: float, spread: float) -> Interval:
    return Interval(value=value, low=value - spread, high=value + spread)


def make_text(level: float, far: float | None, tokens: int, near: bool = True) -> TextEntry:
    """A model at perplexity `level` on a text; `far` nats worse than the student on far-eligible tokens (None: the student);
    `near`: on the others too."""
    nll = math.log(level)
    worse = far or 0.0
    positions = [
        PositionEntry(
            start=start,
            end=end,
            perplexity=math.exp(
                nll + 0.55 - 0.2 * i + (worse * (0.7 + 0.1 * i) if start >= FAR_FROM else worse * near)
            ),
            tokens=(end - start) * 64,
        )
        for i, (start, end) in enumerate(pairwise(EDGES))
    ]
    spread = 0.004 + 0.04 * abs(worse)
    deltas = {}
    if far is not None:
        deltas = {
            "delta": interval(far * 0.8, spread),
            "far_delta": interval(far, spread),
            "useful_delta": interval(far * 3.1, 2.5 * spread),
            "other_delta": interval(far * 0.35, spread),
        }
    value = math.exp(nll + worse * 0.8)
    return TextEntry(
        perplexity=PerplexityEntry(perplexity=value, low=value * 0.975, high=value * 1.025, tokens=tokens),
        by_position=positions,
        far_nll=nll + worse,
        far_tokens=tokens * 7 // 8,
        **deltas,
    )


def make_model(
    name: str,
    kind: str,
    shape: Shape,
    far: tuple[float, float] | None,
    keys: float,
    state: dict[int, int],
    **more: str,
) -> ModelEntry:
    """One model; `far` is how much worse than the student it is on each of the two texts."""
    draw = random.Random(f"{shape.name} {name} {more}")
    cells = [
        PasskeyCellEntry(
            length=length,
            depth=depth,
            correct=sum(
                draw.random() < keys * (1.0 if length == 512 or keys == 1 else 0.8) for _ in range(4)
            ),
            samples=4,
        )
        for length in LENGTHS
        for depth in DEPTHS
    ]
    passkey = {}
    for length in LENGTHS:
        share = sum(cell.correct for cell in cells if cell.length == length) / 40
        passkey[length] = PasskeyEntry(
            accuracy=share, low=max(0.0, share - 0.09), high=min(1.0, share + 0.09), samples=40
        )
    loss = sum(far) / 2 if far else 0.0
    near = more.get("mode") != "softmax_only"
    tasks = {}
    for task, level, chance, reach in (("arc_easy", 0.58, 0.25, "near"), ("far_recall", 0.62, 0.5, "far")):
        accuracy = max(chance, level - 0.06 * loss) + 0.01 * draw.random()
        tasks[task] = TaskEntry(
            accuracy=accuracy,
            low=accuracy - 0.031,
            high=accuracy + 0.031,
            samples=1000,
            chance=chance,
            reach=reach,  # type: ignore[arg-type]
        )
    return ModelEntry(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        texts={
            "docstrings": make_text(shape.perplexity, far[0] if far else None, 204_800, near),
            "code": make_text(shape.perplexity * 0.7, far[1] if far else None, 60_416, near),
        },
        passkey=passkey,
        passkey_cells=cells,
        tasks=tasks,
        state_bytes=state,
        **more,  # type: ignore[arg-type]
    )


def make_models(shape: Shape) -> list[ModelEntry]:
    gain = shape.gain

    def ablated(mode: str, removal: str, far: float) -> ModelEntry:
        keys = 0.0 if mode != "softmax_only" else shape.keys / 8
        name = f"{mode}, {removal}"
        return make_model(name, "ablation", shape, (far, far * 1.4), keys, FIXED, mode=mode, removal=removal)

    return [
        make_model("teacher", "teacher", shape, (-0.07 - gain / 4, -0.22), 1.0, GROWING),
        make_model("student", "student", shape, None, shape.keys, FIXED),
        ablated("softmax_only", "zero", gain * 1.6),
        ablated("softmax_only", "renormalize", gain),
        ablated("far_only", "zero", 4.2),
        ablated("far_only", "renormalize", 3.4),
        ablated("linear_only", "zero", 3.6),
        ablated("linear_only", "renormalize", 2.9),
        ablated("sinks_only", "zero", 6.1),
        ablated("none", "zero", 7.7),
        make_model(
            "teacher, sliding 216 + 4 sinks", "control", shape, (gain - 0.03, gain - 0.06), 0.1, FIXED
        ),
        make_model("teacher, same fine-tuning", "control", shape, (-0.32, -0.19), 1.0, GROWING),
    ]


def make_layers(shape: Shape, heads: bool = True) -> LayerEntry:
    draw = random.Random(shape.name)
    own = [
        shape.gain * 0.35 * max(0.0, math.sin(i / 4.1)) ** 2 + 0.0006 * draw.gauss(0, 1)
        for i in range(LAYERS)
    ]
    full = 5  # a layer that keeps full softmax has no two branches
    rise = [None if i == full else interval(v, 0.0015 + 0.1 * abs(v)) for i, v in enumerate(own)]
    by_head = [
        None if i == full else [v / HEADS * (0.2 + 1.6 * draw.random()) for _ in range(HEADS)]
        for i, v in enumerate(own)
    ]
    share = [None if i == full else 0.05 + 2 * shape.gain * (1 + math.sin(i / 3)) for i in range(LAYERS)]
    return LayerEntry(
        text="docstrings",
        tokens=28_672,
        removal="renormalize",
        loss_rise=rise,
        heads=by_head if heads else None,
        near_norm=[None if i == full else 0.6 + 0.05 * i for i in range(LAYERS)],
        far_norm=[None if i == full else (0.06 + shape.gain) * (1 + 0.06 * i) for i in range(LAYERS)],
        cosine=[None if i == full else 0.5 * math.cos(i / 6) for i in range(LAYERS)],
        far_share=share,
        far_share_by_position=[
            ShareByPosition(
                start=start,
                end=end,
                share=[
                    None if value is None else 0.0 if start < FAR_FROM else min(1.0, value * (0.4 + 0.25 * i))
                    for value in share
                ],
            )
            for i, (start, end) in enumerate(pairwise(EDGES))
        ],
    )


def make_run(shape: Shape, heads: bool = True) -> RunDiagnosis:
    steps = list(range(0, 601, 50))
    return RunDiagnosis(
        name=shape.name,
        source=f"{shape.name}/model",
        teacher="smollm2-135m",
        recipe=shape.recipe,
        spec="30 layers: windowed_linear, terraced 64, shared normalizer, hedgehog 64; layer 5 softmax",
        verdict=Verdict(
            linear=shape.label,  # type: ignore[arg-type]
            window="used",
            sentence=shape.sentence,
            reasons=[
                f"docstrings: without the linear branch the loss on far-eligible tokens rises by {shape.gain:.3f} nats "
                f"({shape.gain - 0.004:.3f} to {shape.gain + 0.004:.3f}, renormalize).",
                f"The far past is worth 0.310 nats to the teacher there; the branch recovers {shape.gain / 0.31:.0%} of it.",
                "The teacher under a sliding window with the same bytes of state is "
                + ("better" if shape.gain < 0.03 else "worse")
                + " than the student.",
                "Without the window the loss rises by 3.4 nats: the window is used.",
            ],
            thresholds={
                "min_far_tokens": 300,
                "min_need": 0.02,
                "bypassed_share": 0.05,
                "balanced_share": 0.25,
            },
            figures={
                "gain, zero": interval(shape.gain * 1.6, 0.006),
                "gain, renormalize": interval(shape.gain, 0.004),
                "need": interval(0.31, 0.012),
                "window": interval(3.4, 0.14),
                "control": interval(shape.gain - 0.03, 0.005),
            },
        ),
        models=make_models(shape),
        layers=make_layers(shape, heads),
        far_from=FAR_FROM,
        need={
            "docstrings": NeedEntry(
                context=128, threshold=0.5, need=interval(0.31, 0.012), tokens=179_200, useful_share=0.143
            ),
            "code": NeedEntry(
                context=128, threshold=0.5, need=interval(0.52, 0.03), tokens=52_864, useful_share=0.221
            ),
        },
        gain=[
            GainCurve(
                stage="transfer",
                steps=steps,
                gain=[shape.gain * 1.8 * (1 - math.exp(-step / 120)) for step in steps],
                loss=[2.7 + 3.1 * math.exp(-step / 80) for step in steps],
            ),
            GainCurve(
                stage="finetune",
                steps=steps,
                gain=[shape.gain * (1 + 0.8 * math.exp(-step / 150)) for step in steps],
                loss=[2.2 + 0.5 * math.exp(-step / 200) for step in steps],
            ),
        ],
        seconds=412.0,
        device="NVIDIA H200",
        notes=["Row bootstrap: 200 rows of docstrings, 59 of code."],
        fingerprints={"model": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
    )


VERSIONS = {"hybridize": "0.1.0", "torch": "2.13.0"}


def full() -> Diagnosis:
    """One run with every part."""
    return Diagnosis(runs=[make_run(BALANCED)], command="hybridize diagnose runs/ssd", versions=VERSIONS)


def three() -> Diagnosis:
    """Three runs side by side, quick."""
    return Diagnosis(
        quick=True,
        runs=[make_run(shape, heads=False) for shape in (BYPASSED, WEAK, BALANCED)],
        command="hybridize diagnose runs/lolcats runs/hedgecats runs/ssd --quick",
        versions=VERSIONS,
    )


def minimal() -> Diagnosis:
    """A student on one row of text, and nothing else."""
    text = TextEntry(perplexity=PerplexityEntry(perplexity=9.1, tokens=1023))
    verdict = Verdict(
        linear="inconclusive",
        window="inconclusive",
        sentence="One row of text is too little to tell.",
        reasons=[],
        thresholds={},
    )
    run = RunDiagnosis(
        name="model",
        source="model",
        spec="2 layers",
        verdict=verdict,
        models=[ModelEntry(name="student", kind="student", texts={"notes.txt": text})],
    )
    return Diagnosis(runs=[run])


def plain_teacher() -> Diagnosis:
    """A Transformer that was never converted: measured, but there is nothing to judge."""
    text = make_text(8.05, None, 204_800)
    verdict = Verdict(
        linear="not_applicable",
        window="not_applicable",
        sentence="smollm2-135m has softmax attention over all keys in all of its 30 layers.",
        reasons=["No layer has a linear branch."],
        thresholds={},
    )
    run = RunDiagnosis(
        name="smollm2-135m",
        source="smollm2-135m",
        spec="30 layers: softmax",
        verdict=verdict,
        models=[ModelEntry(name="teacher", kind="teacher", texts={"docstrings": text}, state_bytes=GROWING)],
    )
    return Diagnosis(runs=[run])


NASTY = "<script>alert('x')</script> & \"<b>\" $x_1$ \\alpha\n" + "very-long-name" * 20 + " 很长"


def nasty() -> Diagnosis:
    """Names that try to be markup and do not fit, and numbers that are none; twice, so that the runs are side by side."""
    run = make_run(BALANCED)
    text = "<i>text & co</i> " + "x" * 120
    models = []
    for model in run.models:
        entry = model.texts["docstrings"].model_copy(deep=True)
        entry.perplexity = PerplexityEntry(perplexity=math.inf, low=math.nan, high=math.inf, tokens=9)
        entry.by_position[0].perplexity = math.inf
        if entry.far_delta is not None and model.kind == "ablation":
            entry.far_delta = Interval(
                value=math.inf if model.mode == "none" else -1.5e-5, low=None, high=math.inf
            )
        if entry.useful_delta is not None:
            entry.useful_delta = Interval(value=math.nan)
        name = model.name if model.kind == "ablation" else f"{model.kind} {NASTY}"
        passkey = [PasskeyCellEntry(length=512, depth=0.5, correct=0, samples=0)]
        tasks = {NASTY: TaskEntry(accuracy=0.5, low=0.4, high=0.6, samples=100)}
        changed = {"name": name, "texts": {text: entry}, "passkey_cells": passkey, "tasks": tasks}
        models.append(model.model_copy(update=changed))
    layers = LayerEntry(
        text=text,
        tokens=1,
        removal="zero",
        loss_rise=[None, Interval(value=math.inf), Interval(value=-0.1, low=-math.inf, high=math.inf)],
        heads=[None, [math.inf, math.nan], [0.0]],
        near_norm=[None, math.inf, 0.0],
        far_norm=[None, math.nan, 0.0],
        cosine=[None, None, math.nan],
        far_share=[None, 0.5, math.nan],
        far_share_by_position=[
            ShareByPosition(start=0, end=64, share=[None, 0.1, math.nan]),
            ShareByPosition(start=64, share=[None, 0.5]),
        ],
    )
    verdict = run.verdict.model_copy(
        update={
            "sentence": NASTY,
            "reasons": [NASTY],
            "thresholds": {NASTY: math.inf},
            "figures": {NASTY: Interval(value=math.nan, low=-math.inf, high=math.inf)},
        }
    )
    changed = run.model_copy(
        update={
            "name": NASTY, "source": NASTY, "teacher": NASTY, "recipe": NASTY, "spec": NASTY, "device": NASTY,
            "verdict": verdict, "models": models, "layers": layers, "notes": [NASTY], "fingerprints": {NASTY: NASTY},
            "need": {NASTY: NeedEntry(context=100, threshold=0.5, need=Interval(value=0), tokens=0, useful_share=0)},
            "gain": [GainCurve(stage=NASTY, steps=[0, 1, 2], gain=[math.nan, 0.1], loss=[math.inf])] * 2,
        }
    )  # fmt: skip
    return Diagnosis(runs=[changed, changed], command=NASTY, versions={NASTY: NASTY})


EXAMPLES = {"full": full, "three": three, "minimal": minimal, "plain_teacher": plain_teacher, "nasty": nasty}


@cache
def rendered(name: str) -> str:
    """The page of an example; plots take seconds, so it is made once."""
    return render_diagnosis_html(EXAMPLES[name]())
