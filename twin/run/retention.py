"""Retention: each kind of file has a quota. The oldest files go first, except pinned files and those that a
start needs.

A trace segment is kept whole or deleted whole. The journal records the deletion of a journal segment
beforehand; `pruned.jsonl` lists the deleted trace segments. Retention runs in a thread, once a minute.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twin.catalogue import NS, StorageError
from twin.config import Quotas
from twin.contracts import PrunedSegment, UpkeepRecord
from twin.run.atomic_write import atomic_write, sync_folder
from twin.run.journal_files import OPEN, closed_segments, edges, last_tick
from twin.run.run_files import by_number, opening
from twin.run.storage import HOLES, read_holes
from twin.site import SiteSpec

log = logging.getLogger(__name__)

PINS = "pins.jsonl"
WINDOW_S = 300.0  # kept before and behind what a pin marks
PIN_STEP_S = 60.0  # marks that follow each other closer than this are one
MAX_PINS = 100_000
MAX_FAULTS = 8  # that are shown
SIDE_AGE_S = 3600.0  # a side is written before the line that names it
EVIDENCE, KEPT_EVIDENCE = ("*.torn*", "*.lost*"), 100
MB = 10**6
_SIDE = re.compile(rb'"side":"([0-9a-f]{32})"')


class Pin(msgspec.Struct, frozen=True):
    """An instant around which the trace is kept."""

    now_ns: int
    why: str


@dataclass(frozen=True, slots=True)
class _Span:
    """A trace segment: which ticks and which time it holds. `last_tick` is before the next one's first."""

    path: Path
    first_tick: int
    first_ns: int
    last_tick: int
    last_ns: int
    size: int


