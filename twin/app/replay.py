"""Replay: a short loop around `engine.tick`, from recorded arrivals or from recorded frames.

Arrivals go through the Inbox, tick by tick, as live; frames of a native trace go straight to the engine, and
what it decides is compared with the run's own journal, line by line. Part of the shell.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twin.app.fitting import Fitter
from twin.app.sources import MessageSource, SampleSource, stage
from twin.app.storage import JournalWriter, TraceReader, TraceWriter, journal_lines, write_snapshot
from twin.contracts import Decision
from twin.engine import Engine
from twin.errors import Divergence
from twin.frame import NS, Frame
from twin.inbox import Inbox
from twin.journal import FORMAT, Chain, first_difference
from twin.site import SiteSpec

URGENT_GAP_NS = NS // 10  # an urgent frame comes at least 100 ms after the one before
SNAPSHOT_EVERY_S = 600.0


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
        "format": FORMAT, "site_hash": engine.site.spec_hash, "authority": engine.intake.authority,
        "policies": [p.name for p in engine.policies],
        "models": {n: engine.intake.params_hash.get(n, "unfitted") for n in engine.models},
        "numpy": np.__version__, "machine": platform.machine(),
    }  # fmt: skip


class Recorder:
    """Writes a run: trace before the tick, journal after it, now and then a snapshot. With no folder, only the
    journal's chain is kept, so that its head can be told."""

    def __init__(self, engine: Engine, spec: SiteSpec, folder: Path | None, durable: bool = False) -> None:
        self.folder = folder
        self.trace = TraceWriter(folder, engine.site.spec_hash, spec.packed()) if folder else None
        self.journal = JournalWriter(folder, durable) if folder else None
        self.chain = self.journal.chain if self.journal else Chain()
        self._snapshot_ns: int | None = None
        self._put([self.chain.line("manifest", -1, 0, manifest(engine))])

    def before(self, frame: Frame) -> None:
        """Input before effect."""
        if self.trace is not None:
            self.trace.write(frame)

    def after(self, engine: Engine, decision: Decision) -> None:
        """Intent before act."""
        self._put(self.chain.lines(decision))
        if self.folder is not None:
            if self._snapshot_ns is None:
                self._snapshot_ns = decision.now_ns
            elif decision.now_ns - self._snapshot_ns >= SNAPSHOT_EVERY_S * NS:
                self._snapshot_ns = decision.now_ns
                write_snapshot(self.folder, decision.tick, engine.dump())

    def finish(self, engine: Engine) -> None:
        """Close the run with the checksum of its last state."""
        body = {"state_checksum": engine.checksum()}
        self._put([self.chain.line("end", engine.state.tick, engine.state.now_ns, body)])
        if self.trace is not None and self.journal is not None and self.folder is not None:
            write_snapshot(self.folder, engine.state.tick, engine.dump())
            self.trace.close()
            self.journal.close()

    def _put(self, lines: list[bytes]) -> None:
        if self.journal is not None:
            self.journal.append(lines)
        else:
            self.chain.sides.clear()


class Comparer(Recorder):
    """Checks that a run is made again as recorded; raises Divergence at the first line that differs."""

    def __init__(self, engine: Engine, journal: Path) -> None:
        self.recorded = journal_lines(journal)
        self.compared = 0
        self.ended = False
        self.folder, self.trace, self.journal = None, None, None
        self.chain = Chain()
        self._put([self.chain.line("manifest", -1, 0, manifest(engine))])

    def finish(self, engine: Engine) -> None:
        """The end must agree too, and nothing may be left over (a recording that was killed has no end)."""
        body = {"state_checksum": engine.checksum()}
        line = self.chain.line("end", engine.state.tick, engine.state.now_ns, body)
        if not self.ended:
            rest = next(self.recorded, None)
            if rest is not None:
                if rest != line:
                    raise first_difference(rest, line)
                self.compared += 1

    def _put(self, lines: list[bytes]) -> None:
        self.chain.sides.clear()
        for line in lines:
            if self.ended:
                return
            recorded = next(self.recorded, None)
            if recorded is None:
                self.ended = True  # the journal was cut; what lies before was compared
                return
            if recorded != line:
                raise first_difference(recorded, line)
            self.compared += 1


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


