"""What the recurrent mixers share: one way around their operations, and the parameters from which they compute gates.

The operations are linear in v. A mixer says what they take beside v, its `operands`; the rest follows.

Legend: B rows, T tokens, E width, H query heads of the group, G its KV heads, D head dim, V value dim, Q chosen queries,
S keys, R low rank.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor, nn

from hybridize.mixers.parts import OwnStart, ShortConv
from hybridize.mixers.types import GroupShape, Mixer
from hybridize.ops.sequences import Sequences
from hybridize.ops.short_conv import ShortConvState
from hybridize.ops.types import HYBRID, Ablation, State, compute_dtype, per_head
from hybridize.spec import GroupSpec

START_STD = 0.25
"""Standard deviation of what a gate's first weights add to its bias, on inputs of unit rms."""
SEED = 1000
"""Layer 0's seed of first values; output gates and feature maps count theirs from 0."""


@dataclass(frozen=True)
class Operands:
    """An operation's tensors: it is called `(*before, v, *after)`. `own` (broadcasts to `[B, T, H]`) is a further weight of
    each token's own value, beside the state: it never enters the memory."""

    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...] = ()
    own: Tensor | None = None


@dataclass
class ConvolvedState(State):
    """What the short convolution remembers, and the memory behind it; None before the first `attend`."""

    conv: ShortConvState
    memory: State | None


class RecurrentMixer(Mixer):
    """A mixer whose memory is one matrix a head. Grouped key and value heads are expanded before the operation.

    With a short convolution (`short_conv` of the spec) `convolve` comes first, before norms and positions; the values that
    `attend` and `coefficients` speak of lie behind it.
    """

    near, far = False, True
    operation: ModuleType
    """`hybridize.ops.decay`, `delta` or `dplr`."""
    scale: float

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        channels = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.short_conv = ShortConv(*channels, spec.short_conv) if spec.short_conv is not None else None

    def convolve(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        state: State | None = None,
        *,
        keep_state: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, State | None]:
        """q, k and v after the group's short convolution and, with `keep_state`, the state that `attend` goes on from.
        Without a convolution: what came in."""
        if self.short_conv is None:
            return q_BTHD, k_BTGD, v_BTGV, state
        before = state if isinstance(state, ConvolvedState) else None
        q, k, v, conv = self.short_conv(
            q_BTHD, k_BTGD, v_BTGV, sequences, before.conv if before else None, keep_state
        )
        if conv is None:
            return q, k, v, None
        memory = before.memory if before else None
        return q, k, v, ConvolvedState(lengths_N=conv.lengths_N, conv=conv, memory=memory)

    @abstractmethod
    def operands(self, q_BTHD: Tensor, k_BTHD: Tensor, x_BTE: Tensor | None) -> Operands:
        """What the operation takes beside v. Raises ValueError where gates need the layer's input x and it is missing."""

    def attend(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        state: State | None = None,
        *,
        x_BTE: Tensor | None = None,
        keep_state: bool = False,
        ablation: Ablation = HYBRID,
    ) -> tuple[Tensor, State | None]:
        if isinstance(state, ConvolvedState):
            o_BTHV, memory = self.attend(
                q_BTHD,
                k_BTGD,
                v_BTGV,
                sequences,
                state.memory,
                x_BTE=x_BTE,
                keep_state=keep_state,
                ablation=ablation,
            )
            return o_BTHV, replace(state, memory=memory) if keep_state else None
        k_BTHD, v_BTHV = self._expand(k_BTGD), self._expand(v_BTGV)
        operands = self.operands(q_BTHD, k_BTHD, x_BTE)
        tensors = (*operands.before, v_BTHV, *operands.after)
        if sequences.is_step and state is not None:
            result = self.operation.step(*tensors, state, scale=self.scale)
        else:
            result = self.operation.forward(
                *tensors, scale=self.scale, sequences=sequences, state=state, return_state=keep_state
            )
        if operands.own is None:
            return result.o, result.state
        own_BTHV = operands.own[..., None] * v_BTHV.to(compute_dtype(v_BTHV))
        return (result.o + own_BTHV).to(v_BTHV.dtype), result.state

    def coefficients(
        self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice, x_BTE: Tensor | None = None
    ) -> Tensor:
        """Weights `A_BHQS` of v for the queries in `rows` of dense rows; gates need the layer's input `x_BTE`."""
        operands = self.operands(q_BTHD, self._expand(k_BTGD), x_BTE)
        A_BHQS: Tensor = self.operation.coefficients(
            *operands.before, *operands.after, rows, scale=self.scale
        )
        if operands.own is None:
            return A_BHQS
        own_BHQ1 = operands.own.expand(q_BTHD.shape[:3])[:, rows].transpose(1, 2)[..., None]
        s = torch.arange(q_BTHD.shape[1], device=q_BTHD.device)
        return A_BHQS + torch.where(s[rows, None] == s, own_BHQ1, 0)

    def _expand(self, x_BTGD: Tensor) -> Tensor:
        """The KV head of every query head (DESIGN D5)."""
        return per_head(x_BTGD, self.shape.heads, 2)


