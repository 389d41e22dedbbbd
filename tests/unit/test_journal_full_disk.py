"""A journal on a full disk: the last word, the reserve, the tick that was held, and ticks without a trace."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.golden_story import Story, engine_for, spec as spec_of_racks
from tests.support.rotated_run import KEEPING, replayed
from twin.catalogue import StorageError
from twin.contracts import OtherRecord
from twin.daemon import Daemon
from twin.run import (
    OPEN,
    Cutter,
    JournalWriter,
    Keeping,
    Recorder,
    TraceReader,
    TraceWriter,
    journal_lines,
    journal_writer,
    resume,
    verify_journal,
)
from twin.run.journal_files import line_head
from twin.telemetry import Frame, SiteChanged, TicksSkipped


def full_disk(after: int) -> Callable[[int, Any], int]:
    """Stands in for a file's `write`: takes `after` bytes, then the disk is full."""
    state = {"left": after}
    real = os.write

    def write(fd: int, data: Any) -> int:
        if state["left"] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(fd, bytes(data)[: state["left"]])
        state["left"] -= taken
        return taken

    return write


class _Filling:
    """A file on a disk that has room for so many bytes more, until the reserve is given back."""

    def __init__(self, file: Any, reserve: Path, room: int) -> None:
        self.file, self.reserve, self.write_ = file, reserve, full_disk(room)

    def write(self, data: Any) -> int:
        if not self.reserve.exists():
            return int(self.file.write(data))
        return self.write_(self.file.fileno(), data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_has_the_last_word_and_no_other(tmp_path: Path, room: int, rotated: bool) -> None:
    writer = JournalWriter(tmp_path, reserve_bytes=2**16)
    reserve = tmp_path / "journal.reserve"
    assert reserve.stat().st_blocks * 512 >= 2**16
    writer.append([writer.chain.line(OtherRecord("finding", {"n": 1}), 7, 70)])
    if rotated:
        writer.rotate()
    writer._file = _Filling(writer._file, reserve, room)  # type: ignore[assignment]
    with pytest.raises(StorageError, match=r"cannot be written: .*No space left"):
        writer.append([writer.chain.line(OtherRecord("command", {"n": i}), 8, 80) for i in range(3)])
    assert not reserve.exists()
    with pytest.raises(StorageError, match="nothing more is written"):
        writer.append([writer.chain.line(OtherRecord("command", {}), 9, 90)])
    writer.close()
    lines = [msgspec.json.decode(x) for x in journal_lines(writer.path)]
    assert [(x["kind"], x["tick"]) for x in lines] == [("finding", 7), ("daemon", 7)]
    assert lines[1]["body"]["held"] == "all commands"
    assert verify_journal(writer.path).fault is None
    again = JournalWriter(tmp_path, reserve_bytes=2**16)
    assert reserve.exists()
    assert again.chain.seq == 2
    again.close()


def test_a_disk_that_is_full_at_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(tmp_path, segment_bytes=1, reserve_bytes=2**16)
    writer.append([writer.chain.line(OtherRecord("finding", {"n": 1}), 7, 70)])
    assert writer.full

    def refuse(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, to: refuse(self))
        with pytest.raises(StorageError, match="cannot begin a new segment"):
            writer.rotate()
    writer.close()
    assert [line_head(x).kind for x in journal_lines(writer.path)] == ["finding", "daemon"]
    assert verify_journal(writer.path).fault is None


def test_no_room_for_the_reserve_is_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_writer.os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match=r"lower quotas\.journal_reserve_mb"):
        JournalWriter(tmp_path, reserve_bytes=2**20)
    assert not (tmp_path / "journal.reserve").exists()


