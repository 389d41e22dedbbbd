"""A run whose engine fails on some input, restarted after each failure as the service manager would.

Only the daemon's order is kept: trace, tick, journal, a snapshot now and then; after a failure nothing more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support.golden_story import Story, engine_for
from twin.engine import Engine
from twin.run import (
    Cutter,
    Keeping,
    Poison,
    Quarantine,
    Recorder,
    StartAnew,
    mend_unticked,
    never_ticked,
    resume,
)
from twin.site import SiteSpec
from twin.telemetry import Event, Frame, TicksSkipped

SECONDS = 22
SNAPSHOT_EVERY = 6
KEEPING = Keeping(reserve_bytes=0)
MOST_STARTS = 30


@cache
def frames() -> tuple[Frame, ...]:
    """Frames of the story, as an engine that fails on nothing lets it go."""
    story = Story(SECONDS)
    engine, found = engine_for(story.spec), list[Frame]()
    for frame in Cutter(engine, 1.0, lambda now_ns, site_hash: []).frames(story):
        story.observe(engine, frame, engine.tick(frame))
        found.append(frame)
    return tuple(found)


class PoisonedRun:
    """One run through given frames. `deaths` counts failures of the engine; `faults` are those of starts."""

    def __init__(self, folder: Path, given: Sequence[Frame]) -> None:
        self.folder, self.given, self.at = folder, given, 0
        self.deaths, self.starts, self.left_out = 0, 0, 0
        self.faults: list[str] = []

    def live(self) -> Engine:
        """Start until all frames were seen."""
        while True:
            self.starts += 1
            assert self.starts < MOST_STARTS, self.faults[-3:]
            engine, recorder, tick, events = self.start()
            if self.go_on(engine, recorder, tick, events):
                recorder.finish(engine)
                return engine
            self.deaths += 1
            recorder.close()

    def start(self) -> tuple[Engine, Recorder, int, list[Event]]:
        """(engine, recorder, the next tick's number, what its frame begins with)."""
        spec: SiteSpec = Story(0).spec
        skipped = TicksSkipped(count=1, why="restart")
        poisons: list[Poison] = []
        if not never_ticked(self.folder):
            try:
                back = resume(self.folder, engine_for)
            except StartAnew as error:
                self.faults.append(str(error))
                poisons = error.poisons
            else:
                self.faults += back.faults
                bridge = back.bridge() or [skipped]
                recorder = Recorder(back.engine, back.spec, self.folder, KEEPING, back.as_manifest())
                for poison in back.poisons:
                    recorder.note(poison.record)
                return back.engine, recorder, back.last_tick + 1, [*bridge, *back.pending]
        last, _ = mend_unticked(self.folder, self.faults)
        engine = engine_for(spec)
        recorder = Recorder(engine, spec, self.folder, KEEPING)
        for poison in poisons:
            recorder.note(poison.record)
        return engine, recorder, last + 1, [skipped] if last >= 0 else []

    def go_on(self, engine: Engine, recorder: Recorder, tick: int, events: list[Event]) -> bool:
        """True once all frames were seen; False where the engine fails."""
        quarantine = Quarantine(self.folder)
        while self.at < len(self.given):
            given = self.given[self.at]
            frame = dataclasses.replace(given, tick=tick, events=(*events, *given.events))
            frame, known = quarantine.without_known(frame)
            self.left_out += len(known)
            events, self.at, tick = [], self.at + 1, tick + 1
            recorder.before(frame)
            try:
                decision = engine.tick(frame)
            except RuntimeError:
                return False
            recorder.after(engine, decision)
            if decision.tick % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
                recorder.snapshot_job(engine)()
        return True
