"""Diagnosis verdict: the kind of fault for an isolated hypothesis, its hold time, and the sentence that says
why.

Where the comparisons alone cannot distinguish two kinds, other evidence decides: the memory of a GPU for
its temperature sensor, the position of a valve, the digits of a meter.
"""

from __future__ import annotations

import re

import numpy as np

from twin.catalogue import find_signal, table_noun
from twin.contracts import Residual
from twin.diagnosis.cause import Cause
from twin.diagnosis.isolation import CONFIRMING, PRESENT_PU, IsolatedFault
from twin.diagnosis.sensor_checks import SensorChecks
from twin.diagnosis.signature import BRANCH, GPU_TEMP, HEAT, HEAT_FLOW, MIX, PSU1, PSU2, SETPOINT, TickValues
from twin.site import noun_key

# Seconds for which a cause must be the best account before it is reported: loss of flow cannot wait.
HOLD_S = {"branch_blocked": 0.0, "filter_blocked": 6.0, "pump_worn": 10.0, "exchanger_fouled": 20.0,
          "valve_stuck": 20.0, "cooler_failed": 20.0, "plate_degraded": 15.0, "tray_blocked": 10.0,
          "sensor_biased": 10.0}  # fmt: skip
HOLD_GPU_S = 30.0  # there are many, and their work is what is known least
CLEAR_S = {"sensor_biased": 60.0, "exchanger_fouled": 120.0, "plate_degraded": 120.0, "tray_blocked": 60.0,
           "valve_stuck": 60.0, "cooler_failed": 60.0, "pump_worn": 60.0}  # fmt: skip
FULL_VALVE_PU, SHUT_VALVE_PU = 0.97, 0.02
# A sensor that is off by less is not reported
LEAST_K, LEAST_GPU_K, LEAST_PU, LEAST_GPU_PU = 1.0, 1.5, 0.03, 0.04
# Least size of a fault, in the unit of its hypothesis (here K of a supply temperature); source: estimate
LEAST_SIZE = {"cooler_failed": 2.0, "valve_stuck": 0.5}
STREAK, STREAK_SENSOR = 2, 4  # readings in a row that must be off: one or two may be a jump
VALVE_RUN = 6  # equal positions in a row, while it ought to move
STANDING = 3  # equal readings: it may be frozen rather than biased; later readings will show
# Equal readings while comparisons are off, and -ln of their chance: it stands still; source: estimate
LONG_RUN, LONG_SURPRISE = 8, 4.0
UNITS = {"l/min": (1.0, "l/min", 1), "Pa": (1e-3, "kPa", 1), "degC": (1.0, "°C", 1), "W": (1e-3, "kW", 2),
         "Hz": (1e-6, "MHz", 0), "1": (100.0, "%", 1)}  # fmt: skip
SMALL_W = 20e3  # below, people say watts
# Text of the basis of each comparison, for people.
FROM = {
    "rack.flow_lpm/pressure": "from {rack.diff_pressure_pa} across the rack",
    "rack.flow_lpm/heat": "from its heat balance",
    "rack.heat": "from power and flow",
    "rack.supply_temp_c": "from its CDU's supply",
    "rack.diff_pressure_pa": "from its CDU's pressure",
    "rack.power_w": "from its nodes",
    "cdu.flow_lpm/racks": "from the sum of its racks",
    "cdu.flow_lpm/pump": "from the pumps' speed and pressure",
    "cdu.filter_diff_pressure_pa": "from its flow",
    "cdu.return_temp_c": "from the racks' returns",
    "cdu.supply_temp_c": "from its exchanger when clean",
    "cdu.supply_temp_c/setpoint": "as its set point",
    "cdu.facility_return_temp_c": "from the heat of its racks",
    "cdu.facility_flow_lpm": "from its valve",
    "cdu.facility_supply_temp_c": "from its loop",
    "loop.supply_temp_c": "from the weather",
    "loop.supply_temp_c/usual": "as usual",
    "cdu.pump_head/drift": "as it was at first",
    "cdu.ua/drift": "as it was at first",
    "cdu.filter/drift": "as it was at first",
    "gpu.resistance/drift": "as it was at first",
    "loop.return_temp_c/cdus": "from its CDUs",
    "loop.flow_lpm/cdus": "from the sum of its CDUs",
    "gpu.temp_c": "from its power and coolant",
    "gpu.power_w": "from its activity",
    "gpu.sm_clock_hz": "from its cap and temperature",
    "node.power_w": "from its GPUs and CPUs",
    "node.psu1_power_w": "from the node's power",
    "node.psu2_power_w": "from the node's power",
    "feeder.power_w/split": "from the other feeds",
}


def derived_from(relation: str) -> str:
    """Return the readings behind an expected value in words: `from its power and coolant`."""
    return re.sub(r"\{\w+\.(\w+)\}", r"its \1", FROM.get(relation, ""))