class Upkeep:
    """The files of one run within their quotas.

    `pin` belongs on the loop, `run` into a thread where it keeps nobody waiting; what it returns is noted in
    the journal by whoever writes that.
    """

    def __init__(self, folder: Path, quotas: Quotas) -> None:
        self.folder, self.quotas = folder, quotas
        self.counts = {"segments": 0, "bytes": 0, "journal_segments": 0, "snapshots": 0, "sides": 0}
        self.fault = ""  # why the last run could not do its work
        self._faults: list[str] = []  # of the run at present
        self._heads: dict[str, tuple[int, int]] = {}  # segment -> first tick, first instant
        self._sides: dict[str, frozenset[str]] = {}  # closed journal segment -> sides that it names
        self._announced: list[PrunedSegment] = []  # journal segments that the next run may delete
        self._history_s = 0.0  # how much trace before a snapshot a start reads: the longest declared history
        self._lock = threading.Lock()
        self._pins = _read_pins(folder)
        self._kept_pins = len(self._pins)  # lines in the file

    def pin(self, now_ns: int, why: str) -> None:
        """Keep the trace around this instant for as long as the quota of pinned segments lasts."""
        if self._pins and abs(now_ns - self._pins[-1].now_ns) < PIN_STEP_S * NS:
            return
        pin = Pin(now_ns, why[:100])
        try:
            with self._lock, (self.folder / PINS).open("ab", buffering=0) as file:
                self._pins.append(pin)
                file.write(msgspec.json.encode(pin) + b"\n")
                self._kept_pins += 1
        except OSError as error:
            self.fault = f"{self.folder / PINS}: cannot be written: {error}"

    def run(self, now_ns: int) -> list[UpkeepRecord]:
        """Delete files beyond quota; return notes for the journal. Announced files go in the next run.

        A step that fails keeps no other from its work: a full disk needs them all.
        """
        notes: list[UpkeepRecord] = []
        gone, snapshots, evidence = list[_Span](), list[Path](), list[str]()
        self._faults = []
        for step in (
            lambda: self._prune_snapshots(snapshots),
            lambda: self._prune_evidence(evidence),
            lambda: self._prune_trace(now_ns, gone),
        ):
            self._try(step)
        if gone or snapshots or evidence:
            notes.append(
                UpkeepRecord(
                    snapshots=tuple(p.name for p in snapshots),
                    set_aside=tuple(evidence),
                    trace=tuple(s.path.name for s in gone) if gone else None,
                    ticks=tuple((s.first_tick, s.last_tick) for s in gone) if gone else None,
                )
            )
        self._try(lambda: self._prune_journal(notes))
        self._try(self._forget_pins)
        fault = "; ".join(self._faults[:MAX_FAULTS])
        if fault and not self.fault:
            log.error("old files in %s cannot be pruned: %s; retrying", self.folder, fault)
        self.fault = fault
        return notes

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, StorageError) as error:
            self._faults.append(str(error))

    def _delete(self, path: Path) -> bool:
        """Delete a file; return False where that is refused, so that it is tried again."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._faults.append(f"{path}: cannot be deleted: {error.strerror}")
            return False
        return True

    # -- trace

    def _spans(self) -> list[_Span]:
        """Closed segments in order; the one being written is never touched."""
        paths = by_number(self.folder, "trace-*.rt")
        for path in paths:
            if path.name not in self._heads:
                header, first_ns = opening(path)
                if header is not None and first_ns:
                    self._heads[path.name] = header.first_tick, first_ns
                    self._history_s = _longest_history(header.spec)
        known = [p for p in paths if p.name in self._heads]
        self._heads = {p.name: self._heads[p.name] for p in known}
        out = []
        for path, behind in itertools.pairwise(known):
            first, first_ns = self._heads[path.name]
            next_tick, next_ns = self._heads[behind.name]
            out.append(_Span(path, first, first_ns, next_tick - 1, next_ns - 1, path.stat().st_size))
        return out

    def _prune_trace(self, now_ns: int, gone: list[_Span]) -> None:
        """Delete segments, which `gone` gets, and say why the quota cannot be kept."""
        spans = self._spans()
        needed_ns = self._needed_ns(spans)
        free = [s for s in spans if s.last_ns < needed_ns]
        with self._lock:
            marks = sorted(p.now_ns for p in self._pins)
        pinned = {s.path.name for s in free if _is_pinned(s, marks)}
        loose = [s for s in free if s.path.name not in pinned]
        marked = [s for s in free if s.path.name in pinned]
        old_ns = now_ns - round(self.quotas.trace_hours * 3600 * NS)
        # A segment that is too old leaves the ring: a pinned one into its own quota, others for good.
        doomed = [s for s in loose if s.last_ns < old_ns]
        ring = sum(s.size for s in spans) - sum(s.size for s in doomed) - sum(s.size for s in marked)
        for span in loose:
            if ring <= self.quotas.trace_mb * MB:
                break
            if span not in doomed:
                doomed.append(span)
                ring -= span.size
        kept = sum(s.size for s in marked)
        for span in marked:
            if kept <= self.quotas.pinned_mb * MB:
                break
            doomed.append(span)
            kept -= span.size
        doomed.sort(key=lambda s: s.first_tick)
        self._note_holes(doomed)
        for span in doomed:
            if self._delete(span.path):
                gone.append(span)
                self.counts["segments"] += 1
                self.counts["bytes"] += span.size
        if ring > self.quotas.trace_mb * MB:
            self._faults.append(
                f"{ring // MB} MB of trace are kept, quotas.trace_mb is {self.quotas.trace_mb}: the rest is "
                "what a start may need; check that snapshots are written, or raise the quota"
            )

    def _needed_ns(self, spans: list[_Span]) -> int:
        """From which instant on a start may read the trace, though the newest snapshot should be damaged."""
        tick = self._needed_tick()
        if tick < 0:
            return 0
        behind = [s for s in spans if s.first_tick <= tick + 1]
        # The segment that holds this tick is read from its beginning.
        since_ns = behind[-1].first_ns if behind else 0
        return since_ns - round(self._history_s * NS)

    def _needed_tick(self) -> int:
        """The oldest snapshot that is kept; -1 if there is none."""
        ticks = sorted(int(p.stem[9:]) for p in self.folder.glob("snapshot-*.rts"))
        return ticks[-min(len(ticks), max(1, self.quotas.snapshots))] if ticks else -1

    def _note_holes(self, doomed: list[_Span]) -> None:
        """Record pruned ticks before the deletion, so that a reader never takes them for lost."""
        if not doomed:
            return
        path = self.folder / HOLES
        with path.open("ab") as file:
            for span in doomed:
                file.write(msgspec.json.encode((span.first_tick, span.last_tick)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        holes = read_holes(self.folder)
        if path.stat().st_size > 2**16:
            _replace(path, [msgspec.json.encode(hole) for hole in holes])

    def _forget_pins(self) -> None:
        """Remove pins that are older than the oldest segment."""
        first_ns = min((ns for _, ns in self._heads.values()), default=0) - round(WINDOW_S * NS)
        with self._lock:
            pins = [p for p in self._pins if p.now_ns >= first_ns][-MAX_PINS:]
            if self._kept_pins > 2 * len(pins) + 100:
                self._pins, self._kept_pins = pins, len(pins)
                _replace(self.folder / PINS, [msgspec.json.encode(p) for p in pins])

    # -- snapshots

    def _prune_snapshots(self, gone: list[Path]) -> None:
        for path in by_number(self.folder, "snapshot-*.rts")[: -max(1, self.quotas.snapshots)]:
            if self._delete(path):
                gone.append(path)
                self.counts["snapshots"] += 1

    def _prune_evidence(self, gone: list[str]) -> None:
        """Delete the oldest pieces that starts cut off or set aside."""
        found = [p for pattern in EVIDENCE for p in self.folder.glob(pattern)]
        found.sort(key=lambda p: p.stat().st_mtime_ns)
        kept = sum(p.stat().st_size for p in found)
        for number, path in enumerate(found):
            if len(found) - number <= KEPT_EVIDENCE and kept <= self.quotas.pinned_mb * MB:
                break
            kept -= path.stat().st_size
            if self._delete(path):
                gone.append(path.name)

    # -- journal

    def _prune_journal(self, notes: list[UpkeepRecord]) -> None:
        """Delete what is announced in the journal; announce in `notes` what has to go next, if anything."""
        self._carry_out()
        closed = closed_segments(self.folder)
        sides = list((self.folder / "sides").glob("*.json"))
        total = sum(p.stat().st_size for p in [*closed, *sides])
        with contextlib.suppress(FileNotFoundError):
            total += (self.folder / OPEN).stat().st_size
        doomed: list[PrunedSegment] = []
        needed = self._needed_tick()
        for path in closed[:-1]:  # the newest closed one is what the open one is checked against
            if total <= self.quotas.journal_mb * MB:
                break
            first, last, head = edges(path)
            if last_tick(path) >= needed:
                break
            size = path.stat().st_size
            doomed.append(PrunedSegment(path.name, first, last, head, size))
            total -= size
        self._announced = doomed
        if doomed:
            notes.append(UpkeepRecord(pruned=tuple(doomed)))

    def _carry_out(self) -> None:
        announced, self._announced = self._announced, []
        if not announced:
            return
        needle = b'"last_hash":"' + announced[-1].last_hash.encode() + b'"'
        recent = [*closed_segments(self.folder)[-2:], self.folder / OPEN]
        if not any(_contains(path, needle) for path in recent):
            return  # the line is not on the disk: announced again
        for entry in announced:
            (self.folder / entry.file).unlink(missing_ok=True)
            self._sides.pop(entry.file, None)
            self.counts["journal_segments"] += 1
        sync_folder(self.folder)
        self._prune_sides()

    def _prune_sides(self) -> None:
        """Delete bodies that no remaining line names."""
        files = list((self.folder / "sides").glob("*.json"))
        if not files:
            return
        named = set(_sides_of(self.folder / OPEN))  # first, as it may be closed meanwhile
        for path in closed_segments(self.folder):
            if path.name not in self._sides:
                self._sides[path.name] = _sides_of(path)
            named |= self._sides[path.name]
        for file in files:
            if file.stem not in named and time.time() - file.stat().st_mtime > SIDE_AGE_S:
                file.unlink()
                self.counts["sides"] += 1


def _is_pinned(span: _Span, marks: list[int]) -> bool:
    margin = round(WINDOW_S * NS)
    at = bisect.bisect_left(marks, span.first_ns - margin)
    return at < len(marks) and marks[at] <= span.last_ns + margin


def _longest_history(spec: bytes) -> float:
    """Seconds of history that the site of a segment declares."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError, AttributeError):
        declared = msgspec.json.decode(spec, type=SiteSpec).file.get("history_s") or {}
        return max((float(s) for s in declared.values()), default=0.0)
    return 0.0


def _contains(path: Path, needle: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return any(needle in line for line in file)
    return False


def _sides_of(path: Path) -> frozenset[str]:
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            found |= {m.decode() for m in _SIDE.findall(line)}
    return frozenset(found)


def _read_pins(folder: Path) -> list[Pin]:
    out: list[Pin] = []
    with contextlib.suppress(OSError):
        for line in (folder / PINS).read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                out.append(msgspec.json.decode(line, type=Pin))
    return out[-MAX_PINS:]


def _replace(path: Path, lines: list[bytes]) -> None:
    atomic_write(path, b"".join(line + b"\n" for line in lines))
