"""The files of a run: the trace after a restart, a full disk, a deletion; the newest whole snapshot."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twin.catalogue import NS, StorageError
from twin.engine import snapshot
from twin.run import TraceReader, TraceWriter, journal_lines, storage, write_snapshot
from twin.run.storage import KEEP_SNAPSHOTS
from twin.telemetry import Frame, TableUpdate, TicksSkipped

T0 = 1_700_000_000 * NS


def frame(tick: int) -> Frame:
    q = np.array([[tick * 7, tick * tick]], np.int32)
    return Frame(
        tick, T0 + tick * NS, 1.0, (TableUpdate("gpu", np.array([2], np.int32), None, q, np.full(2, T0)),)
    )


def writer_of(folder: Path, ticks: range, **more: Any) -> TraceWriter:
    writer = TraceWriter(folder, "hash", b"spec", **more)
    for tick in ticks:
        writer.write(frame(tick))
    return writer


def read(folder: Path) -> tuple[dict[int, list[int]], list[str]]:
    reader = TraceReader(folder)
    return {f.tick: f.updates[0].q[0].tolist() for f in reader}, reader.damage


def expected(ticks: Any) -> dict[int, list[int]]:
    return {t: [t * 7, t * t] for t in ticks}


def test_a_restart_opens_the_next_segment(tmp_path: Path) -> None:
    writer_of(tmp_path, range(3)).close()
    writer_of(tmp_path, range(3, 6)).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace-000000.rt", "trace-000001.rt"]
    assert read(tmp_path) == (expected(range(6)), [])


def test_segments_go_on_behind_the_last_though_the_first_were_deleted(tmp_path: Path) -> None:
    for start in (0, 2, 4):
        writer_of(tmp_path, range(start, start + 2)).close()
    (tmp_path / "trace-000000.rt").unlink()
    (tmp_path / "trace-000001.rt").unlink()
    (tmp_path / "trace-notes.rt").write_bytes(b"")
    writer_of(tmp_path, range(6, 8)).close()
    (tmp_path / "trace-notes.rt").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace-000002.rt", "trace-000003.rt"]
    assert read(tmp_path) == (expected(range(4, 8)), [])


def test_a_changed_site_has_a_segment_of_its_own(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, range(2))
    writer.change_site("other", b"two")
    writer.write(frame(2))
    writer.close()
    reader = TraceReader(tmp_path)
    assert [f.tick for f in reader] == [0, 1, 2]
    assert [(h.site_hash, h.spec, h.first_tick) for h in reader.headers] == [
        ("hash", b"spec", 0),
        ("other", b"two", 2),
    ]


class Full:
    """A file on a full disk: takes `room` writes, then fails; what was taken is in the real one."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= 1
        if self.room < 0:
            self.file.write(data[: len(data) // 2 if self.room == -1 else 0])
            raise OSError(28, "No space left on device")
        return int(self.file.write(data))

    def close(self) -> None:
        self.file.close()
        raise OSError(28, "No space left on device")


def test_a_frame_that_the_disk_refused_spoils_no_later_one(tmp_path: Path) -> None:
    """No later frame may build on a lost one: the next begins a segment of its own, with a keyframe."""
    writer = writer_of(tmp_path, range(3))
    writer._file = Full(writer._file, 1)  # type: ignore[assignment]
    writer.write(frame(3))
    with pytest.raises(StorageError, match="the trace cannot be written"):
        writer.write(frame(4))
    for tick in (5, 6):
        writer.write(frame(tick))
    writer.close()
    got, damage = read(tmp_path)
    assert got == expected([0, 1, 2, 3, 5, 6])
    assert damage == []  # the half record was taken back
    reader = TraceReader(tmp_path)
    list(reader)
    assert reader.gaps == ["gap: ticks 4..4 are missing: never traced, or deleted"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path, "hash", b"spec")
    (tmp_path / "trace-000000.rt").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        writer.write(frame(0))
    (tmp_path / "trace-000000.rt").rmdir()
    writer.write(frame(1))
    writer.sync()
    assert read(tmp_path)[0] == expected([1])  # on the disk, not only in the process
    writer.close()
    writer.close()
    writer.sync()


def test_bytes_written_are_those_of_the_records(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, range(50), segment_bytes=400)
    writer.close()
    sizes = [p.stat().st_size for p in sorted(tmp_path.iterdir())]
    assert len(sizes) > 3
    assert writer.bytes_written == sum(sizes) - len(sizes) * len(storage.MAGIC)
    assert max(sizes) < 400 + 300  # one frame over, not more


def test_snapshots_keep_the_newest_and_come_back(tmp_path: Path) -> None:
    for tick in (9, 10, 100, 1_000_000):
        write_snapshot(tmp_path / "run", tick, {"tick": tick})
    assert len(list((tmp_path / "run").iterdir())) == KEEP_SNAPSHOTS
    newest = max((tmp_path / "run").iterdir())
    assert snapshot.decode(newest.read_bytes()) == {"tick": 1_000_000}


def test_a_snapshot_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshot(tmp_path, 1, {"tick": 1})

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="cannot be written"):
        write_snapshot(tmp_path, 2, {"tick": 2})
    (kept,) = tmp_path.iterdir()
    assert (kept.name, snapshot.decode(kept.read_bytes())) == ("snapshot-000000000001.rts", {"tick": 1})


def test_a_segment_ends_with_its_time(tmp_path: Path) -> None:
    writer_of(tmp_path, range(25), segment_s=10.0).close()
    paths = sorted(tmp_path.glob("*.rt"))
    assert [TraceReader(p).first_header().first_tick for p in paths] == [0, 10, 20]
    assert read(tmp_path) == (expected(range(25)), [])


def test_a_disk_that_stays_full_leaves_no_pile_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(tmp_path, range(3))
    real = storage.record

    def refuse(payload: bytes) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "record", refuse)
        for tick in range(3, 40):
            with pytest.raises(StorageError, match="the trace cannot be written"):
                writer.write(frame(tick))
    assert storage.record is real
    for tick in range(40, 43):
        writer.write(frame(tick))
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace-000000.rt", "trace-000001.rt"]
    assert read(tmp_path) == (expected([0, 1, 2, 40, 41, 42]), [])