def amount(key: str, value: float) -> str:
    """Return a value of a signal in its usual unit for people."""
    signal = find_signal(key)
    factor, unit, digits = UNITS.get("" if signal is None else signal.unit, (1.0, "", 2))
    if unit == "kW" and abs(value) < SMALL_W:
        factor, unit, digits = 1.0, "W", 0
    text = f"{value * factor:.{digits}f}"
    return f"{text} {unit}".strip()


def sentence(relation: str, row: int, residual: Residual, now: TickValues, who: str = "") -> str:
    """Return a sentence on one comparison: the reading, the expected value, and its basis."""
    table, _, rest = relation.partition(".")
    signal = rest.partition("/")[0]
    key = "rack.return_temp_c" if relation == "rack.heat" else f"{table}.{signal}"
    if relation == "feeder.balance":
        return (
            f"meters {amount('feeder.power_w', float(residual.measured[row]))}, "
            f"loads {amount('feeder.power_w', float(residual.expected[row]))}"
        )
    why = FROM.get(relation, "")
    if "{" in why:
        inside = why[why.index("{") + 1 : why.index("}")]
        why = why.replace("{" + inside + "}", amount(inside, float(now[inside][row])))
    if rest.endswith("/drift"):
        change = float(residual.measured[row] / residual.expected[row]) - 1.0
        return f"{who}{_DRIFTS.get(signal, signal)} {change:+.0%} since it was learned first"
    name = _WORDS.get(key.partition(".")[2], key.partition(".")[2])
    reading = amount(key, float(residual.measured[row]))
    ought = amount(key, float(residual.expected[row]))
    return f"{who}{name} {reading}, expected {ought} {why}".rstrip()


_DRIFTS = {"pump_head": "head of the pumps", "ua": "conductance of the exchanger",
           "filter": "resistance of the filter", "resistance": "resistance of the cold plate"}  # fmt: skip
_WORDS = {"flow_lpm": "flow", "temp_c": "temperature", "power_w": "power",
          "psu1_power_w": "supply 1", "psu2_power_w": "supply 2", "supply_temp_c": "supply",
          "return_temp_c": "return", "diff_pressure_pa": "pressure across", "sm_clock_hz": "clock",
          "filter_diff_pressure_pa": "pressure across the filter", "facility_flow_lpm": "facility flow",
          "facility_supply_temp_c": "facility supply",
          "facility_return_temp_c": "facility return"}  # fmt: skip


def _felt(fault: IsolatedFault) -> bool:
    """Return True if GPUs confirm one reading of a flow: then the second one need not be waited for."""
    return fault.hypothesis.kind == "branch_blocked" and len(fault.rows.get(GPU_TEMP, ())) >= CONFIRMING


