"""Replay: a short loop around `engine.tick`, from recorded arrivals or from recorded frames.

Arrivals go through the Inbox, tick by tick, as live; frames of a native trace go straight to the engine, and
what it decides is compared with the run's own journal, line by line. Part of the shell.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from twin import VERSION
from twin.app.fitting import Fitter
from twin.app.sources import Cutter, MessageSource, SampleSource, check_fits
from twin.app.storage import (
    JournalWriter,
    TraceReader,
    TraceWriter,
    journal_lines,
    verify_journal,
    write_snapshot,
)
from twin.contracts import Decision
from twin.engine import Engine
from twin.errors import Divergence
from twin.events import SiteChanged, TicksSkipped
from twin.frame import NS, Frame
from twin.journal import FORMAT, Chain, first_difference, line_hash
from twin.site import Site, SiteSpec

SNAPSHOT_EVERY_S = 600.0
SNAPSHOT_TICKS = 500  # where a tick is an hour, one after each would cost more than the ticks
SHELL_KINDS = ("manifest", "end")  # lines that no tick made


class Observer(Protocol):
    """Somebody who looks on: a report, a progress bar."""

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Called after each tick."""
        ...


@dataclass
class Outcome:
    """What a replay came to."""

    ticks: int = 0
    commands: int = 0
    advice: int = 0
    first_ns: int = 0
    last_ns: int = 0
    journal_head: str = ""
    compared_lines: int = 0
    damage: list[str] = field(default_factory=list)
    inbox: dict[str, int] = field(default_factory=dict)


