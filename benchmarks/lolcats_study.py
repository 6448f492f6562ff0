"""LoLCATs on SmolLM2-135M: the main recipe, its control, and the corners of the paper's Tables 2 and 5.

    python benchmarks/lolcats_study.py main control corners --out runs/study --jobs 3

Every model of the study is an ordinary run of `hybridize convert`, so an interrupted study continues. `main` and `control`
use the shipped recipes. `corners` are, for each feature map (Hedgehog, T2R) without and with the terraced window of 64:
swap only, transfer only (N tokens), LoRA only (2N, with maps and mixing weights trained along, since nothing else would),
and both (N + N). Results go to benchmarks/results/NAME.json with the commit, the machine and the command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
MAPS = {"hedgehog": "{kind: hedgehog, features: 64}", "t2r": "{kind: t2r, features: 64}"}
WINDOW = "window: {kind: terraced, size: 64}, normalizer: {kind: shared, gamma: 0.1}"


@dataclass
class Job:
    """One run: its name, the shipped recipe it starts from, and what it changes."""

    name: str
    recipe: str
    overrides: list[str] = field(default_factory=list)

    def command(self, out: Path) -> list[str]:
        changes = [part for override in self.overrides for part in ("--set", override)]
        base = [sys.executable, "-m", "hybridize.cli.main", "convert", MODEL, "-r", self.recipe]
        return [*base, "-o", str(out / self.name), *changes]


def corner_jobs(tokens: int, evaluation: list[str]) -> list[Job]:
    """For every map and window: both stages (whose milestones are also swap only and transfer only), and LoRA only."""
    rows = "batch.rows=8"  # as in the paper; steps of 32 rows would be too few at these budgets
    control = [f"finetune.tokens={tokens}", f"finetune.{rows}", *evaluation]
    jobs = [Job("corner-control", "control-smollm2-135m", control)]
    for name, feature_map in MAPS.items():
        for window in (False, True):
            kind = "windowed_linear" if window else "linear"
            spec = f"{{attention: {kind}, {WINDOW + ', ' if window else ''}feature_map: {feature_map}}}"
            label = f"corner-{name}-{'terraced64' if window else 'nowindow'}"
            both = [f"spec.all={spec}", f"transfer.tokens={tokens}", f"finetune.tokens={tokens}"]
            both += [f"transfer.{rows}", f"finetune.{rows}", *evaluation]
            jobs.append(Job(f"{label}-both", "lolcats-smollm2-135m", both))
            rate = "lr: {cosine: [5e-4, 1e-5], warmup: 20}"
            lora = f"[{{finetune: {{tokens: {2 * tokens}, train_maps: true, {rate}, batch: {{rows: 8}}}}}}]"
            only = [f"spec.all={spec}", f"steps={lora}", *evaluation]
            jobs.append(Job(f"{label}-lora", "lolcats-smollm2-135m", only))
    return jobs


def run(job: Job, out: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one job (in `environment`, by default this process's) and read its measurements."""
    log = out / f"{job.name}.log"
    begin = time.monotonic()
    with log.open("a") as file:
        done = subprocess.run(
            job.command(out), stdout=file, stderr=subprocess.STDOUT, env=environment, check=False
        )
    code = done.returncode
    seconds = time.monotonic() - begin
    print(f"{job.name}: exit {code} after {seconds:.0f} s", flush=True)
    folder = out / job.name
    measured = folder / "evaluations.json"
    outcomes = {
        path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("steps/*/outcome.json"))
    }
    return {
        "exit": code,
        "seconds": round(seconds, 1),
        "command": " ".join(["hybridize", *job.command(Path("runs"))[3:]]),
        "stages": {
            name: {
                key: outcome[key]
                for key in ("steps", "tokens", "seconds", "tokens_per_second", "peak_memory_bytes")
                if key in outcome
            }
            for name, outcome in outcomes.items()
        },
        "milestones": [without_rows(entry) for entry in json.loads(measured.read_text())]
        if measured.is_file()
        else [],
    }


class Places:
    """Places on CUDA devices for runs side by side: a run takes one, and gives it back also when it fails."""

    def __init__(self, jobs: int, devices: int) -> None:
        self.devices = devices
        self.free: SimpleQueue[int] = SimpleQueue()
        for place in range(jobs):
            self.free.put(place % devices)

    @contextmanager
    def one(self) -> Iterator[dict[str, str]]:
        """The environment of a run on the next free place; this process's where there is one device."""
        place = self.free.get()
        own = {"CUDA_VISIBLE_DEVICES": str(place)} if self.devices > 1 else {}
        try:
            yield {**os.environ, **own}
        finally:
            self.free.put(place)


def without_rows(milestone: dict[str, Any]) -> dict[str, Any]:
    """A milestone without the sums of every row of text, which only comparisons inside a run need."""
    texts = milestone["perplexity"]
    keep = {
        name: {k: v for k, v in values.items() if k not in ("row_nll_sums", "row_tokens")}
        for name, values in texts.items()
    }
    return {**milestone, "perplexity": keep}


def machine() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def table(jobs: dict[str, Any]) -> str:
    """One line a milestone: perplexities and passkey accuracies."""
    lines = []
    for name, result in jobs.items():
        for entry in result["milestones"]:
            texts = "  ".join(
                f"{text} {values['perplexity']:.2f}" for text, values in entry["perplexity"].items()
            )
            keys = entry.get("passkey", {}).get("lengths", [])
            found = "  ".join(f"{key['length']}: {100 * key['accuracy']:.0f}%" for key in keys)
            lines.append(f"{name:36s} {entry['name']:16s} {texts}  {found}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=["main", "control", "corners"])
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time on the one device")
    parser.add_argument("--tokens", type=int, default=2_500_000, help="N of the corners")
    parser.add_argument(
        "--set", action="append", default=[], help="override for every job (for a smoke test)"
    )
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lists = {
        "main": [Job("main", "lolcats-smollm2-135m")],
        "control": [Job("control", "control-smollm2-135m")],
        "corners": corner_jobs(options.tokens, ["evaluation.passkey=[512]", "evaluation.rows=100"]),
    }
    for part in options.parts:
        jobs = lists[part]
        for job in jobs:
            job.overrides += options.set
        with ThreadPoolExecutor(options.jobs) as pool:
            results = dict(
                zip(
                    [job.name for job in jobs], pool.map(lambda job: run(job, options.out), jobs), strict=True
                )
            )
        record = {
            "commit": options.commit,
            "command": f"python benchmarks/lolcats_study.py {part} --tokens {options.tokens} --jobs {options.jobs}",
            "machine": machine(),
            "runs_at_a_time": min(options.jobs, len(jobs)),
            "jobs": results,
        }
        options.results.mkdir(parents=True, exist_ok=True)
        path = options.results / f"lolcats-smollm2-135m-{part}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
