"""The state of the diagonal plus low rank rule."""

from __future__ import annotations

from dataclasses import dataclass

from hybridize.ops.recurrence import RecurrentState


@dataclass
class DplrState(RecurrentState):
    """See `RecurrentState`."""
