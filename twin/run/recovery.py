"""Recovery: restores the newest whole snapshot, then ticks through the trace after it. This is the only way
to start from a run.

Faulty tails of trace and journal are cut off and kept beside their file. The journal is completed with the
decisions that the trace implies. Every fault is reported. A file in the format of another version is not
damage: the start is refused and nothing is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from twin.catalogue import NS, TABLES, ConfigError, Divergence, StorageError
from twin.contracts import Decision
from twin.engine import Engine, snapshot
from twin.run.comparison import Comparer, Since
from twin.run.journal import GENESIS, Chain, line_hash
from twin.run.journal_files import (
    OPEN,
    cut_journal,
    cut_tail,
    journal_exists,
    journal_lines,
    line_head,
    newest_line,
    recorded_authority,
    verify_open,
)
from twin.run.journal_writer import JournalWriter
from twin.run.quarantine import HOLD_S, Poison, Quarantine, find_poison, may_be_innocent, without
from twin.run.run_files import (
    REMEDY,
    Segment,
    by_number,
    cut_torn,
    mend_last,
    of_another_version,
    opening,
    segments_of,
    set_aside,
)
from twin.run.storage import TraceReader, is_gap, read_holes
from twin.run.trace import OtherFormat, TraceDecoder, payloads
from twin.site import SiteSpec
from twin.telemetry import (
    AuthorityChanged,
    EntityReplaced,
    EpochChanged,
    Event,
    Frame,
    IdentityTold,
    PluginRestored,
    State,
    TicksSkipped,
)

RESUMING = "resuming"  # holds the tick that a start is about to repeat
ROUNDS = 8  # of a start that meets ticks on which the engine fails
MOST_DOUBTS = 20  # ticks behind the journal's end that are tried in a copy first
LEVELS = ("off", "advise", "approve", "act")  # from the strictest
EngineFactory = Callable[[SiteSpec], Engine]


@dataclass
class RecoveredRun:
    """Engine in the state at the interruption of its run, and the data to continue the run.

    `last_tick` is the newest tick of trace or journal; numbers go on behind it. `lost` is the run
    of ticks (first, last) whose decisions are journaled although what they saw is gone. `pending` is what
    the configuration and the restart change: the next frame must carry it, so that it is recorded. `poisons`
    is input that this start left out, since the engine failed on it.
    """

    engine: Engine
    spec: SiteSpec
    last_tick: int
    last_ns: int
    snapshot_tick: int = -1
    replayed: int = 0
    completed_lines: int = 0
    lost: tuple[int, int] | None = None
    faults: list[str] = field(default_factory=list)
    pending: list[Event] = field(default_factory=list)
    poisons: list[Poison] = field(default_factory=list)

    def as_manifest(self) -> dict[str, Any]:
        """For the manifest of what follows: `Recorder(..., resumed=...)`."""
        return {
            "snapshot_tick": self.snapshot_tick,
            "last_tick": self.last_tick,
            "replayed": self.replayed,
            "completed_lines": self.completed_lines,
            "lost": list(self.lost) if self.lost else None,
            "faults": [fault[:300] for fault in self.faults[:20]],
        }

    def bridge(self) -> list[Event]:
        """Events for the next frame: after a loss, a new term, so that no number is used twice."""
        if self.lost is None:
            return []
        count = self.lost[1] - self.lost[0] + 1
        return [TicksSkipped(count=count, why="restart"), EpochChanged(epoch=self.engine.arbiter.epoch + 1)]


class StartAnew(StorageError):
    """The engine fails in every state that the run's files allow; the files are set aside.

    `poisons` is the input that this start left out before it gave up.
    """

    def __init__(self, text: str, poisons: list[Poison]) -> None:
        super().__init__(text)
        self.poisons = poisons


class _BrokenTick(StorageError):
    """The engine failed during recovery and must not be used."""

    def __init__(self, text: str, poisons: list[Poison]) -> None:
        super().__init__(text)
        self.poisons = poisons


def never_ticked(folder: Path) -> bool:
    """True if the folder holds no run, or what a start left that ended before its first tick.

    Such a start leaves lines of the journal, at most one segment without a header, and snapshots of no tick.
    Raises OtherFormat for a segment of another version.
    """
    segments = list(folder.glob("trace-*.rt"))
    return not _snapshots(folder) and (
        not segments or (len(segments) == 1 and opening(segments[0])[0] is None)
    )


def mend_unticked(folder: Path, faults: list[str]) -> tuple[int, int]:
    """Make a folder that `never_ticked` ready for a new run, whose journal goes on behind what is there.

    (tick, instant) of the last line of the journal, (-1, 0) if no line is of a tick. Raises StorageError.
    """
    for path in folder.glob("trace-*.rt"):
        faults.append(f"{path.name}: has no readable header; set aside, and the run begins anew")
    for path in folder.glob("snapshot-*.rts"):
        kept = set_aside(path, ".unticked")
        faults.append(f"{path.name}: is of no tick; set aside as {kept.name}")
    mend_last(folder, faults)
    _mend_journal(folder / OPEN, faults)
    line = newest_line(folder)
    if not line:
        return -1, 0
    last = line_head(line)
    if last.tick >= 0:
        faults.append(
            f"{OPEN}: goes on to tick {last.tick}, and no trace or snapshot of them is here: "
            "the twin begins anew behind it"
        )
    return last.tick, last.now_ns


def _snapshots(folder: Path) -> list[Path]:
    """Return the snapshots by tick, the newest first."""
    return [p for p in reversed(by_number(folder, "snapshot-*.rts")) if p.stem[9:].isdecimal()]


def resume(
    folder: Path,
    engine_factory: EngineFactory,
    authority: dict[str, str] | None = None,
    present: SiteSpec | None = None,
) -> RecoveredRun:
    """The engine of the run in `folder`. Raises StorageError if there is none, or nothing of it is whole.

    `authority` of policies is today's configuration where it differs from what the factory gives. `present`
    is today's site: a snapshot of it can be used even where no trace describes it. Input on which the engine
    fails goes into the folder's quarantine; raises StartAnew where that does not help.
    """
    faults, poisons = list[str](), list[Poison]()
    for _ in range(ROUNDS):
        try:
            out = _resume(folder, engine_factory, authority, present)
        except _BrokenTick as broken:
            faults.append(str(broken))
            poisons += broken.poisons
            continue
        except StartAnew as last:
            last.poisons[:0] = poisons
            raise
        out.faults[:0] = faults
        out.poisons[:0] = poisons
        return out
    raise StorageError(f"{folder}: the engine failed again and again: {'; '.join(faults[-2:])}")


def _resume(
    folder: Path,
    engine_factory: EngineFactory,
    authority: dict[str, str] | None,
    present: SiteSpec | None,
) -> RecoveredRun:
    faults: list[str] = []
    configured: dict[str, str] = {}

    def made(spec: SiteSpec) -> Engine:
        engine = engine_factory(spec)
        configured.clear()
        configured.update(engine.intake.authority)
        return engine

    segments = segments_of(folder, faults)
    place: dict[str, Any] = {}
    specs = {present.digest(): present.packed()} if present is not None else {}
    specs |= {s.header.site_hash: s.header.spec for s in segments}
    engine, spec = _from_snapshot(folder, specs, made, faults, place)
    # Only now is anything cut: what another version wrote has been refused by here.
    _mend_journal(folder / OPEN, faults)
    mend_last(folder, faults)
    if engine is None:
        if not segments:
            raise StorageError(
                f"{folder}: no run to go on with; expected trace-*.rt or snapshot-*.rts that can be read; to "
                "begin anew, move this folder away"
            )
        first = segments[0].header
        spec = msgspec.json.decode(first.spec, type=SiteSpec)
        engine = made(spec)
        if journal_exists(folder / OPEN):  # what people set since is not what these ticks were made under
            then = recorded_authority(folder / OPEN, first.first_tick)
            engine.intake.authority |= {p: then[p] for p in engine.intake.authority if p in then}
        if first.first_tick > 0:
            faults.append(
                f"{segments[0].path.name}: begins at tick {first.first_tick}, no snapshot is before it"
            )
    assert spec is not None
    out = RecoveredRun(engine, spec, engine.state.tick, engine.state.now_ns, engine.state.tick, faults=faults)
    _tail(folder, segments, out, place)
    out.pending = _pending(out.engine, configured | (authority or {}))
    return out


def _pending(engine: Engine, configured: dict[str, str]) -> list[Event]:
    """Apply what a restart changes: the stricter of configuration and snapshot holds; suspensions end.

    Neither an operator who disarmed a policy in its file nor one who did so while it ran is overruled.
    """
    now = engine.intake.authority
    out: list[Event] = [
        AuthorityChanged(author="configuration", policy=policy, authority=cast(Any, wanted))
        for policy, wanted in sorted(configured.items())
        if policy in now and LEVELS.index(wanted) < LEVELS.index(now[policy])
    ]
    return out + [PluginRestored(plugin=name) for name in sorted(engine.suspended)]


def _from_snapshot(
    folder: Path,
    specs: dict[str, bytes],
    engine_factory: EngineFactory,
    faults: list[str],
    place: dict[str, Any],
) -> tuple[Engine | None, SiteSpec | None]:
    """An engine in the state of the newest snapshot that is whole and whose site is among `specs`."""
    for path in _snapshots(folder):
        try:
            raw = path.read_bytes()
            try:
                data = snapshot.decode(raw)
            except StorageError:
                if (other := of_another_version(raw)) is not None:
                    raise OtherFormat(f"{path}: {other}; {REMEDY}") from None
                raise
            packed = specs.get(data["site_hash"])
            if packed is None:
                raise StorageError(f"no segment of the trace describes its site {data['site_hash']}")
            spec = msgspec.json.decode(packed, type=SiteSpec)
            engine = engine_factory(spec)
            engine.restore(data)
        except OtherFormat:
            raise
        except (StorageError, ConfigError, OSError) as error:
            faults.append(f"{path.name}: {error}; the one before it is used")
            continue
        place.update(data.get("journal", {}))
        return engine, spec
    return None, None


def _tail(folder: Path, segments: list[Segment], out: RecoveredRun, place: dict[str, Any]) -> None:
    """Warm the history, tick through what the snapshot has not seen, and bring the journal up to it."""
    journal = folder / OPEN
    comparer: Comparer | None = None
    journal_tick, journal_ns = -1, 0
    if journal_exists(journal):
        comparer, journal_tick, journal_ns = _comparer(journal, out, place)
    scratch = State(out.engine.site.sizes)
    again = _TickAgain(folder, out, segments, None if comparer is None else journal_tick)
    for whole_frame in frames_since(segments, out):
        if whole_frame.tick <= out.snapshot_tick:
            warm(out.engine, scratch, whole_frame)
            continue
        if (frame := again.examine(whole_frame)) is None:
            continue
        try:
            if comparer is not None:
                comparer.before(frame)
        except Divergence as error:
            out.faults.append(f"the tail is decided otherwise than it was (another version?): {error}")
            comparer = None
        decision = again.tick(frame)
        try:
            if comparer is not None:
                comparer.after(out.engine, decision)
        except Divergence as error:
            out.faults.append(f"the tail is decided otherwise than it was (another version?): {error}")
            comparer = None
        out.replayed += 1
        out.last_tick, out.last_ns = frame.tick, frame.now_ns
    again.close()
    if comparer is not None and comparer.beyond and not _completed_before(comparer, place, journal_tick):
        writer = JournalWriter(folder)
        writer.chain.sides.update(comparer.chain.sides)
        writer.append(comparer.beyond)
        writer.close()
        out.completed_lines = len(comparer.beyond)
        out.faults.append(
            f"{journal.name}: ended at tick {journal_tick}, completed by {out.completed_lines} lines "
            f"up to tick {out.last_tick}; the commands in them may not have left"
        )
    if journal_tick > out.last_tick:
        out.lost = (out.last_tick + 1, journal_tick)
        out.faults.append(
            f"{journal.name}: goes on to tick {journal_tick}, the trace ends at {out.last_tick}: "
            f"what was seen in between is lost"
        )
        out.last_tick, out.last_ns = journal_tick, max(out.last_ns, journal_ns)


class _TickAgain:
    """Ticks of the trace again, the one that may have ended the process before first in a copy.

    That is a tick beyond the journal, of which nothing shows that it was ever done, and the one that an
    earlier start was about to repeat.
    """

    def __init__(
        self, folder: Path, out: RecoveredRun, segments: list[Segment], journal_tick: int | None
    ) -> None:
        self.folder, self.out, self.segments, self.journal_tick = folder, out, segments, journal_tick
        self.quarantine, self._doubts, self._doubted = Quarantine(folder), 0, -1
        with contextlib.suppress(OSError, ValueError):
            self._doubted = int((folder / RESUMING).read_bytes())

    def examine(self, frame: Frame) -> Frame | None:
        """The frame as it can be ticked; None if it cannot. Raises _BrokenTick for another beginning."""
        beyond = self.journal_tick is not None and frame.tick > self.journal_tick
        if frame.tick != self._doubted and (not beyond or self._doubts >= MOST_DOUBTS):
            return frame
        self._doubts += 1
        engine, out = self.out.engine, self.out
        self._about(frame.tick)
        try:
            poison = find_poison(engine, frame)
        except OSError as error:
            out.faults.append(f"tick {frame.tick}: cannot be tried in a copy of the process: {error}")
            return frame
        # Only a second death shows that it is this tick
        if not poison.error or (frame.tick != self._doubted and may_be_innocent(poison.error)):
            return frame
        if (known := self.quarantine.of(frame)) is not None:  # more of it than was known
            poison = msgspec.structs.replace(poison, whole=True)
            out.faults.append(f"{known.file}: the rest of this frame fails too")
        self.quarantine.keep(poison, frame, engine.site.spec_hash, out.spec.packed())
        out.poisons.append(poison)
        out.faults.append(f"{poison.text}; kept in {poison.file}")
        if not poison.whole:
            return without(frame, poison.parts)
        self._step_back(frame)
        out.last_tick, out.last_ns = frame.tick, frame.now_ns
        return None

    def tick(self, frame: Frame) -> Decision:
        """Tick the engine. Raises _BrokenTick if it fails: a start anew examines this tick."""
        self._about(frame.tick)
        try:
            return self.out.engine.tick(frame)
        except Exception as error:
            why = f"tick {frame.tick}, repeated from the trace: the engine failed: {error}; it is examined"
            raise _BrokenTick(why, self.out.poisons) from error

    def close(self) -> None:
        """All ticks are done."""
        with contextlib.suppress(OSError):
            (self.folder / RESUMING).unlink(missing_ok=True)

    def _about(self, tick: int) -> None:
        # Not forced to the disk: it outlives the process, and a power loss is no fault of the tick
        with contextlib.suppress(OSError):
            (self.folder / RESUMING).write_bytes(b"%d" % tick)

    def _step_back(self, frame: Frame) -> None:
        """The engine fails without input, so its state is at fault. One tick may be left out; for a second
        one within an hour the trace behind the snapshot is, for a third one all that was kept.
        """
        whole = [
            p for p in self.quarantine.poisons.values()
            if p.whole and 0 <= frame.now_ns - p.now_ns < HOLD_S * NS
        ]  # fmt: skip
        if len(whole) < 2:
            return
        self.close()
        out = self.out
        if len(whole) == 2 and out.snapshot_tick >= 0:
            _cut_behind(self.segments, out.snapshot_tick)
            why = f"the engine fails with any input; begins again at the snapshot of tick {out.snapshot_tick}"
            raise _BrokenTick(f"{why}, without the trace behind it", out.poisons)
        for path in [*_snapshots(self.folder), *(s.path for s in self.segments)]:
            set_aside(path, ".lost")
        raise StartAnew(
            f"{self.folder}: the engine failed {len(whole)} times within an hour, with any input; trace and "
            "snapshots are set aside (.lost), and the twin begins anew",
            out.poisons,
        )


def _cut_behind(segments: list[Segment], tick: int) -> None:
    """Set aside all frames after a tick."""
    for segment in segments:
        if segment.header.first_tick > tick:
            set_aside(segment.path, ".lost")
            continue
        decoder, started = TraceDecoder(), False
        for position, payload in payloads(segment.path.read_bytes()):
            if isinstance(payload, str):
                break
            if not started:
                decoder.header(payload)
            elif decoder.decode(payload).tick > tick:
                cut_tail(segment.path, position)
                break
            started = True


def _completed_before(comparer: Comparer, place: dict[str, Any], journal_tick: int) -> bool:
    """True if a journal that is shorter than the snapshot knows has these lines from an earlier start."""
    beyond = comparer.beyond or []
    begun = comparer.chain.seq - len(beyond)
    return begun < place.get("seq", 0) and line_head(beyond[-1]).tick <= journal_tick


def frames_since(segments: list[Segment], out: RecoveredRun, mend: bool = True) -> Iterator[Frame]:
    """Frames from as long before the snapshot as history is declared, to the first damage or gap behind it.

    What lies behind that is set aside, if `mend`.
    """
    site_hash, since = out.engine.site.spec_hash, out.snapshot_tick
    first = max((i for i, s in enumerate(segments) if s.header.first_tick <= since + 1), default=0)
    wanted_ns = out.engine.state.now_ns - round(
        max(out.engine.site.file.history_s.values(), default=0.0) * NS
    )
    while (
        first > 0
        and segments[first].first_ns > wanted_ns
        and segments[first].header.site_hash == segments[first - 1].header.site_hash == site_hash
    ):
        first -= 1
    last_tick = left_out = -1  # tick that was read, that was left out as a whole
    for number, segment in enumerate(segments[first:], first):
        reader = TraceReader(segment.path)
        for frame in reader:
            # Frames of another site before the snapshot's have other numbers, and its history was dropped.
            foreign = frame.tick <= since and segment.header.site_hash != site_hash
            known = max(last_tick, since, left_out, reader.last_left_out[0])
            if known >= 0 and is_gap(known, frame) and frame.tick > since:
                out.faults.append(f"{segment.path.name}: ticks {known + 1}..{frame.tick - 1} were not traced")
                if mend:
                    _set_aside(segments[number:], out)
                return
            if frame.tick > last_tick and not foreign:
                last_tick = frame.tick
                yield frame
        left_out = max(left_out, reader.last_left_out[0])
        if left_out > out.last_tick:
            out.last_tick, out.last_ns = reader.last_left_out
        if reader.damage:
            later = segments[number + 1 :]
            covered = bool(later) and later[0].header.first_tick <= since + 1
            out.faults += [f"{d}; what lies before was used" for d in reader.damage]
            if not covered and not mend:
                return
            if not covered:
                cut_torn(segment.path, [])
                _set_aside(later, out)
                return


def _set_aside(segments: list[Segment], out: RecoveredRun) -> None:
    """Behind damage that no snapshot covers, frames would meet an engine that has missed some."""
    for segment in segments:
        kept = set_aside(segment.path, ".lost")
        out.faults.append(f"{segment.path.name}: lies behind the damage; set aside as {kept.name}")


def warm(engine: Engine, scratch: State, frame: Frame) -> None:
    """Refill the history rings from the values of the frames, without repeating decisions."""
    others = [(e.table, e.name) for e in frame.events if isinstance(e, EntityReplaced)]
    # The engine knows which identities it believed.
    if any(isinstance(e, IdentityTold) for e in frame.events):
        others += engine.intake.identities.changed_in(frame.now_ns)
    for table, name in others:
        entity = engine.site.entity(table, name) if table in TABLES else None
        if entity is not None:
            scratch.tables[table].replace(entity)
            engine.history.forget(table, entity)
    scratch.apply(frame)
    engine.history.push(scratch)


def _mend_journal(path: Path, faults: list[str]) -> None:
    """Cut the open segment, or the link to the one before, where it is faulty."""
    if not journal_exists(path):
        return
    while (verdict := verify_open(path)).fault:
        where = f"{verdict.file} line {verdict.line_no}, byte {verdict.position}"
        faults.append(f"{where}: {verdict.fault}; cut off there")
        cut_journal(path, verdict)
        if not journal_exists(path):
            return


def _comparer(journal: Path, out: RecoveredRun, place: dict[str, Any]) -> tuple[Comparer, int, int]:
    """(a comparer that stands behind the snapshot's tick, the last journaled tick and its instant)."""
    seq, head = place.get("seq", 0), place.get("head", GENESIS)
    count, last_tick, last_ns = 0, -1, 0
    for line in journal_lines(journal, seq):
        found = line_head(line)
        if count == 0 and found.seq > seq:
            out.faults.append(
                f"{journal.name}: begins at line {found.seq + 1}, behind the snapshot; compared from there"
            )
        elif count == 0 and found.prev != head:
            out.faults.append(f"{journal.name}: its first {seq} lines are not what the snapshot follows")
            head = found.prev
        count += 1
        if found.tick > last_tick:
            last_tick, last_ns = found.tick, found.now_ns
    if count == 0 and seq > 0:
        seq, head, last_tick, last_ns = _end_of(journal, out, place)
    comparer = Comparer(out.engine, journal_lines(journal, seq) if count else iter(()), Chain(seq, head))
    comparer.beyond = []
    return comparer, last_tick, last_ns


def _end_of(journal: Path, out: RecoveredRun, place: dict[str, Any]) -> tuple[int, str, int, int]:
    """End of a journal that has no line behind the snapshot: (seq, head) to go on with, tick, instant."""
    line = newest_line(journal.parent)
    if not line:
        out.faults.append(
            f"{journal.name}: holds no line; the snapshot knows of {place['seq']}: all of them are missing"
        )
        return 0, GENESIS, -1, 0
    found = line_head(line)
    if found.seq + 1 < place["seq"]:
        out.faults.append(
            f"{journal.name}: {found.seq + 1} lines up to tick {found.tick}; "
            f"the snapshot knows of {place['seq']}: those between them are missing"
        )
    elif line_hash(line) != place["head"]:
        out.faults.append(f"{journal.name}: its first {place['seq']} lines are not what the snapshot follows")
    return found.seq + 1, line_hash(line), found.tick, found.now_ns


def latest_engine(folder: Path, engine_factory: EngineFactory) -> Engine:
    """An engine in the state of a run's newest whole snapshot. Touches no file. Raises StorageError."""
    faults: list[str] = []
    specs = {s.header.site_hash: s.header.spec for s in segments_of(folder, faults)}
    engine, _ = _from_snapshot(folder, specs, engine_factory, faults, {})
    if engine is None:
        why = f": {'; '.join(faults)}" if faults else ""
        raise StorageError(f"{folder}: holds no whole snapshot; expected the folder of a daemon's run{why}")
    return engine


def open_recorded(folder: Path, engine_factory: EngineFactory) -> tuple[Engine, SiteSpec, Since | None]:
    """An engine to replay a whole run with: new, or, where the beginning was pruned, at the oldest snapshot
    that the trace follows. Touches no file. Raises StorageError if there is no such snapshot.
    """
    faults: list[str] = []
    segments = segments_of(folder, faults)
    if not segments:
        raise StorageError(f"{folder}: no readable trace segments (trace-*.rt) here")
    spec = msgspec.json.decode(segments[0].header.spec, type=SiteSpec)
    if segments[0].header.first_tick == 0:
        return engine_factory(spec), spec, None
    specs = {s.header.site_hash: s.header.spec for s in segments}
    holes = read_holes(folder)
    for path in by_number(folder, "snapshot-*.rts"):
        tick = int(path.stem[9:])
        begun = [s for s in segments if s.header.first_tick <= tick + 1]
        if not begun or any(first <= tick + 1 <= last for first, last in holes):
            continue
        if (found := _restored(path, specs, engine_factory, faults)) is None:
            continue
        engine, spec, place = found
        out = RecoveredRun(engine, spec, tick, engine.state.now_ns, tick)
        scratch = State(engine.site.sizes)
        for frame in frames_since(segments, out, mend=False):
            if frame.tick > tick:
                break
            warm(engine, scratch, frame)
        return engine, spec, Since(tick, place.get("seq", 0), place.get("head", GENESIS))
    raise StorageError(
        f"{folder}: begins at tick {segments[0].header.first_tick}: what was before is pruned, and no "
        f"snapshot that is followed by trace is left to start at{': ' if faults else ''}{'; '.join(faults)}"
    )


def _restored(
    path: Path, specs: dict[str, bytes], engine_factory: EngineFactory, faults: list[str]
) -> tuple[Engine, SiteSpec, dict[str, Any]] | None:
    """An engine in the state of a snapshot, its site, and the snapshot's place in the journal.

    None, with a reason in `faults`, if the snapshot is not whole or its site is not among `specs`.
    """
    try:
        data = snapshot.decode(path.read_bytes())
        spec = msgspec.json.decode(specs.get(data["site_hash"], b""), type=SiteSpec)
        engine = engine_factory(spec)
        engine.restore(data)
    except (StorageError, ConfigError, OSError, msgspec.MsgspecError) as error:
        faults.append(f"{path.name}: {error}")
        return None
    return engine, spec, data.get("journal", {})


def engine_before(folder: Path, tick: int, engine_factory: EngineFactory) -> Engine:
    """The engine as it stood just before a tick of a run: the nearest snapshot, and the trace behind it.

    Touches no file. Raises StorageError where snapshots and trace do not reach.
    """
    faults: list[str] = []
    segments = segments_of(folder, faults)
    if not segments:
        raise StorageError(f"{folder}: no readable trace segments (trace-*.rt) here")
    out = _nearest(folder, tick, segments, engine_factory, faults)
    scratch, reached = State(out.engine.site.sizes), out.snapshot_tick
    for frame in frames_since(segments, out, mend=False):
        if frame.tick >= tick:
            return out.engine
        reached = frame.tick
        if frame.tick <= out.snapshot_tick:
            warm(out.engine, scratch, frame)
        else:
            out.engine.tick(frame)
    if reached == tick - 1:
        return out.engine
    why = f": {'; '.join(out.faults)}" if out.faults else ""
    raise StorageError(f"{folder}: the trace ends at tick {reached}; expected it to reach tick {tick}{why}")


def _nearest(
    folder: Path, tick: int, segments: list[Segment], engine_factory: EngineFactory, faults: list[str]
) -> RecoveredRun:
    """The newest whole snapshot before a tick; without one, the beginning of the run."""
    specs, snapshots = {s.header.site_hash: s.header.spec for s in segments}, _snapshots(folder)
    for path in snapshots:
        if (at := int(path.stem[9:])) >= tick:
            continue
        if (found := _restored(path, specs, engine_factory, faults)) is not None:
            engine, spec, _ = found
            return RecoveredRun(engine, spec, at, engine.state.now_ns, at)
    first = segments[0].header
    if first.first_tick > 0:
        kept = f"the oldest is of tick {int(snapshots[-1].stem[9:])}" if snapshots else "none is left"
        why = f": {'; '.join(faults)}" if faults else ""
        raise StorageError(f"{folder}: no whole snapshot from before tick {tick}; {kept}{why}")
    spec = msgspec.json.decode(first.spec, type=SiteSpec)
    return RecoveredRun(engine_factory(spec), spec, -1, 0)
