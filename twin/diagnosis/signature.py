"""Signatures: the effect of each hypothesis on the estimator's comparisons, per unit of its change.

A sensor that reads too much by one unit, a branch that passes less: each moves the residuals of several
relations by known amounts. The signs and sizes follow from the relations themselves. An absent relation or an
unknown value takes no part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, Bool
from twin.diagnosis.device_reports import good
from twin.diagnosis.topology import Topology
from twin.estimation import PARAMETER_KINDS
from twin.physics import EXPONENT
from twin.site import CDU_INNER_DROP_PA, CONVECTIVE_SHARE, FLOW_EXPONENT, PUMP_SHUTOFF_RATIO, RACK_DROP_PA
from twin.telemetry import State

PLATE_FLOW_POWER = -CONVECTIVE_SHARE * FLOW_EXPONENT  # of the flow in a plate's resistance, near nominal

# Relative change of what an exchanger takes off, over that of its streams, about balanced; source: estimate
FLOW_SHARE, WATER_SHARE = 0.5, 0.4
LEAST_CLOCK_HZ = 1e8  # no working GPU reads less; source: estimate


# Parameters whose drift is a symptom, and the share of the early value that no healthy one drifts.
_WORN = ("cdu.pump_head", "cdu.ua", "cdu.filter", "gpu.resistance")
DRIFTS = {name: PARAMETER_KINDS[name].healthy for name in _WORN}


def measured_signal(name: str) -> str:
    """Return the signal of a comparison's reading: `flow_lpm` for `rack.flow_lpm/heat`."""
    signal = name.partition(".")[2].partition("/")[0]
    return "return_temp_c" if signal == "heat" else signal


class SignatureTerm(NamedTuple):
    """One relation's term of a signature: the change of its residual per unit.

    `child` "" is the hypothesis's own entity or, where the relation is of a table above, its ancestor; else
    the relation's rows are of the table `child` below. `slope` has the length of the hypothesis's table, or
    of the child's.
    """

    relation: str
    slope: F64
    child: str = ""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Possible fault of every entity of a table at once.

    sign: only changes of this sign, +1 or -1. weight: factor on the explained energy where hypotheses
    compete; a sensor that shows in one relation has less than 1, so that a rival of weight 1 wins a tie.
    NaN in a term rules the hypothesis out for that entity.
    """

    kind: str
    table: str
    signal: str
    sign: int
    weight: float
    relations: tuple[str, ...]  # in which it shows
    terms: Callable[[TickValues], list[SignatureTerm]]

    @property
    def key(self) -> str:
        return f"{self.table}.{self.signal}"


class TickValues:
    """The values of this tick, each read once on demand."""

    def __init__(self, state: State, topology: Topology) -> None:
        self.state, self.topology = state, topology
        self._read: dict[str, F64] = {}

    def __getitem__(self, key: str) -> F64:
        if key not in self._read:
            self._read[key] = good(self.state, key)
        return self._read[key]

    def one(self, table: str) -> F64:
        return np.ones(self.topology.sizes[table])

    def up(self, key: str, child: str) -> F64:
        """Return the value of an ancestor's table for each entity of `child`."""
        values = self[key]
        at = self.topology.above(child, key.partition(".")[0])
        if len(values) == 0:
            return np.full(len(at), np.nan)
        return np.where(at >= 0, values[np.maximum(at, 0)], np.nan)

    def rise(self) -> F64:
        """Return the rise of each rack's coolant, K."""
        return np.maximum(self["rack.return_temp_c"] - self["rack.supply_temp_c"], 1.0)

    def over_supply(self) -> F64:
        """Return each GPU's temperature over its rack's coolant, K."""
        supply = self.up("rack.supply_temp_c", "gpu")
        return np.maximum(self["gpu.temp_c"] - np.where(np.isfinite(supply), supply, 25.0), 2.0)

    def wet(self) -> Bool:
        """GPUs of racks with coolant: by their design, or by a sensor that reads it [n_gpu]."""
        supply = self.up("rack.supply_temp_c", "gpu")
        of: Bool = self.topology.site.design.liquid[self.topology.above("gpu", "rack")]
        return of | np.isfinite(supply)

    def drawn_w(self) -> F64:
        """Power of each rack by its nodes; by its own meter, which may be the one that is wrong, where these
        say nothing [n_rack]."""
        nodes_w = self.topology.site.sum_by_rack("node", np.nan_to_num(self["node.power_w"]))
        return np.where(nodes_w > 0, nodes_w, self["rack.power_w"])

    def inner_pa(self) -> F64:
        """Return the pressure loss inside a CDU, with its pumps' loss from their shut-off head [n_cdu]."""
        nominal = self.topology.site.design.cdu_flow_lpm
        at_nominal = CDU_INNER_DROP_PA + (PUMP_SHUTOFF_RATIO - 1.0) * (CDU_INNER_DROP_PA + RACK_DROP_PA)
        return np.maximum(at_nominal * (self["cdu.flow_lpm"] / nominal) ** 2, 1000.0)


