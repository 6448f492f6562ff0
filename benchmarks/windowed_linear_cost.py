"""Cost of windowed linear attention by length: time a token and peak memory, against the quadratic reference.

    python benchmarks/windowed_linear_cost.py --device cpu

One layer's attention at SmolLM2-135M's shape (9 query heads, 3 KV heads, head dim 64, features 64, terraced 64), forward and
backward, float32 inputs. All figures come from one run: medians over repeats. Peak memory is what the operation allocates
beyond its inputs: the allocator's peak on CUDA, the largest sum of live tensors seen by a dispatch mode on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from lolcats_study import ROOT, commit, machine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hybridize.ops import windowed_linear
from hybridize.ops.feature_map import FeatureMap
from hybridize.windows import Window

HEADS, GROUPS, DIM, FEATURES = 9, 3, 64, 64
WINDOW = Window("terraced", 64)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages made inside it; `peak` and the `largest` single one."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        size = storage.nbytes()
        self.seen.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def inputs(length: int, device: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    maps = [FeatureMap(normal(HEADS, DIM, FEATURES // 2), "softmax") for _ in range(2)]
    qkv = normal(1, length, HEADS, DIM), normal(1, length, GROUPS, DIM), normal(1, length, GROUPS, DIM)
    return (*qkv, *maps, WINDOW, windowed_linear.SharedMix(torch.full((HEADS,), 0.1, device=device)))


def seconds(run: Any, device: str, repeats: int) -> float:
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=50, rep=200, return_mode="median") / 1e3
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def peak(run: Any, device: str) -> tuple[int, int | None]:
    """Peak bytes beyond the inputs, and the largest single tensor (CPU only)."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, None
    with LiveBytes() as bytes_:
        run()
    return bytes_.peak, bytes_.largest


def measure(length: int, impl: str, device: str, repeats: int) -> dict[str, Any]:
    x = inputs(length, device)
    leaves = [x[0], x[1], x[2], x[3].weight_HDQ, x[4].weight_HDQ]

    def run() -> None:
        o = windowed_linear.forward(*x, impl=impl).o
        torch.autograd.grad(o.sum(), leaves)

    total, (bytes_, largest) = seconds(run, device, repeats), peak(run, device)
    return {
        "impl": impl,
        "length": length,
        "us_per_token": 1e6 * total / length,
        "peak_MiB": bytes_ / 2**20,
        "bytes_per_token": bytes_ / length,
        "largest_tensor_MiB": None if largest is None else largest / 2**20,
        "one_TxT_float32_MiB": 4 * length * length / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--reference-up-to", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = [measure(length, "chunked", options.device, options.repeats) for length in options.lengths]
    for length in options.lengths:
        if length <= options.reference_up_to:
            rows.append(measure(length, "reference", options.device, options.repeats))
    for row in rows:
        print(
            f"{row['impl']:10s} T={row['length']:6d}  {row['us_per_token']:8.2f} us/token  peak {row['peak_MiB']:9.1f} MiB"
            f"  ({row['bytes_per_token']:9.0f} B/token)"
        )
    by_length = {row["length"]: row for row in rows if row["impl"] == "chunked"}
    record: dict[str, Any] = {
        "commit": options.commit,
        "command": f"python benchmarks/windowed_linear_cost.py --device {options.device}",
        "machine": machine() | ({"threads": torch.get_num_threads()} if options.device == "cpu" else {}),
        "rows": rows,
    }
    if {2048, 16384} <= set(by_length):
        ratio = by_length[16384]["us_per_token"] / by_length[2048]["us_per_token"]
        record["time_per_token_16384_over_2048"] = ratio
        print(f"time per token, T = 16,384 over T = 2,048: {ratio:.2f}")
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"windowed_linear_cost-{options.device}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
