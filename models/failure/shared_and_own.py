"""Forecast from a fault log alone: a node's own faults and shared faults, each with its own fit.

Both are self-exciting rates. A cause in common that strikes anyone leaves all nodes the same chance of the
next one; one that strikes the same nodes again and again, as a rack's feed or a cluster's reinstallation
does, is attributed to those nodes. The faults of one cause are one piece of evidence: the second fit is drawn
to a constant rate by as many times more faults as a cause has on average.
"""

from __future__ import annotations

import numpy as np

from models.failure.common_cause import WINDOW_D, shared_faults
from models.failure.fault_log import FaultLog
from models.failure.self_exciting import PRIOR_FAULTS, SelfExciting
from twin.catalogue import F64, Bool


class SharedAndOwn:
    """Fit on a log as known on a day, then the probability of a fault within a span."""

    def __init__(self) -> None:
        self.own, self.shared = SelfExciting(), SelfExciting()
        self._before: tuple[FaultLog, Bool] | None = None

    def _parts(self, known: FaultLog) -> tuple[FaultLog, FaultLog]:
        """Faults of single nodes, and faults that several share."""
        shared = shared_faults(known, self._before)
        self._before = known, shared
        return known.only(~shared), known.only(shared)

    def fit(self, known: FaultLog, day: float) -> None:
        """Learn from days whose next day is over."""
        own, shared = self._parts(known)
        self.own.load(self.own.fit(own, day))
        if shared.k:
            causes = 1 + int(np.count_nonzero(np.diff(shared.start_d) > WINDOW_D))
            self.shared.load(self.shared.fit(shared, day, prior_faults=PRIOR_FAULTS * shared.k / causes))

    def predict(self, known: FaultLog, day: float, spans_d: tuple[float, ...]) -> F64:
        """Probability of a fault in (day, day + span] of nodes that are up [n_span, n]."""
        own, shared = self._parts(known)
        p = self.own.predict(own, day, spans_d)
        if not shared.k:
            return p
        return 1.0 - (1.0 - p) * (1.0 - self.shared.predict(shared, day, spans_d))
