"""Replay: a short loop around `engine.tick`, from recorded arrivals or from recorded frames.

Arrivals go through the Inbox, tick by tick, as live; frames of a native trace go straight to the engine, and
what it decides is compared with the run's own journal, line by line.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from twin import VERSION
from twin.catalogue import NS, number
from twin.config import Config
from twin.contracts import (
    SHELL_KINDS,
    Decision,
    EndRecord,
    JournalRecord,
    ManifestRecord,
    OtherRecord,
    fields_of,
)
from twin.engine import Engine
from twin.run.comparison import Comparer, Since, recorded_run, said_simulated
from twin.run.fitting import Fitter
from twin.run.journal import FORMAT, Chain
from twin.run.journal_files import line_head, verify_journal
from twin.run.journal_writer import JournalWriter
from twin.run.recordings import Cutter, MessageSource, SampleSource, check_fits
from twin.run.storage import SEGMENT_BYTES, TraceReader, TraceWriter, is_gap, write_snapshot
from twin.site import Site, SiteSpec
from twin.telemetry import Frame, SiteChanged

KWH_J = 3.6e6


@dataclass
class Outcome:
    """Outcome of a replay."""

    ticks: int = 0
    commands: int = 0
    advice: int = 0
    first_ns: int = 0
    last_ns: int = 0
    journal_head: str = ""
    compared_lines: int = 0
    damage: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    inbox: dict[str, int] = field(default_factory=dict)


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
        "left_out": outcome.left_out,
        "state_checksum": engine.checksum(),
        "journal_head": outcome.journal_head,
        "wall_s": round(wall_s, 3),
    }


# Of a plant's figures, for people: key, words, unit, and by what to divide.
PLANT_WORDS = (
    ("it_energy_j", "IT energy", "kWh", KWH_J), ("cooling_energy_j", "cooling energy", "kWh", KWH_J),
    ("total_energy_j", "total energy", "kWh", KWH_J), ("pue", "PUE", "", 1.0), ("tue", "TUE", "", 1.0),
    ("wue_l_per_kwh", "WUE", "l/kWh", 1.0), ("water_l", "water evaporated", "l", 1.0),
    ("carbon_g", "carbon", "kg CO2", 1e3), ("cost_usd", "cost of the energy", "USD", 1.0),
    ("coolant_leaked_l", "coolant leaked", "l", 1.0), ("gpu_trips", "GPUs shut down by heat", "", 1.0),
    ("breaker_trips", "breakers tripped", "", 1.0),
    ("throttle_s", "throttled by heat", "GPU h", 3600.0),
    ("lost_gpu_s", "work not done, as clocks were low", "GPU h", 3600.0),
    ("lost_work_gpu_s", "work lost since the last checkpoint", "GPU h", 3600.0),
    ("checkpoint_gpu_s", "time spent on checkpoints", "GPU h", 3600.0),
)  # fmt: skip


def plant_words(figures: dict[str, float]) -> list[tuple[str, str]]:
    """A plant's figures as (words, value with unit); what is nothing or unknown is left out."""
    out = []
    for key, words, unit, per in PLANT_WORDS:
        value = figures.get(key, 0.0) / per
        if np.isfinite(value) and value != 0.0:
            out.append((words, f"{number(value, 4)} {unit}".rstrip()))
    return out


def _shortest(site: Site, table: str, entity: int) -> str:
    """The local name if it is unique, or else the full path."""
    path = site.name(table, entity)
    local = path.rpartition("/")[2]
    return local if site.entity(table, local) == entity else path


def _number(value: Any, digits: int = 1) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), digits)


__all__ = [
    "Comparer",
    "Keeping",
    "Observer",
    "Outcome",
    "Recorder",
    "Since",
    "line_head",
    "manifest",
    "replay_arrivals",
    "replay_frames",
    "summary",
]
SNAPSHOT_EVERY_S = 600.0
SNAPSHOT_TICKS = 500  # where a tick is an hour, one after each would cost more than the ticks


class Observer(Protocol):
    """Observer of a run, such as a report or a progress bar."""

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Called after each tick."""
        ...


def manifest(
    engine: Engine, simulated: bool = False, resumed: dict[str, Any] | None = None
) -> ManifestRecord:
    """The first record of a run and of each segment of its journal."""
    return ManifestRecord(
        format=FORMAT,
        racktwin=VERSION,
        site_hash=engine.site.spec_hash,
        authority=engine.intake.authority,
        policies=tuple(p.name for p in engine.policies),
        models={n: engine.intake.params_hash.get(n, "unfitted") for n in engine.models},
        numpy=np.__version__,
        machine=platform.machine(),
        simulated=simulated,
        resumed=resumed,
    )


@dataclass(frozen=True, slots=True)
class Keeping:
    """Retention settings of a run that does not end; a run that ends keeps its files whole.

    The owner of the recorder takes the snapshots, with `snapshot_job`.
    """

    trace_bytes: int = SEGMENT_BYTES
    trace_s: float = 3600.0
    durable: bool = False  # a tick's journal lines are on the disk before its commands leave
    journal_bytes: int = 64 * 2**20
    reserve_bytes: int = 16 * 2**20
    simulated: bool = False  # and the manifest says so

    @classmethod
    def of(cls, config: Config) -> Keeping:
        """As the daemon's configuration says."""
        quotas = config.quotas
        return cls(
            journal_bytes=quotas.journal_segment_mb * 10**6,
            reserve_bytes=quotas.journal_reserve_mb * 10**6,
            simulated=config.simulated,
            durable=True,
        )


