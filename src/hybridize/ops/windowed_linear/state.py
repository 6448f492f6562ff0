"""The state of windowed linear attention: raw keys still near, and (S, z) of the far ones."""

from __future__ import annotations

from dataclasses import dataclass

from hybridize.ops.linear.state import LinearState
from hybridize.ops.ring import RingState
from hybridize.ops.types import State


@dataclass
class WindowedLinearState(State):
    ring: RingState
    far: LinearState
