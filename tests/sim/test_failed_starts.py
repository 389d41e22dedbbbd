"""Starts that fail, at each step and for each reason: the next one works, and what was recorded is kept."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.broken_starts import TICKS
from tests.support.builders import two_racks
from tests.support.forked_children import ForkedChildren
from twin.config import load_config
from twin.daemon import Daemon, SdNotify
from twin.run import OPEN, TraceReader, closed_segments, journal_lines, verify_journal
from twin.run.journal import GENESIS

EVERY_DAY = 19  # one step of so many; all of them in the storm


@pytest.fixture(scope="module")
def children() -> Iterator[ForkedChildren]:
    with ForkedChildren("tests.support.broken_starts:start") as forked:
        yield forked


class Host:
    """A daemon's files, and its starts."""

    def __init__(self, folder: Path, children: ForkedChildren) -> None:
        self.folder, self._children = folder, children
        self.run, self.words = folder / "state" / "run", folder / "words.log"

    def configure(self) -> None:
        """A site whose broker is away."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "site.yaml").write_text(yaml.safe_dump(two_racks()))
        tree = {"site": "site.yaml", "broker": {"host": "127.0.0.1", "port": 1}, "api": {"port": 0},
                "tick_s": 0.1, "quotas": {"journal_reserve_mb": 1}}  # fmt: skip
        (self.folder / "racktwin.yaml").write_text(yaml.safe_dump(tree))

    def start(self, mode: str = "count", chosen: int = 0, words: str = "") -> tuple[int | None, list[str]]:
        """(exit code, None if it was killed; the steps of which it tells). Its log is to have `words`."""
        code, steps = None, []
        self._children.start(str(self.folder), mode, str(chosen), words.replace(" ", "+"))
        while (line := self._children.line()) != "ended":
            word, _, rest = line.partition(" ")
            if word == "code":
                code = int(rest)
            elif word == "step":
                steps.append(rest)
        return code, steps

    def lines(self) -> list[bytes]:
        """Whole lines of the journal."""
        there = (self.run / OPEN).exists() or closed_segments(self.run)
        return list(journal_lines(self.run / OPEN)) if there else []

    def ticks(self) -> list[int]:
        """Ticks of the trace."""
        return [f.tick for f in TraceReader(self.run)] if list(self.run.glob("trace-*.rt")) else []


def check_heals(host: Host, what: str) -> None:
    """The next start works and goes on with all that is there."""
    lines, ticks = host.lines(), host.ticks()
    code, _ = host.start()
    said = host.words.read_text()[-3000:]
    assert code == 0, f"{what}: the next start ends with {code}: {said}"
    assert host.lines()[: len(lines)] == lines, f"{what}: the journal is another"
    assert verify_journal(host.run / OPEN).fault is None, what
    assert set(ticks) <= set(host.ticks()), f"{what}: ticks {ticks} became {host.ticks()}"
    assert len(host.ticks()) >= len(ticks) + TICKS, what


@pytest.mark.parametrize("mode", ["kill", "refuse"])
@pytest.mark.parametrize("before", [0, 1], ids=["the first start", "a later start"])
@pytest.mark.parametrize(
    "every", [pytest.param(EVERY_DAY, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.storm)]
)
def test_a_start_that_ends_at_any_step_on_the_disk_heals(
    children: ForkedChildren, tmp_path: Path, mode: str, before: int, every: int
) -> None:
    first = Host(tmp_path / "first", children)
    first.configure()
    for _ in range(before):
        assert first.start()[0] == 0
    probe = Host(tmp_path / "probe", children)
    shutil.copytree(first.folder, probe.folder)
    code, steps = probe.start()
    assert code == 0
    ended = 0
    for chosen in range(before, len(steps), every):
        host = Host(tmp_path / str(chosen), children)
        shutil.copytree(first.folder, host.folder)
        code, _ = host.start(mode, chosen)
        what = f"{mode} at step {chosen}, {steps[chosen]}"
        assert mode == "refuse" or code is None, f"{what}: it was not killed"
        assert code in (None, 0, 1), f"{what}: {host.words.read_text()[-3000:]}"
        assert "Traceback" not in host.words.read_text(), f"{what}: {host.words.read_text()[-3000:]}"
        ended += code != 0
        check_heals(host, what)
        shutil.rmtree(host.folder)
    assert ended > 0, "some steps are such that the start ends"


def _edit(name: str, **keys: Any) -> Callable[[Host], None]:
    """Keys of the configuration or of the site file."""

    def edit(host: Host) -> None:
        path = host.folder / name
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | keys))

    return edit


def _write(name: str, text: str) -> Callable[[Host], None]:
    """A file with this text where none, or another, should be."""

    def write(host: Host) -> None:
        (host.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (host.folder / name).write_text(text)

    return write


def _folder(name: str) -> Callable[[Host], None]:
    """A folder where a file should be."""
    return lambda host: (host.folder / name).mkdir(parents=True)


BROKER = {"host": "127.0.0.1", "port": 1}
WRONG, BROKEN = 78, 1
FOREIGN = json.dumps({"seq": 0, "prev": GENESIS, "kind": "manifest", "tick": -1, "now_ns": 0,
                      "body": {"format": 99}}) + "\n"  # fmt: skip
# Why a start fails: what is done, its exit code, words that the operator reads
REASONS: dict[str, tuple[Callable[[Host], None], int, str]] = {
    "no site file": (lambda h: (h.folder / "site.yaml").unlink(), WRONG, "site.yaml"),
    "a site that is no YAML": (_write("site.yaml", "site: [\n"), WRONG, "site.yaml"),
    "an unknown key": (_edit("racktwin.yaml", brokr=1), WRONG, "brokr"),
    "no secret of the broker": (
        _edit("racktwin.yaml", broker=BROKER | {"username": "u", "password_file": "pw"}), WRONG, "pw"),
    "no mapping table of a topic": (
        _edit("racktwin.yaml", broker=BROKER | {"topics": ["t/#"], "maps": {"t/#": "mine.yaml"}}),
        WRONG, "mine.yaml"),
    "no secret of the history's server": (
        _edit("racktwin.yaml", history={"influx": {"url": "http://h:1", "token_file": "it"}}), WRONG, "it"),
    "no secret of etcd": (
        _edit("racktwin.yaml", leader={"kind": "etcd", "endpoints": ["http://e:1"], "username": "u",
                                       "password_file": "ep"}), WRONG, "ep"),
    "no tokens file": (_edit("racktwin.yaml", api={"port": 0, "tokens_file": "t.yaml"}), WRONG, "t.yaml"),
    "no access to a cluster": (_edit("racktwin.yaml", kubernetes={"kubeconfig": "kc"}), WRONG, "kc"),
    "a file for the state folder": (_write("state", ""), BROKEN, "the state folder cannot be used"),
    "a folder for the lock": (_folder("state/daemon.lock"), BROKEN, "daemon.lock"),
    "a file for the run folder": (_write("state/run", ""), BROKEN, "state/run"),
    "a folder for the journal": (_folder("state/run/journal.jsonl"), BROKEN, "journal.jsonl"),
    "a folder for the reserve": (_folder("state/run/journal.reserve"), BROKEN, "journal.reserve"),
    "a folder for the alarms": (_folder("state/alarms.json"), BROKEN, "alarms.json"),
    "a journal of another version": (_write(f"state/run/{OPEN}", FOREIGN), BROKEN, "journal format 99"),
}  # fmt: skip


# Faults that end no start: the daemon ticks without it, and says so
DEGRADED: dict[str, tuple[Callable[[Host], None], str]] = {
    "a file for the history": (_write("state/history", ""), ""),
    "a history that is none": (_write("state/history/history.db", "no database" * 100), "moved aside"),
    "a folder for the epoch": (_folder("state/epoch"), "the epoch cannot be"),
    "a folder for the lock of the leader": (_folder("state/leader.lock"), ""),
    "a folder for the authority": (_folder("state/authority.json"), "advise at most"),
    "a folder for the token": (_folder("state/admin.token"), "admin.token"),
    "tokens that are none": (_write("state/tokens.yaml", "tokens: 7\n"), "tokens.yaml"),
    "alarms that are none": (_write("state/alarms.json", "[]"), "alarms.json"),
    "no broker": (lambda h: None, "Connection refused"),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", DEGRADED)
def test_a_part_that_fails_ends_no_start(children: ForkedChildren, tmp_path: Path, reason: str) -> None:
    spoil, words = DEGRADED[reason]
    host = Host(tmp_path / "host", children)
    host.configure()
    spoil(host)
    code, _ = host.start(words=words)  # parts have threads of their own: some fail after the first ticks
    said = host.words.read_text()
    assert (code, words in said) == (0, True), said
    assert "Traceback" not in said
    assert len(host.ticks()) >= TICKS
    check_heals(host, f"{reason}, still there")
    mend(host)
    check_heals(host, reason)


@pytest.mark.slow
@pytest.mark.parametrize("reason", REASONS)
def test_a_start_that_fails_for_a_reason_heals_when_it_is_gone(
    children: ForkedChildren, tmp_path: Path, reason: str
) -> None:
    spoil, expected, words = REASONS[reason]
    host = Host(tmp_path / "host", children)
    host.configure()
    spoil(host)
    for _ in range(2):  # as a service manager tries again
        code, _ = host.start()
        said = host.words.read_text()
        assert (code, words in said) == (expected, True), said
        assert "Traceback" not in said
    mend(host)
    check_heals(host, reason)


def mend(host: Host) -> None:
    """Take away what a reason put there."""
    host.configure()
    for name in ("state", "state/run"):
        if (host.folder / name).is_file():
            (host.folder / name).unlink()
    for path in (host.folder / "state").rglob("*"):
        if path.is_dir() and not any(path.iterdir()) and path.name != "run":
            path.rmdir()
    for name in ("state/history", "state/tokens.yaml"):
        if (host.folder / name).is_file():
            (host.folder / name).unlink()
    journal = host.run / OPEN
    if journal.is_file() and journal.read_text() == FOREIGN:
        journal.unlink()


@pytest.mark.slow
def test_a_port_in_use_ends_a_start_with_the_embedded_broker_and_no_later_one(
    children: ForkedChildren, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", children)
    host.configure()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        _edit("racktwin.yaml", broker="embedded", embedded_port=other.getsockname()[1])(host)
        for _ in range(2):
            assert host.start()[0] == BROKEN
        assert "the embedded broker on 127.0.0.1" in host.words.read_text()
    assert list(host.run.glob("snapshot-*.rts")) == [], "of no tick"
    check_heals(host, "the port is free again")


@pytest.mark.slow
def test_a_folder_in_use_is_refused_until_it_is_free(children: ForkedChildren, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", children)
    host.configure()
    host.run.mkdir(parents=True)
    with (host.folder / "state" / "daemon.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert host.start()[0] == BROKEN
        assert "one daemon per state folder" in host.words.read_text()
        assert list(host.run.iterdir()) == []
    check_heals(host, "nobody else uses it")


@pytest.mark.slow
def test_a_folder_that_an_earlier_version_left_is_gone_on_with(
    children: ForkedChildren, tmp_path: Path
) -> None:
    """A snapshot of no tick, a trace without a header, half a line: earlier versions ended there for good."""
    host = Host(tmp_path / "host", children)
    host.configure()
    _edit("racktwin.yaml", brokr=1)(host)
    assert host.start()[0] == WRONG
    host.configure()
    host.run.mkdir(parents=True)
    for name in ("snapshot--00000000001.rts", "trace-000000.rt"):
        (host.run / name).write_bytes(b"what was begun")
    (host.run / OPEN).write_bytes(b'{"seq":0,"pre')
    check_heals(host, "what an earlier version left")
    kept = {p.name for p in host.run.iterdir()}
    assert {"snapshot--00000000001.unticked", "trace-000000.torn", "journal.torn"} <= kept


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True], ids=["the same site", "another site"])
def test_a_run_that_could_not_be_traced_is_gone_on_with(
    children: ForkedChildren, tmp_path: Path, moved: bool
) -> None:
    """Ticks were journaled, no trace could be written: the twin goes on behind them, from its snapshot."""
    host = Host(tmp_path / "host", children)
    host.configure()
    assert host.start()[0] == 0
    for path in host.run.glob("trace-*.rt"):
        path.unlink()
    if moved:
        for path in host.run.glob("snapshot-*.rts"):
            path.unlink()
        _edit("site.yaml", site="elsewhere")(host)
    check_heals(host, "a run without a trace")
    assert host.ticks()[0] == TICKS, "no number is given twice"


@pytest.mark.slow
def test_a_port_of_the_interface_in_use_ends_no_start_and_is_tried_again(
    children: ForkedChildren, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", children)
    host.configure()

    async def scene(other: socket.socket) -> None:
        daemon = Daemon(load_config(host.folder / "racktwin.yaml"), SdNotify())
        task = asyncio.create_task(daemon.run())
        async with asyncio.timeout(20):
            while not (daemon.live.ready and "cannot listen" in daemon.live.parts["api"].error):
                await asyncio.sleep(0.02)
            other.close()
            await daemon.services.api.bound.wait()
        daemon.stop()
        await task

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        _edit("racktwin.yaml", api={"port": other.getsockname()[1]})(host)
        asyncio.run(scene(other))
    host.configure()
    check_heals(host, "after that")