class Recorder:
    """Writes a run: trace before the tick, journal after it, now and then a snapshot.

    With no folder, only the journal's chain is kept, so that its head can be compared. In a folder with a
    run, segments and chain go on; `resumed` is what the new manifest says of that. After a StorageError of
    `before` ticks may go on, and the next frame that is written begins a segment (take a snapshot then: what
    was not traced is a gap). After one of `after` or `note` nothing may be commanded.
    """

    def __init__(
        self,
        engine: Engine,
        spec: SiteSpec,
        folder: Path | None,
        keeping: Keeping | None = None,
        resumed: dict[str, Any] | None = None,
        simulated: bool = False,
    ) -> None:
        self.folder, self.keeping = folder, keeping
        self.simulated = simulated or (keeping is not None and keeping.simulated)
        self.trace: TraceWriter | None = None
        self.journal: JournalWriter | None = None
        if folder is not None:
            k = keeping or Keeping(trace_s=0.0, journal_bytes=0, reserve_bytes=0)
            self.journal = JournalWriter(folder, k.durable, k.journal_bytes, k.reserve_bytes)
            self.trace = TraceWriter(folder, engine.site.spec_hash, spec.packed(), k.trace_bytes, k.trace_s)
        self.chain = self.journal.chain if self.journal else Chain()
        self._snapshot_ns: int | None = None
        self._safe = (0, "")
        self._ticks = 0  # since the last snapshot
        last = self.journal.last if self.journal else None
        self._last = (-1, 0) if last is None else (last.tick, last.now_ns)
        self._put([self.chain.line(manifest(engine, self.simulated, resumed), *self._last)])

    def before(self, frame: Frame) -> None:
        """Write the frame before its effects. A frame with a new site begins a segment that names it."""
        if self.trace is None:
            return
        for event in frame.events:
            if isinstance(event, SiteChanged):
                self.trace.change_site(msgspec.json.decode(event.spec, type=SiteSpec).digest(), event.spec)
        self.trace.write(frame)

    def after(self, engine: Engine, decision: Decision) -> None:
        """Write the journal lines before the actions."""
        self._put(self.chain.lines(decision))
        self._last = decision.tick, decision.now_ns
        if self.journal is not None and self.journal.full:
            self.journal.rotate()  # each segment says under what it was made
            self._put([self.chain.line(manifest(engine, self.simulated), *self._last)])
        if self.trace is None or self.keeping is not None:
            return
        self._ticks += 1
        if self._snapshot_ns is None:
            self._snapshot_ns = decision.now_ns
        elif self._ticks >= SNAPSHOT_TICKS and decision.now_ns - self._snapshot_ns >= SNAPSHOT_EVERY_S * NS:
            self._snapshot_ns, self._ticks = decision.now_ns, 0
            self._snapshot(engine)

    def note(self, record: JournalRecord | OtherRecord, sync: bool = False) -> tuple[int, int, int]:
        """A line between ticks; on the disk with the next tick's lines, or at once with `sync`.

        Returns its place: number, tick and instant.

        A kind that is not of `SHELL_KINDS` becomes `daemon`: a replay would look for it among decisions.
        """
        if record.kind not in SHELL_KINDS:
            record = OtherRecord("daemon", {"what": record.kind, **fields_of(record)})
        place = (self.chain.seq, *self._last)
        lines = [self.chain.line(record, *self._last)]
        if self.journal is not None:
            self.journal.append(lines, sync)
        else:
            self.chain.sides.clear()
        return place

    def sync(self) -> None:
        """The trace on the disk, once a second. `self.trace.sync_job()` does it in another thread."""
        if self.trace is not None:
            self.trace.sync()

    def snapshot_job(self, engine: Engine) -> Callable[[], Path]:
        """Copies the engine now; the call that it gives writes the copy, in any thread."""
        assert self.trace is not None
        assert self.folder is not None
        folder, tick, sync = self.folder, engine.state.tick, self.trace.sync_job()
        # With the place in the journal, so that a restart knows whether lines are missing before it.
        place = {"seq": self.chain.seq, "head": self.chain.head}
        data: dict[str, Any] = copied({**engine.dump(), "journal": place})
        keep = 0 if self.keeping is not None else None

        def job() -> Path:
            if sync is not None:
                sync()  # or a power loss could leave a snapshot of ticks that no trace explains
            return write_snapshot(folder, tick, data, keep)

        return job

    def finish(self, engine: Engine) -> None:
        """Close the run with the checksum of its last state; one that never ticked has no snapshot."""
        end = EndRecord(state_checksum=engine.checksum())
        try:
            self._put([self.chain.line(end, engine.state.tick, engine.state.now_ns)])
            if self.trace is not None and engine.state.tick >= 0:
                self._snapshot(engine)
        finally:
            self.close()

    def _snapshot(self, engine: Engine) -> None:
        self.snapshot_job(engine)()

    def close(self) -> None:
        """Close the files, whatever they hold."""
        trace, journal, self.trace, self.journal = self.trace, self.journal, None, None
        try:
            if trace is not None:
                trace.close()
        finally:
            if journal is not None:
                journal.close()
                self._safe = journal.safe

    @property
    def safe(self) -> tuple[int, str]:
        """(how many lines of the journal are on the disk, the hash of the last of them)."""
        return self._safe if self.journal is None else self.journal.safe

    def _put(self, lines: list[bytes]) -> None:
        if self.journal is not None:
            self.journal.append(lines)
        else:
            self.chain.sides.clear()


