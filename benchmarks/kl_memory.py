"""Peak memory of the distillation loss at a large vocabulary: logits in chunks, against both models' logits at once.

    python benchmarks/kl_memory.py --device cpu

KL(teacher || student) over `--tokens` positions, width `--width`, Qwen3's vocabulary of 151,936, forward and backward to the student's
hidden states and head. Bytes beyond the inputs and the gradients: the allocator's peak on CUDA, the largest sum of live tensors seen by
a dispatch mode on the CPU. The two losses and gradients are compared as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lolcats_study import ROOT, commit, machine
from torch import Tensor
from windowed_linear_cost import LiveBytes

from hybridize import losses


def chunked(teacher: tuple[Tensor, Tensor], student: tuple[Tensor, Tensor]) -> Tensor:
    total, count = losses.logits_kl(*teacher, *student)
    return total / count


def materialised(teacher: tuple[Tensor, Tensor], student: tuple[Tensor, Tensor]) -> Tensor:
    p = (teacher[0] @ teacher[1].T).log_softmax(-1)
    q = (student[0] @ student[1].T).log_softmax(-1)
    return torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)


def peak(run: Callable[[], Any], device: str) -> int:
    """Bytes that `run` holds at most beyond what was there."""
    if device == "cpu":
        with LiveBytes() as live:
            run()
        return live.peak
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    generator = torch.Generator(options.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=options.device)

    heads = [normal(options.vocabulary, options.width) / options.width**0.5 for _ in range(2)]
    results = []
    for tokens in options.tokens:
        hidden = [normal(tokens, options.width) for _ in range(2)]
        entry: dict[str, Any] = {"tokens": tokens}
        gradients = {}
        for name, loss in (("chunked", chunked), ("materialised", materialised)):
            student = tuple(x.detach().requires_grad_() for x in (hidden[1], heads[1]))

            def run(loss: Any = loss, student: Any = student) -> None:
                loss((hidden[0], heads[0]), student).backward()  # noqa: B023

            size = peak(run, options.device)
            grads = sum(x.numel() * x.element_size() for x in student)
            entry[name] = {"peak_bytes": size - grads}
            gradients[name] = student[0].grad
        error = (gradients["chunked"] - gradients["materialised"]).abs().max()
        entry["gradient_error"] = (error / gradients["materialised"].abs().max()).item()
        results.append(entry)
        sizes = "   ".join(f"{name} {entry[name]['peak_bytes'] / 2**20:8.0f} MiB" for name in gradients)
        print(f"{tokens:6d} tokens   {sizes}   gradients agree to {entry['gradient_error']:.1e}", flush=True)
    record = {
        "commit": options.commit,
        "command": f"python benchmarks/kl_memory.py --device {options.device}",
        "machine": machine(),
        "width": options.width,
        "vocabulary": options.vocabulary,
        "results": results,
    }
    path = options.out or ROOT / "benchmarks" / "results" / f"kl_memory-{options.device}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