class DiagnosisVerdicts:
    """Turns isolated faults into causes."""

    def __init__(self, watch: SensorChecks) -> None:
        self.watch = watch

    def cause(
        self, fault: IsolatedFault, now: TickValues, residuals: dict[str, Residual], gap_z: np.ndarray
    ) -> Cause | None:
        """Return the cause, or None if the verdict must wait or nothing is at fault."""
        h, entity = fault.hypothesis, fault.entity
        kind, signal = h.kind, h.signal if h.kind == "sensor_biased" else ""
        if h.relations == (GPU_TEMP,) and h.table == "gpu":
            kind, signal = self._plate_or_sensor(entity, gap_z, fault.size)
        elif SETPOINT in h.relations and kind == "valve_stuck" and not self._stuck(now, entity, fault.size):
            return None
        if kind in ("sensor_biased", "plate_degraded"):
            run, moves, surprise = self._run(h.table, signal or "temp_c", entity)
            if run >= LONG_RUN and surprise > LONG_SURPRISE:
                kind, signal = "sensor_frozen", signal or "temp_c"
            elif run >= STANDING and moves > 0.5:
                return None  # it may be frozen: some more readings will show
        if kind == "branch_blocked" and BRANCH not in fault.rows:
            return None  # the flow's own reading will soon be here
        if abs(fault.size) < LEAST_SIZE.get(kind, 0.0):
            return None
        if kind == "sensor_biased" and not (fault.alone and self._decided(fault, residuals)):
            return None  # that something does not balance is a finding of its own
        if fault.streak < (STREAK_SENSOR if kind == "sensor_biased" else STREAK) and not _felt(fault):
            return None
        size = fault.size
        if h.kind != kind:  # a GPU sensor, found by a hypothesis of another kind: the size is the residual
            residual = residuals[GPU_TEMP]
            size = float(residual.measured[entity] - residual.expected[entity])
        if kind == "sensor_biased" and self._slight(h.table, signal, entity, size, now):
            return None
        evidence = self._evidence(kind, fault, now, residuals)
        count = max(1, max((len(rows) for name, rows in fault.rows.items()), default=1))
        confidence = float(np.clip(1.0 - np.exp(-0.5 * fault.energy) * 10.0, 0.5, 0.999)) * fault.share**0.25
        hold_s = HOLD_GPU_S if h.table == "gpu" else HOLD_S.get(kind, 10.0)
        return Cause(
            kind,
            h.table,
            entity,
            signal,
            confidence,
            tuple(evidence),
            count,
            hold_s,
            CLEAR_S.get(kind, 30.0),
            fault.rows,
        )

    @staticmethod
    def _decided(fault: IsolatedFault, residuals: dict[str, Residual]) -> bool:
        """Return True if more than a heat balance or a node's work supports it: these do not say what is
        wrong. Where another comparison of a rack's own reading is known, it must show a share of the error.
        """
        if fault.hypothesis.table == "node" and fault.rows.keys().isdisjoint((PSU1, PSU2)):
            supplies = (residuals.get(name) for name in (PSU1, PSU2))
            return not any(r is not None and np.isfinite(r.expected[fault.entity]) for r in supplies)
        if not fault.rows.keys() <= {HEAT, HEAT_FLOW}:
            return True
        for name in fault.hypothesis.relations:
            if name in residuals and name not in (HEAT, HEAT_FLOW) and name.startswith("rack."):
                r = residuals[name]
                off = (r.measured[fault.entity] - r.expected[fault.entity]) * np.sign(fault.size)
                if np.isfinite(off / r.sigma[fault.entity]):
                    own = name.partition("/")[0] == f"rack.{fault.hypothesis.signal}"
                    return not own or bool(off >= PRESENT_PU * abs(fault.size))
        mix = residuals.get(MIX)
        return MIX in fault.hypothesis.relations and mix is not None and bool(np.isfinite(mix.expected).any())

    @staticmethod
    def _slight(table: str, signal: str, entity: int, size: float, now: TickValues) -> bool:
        """Return True if a sensor is off by no more than the error of the models, or by more than it reads:
        no power, flow or pressure is below nothing, so what is expected is wrong.
        """
        if signal.endswith("temp_c"):
            return abs(size) < (LEAST_GPU_K if table == "gpu" else LEAST_K)
        least_pu, true = LEAST_GPU_PU if table == "gpu" else LEAST_PU, now[f"{table}.{signal}"][entity] - size
        return bool(true < 0.0 or abs(size) < least_pu * true)

    def _evidence(
        self, kind: str, fault: IsolatedFault, now: TickValues, residuals: dict[str, Residual]
    ) -> list[str]:
        h, out = fault.hypothesis, []
        site = now.topology.site
        for name, rows in fault.rows.items():
            table = name.partition(".")[0]
            first = int(rows[0])
            own = table == h.table and first == fault.entity
            who = "" if own or name == "feeder.balance" else f"{site.name(table, first)}: "
            out.append(sentence(name, first, residuals[name], now, who))
            if len(rows) > 1:
                word = table_noun(noun_key(site, table), len(rows) - 1)
                out.append(f"{len(rows) - 1} more {word} likewise")
        if h.kind == "sensor_biased" and kind == "sensor_biased":
            size = amount(f"{h.table}.{h.signal}", abs(fault.size)).replace("°C", "K")
            out.insert(0, f"it reads {size} too {'much' if fault.size > 0 else 'little'}")
        return out

    @staticmethod
    def _plate_or_sensor(gpu: int, gap_z: np.ndarray, size: float) -> tuple[str, str]:
        """Return the plate or the sensor: if the GPU's memory is not as hot as its chip, the sensor is
        wrong."""
        disagrees = size < 0 or (len(gap_z) > gpu and abs(float(gap_z[gpu])) > 4.0)
        return ("sensor_biased", "temp_c") if disagrees else ("plate_degraded", "")

    def _run(self, table: str, signal: str, entity: int) -> tuple[int, float, float]:
        """Return (number of equal readings, usual share of readings that change, surprise of such a run)."""
        meters = self.watch.meters.get(table)
        if meters is None or signal not in meters.names:
            return 0, 1.0, 0.0
        k = meters.index(signal)
        moves = float(meters.moves[k, entity])
        return int(meters.run[k, entity]), moves, meters.surprise(k, entity)

    def _stuck(self, now: TickValues, cdu: int, error_k: float) -> bool:
        """Return True if the valve could do more against the error and does not move: too warm and not open,
        say.
        """
        valve = float(now["cdu.facility_valve1_pu"][cdu])
        run, _, _ = self._run("cdu", "facility_valve1_pu", cdu)
        if not np.isfinite(valve) or run < VALVE_RUN:
            return False
        return valve < FULL_VALVE_PU if error_k > 0 else valve > SHUT_VALVE_PU
