"""A recorded run whose journal has several segments, for tests of what is kept, pruned and replayed.

The fixture `folder` is a copy of one run; `kept` is that run itself, not to be changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden_story import Story, engine_for
from twin.config import Quotas
from twin.contracts import AlarmRecord, OtherRecord
from twin.engine import Engine
from twin.run import (
    OPEN,
    Cutter,
    JournalWriter,
    Keeping,
    Recorder,
    TraceReader,
    Upkeep,
    open_recorded,
    replay_frames,
)

SECONDS = 100
KEEPING = Keeping(trace_s=15.0, journal_bytes=3000, reserve_bytes=0)
SNAPSHOT_EVERY_NS = 20 * 10**9


def run(folder: Path, seconds: int = SECONDS, keeping: Keeping = KEEPING, finish: bool = True) -> Engine:
    """The story as a daemon would record it: segments, notes between ticks, snapshots now and then."""
    story = Story(seconds)
    engine = engine_for(story.spec)
    recorder = Recorder(engine, story.spec, folder, keeping)
    snapshot_ns = 0
    for frame in Cutter(engine, 1.0, lambda now_ns, site_hash: []).frames(story):
        recorder.before(frame)
        if frame.tick % 7 == 3:
            recorder.note(OtherRecord("access", {"who": "somebody", "refused": True, "at": frame.tick}))
        decision = engine.tick(frame)
        recorder.after(engine, decision)
        story.observe(engine, frame, decision)
        if frame.tick % 5 == 0:
            recorder.note(AlarmRecord(what="acknowledged", id="x", author="ada"), sync=True)
        snapshot_ns = snapshot_ns or decision.now_ns
        if decision.now_ns - snapshot_ns >= SNAPSHOT_EVERY_NS:
            recorder.snapshot_job(engine)()
            snapshot_ns = decision.now_ns
    recorder.note(OtherRecord("daemon", {"stopping": True}))
    if finish:
        recorder.finish(engine)
    recorder.close()
    return engine


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    folder = tmp_path_factory.mktemp("rotated") / "run"
    return folder, run(folder)


@pytest.fixture
def folder(kept: tuple[Path, Engine], tmp_path: Path) -> Path:
    shutil.copytree(kept[0], tmp_path / "run")
    return tmp_path / "run"


def replayed(folder: Path) -> tuple[Any, Engine]:
    engine, _, since = open_recorded(folder, engine_for)
    return replay_frames(engine, TraceReader(folder), folder / OPEN, since=since), engine


def prune(folder: Path, **quotas: int) -> Upkeep:
    """Run the daemon's upkeep of two minutes: it announces files, writes that down, and deletes them."""
    keeper = Upkeep(folder, Quotas(**quotas))
    writer = JournalWriter(folder)
    for _ in range(2):
        for record in keeper.run(0):
            tick, now_ns = (writer.last.tick, writer.last.now_ns) if writer.last else (-1, 0)
            writer.append([writer.chain.line(record, tick, now_ns)])
    writer.close()
    return keeper