BRANCH, HEAT_FLOW, HEAT = "rack.flow_lpm/pressure", "rack.flow_lpm/heat", "rack.heat"
RACK_SUPPLY, DROP, RACK_POWER = "rack.supply_temp_c", "rack.diff_pressure_pa", "rack.power_w"
SUM, PUMP, FILTER = "cdu.flow_lpm/racks", "cdu.flow_lpm/pump", "cdu.filter_diff_pressure_pa"
MIX, SUPPLY, SETPOINT = "cdu.return_temp_c", "cdu.supply_temp_c", "cdu.supply_temp_c/setpoint"
WATER_BACK, VALVE, WATER = "cdu.facility_return_temp_c", "cdu.facility_flow_lpm", "cdu.facility_supply_temp_c"
APPROACH, LOOP_BACK, LOOP_FLOW = "loop.supply_temp_c", "loop.return_temp_c/cdus", "loop.flow_lpm/cdus"
LOOP_USUAL = "loop.supply_temp_c/usual"
GPU_TEMP, GPU_POWER, GPU_CLOCK, NODE_POWER = "gpu.temp_c", "gpu.power_w", "gpu.sm_clock_hz", "node.power_w"
PSU1, PSU2 = "node.psu1_power_w", "node.psu2_power_w"
SPLIT = "feeder.power_w/split"


def _rack_flow(now: TickValues) -> list[SignatureTerm]:
    rise, flow = now.rise(), now["rack.flow_lpm"]
    return [
        SignatureTerm(BRANCH, now.one("rack")),
        SignatureTerm(HEAT_FLOW, now.one("rack")),
        SignatureTerm(HEAT, rise / np.maximum(flow, 5.0)),
        SignatureTerm(SUM, -now.one("rack")),
        SignatureTerm(
            GPU_TEMP,
            PLATE_FLOW_POWER * now.over_supply() / np.maximum(now.up("rack.flow_lpm", "gpu"), 5.0),
            "gpu",
        ),
    ]


def _branch(now: TickValues) -> list[SignatureTerm]:
    """Return the signature of a branch: GPUs react some seconds before the flow's reading."""
    felt = -PLATE_FLOW_POWER * now.over_supply() / np.maximum(now.up("rack.flow_lpm", "gpu"), 20.0)
    return [SignatureTerm(BRANCH, now.one("rack")), SignatureTerm(GPU_TEMP, felt, "gpu")]


def _rack_supply(now: TickValues) -> list[SignatureTerm]:
    rise, flow = now.rise(), now["rack.flow_lpm"]
    return [
        SignatureTerm(RACK_SUPPLY, now.one("rack")),
        SignatureTerm(HEAT, -now.one("rack")),
        SignatureTerm(HEAT_FLOW, -flow / rise),
        SignatureTerm(GPU_TEMP, np.where(now.wet(), -1.0, np.nan), "gpu"),
    ]


def _rack_return(now: TickValues) -> list[SignatureTerm]:
    flow = now["rack.flow_lpm"]
    return [
        SignatureTerm(HEAT, now.one("rack")),
        SignatureTerm(HEAT_FLOW, flow / now.rise()),
        SignatureTerm(MIX, -flow / np.maximum(now.up("cdu.flow_lpm", "rack"), 5.0)),
    ]


