"""Plant wire: sensor values of a simulated site as messages of real devices.

The building speaks DSX BMS v1 (retained metadata, from which a site can be discovered, and values), agents
speak IT v1 (a frame per rack, or per node where some of a rack are mute; events of faults and jobs). Values
are rounded to the catalogue's quantum, times of the building to milliseconds. What neither format has a place
for is in `NOT_SENT`. The codecs are in `connectors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from connectors.agents import EVENT, FRAME, JOBS, encode_frame, encode_json
from connectors.dsx import PUB_METADATA, PUB_VALUE
from connectors.jobs import REPORT, encode_report, level_of
from twin.catalogue import F64, TABLES, ConfigError, signal_of, to_core
from twin.plant import RACK_LIQUID, Observation, Report
from twin.site import Site
from twin.telemetry import CheckpointTold, Event, FaultReported, JobEnded, JobStarted, Message

# Sensors have them, these two formats do not: weather, links, what a meter says of its own supply, and what a
# scheduler says of nodes that sleep.
NOT_SENT = frozenset((
    "site.outdoor_temp_c", "site.outdoor_wet_bulb_c", "link.up_state", "link.rx_bytes_per_s",
    "link.tx_bytes_per_s", "link.error_count", "link.flap_count", "link.discard_count",
    "feeder.energised_state", "feeder.energy_mj", "loop.makeup_ml", "node.standby_state",
))  # fmt: skip


class Point(NamedTuple):
    """A kind of point: which signal it carries, as what, in which unit (None for a state)."""

    key: str
    object_type: str
    point_type: str
    unit: str | None = None
    areas: tuple[str, ...] = ()
    setpoint: bool = False


_PRIMARY, _SECONDARY = ("Primary",), ("Secondary",)
_SUPPLY, _RETURN = ("Secondary", "Supply"), ("Secondary", "Return")
POINTS = (
    Point("rack.power_w", "Rack", "RackPower", "kW"),
    Point("rack.supply_temp_c", "Rack", "RackLiquidSupplyTemperature", "C"),
    Point("rack.return_temp_c", "Rack", "RackLiquidReturnTemperature", "C"),
    Point("rack.flow_lpm", "Rack", "RackLiquidFlow", "LPM"),
    Point("rack.diff_pressure_pa", "Rack", "RackLiquidDifferentialPressure", "kPa"),
    Point("rack.valve_pu", "Rack", "RackControlValvePosition", "%"),
    Point("rack.leak_state", "Rack", "RackLeakDetect"),
    Point("rack.tray_leak_state", "Rack", "RackLeakDetectTray"),
    Point("rack.leak_sensor_fault_state", "Rack", "RackLeakSensorFault"),
    Point("rack.liquid_isolation_state", "Rack", "RackLiquidIsolationStatus"),
    Point("rack.electrical_isolation_state", "Rack", "RackElectricalIsolationStatus"),
    Point("rack.inlet_temp_c", "Sensor", "AirTemperature", "C", ("Inlet",)),
    Point("cdu.supply_temp_c", "CDU", "LiquidTemperature", "C", _SUPPLY),
    Point("cdu.return_temp_c", "CDU", "LiquidTemperature", "C", _RETURN),
    Point("cdu.flow_lpm", "CDU", "LiquidFlow", "LPM", _SECONDARY),
    Point("cdu.supply_pressure_pa", "CDU", "LiquidPressure", "kPa", _SUPPLY),
    Point("cdu.return_pressure_pa", "CDU", "LiquidPressure", "kPa", _RETURN),
    Point("cdu.diff_pressure_pa", "CDU", "LiquidDifferentialPressure", "kPa", _SECONDARY),
    Point("cdu.filter_diff_pressure_pa", "CDU", "LiquidDifferentialPressure", "kPa", ("Secondary", "Filter")),
    Point("cdu.facility_supply_temp_c", "CDU", "LiquidTemperature", "C", ("Primary", "Supply")),
    Point("cdu.facility_return_temp_c", "CDU", "LiquidTemperature", "C", ("Primary", "Return")),
    Point("cdu.facility_flow_lpm", "CDU", "LiquidFlow", "LPM", _PRIMARY),
    Point("cdu.facility_valve1_pu", "Valve", "ValvePosition", "%", _PRIMARY),
    Point("cdu.pump1_speed_pu", "Pump", "PumpSpeed", "%", _SECONDARY),
    Point("cdu.pump2_speed_pu", "Pump", "PumpSpeed", "%", _SECONDARY),
    Point("cdu.fill_pump_state", "Pump", "PumpSpeed", None, ("Fill",)),
    Point("cdu.available_state", "CDU", "Available"),
    Point("cdu.running_state", "CDU", "Status"),
    Point("cdu.leak_state", "CDU", "LeakDetect"),
    Point("cdu.supply_temp_setpoint_c", "CDU", "LiquidTemperature", "C", _SUPPLY, True),
    Point("cdu.supply_temp_request_c", "CDU", "LiquidTemperatureSpRequest", "C", _SUPPLY, True),
    Point("cdu.diff_pressure_setpoint_pa", "CDU", "LiquidDifferentialPressure", "kPa", _SECONDARY, True),
    Point("loop.supply_temp_c", "CoolingTower", "LiquidTemperature", "C", ("Supply",)),
    Point("loop.return_temp_c", "CoolingTower", "LiquidTemperature", "C", ("Return",)),
    Point("loop.flow_lpm", "CoolingTower", "LiquidFlow", "LPM"),
    Point("loop.power_w", "CoolingTower", "ActivePower", "kW"),
    Point("loop.leak_state", "CoolingTower", "LeakDetect"),
    Point("feeder.power_w", "PowerMeter", "ActivePower", "kW"),
    Point("feeder.apparent_power_va", "PowerMeter", "ApparentPower", "kVA"),
    Point("feeder.power_factor_pu", "PowerMeter", "PowerFactor", "1"),
    Point("feeder.voltage_v", "PowerMeter", "Voltage", "V"),
    Point("feeder.current_a", "PowerMeter", "Current", "A"),
    Point("feeder.frequency_hz", "PowerMeter", "Frequency", "Hz"),
    Point("feeder.breaker_state", "Breaker", "Status"),
    Point("hall.cold_aisle_temp_c", "Sensor", "AirTemperature", "C", ("ColdAisle",)),
    Point("hall.hot_aisle_temp_c", "Sensor", "AirTemperature", "C", ("HotAisle",)),
    Point("hall.cold_aisle_rh_pu", "Sensor", "AirRelativeHumidity", "%RH", ("ColdAisle",)),
    Point("hall.leak_state", "Sensor", "LeakDetect"),
)
_OWN = ("Rack", "CDU", "CoolingTower", "PowerMeter")  # objects with an id; others are parts of one
_LIQUID = frozenset(m.signal for m in RACK_LIQUID)


class _Sent(NamedTuple):
    """One entity's point."""

    entity: int
    topic: str  # below Value/ and Metadata/