class Control(OwnStart):
    """The parameters from which a mixer computes its gates, float32 also in a model of another dtype.

    First values come from a generator seeded by the layer, drawn on the CPU in float32: the same on every machine, whatever
    the device and dtype a model is built in.
    """

    def __init__(self, shape: GroupShape) -> None:
        super().__init__()
        self.shape = shape
        for name, value in self._first().items():
            self.register_parameter(name, nn.Parameter(torch.empty(value.shape, dtype=torch.float32)))
        self.reset_parameters()

    @abstractmethod
    def first(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Each parameter's first value, by name; `uniform`, `normal` and the like below never leave the CPU."""

    @abstractmethod
    def gates(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """The gates of x, in x's dtype."""

    def _first(self) -> dict[str, Tensor]:
        return self.first(torch.Generator().manual_seed(SEED + self.shape.layer))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, value in self._first().items():
            self.get_parameter(name).copy_(value)

    def forward(self, x_BTE: Tensor | None) -> tuple[Tensor, ...]:
        """The gates in float32 (float64 for float64 parameters), under autocast too: a decay is a product over thousands
        of tokens, and near 1 a bfloat16 cannot tell 0.998 from 1."""
        if x_BTE is None:
            raise ValueError("x_BTE is None; this attention computes its gates from the layer's input")
        dtype = compute_dtype(next(self.parameters()))
        with torch.autocast(x_BTE.device.type, enabled=False):
            return self.gates(x_BTE.to(dtype))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """W x in x's dtype."""
    return nn.functional.linear(x, weight.to(x.dtype))


def decay_rate(A_log: Tensor, step: Tensor) -> Tensor:
    """The log decay `-exp(A_log) step` of Mamba-2, in the step's dtype."""
    return -A_log.to(step.dtype).exp() * step


def l2_normalised(x: Tensor) -> Tensor:
    """x / |x| over the last axis, in float32 (float64 for float64); a zero stays a zero."""
    wide = x.to(compute_dtype(x))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers in [0, 1) for a first value."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers for a first value."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def spaced(start: float, end: float, count: int) -> Tensor:
    """`count` numbers evenly from start to end for a first value."""
    return torch.linspace(start, end, count, dtype=torch.float32, device="cpu")


def first_weight(generator: torch.Generator, outputs: int, width: int) -> Tensor:
    """`[outputs, width]`: what it makes of inputs of unit rms has standard deviation START_STD."""
    return START_STD * width**-0.5 * normal(generator, outputs, width)


def first_low_rank(generator: torch.Generator, outputs: int, rank: int, width: int) -> tuple[Tensor, Tensor]:
    """`down` `[rank, width]` and `up` `[outputs, rank]`, which together do the same."""
    return width**-0.5 * normal(generator, rank, width), first_weight(generator, outputs, rank)


def first_A_log(generator: torch.Generator, heads: int, low: float) -> Tensor:
    """ln A, A uniform in (low, 16]."""
    return (16 - (16 - low) * uniform(generator, heads)).log()


def first_dt_bias(generator: torch.Generator, *shape: int) -> Tensor:
    """The inverse softplus of steps that are log-uniform in 0.001 .. 0.1, as in Mamba."""
    low, high = math.log(0.001), math.log(0.1)
    dt = (low + (high - low) * uniform(generator, *shape)).exp()
    return dt + (-torch.expm1(-dt)).log()
