"""Cost of the weight cross-entropy of attention transfer by length: time a token and peak memory, tiled against materialised.

    python benchmarks/weight_ce_cost.py --device cpu

One layer at SmolLM2-135M's shape (9 query heads, 3 KV heads, head dim 64), Hedgehog maps of 128 features, softmax activation,
against the linear-only weights, forward and backward, float32, one sequence. `tiled` is what transfer runs, `materialised` is
`losses.weight_cross_entropy` on whole weights `[1, 9, T, T]`. All figures come from one run: medians over repeats. Peak memory
is what the operation allocates beyond its inputs: the allocator's peak on CUDA, the largest sum of live tensors seen by a
dispatch mode on the CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lolcats_study import ROOT, commit, machine
from windowed_linear_cost import DIM, GROUPS, HEADS, peak, seconds

from hybridize import losses
from hybridize.convert.transfer import weight_cross_entropy
from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.families import FAMILIES, AttentionShape
from hybridize.ops import softmax
from hybridize.ops.sequences import Sequences
from hybridize.recipe import Objective
from hybridize.spec import HybridSpec

FEATURES = 128
SPEC = {
    "attention": "windowed_linear",
    "window": {"kind": "terraced", "size": 64},
    "feature_map": {"kind": "hedgehog", "features": FEATURES, "init": "identity_noise"},
}
OBJECTIVE = Objective(weight_ce=1, against="linear_only")
COMPARED = 4096
"""The length whose ratios are reported."""


def layer(device: str) -> TokenMixer:
    spec = HybridSpec.model_validate({"all": SPEC})
    resolved = spec.resolve(layers=1, heads=HEADS, kv_heads=GROUPS, head_dim=DIM)
    shape = AttentionShape(0, HEADS * DIM, HEADS, GROUPS, DIM, DIM**-0.5, None, None, True)
    return TokenMixer(torch.nn.Module(), FAMILIES["llama"], shape, resolved.layers[0]).to(device)


def measure(length: int, impl: str, device: str, repeats: int) -> dict[str, Any]:
    mixer = layer(device)
    group = mixer.mixers[0]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, length, n, DIM, generator=generator).to(device) for n in (HEADS, GROUPS))
    sequences = Sequences.dense(1, length, device=device)
    maps = [group.map_q.weight, group.map_k.weight]

    def loss() -> torch.Tensor:
        if impl == "tiled":
            return weight_cross_entropy(mixer, group, q, k, sequences, OBJECTIVE)
        teacher = softmax.coefficients(q, k, scale=mixer.shape.scale)
        return losses.weight_cross_entropy(teacher, group.linear_coefficients(q, k, slice(None)))[0]

    def run() -> None:
        torch.autograd.grad(loss(), maps)

    total, (bytes_, largest) = seconds(run, device, repeats), peak(run, device)
    return {
        "impl": impl,
        "length": length,
        "loss": loss().item(),
        "us_per_token": 1e6 * total / length,
        "peak_MiB": bytes_ / 2**20,
        "bytes_per_token": bytes_ / length,
        "largest_tensor_MiB": None if largest is None else largest / 2**20,
        "one_TxT_float32_MiB": 4 * length * length / 2**20,
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Materialised over tiled at `COMPARED`, and the tiled peak there over that at half the length (2: linear)."""
    found = {(row["impl"], row["length"]): row for row in rows}
    tiled, half = found.get(("tiled", COMPARED)), found.get(("tiled", COMPARED // 2))
    whole = found.get(("materialised", COMPARED))
    if tiled is None or half is None or whole is None:
        return {}
    return {
        f"peak_materialised_over_tiled_{COMPARED}": whole["peak_MiB"] / tiled["peak_MiB"],
        f"time_materialised_over_tiled_{COMPARED}": whole["us_per_token"] / tiled["us_per_token"],
        f"peak_tiled_{COMPARED}_over_{COMPARED // 2}": tiled["peak_MiB"] / half["peak_MiB"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 512 to 4096, on CUDA to 8192")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    lengths = options.lengths or [512, 1024, 2048, 4096, *([8192] if options.device == "cuda" else [])]
    rows = [
        measure(length, impl, options.device, options.repeats)
        for impl in ("tiled", "materialised")
        for length in lengths
    ]
    for row in rows:
        print(
            f"{row['impl']:12s} T={row['length']:6d}  {row['us_per_token']:8.2f} us/token  peak {row['peak_MiB']:9.1f} MiB"
            f"  ({row['bytes_per_token']:9.0f} B/token)  loss {row['loss']:.6f}"
        )
    compared = ratios(rows)
    for name, value in compared.items():
        print(f"{name}: {value:.2f}")
    record: dict[str, Any] = {
        "commit": options.commit,
        "command": f"python benchmarks/weight_ce_cost.py --device {options.device}",
        "machine": machine() | ({"threads": torch.get_num_threads()} if options.device == "cpu" else {}),
        "rows": rows,
        **compared,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"weight_ce_cost-{options.device}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