def _rack_drop(now: TickValues) -> list[SignatureTerm]:
    drop = np.maximum(now["rack.diff_pressure_pa"], 2000.0)
    return [SignatureTerm(DROP, now.one("rack")), SignatureTerm(BRANCH, -now["rack.flow_lpm"] / (2.0 * drop))]


def _rack_power(now: TickValues) -> list[SignatureTerm]:
    power = np.maximum(now.drawn_w(), 1000.0)
    return [
        SignatureTerm(RACK_POWER, now.one("rack")),
        SignatureTerm(HEAT, -now.rise() / power),
        SignatureTerm(HEAT_FLOW, -now["rack.flow_lpm"] / power),
        SignatureTerm("feeder.balance", -now.one("rack")),
    ]


def _cdu_flow(now: TickValues) -> list[SignatureTerm]:
    flow = np.maximum(now["cdu.flow_lpm"], 5.0)
    carried = now["cdu.facility_return_temp_c"] - now["cdu.facility_supply_temp_c"]
    return [
        SignatureTerm(SUM, now.one("cdu")),
        SignatureTerm(PUMP, now.one("cdu")),
        SignatureTerm(FILTER, -2.0 * now["cdu.filter_diff_pressure_pa"] / flow),
        SignatureTerm(WATER_BACK, -carried / flow),
        SignatureTerm(SUPPLY, -FLOW_SHARE * _drawn_k(now) / flow),
    ]


def _drawn_k(now: TickValues) -> F64:
    """Return the temperature drop that an exchanger causes in the racks' water [n_cdu]."""
    return np.maximum(now["cdu.return_temp_c"] - now["cdu.supply_temp_c"], 0.0)


def _water_ratio(now: TickValues) -> F64:
    """Return the kelvins of the facility water per kelvin of the racks' water [n_cdu]."""
    return now["cdu.flow_lpm"] / np.maximum(now["cdu.facility_flow_lpm"], 5.0)


def _cdu_supply(now: TickValues) -> list[SignatureTerm]:
    return [
        SignatureTerm(SUPPLY, now.one("cdu")),
        SignatureTerm(SETPOINT, now.one("cdu")),
        SignatureTerm(WATER_BACK, _water_ratio(now)),
        SignatureTerm(RACK_SUPPLY, -now.one("rack"), "rack"),
    ]


def _cdu_return(now: TickValues) -> list[SignatureTerm]:
    return [
        SignatureTerm(MIX, now.one("cdu")),
        SignatureTerm(SUPPLY, -_left(now)),
        SignatureTerm(WATER_BACK, -_water_ratio(now)),
    ]


def _left(now: TickValues) -> F64:
    """Return the share of the inlet difference that the warm stream keeps [n_cdu]."""
    back, cool = now["cdu.return_temp_c"], now["cdu.facility_supply_temp_c"]
    return np.clip((now["cdu.supply_temp_c"] - cool) / np.maximum(back - cool, 1.0), 0.05, 0.95)


def _cdu_drop(now: TickValues) -> list[SignatureTerm]:
    return [
        SignatureTerm(DROP, -now.one("rack"), "rack"),
        SignatureTerm(PUMP, now["cdu.flow_lpm"] / (2.0 * now.inner_pa())),
    ]


def _filter(now: TickValues) -> list[SignatureTerm]:
    return [
        SignatureTerm(FILTER, now.one("cdu")),
        SignatureTerm(PUMP, -now["cdu.flow_lpm"] / (2.0 * now.inner_pa())),
    ]


def _water_flow(now: TickValues) -> list[SignatureTerm]:
    flow = np.maximum(now["cdu.facility_flow_lpm"], 5.0)
    carried = now["cdu.facility_return_temp_c"] - now["cdu.facility_supply_temp_c"]
    return [
        SignatureTerm(VALVE, now.one("cdu")),
        SignatureTerm(WATER_BACK, carried / flow),
        SignatureTerm(LOOP_FLOW, -now.one("cdu")),
        SignatureTerm(SUPPLY, WATER_SHARE * _drawn_k(now) / flow),
    ]


def _water_supply(now: TickValues) -> list[SignatureTerm]:
    return [
        SignatureTerm(WATER, now.one("cdu")),
        SignatureTerm(WATER_BACK, -now.one("cdu")),
        SignatureTerm(SUPPLY, -(1.0 - _left(now))),
    ]


