"""Shadow leases: the leases that would run if every advising policy had been allowed to act.

The arbiter settles them by the rules of real leases, but never sends them. A row without advice is a copy of
the real lease.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twin.catalogue import F64, I64, NS, Bool
from twin.control.leases import MISMATCH_S, Leases
from twin.telemetry import OWN, column

# From the command that follows an advice until it may be read back: so long the policy that was armed still
# counts it as carried out, as its preview did; longer where devices are read more rarely.
HANDOVER_S = MISMATCH_S
OBEYED_S = 5.0  # of that, in which a device carries it out: a reading of then may be old. source: estimate
MOST_HANDOVER_S = 150.0  # a device that is read each minute, and missed once. source: estimate


class ShadowLeases(Leases):
    """The leases of one control as they would be. All columns [n]."""

    apart: Bool = column(OWN, "?")  # advised: here the shadow goes a way of its own
    handed_ns: I64 = column(OWN, "i8")  # when the real lease took over what was advised; 0 = not of late

    def follow(self, real: Leases) -> None:
        """Copy the real leases where nothing is advised."""
        apart = np.flatnonzero(self.apart)
        for name in real.declared:
            mine, theirs = getattr(self, name), getattr(real, name)
            kept = mine[apart]
            np.copyto(mine, theirs)
            mine[apart] = kept

    def part(self, real: Leases, advised: Bool, settled: Bool, received_ns: I64, now_ns: int) -> None:
        """Note where something is advised after a tick was settled [n].

        `settled`: a claim holds the row. What may be commanded now is handed over to the real lease, until it
        was `received_ns` what came of it.
        """
        apart = advised
        self.handed_ns[self.apart & settled & ~advised & real.running()] = now_ns
        passed_s = (now_ns - self.handed_ns) / NS
        obeyed = (received_ns - self.handed_ns) / NS >= OBEYED_S
        over = (passed_s >= HANDOVER_S) & (obeyed | (passed_s >= MOST_HANDOVER_S))
        self.handed_ns[apart | over] = 0
        self.apart = apart

    @property
    def idle(self) -> bool:
        """True if all rows are those of the real leases."""
        return not (self.apart.any() or self.handed_ns.any())

    def value_beside(self, real: Leases, owners: Sequence[int] | None = None) -> F64:
        """Value of the lease per entity: the shadow's where something is advised, else the real one [n].

        `owners`: only where these policies advise.
        """
        apart = self.apart if owners is None else self.apart & np.isin(self.owner, owners)
        return np.where(apart, self.value, real.value)

    def handed(self, real: Leases) -> F64:
        """Commands that count as carried out before any read-back [n]; NaN where the read-back counts."""
        return np.where(self.handed_ns > 0, real.value, np.nan)

    def obeyed(self, real: Leases, owners: Sequence[int] | None = None) -> F64:
        """The same with all that is advised, or what some policies advised until now [n]."""
        differs = self.apart & ~(self.value == real.value)
        if owners is not None:
            differs &= np.isin(self.owner, owners)
        return np.where(differs, self.value, self.handed(real))

    def metered(self, now_ns: int) -> Bool:
        """Mask of what was handed over so long ago that the meters above it know [n]."""
        out: Bool = ~self.apart & (self.handed_ns > 0) & (now_ns - self.handed_ns >= round(HANDOVER_S * NS))
        return out
