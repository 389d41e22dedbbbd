"""operator: what people ask for is a proposal like any other; there is no back door.

Every standing request becomes an interval on its control. Requests speak in the order in which they were
made, after protection.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from twin.catalogue import TABLES, find_control
from twin.contracts import Columns, Memory, Proposal, View
from twin.telemetry import OperatorRequest


class Operator:
    """Turns standing requests into proposals."""

    name: ClassVar[str] = "operator"
    controls: ClassVar[tuple[str, ...]] = tuple(c.key for spec in TABLES.values() for c in spec.controls)
    rank: ClassVar[int] = 10
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = None

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """One proposal per request; a request that names no entity of this site says nothing."""
        return [p for r in view.requests if (p := self._proposal(view, r)) is not None], memory

    @staticmethod
    def _proposal(view: View, request: OperatorRequest) -> Proposal | None:
        control = find_control(request.control)
        if control is None:
            return None
        index = view.targets(request)
        if len(index) == 0:
            return None
        k = len(index)
        want = np.nan if request.want is None else request.want
        why = f"asked by {request.author}" + (f": {request.reason}" if request.reason else "")
        return Proposal(
            request.control, index, np.full(k, request.lo), np.full(k, request.hi), np.full(k, want), why
        )
