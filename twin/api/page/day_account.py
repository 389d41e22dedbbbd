"""Day account: energy, caps, saves, nodes taken out and alarms since midnight UTC.

Counts come from the journal, read beside the loop, each line once; energy comes from the ledger.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from aiohttp import web

from twin.api.answers import answer, live_of
from twin.api.page.ledger_statement import each_hour_once
from twin.api.runtime import Runtime
from twin.catalogue import NS, StorageError
from twin.contracts import (
    CommandRecord,
    FailedRecord,
    FindingRecord,
    JournalRecord,
    LapsedRecord,
    OtherRecord,
    ReportsRecord,
    SiteRecord,
)
from twin.ledger import HOUR_NS, HourRecord, decode_hour, statement
from twin.run import OPEN, closed_segments, last_line, parse_line

DAY_NS = 86_400 * NS
FRESH_S = 10.0  # an account this old is made again, so that many screens cost no more than one
MOST_BYTES = 256 * 2**20  # of the journal, for one day; what lies before is left out, and said to be
CAPS = ("gpu.power_cap_w", "node.power_cap_w")
SERVICE = "node.service_level"
IN_SERVICE = 0.0
SEVERITIES = ("info", "warning", "critical")
_HEAD = re.compile(rb'^\{"seq":\d+,"prev":"[0-9a-f]*","kind":"(command|lapsed|failed|reports|finding|site)"')
_CONTROLS = tuple(f'"{control}"'.encode() for control in (*CAPS, SERVICE))
_HEAD_BYTES = 120
_OF_CONTROLS = (b"command", b"lapsed", b"failed")


@dataclass
class DayCount:
    """Counts of one day. A cap begins with the first device under command, and ends with the last."""

    begin_ns: int
    cappings: int = 0
    capped_ns: int = 0
    capped_since_ns: int | None = None
    saves: int = 0
    nodes_out: set[tuple[int, int]] = field(default_factory=set)  # (site, node): indices are of one site
    alarms: dict[str, str] = field(default_factory=dict)  # id -> the gravest severity of the day
    _held: dict[str, set[int]] = field(default_factory=dict)
    _sites: int = 0

    def take(self, record: JournalRecord | OtherRecord, now_ns: int) -> None:
        """Count a line of the journal; lines come in order."""
        match record:
            case CommandRecord() if record.control in CAPS:
                self._move(record.control, record.index, not record.final, now_ns)
            case LapsedRecord() | FailedRecord() if record.control in CAPS:
                self._move(record.control, record.index, False, now_ns)
            case SiteRecord():  # indices are of another site from here on
                self._end(now_ns)
                self._sites += 1
            case CommandRecord() if record.control == SERVICE and now_ns >= self.begin_ns:
                out = record.index[record.value > IN_SERVICE]
                self.nodes_out |= {(self._sites, node) for node in out.tolist()}
            case ReportsRecord() if not record.refused and now_ns >= self.begin_ns:
                self.saves += record.count
            case FindingRecord() if now_ns >= self.begin_ns:
                self._ring(record)
            case _:
                pass

    def _ring(self, record: FindingRecord) -> None:
        if record.severity in SEVERITIES:
            known = self.alarms.get(record.id, SEVERITIES[0])
            self.alarms[record.id] = max(known, record.severity, key=SEVERITIES.index)

    def _move(self, control: str, index: np.ndarray, capped: bool, now_ns: int) -> None:
        held = self._held.setdefault(control, set())
        if capped:
            held.update(index.tolist())
        else:
            held.difference_update(index.tolist())
        if any(self._held.values()):
            if self.capped_since_ns is None:
                self.capped_since_ns = max(now_ns, self.begin_ns)
                self.cappings += now_ns >= self.begin_ns
        elif self.capped_since_ns is not None:
            self._end(now_ns)

    def _end(self, now_ns: int) -> None:
        if self.capped_since_ns is not None:
            self.capped_ns += max(0, now_ns - self.capped_since_ns)
        self.capped_since_ns = None
        self._held.clear()

    def capped_s(self, now_ns: int) -> float:
        """Return the seconds of the day with a cap in force, until now."""
        open_ns = 0 if self.capped_since_ns is None else max(0, now_ns - self.capped_since_ns)
        return (self.capped_ns + open_ns) / NS


class DayReader:
    """Reads the journal of a run from its last position into the count of the day."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = DayCount(0)
        self.left_out = False
        self._done: dict[bytes, int] = {}  # begin of a segment, which has its hash -> position

    def read(self, begin_ns: int) -> DayCount:
        """Return the count of the day that begins then. Raises StorageError if a segment cannot be read."""
        if self.count.begin_ns != begin_ns:
            self.count, self._done, self.left_out = DayCount(begin_ns), {}, False
        try:
            for path in self._segments(begin_ns):
                with path.open("rb") as file:
                    self._read_on(file)
        except FileNotFoundError:
            pass  # pruned or closed meanwhile: the next reading finds it
        except OSError as error:
            raise StorageError(f"{self.folder}: the journal cannot be read: {error.strerror}") from error
        return self.count

    def _segments(self, begin_ns: int) -> list[Path]:
        """Return the segments with lines of the day, oldest first; for a very long day, the latest."""
        found: list[Path] = []
        room = MOST_BYTES
        for path in (self.folder / OPEN, *reversed(closed_segments(self.folder))):
            if not path.is_file():
                continue
            with path.open("rb") as file:
                last = parse_line(last_line(file)[0])
                room -= os.fstat(file.fileno()).st_size - self._done.get(_begin(file), 0)
            if last is not None and 0 < last.now_ns < begin_ns:
                break
            if room < 0 and found:
                self.left_out = True
                break
            found.append(path)
        return found[::-1]

    def _read_on(self, file: BinaryIO) -> None:
        key = _begin(file)
        position = self._done.get(key, 0)
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                break  # still being written
            position += len(line)
            self._take(line)
        self._done[key] = position

    def _take(self, line: bytes) -> None:
        found = _HEAD.match(line[:_HEAD_BYTES])
        if found is None or (found[1] in _OF_CONTROLS and not any(c in line for c in _CONTROLS)):
            return
        entry = parse_line(line)
        if entry is not None:  # `racktwin journal verify` reports one that cannot be read
            self.count.take(entry.record, entry.now_ns)