def copied(tree: Any) -> Any:
    """A private copy of a tree of plain data and arrays."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(item) for item in tree] if isinstance(tree, list | tuple) else tree


class Pace:
    """An observer that keeps a replay at `speed` times real time; it comes before those that show it."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._begun: tuple[float, int] | None = None

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Sleep until this instant of the recording is due."""
        if self._begun is None:
            self._begun = (time.monotonic(), frame.now_ns)
            return
        due = self._begun[0] + (frame.now_ns - self._begun[1]) / NS / self.speed
        time.sleep(max(0.0, due - time.monotonic()))


def replay_arrivals(
    engine: Engine,
    spec: SiteSpec,
    source: MessageSource | SampleSource,
    dt_s: float,
    out: Path | None = None,
    observers: tuple[Observer, ...] = (),
) -> Outcome:
    """Run arrivals through Inbox and engine; record the run in `out` if given."""
    outcome, fitter = Outcome(), Fitter()
    cutter = Cutter(engine, dt_s, fitter.due)
    recorder = Recorder(engine, spec, out)
    try:
        for frame in cutter.frames(source):
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
    out: tuple[SiteSpec, Path] | None = None,
    since: Since | None = None,
) -> Outcome:
    """Run recorded frames through the engine and compare with the journal; stops at the first damage.

    Raises Divergence where the two differ. What lies before damage is used, of trace and journal; what lies
    behind a gap cannot be judged, since the engine did not see what was lost. An engine that stands at a
    snapshot goes on `since` there; what was journaled is compared from where both are kept.
    """
    outcome, simulated = Outcome(), said_simulated(compare or reader.path)
    recorder: Recorder | Comparer
    if compare is not None:
        verdict = verify_journal(compare)
        if verdict.fault:
            where = f"{verdict.file} line {verdict.line_no}, byte {verdict.position}"
            outcome.damage.append(f"{where}: {verdict.fault}")
        recorder = recorded_run(engine, compare, manifest(engine, simulated), verdict.lines, since)
    else:
        spec, folder = out or (SiteSpec({}, {}), None)
        recorder = Recorder(engine, spec, folder, simulated=simulated)
    try:
        for frame in _contiguous(reader, since, engine):
            check_fits(frame, engine.site)
            _step(engine, frame, recorder, observers, outcome, None)
        outcome.damage += reader.damage
        outcome.left_out += reader.left_out
        outcome.damage += [f"{gap}; what lies behind cannot be judged" for gap in reader.gaps[-1:]]
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


def _contiguous(reader: TraceReader, since: Since | None, engine: Engine) -> Iterator[Frame]:
    """The frames behind `since`, to the first damage or gap."""
    last, damaged = -1 if since is None else since.tick, 0
    for frame in reader:
        if since is not None and frame.tick <= since.tick:
            reader.gaps.clear()  # the snapshot is behind them
            damaged = len(reader.damage)
            continue
        if len(reader.damage) > damaged:
            return
        if reader.gaps:
            if "pruned" not in reader.gaps[-1]:
                check_fits(frame, engine.site)  # a site that changed in between is named first
            return
        known = max(last, reader.last_left_out[0])
        if since is not None and last == since.tick and is_gap(known, frame):
            reader.gaps.append(f"gap: ticks {known + 1}..{frame.tick - 1} behind the snapshot are not here")
            return
        last = frame.tick
        yield frame


def _step(
    engine: Engine,
    frame: Frame,
    recorder: Recorder | Comparer,
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