class PlantWire:
    """Encodes the observations of one site. `msgpack`: frames with raw columns, as agents send them.

    Raises ConfigError for a site in which two racks, CDUs, loops, feeders or halls have one local name: a BMS
    knows them by these alone.
    """

    def __init__(self, site: Site, msgpack: bool = False) -> None:
        self.site, self.msgpack = site, msgpack
        self._local = {t: _local_names(site, t) for t in ("rack", "cdu", "loop", "feeder", "hall")}
        self._points = {p.key: self._templates(p) for p in POINTS}
        self._spec = {p.key: p for p in POINTS}
        self._topics = [FRAME + site.name("rack", r) for r in range(site.sizes["rack"])]

    def _templates(self, point: Point) -> list[_Sent]:
        table, _, signal = point.key.partition(".")
        n = self.site.sizes[table]
        there = np.ones(n, np.bool_)
        if table == "rack" and signal in _LIQUID:
            there = self.site.design.liquid & (self.site.cdu_of_rack >= 0)
        stem = f"{point.object_type}/{point.point_type}/{self.site.file.site}"
        return [_Sent(e, f"{stem}/{self._local[table][e]}/{signal}") for e in np.flatnonzero(there).tolist()]

    def metadata(self, t_ns: int) -> list[Message]:
        """Messages that the BMS retains: every point with its unit or states, its owner, and what that
        serves.
        """
        out = []
        for point in POINTS:
            for entity, topic in self._points[point.key]:
                body = self._describe(point, entity)
                out.append(Message(t_ns, PUB_METADATA + topic, msgspec.json.encode(body)))
        return out

    def _describe(self, point: Point, entity: int) -> dict[str, Any]:
        table, _, signal = point.key.partition(".")
        name = self._local[table][entity]
        body: dict[str, Any] = {"objectType": point.object_type, "pointType": point.point_type}
        if point.unit is not None:
            body["engUnit"] = point.unit
        else:
            texts = TABLES[table].by_name[signal].states
            body["stateText"] = [
                {"value": i, "text": t.replace("_", " ").title()} for i, t in enumerate(texts)
            ]
        areas = list(point.areas)
        if point.object_type == "Rack":
            body |= {"rackLocationId": name, "rackLocationName": name}
        elif point.object_type in _OWN:
            body |= {"objectId": name, "objectName": name}
            if served := self._serves(table, entity):
                body["servesId"] = served
        elif table == "hall":
            body |= {"objectId": f"{name}-{signal}"}
            areas.append(name)
        else:
            body |= {"objectId": f"{name}-{signal}", "associateId": name}
        if areas:
            body["processArea"] = areas
        if point.setpoint:
            body["isSetpoint"] = True
        return body

    def _serves(self, table: str, entity: int) -> list[str]:
        """Return the ids of the equipment that a CDU, a loop or a meter feeds directly."""
        site, local = self.site, self._local
        if table == "cdu":
            return [local["rack"][r] for r in np.flatnonzero(site.cdu_of_rack == entity).tolist()]
        if table == "loop":
            return [local["cdu"][c] for c in np.flatnonzero(site.loop_of_cdu == entity).tolist()]
        feeders, racks = site.below_feeder()
        return [local["feeder"][f] for f in feeders.of_row(entity).tolist()] + [
            local["rack"][r] for r in racks.of_row(entity).tolist()
        ]

    def messages(self, observation: Observation) -> list[Message]:
        """Messages of this round, in order of arrival; events at its end."""
        out: list[Message] = []
        it: list[Report] = []
        for report in observation.reports:
            if report.table not in ("gpu", "node"):
                out += self._values(report)
            elif not all(f"{report.table}.{s}" in NOT_SENT for s in (*report.signals, *report.counters)):
                it.append(report)
        if it:
            out += self._frames(it)
        out.sort(key=lambda message: message.t_ns)
        for number, event in enumerate(observation.events):
            message = self._event(event, observation.now_ns, number)
            out += [] if message is None else [message]
        return out

    # The building.

    def _values(self, report: Report) -> list[Message]:
        out = []
        for k, signal in enumerate(report.signals):
            key = f"{report.table}.{signal}"
            point = self._spec.get(key)
            if point is None:
                continue
            wire = rounded(key, report.values[k])
            if point.unit is not None:
                factor, offset = cast(
                    tuple[float, float], to_core(point.unit, TABLES[report.table].by_name[signal].unit)
                )
                wire = np.round((wire - offset) / factor, 6)
            for entity, topic in self._points[key]:
                if report.present is not None and not report.present[entity]:
                    continue
                value = float(wire[entity])
                known = value == value
                body = {
                    "value": (value if point.unit is not None else int(value)) if known else None,
                    "timestamp": int(report.t_ns[entity]) // 1_000_000,
                    "quality": int(known),
                }
                out.append(Message(report.arrival_ns, PUB_VALUE + topic, msgspec.json.encode(body)))
        return out

    # The IT side.

    def _frames(self, reports: list[Report]) -> list[Message]:
        site, out = self.site, list[Message]()
        for rack, topic in enumerate(self._topics):
            first, end = (int(i) for i in site.node_start_of_rack[rack : rack + 2])
            speaks = [_speaks(report, *self._rows(report, first, end)) for report in reports]
            if all(s.all() for s in speaks):
                out += self._frame(topic, reports, first, end)
                continue
            for one in range(first, end):
                out += self._frame(f"{topic}/node{one - first}", reports, one, one + 1)
        return out

    def _rows(self, report: Report, first: int, end: int) -> tuple[int, int]:
        """The rows in a report of nodes, or of their GPUs, from `first` to before `end`."""
        if report.table == "node":
            return first, end
        starts = self.site.gpu_start_of_node
        return int(starts[first]), int(starts[end])

    def _frame(self, topic: str, reports: list[Report], first: int, end: int) -> list[Message]:
        """The frame of these nodes; empty if all are silent."""
        columns: dict[str, dict[str, np.ndarray]] = {}
        t_ns = 0
        for report in reports:
            a, b = self._rows(report, first, end)
            if a == b or not _speaks(report, a, b).all():
                continue
            t_ns = int(report.t_ns[a:b].max())
            mine = columns.setdefault(report.table, {})
            for k, signal in enumerate(report.signals):
                mine[signal] = rounded(f"{report.table}.{signal}", report.values[k, a:b])
            for k, counter in enumerate(report.counters):
                mine[counter] = report.counts[k, a:b]
        if not columns:
            return []
        gpus, nodes = columns.get("gpu", {}), columns.get("node", {})
        if self.msgpack:
            return [Message(t_ns, topic, encode_frame(t_ns, gpus, nodes))]
        lists: list[dict[str, Iterable[float | int | None]]] = [
            {key: plain_column(column) for key, column in part.items()} for part in (gpus, nodes)
        ]
        return [Message(t_ns, topic, encode_json(t_ns, lists[0], lists[1]))]

    def _event(self, event: Event, t_ns: int, number: int) -> Message | None:
        """Events of faults and jobs, and what jobs say of their saves; others do not come from devices."""
        if not event.id:
            event = msgspec.structs.replace(event, id=f"{t_ns}-{number}")
        if isinstance(event, CheckpointTold):
            return Message(t_ns, REPORT + level_of(event.job), encode_report(event))
        if isinstance(event, FaultReported):
            place = event.name.rpartition("/")[0] if event.table == "gpu" else event.name
            if event.table not in ("gpu", "node", "rack"):
                return None
        elif isinstance(event, JobStarted | JobEnded):
            place = JOBS + "scheduler"
        else:
            return None
        return Message(t_ns, EVENT + place, msgspec.json.encode(event))


