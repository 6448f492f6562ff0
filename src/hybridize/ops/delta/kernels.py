"""How calls reach the kernels of flash-linear-attention that carry a state: which calls they take, and in what layout.

They take dense rows, or one packed row with `cu_seqlens` in which no sequence is empty; states are float32 `[N, H, D, V]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridize.ops.sequences import Sequences

MAX_DIM = 256

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
"""(*tensors `[B, T, H, ...]`, initial_state, output_final_state, cu_seqlens) -> (o, final state)"""


def refusal(load: Callable[[], Any], q_BTHD: Tensor, v_BTHV: Tensor) -> str | None:
    """Why the kernels do not take these tensors; None where they do. The library is loaded for tensors on CUDA alone."""
    if q_BTHD.device.type != "cuda":
        return f"it needs tensors on CUDA, these are on {q_BTHD.device.type}"
    if v_BTHV.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"v has dtype {v_BTHV.dtype}; allowed are bfloat16, float16, float32"
    if q_BTHD.shape[3] > MAX_DIM:
        return f"the head dim is {q_BTHD.shape[3]}; allowed are up to {MAX_DIM}"
    if load() is None:
        return "flash-linear-attention is not installed here: pip install 'hybridize[gpu]'"
    return None


def call(
    kernel: Kernel,
    tensors: tuple[Tensor, ...],
    sequences: Sequences,
    S_NHDV: Tensor | None,
    return_state: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`kernel` on the call's sequences: o in the tensors' layout `[B, T, H, V]` and the state after each sequence, float32.

    Something must be in some sequence.
    """
    options["output_final_state"] = return_state
    S_NHDV = None if S_NHDV is None else S_NHDV.float()
    if sequences.is_dense:
        return kernel(*tensors, initial_state=S_NHDV, cu_seqlens=None, **options)
    packed = (x.reshape(1, sequences.total, *x.shape[2:]) for x in tensors)
    cu_seqlens, live_N = _live(sequences)
    S_live = S_NHDV if live_N is None or S_NHDV is None else S_NHDV.index_select(0, live_N)
    o, final = kernel(*packed, initial_state=S_live, cu_seqlens=cu_seqlens, **options)
    o = o.reshape(*sequences.shape, *o.shape[2:])
    if final is None or live_N is None:
        return o, final
    kept = final.new_zeros(len(sequences), *final.shape[1:]) if S_NHDV is None else S_NHDV
    return o, kept.index_copy(0, live_N, final)


def _live(sequences: Sequences) -> tuple[Tensor, Tensor | None]:
    """`cu_seqlens` of the sequences that hold tokens, and which these are (None: all)."""

    def make() -> tuple[Tensor, Tensor | None]:
        ends = sequences.bounds[1:]
        live = [n for n, length in enumerate(sequences.lengths) if length]
        cu_seqlens = torch.tensor([0, *(ends[n] for n in live)], device=sequences.device)
        if len(live) == len(sequences):
            return cu_seqlens, None
        return cu_seqlens, torch.tensor(live, device=sequences.device)

    return sequences.once("live", make)
