"""Thermal history: the mean temperature of each GPU, its thermal cycles, and its age.

A thermal cycle is a fall and a rise of `SWING_K` or more between two turning points: a rainflow count of
large swings alone. Sums fade, so that a GPU is described by its last days.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, F64, I64, NS, Bool
from twin.health.context import HealthContext
from twin.site import Site
from twin.telemetry import EntityState, column

# A GPU moves by 20 to 40 K between idle and full load, by less for noise and fans. source: estimate
SWING_K = 15.0
DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0
DAY_NS = 86_400 * NS
LEAST_CYCLES = 1e-3  # of a fading sum; less is none


class ThermalHistory(EntityState):
    """Of each GPU: mean temperature over about a day, cycles of about a week, when it was first seen."""

    since_ns: I64 = column("gpu", "i8")
    mean_c: F32 = column("gpu", "f4", np.nan)
    turn_c: F32 = column("gpu", "f4", np.nan)  # the last turning point, so far
    rising: Bool = column("gpu", "?")
    cycles: F32 = column("gpu", "f4")

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)

    def update(self, now: HealthContext) -> None:
        """Take in the temperatures of a look; those that are stale or bad change nothing."""
        self.since_ns[self.since_ns == 0] = now.now_ns
        if not now.ever_reported("gpu.temp_c"):
            return
        temp_c = now.good("gpu.temp_c")
        if self.cycles.any():
            self.cycles *= np.float32(np.exp(-now.dt_s / WEEK_S))
            self.cycles[self.cycles < LEAST_CYCLES] = 0.0
        # fmin, fmax and comparisons leave out NaN: no reading, or no turning point yet
        share = np.float32(-np.expm1(-now.dt_s / DAY_S))
        step = np.where(np.isnan(self.mean_c), temp_c, self.mean_c + share * (temp_c - self.mean_c))
        np.copyto(self.mean_c, step, where=np.isfinite(step))
        with np.errstate(invalid="ignore"):
            down = self.rising & (temp_c <= self.turn_c - SWING_K)
            up = ~self.rising & (temp_c >= self.turn_c + SWING_K)
        extreme = np.where(self.rising, np.fmax(self.turn_c, temp_c), np.fmin(self.turn_c, temp_c))
        self.turn_c[:] = np.where(down | up, temp_c, extreme)
        self.cycles[up] += 1.0
        self.rising ^= down | up

    def age_d(self, now_ns: int) -> F64:
        """Return the days since each GPU was first seen [n_gpu]; 0 for one never seen."""
        seen_ns = np.where(self.since_ns > 0, self.since_ns, now_ns)
        return np.asarray((now_ns - seen_ns) / DAY_NS, np.float64)
