"""A folder that jobs and daemon share: half-written, huge and hostile files, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from connectors.jobs import (
    INTERVAL,
    MAX_REPORT,
    FolderSink,
    FolderSource,
    JobBook,
    ReportFolder,
    decode_advice,
    files,
)
from connectors.jobs.files import Mark
from connectors.jobs.wire import JOB_BURST
from tests.support.builders import START_NS
from twin.catalogue import NS, ActuationError, ConnectorError
from twin.contracts import CommandBatch, Item
from twin.telemetry import CheckpointTold

T = START_NS


class Desk:
    """An inlet that keeps what is left on it."""

    def __init__(self) -> None:
        self.told: list[CheckpointTold] = []
        self.bad: list[tuple[str, str]] = []
        self.lost: list[tuple[str, str]] = []

    def stage(self, items: Sequence[Item], now_ns: int) -> None:
        self.told += [i for i in items if isinstance(i, CheckpointTold)]

    def of(self, source: str, outside: bool = False) -> Self:
        return self

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        raise AssertionError((what, why))

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        self.bad.append((where, why))

    def fail(self, why: str, remedy: str = "") -> None:
        self.bad.append(("", why))

    def drop(self, where: str, why: str, count: int = 1) -> None:
        self.lost.append((where, why))

    @property
    def ids(self) -> list[str]:
        """Of the reports, as the jobs wrote them; and forget them."""
        out, self.told = [e.id.partition("#")[2] for e in self.told], []
        return out


class Office:
    """A source over a folder, with the jobs that run and a clock."""

    def __init__(self, folder: Path, state: Path | None = None, *jobs: str, lag_s: float = 0.0) -> None:
        self.folder, self.desk = folder, Desk()
        self.slots = {job: i for i, job in enumerate(jobs or ("a", "b"))}
        self.now_ns = T
        self.places = ReportFolder(state, lag_s)
        self.places.load()
        self.source = FolderSource(folder, lambda: self.slots, self.places, now_ns=lambda: self.now_ns)

    def look(self) -> list[str]:
        asyncio.run(self.source.read_new(self.desk))
        return self.desk.ids


def line(number: int, **more: Any) -> bytes:
    body = {"v": 1, "id": str(number), "t_ns": T, "interval_s": 600.0, **more}
    return json.dumps(body).encode() + b"\n"


def append(path: Path, *parts: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(parts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "jobs"
    path.mkdir()
    return path


def test_lines_come_once_and_in_order(folder: Path) -> None:
    office, path = Office(folder), folder / "a.reports.jsonl"
    assert office.look() == []
    append(path, line(1), b"\n  \n", line(2))
    append(folder / "b.reports.jsonl", line(9))
    assert office.look() == ["1", "2", "9"]
    assert office.look() == []
    append(path, line(3))
    assert office.look() == ["3"]
    assert office.desk.bad == []


def test_half_a_line_waits_for_its_end(folder: Path) -> None:
    office, path = Office(folder), folder / "a.reports.jsonl"
    whole = line(2)
    append(path, line(1), whole[:20])
    assert office.look() == ["1"]
    assert office.look() == []
    append(path, whole[20:])
    assert office.look() == ["2"]
    append(path, whole[:30], b"\n", line(3))  # a job that died within a line, and came back
    assert office.look() == ["3"]
    ((where, why),) = office.desk.bad
    assert "of a" in where
    assert "not a report" in why


def test_a_job_that_is_not_known_yet_is_heard_once_it_is(folder: Path) -> None:
    office = Office(folder, None, "b")
    append(folder / "a.reports.jsonl", line(1))
    assert office.look() == []
    office.slots["a"] = 5
    assert office.look() == ["1"]


def test_a_restart_goes_on_where_it_was_and_loses_nothing(folder: Path, tmp_path: Path) -> None:
    path, state = folder / "a.reports.jsonl", tmp_path / "places.json"
    office = Office(folder, state)
    append(path, line(1))
    assert office.look() == ["1"]
    append(path, line(2))
    assert office.look() == ["2"]
    # Lines of the last look may not be in the trace yet: they are read again, and count once by their
    # instant.
    again = Office(folder, state)
    assert again.look() in (["2"], ["1", "2"])
    for _ in range(3):
        again.look()
    assert Office(folder, state).look() == []
    append(path, line(3))
    assert Office(folder, state).look() == ["3"]
    assert stat.S_IMODE(state.stat().st_mode) & 0o022 == 0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"files": 3}', '{"files": {"a": [1]}}', '{"files": {"a": ["x", 2]}}',
     '{"files": {"a": [1, -5]}}', "[" * 10_000],
)  # fmt: skip
def test_places_that_cannot_be_read_are_none(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "places.json").write_text(text)
    append(folder / "a.reports.jsonl", line(1))
    assert Office(folder, tmp_path / "places.json").look() == ["1"]


def test_places_that_cannot_be_written_stop_nothing(folder: Path, tmp_path: Path) -> None:
    office = Office(folder, tmp_path / "no such folder" / "places.json")
    for n in range(3):
        append(folder / "a.reports.jsonl", line(n))
        assert office.look() == [str(n)]
    assert [why for _, why in office.desk.bad if "cannot be written" in why] != []


def test_places_of_jobs_that_are_gone_are_forgotten(folder: Path, tmp_path: Path) -> None:
    office = Office(folder, tmp_path / "places.json")
    append(folder / "a.reports.jsonl", line(1))
    office.look()
    del office.slots["a"]
    for _ in range(3):
        office.look()
    assert office.places.marks == {}
    assert json.loads((tmp_path / "places.json").read_text()) == {"files": {}}


def test_a_file_that_is_cut_or_replaced_is_read_anew(folder: Path) -> None:
    office, path = Office(folder), folder / "a.reports.jsonl"
    append(path, line(1), line(2))
    assert office.look() == ["1", "2"]
    path.write_bytes(line(3))
    assert office.look() == ["3"]
    other = folder / "other"
    other.write_bytes(line(4) + line(5) + line(6))
    other.replace(path)
    assert office.look() == ["4", "5", "6"]
    path.unlink()
    assert office.look() == []


def test_what_is_no_plain_file_is_not_read(folder: Path, tmp_path: Path) -> None:
    jobs = ("link", "pipe", "dir", "hard", "dangling", "good", "../up", ".")
    office = Office(folder, None, *jobs)
    secret = tmp_path / "secret"
    secret.write_bytes(line(1))
    (folder / "link.reports.jsonl").symlink_to(secret)
    (folder / "dangling.reports.jsonl").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "pipe.reports.jsonl")
    (folder / "dir.reports.jsonl").mkdir()
    os.link(secret, folder / "hard.reports.jsonl")
    append(tmp_path / "up.reports.jsonl", line(2))
    append(folder / "good.reports.jsonl", line(3))
    append(folder / "stranger.reports.jsonl", line(4))
    append(folder / "..%2Fup.reports.jsonl", line(5))  # not how that name is written
    append(folder / "%2E.%2Fup.reports.jsonl", line(6))
    assert office.look() == ["3", "6"]
    told = {why.partition(".")[0]: why for _, why in office.desk.bad}
    assert sorted(told) == ["dangling", "dir", "hard", "link", "pipe"]
    assert all("expected a file" in why or "is no plain file" in why for why in told.values())


def test_a_file_that_we_may_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office, whole = Office(folder), os.open
    append(folder / "a.reports.jsonl", line(1))
    append(folder / "b.reports.jsonl", line(2))

    def denied(path: Any, *args: Any, **more: Any) -> int:
        if str(path).startswith("a."):
            raise PermissionError(errno.EACCES, "Permission denied")
        return whole(path, *args, **more)

    monkeypatch.setattr(os, "open", denied)
    assert office.look() == ["2"]
    assert office.desk.bad[0][1].startswith("a.reports.jsonl: Permission denied")
    monkeypatch.undo()
    assert office.look() == ["1"]


def test_a_line_without_end_is_passed_over(folder: Path) -> None:
    office, path = Office(folder), folder / "a.reports.jsonl"
    append(path, b"x" * (3 * files.MAX_LOOK), b"\n", line(1))
    append(folder / "b.reports.jsonl", line(2))
    assert office.look() == ["2"]
    got = [n for _ in range(5) for n in office.look()]
    assert got == ["1"]
    assert sum("more than 4096 bytes" in why for _, why in office.desk.bad) == 3


def test_a_long_line_with_an_end_costs_itself_only(folder: Path) -> None:
    office = Office(folder)
    append(folder / "a.reports.jsonl", b"x" * (JOB_BURST + 100), b"\n", line(1))
    assert office.look() == ["1"]
    assert "bytes of report" in office.desk.bad[0][1]


def test_of_a_huge_file_the_end_is_read(folder: Path) -> None:
    office, path = Office(folder), folder / "a.reports.jsonl"
    with path.open("wb") as file:
        file.truncate(10**12)  # with a hole: it takes no room
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line(7))
    got = [n for _ in range(files.MAX_BEHIND // files.MAX_LOOK + 2) for n in office.look()]
    assert got == ["7"]
    ((_, why),) = office.desk.lost
    assert "too far behind" in why
    assert path.stat().st_size > 10**12, "it is the job's own"


def test_a_flood_waits_in_its_file(folder: Path) -> None:
    office, path = Office(folder), folder / "a.reports.jsonl"
    lines = [line(n, reason="x" * 500) for n in range(150)]
    append(path, *lines)
    append(folder / "b.reports.jsonl", line(999))
    got = office.look()
    assert got[-1] == "999", "another job is heard all the same"
    assert 30 < len(got) < 100
    assert "the rest waits" in office.desk.bad[-1][1]
    for _ in range(40):
        office.now_ns += 60 * NS
        got += office.look()
    assert sorted(map(int, got)) == [*range(150), 999], "nothing is lost, nothing comes twice"


def test_all_files_together_bring_no_more_than_a_look_can_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_EVENTS", 5)
    office = Office(folder, None, *(f"j{n}" for n in range(4)))
    for n in range(4):
        append(folder / f"j{n}.reports.jsonl", *(line(10 * n + k) for k in range(3)))
    first = office.look()
    assert len(first) == 5
    assert sorted(first + office.look() + office.look(), key=int) == sorted(
        (str(10 * n + k) for n in range(4) for k in range(3)), key=int)  # fmt: skip


def test_a_look_holds_no_more_than_so_many_bytes_and_everybody_has_a_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LOOK_ALL", 1)
    office = Office(folder, None, *(f"silent{n}" for n in range(50)), "a", "b", "c")
    for name in ("a", "b", "c"):
        append(folder / f"{name}.reports.jsonl", b"\n" * 10, line(ord(name)))
    heard = []
    for _ in range(4):
        heard += office.look()
        append(folder / "a.reports.jsonl", b"nonsense\n")  # one that always has something to say
    assert sorted(heard) == ["97", "98", "99"]


def test_no_folder_is_a_link_that_is_down(tmp_path: Path) -> None:
    office = Office(tmp_path / "none")
    with pytest.raises(ConnectorError, match=r"none: cannot be read: No such file.*jobs\.folder"):
        office.look()
    (tmp_path / "none").write_text("")
    with pytest.raises(ConnectorError, match="Not a directory"):
        office.look()


def test_what_is_read_and_not_staged_is_read_again(folder: Path) -> None:
    office = Office(folder)
    append(folder / "a.reports.jsonl", line(1))

    async def interrupted() -> None:
        task = asyncio.create_task(office.source.read_new(office.desk))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert office.places.marks == {}
    assert office.look() == ["1"]


def advise(slots: dict[int, float], at_s: float = 0.0) -> tuple[CommandBatch, ...]:
    n, now_ns = len(slots), T + round(at_s * NS)
    return (CommandBatch(
        INTERVAL, "checkpoint", 3, np.array(list(slots), np.int32), np.ones(n, np.int32),
        np.arange(n, dtype=np.int64), np.array(list(slots.values())), "due", now_ns, now_ns + 300 * NS,
        now_ns,
    ),)  # fmt: skip


class Desks:
    """A sink over a folder."""

    def __init__(self, folder: Path, *jobs: str) -> None:
        self.folder, self.now_s = folder, T / NS
        self.sink = FolderSink(
            folder, JobBook(lambda slot, generation: jobs[slot] if jobs[slot] else None), lambda: self.now_s
        )

    def send(self, slots: dict[int, float], at_s: float = 0.0) -> None:
        asyncio.run(self.sink.apply(advise(slots, at_s)))

    def read(self, name: str) -> float | None:
        return decode_advice((self.folder / name).read_bytes()).interval_s


def test_advice_is_a_file_that_everybody_can_read(folder: Path) -> None:
    desks = Desks(folder, "a", "ns/b", "", "x" * 300)
    before = os.umask(0o077)  # as a service runs
    try:
        desks.send({0: 600.0, 1: 700.0, 2: 800.0, 3: 900.0})
    finally:
        os.umask(before)
    assert sorted(os.listdir(folder)) == ["a.json", "ns%2Fb.json"]
    assert (desks.read("a.json"), desks.read("ns%2Fb.json")) == (600.0, 700.0)
    assert stat.S_IMODE((folder / "a.json").stat().st_mode) == 0o644
    assert desks.sink.counts == {"advice": 2, "failed": 0, "unfit_names": 1, "swept": 0}
    desks.send({0: 650.0})
    assert desks.read("a.json") == 650.0


def test_links_are_replaced_and_what_is_in_the_way_is_left(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desks = Desks(folder, "link", "dir", "good")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / "link.json").symlink_to(victim)
    (folder / "dir.json").mkdir()
    (folder / "dir.json" / "file").write_text("x")
    for _ in range(2):
        desks.send({0: 600.0, 1: 700.0, 2: 800.0})
    assert victim.read_text() == "mine"
    assert (desks.read("link.json"), desks.read("good.json")) == (600.0, 800.0)
    assert desks.sink.counts["failed"] == 2
    assert len([r for r in caplog.records if "dir.json" in r.message]) == 1, "told once"
    assert sorted(os.listdir(folder)) == ["dir.json", "good.json", "link.json"], "no drafts are left"


def test_a_full_disk_is_told_and_leaves_the_old_advice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desks = Desks(folder, "a", "b")
    desks.send({0: 600.0})

    def full(file: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for write in (full, lambda file, text: len(text) // 2):
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(ActuationError, match=r"No space left.*jobs keep their own intervals"):
            desks.send({0: 700.0, 1: 800.0}, at_s=1)
        monkeypatch.undo()
        assert os.listdir(folder) == ["a.json"]
        assert desks.read("a.json") == 600.0
    assert desks.sink.counts["failed"] == 4
    desks.send({0: 700.0, 1: 800.0}, at_s=2)
    assert (desks.read("a.json"), desks.read("b.json")) == (700.0, 800.0)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    desks = Desks(tmp_path / "none", "a")
    with pytest.raises(ActuationError, match=r"none: No such file.*jobs\.folder"):
        desks.send({0: 600.0})


def test_old_advice_of_ours_is_swept_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    desks = Desks(folder, "a", "old")
    desks.send({1: 600.0})
    for name, text in (("b.json", b"{}"), ("c.json", b"x" * 9000), (".0123.racktwin", b""), ("notes", b"x"),
                       ("other.json", (folder / "old.json").read_bytes())):  # fmt: skip
        (folder / name).write_bytes(text)
    append(folder / "old.reports.jsonl", line(1))
    (folder / "link.json").symlink_to(folder / "old.json")
    long_ago_s = T / NS - 2 * files.KEEP_S
    for name in os.listdir(folder):
        os.utime(folder / name, (long_ago_s, long_ago_s), follow_symlinks=False)
    desks.now_s += files.SWEEP_S
    desks.send({0: 700.0})
    assert sorted(os.listdir(folder)) == [
        "a.json", "b.json", "c.json", "link.json", "notes", "old.reports.jsonl", "other.json"]  # fmt: skip
    assert desks.sink.counts["swept"] == 2


def test_a_report_line_is_never_longer_than_a_message() -> None:
    assert MAX_REPORT <= files.MAX_LOOK // 2
    assert Mark(1, 2).offset == 2