@pytest.mark.long
def test_a_held_tick_is_completed_at_the_next_start(tmp_path: Path) -> None:
    """Its frame is traced, its decision is not written; the last line is the shell's."""
    folder = tmp_path / "run"
    story = Story(30)
    engine = engine_for(story.spec)
    keeping = Keeping(reserve_bytes=2**16, durable=True)
    recorder = Recorder(engine, story.spec, folder, keeping)
    assert recorder.journal is not None
    frames = Cutter(engine, 1.0, lambda now_ns, site_hash: []).frames(story)
    with pytest.raises(StorageError):  # noqa: PT012
        for frame in frames:
            recorder.before(frame)
            decision = engine.tick(frame)
            if frame.tick == 20:
                filling: Any = _Filling(recorder.journal._file, folder / "journal.reserve", 50)
                recorder.journal._file = filling
            recorder.after(engine, decision)
            story.observe(engine, frame, decision)
    recorder.close()
    stopped = engine.state.tick
    assert stopped >= 20
    back = resume(folder, engine_for)
    assert back.engine.checksum() == engine.checksum()
    assert back.last_tick == stopped
    assert verify_journal(folder / OPEN).fault is None
    kinds = [line_head(x).kind for x in journal_lines(folder / OPEN)]
    assert "daemon" in kinds
    outcome, _ = replayed(folder)
    assert outcome.damage == []


@pytest.mark.parametrize("covered,late", [(True, False), (False, False), (False, True)])
def test_ticks_that_were_not_traced(tmp_path: Path, covered: bool, late: bool) -> None:
    """The trace's disk was full for a while; ticks went on, the first of those that are traced again perhaps
    late. A snapshot behind the gap makes it harmless."""
    folder, story = tmp_path / "run", Story(40)
    engine = engine_for(story.spec)
    recorder = Recorder(engine, story.spec, folder, keeping=KEEPING)
    for frame in Cutter(engine, 1.0, lambda now_ns, site_hash: []).frames(story):
        if frame.tick == 10:
            recorder.snapshot_job(engine)()
        if frame.tick == 25 and late:
            frame = replace(frame, events=(*frame.events, TicksSkipped(count=2, why="overload")))
        if not 20 <= frame.tick < 25:
            recorder.before(frame)
        elif recorder.trace is not None:
            recorder.trace._give_up()
        decision = engine.tick(frame)
        recorder.after(engine, decision)
        story.observe(engine, frame, decision)
        if frame.tick == 30 and covered:
            recorder.snapshot_job(engine)()
    recorder.close()
    back = resume(folder, engine_for)
    if covered:
        assert back.faults == []
        assert back.engine.checksum() == engine.checksum()
        return
    assert back.engine.state.tick == 19
    assert back.lost is not None
    assert back.lost[0] == 20
    assert back.lost[1] > 30  # as far as the journal tells
    assert any("ticks 20..24 were not traced" in fault for fault in back.faults)
    assert list(folder.glob("*.lost"))
    assert back.bridge()
    again = resume(folder, engine_for)
    assert again.engine.checksum() == back.engine.checksum()


@pytest.mark.parametrize("full", [True, False])
def test_a_site_that_changes_while_the_disk_is_full_is_named_by_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A start finds the site of its snapshot in the trace, also where nothing was written for a while."""
    spec, later = spec_of_racks(["r1"]), spec_of_racks(["r1", "r2"])
    recorder = Recorder(engine_for(spec), spec, tmp_path / "run", KEEPING)
    assert recorder.trace is not None
    nothing: Any = lambda *_: None  # noqa: E731
    daemon: Any = SimpleNamespace(
        _trace_lost=True, _trace_retry=float("inf"), recorder=recorder, live=SimpleNamespace(counts={}),
        alarms=SimpleNamespace(clear=nothing, condition=nothing),
        services=SimpleNamespace(snapshot_soon=nothing),
    )  # fmt: skip
    with monkeypatch.context() as patch:
        if full:
            patch.setattr(TraceWriter, "_rotate", lambda *_: full_disk(0)(1, b""))
        changed = SiteChanged(site_hash=later.digest(), spec=later.packed())
        Daemon._trace(daemon, Frame(5, 5 * 10**9, 1.0, events=(changed,)))
    recorder.trace.write(Frame(6, 6 * 10**9, 1.0))
    recorder.close()
    reader = TraceReader(tmp_path / "run")
    assert [f.tick for f in reader] == ([6] if full else [5, 6])
    assert {h.site_hash for h in reader.headers} == {later.digest()}
