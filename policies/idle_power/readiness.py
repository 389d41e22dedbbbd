"""Readiness: the idle GPUs that must be ready, those that are, and the obstacles to sleep."""

from __future__ import annotations

from dataclasses import dataclass

from policies.idle_power.demand import DemandState
from policies.idle_power.nodes import NodeRoster


@dataclass(frozen=True, slots=True)
class Readiness:
    """Needed and present idle GPUs. `hold`: the reason why no more nodes may sleep; "" if they may."""

    state: DemandState
    roster: NodeRoster
    lead_s: float
    failures: float  # GPUs of nodes that may fail within the lead
    ready: float
    hold: str

    @property
    def need(self) -> float:
        """Idle GPUs that have to be ready."""
        return self.state.need + (self.failures if self.state.forecast else 0.0)
