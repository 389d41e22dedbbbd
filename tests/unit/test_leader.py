"""The lock of one host: who leads, who stands by, what is handed on; and epochs that never go back."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.builders import site_of, two_racks
from tests.support.fleets import fleet_tree
from twin.catalogue import ConfigError, StorageError
from twin.config import load_config
from twin.daemon import leader
from twin.daemon.etcd import EtcdElection
from twin.daemon.leader import (
    MAX_EPOCH,
    MAX_HEAD,
    EpochFile,
    HostElection,
    Term,
    clock_s,
    daemon_name,
    election_name,
    lock_path,
    parse_record,
    pause,
)
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
        errors: list[str] = []
        telling = SimpleNamespace(
            append=lambda term: (changes.append(term), errors.append(a.status()["error"]))
        )
        async with running(a, telling):  # type: ignore[arg-type]
            await until(a.may_act)
            (tmp_path / "lock").unlink()
            assert not a.may_act()
            await until(lambda: len(changes) == 3)
            assert errors == ["", f"{tmp_path / 'lock'} was removed or replaced while it was locked", ""]
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

    monkeypatch.setattr(os, "fstat", lambda file: Foreign(real(file)))

    async def play() -> None:
        a = contender(tmp_path, "a")
        changes: list[Term | None] = []
        async with running(a, changes):
            await until(a.may_act)
        assert changes == [Term(1000, "a")]

    asyncio.run(play())


def test_a_lock_that_may_not_be_opened_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, closed = os.open, [True]

    def refuse(path: Any, *arguments: Any) -> int:
        if closed[0] and str(path).endswith("lock"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)

    async def play() -> None:
        a = contender(tmp_path, "a")
        async with running(a, []):
            await until(lambda: "belongs to another user" in a.status()["error"])
            assert not a.may_act()
            assert not a._take()
            assert caplog.text.count("lock belongs to another user") == 1
            closed[0] = False
            await until(a.may_act)
            assert a.status()["error"] == ""

    asyncio.run(play())


def test_folders_are_made_and_a_link_hands_nothing_on(tmp_path: Path) -> None:
    lock = tmp_path / "run" / "site" / "lock"
    a = HostElection(lock, "a", EpochFile(tmp_path / "state" / "a" / "epoch", lambda: 1000.0))
    assert a._take()
    a._enter()
    assert (tmp_path / "state" / "a" / "epoch").read_text() == "1000\n"
    assert a._read()["epoch"] == 1000
    lock.rename(tmp_path / "elsewhere")
    lock.symlink_to(tmp_path / "elsewhere")
    assert a._read() == {}
    assert not a.may_act()
    a._leave()


@pytest.mark.parametrize("there", [False, True])
def test_a_link_is_not_followed(tmp_path: Path, there: bool) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    if there:
        (tmp_path / "precious").write_text("mine")
    with pytest.raises(StorageError, match="cannot be opened"):
        contender(tmp_path, "a")._take()
    assert (tmp_path / "precious").exists() == there


def leading(folder: Path, name: str) -> HostElection:
    """One that has just won, between two looks at its lock."""
    out = contender(folder, name)
    assert out._take()
    out._enter()
    return out


def test_a_head_is_stored_at_once_if_asked_and_one_that_is_too_long_is_none(tmp_path: Path) -> None:
    a, lock = leading(tmp_path, "a"), tmp_path / "lock"
    told = {"name": "a", "epoch": 1000, "pid": os.getpid()}
    a.publish_head("x" * MAX_HEAD, soon=True)
    assert json.loads(lock.read_text()) == told | {"head": "x" * MAX_HEAD}
    a.publish_head("short", soon=True)
    a.publish_head("y" * (MAX_HEAD + 1), soon=True)
    assert json.loads(lock.read_text()) == told | {"head": "short"}, "nothing of a longer one is left"
    a.publish_head("later")
    assert json.loads(lock.read_text())["head"] == "short", "in its time"
    assert a.status() == {
        "kind": "host", "role": "leader", "name": "a", "epoch": 1000, "lock": str(lock),
        "holder_pid": os.getpid(), "error": "",
    }  # fmt: skip
    assert lock.stat().st_mode & 0o007 == 0
    a._leave()
    assert json.loads(lock.read_text())["head"] == "later"
    assert (a.term, a.may_act(), a.status()["role"], a.status()["epoch"]) == (None, False, "standby", 0)


def test_a_standby_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    a = contender(tmp_path, "a")
    assert a.status()["holder_pid"] == 0
    (tmp_path / "lock").write_text(json.dumps({"pid": 2**22 + 1}))
    assert a.status()["holder_pid"] == 2**22 + 1


def test_who_left_before_it_told_anything_hands_on_what_it_was_told(tmp_path: Path) -> None:
    a = leading(tmp_path, "a")
    a.publish_head("head of a")
    a._leave()
    leading(tmp_path, "b")._leave()
    c = leading(tmp_path, "c")
    assert c.term == Term(1002, "c", "b", 1001, "head of a")
    c._leave()


def test_who_may_only_read_the_lock_leads_and_hands_nothing_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, real = tmp_path / "lock", os.open
    left = json.dumps({"name": "x", "epoch": 7000, "head": "h"})
    lock.write_text(left)

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if str(path) == str(lock) and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    a = leading(tmp_path, "a")
    assert a.may_act()
    assert a.term == Term(7001, "a", "x", 7000, "h")
    a.publish_head("mine", soon=True)
    a._leave()
    assert lock.read_text() == left


def test_a_lock_that_the_file_system_cannot_give_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match=r"lock: cannot be locked: .*No locks"):
        contender(tmp_path, "a")._take()


def test_a_pause_ends_early_once() -> None:
    async def play() -> None:
        unless = asyncio.Event()
        unless.set()
        async with asyncio.timeout(10):
            await pause(1000.0, unless)
        assert not unless.is_set()
        await pause(0.0, unless)

    asyncio.run(play())


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
        (f"{2**53 + 1}\n", 1000.0, 1000),
        ("\u0665" * 4 + "\n", 1000.0, 1000),  # digits, but not of ours
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
    path.unlink()
    assert epochs.next() == max(expected + 1, int(wall_s)), "it is known here, too"


def test_an_epoch_above_what_others_saw(tmp_path: Path) -> None:
    epochs = EpochFile(tmp_path / "epoch", lambda: 1000.0)
    assert epochs.next(seen=7000) == 7001
    epochs.path.write_text(f"{MAX_EPOCH}\n")
    assert epochs.next(seen=7000) == MAX_EPOCH + 1


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
    a = contender(tmp_path, "a")
    with pytest.raises(StorageError, match="nobody can lead"):
        asyncio.run(a.run(lambda term: None))
    assert (a.term, a.may_act()) == (None, False)
    b = contender(tmp_path, "b")
    assert b._take(), "the lock is free again"
    b._leave()


def test_a_lock_that_comes_and_goes_is_an_error_after_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[int] = []

    def race(path: Any, flags: int, *mode: int) -> int:
        created.extend([flags] if flags & os.O_CREAT else [])
        raise (FileExistsError if flags & os.O_CREAT else FileNotFoundError)(2, "another was quicker")

    monkeypatch.setattr(os, "open", race)
    with pytest.raises(StorageError, match=r"lock: the lock cannot be opened: .*comes and goes: '.*lock'"):
        contender(tmp_path, "a")._take()
    assert created == [os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW] * 3


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
        (json.dumps({"epoch": 2**53 + 1, "pid": 0}).encode(), {"pid": 0}),
        (json.dumps({"epoch": 2**53, "pid": 2**53 + 1}).encode(), {"epoch": 2**53}),
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
    # Another version beside this one looks for the same lock.
    assert lock_path(one, "lab").name == "racktwin-lab-e17a8c61cab5.lock"
    assert lock_path(here, "the Lab/7").name == "racktwin-the_Lab_7-dd7f033aa90b.lock"
    assert len(lock_path(one, "x" * 99).name) == len("racktwin-") + 40 + len("-0123456789ab.lock")


@pytest.mark.parametrize(
    ("writable", "expected"),
    [
        (("/run/lock", "run", "user"), "/run/lock"),
        (("run", "user"), "run"),
        (("user",), "user"),
        ((), "."),
    ],
)
def test_a_lock_lies_where_all_daemons_of_a_host_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: tuple[str, ...], expected: str
) -> None:
    here = [str(tmp_path / name) for name in writable]
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path / 'run'}:{tmp_path / 'second'}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK | os.X_OK and path in here)
    config = configured(tmp_path, "broker: {host: b}\nstate: state")
    found = lock_path(config, "lab")
    assert found.parent == tmp_path / expected
    assert lock_path(config, "lab") == found
    assert expected != "." or config.state.stat().st_mode & 0o077 == 0
    if expected != "/run/lock":  # where another user's is, it is waited for though nobody else may write
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / found.name).touch()
        assert lock_path(config, "lab").parent == tmp_path / "run"


def test_a_lock_without_a_run_folder_lies_beside_the_state_folder_however_deep_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/"))
    config = configured(tmp_path, "broker: {host: b}\nstate: far/down/state")
    assert lock_path(config, "lab").parent == tmp_path / "far" / "down"


def test_a_daemon_has_the_name_of_its_configuration_or_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = configured(tmp_path / "one", "broker: {host: b}\nleader: {kind: host, name: first}")
    plain = configured(tmp_path / "two", "broker: {host: b}")
    monkeypatch.setattr(socket, "gethostname", lambda: "n7.example.org")
    assert [daemon_name(c) for c in (named, plain)] == ["first", "n7"]
    elections = [make_election(c, "lab") for c in (named, plain)]
    assert [e.name for e in elections if isinstance(e, HostElection)] == ["first", "n7.example.org"]
    assert all(isinstance(e, HostElection) and e._epochs.path.name == "epoch" for e in elections)
    remote = configured(
        tmp_path / "3", "broker: {host: b}\nleader: {kind: etcd, endpoints: ['http://[::1]:1']}"
    )
    made = make_election(remote, "lab")
    assert isinstance(made, EtcdElection)
    assert (made.name, made._epochs.path) == ("n7.example.org", remote.state / "epoch")
    with pytest.raises(ConfigError, match=r"leader\.endpoints: expected at least one URL of etcd"):
        configured(tmp_path / "4", "broker: {host: b}\nleader: {kind: etcd}")
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert daemon_name(plain) == "daemon"


def test_the_daemons_of_a_part_elect_together_by_their_site_file_and_parts_apart(tmp_path: Path) -> None:
    one = two_racks(racks="r[1-2]", elsewhere=["h/r[3-4]"])
    two = two_racks(racks="r[3-4]", elsewhere=["h/r[1-2]"])
    names = [election_name(site_of(tree)) for tree in (one, two, two_racks())]
    assert names == ["lab/parts/h/r1", "lab/parts/h/r3", "lab"]
    loaded = configured(tmp_path, "broker: {host: b}")
    assert len({lock_path(loaded, name) for name in names}) == 3
    one["halls"][0]["racks"] = [{"name": name, "profile": "gb200-nvl72"} for name in ("r2", "r1")]
    assert election_name(site_of(one)) == names[0], "in any order"


def test_a_part_without_racks_elects_by_its_hall() -> None:
    site = site_of({"site": "lab", "halls": [{"name": "h"}], "elsewhere": ["h/r[1-4]"]})
    assert election_name(site) == "lab/parts/h"


def test_the_hub_of_a_split_site_elects_by_its_site() -> None:
    assert election_name(site_of(fleet_tree(elsewhere=["h/r1"]))) == "fleet"


def test_two_daemons_of_one_part_have_one_lock_whatever_their_configurations_say(tmp_path: Path) -> None:
    site = site_of(two_racks(elsewhere=["h/r3"]))
    texts = ("fleet: {hall: part-1, feeder: a}", "fleet: {hall: part-2, feeder: a}", "state: other")
    loaded = [configured(tmp_path / f"{i}", f"broker: {{host: b}}\n{text}") for i, text in enumerate(texts)]
    paths = {make_election(one, election_name(site)).status()["lock"] for one in loaded}
    assert len(paths) == 1


def test_an_embedded_broker_belongs_to_one_daemon(tmp_path: Path) -> None:
    one, two = (configured(tmp_path / n, "broker: embedded") for n in ("one", "two"))
    assert lock_path(one, "lab") != lock_path(two, "lab")
    made = make_election(one, "lab")
    assert isinstance(made, HostElection)
    assert made.path == lock_path(one, "lab")


def test_the_clock_goes_on_and_cannot_be_set() -> None:
    assert clock_s() <= clock_s()
