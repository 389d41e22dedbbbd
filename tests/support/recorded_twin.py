"""A twin with the run folder of a daemon, killed in the midst of ticks and begun again from its files.

They have to hold all that it ever acknowledged, and to give all its decisions again.

hall = RecordedTwin(tmp_path / "hall", tree)
hall.tick(...); hall.acknowledge()
hall.die(rng); hall.start_again(epoch=2)
assert not hall.lost() and hall.replay_fault() == ""
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.builders import Twin, spec_of
from twin.catalogue import Divergence
from twin.contracts import Decision, Policy
from twin.engine import Engine
from twin.run import OPEN, Keeping, Recorder, TraceReader, journal_lines, line_hash, replay_frames, resume
from twin.site import SiteSpec, build_site
from twin.telemetry import EpochChanged, Event, Frame, Inbox, TicksSkipped

KEEPING = Keeping(trace_s=300.0, journal_bytes=0, reserve_bytes=0)
SNAPSHOT_EVERY = 60  # ticks; a daemon takes one each quarter of an hour, and ticks as long


class RecordedTwin(Twin):
    """An engine with trace, journal and snapshots in a folder. `told`: head of the journal by how many lines,
    as it was acknowledged to others; `faults`: what starts found.
    """

    def __init__(
        self, folder: Path, tree: dict[str, Any], policies: Sequence[Policy] = (), epoch: int = 1
    ) -> None:
        super().__init__(tree, policies, act=True)
        self.folder, self._spec, self._policies = folder, spec_of(tree), policies
        self.told: dict[int, str] = {}
        self.faults: list[str] = []
        self.recorder = Recorder(self.engine, self._spec, folder, KEEPING)
        self.inbox.put_event(EpochChanged(epoch=epoch))

    def _decide(self, frame: Frame) -> Decision:
        self.recorder.before(frame)
        decision = super()._decide(frame)
        self.recorder.after(self.engine, decision)
        if frame.tick % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
            self.recorder.snapshot_job(self.engine)()
        return decision

    def acknowledge(self) -> tuple[int, str]:
        """(how many lines of the journal are on the disk, the hash of the last), as others are told."""
        lines, head = self.recorder.safe
        self.told[lines] = head
        return lines, head

    def die(self, rng: np.random.Generator, *events: Event) -> None:
        """Be killed in the midst of a tick: of its frame, or else of its lines, any part is on the disk."""
        names = ("trace-*.rt", OPEN)
        before = {path: path.stat().st_size for name in names for path in self.folder.glob(name)}
        self.tick(None, *events)
        self.recorder.close()
        trace = max(self.folder.glob("trace-*.rt"))
        in_trace = rng.random() < 0.5
        for path in (trace, self.folder / OPEN):
            whole, had = path.stat().st_size, before.get(path, 0)
            if path == trace:
                kept = int(rng.integers(had, whole)) if in_trace else whole
            else:
                kept = had if in_trace else int(rng.integers(had, whole + 1))
            os.truncate(path, kept)
        for path in self.folder.glob("snapshot-*.rts"):  # of a tick that is not in the files
            if int(path.stem[9:]) == self.number - 1:
                path.unlink()

    def start_again(self, epoch: int, adopt: bool = False) -> None:
        """Go on from the files, in a new term."""
        found = resume(self.folder, self._engine, present=self._spec)
        self.faults += found.faults
        self.engine, self.inbox, self.number = found.engine, Inbox(self.site.sizes), found.last_tick + 1
        self.recorder = Recorder(self.engine, self._spec, self.folder, KEEPING, found.as_manifest())
        for event in (TicksSkipped(count=1, why="restart"), EpochChanged(epoch=epoch, adopt=adopt)):
            self.inbox.put_event(event)

    def _engine(self, spec: SiteSpec) -> Engine:
        return Engine(build_site(spec), self._policies, (), {p.name: "act" for p in self._policies})

    def lost(self) -> list[int]:
        """Acknowledged lengths of the journal that what is read back does not have."""
        heads = {i + 1: line_hash(line) for i, line in enumerate(journal_lines(self.folder / OPEN))}
        return [lines for lines, head in self.told.items() if lines and heads.get(lines) != head]

    def replay_fault(self) -> str:
        """ "" if a fresh engine, given the trace, decides all of the journal again, byte for byte."""
        self.recorder.sync()
        try:
            engine = self._engine(self._spec)
            outcome = replay_frames(engine, TraceReader(self.folder), self.folder / OPEN)
        except Divergence as error:
            return str(error)
        if engine.checksum() != self.engine.checksum():
            return "it ends in another state"
        return "; ".join(outcome.damage)
