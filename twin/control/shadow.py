"""Shadow leases: what would be leased by now if every policy that advises had been allowed to act.

The arbiter settles them by the rules of the real ones. Nothing here is ever sent. A row on which nobody
advises is a copy of the real lease.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, NS, Bool
from twin.control.leases import MISMATCH_S, Leases
from twin.telemetry import OWN, column

# From the command that follows an advice until it may be read back: so long the policy that was armed still
# counts it as carried out, as its preview did.
HANDOVER_S = MISMATCH_S


class ShadowLeases(Leases):
    """The leases of one control as they would be. All columns [n]."""

    apart: Bool = column(OWN, "?")  # advised: here the shadow goes a way of its own
    handed_ns: I64 = column(OWN, "i8")  # when the real lease took over what was advised; 0 = not of late

    def follow(self, real: Leases) -> None:
        """Copy the real leases where nothing is advised."""
        same = ~self.apart
        for name in real.declared:
            np.copyto(getattr(self, name), getattr(real, name), where=same)

    def part(self, real: Leases, advised: Bool, settled: Bool, now_ns: int) -> None:
        """Note where something is advised after a tick was settled [n].

        `settled`: a claim holds the row. What may be commanded now is handed over to the real lease.
        """
        apart = advised
        self.handed_ns[self.apart & settled & ~advised & real.running()] = now_ns
        self.handed_ns[apart | (now_ns - self.handed_ns >= round(HANDOVER_S * NS))] = 0
        self.apart = apart

    @property
    def idle(self) -> bool:
        """True if all rows are those of the real leases."""
        return not (self.apart.any() or self.handed_ns.any())

    def value_beside(self, real: Leases) -> F64:
        """Value of the lease per entity: the shadow's where something is advised, else the real one [n]."""
        return np.where(self.apart, self.value, real.value)

    def obeyed(self, real: Leases) -> F64:
        """Values that count as carried out before anybody has heard of them [n]; NaN: reality speaks."""
        differs = self.apart & ~(self.value == real.value)
        return np.where(differs, self.value, np.where(self.handed_ns > 0, real.value, np.nan))
