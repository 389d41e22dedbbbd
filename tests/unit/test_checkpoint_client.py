"""The client in a training job: when a save is due, what advice is obeyed, and that nothing harms the job."""

from __future__ import annotations

import ast
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import racktwin_checkpoint as client
from racktwin_checkpoint import NOTHING, NS, Advisor, Held, Pace, held_of

CLIENT = Path(client.__file__).parent
NOW_NS = 1_800_000_000 * NS


def advice(job: str = "j", now_ns: int | None = None, lease_s: float = 60.0, **fields: Any) -> bytes:
    at_ns = time.time_ns() if now_ns is None else now_ns
    body = {"v": 1, "job": job, "interval_s": 60.0, "save_since_ns": None, "issued_ns": at_ns,
            "expires_ns": at_ns + int(lease_s * NS), "epoch": 1, "reason": "because"}  # fmt: skip
    return json.dumps(body | fields).encode()


def held(
    interval_s: float | None = None, want: tuple[int, int] | None = None, since: float = math.inf
) -> Held:
    return Held(interval_s, want, since)


def pace(own_s: float = 100.0, steps: int = 0, least_s: float = 1.0, share: float = 0.2) -> Pace:
    return Pace(0.0, own_s, steps, 4 * own_s, least_s, share)


def saves(
    p: Pace, until: float, said: Callable[[float], Held] = lambda now: NOTHING, cost_s: float = 1.0
) -> list[float]:
    """When a job that asks every half second begins to save, and trains and saves on."""
    now, found = 0.0, []
    while now < until:
        now += 0.5
        if p.due(now, None, said(now)):
            found.append(now)
            p.ended(now + cost_s, now)
            now += cost_s
    return found


def wait(until: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Advisor]]:
    """Advisors of a folder that look often, closed at the end."""
    found: list[Advisor] = []

    def make(source: str | None = None, **terms: Any) -> Advisor:
        terms = {"own_interval_s": 1000.0, "poll_s": 0.02, "least_interval_s": 0.001, "rank": 0} | terms
        found.append(Advisor("j", f"file://{tmp_path}" if source is None else source, **terms))
        return found[-1]

    yield make
    for one in found:
        one.close()


def put(folder: Path, body: bytes) -> None:
    (folder / ".x").write_bytes(body)
    (folder / ".x").replace(folder / "j.json")


def reports(folder: Path) -> list[dict[str, Any]]:
    path = folder / "j.reports.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


# When a save is due


def test_without_advice_the_own_interval_counts_from_the_end_of_a_save() -> None:
    assert saves(pace(10.0), 40.0) == [10.0, 21.0, 32.0]


def test_own_steps_and_a_count_that_goes_back() -> None:
    p = Pace(0.0, math.inf, 3, math.inf, 1.0, 0.2)
    found = []
    for at, step in enumerate([500, 501, 502, 503, 504, 505, 506, 0, 1, 2, 3]):
        if p.due(float(at), step):
            found.append(step)
            p.ended(float(at), float(at))
    assert found == [502, 505, 2]
    calls = Pace(0.0, math.inf, 3, math.inf, 1.0, 0.2)
    assert [calls.due(float(i)) for i in range(6)] == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("advised_s", "first"), [(20.0, 20.0), (0.001, 1.0), (150.0, 150.0), (1e6, 400.0), (100.0, 100.0)]
)
def test_advice_moves_the_first_save_within_its_limits(advised_s: float, first: float) -> None:
    p = pace()
    assert p.in_force(held(advised_s)) == (1.0 if advised_s < 1 else min(advised_s, 400.0))
    assert saves(p, 500.0, lambda now: held(advised_s))[0] == first


