"""Journal lines about nodes that were withdrawn and returned: accounts, commands, tests, repairs, faults.

Files are read from where the last reading ended; what is kept of them has a bound, and what was left out is
reported. Lines that cannot be read are counted and passed over.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from twin.catalogue import StorageError
from twin.contracts import ManifestRecord
from twin.run import OPEN, READS, RecordedLine, closed_segments, last_line, parse_line

POLICY = "replacement"
SERVICE, BURN_IN, PLACEMENT = "node.service_level", "node.burn_in_since_s", "node.placement"
CONTROLS = (SERVICE, BURN_IN, PLACEMENT)
MAX_KEPT = 20_000  # lines of one file; about 10 MB
MAX_READ = 1024 * 2**20  # bytes of one question; what lies before is said to be left out. source: estimate
_HEAD = re.compile(
    rb'^\{"seq":\d+,"prev":"[0-9a-f]*","kind":"'
    rb'(account|command|advice|event|failed|lapsed|kept_back|deferred|narrowed|protected|finding|manifest)"'
)
_HEAD_BYTES = 120
# Of the kinds that also record much else, lines that hold none of these are passed over unread
_WORDS = {
    b"event": (b'"NodeTested"', b'"NodeRepaired"', b'"EntityReplaced"', b'"policy":"replacement"'),
    b"command": tuple(f'"{control}"'.encode() for control in CONTROLS),
    b"finding": (b'"id":"health/', b'"id":"fault/', b'"id":"replacement/'),
    b"account": (b'"policy":"replacement"',),
    b"manifest": (b"",),
}
_ALIKE = (
    b"advice",
    b"failed",
    b"lapsed",
    b"kept_back",
    b"deferred",
    b"narrowed",
    b"protected",
)  # as commands


@dataclass(slots=True)
class _File:
    """Progress of reading one segment."""

    position: int = 0
    entries: list[RecordedLine] = field(default_factory=list)
    first_ns: int = 0
    first_seq: int = -1
    next_seq: int = -1
    gaps: int = 0  # lines that are missing between others
    bad: int = 0  # lines that cannot be read
    left_out: int = 0  # of the oldest, beyond MAX_KEPT


@dataclass(frozen=True, slots=True)
class RecordedLines:
    """Lines of a journal, oldest first, with notes on missing ones."""

    entries: list[RecordedLine]
    since_ns: int  # complete from here on, except as `notes` says
    notes: list[str]


class JournalReader:
    """Reads the journal of one run repeatedly; only new lines cost time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder if folder.is_dir() else folder.parent
        self._files: dict[tuple[int, int], _File] = {}

    def last_ns(self) -> int:
        """The instant of the journal's last whole line; 0 if none has one. Raises StorageError."""
        last = self.folder / OPEN
        for path in ([last] if last.is_file() else []) + closed_segments(self.folder)[::-1]:
            try:
                with path.open("rb") as file:
                    line, _ = last_line(file)
            except OSError as error:
                raise StorageError(f"{path}: the journal cannot be read: {error.strerror}") from error
            if (entry := parse_line(line)) is not None and entry.now_ns > 0:
                return entry.now_ns
        return 0

    def read(self, since_ns: int, most_bytes: int = MAX_READ) -> RecordedLines:
        """All lines from an instant on. Raises StorageError if there is no journal that can be read."""
        last = self.folder / OPEN
        paths = [*closed_segments(self.folder), *([last] if last.is_file() else [])]
        if not paths:
            raise StorageError(f"{self.folder}: holds no journal; expected the folder of a run")
        seen: list[_File] = []
        known: dict[tuple[int, int], _File] = {}
        room, notes = most_bytes, []
        for path in reversed(paths):
            try:
                with path.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    key = (stat.st_dev, stat.st_ino)
                    if key in known:  # closed between the two listings
                        continue
                    current = self._files.get(key, _File())
                    if stat.st_size < current.position:  # cut since
                        current = _File()
                    room -= stat.st_size - current.position
                    if room < 0 and seen:
                        notes.append(f"{path.name} and what lies before it was not read: too much at once")
                        break
                    _read_on(current, file)
            except FileNotFoundError:
                continue  # pruned meanwhile
            except OSError as error:
                raise StorageError(f"{path}: the journal cannot be read: {error.strerror}") from error
            known[key] = current
            seen.append(current)
            if 0 < current.first_ns <= since_ns:
                break
        self._files = known
        return _lines_since(seen[::-1], since_ns, notes)


def _read_on(held: _File, file: Any) -> None:
    file.seek(held.position)
    for line in file:
        if not line.endswith(b"\n"):
            break
        held.position += len(line)
        _take(held, line)
    if (more := len(held.entries) - MAX_KEPT) > 0:
        del held.entries[:more]
        held.left_out += more


def _take(held: _File, line: bytes) -> None:
    """One line: its number always, its content where it is of ours."""
    seq = _number(line)
    if seq < 0:
        held.bad += 1
        return
    if held.first_seq < 0:
        held.first_seq = seq
    elif seq != held.next_seq:
        held.gaps += max(1, seq - held.next_seq)
    held.next_seq = seq + 1
    if held.first_ns == 0:  # a manifest, which comes before the first tick, has no instant
        first = parse_line(line)
        held.first_ns = 0 if first is None else first.now_ns
    found = _HEAD.match(line[:_HEAD_BYTES])
    if found is None:
        return
    kind = found[1]
    if not any(word in line for word in _WORDS[b"command" if kind in _ALIKE else kind]):
        return
    entry = parse_line(line)
    if entry is None:
        held.bad += 1
        return
    held.entries.append(RecordedLine(entry.seq, entry.tick, entry.now_ns, entry.record))
    if len(held.entries) > 2 * MAX_KEPT:
        held.left_out += len(held.entries) - MAX_KEPT
        del held.entries[:-MAX_KEPT]


def _number(line: bytes) -> int:
    if not line.startswith(b'{"seq":'):
        return -1
    digits = line[7 : line.find(b",", 7, 30)]
    return int(digits) if digits.isdigit() else -1


def _lines_since(files: list[_File], since_ns: int, notes: list[str]) -> RecordedLines:
    """Return the lines of all files from an instant on, and notes on missing ones."""
    entries = [e for f in files for e in f.entries if e.now_ns >= since_ns or e.kind == "manifest"]
    before = files[0] if files else _File()
    if bad := sum(f.bad for f in files):
        notes.append(f"{bad:,} lines of the journal cannot be read: `racktwin journal verify` says where")
    gaps = sum(f.gaps for f in files)
    for one, two in pairwise(files):
        if one.next_seq >= 0 and two.first_seq >= 0 and one.next_seq != two.first_seq:
            gaps += max(1, two.first_seq - one.next_seq)
    if gaps:
        notes.append(f"the journal has gaps: about {gaps:,} lines are missing")
    if left := sum(f.left_out for f in files):
        notes.append(f"{left:,} earlier lines on replacement were left out")
    begin_ns = before.first_ns
    if begin_ns > since_ns and before.first_seq > 0 and not notes:
        notes.append("the journal goes back no further: what lies before was pruned, or is of another run")
    manifests = [e.record for e in entries if isinstance(e.record, ManifestRecord)]
    other = {m.format for m in manifests} - set(READS)
    if other:
        text = ", ".join(str(f)[:20] for f in sorted(other, key=str))
        notes.append(f"parts were written in format {text}, which this version may misread")
    return RecordedLines([e for e in entries if e.kind != "manifest"], max(begin_ns, since_ns), notes)
