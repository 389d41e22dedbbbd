"""Points of DSX BMS v1: one table of rows (kind of point -> signal), as data.

Also here because the decoder and the discovery must agree on it: the shape of metadata, the vocabulary of
process areas and how misspelt ones are read, the texts of states, and how an id on the wire becomes a
name of the site. A point type
that no row names has no signal in our catalogue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Annotated, NamedTuple

import msgspec

from twin.catalogue import TABLES, Signal, to_core

Id = Annotated[str, msgspec.Meta(max_length=256)]
Word = Annotated[str, msgspec.Meta(max_length=64)]


class StateText(msgspec.Struct, frozen=True):
    value: int
    text: Word


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """A retained metadata message of a point, as far as a decoder keeps it."""

    object_type: Word
    point_type: Word
    eng_unit: Word | None = None
    state_text: Annotated[list[StateText], msgspec.Meta(max_length=32)] | None = None
    rack_location_id: Id | None = None
    object_id: Id | None = None
    associate_id: Id | None = None
    process_area: Annotated[list[Word], msgspec.Meta(max_length=8)] | Word | None = None
    phase: Word | int | None = None
    is_setpoint: bool | None = None
    integration: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:\-]{1,64}$")] | None = None


class Edges(Metadata, frozen=True, rename="camel"):
    """Metadata with its edges: one way, from what feeds to what is fed."""

    serves_id: Annotated[list[Id], msgspec.Meta(max_length=4096)] | None = None


Described = tuple[str, Metadata, tuple[str, ...]]  # topic behind Metadata/, what it says, whom it serves


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRow:
    """One kind of point and the signals it feeds.

    Several `signals` are for points that metadata cannot distinguish: the first by sorted tagPath feeds the
    first signal. `alone` is the signal where there is only one such point. `bare` says that a point without
    unit or texts may be read (a power factor); `numbers` that unknown texts may fall back on the number.
    `ours` is for set points that an integration writes, which their metadata names.
    """

    object_type: str
    point_type: str
    areas: frozenset[str]
    setpoint: bool
    ours: bool
    phase: str
    table: str
    signals: tuple[str, ...]
    alone: str
    bare: bool
    numbers: bool


POINT_TYPES = frozenset((
    "RackLiquidSupplyTemperature", "RackLiquidReturnTemperature", "RackLiquidFlow",
    "RackLiquidDifferentialPressure", "RackLiquidDifferentialPressureSp", "RackControlValvePosition",
    "RackPower", "RackLeakDetect", "RackLeakSensorFault", "RackLeakDetectTray", "RackLiquidIsolationStatus",
    "RackElectricalIsolationStatus", "RackLiquidIsolationRequest", "RackElectricalIsolationRequest",
    "Voltage", "PowerFactor", "Frequency", "ApparentPower", "ActivePower", "Current", "CurrentLimit",
    "PhaseCurrent", "LiquidTemperature", "LiquidDifferentialPressure", "LiquidFlow", "LiquidPressure",
    "Status", "Available", "ValvePosition", "PumpSpeed", "FanSpeed", "DamperPosition", "AirTemperature",
    "AirDifferentialPressure", "AirFlow", "AirPressure", "Sound", "LeakDetect", "AirRelativeHumidity",
    "LiquidTemperatureSpRequest", "GenericPoint", "HeartbeatTimestampBms", "HeartbeatEchoBms",
    "HeartbeatTimestampIntegration", "HeartbeatEchoIntegration",
))  # fmt: skip

AREAS = (
    "Primary", "Secondary", "Supply", "Return", "Inlet", "Outlet", "Filter", "Fill", "ColdAisle", "HotAisle"
)  # fmt: skip

# Texts of a state beside its own name; compared without case, spaces and punctuation.
STATE_WORDS: dict[str, tuple[str, ...]] = {
    "no_leak": ("no leak detected", "dry", "normal"),
    "leak": ("leak detected", "leaking", "wet"),
    "ok": ("no fault", "normal"),
    "fault": ("faulted", "failed"),
    "none": ("no isolate request", "no isolation requested", "not requested"),
    "isolate": ("isolate request", "isolation requested", "requested"),
    "not_isolated": ("no isolation",),
    "off": ("not operating", "stopped", "not running", "not tripped"),
    "on": ("operating", "running", "tripped"),
    "not_available": ("unavailable",),
    "closed": ("shut",),
    "open": ("opened",),
}
# Texts that mean something else for one signal: a breaker that is "on" is closed.
SIGNAL_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "feeder.breaker_state": {
        "closed": ("closed", "on", "operating"),
        "tripped": ("tripped", "trip", "open", "off", "not operating"),
    },
}


@dataclass(frozen=True, slots=True)
class _Line:
    """Rows that differ in kind of object, process area or setpoint only.

    `areas` are alternatives, each of words joined by +, "-" for none. `setpoint` is no, yes, either, or asked
    for one that an integration writes.
    """

    kinds: str
    point_type: str
    key: str
    areas: str = "-"
    setpoint: str = "no"
    phase: str = ""
    alone: str = ""
    bare: bool = False
    numbers: bool = True

    def rows(self) -> list[PointRow]:
        table, _, names = self.key.partition(".")
        signals = tuple(names.split("|"))
        flags = {"no": (False,), "yes": (True,), "either": (False, True), "asked": (True,)}[self.setpoint]
        return [
            PointRow(
                object_type=kind,
                point_type=self.point_type,
                areas=frozenset(area.split("+")) - {"-"},
                setpoint=flag,
                ours=self.setpoint == "asked",
                phase=self.phase,
                table=table,
                signals=signals,
                alone=self.alone or signals[0],
                bare=self.bare,
                numbers=self.numbers,
            )
            for kind, area, flag in product(self.kinds.split(), self.areas.split(), flags)
        ]


_PLANT = "CoolingTower HX Chiller Tank GenericObject"
_SETPOINTS = "cdu.supply_temp_setpoint_final_c|supply_temp_setpoint_c"
_SUPPLY = "- Secondary Secondary+Supply"
_LINES = (
    _Line("Rack", "RackPower", "rack.power_w"),
    _Line("Rack", "RackLiquidSupplyTemperature", "rack.supply_temp_c"),
    _Line("Rack", "RackLiquidReturnTemperature", "rack.return_temp_c"),
    _Line("Rack", "RackLiquidFlow", "rack.flow_lpm"),
    _Line("Rack", "RackLiquidDifferentialPressure", "rack.diff_pressure_pa"),
    _Line("Rack", "RackLiquidDifferentialPressureSp", "rack.diff_pressure_setpoint_pa", setpoint="either"),
    _Line("Rack", "RackControlValvePosition", "rack.valve_pu"),
    _Line("Rack", "RackLeakDetect", "rack.leak_state"),
    _Line("Rack", "RackLeakDetectTray", "rack.tray_leak_state"),
    _Line("Rack", "RackLeakSensorFault", "rack.leak_sensor_fault_state"),
    _Line("Rack", "RackLiquidIsolationStatus", "rack.liquid_isolation_state"),
    _Line("Rack", "RackElectricalIsolationStatus", "rack.electrical_isolation_state"),
    _Line("Rack", "RackLiquidIsolationRequest", "rack.liquid_isolation_request_state"),
    _Line("Rack", "RackElectricalIsolationRequest", "rack.electrical_isolation_request_state"),
    _Line("Valve", "ValvePosition", "rack.supply_valve_state", "Supply"),
    _Line("Valve", "ValvePosition", "rack.return_valve_state", "Return"),
    _Line("Sensor", "LeakDetect", "rack.leak_state"),
    _Line("Sensor", "AirTemperature", "rack.inlet_temp_c", "- ColdAisle Inlet"),
    _Line("PowerMeter", "ActivePower", "feeder.power_w"),
    _Line("PowerMeter", "ApparentPower", "feeder.apparent_power_va"),
    _Line("PowerMeter", "PowerFactor", "feeder.power_factor_pu", bare=True),
    _Line("PowerMeter", "Voltage", "feeder.voltage_v"),
    _Line("PowerMeter", "Frequency", "feeder.frequency_hz"),
    # A meter's current and its largest phase current carry the same metadata but for the tagPath.
    _Line("PowerMeter", "Current", "feeder.current_a|current_a_max"),
    _Line("PowerMeter", "CurrentLimit", "feeder.current_limit_a", setpoint="either"),
    *(_Line("PowerMeter", "PhaseCurrent", f"feeder.phase_{p.lower()}_current_a", phase=p) for p in "ABC"),
    _Line("Shunt", "Status", "feeder.shunt_trip_state"),
    # Vendors number a breaker's states either way: without a known text its number means nothing.
    _Line("Breaker", "Status", "feeder.breaker_state", numbers=False),
    _Line("CDU", "Available", "cdu.available_state"),
    _Line("CDU", "Status", "cdu.running_state"),
    _Line("CDU Sensor", "LeakDetect", "cdu.leak_state", "- Primary Secondary"),
    _Line("CDU Pump", "PumpSpeed", "cdu.pump1_speed_pu|pump2_speed_pu", "- Secondary"),
    _Line("CDU Pump", "PumpSpeed", "cdu.fill_pump_state", "Fill Secondary+Fill"),
    _Line("CDU Valve", "ValvePosition", "cdu.facility_valve1_pu|facility_valve2_pu", "Primary"),
    _Line("CDU Sensor", "LiquidFlow", "cdu.flow_lpm", "Secondary"),
    _Line("CDU Sensor", "LiquidFlow", "cdu.facility_flow_lpm", "Primary"),
    _Line("CDU Sensor", "LiquidDifferentialPressure", "cdu.diff_pressure_pa", "Secondary"),
    _Line("CDU Sensor", "LiquidDifferentialPressure", "cdu.filter_diff_pressure_pa", "Secondary+Filter"),
    _Line("CDU", "LiquidDifferentialPressure", "cdu.diff_pressure_setpoint_pa", "Secondary", setpoint="yes"),
    # DSX has no request of a pressure by a name of its own: the set point that an integration writes
    _Line("CDU", "LiquidDifferentialPressure", "cdu.diff_pressure_request_pa", "Secondary", setpoint="asked"),
    *(
        _Line("CDU Sensor", point, f"cdu.{signal}_{suffix}", area)
        for signal, area in (
            ("supply", "Secondary+Supply"),
            ("return", "Secondary+Return"),
            ("facility_supply", "Primary+Supply Primary+Inlet"),
            ("facility_return", "Primary+Return Primary+Outlet"),
        )
        for point, suffix in (("LiquidTemperature", "temp_c"), ("LiquidPressure", "pressure_pa"))
    ),
    # The setpoint in force and the configured one differ in the tagPath only; one alone is the latter.
    _Line("CDU", "LiquidTemperature", _SETPOINTS, "Secondary+Supply", "yes", alone="supply_temp_setpoint_c"),
    _Line("CDU", "LiquidTemperatureSpRequest", "cdu.supply_temp_request_c", _SUPPLY, "either"),
    _Line("Sensor", "AirTemperature", "hall.cold_aisle_temp_c", "ColdAisle"),
    _Line("Sensor", "AirTemperature", "hall.hot_aisle_temp_c", "HotAisle"),
    _Line("Sensor", "AirRelativeHumidity", "hall.cold_aisle_rh_pu", "ColdAisle"),
    _Line("Sensor", "AirRelativeHumidity", "hall.hot_aisle_rh_pu", "HotAisle"),
    _Line("Sensor", "AirDifferentialPressure", "hall.aisle_diff_pa"),
    _Line("Sensor", "LeakDetect", "hall.leak_state", "- ColdAisle HotAisle"),
    # Facility-water plant counts where the site names a loop like the object.
    _Line(f"{_PLANT} Sensor", "LiquidTemperature", "loop.supply_temp_c", "Supply"),
    _Line(f"{_PLANT} Sensor", "LiquidTemperature", "loop.return_temp_c", "Return"),
    _Line(f"{_PLANT} Sensor", "LiquidFlow", "loop.flow_lpm", "- Supply"),
    _Line(_PLANT, "ActivePower", "loop.power_w"),
    _Line(_PLANT, "LeakDetect", "loop.leak_state"),
)
ROWS = tuple(row for line in _LINES for row in line.rows())
_BY_KEY = {(r.object_type, r.point_type, r.areas, r.setpoint, r.phase, r.table, r.ours): r for r in ROWS}
_TABLES_OF = {
    kind: tuple(
        t for t in TABLES if any(r.table == t and (r.object_type, r.point_type) == kind for r in ROWS)
    )
    for kind in {(r.object_type, r.point_type) for r in ROWS}
}
_PHASES = {"A": "A", "B": "B", "C": "C", "1": "A", "2": "B", "3": "C"}


def tables_of(object_type: str, point_type: str) -> tuple[str, ...]:
    """Return the tables that points of this kind may feed; empty if the catalogue has no signal for them."""
    return _TABLES_OF.get((object_type, point_type), ())


def find_row(meta: Metadata, areas: frozenset[str], table: str) -> PointRow | None:
    """Return the row of a point of an entity in `table`.

    The areas must fit exactly (a temperature at Secondary, Supply, Filter is not the supply temperature), but
    for racks and meters, whose point types say it all.
    """
    if meta.object_type in ("Rack", "PowerMeter"):
        areas = frozenset()
    phase = _PHASES.get(str(meta.phase), str(meta.phase)) if meta.phase is not None else ""
    key = (meta.object_type, meta.point_type, areas, bool(meta.is_setpoint), phase, table)
    asked = _BY_KEY.get((*key, True)) if meta.integration is not None else None
    return asked or _BY_KEY.get((*key, False))


class Areas(NamedTuple):
    """Parts of a process area: words of the vocabulary, names of places, and misspellings."""

    known: frozenset[str]
    places: tuple[str, ...]
    misspelt: tuple[tuple[str, str], ...]


def split_areas(wire: list[str] | str | None) -> Areas:
    words = [wire] if isinstance(wire, str) else wire or []
    known: set[str] = set()
    places: list[str] = []
    misspelt: list[tuple[str, str]] = []
    for word in words:
        meant, exact = _closest_area(word)
        if meant is None:
            places.append(word)
            continue
        known.add(meant)
        if not exact:
            misspelt.append((word, meant))
    return Areas(frozenset(known), tuple(places), tuple(misspelt))


def plain(text: str) -> str:
    """Return a text for comparison: only letters and digits, lower case."""
    return "".join(c for c in text.casefold() if c.isalnum())


@lru_cache(maxsize=1024)
def _closest_area(word: str) -> tuple[str | None, bool]:
    """The word of the vocabulary that is meant, and whether it is spelt so. A trailing number is a count
    ("Filter1"). Short words allow fewer slips, and two equally close words mean neither."""
    text = plain(word).rstrip("0123456789")
    best: list[str] = []
    allowed = 2 if len(text) > 6 else 1 if len(text) > 4 else 0
    for area in AREAS:
        known = area.casefold()
        distance = 0 if text == known else _slips(text, known, allowed)
        if distance < allowed or (distance == allowed and not best):
            if distance < allowed:
                best.clear()
            allowed = distance
            best.append(area)
        elif distance == allowed:
            best.append(area)
    return (best[0], allowed == 0) if len(best) == 1 else (None, True)


def _slips(a: str, b: str, limit: int) -> int:
    """Return the insertions, deletions, substitutions and neighbour swaps that turn a into b; limit + 1 if
    more."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return min(row[-1], limit + 1)


