"""Day account: energy, caps, saves, nodes taken out and alarms since midnight UTC.

Counts come from the journal, read beside the loop, each line once; energy comes from the history.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from aiohttp import web

from twin.api.answers import Refused, answer, live_of
from twin.api.page.site_power import recorded
from twin.api.runtime import Runtime
from twin.catalogue import F64, I64, NS, StorageError, TwinError
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
from twin.run import OPEN, Entry, closed_segments, last_line

DAY_NS = 86_400 * NS
FRESH_S = 10.0  # an account this old is told again, so that many screens cost no more than one
MOST_BYTES = 256 * 2**20  # of the journal, for one day; what lies before is left out, and said to be
ENERGY_STEP_S = 300.0
ENERGY_WAIT_S = 10.0
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
    """Counts of one day. A cap begins when the first device is held, and ends when none is held any more."""

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
        """Count a line of the journal, in its order."""
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
        """Seconds of the day in which something was capped, until now."""
        open_ns = 0 if self.capped_since_ns is None else max(0, now_ns - self.capped_since_ns)
        return (self.capped_ns + open_ns) / NS


class DayReader:
    """Reads the journal of a run on from where it stopped, into the count of the day."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = DayCount(0)
        self.left_out = False
        self._done: dict[tuple[int, int], int] = {}  # segment -> position

    def read(self, begin_ns: int) -> DayCount:
        """The count of the day that begins then. Raises StorageError if a segment cannot be read."""
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
        """The segments with lines of the day, oldest first; of a very long day, the latest."""
        found: list[Path] = []
        room = MOST_BYTES
        for path in (self.folder / OPEN, *reversed(closed_segments(self.folder))):
            if not path.is_file():
                continue
            with path.open("rb") as file:
                last_ns = _instant(last_line(file)[0])
                stat = os.fstat(file.fileno())
            room -= stat.st_size - self._done.get((stat.st_dev, stat.st_ino), 0)
            if last_ns and last_ns < begin_ns:
                break
            if room < 0 and found:
                self.left_out = True
                break
            found.append(path)
        return found[::-1]

    def _read_on(self, file: BinaryIO) -> None:
        stat = os.fstat(file.fileno())
        key = (stat.st_dev, stat.st_ino)
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
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return  # `racktwin journal verify` tells of it
        self.count.take(entry.record, entry.now_ns)


def _instant(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=Entry).now_ns
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0


class DayAccount:
    """The account of today of one daemon, made anew at most every few seconds."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._reader: DayReader | None = None
        self._made_s, self._made = -FRESH_S, dict[str, Any]()

    async def of(self, live: Runtime) -> dict[str, Any]:
        """As JSON; what could not be counted is None, and `notes` says why."""
        async with self._lock:
            if time.monotonic() - self._made_s >= FRESH_S:
                self._made = await self._account(live)
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
        energy_wh, seen_s = await _energy(live, begin_ns, now_ns, notes)
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


async def _energy(
    live: Runtime, begin_ns: int, now_ns: int, notes: list[str]
) -> tuple[float | None, float | None]:
    """(energy of all racks, seconds that are read of it) from the recorded power of the site."""
    if live.history is None:
        notes.append("no history is kept: the energy is not known")
        return None, None
    step_s = min(ENERGY_STEP_S, max(1.0, (now_ns - begin_ns) / NS / 2))
    try:
        async with asyncio.timeout(ENERGY_WAIT_S):
            found = await recorded(live, begin_ns, now_ns, step_s, 5000)
    except (TwinError, Refused, TimeoutError) as error:
        notes.append(f"the energy is not known: {str(error) or 'the history took too long'}")
        return None, None
    t_ns = np.array(found["t_ns"], np.int64)
    power_w = np.array(found["values"][live.engine.site.file.site], np.float64)
    return energy_of(t_ns, power_w, now_ns, step_s)


def energy_of(t_ns: I64, power_w: F64, now_ns: int, step_s: float) -> tuple[float | None, float]:
    """(Wh, seconds) of mean powers over steps that begin at `t_ns`; the last one lasts until now at most."""
    if not len(t_ns):
        return None, 0.0
    ends = np.minimum(np.append(t_ns[1:], now_ns), t_ns + round(step_s * NS))
    took_s = np.maximum(ends - t_ns, 0) / NS
    read = np.isfinite(power_w)
    seconds = float(took_s[read].sum())
    return (float((took_s * power_w)[read].sum()) / 3600.0 if seconds else None), seconds


DAY: web.AppKey[DayAccount] = web.AppKey("day", DayAccount)


async def today(request: web.Request) -> web.Response:
    """Return the account of today (UTC): energy, caps and for how long, saves, nodes taken out, alarms."""
    return answer(await request.app[DAY].of(live_of(request)))