def test_the_trace_is_forced_to_the_disk_from_another_thread(tmp_path: Path) -> None:
    """While frames are written and segments change; a sync that comes late syncs what it was asked for."""
    writer = TraceWriter(tmp_path, "hash", b"spec", segment_bytes=500)
    assert writer.sync_job() is None
    ended = threading.Event()
    faults: list[BaseException] = []

    def keep_syncing() -> None:
        try:
            while not ended.is_set():
                writer.sync()
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=keep_syncing)
    thread.start()
    for tick in range(300):
        writer.write(frame(tick))
    job = writer.sync_job()
    writer.close()
    ended.set()
    thread.join(30)
    assert job is not None
    job()
    assert faults == []
    assert read(tmp_path) == (expected(range(300)), [])


def test_holes_are_joined_and_bad_lines_are_none(tmp_path: Path) -> None:
    assert storage.read_holes(tmp_path) == []
    (tmp_path / "pruned.jsonl").write_bytes(b"[10,19]\nnonsense\n[0,9]\n[30,39]\n[32,33]\n[40,\n\xff\n")
    assert storage.read_holes(tmp_path) == [(0, 19), (30, 39)]


def test_a_frame_that_tells_of_skipped_ticks_is_behind_no_gap(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, range(2))
    writer.write(dataclasses.replace(frame(9), events=(TicksSkipped(count=7, why="restart"),)))
    writer.close()
    reader = TraceReader(tmp_path)
    assert [f.tick for f in reader] == [0, 1, 9]
    assert reader.gaps == []


def test_nothing_to_read() -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        list(journal_lines(Path("/nowhere/journal.jsonl")))
    with pytest.raises(StorageError, match="cannot be read"):
        list(TraceReader(Path("/nowhere/trace-1.rt")))
    with pytest.raises(StorageError, match="cannot be read"):
        TraceReader(Path("/nowhere/trace-1.rt")).first_header()