def _water_back(now: TickValues) -> list[SignatureTerm]:
    share = now["cdu.facility_flow_lpm"] / np.maximum(now.up("loop.flow_lpm", "cdu"), 5.0)
    return [SignatureTerm(WATER_BACK, now.one("cdu")), SignatureTerm(LOOP_BACK, -share)]


def _loop_supply(now: TickValues) -> list[SignatureTerm]:
    return [
        SignatureTerm(APPROACH, now.one("loop")),
        SignatureTerm(LOOP_USUAL, now.one("loop")),
        SignatureTerm(WATER, -now.one("cdu"), "cdu"),
    ]


def _gpu_power(now: TickValues) -> list[SignatureTerm]:
    power = np.maximum(now["gpu.power_w"], 50.0)
    return [
        SignatureTerm(GPU_POWER, now.one("gpu")),
        SignatureTerm(NODE_POWER, -now.one("gpu")),
        SignatureTerm(GPU_TEMP, -now.over_supply() / power),
    ]


def _low_clock(now: TickValues) -> list[SignatureTerm]:
    """Return the signature of a clock that reads too low: less power is expected of its GPU."""
    at, design = now.topology.above("gpu", "rack"), now.topology.site.design
    dynamic_w = np.maximum(now["gpu.power_w"] - design.gpu_idle_w[at], 0.0)
    slope = -EXPONENT * dynamic_w / np.maximum(now["gpu.sm_clock_hz"], LEAST_CLOCK_HZ)
    return [SignatureTerm(GPU_CLOCK, now.one("gpu")), SignatureTerm(GPU_POWER, slope)]


def _node_power(now: TickValues) -> list[SignatureTerm]:
    one = now.one("node")
    return [
        SignatureTerm(NODE_POWER, one),
        SignatureTerm(PSU1, -0.5 * one),
        SignatureTerm(PSU2, -0.5 * one),
        SignatureTerm(RACK_POWER, -one),
    ]


def _only(relation: str, table: str) -> Callable[[TickValues], list[SignatureTerm]]:
    return lambda now: [SignatureTerm(relation, now.one(table))]


def _drifts(parameter: str) -> Callable[[TickValues], list[SignatureTerm]]:
    table = parameter.partition(".")[0]
    return lambda now: [SignatureTerm(f"{parameter}/drift", now.one(table))]


def _plates(now: TickValues) -> list[SignatureTerm]:
    return [SignatureTerm(GPU_TEMP, now.over_supply())]


def _tray(now: TickValues) -> list[SignatureTerm]:
    return [SignatureTerm(GPU_TEMP, np.where(now.wet(), now.over_supply(), np.nan), "gpu")]


def _tray_drift(now: TickValues) -> list[SignatureTerm]:
    return [SignatureTerm("gpu.resistance/drift", np.where(now.wet(), 1.0, np.nan), "gpu")]


def _of(
    kind: str,
    key: str,
    sign: int,
    weight: float,
    terms: Callable[[TickValues], list[SignatureTerm]],
    *relations: str,
) -> Hypothesis:
    table, _, signal = key.partition(".")
    return Hypothesis(kind, table, signal, sign, weight, relations, terms)


