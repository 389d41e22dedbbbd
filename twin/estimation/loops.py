"""Facility loops: their supply expected from the weather, their return from the CDUs, and their flow.

The approach to the weather is learned; it drifts with load and mode, so it may drift fast. A loop follows the
coldest set point of its CDUs as far as its coolers can: after a set point has moved, any supply on the way
that it has moved is as expected. What passes the
CDUs by cools what they give back, the more so the less they draw, and the leg holds so much water: it takes
the longer to pass the less flows.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64
from twin.estimation.comparisons import Board, Row
from twin.estimation.readings import Lag, Latest, filled, joint, share_of
from twin.site import LOOP_VOLUME_MIN, Site

APPROACH, RETURN, FLOW = "loop.supply_temp_c", "loop.return_temp_c/cdus", "loop.flow_lpm/cdus"
TEMP_NOISE_K = 0.05  # floor; source: estimate
FLOW_NOISE_PU = 0.005  # of the reading; source: estimate
WEATHER_MOVES_K = 0.12  # in the minutes until what was learned comes into use, 2 K/h; source: estimate
# Time that the coolers' control takes to follow the heat, and the share of a change of the CDUs' range over
# the nominal flow by which the supply is off meanwhile; source: estimate
LATE_S, LATE_SHARE, LEAST_MOVE_K = 120.0, 0.3, 0.3
# In which a moved set point is old news: longer than the approach takes to be learned anew; source: estimate
AIM_S = 900.0
LEAST_AIM_K = 0.1  # a set point's last digit, or its noise, is no move: as the dead band of its control
AIM_SHARE = 0.3  # of the move of a set point: by which the coolers' control overshoots it; source: estimate
BYPASS_PRIOR = 0.05  # over the nominal flow; source: estimate
LEAST_PASSING_PU = 0.05  # of the nominal flow: below, nothing arrives that could be judged; source: estimate
LEAST_SLOPE_K = 1.0  # per unit of bypass: below, a reading says nothing of it; source: estimate
SENSORS_K = 0.1  # thermometers of a loop and its CDUs against each other; source: estimate
LOOP_NAMES = ("supply_temp_c", "return_temp_c", "flow_lpm")
SITE_NAMES = ("outdoor_temp_c", "outdoor_wet_bulb_c")


def rows(site: Site) -> list[Row]:
    """Return the relations of this part."""
    n = site.sizes["loop"]
    return [
        Row(APPROACH, "loop", n, TEMP_NOISE_K, "loop.approach", np.nan, 10.0, 0.3, 2e-2, hold_s=120.0),
        Row(RETURN, "loop", n, TEMP_NOISE_K, "loop.bypass", BYPASS_PRIOR, 0.1, 0.03, 3e-4, low=0.0, high=1.0,
            hold_s=120.0),
        Row(FLOW, "loop", n, FLOW_NOISE_PU, "loop.flow_ratio", 1.0, 0.1, 0.01, 3e-4, low=0.5, high=2.0),
    ]  # fmt: skip


class Loops:
    """Relations of facility loops."""

    def __init__(self, site: Site) -> None:
        n = self.n = site.sizes["loop"]
        self.cdu = np.flatnonzero(site.loop_of_cdu >= 0).astype(np.int32)
        self.loop = site.loop_of_cdu[self.cdu]
        self.tank, self.calm = Lag(1, site.sizes, "loop"), Lag(1, site.sizes, "loop")  # of mix and range
        self.aim = Lag(1, site.sizes, "loop")  # of the coldest set point
        self.aim_c = np.full(n, np.nan)  # the coldest set point of this tick
        self._tau_s = np.full(n, 0.5 * 60.0 * LOOP_VOLUME_MIN)
        self._empty = np.bincount(self.loop, minlength=n) == 0
        self._nominal_lpm = site.design.loop_flow_lpm

    def update(
        self, weather: Latest, cdu: Latest, loop: Latest, board: Board, now_ns: int, dt_s: float
    ) -> None:
        """Update the expected temperatures and flow of each loop."""
        if self.n == 0:
            return
        supply, back, flow = (loop[k] for k in LOOP_NAMES)
        outdoor, read_ns, weather_steps_k = np.nan, 0, 0.0
        for name in SITE_NAMES:  # the wet bulb, where there is one: towers follow it, dry coolers nearly
            if len(weather[name]) and np.isfinite(weather[name][0]):
                outdoor, read_ns = float(weather[name][0]), int(weather.received_ns(name)[0])
                weather_steps_k = float(weather.step_sigma(name)[0])
        lpm = cdu["facility_flow_lpm"][self.cdu]
        summed: F64 = np.bincount(self.loop, lpm, self.n).astype(np.float64)
        summed = np.where(self._empty | (summed < 1.0), np.nan, summed)
        now = now_ns, dt_s
        moved_k = self._moved(lpm, cdu, now)
        # Weather is reported once a minute; only the loop's reading is new
        received_ns = np.where(read_ns > 0, loop.received_ns("supply_temp_c"), 0)
        base, aim_k = outdoor + board.parameter(APPROACH), self._aim_moved_k(cdu, now)
        # Somewhere between where it was and where its CDUs have asked it to go
        followed_k = filled(np.clip(supply - base, np.minimum(aim_k, 0.0), np.maximum(aim_k, 0.0)))
        board.put(
            APPROACH,
            base + followed_k,
            supply,
            received_ns,
            implied=supply - outdoor,
            slope=1.0,
            loose=WEATHER_MOVES_K + moved_k + AIM_SHARE * np.abs(aim_k),
            steps=joint(loop.step_sigma("supply_temp_c"), np.full(1, weather_steps_k)),
        )

        given = lpm * cdu["facility_return_temp_c"][self.cdu]
        heat: F64 = np.bincount(self.loop, given, self.n).astype(np.float64)
        oldest = np.full(self.n, np.iinfo(np.int64).max)
        np.minimum.at(
            oldest, self.loop, cdu.received_ns("facility_flow_lpm", "facility_return_temp_c")[self.cdu]
        )
        received_ns = np.minimum(oldest, loop.received_ns("return_temp_c"))
        mixed_steps = lpm * cdu.step_sigma("facility_return_temp_c")[self.cdu]
        steps_k = np.bincount(self.loop, mixed_steps, self.n) / summed
        board.steps[board.cells[RETURN]] = joint(steps_k, loop.step_sigma("return_temp_c"))
        self._return(board, heat, summed, (supply, back), received_ns, now)
        board.put_ratio(FLOW, summed, flow, np.minimum(oldest, loop.received_ns("flow_lpm")))

    def _moved(self, lpm: F64, cdu: Latest, now: tuple[int, float]) -> F64:
        """Return 1 sigma, K, of each loop's supply after a recent change of its heat."""
        rise = cdu["facility_return_temp_c"] - cdu["facility_supply_temp_c"]
        carried: F64 = np.bincount(self.loop, lpm * rise[self.cdu], self.n).astype(np.float64)
        range_k = carried / np.where(self._nominal_lpm > 0.0, self._nominal_lpm, np.nan)
        calm_k = self.calm.toward(range_k[None], share_of(now[1], np.full(1, LATE_S)), now)[0]
        away_k = np.abs(range_k - calm_k) - LEAST_MOVE_K
        return np.asarray(LATE_SHARE * np.maximum(filled(away_k), 0.0), np.float64)

    def _aim_moved_k(self, cdu: Latest, now: tuple[int, float]) -> F64:
        """Return the recent change of the coldest set point of each loop, K; 0 if unknown."""
        own, final = cdu["supply_temp_setpoint_c"][self.cdu], cdu["supply_temp_setpoint_final_c"][self.cdu]
        coldest = np.full(self.n, np.inf)
        np.fmin.at(coldest, self.loop, np.where(np.isfinite(final), final, own))
        coldest[np.isinf(coldest)] = np.nan
        self.aim_c = coldest
        before = self.aim.toward(coldest[None], share_of(now[1], np.full(1, AIM_S)), now)[0]
        moved_k = filled(coldest - before)
        return np.sign(moved_k) * np.maximum(np.abs(moved_k) - LEAST_AIM_K, 0.0)

    def _return(
        self,
        board: Board,
        heat: F64,
        summed: F64,
        ends: tuple[F64, F64],
        received_ns: I64,
        now: tuple[int, float],
    ) -> None:
        """Return of each loop: `heat` is the sum of flow times return over its CDUs, `ends` its supply and
        return, `now` the instant and the step."""
        supply, back = ends
        nominal = np.where(self._nominal_lpm > 0.0, self._nominal_lpm, summed)
        passing = summed + board.parameter(RETURN) * nominal
        mixed = (heat + (passing - summed) * supply) / passing
        tau_s = self._tau_s / np.maximum(passing / nominal, LEAST_PASSING_PU)
        tau_s = np.where(np.isfinite(tau_s), tau_s, self._tau_s)
        arrived = self.tank.toward(mixed[None], share_of(now[1], tau_s), now)[0]
        slope = nominal * (supply - mixed) / passing  # of what is mixed, at rest
        teaching = np.abs(slope) > LEAST_SLOPE_K
        board.put(
            RETURN,
            arrived,
            back,
            received_ns,
            implied=np.where(teaching, board.parameter(RETURN) + (back - arrived) / slope, np.nan),
            slope=np.where(teaching, slope, 0.0),
            loose=SENSORS_K + 0.5 * np.maximum(np.abs(mixed - arrived) - 0.3, 0.0),
        )
