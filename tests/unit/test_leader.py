"""The lock of one host: who leads, who stands by, what is handed on; and epochs that never go back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from twin.catalogue import StorageError
from twin.config import load_config
from twin.daemon import leader
from twin.daemon.leader import MAX_HEAD, EpochFile, HostElection, Term, clock_s, lock_path, parse_record
from twin.daemon.leadership import make_election

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "POLL_S", 0.02)


def contender(folder: Path, name: str, wall_s: float = 1000.0) -> HostElection:
    return HostElection(folder / "lock", name, EpochFile(folder / name / "epoch", lambda: wall_s))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(one: HostElection, changes: list[Term | None]) -> AsyncIterator[None]:
    task = asyncio.create_task(one.run(changes.append))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_one_leads_and_the_other_takes_over_with_what_it_left(tmp_path: Path) -> None:
    async def play() -> None:
        a, b = contender(tmp_path, "a"), contender(tmp_path, "b")
        seen_a: list[Term | None] = []
        seen_b: list[Term | None] = []
        async with contextlib.AsyncExitStack() as later:
            async with running(a, seen_a):
                await until(a.may_act)
                await later.enter_async_context(running(b, seen_b))
                await asyncio.sleep(0.2)
                assert not b.may_act()
                assert b.status()["role"] == "standby"
                assert b.status()["holder_pid"] == os.getpid()
                a.publish_head("head of a")
            assert not a.may_act()
            await until(b.may_act)
        assert seen_a == [Term(1000, "a")]
        assert seen_b == [Term(1001, "b", "a", 1000, "head of a")]
        assert not b.may_act()

    asyncio.run(play())


@pytest.mark.slow
def test_a_head_is_handed_on_although_its_leader_was_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\nfrom pathlib import Path\nfrom twin.daemon.leader import *\n"
        "async def main():\n"
        "    here = Path(sys.argv[1])\n"
        "    e = HostElection(here / 'lock', 'a', EpochFile(here / 'a' / 'epoch'))\n"
        "    e.publish_head('early')\n"
        "    t = asyncio.create_task(e.run(lambda term: e.publish_head('late')))\n"
        "    while 'late' not in (Path(sys.argv[1]) / 'lock').read_text() if e.may_act() else True:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(e.term.epoch, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        epoch = int(process.stdout.readline())
        process.kill()

    async def play() -> None:
        b = contender(tmp_path, "b")
        changes: list[Term | None] = []
        async with running(b, changes):
            await until(b.may_act)
        assert changes == [Term(epoch + 1, "b", "a", epoch, "late")]

    asyncio.run(play())


def test_a_lock_that_was_removed_is_no_lock(tmp_path: Path) -> None:
    """A second one could lock the new file, so the first must not go on."""

    async def play() -> None:
        a = contender(tmp_path, "a")
        changes: list[Term | None] = []
        async with running(a, changes):
            await until(a.may_act)
            (tmp_path / "lock").unlink()
            assert not a.may_act()
            await until(lambda: len(changes) == 3)
            assert changes[1] is None
            assert changes[2] is not None
            assert changes[2].epoch == 1001

    asyncio.run(play())


def test_the_lock_of_another_user_can_be_waited_for_but_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text(json.dumps({"name": "x", "epoch": 2**52, "head": "h"}))
    real = os.fstat

    class Foreign:
        def __init__(self, stat: os.stat_result) -> None:
            self.stat = stat

        def __getattr__(self, name: str) -> Any:
            return 12345 if name == "st_uid" else getattr(self.stat, name)

    monkeypatch.setattr(leader.os, "fstat", lambda file: Foreign(real(file)))

    async def play() -> None:
        a = contender(tmp_path, "a")
        changes: list[Term | None] = []
        async with running(a, changes):
            await until(a.may_act)
        assert changes == [Term(1000, "a")]

    asyncio.run(play())


def test_a_lock_that_may_not_be_opened_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, closed = os.open, [True]

    def refuse(path: Any, *arguments: Any) -> int:
        if closed[0] and str(path).endswith("lock"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(leader.os, "open", refuse)

    async def play() -> None:
        a = contender(tmp_path, "a")
        async with running(a, []):
            await until(lambda: "belongs to another user" in a.status()["error"])
            assert not a.may_act()
            closed[0] = False
            await until(a.may_act)
            assert a.status()["error"] == ""

    asyncio.run(play())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="cannot be opened"):
        asyncio.run(contender(tmp_path, "a").run(lambda term: None))
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("stored", "wall_s", "expected"),
    [
        (None, 1000.5, 1000),
        ("5\n", 1000.0, 1000),
        ("5000\n", 1000.0, 5001),  # the clock went back
        ("", 1000.0, 1000),
        ("-3\n", 1000.0, 1000),
        ("rubbish\n", 1000.0, 1000),
        (f"{2**60}\n", 1000.0, 1000),
    ],
)
def test_epochs_never_go_back(tmp_path: Path, stored: str | None, wall_s: float, expected: int) -> None:
    path = tmp_path / "epoch"
    if stored is not None:
        path.write_text(stored)
    epochs = EpochFile(path, lambda: wall_s)
    assert epochs.next() == expected
    epochs.store(expected)
    assert EpochFile(path, lambda: 0.0).next() == expected + 1
    epochs.store(3)
    assert EpochFile(path, lambda: 0.0).next() == expected + 1


def test_an_epoch_above_what_others_saw(tmp_path: Path) -> None:
    epochs = EpochFile(tmp_path / "epoch", lambda: 1000.0)
    assert epochs.next(seen=7000) == 7001


def test_epochs_rise_from_leader_to_leader_whatever_their_clocks_show(tmp_path: Path) -> None:
    seen, hosts = 0, (3600.0, -3600.0, 0.0, -86_400.0, 1e9)
    for turn in range(20):
        host = turn % len(hosts)
        epochs = EpochFile(tmp_path / f"h{host}", lambda off_s=hosts[host]: 1.7e9 + off_s)
        epoch = epochs.next(seen)
        assert epoch > seen
        epochs.store(epoch)
        seen = epoch


def test_nobody_leads_with_an_epoch_that_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="nobody can lead"):
        asyncio.run(contender(tmp_path, "a").run(lambda term: None))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", {}),
        (b"[]", {}),
        (b"\xff\xfe", {}),
        (b"[" * 100_000, {}),
        (b'{"name": 3, "epoch": "7", "head": null}', {}),
        (b'{"epoch": true}', {}),
        (b'{"epoch": -1}', {}),
        (b'{"epoch": 7, "head": "x"}e": 5}', {"epoch": 7, "head": "x"}),  # the rest of a longer one
        (json.dumps({"head": "x" * (MAX_HEAD + 1), "name": "a"}).encode(), {"name": "a"}),
    ],
)
def test_what_a_leader_left_is_not_trusted_to_be_well_formed(data: bytes, expected: dict[str, Any]) -> None:
    assert parse_record(data) == expected


def configured(folder: Path, text: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "c.yaml").write_text(f"site: s.yaml\n{text}\n")
    return load_config(folder / "c.yaml")


def test_a_lock_is_for_a_site_and_a_broker_whatever_the_state_folder(tmp_path: Path) -> None:
    one = configured(tmp_path / "one", "broker: {host: Broker.example}")
    two = configured(tmp_path / "two", "broker: {host: broker.example., client_id: other}")
    assert lock_path(one, "lab") == lock_path(two, "lab")
    assert lock_path(one, "lab") != lock_path(one, "other")
    port = configured(tmp_path / "three", "broker: {host: broker.example, port: 8883}")
    assert lock_path(one, "lab") != lock_path(port, "lab")
    here = configured(tmp_path / "four", "broker: {host: localhost}")
    there = configured(tmp_path / "five", "broker: {host: 127.0.0.1}")
    assert lock_path(here, "lab") == lock_path(there, "lab")
    assert "/" not in lock_path(one, "a/../b").name


def test_an_embedded_broker_belongs_to_one_daemon(tmp_path: Path) -> None:
    one, two = (configured(tmp_path / n, "broker: embedded") for n in ("one", "two"))
    assert lock_path(one, "lab") != lock_path(two, "lab")
    made = make_election(one, "lab")
    assert isinstance(made, HostElection)
    assert made.path == lock_path(one, "lab")


def test_the_clock_goes_on_and_cannot_be_set() -> None:
    assert clock_s() <= clock_s()
