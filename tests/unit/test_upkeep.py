"""Quotas: the oldest go first; what is pinned or needed to start stays; a crash halfway is no damage."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.golden_story import engine_for, spec
from tests.support.patience import PATIENCE_S
from twin.catalogue import NS, StorageError
from twin.config import Quotas
from twin.contracts import OtherRecord, UpkeepRecord
from twin.daemon import services
from twin.engine import Engine
from twin.run import (
    OPEN,
    JournalWriter,
    Keeping,
    Recorder,
    TraceReader,
    Upkeep,
    closed_segments,
    open_recorded,
    replay_frames,
    resume,
    retention,
    verify_journal,
)
from twin.run.storage import read_holes
from twin.telemetry import Frame

T0 = 1_700_000_000 * NS
TICKS, PER_SEGMENT, PER_SNAPSHOT = 120, 10, 30
STEP_S = 60  # a tick is a minute, a segment ten


def record(folder: Path, declared_s: float = 0.0) -> Engine:
    site = spec(["r1"], history_s={"rack.power_w": declared_s} if declared_s else {})
    engine = engine_for(site)
    keeping = Keeping(trace_s=PER_SEGMENT * STEP_S, reserve_bytes=0, journal_bytes=0)
    recorder = Recorder(engine, site, folder, keeping=keeping)
    for tick in range(TICKS):
        frame = Frame(tick, T0 + tick * STEP_S * NS, float(STEP_S))
        recorder.before(frame)
        recorder.after(engine, engine.tick(frame))
        if tick % PER_SNAPSHOT == PER_SNAPSHOT - 1:
            recorder.snapshot_job(engine)()
    recorder.close()
    return engine


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    folder = tmp_path_factory.mktemp("upkeep") / "run"
    return folder, record(folder)


@pytest.fixture
def folder(source: tuple[Path, Engine], tmp_path: Path) -> Path:
    shutil.copytree(source[0], tmp_path / "run")
    return tmp_path / "run"


def now(tick: int = TICKS) -> int:
    return T0 + tick * STEP_S * NS


def segments(folder: Path) -> list[int]:
    return [int(p.stem[6:]) for p in sorted(folder.glob("trace-*.rt"))]


@pytest.mark.long
def test_segments_past_their_digits(folder: Path, source: tuple[Path, Engine]) -> None:
    """After segment 999,999 comes 1,000,000, which a sorting by letters puts before it."""
    for path in sorted(folder.glob("trace-*.rt")):
        path.rename(path.with_name(f"trace-{int(path.stem[6:]) + 999_994:06d}.rt"))
    assert [f.tick for f in TraceReader(folder)] == list(range(TICKS))
    back = resume(folder, engine_for)
    assert (back.faults, back.engine.checksum()) == ([], source[1].checksum())
    notes = Upkeep(folder, Quotas(trace_hours=hours(35), snapshots=1)).run(now())
    assert notes[0].trace == tuple(f"trace-{i:06d}.rt" for i in range(999_994, 1_000_002))
    assert resume(folder, engine_for).faults == []
    with (folder / "trace-1000005.rt").open("ab") as file:  # the last one, and no other, is mended
        file.write(b"torn")
    assert "trace-1000005.rt" in resume(folder, engine_for).faults[0]


def hours(ticks: float) -> float:
    return ticks * STEP_S / 3600


def test_the_ring_by_hours(folder: Path, source: tuple[Path, Engine]) -> None:
    assert segments(folder) == list(range(12))
    keeper = Upkeep(folder, Quotas(trace_hours=hours(75), snapshots=2))
    notes = keeper.run(now())
    # Tick 45 and later are young enough; segment 4 holds ticks 40 to 49.
    assert segments(folder) == list(range(4, 12))
    assert notes[0].trace == tuple(f"trace-{i:06d}.rt" for i in range(4))
    assert notes[0].ticks is not None
    assert notes[0].ticks[0] == (0, 9)
    assert read_holes(folder) == [(0, 39)]
    assert keeper.run(now()) == []
    back = resume(folder, engine_for)
    assert back.faults == []
    assert back.engine.checksum() == source[1].checksum()


def test_what_a_start_needs_stays(folder: Path) -> None:
    """The trace behind the oldest kept snapshot is read if the newer ones are damaged."""
    keeper = Upkeep(folder, Quotas(trace_hours=0.01, snapshots=2, trace_mb=0))
    keeper.run(now())
    snapshots = sorted(folder.glob("snapshot-*.rts"))
    assert [int(p.stem[9:]) for p in snapshots] == [89, 119]
    assert segments(folder)[0] == 9  # tick 90, behind snapshot 89
    snapshots[1].write_bytes(b"damaged")
    back = resume(folder, engine_for)
    assert back.snapshot_tick == 89
    assert back.last_tick == TICKS - 1
    assert len(back.faults) == 1


@pytest.mark.long
def test_declared_history_stays(tmp_path: Path) -> None:
    engine = record(tmp_path / "run", declared_s=25 * STEP_S)
    Upkeep(tmp_path / "run", Quotas(trace_hours=0.01, snapshots=1)).run(now())
    assert segments(tmp_path / "run")[0] <= 9  # 25 ticks before the segment that holds tick 119
    back = resume(tmp_path / "run", engine_for)
    ring, was = back.engine.history.rings["rack.power_w"], engine.history.rings["rack.power_w"]
    t_ns = ring.ordered()[0]
    assert len(t_ns) >= 25
    assert np.array_equal(t_ns, was.ordered()[0][-len(t_ns) :])


def test_the_ring_by_size(folder: Path) -> None:
    sizes = [p.stat().st_size for p in sorted(folder.glob("trace-*.rt"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "MB", 1)
        Upkeep(folder, Quotas(trace_mb=sum(sizes[6:]), snapshots=2)).run(now())
    assert segments(folder)[0] in (5, 6)


def test_a_quota_that_cannot_be_kept_is_said(folder: Path) -> None:
    for path in folder.glob("snapshot-*.rts"):
        path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "MB", 1)
        keeper = Upkeep(folder, Quotas(trace_mb=1, trace_hours=0.01))
        assert keeper.run(now()) == []
    assert "check that snapshots are written" in keeper.fault
    assert len(segments(folder)) == 12


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four minutes to each side, so that a window of a pin can lie within a segment."""
    monkeypatch.setattr(retention, "WINDOW_S", 4 * STEP_S)


