"""Made-up results in the shape of a real run: 30 layers, two texts, four stages and a control."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from hybridize.report.schema import (
    Cost,
    Curve,
    Generation,
    LayerErrors,
    LayerHistory,
    PasskeyEntry,
    PerplexityEntry,
    PositionEntry,
    Results,
    Row,
)

EDGES = (0, 64, 128, 256, 512, 1024)


def make_row(
    name: str, kind: str, level: float, far_penalty: float, keys: float, state: dict[int, int]
) -> Row:
    def entry(value: float) -> PerplexityEntry:
        return PerplexityEntry(perplexity=value, low=value * 0.97, high=value * 1.03, tokens=65_472)

    def positions(value: float) -> list[PositionEntry]:
        return [
            PositionEntry(
                start=start,
                end=end,
                perplexity=value * (1.8 - 0.18 * i) * (1 + far_penalty * max(0, i - 1)),
                tokens=(end - start) * 64,
            )
            for i, (start, end) in enumerate(pairwise(EDGES))
        ]

    return Row(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        perplexity={"docstrings": entry(level), "essays": entry(level * 2.3)},
        passkey={
            length: PasskeyEntry(
                accuracy=share, low=max(0, share - 0.09), high=min(1, share + 0.09), samples=50
            )
            for length, share in ((512, keys), (1024, keys * 0.6 if keys < 1 else 1.0))
        },
        state_bytes=state,
        by_position={"docstrings": positions(level), "essays": positions(level * 2.3)},
    )


def example() -> Results:
    draw = random.Random(0)
    growing = {1024: 23_592_960, 65_536: 1_509_949_440}
    fixed = {1024: 10_321_920, 65_536: 10_321_920}
    before = [0.55 + 0.4 * draw.random() for _ in range(30)]
    after = [value * (0.04 + 0.25 * draw.random()) for value in before]
    steps = list(range(0, 201, 5))
    history = [
        [a + (b - a) * math.exp(-step / 40) for a, b in zip(after, before, strict=True)] for step in steps
    ]
    curve_steps = list(range(1, 201))
    return Results(
        title="SmolLM2-135M to a hybrid with LoLCATs",
        model="smollm2-135m",
        recipe="demo",
        recipe_text=(
            "# hybridize demo\nspec:\n  all: {attention: windowed_linear, window: {kind: terraced, size: 64}, "
            "normalizer: {kind: shared, gamma: 0.1}}\nsteps:\n  - transfer: {tokens: 20M}\n  - finetune: {tokens: 20M}\n"
        ),
        spec="30 layers: windowed_linear, terraced 64, shared normalizer, hedgehog 64",
        rows=[
            make_row("teacher", "teacher", 14.94, 0.0, 1.0, growing),
            make_row("swapped", "stage", 192.3, 0.6, 0.0, fixed),
            make_row("after transfer", "stage", 33.8, 0.2, 0.08, fixed),
            make_row("after LoRA", "stage", 24.6, 0.12, 0.25, fixed),
            make_row("teacher, same fine-tuning", "control", 13.7, 0.0, 0.98, growing),
        ],
        layers=LayerErrors(before=before, after=after, history=LayerHistory(steps=steps, mse=history)),
        curves=[
            Curve(
                stage="transfer",
                unit="1000 x MSE",
                steps=curve_steps,
                loss=[40 * math.exp(-s / 35) + 4 + draw.random() for s in curve_steps],
                validation_steps=[1, 50, 100, 150, 200],
                validation=[43.0, 14.2, 6.9, 5.3, 4.8],
            ),
            Curve(
                stage="finetune",
                unit="cross-entropy (nats per token)",
                steps=curve_steps,
                loss=[3.2 + 0.4 * math.exp(-s / 50) + 0.1 * draw.gauss(0, 1) for s in curve_steps],
                validation_steps=[1, 50, 100, 150, 200],
                validation=[3.58, 3.36, 3.27, 3.23, 3.2],
            ),
        ],
        generations=[
            Generation(
                prompt="Return the elements of the list that",
                teacher=" are not in the other list.\n\nParameters\n----------\na : list\n    The list to filter.",
                student=" are not in the list.\n\nParameters\n----------\nlist : list\n    The list of the list.",
            ),
            Generation(
                prompt="The capital of France is",
                teacher=" Paris. It is the most populous city in France and the seat of its government.",
                student=" Paris, a city of the city of Paris in the north of France.",
            ),
        ],
        costs=[
            Cost(
                stage="transfer",
                seconds=118.4,
                tokens=409_600,
                device="CPU, 2 cores",
                peak_memory=3_221_225_472,
            ),
            Cost(
                stage="finetune",
                seconds=96.2,
                tokens=245_760,
                device="CPU, 2 cores",
                peak_memory=3_865_470_566,
            ),
        ],
        versions={"hybridize": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        fingerprints={
            "model": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "data": "3a1f" * 16,
        },
        commands=["hybridize demo"],
    )
