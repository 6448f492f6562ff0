"""The state of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from hybridize.ops.recurrence import RecurrentState


@dataclass
class DeltaState(RecurrentState):
    """See `RecurrentState`."""