@pytest.mark.usefixtures("narrow")
def test_windows_around_pins_stay(folder: Path) -> None:
    keeper = Upkeep(folder, Quotas(trace_hours=hours(20), snapshots=1))
    keeper.pin(now(25), "finding")
    keeper.pin(now(25) + NS, "finding")  # the same moment
    keeper.pin(now(52), "command")  # with what is before and behind: segments 4 and 5
    assert len((folder / "pins.jsonl").read_bytes().splitlines()) == 2
    again = Upkeep(folder, Quotas(trace_hours=hours(20), snapshots=1))  # after a restart
    again.run(now())
    assert segments(folder) == [2, 4, 5, 10, 11]
    reader = TraceReader(folder)
    ticks = [f.tick for f in reader]
    assert set(range(20, 30)) | set(range(40, 60)) <= set(ticks)
    assert reader.damage == []
    assert len(reader.gaps) == 2
    assert all("were pruned" in gap for gap in reader.gaps)
    back = resume(folder, engine_for)  # a pruned hole is no damage
    assert back.faults == []
    assert not list(folder.glob("*.lost"))


@pytest.mark.usefixtures("narrow")
def test_pins_have_a_quota_of_their_own(folder: Path) -> None:
    for pinned_mb, left in ((10_000, [1, 3, 5]), (0, [])):
        keeper = Upkeep(folder, Quotas(trace_hours=0.01, snapshots=1, pinned_mb=pinned_mb))
        for tick in (15, 35, 55):
            keeper.pin(now(tick), "finding")
        keeper.run(now())
        assert [i for i in segments(folder) if i < 9] == left


