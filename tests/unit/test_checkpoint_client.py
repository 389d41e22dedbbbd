"""The client in a training job: it obeys a folder, reports there, and nothing harms the job."""

from __future__ import annotations

import math
import os
import time
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import racktwin_client.advisor as client
from racktwin_client import wires
from racktwin_client.advisor import Advisor

from tests.support.checkpoint_advice import advice, made, put, reports, wait

__all__ = ["made"]


def test_it_obeys_a_folder_and_reports_there(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    advisor = made()
    assert advisor.interval_s == 1000.0
    put(tmp_path, advice(interval_s=0.01))
    wait(lambda: advisor.interval_s == 0.01)
    wait(lambda: advisor.due(1))
    with advisor.saving() as save:
        pass
    wait(lambda: any(r["save_s"] > 0 for r in reports(tmp_path)))
    told = next(r for r in reports(tmp_path) if r["save_s"] > 0)
    assert (told["tier"], told["began_ns"], told["interval_s"]) == ("durable", save.began_ns, 0.01)
    assert told["save_s"] == told["block_s"] == told["flush_s"] > 0
    (tmp_path / "j.json").unlink()  # taken back
    wait(lambda: advisor.interval_s == 1000.0)
    wait(lambda: reports(tmp_path)[-1]["interval_s"] == 1000.0)
    assert len({r["id"] for r in reports(tmp_path)}) == len(reports(tmp_path))


def test_advice_that_is_not_renewed_ends(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    put(tmp_path, advice(interval_s=5.0, lease_s=1.0))
    advisor = made()
    wait(lambda: advisor.interval_s == 5.0)
    wait(lambda: advisor.interval_s == 1000.0)


def test_garbage_leaves_what_is_held_and_says_so(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    put(tmp_path, advice(interval_s=5.0))
    advisor = made()
    wait(lambda: advisor.interval_s == 5.0)
    put(tmp_path, b"\x00garbage\n\x1b[31m")
    wait(lambda: "expected advice" in advisor.problem)
    assert advisor.interval_s == 5.0
    assert advisor.problem.isprintable()


def test_a_background_save_counts_when_it_is_durable(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    advisor = made()
    with advisor.saving(asynchronous=True) as save:
        pass
    time.sleep(0.05)
    with advisor.saving("memory") as other:
        pass
    advisor.durable(save.began_ns)
    advisor.durable(save.began_ns)
    advisor.durable(12345)
    wait(lambda: len([r for r in reports(tmp_path) if r["began_ns"]]) == 2)
    memory, durable = (r for r in reports(tmp_path) if r["began_ns"])
    assert (memory["tier"], memory["began_ns"]) == ("memory", other.began_ns)
    assert durable["began_ns"] == save.began_ns
    assert durable["flush_s"] == durable["save_s"] >= 0.05 > durable["block_s"]


def test_steps_are_counted_from_where_a_restart_begins() -> None:
    advisor = Advisor("j", "", own_every_steps=3, rank=0)
    advisor.restored()
    assert [advisor.due(step) for step in range(500, 504)] == [False, False, True, False]


def test_restarts_are_told(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    advisor = made()
    for given in (12.0, 0.0, math.nan, -1.0):
        advisor.restored(given)
    wait(lambda: len([r for r in reports(tmp_path) if r["restart_s"]]) == 4)
    told = [r["restart_s"] for r in reports(tmp_path) if r["restart_s"]]
    assert told[0] == 12.0
    assert all(0 < t < 1e5 for t in told)


@pytest.mark.parametrize(
    ("given", "told"),
    [(12.5, 12.5), (1e9, 0.0), (math.inf, 0.0), (-1.0, 0.0), (math.nan, 0.0), ("fast", 0.0), (None, 0.0)],
)
def test_progress_is_told_once_and_never_harms(
    tmp_path: Path, made: Callable[..., Advisor], given: Any, told: float
) -> None:
    advisor = made()
    wait(lambda: len(reports(tmp_path)) > 0)  # the first one, of the interval
    advisor.progress_per_s = advisor.remaining_s = given
    advisor.restored(1.0)
    advisor.restored(2.0)
    wait(lambda: len([r for r in reports(tmp_path) if r["restart_s"]]) == 2)
    found = [r.get("progress_per_s", 0.0) for r in reports(tmp_path) if r["restart_s"]]
    assert found == [told, 0.0]
    rest = [r.get("remaining_s", 0.0) for r in reports(tmp_path) if r["restart_s"]]
    assert rest == [told, 0.0]


def test_a_save_that_raises_goes_through_and_is_not_told(
    tmp_path: Path, made: Callable[..., Advisor]
) -> None:
    advisor = made()
    with pytest.raises(OSError, match="full"), advisor.saving():
        raise OSError("the disk is full")
    advisor.close()
    assert not any(r["began_ns"] for r in reports(tmp_path))


@pytest.mark.parametrize(
    "source",
    ["file:///no/such/folder", "file://elsewhere/x", "ftp://x", "nonsense", "http://[", "http://h:port", "://",
     "http://127.0.0.1:1", "https://127.0.0.1:1"],
)  # fmt: skip
def test_whatever_the_source_is_the_job_trains_on(source: str, made: Callable[..., Advisor]) -> None:
    advisor = made(source, own_interval_s=0.01)
    wait(lambda: advisor.due("no number"))
    with advisor.saving():
        pass
    wait(lambda: advisor.due(3))
    advisor.durable(0)
    advisor.restored()
    wait(lambda: advisor.problem)


def test_things_in_the_place_of_files(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    os.mkfifo(tmp_path / "j.json")
    os.mkfifo(tmp_path / "j.reports.jsonl")
    advisor = made(own_interval_s=0.01)
    wait(lambda: "expected advice" in advisor.problem)
    wait(advisor.due)
    (tmp_path / "j.json").unlink()
    (tmp_path / "j.json").mkdir()
    (tmp_path / "j.reports.jsonl").unlink()
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "j.reports.jsonl").symlink_to(tmp_path / "elsewhere")
    wait(lambda: "IsADirectoryError" in advisor.problem)
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_reports_and_their_file_stay_bounded(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    advisor = made("file:///no/such/folder")
    for _ in range(1000):
        with advisor.saving(asynchronous=True):
            pass
        with advisor.saving():
            pass
    assert len(advisor._waiting) <= client.MAX_REPORTS
    assert len(advisor._flushing) <= client.MAX_OPEN
    wire = wires.FolderWire(str(tmp_path), "j")
    line = b"x" * 1000
    for _ in range(1100):
        wire.send(line)
    assert (tmp_path / "j.reports.jsonl").stat().st_size <= wires.MAX_REPORT_FILE + 2000


def test_a_line_that_was_torn_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, real = wires.FolderWire(str(tmp_path), "j"), open

    class Half:
        def __init__(self, handle: int, *more: Any, **how: Any) -> None:
            self.file = real(handle, *more, **how)

        def __enter__(self) -> Any:
            return types.SimpleNamespace(write=lambda line: self.file.write(line[:4]))

        def __exit__(self, *_: object) -> None:
            self.file.close()

    monkeypatch.setattr(wires, "open", Half, raising=False)
    with pytest.raises(OSError, match="whole"):
        wire.send(b'{"v":1}')
    monkeypatch.delattr(wires, "open")
    wire.send(b'{"v":2}')
    wire.send(b'{"v":3}')
    assert (tmp_path / "j.reports.jsonl").read_bytes() == b'{"v"\n{"v":2}\n{"v":3}\n'


def test_retries_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, slept = [], [0.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: slept[0], time_ns=time.time_ns, sleep=lambda s: slept.__setitem__(0, slept[0] + s)
    )
    advisor = Advisor("j", "", own_interval_s=9.0, poll_s=15.0)
    monkeypatch.setattr(client, "time", clock)

    def fetch() -> bytes:
        asked.append(slept[0])
        advisor._closing = len(asked) >= 12
        raise OSError(f"gone {len(asked)}")

    monkeypatch.setattr(advisor, "_wire", types.SimpleNamespace(fetch=fetch, send=lambda body: None))
    advisor._run()
    gaps = [b - a for a, b in pairwise(asked)]
    assert 20 < gaps[0] < 40
    assert all(230 < gap < 365 for gap in gaps[5:10])


def test_a_token_is_never_told(monkeypatch: pytest.MonkeyPatch, made: Callable[..., Advisor]) -> None:
    monkeypatch.setenv("RACKTWIN_TOKEN", "se\r\ncret")
    advisor = made("http://127.0.0.1:1")
    wait(lambda: "token" in advisor.problem)
    assert "cret" not in advisor.problem


def test_a_folder_in_the_place_of_advice_costs_the_job_no_open_file(tmp_path: Path) -> None:
    (tmp_path / "j.json").mkdir()
    wire, opened = wires.FolderWire(str(tmp_path), "j"), len(os.listdir("/proc/self/fd"))
    said = set[str]()
    for _ in range(20):
        with pytest.raises(IsADirectoryError) as found:
            wire.fetch()
        said.add(str(found.value))
    assert len(os.listdir("/proc/self/fd")) == opened
    assert len(said) == 1, "the log tells it once"


def test_a_file_of_another_name_is_never_emptied(tmp_path: Path) -> None:
    mine = tmp_path / "weights"
    mine.write_bytes(b"w" * (wires.MAX_REPORT_FILE + 1))
    os.link(mine, tmp_path / "j.reports.jsonl")
    wires.FolderWire(str(tmp_path), "j").send(b"{}")
    assert mine.stat().st_size > wires.MAX_REPORT_FILE
