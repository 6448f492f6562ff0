"""The state of decaying linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from hybridize.ops.recurrence import RecurrentState


@dataclass
class DecayState(RecurrentState):
    """See `RecurrentState`."""
