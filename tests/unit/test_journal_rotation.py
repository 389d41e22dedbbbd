"""A journal that goes on for years: segments, one chain, what was pruned is told, notes between the ticks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.golden_story import Story, engine_for
from tests.support.rotated_run import KEEPING, SECONDS, folder, kept, prune, replayed, run
from twin.catalogue import NS, Divergence, StorageError
from twin.cli.main import main
from twin.config import Quotas
from twin.contracts import OtherRecord
from twin.engine import Engine
from twin.run import (
    OPEN,
    JournalWriter,
    Recorder,
    TraceReader,
    Upkeep,
    closed_segments,
    cut_journal,
    journal_files,
    journal_lines,
    journal_writer,
    last_line,
    open_recorded,
    replay_frames,
    resume,
    verify_journal,
)
from twin.run.journal_files import edges, line_head

__all__ = ["folder", "kept"]
LONG = b"a\n" + b"b" * 300_000 + b"\ntorn"


@pytest.mark.long
def test_a_chain_runs_through_all_segments(kept: tuple[Path, Engine]) -> None:
    folder, _ = kept
    closed = closed_segments(folder)
    assert len(closed) > 3
    assert [p.name for p in closed] == [f"journal-{i:06d}.jsonl" for i in range(len(closed))]
    verdict = verify_journal(folder / OPEN)
    lines = list(journal_lines(folder / OPEN))
    assert (verdict.fault, verdict.lines, verdict.segments) == (None, len(lines), len(closed) + 1)
    assert [line_head(x).seq for x in lines] == list(range(len(lines)))
    for path in closed[1:]:  # each says under what it was made
        assert line_head(path.read_bytes().splitlines()[0]).kind == "manifest"
        assert path.stat().st_size < 3000 + 20_000
    for since in (0, 1, len(lines) // 2, len(lines) - 1, len(lines)):
        assert list(journal_lines(folder / OPEN, since)) == lines[since:]


def test_what_lies_before_is_not_read(folder: Path) -> None:
    """A start and `show` of the newest lines must not walk years of journal."""
    first, *_ = closed_segments(folder)
    since = edges(closed_segments(folder)[-1])[0]
    expected = list(journal_lines(folder / OPEN, since))
    first.write_bytes(b"nonsense\n")
    assert list(journal_lines(folder / OPEN, since)) == expected
    JournalWriter(folder).close()


@pytest.mark.long
def test_replay_passes_over_notes_and_segments(kept: tuple[Path, Engine]) -> None:
    folder, engine = kept
    outcome, again = replayed(folder)
    lines = [line_head(x).kind for x in journal_lines(folder / OPEN)]
    shell = sum(kind in ("access", "alarm", "daemon") for kind in lines) + lines[1:].count("manifest")
    assert outcome.damage == []
    assert outcome.compared_lines == len(lines) - shell
    assert shell > 15
    assert again.checksum() == engine.checksum()


def test_a_tampered_note_breaks_the_chain(folder: Path) -> None:
    path = closed_segments(folder)[1]
    data = path.read_bytes()
    assert b"somebody" in data or b"ada" in data
    path.write_bytes(data.replace(b"somebody", b"nobody!!").replace(b'"ada"', b'"eve"'))
    verdict = verify_journal(folder / OPEN)
    assert "the chain breaks" in (verdict.fault or "")
    assert verdict.file == path.name
    bad = path.read_bytes().splitlines()[verdict.line_no - 1]
    assert b"nobody!!" in bad or b'"eve"' in bad


def test_a_forged_decision_still_differs(folder: Path) -> None:
    """Rechained as well as can be, a changed decision shows in the replay."""
    lines = list(journal_lines(folder / OPEN))
    chain = journal_writer.Chain()
    out = []
    for line in lines:
        e = msgspec.json.decode(line)
        if e["kind"] == "event" and e["tick"] > 10:
            e["body"]["event"]["author"] = "eve"
        out.append(chain.line(OtherRecord(e["kind"], e["body"]), e["tick"], e["now_ns"]))
    for path in closed_segments(folder):
        path.unlink()
    (folder / OPEN).write_bytes(b"".join(x + b"\n" for x in out))
    assert verify_journal(folder / OPEN).fault is None
    with pytest.raises(Divergence):
        replayed(folder)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_segment_is_found(folder: Path, which: int) -> None:
    closed = closed_segments(folder)
    closed[which].unlink()
    verdict = verify_journal(folder / OPEN)
    if which == 0:
        assert verdict.unexplained
        assert "no line shows" in (verdict.fault or "")
        assert cut_journal(folder / OPEN, verdict) == []
    else:
        assert "the chain breaks" in (verdict.fault or "")
        assert verdict.file == closed[which - 1].name
    assert main(["journal", "verify", str(folder)]) == 1


def test_the_link_to_the_segment_before_is_checked_at_a_start(folder: Path) -> None:
    last = closed_segments(folder)[-1]
    data = last.read_bytes()
    last.write_bytes(data[:-4] + b"7" + data[-3:])
    with pytest.raises(StorageError, match="expected an intact journal"):
        JournalWriter(folder)
    assert main(["journal", "verify", str(folder), "--cut"]) == 0
    assert verify_journal(folder / OPEN).fault is None
    assert any(folder.glob("journal*.torn"))
    writer = JournalWriter(folder)
    writer.append([writer.chain.line(OtherRecord("daemon", {}), 1, 1)])
    writer.close()
    assert verify_journal(folder / OPEN).fault is None


def test_pruned_segments_are_told_and_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = closed_segments(folder)
    keeper = prune(folder, journal_mb=0, snapshots=1)
    assert keeper.counts["journal_segments"] == len(closed) - 1
    assert [p.name for p in closed_segments(folder)] == [closed[-1].name]
    verdict = verify_journal(folder / OPEN)
    assert verdict.fault is None
    assert verdict.first_seq > 0
    assert verdict.pruned is not None
    assert verdict.pruned.file == closed[-2].name
    assert verdict.pruned.last_seq == verdict.first_seq - 1
    assert main(["journal", "verify", str(folder)]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert f"begins at line {verdict.first_seq + 1:,}: segments up to {closed[-2].name}" in said
    assert f"recorded in line {verdict.pruned.seq + 1:,}" in said
    assert main(["journal", "verify", str(folder), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["first_line"] == verdict.first_seq + 1
    assert main(["journal", "show", str(folder), "--limit", "3"]) == 0


def test_what_a_start_needs_is_not_pruned(folder: Path) -> None:
    """Lines behind the oldest snapshot that is kept stay, whatever the quota says."""
    prune(folder, journal_mb=0, snapshots=3)
    kept = min(int(p.stem[9:]) for p in folder.glob("snapshot-*.rts"))
    first = next(line_head(x) for x in journal_lines(folder / OPEN))
    assert first.seq > 0
    assert first.tick <= kept
    for path in sorted(folder.glob("snapshot-*.rts"))[1:]:
        path.unlink()  # the newer ones turn out to be damaged
    back = resume(folder, engine_for)
    assert (back.faults, back.snapshot_tick) == ([], kept)


def test_nothing_is_deleted_that_was_not_announced(folder: Path) -> None:
    keeper = Upkeep(folder, Quotas(journal_mb=0))
    before = closed_segments(folder)
    assert keeper.run(0)
    keeper.run(0)  # nobody wrote the note down
    assert closed_segments(folder) == before
    assert Upkeep(folder, Quotas(journal_mb=0)).run(0)  # nor after a crash


@pytest.mark.long
def test_replay_compares_from_where_both_are_kept(folder: Path) -> None:
    whole, engine = replayed(folder)
    prune(folder, journal_mb=0)
    outcome, again = replayed(folder)
    assert outcome.damage == []
    assert 0 < outcome.compared_lines < whole.compared_lines
    assert again.checksum() == engine.checksum()


def test_replay_begins_at_a_snapshot_where_the_trace_was_pruned(
    folder: Path, kept: tuple[Path, Engine]
) -> None:
    first = sorted(folder.glob("trace-*.rt"))[0]
    later = TraceReader(sorted(folder.glob("trace-*.rt"))[1]).first_header().first_tick
    (folder / "pruned.jsonl").write_text(f"[0,{later - 1}]\n")
    first.unlink()
    engine, _, since = open_recorded(folder, engine_for)
    assert since is not None
    assert since.tick >= later - 1
    outcome = replay_frames(engine, TraceReader(folder), folder / OPEN, since=since)
    assert outcome.damage == []
    assert outcome.ticks == kept[1].state.tick - since.tick
    assert outcome.compared_lines > 0
    assert engine.checksum() == kept[1].checksum()
    for path in folder.glob("snapshot-*.rts"):
        path.unlink()
    with pytest.raises(StorageError, match="what was before is pruned, and no snapshot"):
        open_recorded(folder, engine_for)


def test_a_hole_is_told_and_ends_the_replay(folder: Path) -> None:
    paths = sorted(folder.glob("trace-*.rt"))
    assert len(paths) > 2
    first, last = (TraceReader(p).first_header().first_tick for p in paths[1:3])
    paths[1].unlink()
    outcome, _ = replayed(folder)
    assert outcome.ticks == first
    gap = f"gap: ticks {first}..{last - 1} are missing: never traced, or deleted"
    assert outcome.damage == [f"{gap}; what lies behind cannot be judged"]
    (folder / "pruned.jsonl").write_text(f"[{first},{last - 1}]\n")
    outcome, _ = replayed(folder)
    assert outcome.damage == [
        f"gap: ticks {first}..{last - 1} were pruned; what lies behind cannot be judged"
    ]
    assert outcome.compared_lines > 0


@pytest.mark.long
def test_a_killed_run_goes_on_across_segments(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = run(folder, finish=False)
    prune(folder, journal_mb=0)
    back = resume(folder, engine_for)
    assert back.faults == []
    assert back.engine.checksum() == killed.checksum()
    recorder = Recorder(back.engine, back.spec, folder, keeping=KEEPING, resumed=back.as_manifest())
    recorder.note(OtherRecord("daemon", {"started": "again"}))
    story = Story(SECONDS)
    list(story)
    for k in range(20):
        frame = journal_frame(back.last_tick + 1 + k, back.last_ns + (k + 1) * NS)
        recorder.before(frame)
        recorder.after(back.engine, back.engine.tick(frame))
    recorder.finish(back.engine)
    assert verify_journal(folder / OPEN).fault is None
    manifests = [x for x in journal_lines(folder / OPEN) if line_head(x).kind == "manifest"]
    assert any(b'"resumed":{"snapshot_tick"' in x for x in manifests)
    outcome, again = replayed(folder)
    assert outcome.damage == []
    assert again.checksum() == back.engine.checksum()


def journal_frame(tick: int, now_ns: int) -> Any:
    from twin.telemetry import Frame

    return Frame(tick, now_ns, 1.0)


def test_between_the_two_steps_of_a_rotation(folder: Path) -> None:
    """Renamed, and killed before the new file was there."""
    whole = list(journal_lines(folder / OPEN))
    (folder / OPEN).rename(folder / f"journal-{len(closed_segments(folder)):06d}.jsonl")
    assert list(journal_lines(folder / OPEN)) == whole
    assert verify_journal(folder / OPEN).fault is None
    writer = JournalWriter(folder)
    assert writer.chain.seq == len(whole)
    writer.close()
    assert resume(folder, engine_for).faults == []


def test_a_rotation_while_somebody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(tmp_path, segment_bytes=1)
    writer.append([writer.chain.line(OtherRecord("daemon", {"n": 0}), 0, 0)])
    found = journal_files.closed_segments

    def meanwhile(folder: Path) -> list[Path]:
        monkeypatch.setattr(journal_files, "closed_segments", found)
        writer.rotate()
        return found(folder)

    monkeypatch.setattr(journal_files, "closed_segments", meanwhile)
    assert [line_head(x).seq for x in journal_lines(writer.path)] == [0]
    writer.close()


def test_the_last_line_however_long(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data, line in (
        (b"", b""), (b"torn", b""), (b"a\n", b"a"), (b"a\nb\n", b"b"), (LONG, b"b" * 300_000),
        (b"b" * 70_000 + b"\n", b"b" * 70_000), (b"\n\n", b""),
    ):  # fmt: skip
        path.write_bytes(data)
        with path.open("rb") as file:
            got, at = last_line(file)
        assert got == line
        assert data[at : at + len(line)] == line


def test_unknown_notes_do_not_look_like_decisions(tmp_path: Path) -> None:
    engine = engine_for(Story().spec)
    recorder = Recorder(engine, Story().spec, tmp_path)
    recorder.note(OtherRecord("finding", {"id": "x"}))
    recorder.close()
    last = msgspec.json.decode(list(journal_lines(tmp_path / OPEN))[-1])
    assert (last["kind"], last["body"]) == ("daemon", {"what": "finding", "id": "x"})
