"""Component balance on SmolLM2-135M: five ways to a hybrid at equal state bytes and equal mean near size, diagnosed.

    python benchmarks/component_study.py --out runs/components --jobs 6 --devices 4

LoLCATs (terraced 64: 96 near keys on average, 64 features), HedgeCATs, SSD (first setting), inference-time hybrid and mass
mixing (sliding 96, 74 features: the same bytes within 1%), each on 3M tokens of transfer and 3M of LoRA (the inference-time
hybrid: 6M of transfer), the same seed; and the teacher with the same LoRA. Every run is an ordinary `hybridize convert`
followed by `hybridize diagnose`, so an interrupted study continues. The diagnoses have the ablation modes, two held-out texts
and the controls; benchmarks/results/component-balance-smollm2-135m.json keeps what the comparison needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lolcats_study import MODEL, ROOT, Job, Places, commit, machine, run

SEPARATE = "{attention: windowed_linear, window: {kind: sliding, size: 96}, normalizer: {kind: separate, gate: 0.5}, " \
    "feature_map: {kind: hedgehog, features: 74, init: identity_noise}}"  # fmt: skip
MASS = SEPARATE.replace("gate: 0.5", "mix: mass")
LINEAR = "{attention: linear, feature_map: {kind: hedgehog, features: 74, init: identity_noise}}"
RATE = "{cosine: [5e-4, 1e-5], warmup: 20}"


def jobs(tokens: int, rows: int) -> list[Job]:
    """The runs of the study; `tokens` of each stage."""
    batch = [f"transfer.batch.rows={rows}", f"finetune.batch.rows={rows}"]
    both = [f"transfer.tokens={tokens}", f"finetune.tokens={tokens}", *batch, f"finetune.lr={RATE}"]
    asked = ["evaluation.rows=20", "evaluation.passkey=[]"]  # the diagnosis measures more
    return [
        Job(
            "control",
            "control-smollm2-135m",
            [f"finetune.tokens={tokens}", batch[1], f"finetune.lr={RATE}", *asked],
        ),
        Job("lolcats", "lolcats-smollm2-135m", [*both, *asked]),
        Job("hedgecats", "hedgecats-smollm2-135m", [f"spec.all={SEPARATE}", *both, *asked]),
        Job(
            "ssd",
            "ssd-dropout-smollm2-135m",
            [
                f"spec.all={SEPARATE}",
                *both,
                *asked,
                f"finetune.window_dropout.epoch={max(1, tokens // 5)}",
                "finetune.window_dropout.window=[96]",
            ],
        ),
        Job(
            "inference-hybrid",
            "inference-hybrid-smollm2-135m",
            [
                f"spec.all={LINEAR}",
                f"transfer.tokens={2 * tokens}",
                batch[0],
                "steps[1].edit.window.size=96",
                *asked,
            ],
        ),
        Job("mass", "mass-smollm2-135m", [f"spec.all={MASS}", *both, *asked]),
    ]


def diagnose(folder: Path, options: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Diagnose one run; its `report.json`."""
    base = [sys.executable, "-m", "hybridize.cli.main", "diagnose", str(folder), "--texts", "docstrings,code"]
    with (folder.parent / f"{folder.name}.diagnosis.log").open("a") as log:
        done = subprocess.run(
            [*base, *options], stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        )
    code = done.returncode
    print(f"{folder.name}: diagnosis exit {code}", flush=True)
    report = folder / "diagnosis" / "report.json"
    return json.loads(report.read_text()) if code == 0 else {}


def table(results: dict[str, Any]) -> str:
    """A line a run: perplexities, the linear gain by both removals, passkeys, the verdict."""
    lines = []
    for name, result in results.items():
        if not result["diagnosis"]:
            continue
        (entry,) = result["diagnosis"]["runs"]
        models = {model["name"]: model for model in entry["models"]}
        student = next(model for model in entry["models"] if model["kind"] == "student")
        texts = []
        for text, values in student["texts"].items():
            gains = [
                models[f"softmax_only, {r}"]["texts"][text]["far_delta"]["value"]
                for r in ("zero", "renormalize")
            ]
            texts.append(
                f"{text} {values['perplexity']['perplexity']:.2f} (gain {gains[0]:+.3f} / {gains[1]:+.3f})"
            )
        keys = "  ".join(f"{length}: {100 * v['accuracy']:.0f}%" for length, v in student["passkey"].items())
        lines.append(f"{name:18s} {'  '.join(texts)}  {keys}  {entry['verdict']['linear']}")
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """The same data, floats to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/components"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--devices", type=int, default=1, help="CUDA devices to spread the runs over")
    parser.add_argument("--tokens", type=int, default=3_000_000, help="of each stage")
    parser.add_argument("--rows", type=int, default=16, help="rows of 1,024 a step")
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument(
        "--set", action="append", default=[], help="override for every run (for a smoke test)"
    )
    parser.add_argument("--diagnose", default="", help="options of `hybridize diagnose`, for a smoke test")
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [
        job for job in jobs(options.tokens, options.rows) if not options.only or job.name in options.only
    ]

    places = Places(options.jobs, options.devices)

    def both(job: Job) -> dict[str, Any]:
        job.overrides += options.set
        folder, wanted = options.out / job.name, options.diagnose.split()
        with places.one() as environment:
            result = run(job, options.out, environment)
            diagnosis = diagnose(folder, wanted, environment) if result["exit"] == 0 else {}
        return {**result, "diagnosis": diagnosis}

    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip([job.name for job in chosen], pool.map(both, chosen), strict=True))
    for result in results.values():
        result.pop("milestones")  # the diagnosis has more
        for entry in result["diagnosis"].get("runs", []):
            entry["source"] = f"runs/components/{entry['name']}"
            for model in entry["models"]:
                model.pop("passkey_cells", None)
        result["diagnosis"].pop("command", None)
    record = {
        "commit": options.commit,
        "command": f"python benchmarks/component_study.py --tokens {options.tokens} --rows {options.rows} --jobs {options.jobs} --devices {options.devices}",
        "model": MODEL,
        "machine": machine(),
        "devices": options.devices,
        "runs_at_a_time": min(options.jobs, len(chosen)),
        "jobs": results,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "component-balance-smollm2-135m.json"
    path.write_text(json.dumps(rounded(record)) + "\n")
    print(table(results), flush=True)


if __name__ == "__main__":
    main()