def frames_of(
    source: MessageSource | SampleSource, inbox: Inbox, dt_s: float, due_events: Callable[[int], list[Any]]
) -> Iterator[Frame]:
    """Arrivals cut into frames: nominal ticks `dt_s` apart, and urgent ones between them."""
    step_ns = round(dt_s * NS)
    tick, last_ns, next_ns = 0, 0, 0
    urgent_ns: int | None = None

    def cut(now_ns: int, urgent: bool) -> Frame:
        nonlocal tick, last_ns
        for event in due_events(now_ns):
            inbox.put_event(event)
        frame = inbox.take(tick, now_ns, (now_ns - last_ns) / NS)
        tick, last_ns = tick + 1, now_ns
        return Frame(frame.tick, now_ns, frame.dt_s, frame.updates, frame.counts, frame.events, urgent)

    for arrival in source:
        if next_ns == 0:
            last_ns = arrival.t_ns // step_ns * step_ns
            next_ns = last_ns + step_ns
        while arrival.t_ns > (next_ns if urgent_ns is None else min(urgent_ns, next_ns)):
            if urgent_ns is not None and urgent_ns < next_ns:
                yield cut(urgent_ns, True)
            else:
                yield cut(next_ns, False)
                next_ns += step_ns
            urgent_ns = None
        for item in arrival.items:
            stage(item, inbox, arrival.t_ns)
        if inbox.urgent and urgent_ns is None:
            urgent_ns = max(arrival.t_ns, last_ns + URGENT_GAP_NS)
    if next_ns:
        if urgent_ns is not None and urgent_ns < next_ns:
            yield cut(urgent_ns, True)
        yield cut(next_ns, False)


def replay_arrivals(
    engine: Engine, spec: SiteSpec, source: MessageSource | SampleSource, dt_s: float, out: Path | None = None,
    observers: tuple[Observer, ...] = (), speed: float | None = None,
) -> Outcome:  # fmt: skip
    """Run arrivals through Inbox and engine; record the run in `out` if given."""
    outcome, pace, fitter = Outcome(), Pace(speed), Fitter()
    inbox = Inbox(engine.site.sizes)
    recorder = Recorder(engine, spec, out)
    try:
        for frame in frames_of(source, inbox, dt_s, fitter.due):
            pace.wait(frame.now_ns)
            _step(engine, frame, recorder, observers, outcome, fitter)
        recorder.finish(engine)
    finally:
        fitter.close()
    outcome.inbox = dict(inbox.counts)
    outcome.journal_head = recorder.chain.head
    return outcome


def replay_frames(
    engine: Engine, reader: TraceReader, compare: Path | None, observers: tuple[Observer, ...] = (),
    speed: float | None = None, out: tuple[SiteSpec, Path] | None = None,
) -> Outcome:  # fmt: skip
    """Run recorded frames through the engine and compare with the journal. Raises Divergence where they differ."""
    outcome, pace = Outcome(), Pace(speed)
    recorder: Recorder
    if compare is not None:
        recorder = Comparer(engine, compare)
    else:
        recorder = Recorder(engine, out[0] if out else SiteSpec({}, {}), out[1] if out else None)
    for frame in reader:
        pace.wait(frame.now_ns)
        _step(engine, frame, recorder, observers, outcome, None)
    outcome.damage = list(reader.damage)
    if outcome.damage and isinstance(recorder, Comparer):
        # The journal goes on past the damage: what lies before was equal, the rest cannot be judged.
        recorder.ended = True
    recorder.finish(engine)
    outcome.journal_head = recorder.chain.head
    if isinstance(recorder, Comparer):
        outcome.compared_lines = recorder.compared
    return outcome


def _step(
    engine: Engine, frame: Frame, recorder: Recorder, observers: tuple[Observer, ...], outcome: Outcome,
    fitter: Fitter | None,
) -> None:  # fmt: skip
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


def summary(engine: Engine, outcome: Outcome, messages: dict[str, Any] | None, wall_s: float) -> dict[str, Any]:
    """The replay as one JSON object; its keys are kept stable."""
    site = engine.site
    power = engine.state.tables["rack"].value[next(s.row for s in engine.state.tables["rack"].signals if s.name == "power_w")]
    capture = engine.estimator.liquid_capture()
    racks = {
        site.names["rack"][i].rpartition("/")[2]: {
            "power_w": _number(power[i]), "liquid_capture": _number(capture[i], 4)
        }
        for i in range(site.sizes["rack"])
    }  # fmt: skip
    residual, inferred = engine.estimator.tree_residual_pu()
    return {
        "site": site.file.site, "messages": messages, "racks": racks,
        "power_tree": {"residual_pu": _number(residual, 6), "inferred_edges": inferred},
        "ticks": outcome.ticks, "commands": outcome.commands, "advice": outcome.advice,
        "findings": [f.title for f in engine.findings.active.values()],
        "span_s": (outcome.last_ns - outcome.first_ns) / NS, "inbox": outcome.inbox, "events": engine.intake.counts,
        "compared_lines": outcome.compared_lines, "damage": outcome.damage,
        "state_checksum": engine.checksum(), "journal_head": outcome.journal_head, "wall_s": round(wall_s, 3),
    }  # fmt: skip


def _number(value: Any, digits: int = 1) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), digits)


