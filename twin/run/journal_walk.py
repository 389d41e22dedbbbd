"""Journal walk: reads lines of a journal backwards from a place, newest first, within a budget.

It skips segments without a line in the range, and finds the place in a segment by bisection. Bisection works
because sequence numbers and instants only grow along a journal. An unreadable line there costs time, but
never another line.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from twin.catalogue import StorageError
from twin.contracts import JournalRecord, ManifestRecord, OtherRecord, SiteRecord
from twin.run.journal import Entry, parse_line
from twin.run.journal_files import OPEN, opened_segments

BLOCK_BYTES = 2**18
MOST_BYTES, MOST_S = 256 * 2**20, 1.0  # of one walk; source: estimate, what a tick beside it can bear
SIDE_BYTES_READ = 64 * 2**20  # of a body beside the journal; source: estimate, every column of 100,000 GPUs
FOREVER_NS = 2**63 - 1
_HEAD = re.compile(
    rb'\{"seq":(\d+),"prev":"[0-9a-f]*","kind":"([A-Za-z0-9_]+)","tick":(-?\d+),"now_ns":(-?\d+),'
)


@dataclass(frozen=True, slots=True)
class JournalQuery:
    """Range and content of the lines asked for. `before`: a number; `needle`: bytes that a line must hold.

    No `kinds` are all kinds, but those in `without`.
    """

    since_ns: int = 0
    until_ns: int = FOREVER_NS
    before: int | None = None
    kinds: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    needle: bytes = b""


@dataclass(frozen=True, slots=True)
class WalkedLine:
    """A line with the hash of the site that its indices are of ("" if unknown)."""

    entry: Entry
    site_hash: str


class JournalWalk:
    """Iterates once over the lines of a query. `ended`: all of the range was searched.

    `reached_seq` and `reached_ns` are of the oldest line that was looked at, `begin_ns` is the instant of the
    journal's first line, `bad` counts lines that cannot be read. `site_hash` is of the site now. Raises
    StorageError.
    """

    def __init__(
        self,
        folder: Path,
        query: JournalQuery,
        site_hash: str = "",
        most_bytes: int = MOST_BYTES,
        most_s: float = MOST_S,
    ) -> None:
        self.folder, self.query, self.site_hash = folder, query, site_hash
        self.ended, self.begin_ns, self.bad = False, 0, 0
        self.reached_seq: int | None = query.before
        self.reached_ns = 0
        self._room, self._until_s = most_bytes, time.monotonic() + most_s
        kinds = b"|".join(kind.encode() for kind in sorted(query.kinds | {"site"}))
        self._site, self._cut = site_hash, False
        self._rare = re.compile(b'"kind":"(?:' + kinds + b')"') if query.kinds else None

    def __iter__(self) -> Iterator[WalkedLine]:
        try:
            with ExitStack() as stack:
                files = opened_segments(stack, self.folder / OPEN)
                self.begin_ns = _begin_ns(files)
                later = self.site_hash
                for at, (_, file) in reversed([*enumerate(files)]):
                    first = _first(file)
                    begun = _site_of(first)
                    if first is None or not self._beyond(first.seq, first.now_ns):
                        yield from self._segment(file, begun, later)
                        if self.ended or self._cut or (at and self._spent()):
                            return
                    later = begun or later
                self.ended = True
        except OSError as error:
            raise StorageError(f"{self.folder}: the journal cannot be read: {error.strerror}") from error

    def _spent(self) -> bool:
        """True if the budget is used up; a walk without progress continues."""
        spent = self._room <= 0 or time.monotonic() > self._until_s
        return spent and self.reached_seq != self.query.before

    def _beyond(self, seq: int, now_ns: int) -> bool:
        """A line newer than the range."""
        return (self.query.before is not None and seq >= self.query.before) or now_ns > self.query.until_ns

    def _segment(self, file: BinaryIO, begun: str, later: str) -> Iterator[WalkedLine]:
        """The lines of a segment that began under the site `begun`; the next one begins under `later`."""
        size = os.fstat(file.fileno()).st_size
        at = self._end(file, size)
        self._site = later if begun in ("", later) else _site_after(file, at, size) or later
        rest = b""
        while at > 0:
            step = min(BLOCK_BYTES, at)
            at -= step
            self._room -= step
            data = os.pread(file.fileno(), step, at) + rest
            cut = data.find(b"\n") + 1 if at else 0
            if at and not cut:
                rest = data
                continue
            rest, data = data[:cut], data[cut:]
            if self._passes(data):
                self._reach(_HEAD.match(data))  # nothing of these lines is asked for
            else:
                for line in reversed(data.split(b"\n")[:-1]):  # what is behind the last newline is torn
                    if (found := self._line(line)) is not None:
                        yield WalkedLine(found, self._site)
                    if self.ended:
                        break
            self._cut = at > 0 and self._spent()
            if self.ended or self._cut:
                return

    def _passes(self, data: bytes) -> bool:
        """None of these lines is asked for, as their bytes show."""
        if self._rare is not None and self._rare.search(data) is None:
            return True
        return self.query.needle not in data and b'"kind":"site"' not in data and b'{"side":' not in data

    def _reach(self, head: re.Match[bytes] | None) -> None:
        """Record that everything from this line on was searched."""
        if head is None:
            return
        seq, now_ns = int(head[1]), int(head[4])
        if self._beyond(seq, now_ns):
            return
        if now_ns < self.query.since_ns:
            self.ended = now_ns > 0
            return
        self.reached_seq, self.reached_ns = seq, now_ns

    def _line(self, line: bytes) -> Entry | None:
        """The entry of a line if it is asked for."""
        head, asked = _HEAD.match(line), self.query
        if head is None:
            self.bad += 1
            return None
        seq, kind, now_ns = int(head[1]), head[2].decode(), int(head[4])
        self._reach(head)
        wanted = not (self.ended or self._beyond(seq, now_ns) or now_ns < asked.since_ns)
        wanted = wanted and (kind in asked.kinds if asked.kinds else kind not in asked.without)
        beside = line.startswith(b'{"side":', line.find(b'"body":') + 7)
        wanted = wanted and (beside or asked.needle in line)
        if not wanted and kind != "site":
            return None
        entry = parse_line(line)
        if entry is None:
            self.bad += 1
            return None
        if kind == "site":
            self._site = _before(entry.record) or self._site
        return (_with_side(self.folder, entry) if beside else entry) if wanted else None

    def _end(self, file: BinaryIO, size: int) -> int:
        """The byte from which on all lines are newer than the range, as far as bisection finds."""
        low, high = 0, size
        if self.query.before is None and self.query.until_ns == FOREVER_NS:
            return size
        while high - low > BLOCK_BYTES:
            middle = (low + high) // 2
            start, head = _next_head(file, middle, high)
            if start >= high:
                high = middle
            elif head is not None and self._beyond(int(head[1]), int(head[4])):
                high = start
            else:
                low = start
        return _next_start(file, high, size)


def journal_begin(folder: Path) -> tuple[int, int]:
    """(number of the first line that a journal still has, the first instant), 0 for what cannot be read.

    Raises StorageError.
    """
    with ExitStack() as stack:
        files = opened_segments(stack, folder / OPEN)
        first = _first(files[0][1])
        return (0 if first is None else first.seq), _begin_ns(files)


def _next_start(file: BinaryIO, at: int, size: int) -> int:
    """The first byte of a line from `at` on; `size` if there is none."""
    before = max(0, at - 1)  # `at` itself may be one
    while 0 < at < size:
        data = os.pread(file.fileno(), 2**16, before)
        if not data:
            break
        if (found := data.find(b"\n")) >= 0:
            return before + found + 1
        before += len(data)
    return 0 if at <= 0 else size


def _next_head(file: BinaryIO, at: int, end: int) -> tuple[int, re.Match[bytes] | None]:
    """(where the first line from `at` on begins, its head if it can be read)."""
    start = _next_start(file, at, end)
    return start, _HEAD.match(os.pread(file.fileno(), 256, start)) if start < end else None


def _first(file: BinaryIO) -> Entry | None:
    """The first line of a segment; None where it cannot be read."""
    return parse_line(os.pread(file.fileno(), 2**16, 0).partition(b"\n")[0])


def _begin_ns(files: list[tuple[Path, BinaryIO]]) -> int:
    """The instant of the first line that has one; 0 if none of the first has."""
    for line in os.pread(files[0][1].fileno(), 2**20, 0).split(b"\n"):
        head = _HEAD.match(line)
        if head is not None and int(head[4]) > 0:
            return int(head[4])
    return 0


def _site_of(first: Entry | None) -> str:
    record = None if first is None else first.record
    return (record.site_hash or "") if isinstance(record, ManifestRecord) else ""


def _before(record: JournalRecord | OtherRecord) -> str:
    """The site that was changed."""
    return record.was if isinstance(record, SiteRecord) else ""


def _site_after(file: BinaryIO, at: int, size: int) -> str:
    """The site until the first change of it from a byte on; "" if there is none."""
    rest = b""
    while at < size and (data := os.pread(file.fileno(), BLOCK_BYTES, at)):
        at += len(data)
        data = rest + data
        cut = data.rfind(b"\n") + 1
        rest, data = data[cut:], data[:cut]
        if b'"kind":"site"' not in data:
            continue
        for line in data.split(b"\n"):
            head = _HEAD.match(line)
            if head is not None and head[2] == b"site":
                entry = parse_line(line)
                if entry is not None:
                    return _before(entry.record)
    return ""


def _with_side(folder: Path, entry: Entry) -> Entry:
    """An entry with its body from the file beside the journal, where that is there and can be read."""
    name = str(entry.body.get("side", ""))
    path = folder / "sides" / f"{name}.json"
    if not re.fullmatch(r"[0-9a-f]{1,64}", name):
        return entry
    try:
        if path.stat().st_size > SIDE_BYTES_READ:
            return entry
        return msgspec.structs.replace(entry, body=msgspec.json.decode(path.read_bytes(), type=dict))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return entry
