"""Logs of faults in two forms: the JSON of a list of starts and ends, and a CSV of one fault per line.

JSON: objects with `node_id`, `event_time` (days), `event_type` (fault_start or fault_end) and `fault_type`
(`Class`, or a string), in order of time. CSV: a head line with `node,start,end,class`, in any order of
columns; times are all days, or all ISO 8601 (UTC unless they say otherwise); an empty end is a fault still
open; lines in order of start. All that is wrong is reported at once, with its place; `mend` lets harmless
doubles and disorder pass, and says so.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.failure import FaultLog
from twin.catalogue import ConfigError, StorageError

MOST_BYTES = 512 * 2**20  # source: estimate; a million faults are 300 MB of JSON
MOST_FAULTS = 1_000_000  # source: estimate; a backtest of more takes hours
MOST_PROBLEMS = 20  # reported one by one
MOST_LINES = 100_000  # after so many, a table is given up
COLUMNS = ("node", "start", "end", "class")
UNKNOWN_CLASS = "unknown"
DAY_S = 86_400.0
MOST_DAY = 1e6  # no clock in days since any usual epoch shows more. source: estimate
EARLY_SHARE = (
    0.5  # a first fault after this part of the days to the last one: day 0 is no begin. source: estimate
)


@dataclass(slots=True)
class _Fault:
    node: str
    start_d: float
    end_d: float
    kind: str
    place: str


@dataclass
class _Reading:
    """Faults so far, problems, and what was mended."""

    mend: bool
    faults: list[_Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    dated: bool = False  # times are instants, in days since 1970

    def wrong(self, place: str, what: str) -> None:
        self.problems.append(f"{place}: {what}")

    def harmless(self, place: str, what: str, mended: str) -> None:
        """Wrong unless mending was asked for."""
        if self.mend:
            self.notes[mended] = self.notes.get(mended, 0) + 1
        else:
            self.wrong(place, f"{what} (--mend lets it pass)")


@dataclass(frozen=True)
class FaultsRead:
    """`log`; `names` of the nodes in it, in order of appearance; `notes`: what was mended or assumed."""

    log: FaultLog
    names: tuple[str, ...]
    notes: tuple[str, ...]


def read_faults(path: Path, nodes: int, *, until_d: float | None = None, mend: bool = False) -> FaultsRead:
    """Read a log of a fleet of `nodes`, of which only those that failed have names.

    `until_d`: the log ends that day, what came later is left out; else with its last event. The form is
    recognised by the first character. Raises ConfigError for what the operator can mend, StorageError for a
    file that cannot be read.
    """
    data = content_of(path)
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}: expected at least 1")
    reading = _Reading(mend)
    last_d = _read_json(data, reading) if data.lstrip()[:1] in (b"[", b"{") else _read_csv(data, reading)
    if reading.problems:
        more = len(reading.problems) - MOST_PROBLEMS
        problems = [f"{path}: {problem}" for problem in reading.problems[:MOST_PROBLEMS]]
        raise ConfigError(problems + ([f"{path}: {more} more problems"] if more > 0 else []))
    if not reading.faults:
        raise ConfigError(f"{path}: no fault in it: expected at least one")
    return _log(path, reading, nodes, until_d, last_d)


def content_of(path: Path) -> bytes:
    """All bytes, unpacked. Raises as `read_faults`."""
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        opened = lzma.open if magic == b"\xfd7zXZ\x00" else gzip.open if magic[:2] == b"\x1f\x8b" else open
        with opened(path, "rb") as stream:
            data = bytes(stream.read(MOST_BYTES + 1))
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise StorageError(
            f"{path}: cannot be unpacked: {error}; expected a whole file: copy it again"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}; expected a file that can be read") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: more than {MOST_BYTES:,} bytes, expected at most so many")
    return data


def _log(path: Path, reading: _Reading, nodes: int, until_d: float | None, last_d: float) -> FaultsRead:
    faults = sorted(reading.faults, key=lambda fault: fault.start_d)
    remarks = list(reading.remarks)
    if reading.dated:
        zero_d = math.floor(faults[0].start_d)
        for fault in faults:
            fault.start_d, fault.end_d = fault.start_d - zero_d, fault.end_d - zero_d
        last_d -= zero_d
        date = datetime.datetime.fromtimestamp(zero_d * DAY_S, datetime.UTC).date()
        remarks.append(f"day 0 is {date.isoformat()} (UTC), the day of the first fault")
    first_d = faults[0].start_d
    begin_d = 0.0 if 0.0 <= first_d <= EARLY_SHARE * last_d else math.floor(first_d)
    end_d = last_d if until_d is None else until_d
    if not begin_d < end_d:
        raise ConfigError(f"--until {end_d:g}: expected a day after day {begin_d:g}, on which {path} begins")
    faults = [fault for fault in faults if fault.start_d <= end_d]
    if not faults:
        raise ConfigError(f"--until {end_d:g}: expected a day after the first fault, on day {first_d:g}")
    names = tuple(dict.fromkeys(fault.node for fault in faults))
    if len(names) > nodes:
        raise ConfigError(f"--nodes {nodes}: {path} names {len(names)} nodes, expected at least so many")
    classes = tuple(dict.fromkeys(fault.kind for fault in faults))
    at = {name: i for i, name in enumerate(names)}
    ends = np.array([fault.end_d for fault in faults])
    log = FaultLog(
        nodes,
        np.array([at[fault.node] for fault in faults], np.int32),
        np.array([fault.start_d for fault in faults]),
        np.where(ends <= end_d, ends, np.inf),
        np.array([classes.index(fault.kind) for fault in faults], np.int32),
        classes, begin_d, float(end_d),
    )  # fmt: skip
    notes = [f"{count} {what}" for what, count in reading.notes.items()] + remarks
    if until_d is None:
        notes.append(f"the log ends with its last event, on day {end_d:g}")
    elif until_d > last_d + 1.0:
        notes.append(f"no event after day {last_d:g}: taken as a time without faults up to day {until_d:g}")
    if begin_d:
        notes.append(f"the log begins on day {begin_d:g}, with its first fault")
    return FaultsRead(log, names, tuple(notes))


def _read_json(data: bytes, reading: _Reading) -> float:
    try:
        events = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reading.wrong("JSON", f"{error}: expected a list of events")
        return 0.0
    if not isinstance(events, list):
        reading.wrong("JSON", "expected a list of events")
        return 0.0
    if len(events) > 2 * MOST_FAULTS:
        reading.wrong("JSON", f"{len(events):,} events, expected at most {2 * MOST_FAULTS:,}")
        return 0.0
    still: dict[str, _Fault] = {}
    seen: set[tuple[str, float, str, str]] = set()
    clock = -math.inf
    checked = list(_events(events, reading))
    if reading.mend:
        checked.sort(key=lambda event: event[2])
    for place, node, time_d, is_start, kind in checked:
        what = f"{'start' if is_start else 'end'} of node {node}"
        key = (node, time_d, kind, what)
        if key in seen:
            reading.harmless(
                place, f"{what} on day {time_d:g} given twice: expected once", "doubles left out"
            )
            continue
        seen.add(key)
        if time_d < clock:
            reading.wrong(place, f"day {time_d:g} after day {clock:g}: expected events in order of time "
                          "(--mend lets it pass)")  # fmt: skip
        clock = max(clock, time_d)
        if is_start and node in still:
            before = still[node].place
            reading.harmless(place, f"{what}, which {before} began without an end: expected an end between",
                             "starts left out of nodes under repair")  # fmt: skip
        elif is_start:
            still[node] = _Fault(node, time_d, math.inf, kind, place)
            reading.faults.append(still[node])
        elif node not in still:
            reading.harmless(place, f"{what}, which has not begun: expected a start before",
                             "ends left out of nodes that are up")  # fmt: skip
        elif time_d < still[node].start_d:
            reading.wrong(
                place, f"{what} on day {time_d:g}, expected its start ({still[node].place}) or later"
            )
        else:
            still.pop(node).end_d = time_d
    return clock


def _events(events: list[Any], reading: _Reading) -> Iterator[tuple[str, str, float, bool, str]]:
    """(place, node, day, is a start, class) of each event that is one."""
    for i, event in enumerate(events, 1):
        place = f"event {i}"
        if not isinstance(event, dict):
            reading.wrong(place, f"expected an object, got {short(event)}")
            continue
        node, time_d, what = event.get("node_id"), event.get("event_time"), event.get("event_type")
        right = True
        if not isinstance(node, str | int) or isinstance(node, bool) or node == "":
            reading.wrong(place, f"node_id {short(node)}: expected a name")
            right = False
        if isinstance(time_d, bool) or not isinstance(time_d, int | float) or not -1.0 < time_d <= MOST_DAY:
            reading.wrong(place, f"event_time {short(time_d)}: expected days from 0 to {MOST_DAY:,.0f}")
            right = False
        if what not in ("fault_start", "fault_end"):
            reading.wrong(place, f"event_type {short(what)}: expected fault_start or fault_end")
            right = False
        kind = event.get("fault_type", UNKNOWN_CLASS)
        if isinstance(kind, dict):
            kind = kind.get("Class", UNKNOWN_CLASS)
        if not isinstance(kind, str):
            reading.wrong(place, f"fault_type {short(kind)}: expected a string, or an object with Class")
            right = False
        if right:
            assert isinstance(time_d, int | float)
            yield place, str(node), float(time_d), what == "fault_start", kind or UNKNOWN_CLASS


def _read_csv(data: bytes, reading: _Reading) -> float:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reading.wrong(f"byte {error.start}", "expected text in UTF-8, or a JSON list")
        return 0.0
    half = bool(text) and not text.endswith(("\n", "\r"))
    lines = csv.reader(io.StringIO(text))
    try:
        head = [word.strip().lower() for word in next((row for row in lines if row), [])]
        missing = [column for column in COLUMNS[:3] if column not in head]
        if missing or len(set(head)) != len(head):
            asked = f"expected the columns {','.join(COLUMNS)} once each"
            reading.wrong(f"line {lines.line_num or 1}", f"{asked}, got {short(','.join(head))}")
            return 0.0
        if other := [column for column in head if column not in COLUMNS]:
            reading.remarks.append(f"columns that are not used: {short(', '.join(other))}")
        last_d = _read_rows(lines, head, reading)
    except csv.Error as error:
        reading.wrong(f"line {lines.line_num}", f"{error}: expected CSV")
        return 0.0
    if half:
        what = f"line {lines.line_num}, the last one, has no line end"
        if reading.problems and reading.problems[-1].startswith(f"line {lines.line_num}: "):
            reading.problems[-1] += " (the last line, without an end: was the file still being written?)"
        else:
            reading.remarks.append(f"{what}: taken as whole")
    _check_order(reading)
    return last_d


def _read_rows(lines: Any, head: list[str], reading: _Reading) -> float:
    """Add the faults of the lines after the head; the day of the last event."""
    clock: Callable[[str], float] | None = None
    last_d = -math.inf
    for row in lines:
        if not row:
            continue
        place = f"line {lines.line_num}"
        if len(reading.faults) >= MOST_FAULTS:
            reading.wrong(
                place, f"more than {MOST_FAULTS:,} faults, expected at most so many: give a shorter time"
            )
            break
        if len(reading.problems) >= MOST_LINES:
            reading.wrong(place, "too much is wrong: expected a table of faults; the rest was not read")
            break
        if len(row) != len(head):
            reading.wrong(place, f"{len(row)} values, expected {len(head)}")
            continue
        cell = dict(zip(head, (word.strip() for word in row), strict=True))
        if clock is None and cell["start"]:
            clock = _clock(cell["start"])
            reading.dated = clock is _instant
        fault = _fault(cell, place, clock or _days, reading)
        if fault is not None:
            reading.faults.append(fault)
            last_d = max(last_d, fault.start_d, fault.end_d if math.isfinite(fault.end_d) else -math.inf)
    return last_d


def _fault(
    cell: dict[str, str], place: str, clock: Callable[[str], float], reading: _Reading
) -> _Fault | None:
    times = {"start": math.nan, "end": math.inf}
    right = True
    for column in times:
        if column == "end" and not cell["end"]:
            continue
        try:
            times[column] = clock(cell[column])
        except ValueError:
            form = "days from 0" if clock is _days else "a time such as 2024-03-30T12:00:00Z"
            reading.wrong(place, f"{column} {short(cell[column])}: expected {form}, as in the first line")
            right = False
    if not cell["node"]:
        reading.wrong(place, "node: expected a name")
        right = False
    if right and times["end"] < times["start"]:
        reading.wrong(place, f"end {cell['end']}: expected start {cell['start']} or later")
        right = False
    kind = cell.get("class") or UNKNOWN_CLASS
    return _Fault(cell["node"], times["start"], times["end"], kind, place) if right else None


def _check_order(reading: _Reading) -> None:
    """Lines in order of start; of one node no fault twice, and none before the end of another."""
    if not reading.mend:
        for one, other in zip(reading.faults, reading.faults[1:], strict=False):
            if other.start_d < one.start_d:
                reading.wrong(other.place, f"starts before {one.place}: expected lines in order of start "
                              "(--mend lets it pass)")  # fmt: skip
    reading.faults.sort(key=lambda fault: fault.start_d)
    last: dict[str, _Fault] = {}
    kept = []
    for fault in reading.faults:
        before = last.get(fault.node)
        if before is not None and (before.start_d, before.end_d, before.kind) == (
            fault.start_d, fault.end_d, fault.kind,
        ):  # fmt: skip
            reading.harmless(fault.place, f"the same as {before.place}: expected once", "doubles left out")
        elif before is not None and fault.start_d < before.end_d:
            reading.harmless(
                fault.place, f"node {fault.node} starts before the end of {before.place}: expected one "
                "fault at a time", "starts left out of nodes under repair",
            )  # fmt: skip
        else:
            last[fault.node] = fault
            kept.append(fault)
    reading.faults[:] = kept


def _clock(first: str) -> Callable[[str], float]:
    """Parser of times: as days, if the first one is a number, else as ISO 8601."""
    try:
        _days(first)
    except ValueError:
        return _instant
    return _days


def _days(word: str) -> float:
    found = float(word)
    if not 0.0 <= found <= MOST_DAY:
        raise ValueError(word)
    return found


def _instant(word: str) -> float:
    found = datetime.datetime.fromisoformat(word)
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    if not 1970 <= found.year < 3000:  # another year is a slip of the pen
        raise ValueError(word)
    return found.timestamp() / DAY_S


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
