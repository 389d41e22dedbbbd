"""Codec of DSX BMS v1: messages in, readings in core units out, and requests in the other direction.

`BmsDecoder` keeps a table of the points that metadata has announced and reads values by it, never by a
tagPath. No input or output, no clock: the same messages give the same readings. Everything in it has a limit,
and whatever arrives, `decode` answers with readings, `Ignored` or `BadMessage`.

Where several points feed one cell (two sensors of a cold aisle) the cell is their worst by the signal's
danger and reduction, over the points reported in the last 250 s with good quality.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Collection

import msgspec

from connectors.dsx.points import (
    POINT_TYPES,
    Areas,
    Described,
    Id,
    Metadata,
    PointRow,
    find_row,
    reading_rule,
    site_name,
    split_areas,
    tables_of,
)
from twin.catalogue import TABLES, ActuationError, BadMessage, Signal
from twin.telemetry import ELSEWHERE, OWN_MESSAGE, Ignored, Message, Names, Reading, nowhere

MAX_POINTS = 200_000
MAX_POINT_BYTES = 256 << 20  # metadata of all of them together, as received
MAX_ALIKE = 64  # points of one entity that metadata cannot distinguish
MAX_TOPIC = 1024
MAX_VALUE_BYTES = 4096
MAX_METADATA_BYTES = 65_536
MAX_NOTES = 256
MAX_NUMBER = 1e12  # after conversion; nothing in the catalogue comes near
HOLD_NS = 250 * 10**9  # 2.5 republish periods of 100 s
MIN_MS, MAX_MS = 946_684_800_000, 4_102_444_800_000  # the years 2000 to 2100
PUB_VALUE, PUB_METADATA = "BMS/v1/PUB/Value/", "BMS/v1/PUB/Metadata/"
SETTLE_NS = 60 * 10**9  # after the first message, in which retained metadata arrives
NO_METADATA = "let the BMS publish retained metadata of this point under BMS/v1/PUB/Metadata/"
WRONG_METADATA = "correct the metadata of this point in the BMS"
UNKNOWN_OBJECT = "give it the name of the BMS in the site file, or run `racktwin site discover`"
_NO_SIGNAL = "the catalogue has no signal for it"
_UNKNOWN = "is not in the site file"


class _Value(msgspec.Struct):
    value: float | None
    timestamp: int
    quality: int


class _Served(msgspec.Struct, rename="camel"):
    serves_id: list[Id] | None = None


class Stats:
    """Counts of decoded messages. `changed`: metadata that contradicts earlier metadata of its topic."""

    __slots__ = ("bad", "changed", "forgotten", "ignored", "metadata", "values")

    def __init__(self) -> None:
        self.values = self.metadata = self.changed = self.forgotten = self.ignored = self.bad = 0


class _Cell:
    """One signal of one entity, and its points."""

    __slots__ = ("entity", "points", "signal", "table", "worst")

    def __init__(self, spec: Signal, entity: int) -> None:
        self.table, self.signal, self.entity = spec.table, spec.name, entity
        high = spec.danger == "high" or spec.reduce in ("max", "latch") or spec.kind == "state"
        low = spec.danger == "low" or spec.reduce == "min"
        self.worst = min if low else max if high else None
        self.points: list[_Point] = []


class _Point:
    """One announced point: how to read its values, or why not, and the last good one."""

    __slots__ = ("cell", "device_ns", "factor", "group", "ignored", "key", "meta", "offset", "rx_ns",
                 "serves", "size", "states", "value")  # fmt: skip

    def __init__(self, key: str, meta: Metadata, size: int, serves: tuple[str, ...]) -> None:
        self.key, self.meta, self.size, self.serves = key, meta, size, serves
        self.ignored: Ignored | None = None
        self.cell: _Cell | None = None
        self.group: tuple[PointRow, int] | None = None
        self.factor, self.offset = 1.0, 0.0
        self.states: dict[float, float | None] | None = None
        self.value: float | None = None
        self.rx_ns = self.device_ns = 0


class BmsDecoder:
    """Decodes the messages of one broker for one site.

    `ours` are the integrations in whose name we may publish requests. `default_hall` takes the sensors whose
    process area names no hall; pass it where the site has one hall only. `elsewhere` says which objects
    another daemon of a divided site mirrors.
    """

    def __init__(
        self,
        names: Names,
        *,
        ours: Collection[str] = (),
        default_hall: str | None = None,
        elsewhere: Callable[[str], bool] = nowhere,
    ) -> None:
        self.stats = Stats()
        self.notes: dict[str, int] = {}
        self._since_ns = 0  # when the first message came
        self._names, self._ours, self._default_hall = names, frozenset(ours), default_hall
        self._elsewhere = elsewhere
        self._points: dict[str, _Point] = {}
        self._held = 0
        self._by_topic: dict[str, _Point] = {}
        self._groups: dict[tuple[PointRow, int], list[_Point]] = {}
        self._cells: dict[tuple[str, int, str], _Cell] = {}
        self._value = msgspec.json.Decoder(_Value)
        self._metadata = msgspec.json.Decoder(Metadata)
        self._served = msgspec.json.Decoder(_Served)
        self._lists: dict[tuple[str, ...], tuple[str, ...]] = {}  # one for all points that serve alike

    def decode(self, message: Message) -> list[Reading] | Ignored:
        """Return the readings of a message (none for metadata) or the reason that it is ignored. Raises
        BadMessage for nonsense."""
        point = self._by_topic.get(message.topic)
        if point is None:
            return self._decode_other(message)
        cell = point.cell
        if cell is None:
            self.stats.ignored += 1
            assert point.ignored is not None
            return point.ignored
        if len(message.payload) > MAX_VALUE_BYTES:
            raise self._bad(message, f"{len(message.payload)} bytes; expected at most {MAX_VALUE_BYTES}")
        try:
            wire = self._value.decode(message.payload)
        except (ValueError, RecursionError) as error:
            raise self._bad(message, f"expected value, timestamp and quality: {str(error)[:120]}") from None
        if not MIN_MS <= wire.timestamp <= MAX_MS:
            text = str(wire.timestamp) if abs(wire.timestamp) < 10**20 else "a huge number"
            raise self._bad(message, f"timestamp {text}: expected milliseconds between 2000 and 2100")
        value, trusted = wire.value, wire.quality == 1
        if value is not None:
            if point.states is None:
                value = value * point.factor + point.offset
                if not -MAX_NUMBER <= value <= MAX_NUMBER:
                    raise self._bad(message, f"value {wire.value}: expected at most 1e12")
            else:
                number = value
                value = point.states.get(number, math.nan)
                if value is None:
                    trusted = False
                    self._note(
                        f"{point.meta.point_type}: a state with an unknown text; it counts as no reading"
                    )
                elif math.isnan(value):
                    raise self._bad(message, f"value {number}: expected one of {list(point.states)[:8]}")
        self.stats.values += 1
        t_ns = wire.timestamp * 1_000_000
        if len(cell.points) == 1:
            return [Reading(cell.table, cell.entity, cell.signal, value, t_ns, trusted)]
        return [self._combine(point, cell, message.t_ns, value, t_ns, trusted)]

    def _combine(
        self, point: _Point, cell: _Cell, rx_ns: int, value: float | None, t_ns: int, trusted: bool
    ) -> Reading:
        point.value, point.rx_ns, point.device_ns = (value if trusted else None), rx_ns, t_ns
        live = [p for p in cell.points if p.value is not None and -HOLD_NS <= rx_ns - p.rx_ns <= HOLD_NS]
        if not live:
            return Reading(cell.table, cell.entity, cell.signal, value, t_ns, trusted)
        values = [p.value for p in live if p.value is not None]
        whole = cell.worst(values) if cell.worst is not None else math.fsum(values) / len(values)
        # The newest contributor dates the whole: dated by a slower sensor it would be old news to the Inbox.
        newest = max(t_ns, *(p.device_ns for p in live))
        return Reading(cell.table, cell.entity, cell.signal, whole, newest, True)

    def _decode_other(self, message: Message) -> list[Reading] | Ignored:
        topic = message.topic
        if len(topic) > MAX_TOPIC:
            raise self._bad(message, f"a topic of {len(topic)} characters; expected at most {MAX_TOPIC}")
        parts = topic.split("/", 6)
        if len(parts) < 7 or parts[:2] != ["BMS", "v1"] or parts[3] not in ("Value", "Metadata"):
            return self._ignore(
                "topic", "expected BMS/v1/{publisher}/{Value|Metadata}/{object}/{point}/{tag}"
            )
        key = topic.split("/", 4)[4]
        if parts[3] == "Metadata":
            if parts[2] != "PUB":
                return self._ignore("Metadata", "an integration publishes no metadata")
            return self._announce(key, message)
        if parts[2] in self._ours:  # heartbeats, whose metadata is not kept here
            return self._ignore(OWN_MESSAGE, "published by this integration")
        what = parts[5] if parts[5] in POINT_TYPES else "unknown point type"
        if key in self._points:
            return self._ignore(what, "published under another name than its owner's")
        self._since_ns = self._since_ns or message.t_ns
        settled = message.t_ns - self._since_ns > SETTLE_NS
        return self._ignore(what, "no metadata yet", NO_METADATA if settled else "")

    def _announce(self, key: str, message: Message) -> list[Reading] | Ignored:
        if len(message.payload) > MAX_METADATA_BYTES:
            raise self._bad(message, f"{len(message.payload)} bytes; expected at most {MAX_METADATA_BYTES}")
        known = self._points.get(key)
        if not message.payload:  # MQTT's way to clear a retained message
            if known is not None:
                self._forget(known)
                self.stats.forgotten += 1
            self.stats.metadata += 1
            return []
        try:
            meta = self._metadata.decode(message.payload)
        except (ValueError, RecursionError) as error:
            raise self._bad(message, f"expected the metadata of a point: {str(error)[:120]}") from None
        if not key.startswith(f"{meta.object_type}/{meta.point_type}/"):
            raise self._bad(message, f"metadata of {meta.object_type}/{meta.point_type} on another's topic")
        serves = self._serves(message.payload)
        if known is not None and known.meta == meta and known.serves == serves:
            self.stats.metadata += 1
            return []
        if known is not None:
            self.stats.changed += 1
            self._forget(known)
        if len(self._points) >= MAX_POINTS or self._held + len(message.payload) > MAX_POINT_BYTES:
            return self._ignore("Metadata", f"the table of points is full ({len(self._points)})")
        self.stats.metadata += 1
        self._held += len(message.payload)
        point = self._points[key] = _Point(key, meta, len(message.payload), serves)
        self._by_topic[PUB_VALUE + key] = point
        if meta.integration is not None:
            self._by_topic[f"BMS/v1/{meta.integration}/Value/{key}"] = point
        self._bind(point)
        return []

    def _serves(self, payload: bytes) -> tuple[str, ...]:
        """Return the `servesId` of metadata; readings do not need it, so an invalid one is ignored."""
        if b"servesId" not in payload:
            return ()
        with contextlib.suppress(ValueError, RecursionError):
            serves = tuple(self._served.decode(payload).serves_id or ())
            if len(self._lists) >= MAX_POINTS:
                self._lists.clear()
            return self._lists.setdefault(serves, serves)
        return ()

    def described(self) -> list[Described]:
        """Return the metadata of all points that were announced, for `discover_points`."""
        return [(key, point.meta, point.serves) for key, point in self._points.items()]

    def _forget(self, point: _Point) -> None:
        del self._points[point.key]
        self._held -= point.size
        del self._by_topic[PUB_VALUE + point.key]
        if point.meta.integration is not None:
            self._by_topic.pop(f"BMS/v1/{point.meta.integration}/Value/{point.key}", None)
        if point.group is not None:
            group = self._groups[point.group]
            group.remove(point)
            self._attach(point, None)
            self._settle(point.group)

    def _bind(self, point: _Point) -> None:
        """Find entity, row and conversion of a point, or the reason why its values are ignored."""
        why = self._find(point)
        if why is not None:
            kind = point.meta.point_type if point.meta.point_type in POINT_TYPES else "unknown point type"
            remedy = UNKNOWN_OBJECT if why.endswith(_UNKNOWN) else WRONG_METADATA if "expected" in why else ""
            point.ignored = Ignored(kind, why, remedy)
            return
        assert point.group is not None
        group = self._groups.setdefault(point.group, [])
        if len(group) >= MAX_ALIKE:
            point.ignored = Ignored(point.meta.point_type, f"more than {MAX_ALIKE} points alike")
            point.group = None
            return
        bisect.insort(group, point, key=lambda p: p.key)
        self._settle(point.group)

    def _find(self, point: _Point) -> str | None:
        meta = point.meta
        tables = tables_of(meta.object_type, meta.point_type)
        if not tables:
            return _NO_SIGNAL
        areas = split_areas(meta.process_area)
        for wire, meant in areas.misspelt:
            self._note(f"process area {wire!r} read as {meant!r}")
        table, entity = self._owner(meta, areas, tables)
        if entity is None:
            return table
        row = find_row(meta, areas.known, table)
        if row is None or (table == "cdu" and areas.places):
            where = ", ".join(sorted(areas.known) + list(areas.places)) or "none"
            phase = f", phase {meta.phase}" if meta.phase is not None else ""
            setpoint = ", as a setpoint" if meta.is_setpoint else ""
            return f"no signal for it at process area {where}{phase}{setpoint}"
        rule = reading_rule(meta, row)
        if isinstance(rule, str):
            return rule
        if rule.guessed:
            self._note(f"{meta.point_type}: no known state texts; states are read by their numbers")
        point.factor, point.offset, point.states = rule.factor, rule.offset, rule.states
        point.group = (row, entity)
        return None

    def _owner(self, meta: Metadata, areas: Areas, tables: tuple[str, ...]) -> tuple[str, int | None]:
        """Return (table, entity) of a point's owner, or (reason, None)."""
        entity = self._names.entity
        if meta.object_type == "Rack":
            wire, tables = meta.rack_location_id, ("rack",)
        elif meta.associate_id is not None:
            wire, tables = meta.associate_id, tuple(t for t in tables if t != "hall")
        elif meta.object_type == "Sensor":
            halls = [*areas.places, *((meta.object_id,) if meta.object_id is not None else ())]
            if self._default_hall is not None:
                halls.append(self._default_hall)
            elif not areas.places:
                halls.append("hall1")  # discovery's name for the only hall where none is named
            for hall in halls:
                if "hall" in tables and (index := entity("hall", site_name(hall))) is not None:
                    return "hall", index
            wire, tables = meta.object_id, tuple(t for t in tables if t == "loop")
        else:
            wire, tables = meta.object_id, tuple(t for t in tables if t != "hall")
            if meta.object_type in ("Valve", "Pump", "Shunt", "Breaker"):
                return "expected an associateId that names the equipment of the sensor", None
        for table in tables if wire is not None else ():
            if (index := entity(table, site_name(wire or ""))) is not None:
                return table, index
        if any(self._elsewhere(site_name(name)) for name in (wire or "", *areas.places)):
            return ELSEWHERE, None
        return "the object has no id" if wire is None else f"object {wire} {_UNKNOWN}", None

    def _settle(self, key: tuple[PointRow, int]) -> None:
        """Assign the cells to the points of a group again, in the order of their tags."""
        row, entity = key
        group = self._groups[key]
        if not group:
            del self._groups[key]
            return
        for i, point in enumerate(group):
            if len(row.signals) == 1:
                signal: str | None = row.signals[0]
            elif len(group) == 1:
                signal = row.alone
            else:
                signal = row.signals[i] if i < len(row.signals) else None
            if signal is None:
                point.ignored = Ignored(point.meta.point_type, f"no signal for a {i + 1}. point of this kind")
                self._attach(point, None)
                continue
            point.ignored = None
            place = (row.table, entity, signal)
            cell = self._cells.get(place)
            if cell is None:
                cell = self._cells[place] = _Cell(TABLES[row.table].by_name[signal], entity)
            self._attach(point, cell)

    def _attach(self, point: _Point, cell: _Cell | None) -> None:
        old = point.cell
        if old is cell:
            return
        point.cell, point.value = cell, None
        if cell is not None:
            cell.points.append(point)
        if old is not None:
            old.points.remove(point)
            if not old.points:
                del self._cells[(old.table, old.entity, old.signal)]

    def find_request(self, table: str, entity: int, signal: str) -> str:
        """Return the metadata topic of our point for this cell. Raises ActuationError if there is none."""
        cell = self._cells.get((table, entity, signal))
        for point in cell.points if cell is not None else ():
            if point.meta.integration in self._ours:
                return PUB_METADATA + point.key
        raise ActuationError(f"{table}.{signal} of entity {entity}: no point announced for our integrations")

    def encode_request(self, topic: str, value: float, t_ns: int) -> tuple[str, bytes]:
        """Return the (topic, payload) that request `value` from the BMS, in core units, on a point of our
        integration.

        `topic` is that of the point's metadata. Raises ActuationError for a point that is not ours to write.
        """
        point = self._points.get(topic.removeprefix(PUB_METADATA))
        if point is None:
            raise ActuationError(f"{topic[:200]}: no metadata yet, so it cannot be written")
        meta = point.meta
        if meta.integration is None or meta.integration not in self._ours:
            owner = meta.integration or "the BMS"
            ours = ", ".join(sorted(self._ours)) or "none"
            raise ActuationError(f"{topic[:200]}: belongs to {owner}; our integrations: {ours}")
        cell = point.cell
        if cell is None:
            assert point.ignored is not None
            raise ActuationError(f"{topic[:200]}: cannot be written: {point.ignored.why}")
        spec = TABLES[cell.table].by_name[cell.signal]
        if not (math.isfinite(value) and spec.low <= value <= spec.high):
            raise ActuationError(
                f"{spec.key} = {value}: expected a number from {spec.low:g} to {spec.high:g}"
            )
        wire: float | int
        if point.states is None:
            wire = (value - point.offset) / point.factor
        else:
            numbers = [number for number, state in point.states.items() if state == value]
            if not numbers:
                raise ActuationError(f"{spec.key} = {value}: no state text of the point says so")
            wire = numbers[0]
        payload = msgspec.json.encode({"value": wire, "timestamp": t_ns // 1_000_000, "quality": 1})
        return f"BMS/v1/{meta.integration}/Value/{point.key}", payload

    def _ignore(self, what: str, why: str, remedy: str = "") -> Ignored:
        self.stats.ignored += 1
        return Ignored(what, why, remedy)

    def _bad(self, message: Message, text: str) -> BadMessage:
        self.stats.bad += 1
        return BadMessage(f"{message.topic[:200]}: {text}")

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) >= MAX_NOTES:
            text = "more notes, not kept"
        self.notes[text] = self.notes.get(text, 0) + 1
