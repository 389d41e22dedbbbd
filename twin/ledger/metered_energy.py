"""Metered energy: the energy of the entities of a table since the last look, from their power and counters.

A power that is not read is taken as the last one, with an error of a share of it, until it is read again:
then the time between is filled by the mean of both. The growth of a counter replaces what the power said
since the counter was last read, however long that is.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I32, I64, Bool, Signal
from twin.telemetry import OWN, EntityState, Sizes, TableState, column

# 1 sigma of a reading that is held through a gap, over it; source: estimate, between idle and full load
HELD_PU = 0.3
# The same beside the move of the power across the gap, once it is read again; source: estimate
FILLED_PU = 0.05
UNIFORM = 12.0**-0.5  # 1 sigma of what is anywhere between two values, over their distance
# A counter may differ from the power since its last reading by so much of it, and by as many seconds of it;
# beyond, it was replaced or reset; source: estimate, gateways are seconds late
AWAY_PU, AWAY_S, AWAY_SIGMAS = 0.25, 10.0, 3.0
MOST_LOOKS = (
    360  # without a counter, an hour: then it is dead, and the power is all there is; source: estimate
)


class PowerIntegral(EntityState):
    """Energy of each entity of a table since the last look, from its power; replacements keep the place."""

    energy_j: F64 = column(OWN, "f8", of_place=True)
    var_j2: F64 = column(OWN, "f8", of_place=True)  # of gaps
    known_s: F64 = column(
        OWN, "f8", of_place=True
    )  # seconds of which the power was read, or known from before
    power_w: F64 = column(OWN, "f8", np.nan)  # the last one that was read
    gap_s: F64 = column(OWN, "f8")
    gap_sigma_j: F64 = column(OWN, "f8")  # of the gap, as far as it is in `var_j2`

    def __init__(self, sizes: Sizes, table: str) -> None:
        super().__init__(sizes, table)
        self._gaps = False

    def derive(self) -> None:
        """Note if any gap is open."""
        self._gaps = bool(self.gap_s.any())

    def add(self, power_w: F64, dt_s: float, paused: bool) -> None:
        """Add a tick: the power read [n], NaN for none. `paused`: there was no observation before it."""
        read: Bool = np.isfinite(power_w)
        if not paused and not self._gaps and read.all():
            self.energy_j += power_w * dt_s
            self.known_s += dt_s
            self.power_w[:] = power_w
            return
        gap = ~read if not paused else np.ones_like(read)
        # A first reading has no information on the time before it, including a pause
        fresh = read & ~np.isfinite(self.power_w)
        held_w = np.where(gap, self.power_w, power_w)
        known = np.isfinite(held_w)
        self.energy_j += np.where(known, held_w, 0.0) * dt_s
        self.known_s += known * dt_s
        self.gap_s += np.where(gap & known, dt_s, 0.0)
        over = read & (self.gap_s > 0.0) & ~fresh
        open_ = gap & known & ~over
        sigma_j = np.where(open_, HELD_PU * np.abs(held_w) * self.gap_s, self.gap_sigma_j)
        if over.any():
            move_w = power_w - self.power_w
            self.energy_j += np.where(over, 0.5 * move_w * self.gap_s, 0.0)
            filled_w = UNIFORM * np.abs(move_w) + FILLED_PU * np.abs(power_w)
            sigma_j = np.where(over, filled_w * self.gap_s, sigma_j)
        self.var_j2 += sigma_j**2 - self.gap_sigma_j**2
        self.gap_sigma_j[:] = np.where(open_, sigma_j, 0.0)
        self.gap_s[over | fresh] = 0.0
        np.copyto(self.power_w, power_w, where=read)
        self._gaps = bool(self.gap_s.any())

    def take(self) -> tuple[F64, F64, F64]:
        """Return (energy, its variance, seconds known) since the last look [n], and restart."""
        out = self.energy_j.copy(), self.var_j2.copy(), self.known_s.copy()
        self.energy_j[:], self.var_j2[:], self.known_s[:] = 0.0, 0.0, 0.0
        return out


class EnergyCounters(EntityState):
    """Energy counters at the last look, and the energy booked by power since."""

    seen_mj: I64 = column(OWN, "i8", -1)  # total; -1: not yet
    resets: I32 = column(OWN, "i4")
    booked_j: F64 = column(OWN, "f8")  # since the counter was last read
    booked_var_j2: F64 = column(OWN, "f8")
    counted: Bool = column(OWN, "?")  # it is what the energy is taken from
    waited: I32 = column(OWN, "i4")  # looks since it was last read

    def __init__(self, sizes: Sizes, table: str, signal: Signal) -> None:
        super().__init__(sizes, table)
        self._signal = signal
        self.fresh: Bool = np.zeros(sizes[table], np.bool_)  # read in the last look

    def settle(
        self, table: TableState, energy_j: F64, var_j2: F64, power_w: F64, known: Bool
    ) -> tuple[F64, F64, int]:
        """Return (energy, variance) of a look with the counters applied, and the number of refused
        counters.

        `energy_j`, `var_j2`: by the power, which was `known` all the time; `power_w`: the last one.
        """
        row = self._signal.row
        total, resets = table.total[row], table.resets[row]
        self.booked_j += energy_j
        self.booked_var_j2 += var_j2
        read = table.raw[row] >= 0
        first = read & (self.seen_mj < 0)
        grown_j = (total - self.seen_mj) * 1e-3
        ended = read & ~first & ((grown_j != 0.0) | (resets != self.resets))
        away_j = AWAY_PU * np.abs(self.booked_j) + AWAY_S * np.abs(np.nan_to_num(power_w))
        away_j += AWAY_SIGMAS * np.sqrt(np.maximum(self.booked_var_j2, 0.0))
        fits = (resets == self.resets) & (grown_j >= 0.0)
        fits &= ~known | (np.abs(grown_j - self.booked_j) <= away_j)
        good = ended & fits
        energy_j = energy_j + np.where(good, grown_j - self.booked_j, 0.0)
        var_j2 = var_j2 - np.where(good, self.booked_var_j2, 0.0)
        self.waited[:] = np.where(ended, 0, self.waited + 1)
        self.counted[:] = np.where(ended, good, self.counted & ~first & (self.waited < MOST_LOOKS))
        # Energy that waits for its counter is not settled; a power alone is, where it is read
        self.fresh = np.where(self.counted, ended, (var_j2 == 0.0) | ended)
        anew = first | ended
        np.copyto(self.seen_mj, total, where=anew)
        np.copyto(self.resets, resets, where=anew)
        self.booked_j[anew], self.booked_var_j2[anew] = 0.0, 0.0
        return energy_j, var_j2, int(np.count_nonzero(ended & ~fits))