def manifest(engine: Engine) -> dict[str, Any]:
    """The journal's first record: under what a run was made, and must be made again to be equal."""
    return {
        "format": FORMAT,
        "racktwin": VERSION,
        "site_hash": engine.site.spec_hash,
        "authority": engine.intake.authority,
        "policies": [p.name for p in engine.policies],
        "models": {n: engine.intake.params_hash.get(n, "unfitted") for n in engine.models},
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


class Recorder:
    """Writes a run: trace before the tick, journal after it, now and then a snapshot.

    With no folder, only the journal's chain is kept, so that its head can be told.
    """

    def __init__(self, engine: Engine, spec: SiteSpec, folder: Path | None, durable: bool = False) -> None:
        self.folder = folder
        self.trace = TraceWriter(folder, engine.site.spec_hash, spec.packed()) if folder else None
        self.journal = JournalWriter(folder, durable) if folder else None
        self.chain = self.journal.chain if self.journal else Chain()
        self._snapshot_ns: int | None = None
        self._ticks = 0  # since the last snapshot
        self._put([self.chain.line("manifest", -1, 0, manifest(engine))])

    def before(self, frame: Frame) -> None:
        """Input before effect. A frame that changes the site begins a segment that names the new one."""
        if self.trace is None:
            return
        for event in frame.events:
            if isinstance(event, SiteChanged):
                self.trace.change_site(msgspec.json.decode(event.spec, type=SiteSpec).digest(), event.spec)
        self.trace.write(frame)

    def after(self, engine: Engine, decision: Decision) -> None:
        """Intent before act."""
        self._put(self.chain.lines(decision))
        if self.folder is not None and self.trace is not None:
            self._ticks += 1
            if self._snapshot_ns is None:
                self._snapshot_ns = decision.now_ns
            elif (
                self._ticks >= SNAPSHOT_TICKS and decision.now_ns - self._snapshot_ns >= SNAPSHOT_EVERY_S * NS
            ):
                self._snapshot_ns, self._ticks = decision.now_ns, 0
                self.trace.sync()  # or a power loss could leave a snapshot of ticks that no trace explains
                self._snapshot(engine)

    def finish(self, engine: Engine) -> None:
        """Close the run with the checksum of its last state."""
        body = {"state_checksum": engine.checksum()}
        self._put([self.chain.line("end", engine.state.tick, engine.state.now_ns, body)])
        if self.trace is not None and self.folder is not None:
            self.trace.sync()
            self._snapshot(engine)
        self.close()

    def _snapshot(self, engine: Engine) -> None:
        """With the place in the journal, so that a restart knows whether lines are missing before it."""
        assert self.folder is not None
        place = {"seq": self.chain.seq, "head": self.chain.head}
        write_snapshot(self.folder, engine.state.tick, {**engine.dump(), "journal": place})

    def close(self) -> None:
        """Close the files, whatever they hold."""
        if self.trace is not None and self.journal is not None:
            self.trace.close()
            self.journal.close()
        self.trace, self.journal = None, None

    def _put(self, lines: list[bytes]) -> None:
        if self.journal is not None:
            self.journal.append(lines)
        else:
            self.chain.sides.clear()


class Head(msgspec.Struct):
    """What a line is about."""

    kind: str
    tick: int
    now_ns: int


def line_head(line: bytes) -> Head:
    """Kind, tick and instant of a journal line that `verify` found good."""
    return msgspec.json.decode(line, type=Head)


class Comparer(Recorder):
    """Checks that a run is made again as recorded; raises Divergence at the first line that differs.

    `recorded` are the journal's lines that follow `chain`. A run that was interrupted and resumed has lines
    of its shell in between (`end`, `manifest`) and, where frames were lost, lines that nothing makes again.
    """

    def __init__(self, engine: Engine, recorded: Iterator[bytes], chain: Chain) -> None:
        self.folder, self.trace, self.journal = None, None, None
        self.engine, self.recorded, self.chain = engine, recorded, chain
        self.compared = 0
        self.ended = False
        self.beyond: list[bytes] | None = None  # lines made after the journal's end, if somebody wants them
        self._next: tuple[bytes, Head] | None = None

    def before(self, frame: Frame) -> None:
        """Pass over what a restart before this frame left in the journal."""
        lost = any(isinstance(e, TicksSkipped) for e in frame.events)
        self._pass(frame.tick, lost)

    def finish(self, engine: Engine) -> None:
        """The end must agree too, and nothing may be left over (a recording that was killed has no end)."""
        self._pass(engine.state.tick + 1, False)
        if not self.ended and (rest := self._peek()) is not None:
            raise first_difference(rest[0], None)

    def close(self) -> None:
        """Nothing is open."""

    def _pass(self, tick: int, lost: bool) -> None:
        """Lines before `tick` that are the shell's or, where frames were lost, anybody's."""
        while not self.ended and (found := self._peek()) is not None and found[1].tick < tick:
            line, head = found
            if head.kind == "end" and head.tick == self.engine.state.tick:
                body = {"state_checksum": self.engine.checksum()}
                self._compare(self.chain.line("end", head.tick, self.engine.state.now_ns, body))
            elif head.kind in SHELL_KINDS or lost:
                self._next = None
                self.chain.seq, self.chain.head = self.chain.seq + 1, line_hash(line)
            else:
                return

    def _peek(self) -> tuple[bytes, Head] | None:
        if self._next is None and (line := next(self.recorded, None)) is not None:
            self._next = line, line_head(line)
        return self._next

    def _put(self, lines: list[bytes]) -> None:
        if self.beyond is None:
            self.chain.sides.clear()
        for line in lines:
            self._compare(line)

    def _compare(self, line: bytes) -> None:
        if not self.ended and (found := self._peek()) is not None:
            if found[0] != line:
                raise _difference(found[0], line)
            self._next = None
            self.compared += 1
            return
        self.ended = True  # the journal was cut; what lies before was compared
        if self.beyond is not None:
            self.beyond.append(line)


def whole_run(engine: Engine, journal: Path, lines: int | None = None) -> Comparer:
    """A comparer for a run from its beginning, with the first `lines` of its journal."""
    comparer = Comparer(engine, itertools.islice(journal_lines(journal), lines), Chain())
    comparer._put([comparer.chain.line("manifest", -1, 0, manifest(engine))])
    return comparer


def _difference(recorded: bytes, replayed: bytes) -> Divergence:
    """Down to the field, also where the bodies agree."""
    found = first_difference(recorded, replayed)
    if found.recorded == found.replayed:
        a, b = msgspec.json.decode(recorded), msgspec.json.decode(replayed)
        for name in ("now_ns", "seq", "prev"):
            if a[name] != b[name]:
                return Divergence(a["tick"], f"{a['kind']}:{name}", a[name], b[name])
    return found


class Pace:
    """Keeps a replay at `speed` times real time; None lets it run."""

    def __init__(self, speed: float | None) -> None:
        self.speed = speed
        self._begun: tuple[float, int] | None = None

    def wait(self, now_ns: int) -> None:
        """Sleep until this instant of the recording is due."""
        if self.speed is None:
            return
        if self._begun is None:
            self._begun = (time.monotonic(), now_ns)
            return
        due = self._begun[0] + (now_ns - self._begun[1]) / NS / self.speed
        time.sleep(max(0.0, due - time.monotonic()))


def replay_arrivals(
    engine: Engine,
    spec: SiteSpec,
    source: MessageSource | SampleSource,
    dt_s: float,
    out: Path | None = None,
    observers: tuple[Observer, ...] = (),
    speed: float | None = None,
) -> Outcome:
    """Run arrivals through Inbox and engine; record the run in `out` if given."""
    outcome, pace, fitter = Outcome(), Pace(speed), Fitter()
    cutter = Cutter(engine, dt_s, fitter.due)
    recorder = Recorder(engine, spec, out)
    try:
        for frame in cutter.frames(source):
            pace.wait(frame.now_ns)
            _step(engine, frame, recorder, observers, outcome, fitter)
        recorder.finish(engine)
    finally:
        recorder.close()
        fitter.close()
    outcome.inbox = dict(cutter.inbox.counts)
    outcome.journal_head = recorder.chain.head
    return outcome


def replay_frames(
    engine: Engine,
    reader: TraceReader,
    compare: Path | None,
    observers: tuple[Observer, ...] = (),
    speed: float | None = None,
    out: tuple[SiteSpec, Path] | None = None,
) -> Outcome:
    """Run recorded frames through the engine and compare with the journal; stops at the first damage.

    Raises Divergence where the two differ. What lies before damage is used, of trace and journal; what lies
    behind a gap cannot be judged, since the engine did not see what was lost.
    """
    outcome, pace = Outcome(), Pace(speed)
    recorder: Recorder
    if compare is not None:
        verdict = verify_journal(compare)
        if verdict.fault:
            where = f"{compare.name} line {verdict.line_no}, byte {verdict.position}"
            outcome.damage.append(f"{where}: {verdict.fault}")
        recorder = whole_run(engine, compare, verdict.lines)
    else:
        recorder = Recorder(engine, out[0] if out else SiteSpec({}, {}), out[1] if out else None)
    try:
        for frame in reader:
            if reader.damage:
                break
            pace.wait(frame.now_ns)
            check_fits(frame, engine.site)
            _step(engine, frame, recorder, observers, outcome, None)
        outcome.damage += reader.damage
        if isinstance(recorder, Comparer):
            # A single segment, or one that is damaged, ends before its journal does.
            recorder.ended |= bool(outcome.damage) or not reader.path.is_dir()
            outcome.compared_lines = recorder.compared
        recorder.finish(engine)
    finally:
        recorder.close()
    outcome.journal_head = recorder.chain.head
    if isinstance(recorder, Comparer):
        outcome.compared_lines = recorder.compared
    return outcome


def _step(
    engine: Engine,
    frame: Frame,
    recorder: Recorder,
    observers: tuple[Observer, ...],
    outcome: Outcome,
    fitter: Fitter | None,
) -> None:
    recorder.before(frame)
    decision = engine.tick(frame)
    recorder.after(engine, decision)
    if fitter is not None:
        for request in decision.fits:
            fitter.submit(engine, request, decision.now_ns)
    outcome.ticks += 1
    outcome.commands += sum(len(c.index) for c in decision.commands if not c.renewal)
    outcome.advice += sum(len(c.index) for c in decision.advice)
    outcome.first_ns = outcome.first_ns or frame.now_ns
    outcome.last_ns = frame.now_ns
    for observer in observers:
        observer.observe(engine, frame, decision)


def summary(
    engine: Engine, outcome: Outcome, messages: dict[str, Any] | None, wall_s: float
) -> dict[str, Any]:
    """The replay as one JSON object; its keys are kept stable."""
    site = engine.site
    power = engine.state.tables["rack"].value[
        next(s.row for s in engine.state.tables["rack"].signals if s.name == "power_w")
    ]
    capture = engine.estimator.liquid_capture()
    racks = {
        _shortest(site, "rack", i): {
            "power_w": _number(power[i]),
            "liquid_capture": _number(capture[i], 4),
        }
        for i in range(site.sizes["rack"])
    }
    residual, inferred = engine.estimator.tree_residual_pu()
    return {
        "site": site.file.site,
        "messages": messages,
        "racks": racks,
        "power_tree": {"residual_pu": _number(residual, 6), "inferred_edges": inferred},
        "ticks": outcome.ticks,
        "commands": outcome.commands,
        "advice": outcome.advice,
        "findings": [f.title for f in engine.findings.active.values()],
        "span_s": (outcome.last_ns - outcome.first_ns) / NS,
        "inbox": outcome.inbox,
        "events": engine.intake.counts,
        "compared_lines": outcome.compared_lines,
        "damage": outcome.damage,
        "state_checksum": engine.checksum(),
        "journal_head": outcome.journal_head,
        "wall_s": round(wall_s, 3),
    }


def _shortest(site: Site, table: str, entity: int) -> str:
    """The local name where it is the only one, else the full path."""
    path = site.name(table, entity)
    local = path.rpartition("/")[2]
    return local if site.entity(table, local) == entity else path


def _number(value: Any, digits: int = 1) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), digits)
