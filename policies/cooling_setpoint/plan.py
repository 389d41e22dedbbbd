"""Set point plan of a loop for the next hours, from the announced weather and the load forecast.

Each step stands for itself. A loop, its CDUs and racks hold some 2.5 minutes of their flow, so coolant that
was chilled ahead stores as many minutes of heat at the most: of a day with a chiller, 0.2 % of its work. A
set point has no more to plan than to be where it has to be in time, and coolers have an end that can be
stated hours before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from policies.cooling_setpoint.balance import PowerBalance
from policies.cooling_setpoint.loop_model import reached_c
from policies.cooling_setpoint.loop_state import SMOOTH_S, air_c
from policies.cooling_setpoint.margins import RACK_W
from policies.cooling_setpoint.sections import LoopCdus
from twin.catalogue import NS
from twin.contracts import View

PLAN_S = (900.0, 3600.0, 7200.0, 10_800.0, 14_400.0, 21_600.0, 28_800.0, 43_200.0)
MOST_TREND_K = (
    2.0  # that the air is expected to move by itself until a decision is half over; source: estimate
)
STEP_K = 0.25  # between the supplies that are compared
SHORT_K = 0.5  # by which a loop that misses its aim is reported


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A loop so long from now: air, heat over that of now, the best supply set point, what it saves of the
    BMS's own one, and the warmest coolant that the loop then has, which is warmer where coolers are at their
    end."""

    ahead_s: float
    air_c: float
    heat_pu: float
    supply_c: float
    saving_w: float
    reached_c: float

    @property
    def is_short(self) -> bool:
        """Return True if the coolers cannot hold this set point."""
        return self.reached_c > self.supply_c + SHORT_K


def ahead_of(view: View, balance: PowerBalance, group: LoopCdus, ahead_s: float) -> PowerBalance:
    """Return the same loop with the expected air and load at this time from now.

    The air as an external source has announced it; else as it goes on from how it moved of late.
    """
    now_c, at = air_c(view, balance.plate), balance.at
    then_c = announced_c(view, balance, ahead_s)
    if np.isnan(then_c):
        # The smoothed air is late by the time of smoothing
        trend_k = (now_c - at.air_c) * min(ahead_s, SMOOTH_S) / SMOOTH_S
        then_c = now_c + float(np.clip(trend_k, -MOST_TREND_K, MOST_TREND_K))
    known_c = at.air_c if np.isnan(then_c) else then_c
    heat_w = at.heat_w * heat_pu(view, group, ahead_s)
    return replace(balance, at=replace(at, air_c=known_c, heat_w=heat_w))


def announced_c(view: View, balance: PowerBalance, ahead_s: float) -> float:
    """Return the announced outdoor air for this time, degC, for a tower the wet bulb; NaN for none."""
    key = "site.outdoor_wet_bulb_c" if balance.plate.wet else "site.outdoor_temp_c"
    return float(view.outlook(key, view.now_ns + round(ahead_s * NS))[0])


def heat_pu(view: View, group: LoopCdus, ahead_s: float) -> float:
    """Return the forecast power of a group's racks over that of the nearest forecast; 1 without one."""
    forecasts = sorted((h, x.mean[group.racks]) for (key, h), x in view.forecasts.items() if key == RACK_W)
    sums = [(h, float(mean.sum())) for h, mean in forecasts]
    sums = [(h, total_w) for h, total_w in sums if np.isfinite(total_w)]
    if len(sums) < 2 or not sums[0][1] > 0.0:
        return 1.0
    horizons_s, total_w = np.array(sums).T
    return float(np.interp(ahead_s, horizons_s, total_w)) / sums[0][1]


def plan_of(
    view: View, balance: PowerBalance, group: LoopCdus, bounds_c: tuple[float, float], base_c: float
) -> tuple[PlanStep, ...]:
    """Return the steps with announced weather, and always the first. `bounds_c`: of the set point."""
    low_c, high_c = bounds_c
    out = list[PlanStep]()
    for ahead_s in PLAN_S:
        if out and np.isnan(announced_c(view, balance, ahead_s)):
            break
        then = ahead_of(view, balance, group, ahead_s)
        supply_c = then.best_c(low_c, high_c, STEP_K) if low_c < high_c else high_c
        aim_c = supply_c - then.offset_k
        short_k = max(0.0, reached_c(then.plate, then.factors, aim_c, then.at) - aim_c)
        out.append(
            PlanStep(
                ahead_s,
                then.at.air_c,
                then.at.heat_w / balance.at.heat_w,
                supply_c,
                then.power_w(base_c) - then.power_w(supply_c),
                supply_c + short_k,
            )
        )
    return tuple(out)