def _local_names(site: Site, table: str) -> list[str]:
    names = [path.rpartition("/")[2] for path in site.names[table]]
    for entity, name in enumerate(names):
        if site.entity(table, name) != entity:
            raise ConfigError(f"{table} {name}: expected a name unique in the site, as ids of a BMS are")
    return names


def _speaks(report: Report, first: int, end: int) -> np.ndarray:
    """Entities of first .. end that reported [end - first]."""
    return np.ones(end - first, np.bool_) if report.present is None else report.present[first:end]


def rounded(key: str, values: np.ndarray) -> F64:
    """Values at their signal's quantum, which is as much of them as the twin keeps."""
    signal = signal_of(key)
    digits = max(0, -math.floor(math.log10(signal.quantum)))
    # in float32, as the Inbox does it, so that no tie falls to the other side
    whole = np.rint(values * np.float32(1.0 / signal.quantum)).astype(np.float64)
    return np.round(whole * signal.quantum, digits)


def plain_column(column: np.ndarray) -> list[float | int | None]:
    """A column as JSON has it: None where nothing was read."""
    listed: list[float | int | None] = column.tolist()
    if column.dtype.kind == "i":
        return [None if v is None or v < 0 else v for v in listed]
    return listed if not np.isnan(column).any() else [None if v != v else v for v in listed]
