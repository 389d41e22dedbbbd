"""Sparse power: heat of a plate whose power is read less often than the plate's time constant.

An exporter that is scraped every 30 s shows one instant of it, and a plate forgets in 7 s. Between two
readings the power is taken to have stood, until the second one gives a better value: by the energy that was
counted in between, or by a step at an instant that nobody knows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64, NS, TABLES, Bool
from twin.estimation.readings import Readings
from twin.telemetry import EntityState, Sizes, column

# Seconds between readings up to which a power is taken to stand still; source: estimate
DENSE_S = 5.0
# Time for which a move of the power between two readings speaks of more that no reading saw; source: estimate
SWING_S = 600.0
LEAST_MOVE_W = 5.0  # below, two readings are alike; source: estimate, noise of a board's power
MOST_PU = 1.2  # of the highest power of a GPU; a mean beyond is an error of its counter; source: estimate
ENERGY = TABLES["gpu"].by_name["energy_mj"]


class Gaps(NamedTuple):
    """GPUs with a new power long after the one before [k]: seconds in between, both powers and, where the
    energy in between was counted, the mean power; NaN where not."""

    gpus: I64
    gap_s: F64
    before_w: F64
    now_w: F64
    mean_w: F64


class PlateHeat(NamedTuple):
    """Corrections of the two lags of power [k], W, and 1 sigma of the first [k], W."""

    once_w: F64
    twice_w: F64
    sigma_w: F64


class SeldomPower(EntityState):
    """Instants, energies and changes of the power of GPUs with rare readings."""

    read_ns: I64 = column("gpu", "i8")  # instant of the last power
    energy_mj: F64 = column("gpu", "f8", np.nan)  # counted up to there
    energy_ns: I64 = column("gpu", "i8")
    swing_w: F64 = column("gpu", "f8")  # by which the power moved between readings

    def __init__(self, sizes: Sizes, most_w: F64) -> None:
        super().__init__(sizes)
        self._most_w = most_w

    def update(self, readings: Readings, power_w: F64, power_ns: I64, before_w: F64) -> tuple[Gaps, Bool]:
        """Return the gaps that end with this tick's new powers [n]."""
        gap_ns = power_ns - self.read_ns
        new = (gap_ns > 0) & np.isfinite(power_w)
        gpus = np.flatnonzero(new & (gap_ns > DENSE_S * NS))
        if len(gpus):
            known = (self.read_ns[gpus] > 0) & np.isfinite(before_w[gpus])
            mean_w = self._mean_w(readings, gpus)
            at = gpus[known]
            gaps = Gaps(at, gap_ns[at] / NS, before_w[at], power_w[at], mean_w[known])
        else:
            gaps = Gaps(gpus, *(np.zeros(0) for _ in range(4)))
        np.copyto(self.read_ns, power_ns, where=new)
        return gaps, new

    def _mean_w(self, readings: Readings, gpus: I64) -> F64:
        """Mean power since the last seldom reading, by the energy counter [k]; NaN where that is not known
        or cannot be."""
        table = readings.state.tables["gpu"]
        counted = table.raw[ENERGY.row, gpus] >= 0
        total_mj = np.where(counted, table.total[ENERGY.row, gpus].astype(np.float64), np.nan)
        now_ns = table.received_ns(ENERGY)[gpus]
        with np.errstate(divide="ignore", invalid="ignore"):
            mean_w = 1e-3 * (total_mj - self.energy_mj[gpus]) / ((now_ns - self.energy_ns[gpus]) / NS)
            possible = (mean_w > 0.0) & (mean_w <= MOST_PU * self._most_w[gpus])
        # Of another span than the power's
        possible &= self.energy_ns[gpus] >= self.read_ns[gpus] - NS
        self.energy_mj[gpus], self.energy_ns[gpus] = total_mj, now_ns
        return np.where(possible, mean_w, np.nan)

    def heat(self, gaps: Gaps, tau_s: F64, dt_s: float) -> PlateHeat:
        """Correct lags with `tau_s` [k] that the old power drove up to this tick, and the new one in its
        `dt_s`.

        A step at an instant that is uniform over the gap g has settled to 1 - tau/g (1 - exp(-g/tau)) on
        average (integral of exp(-u/tau) over u from 0 to g; of the second lag of (1 + u/tau) exp(-u/tau)).
        A mean power between the two gives the instant of one step. A mean beyond both shows moves in
        between: then the plate is as warm as the mean makes it, within the distance to the last reading.
        """
        moved_w = gaps.now_w - gaps.before_w
        gap, step = gaps.gap_s / tau_s, np.minimum(dt_s, gaps.gap_s) / tau_s
        left = np.exp(-gap)
        mean = (1.0 - left) / gap
        once, twice = mean, 2.0 * mean - left  # what is left of the way to the new power
        spread = np.sqrt(np.maximum((1.0 - left**2) / (2.0 * gap) - mean**2, 0.0))
        counted = np.isfinite(gaps.mean_w)
        off_w = np.where(counted, gaps.now_w - gaps.mean_w, 0.0)
        one_step = counted & (off_w * moved_w >= 0.0) & (np.abs(off_w) <= np.abs(moved_w))
        one_step &= np.abs(moved_w) > LEAST_MOVE_W
        since = np.where(one_step, gap * (1.0 - off_w / np.where(moved_w == 0.0, 1.0, moved_w)), 0.0)
        once = np.where(one_step, np.exp(-since), once)
        twice = np.where(one_step, (1.0 + since) * np.exp(-since), twice)
        beyond = ~one_step & (np.abs(off_w) > LEAST_MOVE_W)
        kept = np.exp(-gaps.gap_s / SWING_S)
        swing_w = np.maximum(np.abs(moved_w), np.where(beyond, np.abs(off_w), 0.0))
        swing_w = self.swing_w[gaps.gpus] = np.maximum(swing_w, kept * self.swing_w[gaps.gpus])
        driven, driven2, left2 = np.exp(-step), (1.0 + step) * np.exp(-step), (1.0 + gap) * left
        way = np.where(beyond, off_w * (1.0 - left) + moved_w * left, moved_w * once)
        way2 = np.where(beyond, off_w * (1.0 - left2) + moved_w * left2, moved_w * twice)
        # A mean equal to the last reading excludes an unobserved swing
        unseen_w = np.where(counted, np.abs(moved_w), swing_w)
        sigma_w = np.where(beyond, np.abs(off_w), unseen_w * spread)
        return PlateHeat(moved_w * driven - way, moved_w * driven2 - way2, sigma_w)
