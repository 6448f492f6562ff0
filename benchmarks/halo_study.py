"""HALO on SmolLM2-135M: its choice of softmax layers against even spacing and other rules, two seeds; the positions of Fig. 4.

    python benchmarks/halo_study.py --out runs/halo --jobs 4 --devices 4
    python benchmarks/halo_study.py --out runs/halo --only floor-42 spread+ce-42 control-42
    python benchmarks/halo_study.py --out runs/halo --only rope nope reversed

Every model is an ordinary run of `hybridize convert` with the shipped recipe `halo-smollm2-135m` (the rule, the seed or the positions
changed), followed by `hybridize eval`: perplexity on two held-out texts, passkeys, and RULER's single needles (NIAH, the mean of
single-1 to 3) at lengths up to far beyond the training length. All steps of the recipe are distilled from the teacher, so the
equally tuned teacher is the teacher (its own distributions teach it nothing); of the `ce` runs it is `control`, the teacher after their long stage.
Both are measured as they are and, beyond their 8,192 positions, under YaRN and with a declared NTK base. An interrupted study continues,
and calls for different runs add up. benchmarks/results/halo-smollm2-135m.json keeps the figures, the chosen layers and the single-layer scores,
each run with its commit, command and machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from component_study import rounded
from lolcats_study import MODEL, ROOT, Job, Places, commit, machine, run

RECIPE = "halo-smollm2-135m"
TEACHER_POSITIONS = 8192


SCALED = "logit_scale: {kind: log_position, base: 500}, output_gate: true"
KEPT = "{{attention: softmax, position: {position}, {more}}}"
ALL = "{{attention: lightning, position: {position}, qk_norm: true, output_norm: true, output_gate: true, heads: expand}}"
VARIANTS = {
    "halo": [],
    "uniform": ["select.rule=uniform", "select.cap=null"],
    "floor": ["select.floor=standard_error"],
    "spread": ["select.floor=standard_error", "select.spread=true"],
    "jet": ["select.rule=jet", "select.cap=null"],
    "ce": ["long_context.objective=ce"],
}
"""What a run `NAME-SEED` changes of the recipe: the rule of the selection, or what the long stage learns from; `spread+ce-42` does both."""
SHOWN = ("halo", "uniform")
"""Run unless `--only` says otherwise."""

ARMS = {
    "rope": ("rope", "rope", "output_gate: true"),
    "nope": ("none", "none", SCALED),
    "reversed": ("none", "rope", "output_gate: true"),
}
"""Fig. 4's assignments of positions to (recurrent, softmax) layers, besides HyPE's own (rope, none)."""


CONTROL = "control"
"""The name of the teacher's own runs."""


def tuned_teacher(overrides: list[str]) -> list[str]:
    """What makes of the recipe the teacher with its last stage alone, on next tokens; `overrides` of the other stages go with them."""
    *others, last = yaml.safe_load((ROOT / "recipes" / f"{RECIPE}.yaml").read_text())["steps"]
    last["long_context"]["objective"] = "ce"
    gone = tuple(f"{kind}." for step in others for kind in step)
    shared = [change for change in overrides if not change.startswith(gone)]
    return ["spec={all: {attention: softmax}}", f"steps={json.dumps([last])}", *shared]


def named(name: str, seed: int, overrides: list[str]) -> Job | None:
    """The run of that name; None where there is no such run. `seed` is that of the names without one."""
    if name in ARMS:
        recurrent, softmax, more = ARMS[name]
        changes = [
            f"spec.all={ALL.format(position=recurrent)}",
            f"spec.kept={KEPT.format(position=softmax, more=more)}",
        ]
        return Job(name, RECIPE, [f"seed={seed}", *changes, *overrides])
    kinds, _, own = name.rpartition("-")
    if own.isdecimal() and kinds == CONTROL:
        return Job(name, RECIPE, [f"seed={own}", *tuned_teacher(overrides)])
    if not own.isdecimal() or any(kind not in VARIANTS for kind in kinds.split("+")):
        return None
    changes = [change for kind in kinds.split("+") for change in VARIANTS[kind]]
    return Job(name, RECIPE, [f"seed={own}", *changes, *overrides])


