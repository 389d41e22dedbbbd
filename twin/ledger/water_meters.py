"""Water meters: what loops drew since all of their meters were last read, beside the energy of racks.

Meters are read seldom and not at once, and a counter that is read again covers all the time since. So
water and energy wait until each loop was read, and are then known for the same time.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import I32, I64, TABLES, Bool
from twin.site import Site, expand
from twin.telemetry import EntityState, TableState, column, scalar

MAKEUP = TABLES["loop"].by_name["makeup_ml"]
ML_PER_L = 1e3


class WaterMeters(EntityState):
    """Last counts of make-up water, and the energy of racks since."""

    total_ml: I64 = column("loop", "i8", -1)  # -1: not counted yet
    resets: I32 = column("loop", "i4")
    begin_ns: int = scalar(0)  # of what waits
    it_j: float = scalar(0.0)

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        dry = {
            name for group in site.file.loops if group.cooling == "dry_cooler" for name in expand(group.name)
        }
        names = site.names["loop"]
        # A dry cooler draws nothing: it needs no meter
        self._dry: Bool = np.array([name.rpartition("/")[2] in dry for name in names], np.bool_)

    def settle(self, table: TableState, it_j: float, begin_ns: int, end_ns: int) -> tuple[float, float, int]:
        """Return (l, energy of racks, ns) known with this look; nothing while a loop's meter is missing.

        What a meter drew that was not read before, began anew or was replaced is not known: it is left out,
        and so is the energy of that time.
        """
        nothing = 0.0, 0.0, 0
        metered = table.raw[MAKEUP.row] >= 0
        if self.begin_ns:  # a meter that is silent for a while goes on counting, and so do racks
            self.it_j += it_j
        if not metered.any() or not (metered | self._dry).all():
            return nothing
        if not self.begin_ns:
            self.begin_ns, self.it_j = begin_ns, it_j
        if (table.received_ns(MAKEUP)[metered] <= self.begin_ns).any():
            return nothing
        total_ml, resets = table.total[MAKEUP.row], table.resets[MAKEUP.row]
        follows = (self.total_ml >= 0) & (resets == self.resets) & (total_ml >= self.total_ml)
        found = nothing
        if follows[metered].all():
            drawn_ml = int((total_ml - self.total_ml)[metered].sum())
            found = drawn_ml / ML_PER_L, self.it_j, end_ns - self.begin_ns
        np.copyto(self.total_ml, total_ml, where=metered)
        np.copyto(self.resets, resets, where=metered)
        self.begin_ns, self.it_j = end_ns, 0.0
        return found
