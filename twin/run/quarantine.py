"""Quarantine: inputs on which the engine failed. They are kept beside the trace, and every reader skips them.

`poison-INSTANT.rt` is a trace segment with the whole frame. `poison-INSTANT.json` lists the parts that are
left out, with the reason. A part is an event, or readings of some signals that devices of a table sent
together. Faulty parts are found in forked processes, so that a failure, crash or hang there does not affect
this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

import msgspec

from twin import VERSION
from twin.catalogue import NS, TABLES, StorageError, clean
from twin.contracts import QuarantineRecord
from twin.engine import Engine
from twin.run.atomic_write import atomic_write
from twin.run.trace import FORMAT, MAGIC, Header, TraceEncoder, record
from twin.telemetry import (
    ApprovalWithdrawn,
    AuthorityChanged,
    Counts,
    EpochChanged,
    Event,
    Frame,
    Held,
    Released,
    RequestWithdrawn,
    SiteChanged,
    TableUpdate,
    TicksSkipped,
)

PROBE_S = 10.0  # of processor time of a tick in a copy; source: estimate, ten ticks of 100,000 GPUs
PATIENCE_S = 60.0  # until a copy that waits for something is ended; source: estimate
ROUNDS = 8  # parts that are looked for one by one; then all of the frame's input is left out
KEPT_FRAMES, KEPT = 20, 1000  # whole frames, and records of what was left out
TEXT = 8000  # characters of a traceback
HOLD_S = 3600.0
HOLD_AFTER, HOLD_ALL_AFTER = 3, 10  # records within that time; source: estimate, well below a unit's limit
NAMES = 4  # signals that name a part
ENDED = "the process was ended by signal"
# Events that pass however often others like them failed: a daemon that does not know that another one leads,
# or that a person forbids, had better not run
NEVER_HELD = (
    SiteChanged, EpochChanged, AuthorityChanged, Held, Released, RequestWithdrawn, ApprovalWithdrawn,
)  # fmt: skip
# Signals that come from outside the tick: where memory is short, or people end processes
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Part = TableUpdate | Counts | Event
_encode = msgspec.msgpack.Encoder().encode


class Poison(msgspec.Struct, frozen=True, kw_only=True):
    """Input that a tick leaves out. `parts` are indices into the frame's updates, counts and events.

    `marks` are hashes of an event's content and of the rows of readings, `tables` the table or the type of
    event. With `whole` the engine failed without any input too: the tick itself was left out.
    """

    tick: int
    now_ns: int
    parts: tuple[int, ...]
    names: tuple[str, ...]
    marks: tuple[str, ...]
    tables: tuple[str, ...]
    whole: bool
    error: str
    traceback: str
    version: str = VERSION

    @property
    def file(self) -> str:
        """Name of the segment that holds the frame."""
        return f"poison-{self.now_ns}.rt"

    @property
    def text(self) -> str:
        """The parts and the error in a sentence."""
        named = "the tick, with any input" if self.whole else ", ".join(self.names[:NAMES])
        if not self.whole and len(self.names) > NAMES:
            named += f" and {len(self.names) - NAMES} more"
        return f"tick {self.tick}: left out {named}: the engine failed: {self.error}"

    @property
    def record(self) -> QuarantineRecord:
        """Its record for the journal."""
        return QuarantineRecord(
            poisoned=self.tick, whole=self.whole, parts=self.names[:64], error=self.error, file=self.file
        )


def parts_of(frame: Frame) -> tuple[Part, ...]:
    """The input of a frame, in the order that `Poison.parts` counts."""
    return (*frame.updates, *frame.counts, *frame.events)


def without(frame: Frame, places: Collection[int]) -> Frame:
    """The frame without the parts at these places."""
    left = [part for place, part in enumerate(parts_of(frame)) if place not in places]
    updates = tuple(p for p in left if isinstance(p, TableUpdate))
    counts = tuple(p for p in left if isinstance(p, Counts))
    events = tuple(p for p in left if not isinstance(p, TableUpdate | Counts))
    return Frame(frame.tick, frame.now_ns, frame.dt_s, updates, counts, events, frame.urgent)


def _table(part: Part) -> str:
    return part.table if isinstance(part, TableUpdate | Counts) else type(part).__name__


def _mark(part: Part) -> str:
    if isinstance(part, TableUpdate | Counts):
        content = f"{type(part).__name__} {part.table} ".encode() + part.rows.tobytes()
    else:
        content = _encode(part)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _name(part: Part) -> str:
    if not isinstance(part, TableUpdate | Counts):
        return f"event {type(part).__name__}" + (f" {clean(part.id, 60)}" if part.id else "")
    spec = TABLES[part.table]
    signals = spec.gauges if isinstance(part, TableUpdate) else spec.counters
    known = {signal.row: signal.name for signal in signals}
    rows = [known.get(row, str(row)) for row in part.rows.tolist()]
    more = f" and {len(rows) - NAMES} more" if len(rows) > NAMES else ""
    return f"{part.table} {', '.join(rows[:NAMES])}{more} of {len(part.t_ns)}"


class Quarantine:
    """The records of a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.poisons: dict[tuple[int, int], Poison] = {}
        for path in sorted(folder.glob("poison-*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                found = msgspec.json.decode(path.read_bytes(), type=Poison)
                self.poisons[found.tick, found.now_ns] = found

    def of(self, frame: Frame) -> Poison | None:
        """The record of a frame of the trace."""
        return self.poisons.get((frame.tick, frame.now_ns)) if self.poisons else None

    def record_of(self, event: Event) -> Poison | None:
        """The record of an event that was left out by this version."""
        mark = _mark(event)
        return next((p for p in self.poisons.values() if mark in p.marks and p.version == VERSION), None)

    def keep(self, poison: Poison, frame: Frame, site_hash: str, spec: bytes) -> None:
        """Write a record and its frame; with its second file it holds. Raises StorageError."""
        encoder, path = TraceEncoder(), self.folder / poison.file
        header = Header(FORMAT, site_hash, spec, frame.tick, poison.error)
        data = MAGIC + record(encoder.header(header)) + record(encoder.encode(frame))
        try:
            atomic_write(path, data)
            atomic_write(path.with_suffix(".json"), msgspec.json.encode(poison))
            for suffix, most in ((".rt", KEPT_FRAMES), (".json", KEPT)):
                for old in sorted(self.folder.glob(f"poison-*{suffix}"))[:-most]:
                    old.unlink()
        except OSError as error:
            raise StorageError(f"{path}: the input that is left out cannot be kept: {error}") from error
        self.poisons[poison.tick, poison.now_ns] = poison

    def without_known(self, frame: Frame) -> tuple[Frame, list[str]]:
        """Return (the frame without parts that failed before, the names of these parts).

        An event that this version left out once is left out when it comes again: one with an id always,
        since it is the same, and one without within an hour. Of readings, and of other events of its type,
        the bound is a number of failures within an hour. `NEVER_HELD` events always pass.
        """
        mine = [p for p in self.poisons.values() if p.version == VERSION]  # another one may be mended
        if not mine or not (parts := parts_of(frame)):
            return frame, []
        recent = [p for p in mine if 0 <= frame.now_ns - p.now_ns < HOLD_S * NS]
        marks = Counter(mark for p in recent for mark in dict.fromkeys(p.marks))
        tables = Counter(table for p in recent for table in dict.fromkeys(p.tables))
        ever = {mark for p in mine for mark in p.marks}
        places = []
        for place, part in enumerate(parts):
            if isinstance(part, NEVER_HELD):
                continue
            table = _table(part)
            if isinstance(part, TableUpdate | Counts):  # hashed only where it can be one of them
                out = table in tables and marks[_mark(part)] >= HOLD_AFTER
            else:
                out = _mark(part) in (ever if part.id else marks) or tables[table] >= HOLD_AFTER
            if out or (len(recent) >= HOLD_ALL_AFTER and table in tables):
                places.append(place)
        return (without(frame, places), [_name(parts[p]) for p in places]) if places else (frame, [])


def may_be_innocent(error: str) -> bool:
    """Return True for an error that low memory or `kill` can also cause."""
    return error in [f"{ENDED} {number:d}" for number in _OUTSIDE] or "MemoryError" in error.partition(":")[0]


def find_poison(engine: Engine, frame: Frame, probe: Callable[[Engine, Frame], str] | None = None) -> Poison:
    """Return the parts of a frame on which the engine fails, if any. The engine is unchanged.

    Raises OSError where no copy can be made.
    """
    probe = probe or tick_aside
    first = fault = probe(engine, frame)
    parts, places = parts_of(frame), list[int]()
    whole = bool(fault) and bool(probe(engine, without(frame, range(len(parts)))))
    while fault and not whole:
        if len(places) == ROUNDS:
            places = [n for n, part in enumerate(parts) if not isinstance(part, TicksSkipped)]
            break
        # The shortest beginning of the frame that fails ends with a part that is at fault
        low, high = 0, len(parts)
        while high - low > 1:
            middle = (low + high) // 2
            if probe(engine, without(frame, {*places, *range(middle, len(parts))})):
                high = middle
            else:
                low = middle
        places.append(high - 1)
        fault = probe(engine, without(frame, places))
    chosen = [parts[place] for place in sorted(places)]
    return Poison(
        tick=frame.tick,
        now_ns=frame.now_ns,
        parts=tuple(sorted(places)),
        names=tuple(_name(p) for p in chosen),
        marks=tuple(_mark(p) for p in chosen),
        tables=tuple(_table(p) for p in chosen),
        whole=whole,
        error=clean(first.strip().rpartition("\n")[2], 300),
        traceback=first,
    )


def tick_aside(engine: Engine, frame: Frame) -> str:
    """Tick a copy of the engine in a forked process; return its traceback or exit, "" on success.

    Raises OSError where no process can be made.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # the copy computes, and touches no lock that another thread may have
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _tick_and_exit(engine, frame, writer)
    os.close(writer)
    try:
        return _outcome(pid, reader)
    finally:
        os.close(reader)


def _tick_and_exit(engine: Engine, frame: Frame, writer: int) -> NoReturn:
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPROF):
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # where memory is short, this one goes and not the daemon
            Path("/proc/self/oom_score_adj").write_text("1000")
        signal.setitimer(signal.ITIMER_PROF, PROBE_S)  # ends the process, also within C
        engine.tick(frame)
        status = 0
    except BaseException:
        os.write(writer, traceback.format_exc()[-TEXT:].encode("utf-8", "replace"))
    finally:
        os._exit(status)


def _outcome(pid: int, reader: int) -> str:
    text, until_s = b"", time.monotonic() + PATIENCE_S
    while select.select([reader], [], [], max(0.0, until_s - time.monotonic()))[0]:
        piece = os.read(reader, TEXT)
        if not piece:
            break
        text += piece
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"the tick did not end within {PATIENCE_S:g} s"
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"the tick did not end within {PROBE_S:g} s of processor time"
    if os.WIFSIGNALED(status):
        return f"{ENDED} {os.WTERMSIG(status)}"
    return text.decode("utf-8", "replace") if status else ""
