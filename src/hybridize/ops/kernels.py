"""How the recurrences reach the kernels of flash-linear-attention: which calls they take, and in what layout.

They take dense rows, or one packed row with `cu_seqlens` in which no sequence is empty; states are float32 `[N, H, D, V]`.
Their products are of v's dtype (float32 ones as the GPU multiplies float32, often TF32), their sums float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from hybridize.ops.recurrence import RecurrentState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import Result, resolve_impl

MIN_DIM, MAX_DIM = 16, 256
"""Of the head dim; the value dim has the lower bound too, since Triton's products sum over 16 at least."""

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
"""(*tensors `[B, T, H, ...]`, initial_state, output_final_state, cu_seqlens) -> (o, final state)"""


@torch.compiler.disable
def select(
    impl: str, implementations: Mapping[str, ModuleType], q_BTHD: Tensor, v_BTGV: Tensor
) -> ModuleType:
    """The implementation of a call. `auto` takes the kernels (`fla`) for 16-bit values where they run, as they cost no
    precision that such values have, and `chunked` otherwise. Raises ValueError for an `impl` that cannot run."""
    load = implementations["fla"].load
    if impl == "auto":
        takes = v_BTGV.dtype.itemsize == 2 and refusal(load, q_BTHD, v_BTGV) is None
        return implementations["fla" if takes else "chunked"]
    name = resolve_impl(impl, tuple(implementations))
    if name == "fla" and (reason := refusal(load, q_BTHD, v_BTGV)) is not None:
        raise ValueError(f"impl is 'fla'; {reason}")
    return implementations[name]


def refusal(load: Callable[[], Any], q_BTHD: Tensor, v_BTHV: Tensor) -> str | None:
    """Why the kernels do not take these tensors; None where they do. The library is loaded for tensors on CUDA alone."""
    if q_BTHD.device.type != "cuda":
        return f"it needs tensors on CUDA, these are on {q_BTHD.device.type}"
    if v_BTHV.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"v has dtype {v_BTHV.dtype}; allowed are bfloat16, float16, float32"
    if not MIN_DIM <= q_BTHD.shape[3] <= MAX_DIM:
        return f"the head dim is {q_BTHD.shape[3]}; allowed are {MIN_DIM} to {MAX_DIM}"
    if v_BTHV.shape[3] < MIN_DIM:
        return f"the value dim is {v_BTHV.shape[3]}; allowed are {MIN_DIM} and more"
    if load() is None:
        return "flash-linear-attention is not installed here: pip install 'hybridize[gpu]'"
    return None


def trains(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@cache
def scalar_backward_refused(device: torch.device) -> bool:
    """Whether the backward of scalar decays is one that triton miscompiles, 3.4 to 3.7.0 on Hopper (the library's issue
    640): recent versions raise, earlier ones go wrong. Channels that all decay alike take the other kernels."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return "3.4.0" <= TorchVersion(triton.__version__) < "3.7.1"


def run(
    kernel: Kernel,
    tensors: tuple[Tensor, ...],
    v_BTHV: Tensor,
    sequences: Sequences,
    state: RecurrentState | None,
    kind: type[RecurrentState],
    return_state: bool,
    **options: Any,
) -> Result:
    """`kernel` on the call's sequences: `o_BTHV` and, with `return_state`, the state (of this `kind`) after each sequence.

    `tensors` are `[B, T, H, ...]`, the first of them `[B, T, H, D]`; v is among them.
    """
    if return_state and state is None:
        heads, dim = tensors[0].shape[2:]
        state = kind.empty(len(sequences), heads, dim, v_BTHV.shape[3], torch.float32, v_BTHV.device)
    if sequences.total == 0:
        return Result(torch.zeros_like(v_BTHV), state if return_state else None)
    S_NHDV = state.S_NHDV.float() if state is not None else None
    o, S = _call(kernel, tensors, sequences, S_NHDV, return_state, options)
    if S is None or state is None:
        return Result(o)
    return Result(o, state.after(sequences.tensor("lengths"), S))


def _call(
    kernel: Kernel,
    tensors: tuple[Tensor, ...],
    sequences: Sequences,
    S_NHDV: Tensor | None,
    return_state: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """o in the tensors' layout and the state after each sequence; some sequence holds a token."""
    options["output_final_state"] = return_state
    if sequences.is_dense:
        return kernel(*tensors, initial_state=S_NHDV, cu_seqlens=None, **options)
    packed = (x.reshape(1, sequences.total, *x.shape[2:]) for x in tensors)
    cu_seqlens, live_N = _live(sequences)
    S_live = S_NHDV if live_N is None or S_NHDV is None else S_NHDV.index_select(0, live_N)
    o, final = kernel(*packed, initial_state=S_live, cu_seqlens=cu_seqlens, **options)
    o = o.reshape(*sequences.shape, *o.shape[2:])
    if final is None or live_N is None:
        return o, final
    assert S_NHDV is not None  # who wants a final state has a first one
    return o, S_NHDV.index_copy(0, live_N, final)


def _live(sequences: Sequences) -> tuple[Tensor, Tensor | None]:
    """`cu_seqlens` of the sequences that hold tokens, and which these are (None: all). Made once for a call: the library
    keeps what it derives from the same tensor."""

    def make() -> tuple[Tensor, Tensor | None]:
        ends = sequences.bounds[1:]
        live = [n for n, length in enumerate(sequences.lengths) if length]
        cu_seqlens = torch.tensor([0, *(ends[n] for n in live)], device=sequences.device)
        if len(live) == len(sequences):
            return cu_seqlens, None
        return cu_seqlens, torch.tensor(live, device=sequences.device)

    return sequences.once("live", make)