def test_pins_of_segments_that_are_gone_are_forgotten(folder: Path) -> None:
    with (folder / "pins.jsonl").open("ab") as file:
        for i in range(500):
            file.write(msgspec.json.encode({"now_ns": T0 - 10**15 + i, "why": "old"}) + b"\n")
        file.write(b"torn")
    Upkeep(folder, Quotas()).run(now())
    assert (folder / "pins.jsonl").read_bytes() == b""


def test_a_replay_starts_behind_the_hole(folder: Path, source: tuple[Path, Engine]) -> None:
    Upkeep(folder, Quotas(trace_hours=0.01, snapshots=2)).run(now())
    engine, _, since = open_recorded(folder, engine_for)
    assert since is not None
    assert since.tick == 89
    outcome = replay_frames(engine, TraceReader(folder), folder / OPEN, since=since)
    assert outcome.damage == []
    assert engine.checksum() == source[1].checksum()


@pytest.mark.parametrize("calls", range(6))
def test_killed_in_the_middle(folder: Path, source: tuple[Path, Engine], calls: int) -> None:
    """After any number of deletions: it starts, it reads, and the rest goes next time."""
    left = calls
    real = Path.unlink

    class Killed(BaseException):
        pass

    def unlink(self: Path, missing_ok: bool = False) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        real(self, missing_ok)

    quotas = Quotas(trace_hours=0.01, snapshots=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(Killed):
            Upkeep(folder, quotas).run(now())
    assert resume(folder, engine_for).engine.checksum() == source[1].checksum()
    reader = TraceReader(folder)
    list(reader)
    assert reader.damage == []
    assert all("were pruned" in gap for gap in reader.gaps)
    Upkeep(folder, quotas).run(now())
    assert segments(folder) == [9, 10, 11]


def test_a_disk_that_refuses_is_said_and_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    keeper = Upkeep(folder, Quotas(trace_hours=0.01, snapshots=2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert keeper.run(now()) == []
    assert "Read-only" in keeper.fault
    assert keeper.run(now())
    assert keeper.fault == ""


def test_sides_that_no_line_names_go(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, segment_bytes=1)
    keeper = Upkeep(tmp_path, Quotas(journal_mb=0))
    names = []
    for i in range(4):
        body: dict[str, Any] = {"x": f"{i // 3}" * 2_100_000}  # the first three bodies are the same
        writer.append([writer.chain.line(OtherRecord("daemon", body), i, i)])
        names.append(sorted(p.stem for p in (tmp_path / "sides").iterdir()))
        writer.rotate()
    assert len(names[-1]) == 2
    orphan = tmp_path / "sides" / ("f" * 32 + ".json")
    orphan.write_text("{}")
    old = time.time() - 2 * retention.SIDE_AGE_S
    for path in (tmp_path / "sides").iterdir():
        os.utime(path, (old, old))
    fresh = tmp_path / "sides" / ("e" * 32 + ".json")
    fresh.write_text("{}")  # its line is about to be written
    (tmp_path / "snapshot-000000000009.rts").write_bytes(b"")
    for _ in range(2):
        for record in keeper.run(0):
            writer.append([writer.chain.line(record, 9, 9)])
    writer.close()
    assert [p.name for p in closed_segments(tmp_path)] == ["journal-000003.jsonl"]
    assert verify_journal(writer.path).fault is None
    left = sorted(p.stem for p in (tmp_path / "sides").iterdir())
    assert len(left) == 2
    assert fresh.stem in left
    assert set(left) - {fresh.stem} <= set(names[-1]) - set(names[0])


def test_a_segment_that_is_closed_meanwhile_keeps_its_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JournalWriter(tmp_path)
    writer.append([writer.chain.line(OtherRecord("daemon", {"x": "0" * 2_100_000}), 1, 1)])
    (side,) = (tmp_path / "sides").iterdir()
    old = time.time() - 2 * retention.SIDE_AGE_S
    os.utime(side, (old, old))

    def listed(folder: Path) -> list[Path]:
        found = closed_segments(folder)
        writer.rotate()
        return found

    monkeypatch.setattr(retention, "closed_segments", listed)
    Upkeep(tmp_path, Quotas())._prune_sides()
    writer.close()
    assert side.exists()


def test_what_was_set_aside_is_bounded_too(folder: Path) -> None:
    for i in range(retention.KEPT_EVIDENCE + 5):
        path = folder / f"journal.torn.{i}"
        path.write_bytes(b"half a line")
        os.utime(path, (i, i))
    (folder / "trace-000099.lost").write_bytes(b"x")
    (record,) = Upkeep(folder, Quotas(snapshots=9)).run(now())
    assert record.set_aside == tuple(f"journal.torn.{i}" for i in range(6))
    assert (folder / "trace-000099.lost").exists()


def test_a_file_that_cannot_be_deleted_keeps_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.name in ("trace-000001.rt", "snapshot-000000000029.rts"):
            raise OSError(5, "Input/output error")
        real(self, missing_ok)

    for i in range(retention.KEPT_EVIDENCE + 1):
        (folder / f"journal.torn.{i}").write_bytes(b"half a line")
    keeper = Upkeep(folder, Quotas(trace_hours=hours(45), snapshots=2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        (record,) = keeper.run(now())
    assert segments(folder) == [1, *range(7, 12)]
    assert record.trace == tuple(f"trace-{i:06d}.rt" for i in (0, 2, 3, 4, 5, 6))
    assert record.snapshots == ("snapshot-000000000059.rts",)
    assert len(record.set_aside or ()) == 1
    assert "trace-000001.rt: cannot be deleted: Input/output error" in keeper.fault
    keeper.run(now())
    assert keeper.fault == ""
    assert segments(folder) == list(range(7, 12))


def test_a_disk_that_takes_no_record_is_pruned_of_what_needs_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trace segments are noted before they go; on a full disk the rest goes without a note."""
    for i in range(retention.KEPT_EVIDENCE + 1):
        (folder / f"journal.torn.{i}").write_bytes(b"half a line")

    def refuse(self: Upkeep, doomed: list[Any]) -> None:
        raise OSError(28, "No space left on device")

    keeper = Upkeep(folder, Quotas(trace_hours=0.01, snapshots=2))
    with monkeypatch.context() as patch:
        patch.setattr(Upkeep, "_note_holes", refuse)
        (record,) = keeper.run(now())
    assert len(record.snapshots or ()) == 2
    assert len(record.set_aside or ()) == 1
    assert segments(folder) == list(range(12))
    assert "No space" in keeper.fault


def test_a_disk_that_forces_nothing_is_pruned_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SYNC_EVERY_S", 0.01)
    monkeypatch.setattr(services, "UPKEEP_EVERY_S", 0.05)
    runs, is_failing = [], True

    def sync() -> None:
        if is_failing:
            raise StorageError("run: the trace cannot be written: Input/output error")

    def run(now_ns: int) -> list[UpkeepRecord]:
        runs.append(now_ns)
        return []

    async def story() -> None:
        nonlocal is_failing
        own = services.Services.__new__(services.Services)
        own.slow, own.trace_fault = ThreadPoolExecutor(1), ""
        own.opened = SimpleNamespace(recorder=SimpleNamespace(trace=SimpleNamespace(sync_job=lambda: sync)))  # type: ignore[assignment]
        own.upkeep = SimpleNamespace(run=run)  # type: ignore[assignment]
        task = asyncio.create_task(own._keep_up())
        await until(lambda: bool(runs) or task.done())
        assert not task.done()
        assert "Input/output error" in own.trace_fault
        is_failing = False
        await until(lambda: not own.trace_fault)
        task.cancel()

    asyncio.run(story())


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.01)
