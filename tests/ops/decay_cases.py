"""Cases of the decaying attention's tests: tensors with a fixed decay, a scalar a token, or a value a channel."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hybridize.ops import decay as op

KINDS = ["fixed", "scalar", "vector"]
SCALE = 0.3
HEADS, DIM, VALUES = 4, 6, 5


@dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    log: Tensor

    def tokens(self, begin: int, end: int) -> Case:
        return self.map(lambda x: x[:, begin:end] if x.dim() > 1 else x)

    def map(self, function) -> Case:
        return Case(*(function(x) for x in self.leaves))

    @property
    def leaves(self) -> list[Tensor]:
        return [getattr(self, entry.name) for entry in fields(self)]


def case(
    kind, batch, length, *, groups=2, dim=DIM, values=VALUES, dtype=torch.float32, seed=0, strength=1.0
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (
        normal(batch, length, HEADS, dim),
        normal(batch, length, groups, dim),
        normal(batch, length, groups, values),
    )
    shape = {"fixed": (HEADS,), "scalar": (batch, length, HEADS), "vector": (batch, length, HEADS, dim)}[kind]
    if kind == "fixed":
        return Case(q, k, v, -strength * (2.0 ** -torch.arange(HEADS)).to(dtype))
    return Case(q, k, v, strength * torch.nn.functional.logsigmoid(1 + normal(*shape)))


def run(x: Case, **options):
    return op.forward(x.q, x.k, x.v, x.log, scale=SCALE, **options)


def random_state(rows, dim=DIM, dtype=torch.float32, seen=0, values=VALUES):
    generator = torch.Generator().manual_seed(9)
    S = torch.randn(rows, HEADS, dim, values, generator=generator, dtype=torch.float64).to(dtype)
    return op.DecayState(lengths_N=torch.full((rows,), seen), S_NHDV=S)
