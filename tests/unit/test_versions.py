"""One version up and one version down: what was written before is read, what comes after is left alone.

The next version is made by patching: it counts its formats one higher and reads the present ones too, as the
versions of formats promise. What it wrote, this version refuses, by name, and touches nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden_story import engine_for, spec
from twin.catalogue import NS, StorageError
from twin.contracts import Finding, OtherRecord
from twin.daemon import alarms
from twin.daemon.alarms import AlarmBook
from twin.engine import Engine, snapshot
from twin.run import (
    OPEN,
    JournalWriter,
    Keeping,
    Recorder,
    TraceReader,
    journal,
    journal_files,
    replay,
    replay_frames,
    resume,
    storage,
    trace,
    verify_journal,
)
from twin.telemetry import Frame

T0 = 1_700_000_000 * NS


@contextlib.contextmanager
def next_version(*parts: str) -> Iterator[None]:
    """A release in which these formats were counted up, and the ones before are still read."""
    with pytest.MonkeyPatch.context() as patch:
        if "trace" in parts:
            patch.setattr(trace, "READS", (trace.FORMAT, trace.FORMAT + 1))
            patch.setattr(trace, "FORMAT", trace.FORMAT + 1)
            patch.setattr(storage, "FORMAT", trace.FORMAT)
        if "journal" in parts:
            patch.setattr(journal_files, "READS", (journal.FORMAT, journal.FORMAT + 1))
            patch.setattr(replay, "FORMAT", journal.FORMAT + 1)
        if "alarms" in parts:
            patch.setattr(alarms, "READS", (alarms.FORMAT, alarms.FORMAT + 1))
            patch.setattr(alarms, "FORMAT", alarms.FORMAT + 1)
        if "snapshot" in parts:
            patch.setattr(snapshot, "FORMAT", snapshot.FORMAT + 1)
        yield


def go_on(folder: Path, ticks: int = 10) -> Engine:
    """Start, or start again, and tick for a while; killed rather than ended."""
    keeping = Keeping(journal_bytes=1500, reserve_bytes=0, trace_s=5.0)
    first, engine, site, resumed = 0, engine_for(spec(["r1"])), spec(["r1"]), None
    if any(folder.glob("trace-*.rt")):
        back = resume(folder, engine_for)
        assert back.faults == []
        first, engine, resumed = back.last_tick + 1, back.engine, {"last_tick": back.last_tick}
    recorder = Recorder(engine, site, folder, keeping=keeping, resumed=resumed)
    for tick in range(first, first + ticks):
        frame = Frame(tick, T0 + tick * NS, 1.0)
        recorder.before(frame)
        recorder.after(engine, engine.tick(frame))
        recorder.note(OtherRecord("daemon", {"tick": tick, "padding": "x" * 200}))
    recorder.snapshot_job(engine)()
    recorder.close()
    return engine


def content(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.blake2b(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@pytest.mark.parametrize("parts", [("trace",), ("journal",), ("trace", "journal")])
def test_after_an_upgrade_the_run_goes_on(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """Started under the present version, gone on with under the next: one run, one chain, one replay."""
    go_on(tmp_path)
    with next_version(*parts):
        engine = go_on(tmp_path)
        assert engine.state.tick == 19
        assert verify_journal(tmp_path / OPEN).fault is None
        again = engine_for(spec(["r1"]))
        # The first manifest was made by the version before: a comparison of it tells so.
        outcome = replay_frames(again, TraceReader(tmp_path), None)
        assert outcome.damage == []
        assert outcome.ticks == 20
        assert again.checksum() == engine.checksum()


@pytest.mark.parametrize("part", ["trace", "journal", "snapshot"])
@pytest.mark.parametrize("only", ["all of it", "the last start"])
def test_what_the_next_version_wrote_is_left_alone(tmp_path: Path, part: str, only: str) -> None:
    if only == "the last start":
        go_on(tmp_path)
    with next_version(part):
        if part == "snapshot" and only == "the last start":
            resume_of = go_on_from_old_snapshot
        else:
            resume_of = go_on
        resume_of(tmp_path)
    with (tmp_path / OPEN).open("ab") as file:
        file.write(b'{"torn')  # even what would be cut off stays
    before = content(tmp_path)
    with pytest.raises(StorageError) as caught:
        resume(tmp_path, engine_for)
    said = str(caught.value)
    assert f"{part} format {FORMATS[part] + 1}" in said
    assert str(tmp_path) in said
    assert "start the version that wrote it" in said
    assert content(tmp_path) == before


FORMATS = {"trace": trace.FORMAT, "journal": journal.FORMAT, "snapshot": snapshot.FORMAT}


def go_on_from_old_snapshot(folder: Path) -> Engine:
    """Snapshots of the version before are the snapshot module's to read; here the newest is simply newer."""
    newest = max(folder.glob("snapshot-*.rts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "FORMAT", FORMATS["snapshot"])
        data = snapshot.decode(newest.read_bytes())
    (folder / "snapshot-000000000099.rts").write_bytes(snapshot.encode(data))
    return engine_for(spec(["r1"]))


def test_a_trace_of_another_catalogue_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records name signals by rows that mean something else now."""
    go_on(tmp_path)
    before = content(tmp_path)
    monkeypatch.setattr(trace, "CATALOGUE_HASH", "another")
    with pytest.raises(StorageError, match="start the version that wrote it"):
        resume(tmp_path, engine_for)
    assert content(tmp_path) == before


def test_a_writer_does_not_go_on_with_a_later_journal(tmp_path: Path) -> None:
    with next_version("journal"):
        go_on(tmp_path)
    with pytest.raises(StorageError, match=f"journal format {journal.FORMAT + 1}"):
        JournalWriter(tmp_path)
    assert verify_journal(tmp_path / OPEN).fault is None  # the chain can be walked all the same


def test_a_reader_refuses_a_later_trace(tmp_path: Path) -> None:
    with next_version("trace"):
        go_on(tmp_path)
    reader = TraceReader(tmp_path)
    with pytest.raises(StorageError, match=f"trace format {trace.FORMAT + 1}; expected {trace.FORMAT}"):
        reader.first_header()
    assert list(reader) == []
    assert "trace format" in reader.damage[0]


def test_a_header_with_fields_that_we_do_not_know(tmp_path: Path) -> None:
    """A later version may say more, or say it otherwise: its number is read first."""
    import msgspec
    import zstandard

    packed = zstandard.compress(msgspec.msgpack.encode({"format": trace.FORMAT + 1, "site": [1, 2]}))
    with pytest.raises(trace.OtherFormat, match="trace format"):
        trace.TraceDecoder().header(packed)


@pytest.mark.parametrize("move", ["up", "down"])
def test_the_book_of_alarms(tmp_path: Path, move: str) -> None:
    def used(check: Callable[[AlarmBook], Any]) -> None:
        book = AlarmBook(tmp_path)
        book.update([Finding("a", "warning", "t", (), (), 1.0)], T0)
        check(book)
        book.acknowledge("a", "ada", "on it")

    if move == "up":
        used(lambda book: None)
        with next_version("alarms"):
            used(lambda book: book.listing()[0]["ack_author"] == "ada" or pytest.fail("forgotten"))
    with next_version("alarms"):
        used(lambda book: None)
    before = content(tmp_path)
    with pytest.raises(StorageError, match="start the version that wrote it"):
        AlarmBook(tmp_path)
    assert content(tmp_path) == before
