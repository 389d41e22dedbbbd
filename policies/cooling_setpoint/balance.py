"""Power balance: total power as a function of a loop's supply set point, with its uncertainty.

Warmer coolant saves fans and chiller, and costs leakage of the GPUs and heat from the racks into their hall.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from policies.cooling_setpoint.loop_model import (
    FLOW_MOST_PU,
    ExchangerPoint,
    LoopPlate,
    LoopPoint,
    loop_power_w,
    reached_c,
    sensitivity_w,
)
from twin.catalogue import F64

# Heat from the warm manifolds and hoses of a liquid-cooled rack into its hall, and the power of air handlers
# and of the chillers behind them for it; source: estimate
HOSE_W_PER_K, HALL_W_PER_W, AIR_SPREAD_PU = 25.0, 0.27, 0.5
# The fans of the rack blow it out first. At full speed they draw 8 % of the heat that they are made for, by
# the cube of the flow, at seven eighths of which they work: 3 x 0.08 x 0.77; source: estimate
AIR_W_PER_W = HALL_W_PER_W + 0.18
BEYOND_PU_PER_K = 0.1  # doubt in a difference of the loop's power for each kelvin outside what was seen
COARSE = 4  # steps in one of the first search
SAME_W_PU = 2e-4  # doubt in any difference, of the nominal heat; source: estimate


@dataclass(frozen=True, slots=True)
class LeakSlope:
    """Power of a loop's GPUs per kelvin, with what their nodes lose on the way, W/K, and 1 sigma of it."""

    w_per_k: float
    sigma_w_per_k: float


@dataclass(frozen=True, slots=True)
class PowerBalance:
    """Readings and parameters of a loop now. `now_c` is the coldest supply of its CDUs, `offset_k` by how
    much the loop is aimed colder, `low_c` to `high_c` the supplies that were seen."""

    plate: LoopPlate
    factors: F64
    covariance: F64
    at: LoopPoint
    exchanger: ExchangerPoint
    now_c: float
    offset_k: float
    low_c: float
    high_c: float
    leak: LeakSlope
    racks: int

    def slowed(self, slower: float, more_heat_w: float) -> PowerBalance:
        """Return the balance with this share of the racks' flow, and more heat in the loop."""
        at = replace(self.at, heat_w=self.at.heat_w + more_heat_w)
        return replace(self, at=at, exchanger=self.exchanger.slowed(slower))

    def loop_w(self, supply_c: float) -> float:
        """Return the power of the loop at this supply of the CDUs, W."""
        return loop_power_w(self.plate, self.factors, self.point(supply_c))

    def point(self, supply_c: float) -> LoopPoint:
        """Return the loop's operating point for this supply of the CDUs."""
        at = self.at
        for _ in range(2):  # flow and temperature depend on each other
            at = replace(at, supply_c=reached_c(self.plate, self.factors, supply_c - self.offset_k, at))
            flow_lpm = self.exchanger.flow_at(supply_c, at, FLOW_MOST_PU * self.plate.flow_lpm)
            at = replace(at, flow_lpm=flow_lpm)
        return at

    def power_w(self, supply_c: float) -> float:
        """Return the total power at this supply, W, without the part that does not depend on it."""
        at = self.point(supply_c)
        # Where coolers are at their end, CDUs get no colder than these allow
        held_c = max(supply_c, at.supply_c + self.offset_k)
        return loop_power_w(self.plate, self.factors, at) + self.warmth_w(held_c)

    def warmth_w(self, supply_c: float) -> float:
        """Return leakage and heat into the hall beyond those at the present supply, W."""
        air_w_per_k = self.racks * HOSE_W_PER_K * AIR_W_PER_W
        return (self.leak.w_per_k + air_w_per_k) * (supply_c - self.now_c)

    def sigma_w(self, from_c: float, to_c: float) -> float:
        """Return 1 sigma of the difference of total power between two supplies, W."""
        ends = [self.point(c) for c in (from_c, to_c)]
        loop_w = [loop_power_w(self.plate, self.factors, end) for end in ends]
        slopes = [sensitivity_w(self.plate, self.factors, end) for end in ends]
        slope = slopes[1] - slopes[0]
        learned_w2 = float(slope @ self.covariance @ slope)
        beyond_k = max(0.0, to_c - self.high_c, self.low_c - to_c, from_c - self.high_c, self.low_c - from_c)
        unseen_w = BEYOND_PU_PER_K * beyond_k * abs(loop_w[1] - loop_w[0])
        warm_k = to_c - from_c
        air_w = AIR_SPREAD_PU * self.racks * HOSE_W_PER_K * AIR_W_PER_W * warm_k
        parts = (unseen_w, self.leak.sigma_w_per_k * warm_k, air_w, SAME_W_PU * self.plate.heat_w)
        return float(np.sqrt(learned_w2 + sum(x * x for x in parts)))

    def best_c(self, low_c: float, high_c: float, step_k: float) -> float:
        """Return the supply of least total power within low..high, degC: among coarse steps, then between.

        Of equals the warmest: a set point that coolers cannot hold is none.
        """
        best_c = 0.5 * (low_c + high_c)
        for step, around_k in ((COARSE * step_k, np.inf), (step_k, COARSE * step_k)):
            ends_c = max(low_c, best_c - around_k), min(high_c, best_c + around_k)
            candidates = np.unique(np.append(np.arange(*ends_c, step), ends_c[1]))[::-1]
            powers = np.round([self.power_w(float(c)) for c in candidates], 1)
            best_c = float(candidates[int(np.argmin(powers))])
        return best_c