def _begin(file: BinaryIO) -> bytes:
    """The begin of a segment's first line, by which it is known when it is closed or another takes its
    inode."""
    file.seek(0)
    return file.readline(_HEAD_BYTES)


class DayAccount:
    """Today's account of one daemon, renewed at most every few seconds."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._reader: DayReader | None = None
        self._energies = DayEnergy()
        self._made_s, self._made = -FRESH_S, dict[str, Any]()

    async def of(self, live: Runtime) -> dict[str, Any]:
        """Return the account as JSON; a value that could not be counted is None, and `notes` gives the
        reason."""
        async with self._lock:
            if time.monotonic() - self._made_s >= FRESH_S:
                self._made = await self._account(live)
                # Until the ledger has measured anything, the next screen asks anew
                if self._made["energy_wh"] is not None:
                    self._made_s = time.monotonic()
            return self._made

    async def _account(self, live: Runtime) -> dict[str, Any]:
        now_ns, notes = live.engine.state.now_ns, list[str]()
        begin_ns = now_ns // DAY_NS * DAY_NS
        try:
            count = await self._counted(live, begin_ns, notes)
        except StorageError as error:
            count = None
            notes.append(str(error))
        energy_wh, seen_s = await self._energy(live, begin_ns, notes)
        if count is None:
            return {"since_ns": begin_ns, "energy_wh": energy_wh, "energy_of_s": seen_s, "cappings": None,
                    "capped_s": None, "saves": None, "nodes_out": None, "alarms": None,
                    "notes": notes}  # fmt: skip
        severities = list(count.alarms.values())
        return {
            "since_ns": begin_ns, "energy_wh": energy_wh, "energy_of_s": seen_s,
            "cappings": count.cappings, "capped_s": round(count.capped_s(now_ns), 1), "saves": count.saves,
            "nodes_out": len(count.nodes_out),
            "alarms": {s: severities.count(s) for s in SEVERITIES}, "notes": notes,
        }  # fmt: skip

    async def _energy(
        self, live: Runtime, begin_ns: int, notes: list[str]
    ) -> tuple[float | None, float | None]:
        """Return (energy of the site, covered seconds) from the ledger."""
        ledger = live.engine.ledger
        try:
            return await asyncio.to_thread(
                self._energies.of, live, [*ledger.closed], ledger.running(), begin_ns
            )
        except (OSError, StorageError) as error:
            notes.append(f"the energy is unknown: the ledger cannot be read: {error}")
            return None, None

    async def _counted(self, live: Runtime, begin_ns: int, notes: list[str]) -> DayCount:
        if not live.run_dir:  # the latest lines are all that there is
            count = DayCount(begin_ns)
            for line in live.lines:
                count.take(line.record, line.now_ns)
            notes.append("this daemon records no run: only its latest lines are counted")
            return count
        folder = Path(live.run_dir)
        if self._reader is None or self._reader.folder != folder:
            self._reader = DayReader(folder)
        count = await asyncio.to_thread(self._reader.read, begin_ns)
        if self._reader.left_out:
            notes.append("the journal of today is very long: its first part is not counted")
        return count


class DayEnergy:
    """Energy of a day and the covered time, by the ledger; a complete hour is summed once."""

    def __init__(self) -> None:
        self._over: dict[int, tuple[float, int]] = {}  # begin of an hour -> kWh, time watched

    def of(self, live: Runtime, raw: list[bytes], running: HourRecord | None, begin_ns: int) -> DaySum:
        """Return the sum from `begin_ns` on. `raw`: the last complete hours of the engine."""
        end_ns = live.engine.state.now_ns if running is None else running.begin_ns
        day = set(range(begin_ns, end_ns // HOUR_NS * HOUR_NS, HOUR_NS))
        self._over = {hour_ns: found for hour_ns, found in self._over.items() if hour_ns in day}
        if missing := day - self._over.keys():
            begins = ((line, msgspec.json.decode(line, type=_HourHead).begin_ns) for line in raw)
            kept = [decode_hour(line) for line, hour_ns in begins if hour_ns in missing]
            for hour in each_hour_once(live, kept, begin_ns, end_ns, self._over.keys()):
                self._over[hour.begin_ns] = _sum_of(hour)
            # Of an hour that is nowhere nothing was watched: the disk is asked for it once
            self._over = dict.fromkeys(missing, (0.0, 0)) | self._over
        of_hours = [*self._over.values()]
        if running is not None and running.begin_ns >= begin_ns:
            of_hours.append(_sum_of(running))
        watched_s = sum(watched_ns for _, watched_ns in of_hours) / NS
        return DaySum(1e3 * sum(kwh for kwh, _ in of_hours) if watched_s else None, watched_s)


class DaySum(NamedTuple):
    """Energy of the site; None without observed time."""

    energy_wh: float | None
    watched_s: float


class _HourHead(msgspec.Struct):
    begin_ns: int


def _sum_of(hour: HourRecord) -> tuple[float, int]:
    found = statement([hour], "site", hour.begin_ns, hour.begin_ns + HOUR_NS)
    return found.total.energy_kwh, found.watched_ns


DAY: web.AppKey[DayAccount] = web.AppKey("day", DayAccount)


async def today(request: web.Request) -> web.Response:
    """Return the account of today (UTC): energy, caps and for how long, saves, nodes taken out, alarms."""
    return answer(await request.app[DAY].of(live_of(request)))
