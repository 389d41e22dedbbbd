"""Temperatures around a CDU: the mixed return of its racks, the exchanger, and the supply.

The exchanger is counterflow with a learned conductance; hot leg, cold leg and pipes are mixed tanks.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64
from twin.estimation.comparisons import Board, Row
from twin.estimation.heat import cdu_tau_s
from twin.estimation.hydraulics import Cooled
from twin.estimation.readings import UNIFORM, Lag, Latest, joint, share_of
from twin.physics import COOLANTS, Coolant, film_factor, heat_rate_w_per_k, heat_slope_k, transfer, ua_of
from twin.site import PRIMARY_FLOW_RATIO, Site

BRANCH_SUPPLY, MIX, SUPPLY = "rack.supply_temp_c", "cdu.return_temp_c", "cdu.supply_temp_c"
SETPOINT, FACILITY_RETURN = "cdu.supply_temp_c/setpoint", "cdu.facility_return_temp_c"
VALVE, FACILITY_SUPPLY = "cdu.facility_flow_lpm", "cdu.facility_supply_temp_c"
EXCHANGED = ("flow_lpm", "facility_flow_lpm", "return_temp_c", "facility_supply_temp_c")
TEMP_NOISE_K = 0.03  # floor: a sensor's last digit and more; source: estimate
FACILITY_FLOW_NOISE_PU = 0.004  # of the reading; source: estimate
LEAST_FLOW_PU = 0.05  # of nominal: below, a stream brings no heat that could be judged; source: estimate
LEAST_APPROACH_K = 2.0  # between the entries of an exchanger, to judge its conductance; source: estimate
SENSITIVE_PU = 0.08  # least change of the heat with the conductance, relative over relative; source: estimate
# Time that a valve's control of the supply takes to follow the heat, and the share of a change of the
# return by which the supply is off meanwhile; source: estimate.
LATE_S, LATE_SHARE = 90.0, 0.3
LEAST_VALVE_PU = 0.05  # source: estimate


def rows(site: Site) -> list[Row]:
    """Return the relations of this part."""
    n_rack, n, design = site.sizes["rack"], site.sizes["cdu"], site.design
    full_lpm = PRIMARY_FLOW_RATIO * design.cdu_flow_lpm / 0.6  # nominal at 60 % open; source: estimate
    return [
        Row(BRANCH_SUPPLY, "rack", n_rack, TEMP_NOISE_K, "rack.supply_offset", 0.0, 0.5, 0.1, 2e-3),
        Row(MIX, "cdu", n, TEMP_NOISE_K, "cdu.return_offset", 0.0, 0.5, 0.1, 2e-3, hold_s=20.0),
        Row(SUPPLY, "cdu", n, TEMP_NOISE_K, "cdu.ua", design.cdu_ua_w_per_k, 0.3, 0.03, 3e-4,
            low=0.0, relative=True, hold_s=20.0),
        Row(SETPOINT, "cdu", n, TEMP_NOISE_K, "cdu.supply_error", 0.0, 0.3, 0.1, 1e-3, hold_s=60.0),
        Row(FACILITY_RETURN, "cdu", n, TEMP_NOISE_K, "cdu.closure", 1.0, 0.1, 0.02, 3e-4, low=0.5, high=2.0,
            hold_s=20.0),
        Row(VALVE, "cdu", n, FACILITY_FLOW_NOISE_PU, "cdu.valve_full_lpm", full_lpm, 0.4, 0.02, 2e-3,
            low=0.0, relative=True),
        Row(FACILITY_SUPPLY, "cdu", n, TEMP_NOISE_K, "cdu.facility_offset", 0.0, 0.5, 0.1, 2e-3),
    ]  # fmt: skip


class Exchange:
    """Relations of the temperatures of CDUs, and of the supply of racks."""

    def __init__(self, site: Site, coolant: Coolant, cooled: Cooled) -> None:
        n = site.sizes["cdu"]
        self.coolant, self.water, self.cooled = coolant, COOLANTS["water"], cooled
        self.nominal_lpm = site.design.cdu_flow_lpm
        self.loop_of_cdu = site.loop_of_cdu
        self.looped = site.loop_of_cdu >= 0
        self.warm, self.cold, self.films = np.zeros(n), np.zeros(n), np.zeros(n)  # W/K, W/K, 1 of this tick
        self.legs = Lag(
            4, site.sizes, "cdu"
        )  # hot leg, cold leg, pipes to the racks; and the return over LATE_S
        self._late = np.full(n, LATE_S)
        self._full_w = cooled.sums(site.design.rack_max_w)
        self._least = LEAST_FLOW_PU * np.nan_to_num(self.nominal_lpm, nan=10.0)

    def update(self, rack: Latest, cdu: Latest, loop: Latest, board: Board, now_ns: int, dt_s: float) -> None:
        """Update the expected temperatures around each CDU."""
        cooled = self.cooled
        supply, back = cdu["supply_temp_c"], cdu["return_temp_c"]
        through_lpm = cooled.sums(rack["flow_lpm"])
        passing = np.where(through_lpm >= self._least, through_lpm, np.nan)
        mixed = cooled.sums(rack["flow_lpm"] * rack["return_temp_c"]) / passing
        leaving = self._leaving(cdu, board)
        # Where no flow is reported the time is that of the nominal flow
        tau_s = cdu_tau_s(through_lpm, self.nominal_lpm)
        shares = share_of(dt_s, np.stack([tau_s, tau_s, tau_s, self._late]))
        arrived, left, sent, calm = self.legs.toward(
            np.stack([mixed, leaving, supply, back]), shares, (now_ns, dt_s)
        )

        sent = cooled.of_cdu(sent)
        read_ns = np.minimum(
            cooled.of_cdus(cdu.received_ns("supply_temp_c")), rack.received_ns("supply_temp_c")
        )
        supply_steps_k, back_steps_k = cdu.step_sigma("supply_temp_c"), cdu.step_sigma("return_temp_c")
        steps_k = joint(cooled.of_cdu(supply_steps_k), rack.step_sigma("supply_temp_c"))
        board.put_offset(BRANCH_SUPPLY, sent, rack["supply_temp_c"], read_ns, steps=steps_k)
        read_ns = np.minimum(
            cooled.oldest(rack.received_ns("flow_lpm", "return_temp_c")), cdu.received_ns("return_temp_c")
        )
        mix_steps_k = cooled.sums(rack["flow_lpm"] * rack.step_sigma("return_temp_c")) / passing
        steps_k = joint(mix_steps_k, back_steps_k)
        # The racks' load before the observation is unknown
        rise_k = self._full_w / heat_rate_w_per_k(self.coolant, passing, mixed)
        unseen_k = UNIFORM * self.legs.unknown[0] * np.fmax(rise_k, np.abs(mixed - supply))
        loose = _moving(0.35, mixed - arrived) + unseen_k
        board.put_offset(MIX, arrived, back, read_ns, loose=loose, steps=steps_k)
        names = ("supply_temp_setpoint_c", "supply_temp_setpoint_final_c")
        wanted = np.where(np.isfinite(cdu[names[1]]), cdu[names[1]], cdu[names[0]])
        read_ns = np.maximum(cdu.received_ns(names[0]), cdu.received_ns(names[1]))
        read_ns = np.minimum(read_ns, cdu.received_ns("supply_temp_c"))
        # While the heat changes, the valve's control is late by some of it
        late_k = _moving(LATE_SHARE, back - calm)
        board.put_offset(SETPOINT, wanted, supply, read_ns, loose=late_k, steps=supply_steps_k)
        self._judge_exchanger(cdu, board, leaving, left)
        self._facility(cdu, loop, board)

    def _leaving(self, cdu: Latest, board: Board) -> F64:
        """Return the coolant's temperature after the exchanger, by the conductance in use [n_cdu]."""
        flow, water_lpm, back, cool = (cdu[k] for k in EXCHANGED)
        flow = np.where(flow >= self._least, flow, np.nan)
        water_lpm = np.where(water_lpm >= self._least, water_lpm, np.nan)
        self.warm = heat_rate_w_per_k(self.coolant, flow, back)
        self.cold = heat_rate_w_per_k(self.water, water_lpm, cool)
        nominal = np.where(np.isfinite(self.nominal_lpm), self.nominal_lpm, flow)
        self.films = film_factor(water_lpm / (PRIMARY_FLOW_RATIO * nominal), flow / nominal)
        across = transfer(board.parameter(SUPPLY) / self.films, self.warm, self.cold, back, cool)
        return np.where(np.isfinite(across.heat_w), across.warm_out_c, np.nan)

    def _judge_exchanger(self, cdu: Latest, board: Board, leaving: F64, expected: F64) -> None:
        _, _, back, cool = (cdu[k] for k in EXCHANGED)
        supply, heated = cdu["supply_temp_c"], cdu["facility_return_temp_c"]
        warm, cold, films, clean = self.warm, self.cold, self.films, board.parameter(SUPPLY)
        heat_w = warm * (back - supply)
        # Only where the heat depends on the conductance and nothing moves does it show it
        per_ua = heat_slope_k(clean / films, warm, cold, back, cool)
        sensitive = per_ua * clean / films >= SENSITIVE_PU * warm * (back - leaving)
        steady = (np.abs(leaving - expected) < 0.3) & (back - cool >= LEAST_APPROACH_K) & sensitive
        implied = films * ua_of(heat_w, warm, cold, back, cool)
        board.put(
            SUPPLY,
            expected,
            supply,
            cdu.received_ns(*EXCHANGED, "supply_temp_c"),
            implied=np.where(steady | np.isnan(clean), implied, np.nan),
            slope=-per_ua / films / warm,
            loose=_moving(0.25, leaving - expected),
            steps=joint(*(cdu.step_sigma(k) for k in (*EXCHANGED[2:], "supply_temp_c"))),
        )

        rise = heat_w / cold
        read_ns = cdu.received_ns(*EXCHANGED, "supply_temp_c", "facility_return_temp_c")
        implied = np.where(rise >= 1.0, (heated - cool) / rise, np.nan)
        # Each sensor's error counts by the streams' ratio
        board.put(
            FACILITY_RETURN,
            cool + board.parameter(FACILITY_RETURN) * rise,
            heated,
            read_ns,
            implied=implied,
            slope=rise,
            level=1.0 + warm / cold,
            steps=joint(
                *(cdu.step_sigma(k) for k in ("facility_supply_temp_c", "facility_return_temp_c")),
                *(warm / cold * cdu.step_sigma(k) for k in ("return_temp_c", "supply_temp_c")),
            ),
        )

    def _facility(self, cdu: Latest, loop: Latest, board: Board) -> None:
        one, two = cdu["facility_valve1_pu"], cdu["facility_valve2_pu"]
        valve = np.where(np.isfinite(two), 0.5 * (one + two), one)
        open_ = np.where(valve >= LEAST_VALVE_PU, valve, np.nan)
        read_ns = cdu.received_ns("facility_flow_lpm", "facility_valve1_pu")
        steps = joint(cdu.step_sigma("facility_valve1_pu") / open_)
        board.put_ratio(VALVE, open_, cdu["facility_flow_lpm"], read_ns, steps)

        given, read_ns = np.full(len(one), np.nan), np.zeros(len(one), np.int64)
        given[self.looped] = loop["supply_temp_c"][self.loop_of_cdu[self.looped]]
        read_ns[self.looped] = loop.received_ns("supply_temp_c")[self.loop_of_cdu[self.looped]]
        read_ns = np.minimum(read_ns, cdu.received_ns("facility_supply_temp_c"))
        steps_k = cdu.step_sigma("facility_supply_temp_c").copy()
        of_loop = loop.step_sigma("supply_temp_c")[self.loop_of_cdu[self.looped]]
        steps_k[self.looped] = joint(steps_k[self.looped], of_loop)
        board.put_offset(FACILITY_SUPPLY, given, cdu["facility_supply_temp_c"], read_ns, steps=steps_k)


def _moving(share: float, away_k: F64) -> F64:
    """Return the doubt about a lag in progress [n]: its time constant is uncertain."""
    off_k = np.abs(away_k)
    return np.where(off_k > 0.3, share * off_k, 0.0)
