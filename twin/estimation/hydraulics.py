"""Flows and pressures: relations between pump, filter, branches and the sum of branches.

All turbulent: dp = k Q^2. A pump gives H = n^2 H0 - a Q^2 at speed n; two in parallel share the flow. May
import the board, the design and the site.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I32, I64
from twin.estimation.comparisons import Board, Row
from twin.estimation.readings import Latest, joint
from twin.site import (
    CDU_FILTER_DROP_PA,
    CDU_INNER_DROP_PA,
    PUMP_SHUTOFF_RATIO,
    PUMP_SPEED_NOMINAL_PU,
    PUMPS_PER_CDU,
    RACK_DROP_PA,
    Site,
)
from twin.telemetry import EntityState, column

BRANCH, DROP = "rack.flow_lpm/pressure", "rack.diff_pressure_pa"
SUM, PUMP, FILTER = "cdu.flow_lpm/racks", "cdu.flow_lpm/pump", "cdu.filter_diff_pressure_pa"
FLOW_NOISE_PU, DROP_NOISE_PU, FILTER_NOISE_PU = 0.004, 0.004, 0.006  # of the reading; source: estimate
LEAST_FLOW_PU = 0.1  # of nominal: below, a drop says little of its resistance; source: estimate
LEAST_DROP_PA = 2000.0  # below, a pressure sensor's error weighs too much; source: estimate
RUNNING_PU = 0.05  # a pump below this speed gives nothing; source: estimate
VALVE_STEP_PU, LEAST_VALVE_PU = 0.002, 0.01  # a smaller move is none; a valve that is shut leaks this much
SHUT = {"supply_valve_state": 0.0, "return_valve_state": 0.0, "liquid_isolation_state": 1.0}
RANGEABILITY = 50.0  # of an equal-percentage valve; source: IEC 60534-2-4, usual for control valves
CDU_NAMES = (
    "flow_lpm",
    "diff_pressure_pa",
    "filter_diff_pressure_pa",
    "pump1_speed_pu",
    "pump2_speed_pu",
    "supply_temp_c",
    "return_temp_c",
    "facility_supply_temp_c",
    "facility_return_temp_c",
    "facility_flow_lpm",
    "facility_valve1_pu",
    "facility_valve2_pu",
    "supply_temp_setpoint_c",
    "supply_temp_setpoint_final_c",
)


def rows(site: Site) -> list[Row]:
    """Return the relations of this part."""
    design, n_rack, n_cdu = site.design, site.sizes["rack"], site.sizes["cdu"]
    return [
        # A rack's valve sets its resistance: no design knows it, and only a change of it is a fault
        Row(BRANCH, "rack", n_rack, FLOW_NOISE_PU, "rack.branch", np.nan,
            0.3, 0.02, 5e-4, low=0.0, relative=True),
        Row(DROP, "rack", n_rack, DROP_NOISE_PU, "rack.drop_ratio", 1.0, 0.3, 0.01, 5e-4, low=0.0, high=3.0),
        Row(SUM, "cdu", n_cdu, FLOW_NOISE_PU, "cdu.flow_ratio", 1.0, 0.05, 0.01, 1e-4, low=0.8, high=1.2),
        Row(PUMP, "cdu", n_cdu, FLOW_NOISE_PU, "cdu.pump_head", 1.0, 0.15, 0.01, 3e-4, low=0.0, high=3.0),
        Row(FILTER, "cdu", n_cdu, FILTER_NOISE_PU, "cdu.filter", CDU_FILTER_DROP_PA / design.cdu_flow_lpm**2,
            0.5, 0.03, 5e-4, low=0.0, relative=True),
    ]  # fmt: skip


class Cooled:
    """The racks of each CDU's circuit, and sums over them."""

    def __init__(self, site: Site) -> None:
        joined = site.cdu_of_rack >= 0
        # A rack of known profile that is cooled by air is no branch
        stated = np.array([p is not None for p in site.profile_of_rack], np.bool_)
        joined &= site.design.liquid | ~stated
        self.rack: I32 = np.flatnonzero(joined).astype(np.int32)
        self.cdu: I32 = site.cdu_of_rack[self.rack]
        self.n_rack, self.n_cdu = site.sizes["rack"], site.sizes["cdu"]
        self._empty = np.bincount(self.cdu, minlength=self.n_cdu) == 0

    def sums(self, of_rack: F64) -> F64:
        """Return the sum over the racks of each CDU [n_cdu]; NaN if one is unknown or there are none."""
        out: F64 = np.bincount(self.cdu, of_rack[self.rack], self.n_cdu).astype(np.float64)
        out[self._empty] = np.nan
        return out

    def of_cdu(self, values: F64) -> F64:
        """Return the value of each rack's CDU [n_rack]; NaN without a CDU."""
        out = np.full(self.n_rack, np.nan)
        out[self.rack] = values[self.cdu]
        return out

    def oldest(self, received_ns: I64) -> I64:
        """Return the oldest instant among the racks of each CDU [n_cdu]."""
        out = np.full(self.n_cdu, np.iinfo(np.int64).max)
        np.minimum.at(out, self.cdu, received_ns[self.rack])
        return out

    def of_cdus(self, received_ns: I64) -> I64:
        """Return the instant of each rack's CDU [n_rack]; 0 without a CDU."""
        out = np.zeros(self.n_rack, np.int64)
        out[self.rack] = received_ns[self.cdu]
        return out


