"""Killed at random moments while segments close, snapshots are written and old files go: it goes on."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.forked_children import ForkedChildren
from tests.support.golden_story import engine_for, spec
from twin.catalogue import NS
from twin.config import Quotas
from twin.contracts import OtherRecord
from twin.run import (
    OPEN,
    Keeping,
    Recorder,
    TraceReader,
    Upkeep,
    open_recorded,
    replay_frames,
    resume,
    retention,
    verify_journal,
)
from twin.telemetry import Frame

T0 = 1_700_000_000 * NS


def live(path: str) -> None:
    """A daemon in small: starts again where it was, ticks as fast as it can, keeps its files small."""
    folder, site = Path(path), spec(["r1"])
    retention.MB = 1
    keeping = Keeping(trace_s=7.0, journal_bytes=2500, reserve_bytes=4096)
    keeper = Upkeep(folder, Quotas(trace_hours=0.01, snapshots=2, journal_mb=8000, pinned_mb=5_000))
    if any(folder.glob("trace-*.rt")) or any(folder.glob("snapshot-*.rts")):
        back = resume(folder, engine_for)
        # One tick was in flight: nothing else may be missing.
        known = ("completed by", "torn", "no readable header")  # killed within a line, a frame, a header
        unexpected = [f for f in back.faults if not any(words in f for words in known)]
        assert not unexpected, unexpected
        assert back.lost is None, back.lost
        engine, tick, resumed = back.engine, back.last_tick + 1, back.as_manifest()
    else:
        engine, tick, resumed = engine_for(site), 0, None
    recorder = Recorder(engine, site, folder, keeping, resumed)
    while True:
        frame = Frame(tick, T0 + tick * NS, 1.0)
        recorder.before(frame)
        recorder.after(engine, engine.tick(frame))
        recorder.note(OtherRecord("daemon", {"tick": tick, "padding": "x" * 100}))
        if tick % 23 == 0:
            keeper.pin(frame.now_ns, "finding")
        if tick % 10 == 0:
            recorder.snapshot_job(engine)()
        if tick % 5 == 0:
            for record in keeper.run(frame.now_ns):
                recorder.note(record)
        print(tick, flush=True)
        tick += 1


@pytest.mark.long
def test_killed_at_random_moments(tmp_path: Path) -> None:
    rng, folder = random.Random(5), tmp_path / "run"
    with ForkedChildren(f"{__name__}:live") as children:
        for _ in range(5):
            pid = children.start(str(folder))
            for _ in range(rng.randint(20, 40)):
                children.line()
            time.sleep(rng.uniform(0.0, 0.02))
            children.kill(pid)
            verdict = verify_journal(folder / OPEN)
            assert verdict.fault in (None, "the last line is torn")
    back = resume(folder, engine_for)
    assert back.last_tick > 100, "more than the 36 s of trace that the quota keeps"
    verdict = verify_journal(folder / OPEN)
    assert verdict.fault is None
    assert verdict.pruned is not None
    engine, _, since = open_recorded(folder, engine_for)
    assert since is not None
    outcome = replay_frames(engine, TraceReader(folder), folder / OPEN, since=since)
    assert outcome.damage == []
    assert engine.checksum() == back.engine.checksum()