class PointRule(NamedTuple):
    """Conversion of the numbers of a point: core = wire * factor + offset, or by `states`.

    A state None stands for a text that we cannot place. `guessed`: the states go by number alone.
    """

    factor: float = 1.0
    offset: float = 0.0
    states: dict[float, float | None] | None = None
    guessed: bool = False


def reading_rule(meta: Metadata, row: PointRow) -> PointRule | str:
    """Return the conversion of a point's values into those of its row's signals, or the reason for none."""
    spec = TABLES[row.table].by_name[row.signals[0]]
    if spec.kind == "state":
        if meta.eng_unit is not None:
            return f"unit {meta.eng_unit!r}; expected the states {', '.join(spec.states)}"
        return _read_states(spec, meta.state_text, row.numbers)
    if meta.eng_unit is None:
        if row.bare and meta.state_text is None:
            return PointRule()
        return f"no unit; expected one that measures {spec.unit}"
    conversion = to_core(meta.eng_unit, spec.unit)
    if conversion is None:
        return f"unit {meta.eng_unit!r}; expected one that measures {spec.unit}"
    return PointRule(*conversion)


def _read_states(signal: Signal, texts: list[StateText] | None, numbers: bool) -> PointRule | str:
    """Return the meaning of each number of a point, or the reason for none.

    Texts decide. Only where not one text is known does the number stand for itself: where some are, an
    unknown text beside them must not collide with their numbers and reads as "no reading".
    """
    own: dict[float, float | None] = {i: float(i) for i in range(len(signal.states))}
    if not texts:
        return (
            PointRule(states=own, guessed=True)
            if numbers
            else f"no texts for the states {', '.join(signal.states)}"
        )
    words: dict[str, float] = {}
    for i, name in enumerate(signal.states):
        special = SIGNAL_WORDS.get(signal.key)
        for text in special[name] if special else (name, *STATE_WORDS.get(name, ())):
            words.setdefault(plain(text), float(i))
    found: dict[float, float | None] = {t.value: words.get(plain(t.text)) for t in texts}
    if any(state is not None for state in found.values()):
        return PointRule(states=found)
    if not numbers:
        return f"unknown texts for the states {', '.join(signal.states)}"
    return PointRule(states={number: own.get(number) for number in found}, guessed=True)