_BIASED = "sensor_biased"
HYPOTHESES: tuple[Hypothesis, ...] = (
    _of("plate_degraded", "gpu", 1, 1.0, _plates, GPU_TEMP),
    _of(_BIASED, "gpu.temp_c", 0, 0.99, _only(GPU_TEMP, "gpu"), GPU_TEMP),
    _of(_BIASED, "gpu.power_w", 0, 1.0, _gpu_power, GPU_POWER, GPU_TEMP, NODE_POWER),
    _of(_BIASED, "gpu.sm_clock_hz", 0, 1.0, _only(GPU_CLOCK, "gpu"), GPU_CLOCK),
    _of(_BIASED, "gpu.sm_clock_hz", -1, 1.0, _low_clock, GPU_CLOCK, GPU_POWER),
    _of("tray_blocked", "node", 1, 1.0, _tray, GPU_TEMP),
    _of(_BIASED, "node.power_w", 0, 1.0,
_node_power, NODE_POWER, PSU1, PSU2, RACK_POWER),
    _of("branch_blocked", "rack", -1, 1.0, _branch, BRANCH, GPU_TEMP),
    _of(_BIASED, "rack.flow_lpm", 0, 1.0, _rack_flow, BRANCH, HEAT_FLOW, HEAT, SUM),
    _of(_BIASED, "rack.supply_temp_c", 0, 1.0, _rack_supply, RACK_SUPPLY, HEAT, HEAT_FLOW, GPU_TEMP),
    _of(_BIASED, "rack.return_temp_c", 0, 1.0, _rack_return, HEAT, HEAT_FLOW, MIX),
    _of(_BIASED, "rack.diff_pressure_pa", 0, 1.0, _rack_drop, DROP, BRANCH),
    _of(_BIASED, "rack.power_w", 0, 1.0, _rack_power, RACK_POWER, HEAT, HEAT_FLOW, "feeder.balance"),
    _of("filter_blocked", "cdu", 1, 1.0, _filter, FILTER, PUMP),
    _of("pump_worn", "cdu", -1, 1.0, _only(PUMP, "cdu"), PUMP),
    _of("exchanger_fouled", "cdu", 1, 1.0, _only(SUPPLY, "cdu"), SUPPLY),
    _of("pump_worn", "cdu", -1, 0.9, _drifts("cdu.pump_head"), "cdu.pump_head/drift"),
    _of("exchanger_fouled", "cdu", -1, 0.9, _drifts("cdu.ua"), "cdu.ua/drift"),
    _of("filter_blocked", "cdu", 1, 0.9, _drifts("cdu.filter"), "cdu.filter/drift"),
    _of("plate_degraded", "gpu", 1, 0.9, _drifts("gpu.resistance"), "gpu.resistance/drift"),
    _of("tray_blocked", "node", 1, 0.95, _tray_drift, "gpu.resistance/drift"),
    _of("valve_stuck", "cdu", 0, 1.0, _only(SETPOINT, "cdu"), SETPOINT),
    _of(_BIASED, "cdu.flow_lpm", 0, 1.0, _cdu_flow, SUM, PUMP, FILTER, WATER_BACK, SUPPLY),
    _of(_BIASED, "cdu.supply_temp_c", 0, 1.0, _cdu_supply, SUPPLY, SETPOINT, WATER_BACK, RACK_SUPPLY),
    _of(_BIASED, "cdu.return_temp_c", 0, 1.0, _cdu_return, MIX, SUPPLY, WATER_BACK),
    _of(_BIASED, "cdu.diff_pressure_pa", 0, 1.0, _cdu_drop, DROP, PUMP),
    _of(_BIASED, "cdu.filter_diff_pressure_pa", 0, 0.98, _only(FILTER, "cdu"), FILTER),
    _of(_BIASED, "cdu.facility_flow_lpm", 0, 1.0, _water_flow, VALVE, WATER_BACK, LOOP_FLOW, SUPPLY),
    _of(_BIASED, "cdu.facility_supply_temp_c", 0, 1.0, _water_supply, WATER, WATER_BACK, SUPPLY),
    _of(_BIASED, "cdu.facility_return_temp_c", 0, 1.0, _water_back, WATER_BACK, LOOP_BACK),
    _of("cooler_failed", "loop", 1, 1.0,
        lambda now: [SignatureTerm(APPROACH, now.one("loop")), SignatureTerm(LOOP_USUAL, now.one("loop"))],
        APPROACH, LOOP_USUAL),
    _of(_BIASED, "loop.supply_temp_c", 0, 1.0, _loop_supply, APPROACH, LOOP_USUAL, WATER),
    _of(_BIASED, "loop.return_temp_c", 0, 1.0, _only(LOOP_BACK, "loop"), LOOP_BACK),
    _of(_BIASED, "loop.flow_lpm", 0, 1.0, _only(LOOP_FLOW, "loop"), LOOP_FLOW),
    _of(_BIASED, "feeder.power_w", 0, 1.0,
        lambda now: [SignatureTerm(name, now.one("feeder")) for name in ("feeder.balance", SPLIT)],
        "feeder.balance", SPLIT),
)  # fmt: skip
