"""Prefill and decode by length: a HypeNet student against its teacher, both in one run, random weights in bf16.

    python benchmarks/length_cost.py --device cuda --lengths 8192 32768 131072

Qwen3-1.7B's shape by default: 28 layers, of which the student keeps 7 on softmax (those that the paper's Table 7 names) and
computes Lightning in the others. `--rows` texts at a time. The teacher is transformers' own model with its own cache and SDPA attention.
Prefill is the forward pass that fills the cache and gives the last token's logits; decode the median time of a step after it,
a token in every row, the two models a step each in turn. cuDNN's attention, which plans anew for every length, is left out for both. Medians of `--repeats`; the caches' bytes are counted, not estimated.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lolcats_study import ROOT, commit, machine
from torch.nn.attention import sdpa_kernel
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridize.models.modeling import CACHE
from hybridize.models.surgery import hybridize_model, replace_layers, resolve_spec, softmax_teacher
from hybridize.ops.softmax.chunked import KERNELS
from hybridize.recipe import load_recipe

KEPT = (3, 21, 2, 9, 25, 6, 8)
SPEC = load_recipe("halo-qwen3-1.7b").spec


def shape(options: argparse.Namespace) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(1, options.heads // 2),
        head_dim=options.head_dim,
        vocab_size=options.vocabulary,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
    )


def student_of(teacher: Any, config: Qwen3Config) -> Any:
    """The student of `teacher`'s own weights, its kept layers in place."""
    kept = [layer for layer in KEPT if layer < config.num_hidden_layers] or [0]
    student = hybridize_model(copy.deepcopy(teacher), SPEC)
    replace_layers(student, softmax_teacher(teacher), resolve_spec(SPEC.with_kept(kept), config))
    return student.eval()


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds of one call, everything on the device done, and what it gave."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    out = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, out


def nbytes(cache: Any) -> int:
    """Bytes of a filled cache: ours counts itself; transformers' holds keys and values by layer."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@torch.inference_mode()
def prefilled(
    model: Any, ids: torch.Tensor, options: argparse.Namespace
) -> tuple[dict[str, float], Callable[[], float]]:
    """The figures of the prefill, and a function that decodes one more token and gives its seconds."""

    def prefill() -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1)

    timed(prefill, options.device)  # compiles and fills the allocator
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if options.device == "cuda" else 0
    times = []
    for _ in range(options.repeats):
        out = None
        seconds, out = timed(prefill, options.device)
        times.append(seconds)
    peak = torch.cuda.max_memory_allocated() - held if options.device == "cuda" else 0
    state, token = {CACHE: out[CACHE]}, ids[:, :1]

    @torch.inference_mode()
    def step() -> float:
        seconds, out = timed(lambda: model(input_ids=token, use_cache=True, **state), options.device)
        state[CACHE] = out[CACHE]
        return seconds

    return {
        "prefill_s": statistics.median(times),
        "cache_bytes": nbytes(state[CACHE]),
        "peak_bytes": peak,
    }, step


def measure(models: dict[str, Any], length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Every model's figures at one length: prefill one after the other, then a step of each in turn."""
    ids = torch.randint(options.vocabulary, (options.rows, length), device=options.device)
    entry: dict[str, Any] = {}
    steps: dict[str, Callable[[], float]] = {}
    for name, model in models.items():
        try:
            entry[name], steps[name] = prefilled(model, ids, options)
        except torch.cuda.OutOfMemoryError:
            entry[name] = {"error": "out of memory"}
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.decode):
        for name, step in steps.items():
            times[name].append(step())
    for name, seconds in times.items():
        entry[name]["decode_ms"] = 1000 * statistics.median(seconds[options.decode // 4 :])
    return entry


def table(results: list[dict[str, Any]]) -> str:
    lines = ["length   prefill s  teacher / student (speed-up)   decode ms a step (speed-up)   cache MiB"]
    for entry in results:
        t, s = entry["teacher"], entry["student"]
        if "error" in t or "error" in s:
            lines.append(
                f"{entry['length']:7d}  teacher {t.get('error', 'ok')}; student {s.get('error', 'ok')}"
            )
            continue
        lines.append(
            f"{entry['length']:7d}  {t['prefill_s']:8.3f} / {s['prefill_s']:8.3f} ({t['prefill_s'] / s['prefill_s']:.2f})"
            f"   {t['decode_ms']:8.2f} / {s['decode_ms']:8.2f} ({t['decode_ms'] / s['decode_ms']:.2f})"
            f"   {t['cache_bytes'] / 2**20:.0f} / {s['cache_bytes'] / 2**20:.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    config = shape(options)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(options.device):
        teacher = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    student = student_of(copy.deepcopy(teacher), config).to(options.device)
    results: list[dict[str, Any]] = []
    for length in options.lengths:
        with sdpa_kernel(KERNELS):
            entry = {
                "length": length,
                **measure({"teacher": teacher, "student": student}, length, options),
            }
        results.append(entry)
        print(table([entry]), flush=True)
    record = {
        "commit": options.commit,
        "command": f"python benchmarks/length_cost.py --rows {options.rows} --lengths "
        + " ".join(map(str, options.lengths)),
        "rows": options.rows,
        "machine": machine(),
        "shape": {
            key: getattr(config, key)
            for key in (
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
            )
        },
        "kept": [layer for layer in KEPT if layer < config.num_hidden_layers] or [0],
        "dtype": str(dtype).removeprefix("torch."),
        "results": results,
    }
    suffix = f"-{options.rows}-rows" if options.rows > 1 else ""
    path = options.out or ROOT / "benchmarks" / "results" / f"length_cost-{options.device}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(results), flush=True)


if __name__ == "__main__":
    main()