_FOREIGN = re.compile(r"[^A-Za-z0-9_.:+\-]")


def site_name(wire_id: str) -> str:
    """Return an id as a name of the site file: other characters become +hex+ ("a b" is a+20+b)."""
    return _FOREIGN.sub(lambda match: f"+{ord(match[0]):x}+", wire_id)


_TOKEN = re.compile(r"([A-Za-z0-9]+)")
# Tokens of two ids with the separators between them: a text stands for itself, a number for a gap to fill.
Template = tuple[tuple[str | int, ...], tuple[str | int, ...]]


def words_of(wire_id: str) -> list[str]:
    """Return the runs of letters and digits in an id."""
    return _TOKEN.findall(wire_id)


def find_template(tap: str, rack: str) -> Template | None:
    """Return the pattern of the ids of a tap and its rack, with shared tokens as gaps. None without one."""
    shared = {t for t in words_of(tap) if any(c.isdigit() for c in t)} & set(words_of(rack))
    if not shared:
        return None
    gap: dict[str, int] = {token: i for i, token in enumerate(sorted(shared))}
    left, right = ([gap.get(t, t) for t in _TOKEN.split(text)] for text in (tap, rack))
    return tuple(left), tuple(right)


def apply_template(template: Template, tap: str) -> str | None:
    """Return the rack id that `template` makes of `tap`, or None if the tap has another form."""
    pattern, rack = template
    tokens = _TOKEN.split(tap)
    if len(tokens) != len(pattern):
        return None
    filled: dict[int, str] = {}
    for part, token in zip(pattern, tokens, strict=True):
        if isinstance(part, int):
            if filled.setdefault(part, token) != token:
                return None
        elif part != token:
            return None
    return "".join(part if isinstance(part, str) else filled[part] for part in rack)