class HydraulicsEstimator(EntityState):
    """Relations of flows and pressures, and the position of each rack's valve that they were learned at."""

    valve_pu: F64 = column("rack", "f8", np.nan)

    def __init__(self, site: Site, cooled: Cooled) -> None:
        super().__init__(site.sizes)
        design = site.design
        self.cooled = cooled
        self._rack_least = LEAST_FLOW_PU * np.nan_to_num(design.rack_flow_lpm, nan=10.0)
        self._cdu_least = LEAST_FLOW_PU * np.nan_to_num(design.cdu_flow_lpm, nan=10.0)
        whole_pa = RACK_DROP_PA + CDU_INNER_DROP_PA
        self.shutoff_pa = PUMP_SHUTOFF_RATIO * whole_pa / PUMP_SPEED_NOMINAL_PU**2  # at full speed, no flow
        # Of one pump that gives the whole flow; two that share it lose a quarter of that each
        self._pump_k = (PUMP_SHUTOFF_RATIO - 1.0) * whole_pa * PUMPS_PER_CDU**2 / design.cdu_flow_lpm**2
        self._inner_k = CDU_INNER_DROP_PA / design.cdu_flow_lpm**2
        # Head that a filter takes beyond its early drop, over the design's [n_cdu]; NaN: unknown. PUMP counts
        # it as lost by the pumps
        self.clogged_pu = np.zeros(site.sizes["cdu"])

    def update(self, rack: Latest, cdu: Latest, board: Board) -> None:
        """Update the expected flows and pressures of racks and CDUs."""
        cooled = self.cooled
        flow, drop = rack["flow_lpm"], rack["diff_pressure_pa"]
        self._valves(rack, board)
        k = board.parameter(BRANCH)
        expected = np.where(drop >= LEAST_DROP_PA, np.sqrt(np.maximum(drop, 0.0) / k), np.nan)
        implied = np.where(flow >= self._rack_least, drop / flow**2, np.nan)
        board.put(
            BRANCH,
            expected,
            flow,
            rack.received_ns("flow_lpm", "diff_pressure_pa"),
            implied=implied,
            slope=-0.5 * expected / k,
            level=expected,
        )

        across = cooled.of_cdu(cdu["diff_pressure_pa"])
        across = np.where(across >= LEAST_DROP_PA, across, np.nan)
        read_ns = np.minimum(
            rack.received_ns("diff_pressure_pa"), cooled.of_cdus(cdu.received_ns("diff_pressure_pa"))
        )
        board.put_ratio(DROP, across, drop, read_ns)
        self._cdu(rack, cdu, board)

    def _valves(self, rack: Latest, board: Board) -> None:
        """A valve that moves changes its branch's resistance: by nothing where most of the drop is elsewhere,
        at most as its characteristic says, linear or equal-percentage.
        """
        open_ = np.where(np.isfinite(rack["valve_pu"]), rack["valve_pu"], 1.0)
        known = np.isfinite(rack["valve_pu"])
        for name, shut in SHUT.items():
            known |= np.isfinite(rack[name])
            open_[rack[name] == shut] = 0.0
        valve = np.where(known, np.maximum(open_, LEAST_VALVE_PU), np.nan)
        before, move = self.valve_pu, valve - self.valve_pu
        moved = np.abs(move) >= VALVE_STEP_PU
        if moved.any():
            most = np.sign(move) * np.maximum(  # of the logarithm of the flow
                np.abs(np.log(valve / before)), np.abs(move) * np.log(RANGEABILITY)
            )
            # The middle of the two, for a resistance that goes with the square of the flow
            factor = np.where(moved, np.exp(-most), np.nan)
            moved = board.change(
                BRANCH, factor, np.abs(most), rack.received_ns("flow_lpm", "diff_pressure_pa")
            )
        np.copyto(self.valve_pu, valve, where=moved | np.isnan(before))

    def _cdu(self, rack: Latest, cdu: Latest, board: Board) -> None:
        flow, read_ns = cdu["flow_lpm"], cdu.received_ns("flow_lpm")
        running = flow >= self._cdu_least
        summed = self.cooled.sums(rack["flow_lpm"])
        expected = board.parameter(SUM) * summed
        board.put(
            SUM,
            expected,
            flow,
            np.minimum(read_ns, self.cooled.oldest(rack.received_ns("flow_lpm"))),
            implied=np.where(running, flow / summed, np.nan),
            slope=summed,
            level=np.maximum(expected, self._cdu_least),
        )

        n1, n2 = cdu["pump1_speed_pu"], cdu["pump2_speed_pu"]
        on1, on2 = n1 > RUNNING_PU, n2 > RUNNING_PU
        pumps = on1.astype(np.float64) + on2
        # A pump that stands reports a speed of 0; one that reports nothing leaves the flow unknown
        full = self.shutoff_pa * (np.where(on1, n1**2, 0.0) + np.where(on2, n2**2, 0.0)) / pumps
        full[~np.isfinite(n1 + n2)] = np.nan
        steep = self._pump_k / pumps**2 + self._inner_k
        drop = cdu["diff_pressure_pa"]
        left = board.parameter(PUMP) * full - drop
        expected = np.sqrt(np.where(left > 0.0, left, np.nan) / steep)
        names = ("flow_lpm", "diff_pressure_pa", "pump1_speed_pu", "pump2_speed_pu")
        board.put(
            PUMP,
            expected,
            flow,
            cdu.received_ns(*names),
            implied=np.where(running, (drop + steep * flow**2) / full, np.nan),
            slope=0.5 * full / (steep * expected),
            level=expected,
            # The head goes with the square of the speed
            steps=joint(
                board.parameter(PUMP)
                * full
                / (steep * expected)
                * cdu.step_sigma("pump1_speed_pu")
                / np.fmax(n1, n2)
            ),
        )

        squared = np.where(running, flow**2, np.nan)
        self.clogged_pu = (board.parameter(FILTER) - board.learned(FILTER, "reference")) * squared / full
        read_ns = cdu.received_ns("flow_lpm", "filter_diff_pressure_pa")
        board.put_ratio(FILTER, squared, cdu["filter_diff_pressure_pa"], read_ns)