def test_saves_to_memory_follow_their_own_advice(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    """Nothing is due there until it is advised; a durable save counts as one in memory as well."""
    advisor = made(most_share=1.0)
    assert not advisor.due(0, tier="memory")
    wait(lambda: reports(tmp_path))
    assert not [r for r in reports(tmp_path) if r["tier"] == "memory"], "it has no interval to tell"
    put(tmp_path, advice(interval_s=600.0, local_interval_s=300.0))
    wait(lambda: [r for r in reports(tmp_path) if r["tier"] == "memory"])
    told = {r["tier"]: r["interval_s"] for r in reports(tmp_path)}
    assert told == {"durable": 600.0, "memory": 300.0}

    def later() -> bool:
        """Whether one is due in memory, and only there, five minutes after the last."""
        advisor._local._ended -= 300.0
        return advisor.due(tier="memory") and not advisor.due()

    assert not advisor.due(tier="memory")
    for tier in ("memory", "durable"):
        assert later()
        with advisor.saving(tier):
            pass
        assert not advisor.due(tier="memory"), "each counts"
    put(tmp_path, advice(interval_s=600.0, issued_ns=time.time_ns()))
    wait(lambda: advisor._held.local_s is None)
    assert not later()


def test_a_job_that_never_asks_for_memory_does_not_claim_to_follow(
    tmp_path: Path, made: Callable[..., Advisor]
) -> None:
    advisor = made()
    put(tmp_path, advice(interval_s=600.0, local_interval_s=30.0))
    wait(lambda: advisor.interval_s == 600.0)
    with advisor.saving("memory"):
        pass
    wait(lambda: [r for r in reports(tmp_path) if r["tier"] == "memory"])
    assert {r["interval_s"] for r in reports(tmp_path) if r["tier"] == "memory"} == {0.0}


def test_a_jobs_own_interval_in_memory_holds_without_advice(
    tmp_path: Path, made: Callable[..., Advisor]
) -> None:
    advisor = made(own_local_interval_s=0.2)
    wait(lambda: [r for r in reports(tmp_path) if r["tier"] == "memory"])
    assert {r["interval_s"] for r in reports(tmp_path) if r["tier"] == "memory"} == {0.2}
    wait(lambda: advisor.due(tier="memory"))
    with pytest.raises(ValueError, match="above 0"):
        Advisor("j", "", 60.0, own_local_interval_s=0.0)


def test_a_lie_costs_no_more_than_the_share() -> None:
    found = saves(pace(1e6), 10_000.0, lambda now: held(0.001), cost_s=10.0)
    assert 0.19 < 10.0 * len(found) / 10_000.0 < 0.205


def test_an_interval_that_is_worth_it_is_kept_within_the_share() -> None:
    found = saves(pace(3600.0), 10_000.0, lambda now: held(840.0), cost_s=60.0)
    assert [b - a for a, b in pairwise(found)] == [900.0] * 10


def test_one_save_for_a_wish_and_the_next_wish_finds_something_left() -> None:
    p = pace(1000.0)
    wish = lambda now: held(None, (1, 7) if now < 900 else (1, 8), 450.0 if now < 900 else 960.0)  # noqa: E731
    found = saves(p, 1100.0, wish, cost_s=20.0)
    assert found == [450.0, 960.0]


def test_a_wish_ends_with_a_save_that_began_later_whatever_its_reason() -> None:
    p = pace(100.0)
    assert p.due(100.0)
    p.ended(101.0, 100.0)
    assert not p.due(150.0, None, held(None, (1, 5), 99.0))
    assert p.due(150.5, None, held(None, (1, 6), 100.5))


def test_a_wish_that_is_heard_again_late_brings_no_second_save() -> None:
    p = pace(1000.0)
    assert p.due(50.0, None, held(None, (1, 5), 50.0))
    p.ended(51.0, 50.0)
    assert not p.due(100.0, None, held(None, (1, 5), 90.0))
    assert p.due(101.0, None, held(None, (2, 5), 90.0))


def test_a_wish_for_later_waits() -> None:
    p = pace(100.0)
    assert not p.due(50.0, None, held(None, (1, 5), 60.0))
    assert p.due(60.0, None, held(None, (1, 5), 60.0))


def test_a_save_that_fails_is_tried_again_later_the_longer_it_took() -> None:
    p = pace(100.0)
    assert p.due(100.0)
    p.ended(104.0, 100.0, ok=False)
    assert not p.due(123.5)
    assert p.due(124.0)  # 4 s at a share of 0.2
    p.ended(125.0, 124.0)
    assert not p.due(224.5)
    assert p.due(225.0)


def test_a_save_that_nobody_measures_counts_until_the_next_question() -> None:
    p = pace(1e6, share=0.1)
    assert p.due(5.0, None, held(2.0))
    assert not p.due(15.0, None, held(2.0))
    assert not p.due(104.5, None, held(2.0))
    assert p.due(105.0, None, held(2.0))  # 10 s paid at 0.1 a second


def test_no_closer_than_the_storage_takes_them() -> None:
    p = pace(1000.0)
    p.flush_s = 90.0
    assert saves(p, 300.0, lambda now: held(10.0))[0] == 90.0


# What advice is obeyed


def test_advice_is_counted_from_when_it_was_heard() -> None:
    got = held_of(advice(now_ns=NOW_NS, save_since_ns=NOW_NS - 5 * NS), "j", NOTHING, 100.0, NOW_NS + 10 * NS)
    assert got == Held(60.0, (1, NOW_NS - 5 * NS), 95.0, 150.0, (1, NOW_NS))
    behind = held_of(advice(now_ns=NOW_NS), "j", NOTHING, 100.0, NOW_NS - 86_400 * NS)
    assert behind.until == 160.0  # a clock that is behind prolongs nothing
    long = held_of(advice(now_ns=NOW_NS, lease_s=1e6), "j", NOTHING, 100.0, NOW_NS)
    assert long.until == 100.0 + client.MAX_LEASE_S


def test_older_advice_changes_nothing_and_a_renewal_keeps_the_instant() -> None:
    wish = NOW_NS - 5 * NS
    first = held_of(advice(now_ns=NOW_NS, save_since_ns=wish), "j", NOTHING, 100.0, NOW_NS)
    for epoch, age in ((1, 0), (1, 1), (0, -1)):
        body = advice(now_ns=NOW_NS - age * NS, epoch=epoch, interval_s=1.0)
        assert held_of(body, "j", first, 101.0, NOW_NS) is first
    late = held_of(advice(now_ns=NOW_NS + NS, save_since_ns=wish), "j", first, 109.0, NOW_NS + NS)
    assert late.since == 95.0
    assert held_of(advice(now_ns=NOW_NS - 9 * NS, epoch=2), "j", first, 1.0, NOW_NS).order[0] == 2


def test_advice_that_ends_at_once_takes_back_what_was_said() -> None:
    first = held_of(advice(now_ns=NOW_NS), "j", NOTHING, 100.0, NOW_NS)
    none = advice(now_ns=NOW_NS + 1, lease_s=0.0, interval_s=None)
    assert held_of(none, "j", first, 101.0, NOW_NS) == Held(order=(1, NOW_NS + 1))


said = partial(advice, now_ns=NOW_NS)
BAD = [
    b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 4000, b"9" * 4000, b'{"v":1,"job":"j"}', b" " * 5000,
    said(job="k"), said(v=2), said(interval_s=0), said(interval_s=-1), said(interval_s=math.nan),
    said(interval_s=math.inf), said(interval_s=1e8), said(interval_s="60"), said(interval_s=True),
    said(interval_s=[]), said(epoch=-1), said(epoch=None), said(epoch=1.5), said(epoch=True),
    said(epoch=2**62), said(issued_ns=None), said(expires_ns="x"), said(save_since_ns=-1),
    said(save_since_ns=""), said(save_since_ns=False), said(save_since_ns=1.5),
    said(reason="x" * 5000),
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        held_of(body, "j", NOTHING, 100.0, NOW_NS)


def test_what_has_expired_by_this_clock_is_refused() -> None:
    assert held_of(said(), "j", NOTHING, 100.0, NOW_NS).interval_s == 60.0
    with pytest.raises(ValueError, match="expired by the clock of this host"):
        held_of(said(), "j", NOTHING, 100.0, NOW_NS + 60 * NS)


# The advisor


@pytest.mark.parametrize(
    "terms",
    [
        {}, {"own_interval_s": 0.0}, {"own_interval_s": -1.0}, {"own_interval_s": math.nan},
        {"most_share": 0.0}, {"most_share": 1.1}, {"poll_s": 0.0}, {"poll_s": math.inf},
        {"least_interval_s": -1.0},
        {"most_interval_s": -1.0}, {"job": ""},
    ],
)  # fmt: skip
def test_terms_of_the_job_itself_are_checked(terms: dict[str, Any]) -> None:
    given: dict[str, Any] = {"job": "j", "own_interval_s": 10.0} | terms if terms else {"job": "j"}
    with pytest.raises(ValueError, match="expected"):
        Advisor(**given)


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
    advisor.progress_per_s = given
    advisor.restored(1.0)
    advisor.restored(2.0)
    wait(lambda: len([r for r in reports(tmp_path) if r["restart_s"]]) == 2)
    found = [r.get("progress_per_s", 0.0) for r in reports(tmp_path) if r["restart_s"]]
    assert found == [told, 0.0]


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
    wire = client._File(str(tmp_path), "j")
    line = b"x" * 1000
    for _ in range(1100):
        wire.send(line)
    assert (tmp_path / "j.reports.jsonl").stat().st_size <= client.MAX_REPORT_FILE + 2000


def test_a_line_that_was_torn_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, real = client._File(str(tmp_path), "j"), open

    class Half:
        def __init__(self, handle: int, *more: Any, **how: Any) -> None:
            self.file = real(handle, *more, **how)

        def __enter__(self) -> Any:
            return types.SimpleNamespace(write=lambda line: self.file.write(line[:4]))

        def __exit__(self, *_: object) -> None:
            self.file.close()

    monkeypatch.setattr(client, "open", Half, raising=False)
    with pytest.raises(OSError, match="whole"):
        wire.send(b'{"v":1}')
    monkeypatch.delattr(client, "open")
    wire.send(b'{"v":2}')
    wire.send(b'{"v":3}')
    assert (tmp_path / "j.reports.jsonl").read_bytes() == b'{"v"\n{"v":2}\n{"v":3}\n'


FULL = """
import resource, sys, time
import racktwin_checkpoint as client
terms = dict(own_interval_s=0.001, poll_s=0.02, least_interval_s=0.001, rank=0)
advisor = client.Advisor("j", "file://" + sys.argv[1], **terms)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
made = 0
while made < 20 or not advisor.problem:
    if advisor.due():
        made += 1
        with advisor.saving():
            pass
        time.sleep(0.01)
assert "not written whole" in advisor.problem or "large" in advisor.problem, advisor.problem
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
while advisor.problem:
    time.sleep(0.01)
advisor.close()
"""


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(CLIENT), **variables}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_a_disk_that_is_full_and_then_is_not(tmp_path: Path) -> None:
    answer = run(FULL, str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    whole, torn = 0, 0
    for line in (tmp_path / "j.reports.jsonl").read_text().splitlines():
        try:
            whole += json.loads(line)["v"]
        except ValueError:
            torn += 1
    assert whole >= 20
    assert torn <= 1 + answer.stderr.count("whole")  # a torn line ends where the next begins


def test_what_waits_is_sent_at_the_end_even_without_close(tmp_path: Path) -> None:
    script = (
        "import sys, racktwin_checkpoint as c\n"
        "a = c.Advisor('j', 'file://' + sys.argv[1], own_interval_s=9, rank=0)\n"
        "with a.saving(): pass\n"
    )
    assert run(script, str(tmp_path)).returncode == 0
    assert any(r["began_ns"] for r in reports(tmp_path))


FORK = """
import os, sys, time, racktwin_checkpoint as c
a = c.Advisor("j", "file://" + sys.argv[1], own_interval_s=0.05, most_interval_s=9.0, poll_s=0.02, rank=0)
while a.interval_s != 5.0:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    assert a.interval_s == 0.05
    time.sleep(0.06)
    assert a.due(1)
    with a.saving(): pass
    a.close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0
assert a.interval_s == 5.0 and not a.due(1)
a.close()
"""


def test_a_forked_process_keeps_the_own_interval_and_asks_nobody(tmp_path: Path) -> None:
    put(tmp_path, advice(interval_s=5.0))
    # Python 3.12 and later warn of a fork beside threads, which is what happens here.
    answer = run(FORK.replace("import os", "import warnings; warnings.simplefilter('ignore')\nimport os", 1),
                 str(tmp_path))  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert not any(r["began_ns"] for r in reports(tmp_path))


def test_a_copy_keeps_the_own_interval(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    put(tmp_path, advice(interval_s=5.0))
    advisor = made()
    wait(lambda: advisor.interval_s == 5.0)
    copy: Advisor = pickle.loads(pickle.dumps(advisor))
    assert copy.interval_s == 1000.0
    assert not copy.due(1)
    copy.close()


def test_a_signal_may_save_in_the_midst_of_it(made: Callable[..., Advisor]) -> None:
    advisor, heard = made(), []

    def preempted(*_: object) -> None:
        heard.append(advisor.due(1))
        with advisor.saving():
            pass

    before = signal.signal(signal.SIGALRM, preempted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        until = time.monotonic() + 0.3
        while time.monotonic() < until or len(heard) < 10:
            advisor.due(1)
            with advisor.saving():
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert advisor.problem == ""


def test_only_rank_0_decides_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "0")
    before = threading.active_count()
    other = Advisor("j", f"file://{tmp_path}", own_interval_s=0.0001)
    assert threading.active_count() == before
    time.sleep(0.01)
    assert not other.due(1)
    assert other.due(1, broadcast=lambda mine: True)
    monkeypatch.delenv("RANK")
    first = Advisor("j", "", own_interval_s=0.0001)
    time.sleep(0.01)
    assert first.due(1, broadcast=lambda mine: mine)
    with pytest.raises(RuntimeError, match="ranks"):
        first.due(1, broadcast=_lost)


def _lost(mine: bool) -> bool:
    raise RuntimeError("the other ranks are gone")


def test_no_thread_no_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    advisor = Advisor("j", f"file://{tmp_path}", own_interval_s=0.0001, rank=0)
    time.sleep(0.01)
    assert advisor.due()
    advisor.close()


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


# The distribution


def test_one_file_of_the_standard_library_for_python_3_9() -> None:
    for name in (
        "racktwin_checkpoint",
        "racktwin_mqtt",
        "racktwin_torch",
        "racktwin_lightning",
        "racktwin_hf",
    ):
        tree = ast.parse((CLIENT / f"{name}.py").read_text(), feature_version=(3, 9))
        used = {x.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for x in n.names}
        used |= {str(n.module).split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        if name == "racktwin_checkpoint":
            assert used - {"racktwin_mqtt"} <= sys.stdlib_module_names


def test_the_wheel_holds_these_files_alone(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not here: run `make test`, which installs it")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    answer = subprocess.run(build, cwd=CLIENT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    (wheel,) = tmp_path.glob("racktwin_checkpoint-*-py3-none-any.whl")
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in n]
    assert sorted(names) == sorted(p.name for p in CLIENT.glob("*.py"))


def test_a_folder_in_the_place_of_advice_costs_the_job_no_open_file(tmp_path: Path) -> None:
    (tmp_path / "j.json").mkdir()
    wire, opened = client._File(str(tmp_path), "j"), len(os.listdir("/proc/self/fd"))
    said = set[str]()
    for _ in range(20):
        with pytest.raises(IsADirectoryError) as found:
            wire.fetch()
        said.add(str(found.value))
    assert len(os.listdir("/proc/self/fd")) == opened
    assert len(said) == 1, "the log tells it once"


def test_a_file_of_another_name_is_never_emptied(tmp_path: Path) -> None:
    mine = tmp_path / "weights"
    mine.write_bytes(b"w" * (client.MAX_REPORT_FILE + 1))
    os.link(mine, tmp_path / "j.reports.jsonl")
    client._File(str(tmp_path), "j").send(b"{}")
    assert mine.stat().st_size > client.MAX_REPORT_FILE
