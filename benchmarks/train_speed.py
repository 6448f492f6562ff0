"""Tokens a second of HALO's training stages on SmolLM2-135M's shape, layers compiled (`compile: true`) and not.

    python benchmarks/train_speed.py --rows 16 --length 1024

Random weights, joined documents, every fourth layer kept in softmax. Medians of single steps of forward, backward and AdamW, after a
warm-up whose time is given too: with compilation it is mostly that.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lolcats_study import ROOT, commit, machine
from transformers import LlamaConfig, LlamaForCausalLM

from hybridize.convert.distill import DistillStage
from hybridize.convert.mixer_transfer import MixerTransferStage
from hybridize.data.batching import Batch
from hybridize.models.surgery import hybridize_model, replace_layers, resolve_spec, softmax_teacher
from hybridize.recipe import DistillStep, TransferStep, load_recipe
from hybridize.train import optim

SPEC = load_recipe("halo-smollm2-135m").spec


def stage_of(name: str, options: argparse.Namespace) -> Any:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to(options.device, torch.bfloat16)
    teacher = softmax_teacher(copy.deepcopy(base))
    model = hybridize_model(base, SPEC)
    if name == "transfer":
        step = TransferStep.model_validate({"tokens": 1, "train": "mixer"})
        return MixerTransferStage(model, teacher, step, [], autocast=True)
    kept = SPEC.with_kept(range(3, options.layers, 4))
    replace_layers(model, teacher, resolve_spec(kept, config))
    return DistillStage(model, teacher, DistillStep.model_validate({"tokens": 1}), [], autocast=True)


def measure(name: str, compiled: bool, options: argparse.Namespace) -> dict[str, Any]:
    stage = stage_of(name, options)
    if compiled:
        stage.compile(regular=True)
    cuda = options.device == "cuda"
    optimizer = optim.adamw(stage.parameters())
    ids_BT = torch.randint(49152, (options.rows, options.length))
    position_BT = torch.arange(options.length).expand(options.rows, -1).contiguous()
    batch = Batch(input_ids_BT=ids_BT, labels_BT=ids_BT, position_ids_BT=position_BT)
    torch.set_float32_matmul_precision("high")

    def step() -> float:
        begin = time.perf_counter()
        stage.step(batch, 1 / stage.count(batch))
        _, norms = optim.gradient_norms(stage.parameters())
        optim.clip(stage.parameters(), norms, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    begin = time.perf_counter()
    step(), step()
    warm = time.perf_counter() - begin
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = median(step() for _ in range(options.steps))
    row = {
        "stage": name,
        "compiled": compiled,
        "warm_up_s": warm,
        "tokens_per_second": options.rows * options.length / seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }
    print(json.dumps(row), flush=True)
    if options.profile:
        kinds = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * cuda]
        with torch.profiler.profile(activities=kinds) as profile:
            step()
        key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stages", nargs="+", default=["distill", "transfer"])
    parser.add_argument("--profile", action="store_true", help="also print each configuration's kernels")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    rows = [measure(name, compiled, options) for name in options.stages for compiled in (False, True)]
    record = {
        "commit": options.commit,
        "command": f"python benchmarks/train_speed.py --rows {options.rows} --length {options.length}",
        "machine": machine(),
        "rows": rows,
    }
    path = options.out or ROOT / "benchmarks" / "results" / f"train-speed-{options.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