def ask(name: str, model: str, options: list[str], out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """One `hybridize eval`: its JSON. Raises RuntimeError where it failed."""
    result = out / f"{name}.json"
    base = [sys.executable, "-m", "hybridize.cli.main", "eval", model, *options, "--json", str(result)]
    begin = time.monotonic()
    with (out / f"{name}.log").open("a") as log:
        done = subprocess.run(base, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    print(f"{name}: exit {done.returncode} after {time.monotonic() - begin:.0f} s", flush=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed; see {name}.log")
    return json.loads(result.read_text())


def plain(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation without rows, buckets and paths."""
    kept: dict[str, Any] = {}
    if texts := evaluation.get("perplexity"):
        kept["perplexity"] = {name: text["perplexity"] for name, text in texts.items()}
    if evaluation.get("passkey"):
        lengths = evaluation["passkey"]
        lengths = lengths.get("lengths", lengths) if isinstance(lengths, dict) else lengths
        kept["passkey"] = {str(entry["length"]): entry["accuracy"] for entry in lengths}
    if ruler := evaluation.get("ruler"):
        kept["ruler"] = [
            {key: row[key] for key in ("task", "length", "score", "low", "high", "samples") if key in row}
            for row in ruler["results"]
        ]
        kept["niah"] = ruler.get("niah")
        kept["haystack"] = ruler["haystack"]
    return kept


def made_at(out: Path, name: str, commit: str) -> str:
    """The commit at which a run was begun: a later call only continues it."""
    path = out / f"{name}.commit"
    if not path.is_file():
        path.write_text(commit)
    return path.read_text()


def stored(path: Path, changes: list[str]) -> dict[str, Any]:
    """The results of former calls. Raises ValueError where they were made with other overrides."""
    head = {"benchmark": "benchmarks/halo_study.py", "model": MODEL, "recipe": RECIPE, "set": changes}
    if not path.is_file():
        return {**head, "jobs": {}}
    before = json.loads(path.read_text())
    if before.get("set") != changes or "jobs" not in before:
        raise ValueError(
            f"{path} holds results of --set {before.get('set')}, this call has {changes}; name another folder by --results"
        )
    return {**before, **head}


def selection(folder: Path) -> dict[str, Any]:
    """A run's selection, its recall by length in place of by task and length; without what the sweep depended on."""
    paths = sorted(folder.glob("steps/*-select/selection.json"))
    if not paths:
        return {}
    found = json.loads(paths[-1].read_text())
    for entry in [found["teacher"], *found["by_layer"]]:
        for score in (entry or {}).values():
            parts = score.pop("parts", ()) if isinstance(score, dict) else ()
            lengths = {part["name"].partition(" ")[2] for part in parts} - {""}
            for length in sorted(lengths, key=int):
                values = [part["value"] for part in parts if part["name"].endswith(f" {length}")]
                score.setdefault("by_length", {})[length] = fmean(values)
    return {key: value for key, value in found.items() if key != "identity"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/halo"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--devices", type=int, default=1, help="CUDA devices to spread the runs over")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--only", nargs="+", help="names of runs, `teacher` among them")
    parser.add_argument("--set", action="append", default=[], help="override for every run")
    parser.add_argument("--lengths", default="1024,4096,16384", help="of RULER, for the students")
    parser.add_argument(
        "--far", type=int, default=32768, help="length of single-1 alone, with half the samples"
    )
    parser.add_argument("--batch-tokens", type=int, default=262144, help="of RULER's prompts at a time")
    parser.add_argument("--passkeys", default="512,1024,2048,4096")
    parser.add_argument("--samples", type=int, default=40, help="a task and length")
    parser.add_argument("--rows", type=int, default=100, help="of each text")
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asked = ["evaluation.rows=40", "evaluation.passkey=[]", "evaluation.prompts=[]"]
    names = options.only or [f"{kind}-{seed}" for seed in options.seeds for kind in SHOWN]
    found = {
        name: named(name, options.seeds[0], [*asked, *options.set]) for name in names if name != "teacher"
    }
    if unknown := [name for name, run in found.items() if run is None]:
        runs = ", ".join([*(f"{kind}-SEED" for kind in (*VARIANTS, CONTROL)), *ARMS, "teacher"])
        parser.error(f"--only names no such runs: {', '.join(unknown)}; there are {runs}")
    chosen = [run for run in found.values() if run is not None]
    path = options.results / "halo-smollm2-135m.json"
    try:
        kept = stored(path, options.set)
    except ValueError as error:
        parser.error(str(error))
    for job in chosen:
        made_at(options.out, job.name, options.commit)
    places = Places(options.jobs, options.devices)
    text = ["--tasks", "perplexity", "--samples", str(options.rows), "--dtype", "bfloat16"]
    keys = [
        "--tasks",
        "passkey",
        "--samples",
        str(options.samples),
        "--dtype",
        "bfloat16",
        "--lengths",
        options.passkeys,
    ]
    asking = ["--dtype", "bfloat16", "--batch-tokens", str(options.batch_tokens), "--lengths"]
    needles = ["--ruler", "niah", "--samples", str(options.samples), *asking]
    far = ["--ruler", "niah_single_1", "--samples", str(max(options.samples // 2, 1)), *asking]

    def everything(name: str, model: str, lengths: str, environment: dict[str, str]) -> dict[str, Any]:
        asked = {"text": text, "keys": keys, **({"needles": [*needles, lengths]} if lengths else {})}
        parts = [
            ask(f"{name}.{part}", model, about, options.out, environment) for part, about in asked.items()
        ]
        return {key: value for part in parts for key, value in plain(part).items()}

    def softmax_only(name: str, model: str, environment: dict[str, str]) -> dict[str, Any]:
        """Of the teacher, or the tuned one: within its positions as it is, beyond them under every length trick."""
        lengths = options.lengths.split(",")
        near = ",".join(length for length in lengths if int(length) <= TEACHER_POSITIONS)
        result = {"evaluation": everything(name, model, near, environment)}
        beyond = [(needles, length) for length in lengths if int(length) > TEACHER_POSITIONS]
        for questions, length in (*beyond, (far, str(options.far))):
            for trick in ("yarn", "dynamic_ntk"):
                about = [*questions, length, "--length-trick", trick]
                found = ask(f"{name}.{trick}.{length}", model, about, options.out, environment)
                result[f"{trick} {length}"] = plain(found)
        return result

    def hybrid(name: str, model: str, environment: dict[str, str]) -> dict[str, Any]:
        result = {"evaluation": everything(name, model, options.lengths, environment)}
        about = [*far, str(options.far)]
        result["far"] = plain(ask(f"{name}.far", model, about, options.out, environment))
        result["selection"] = selection(Path(model))
        return result

    def convert(job: Job) -> tuple[str, dict[str, Any]]:
        folder = options.out / job.name
        continued = folder.exists()
        measured = softmax_only if job.name.startswith(f"{CONTROL}-") else hybrid
        with places.one() as environment:
            result = run(job, options.out, environment)
            result.pop("milestones")
            if continued:
                result["seconds"] = None  # only the last call's are known; the stages have their own
            if result["exit"] == 0:
                result.update(measured(job.name, str(folder), environment))
        return job.name, result

    def teacher() -> tuple[str, dict[str, Any]]:
        with places.one() as environment:
            return "teacher", {"exit": 0, **softmax_only("teacher", MODEL, environment)}

    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(convert, job) for job in chosen]
        if not options.only or "teacher" in options.only:
            waiting.append(pool.submit(teacher))
        results, failed = {}, []
        for future in waiting:
            try:
                name, result = future.result()
                results[name] = result
            except RuntimeError as error:  # what it has stays on disk, its former figures in the record
                failed.append(str(error))
    own = {"machine": machine(), "jobs": options.jobs, "devices": options.devices}
    results = {
        name: {"commit": made_at(options.out, name, options.commit), **own, **result}
        for name, result in results.items()
    }
    before = kept["jobs"]
    lost = {
        name for name, result in results.items() if result["exit"] and before.get(name, {}).get("exit") == 0
    }
    for name in lost:
        print(f"{name} failed; its former figures stay")
    record = {**kept, "jobs": {**before, **{name: results[name] for name in results if name not in lost}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(record)) + "\n")
    for message in failed:
        print(message)
    for name, result in results.items():
        print(
            name, json.dumps(rounded({k: v for k, v in result.get("evaluation", {}).items() if k != "ruler"}))
        )
        if result.get("selection"):
            print(name, "kept", result["selection"]["kept"])
    if failed or any(result["exit"] for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
