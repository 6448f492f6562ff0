"""What a conversion will need: parameters, bytes, memory and steps, from a config alone."""

from hybridize.plan.bytes import state_bytes
from hybridize.plan.plan import Memory, Plan, StagePlan, StateRow, plan

__all__ = ["Memory", "Plan", "StagePlan", "StateRow", "plan", "state_bytes"]
