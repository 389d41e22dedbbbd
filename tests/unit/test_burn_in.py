"""Burn-in: what a program's end says of a node, what is run and what is not, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.jobs import BurnInProgram, BurnInSink, burn_in, burn_in_run
from connectors.jobs.burn_in import CONTROL, TRIES
from connectors.jobs.burn_in_run import BurnInFolder, BurnInOutcome, run_test
from connectors.orders import SinkContext
from tests.support.builders import site_of, two_racks
from twin.catalogue import NS
from twin.contracts import CommandBatch, Item
from twin.telemetry import CommandAcked, NodeTested

SITE = site_of(two_racks())
NODE = SITE.name("node", 0)


def found_of(words: Sequence[str], folder: Path, timeout_s: float = 20.0) -> BurnInOutcome:
    return asyncio.run(run_test(words, BurnInFolder(folder), NODE, "gpu1", timeout_s, time.time_ns()))


def sh(text: str) -> list[str]:
    return ["/bin/sh", "-c", text]


@pytest.mark.parametrize(
    "words, passed, said",
    [
        (sh("echo fine"), True, "fine"), (sh("echo bad >&2; exit 1"), False, "bad"),
        (sh("exit 125"), False, "[exit 125, no output]"), (sh("exit 126"), None, "[exit 126: no result]"),
        (sh("exit 127"), None, "[exit 127: no result]"), (sh("kill -9 $$"), None, "[signal 9: no result]"),
        (["/no/such/test"], None, "/no/such/test: cannot be run: No such file or directory"),
        (["/"], None, "/: cannot be run: Permission denied"), (sh("printf 'x\\377y'"), True, "x�y"),
        (sh("echo $RACKTWIN_NODE $RACKTWIN_HOST $SECRET"), True, f"{NODE} gpu1"),
    ],
)  # fmt: skip
def test_ends(
    words: list[str], passed: bool | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s")
    assert found_of(words, tmp_path / "new") == (passed, said)


def test_output_is_kept_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in_run, "MAX_FILE", 1000)
    found = found_of(sh("head -c 200000 /dev/zero | tr '\\0' x; echo last words"), tmp_path)
    assert found.passed is True
    assert len(found.detail) <= burn_in_run.MAX_TAIL
    assert found.detail.endswith("last words")
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    assert len(text) < 1000 + burn_in_run.MAX_TAIL + 100
    assert "[cut here; the end was:]" in text


def test_only_the_last_outputs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in_run, "MAX_FILES", 3)
    for i in range(6):
        path = tmp_path / f"old-{i}.log"
        path.write_text("x")
        os.utime(path, (i, i))
    assert found_of(sh("echo new"), tmp_path).passed is True
    names = sorted(p.name for p in tmp_path.glob("*.log"))
    assert len(names) == 3
    assert {"old-4.log", "old-5.log"} < set(names)


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids(folder: Path) -> list[int]:
    return [int(p) for p in (folder / "pids").read_text().split()]


STUBBORN = "trap '' TERM; echo $$ >> {0}/pids; sh -c 'echo $$ >> {0}/pids; exec sleep 60' & wait; wait"


@pytest.mark.parametrize("ending", ["timeout", "cancel"])
def test_nothing_is_left_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(burn_in_run, "GRACE_S", 0.2)
    monkeypatch.setattr(burn_in_run, "STOP_S", 0.2)
    words = sh(STUBBORN.format(tmp_path))
    if ending == "timeout":
        found = found_of(words, tmp_path, 0.5)
        assert found.passed is None
        assert "no end within 0.5 s" in found.detail
    else:

        async def run() -> None:
            places = BurnInFolder(tmp_path)
            task = asyncio.create_task(run_test(words, places, NODE, "h", 60, 1))
            while not (tmp_path / "pids").exists() or len(pids(tmp_path)) < 2:
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
    assert len(pids(tmp_path)) == 2
    assert not [p for p in pids(tmp_path) if alive(p)]


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    found = found_of(sh(f"sleep 60 & echo $! > {tmp_path}/pids; echo done"), tmp_path)
    assert found == (True, "done")
    assert not alive(pids(tmp_path)[0])


def test_a_test_that_outlived_its_daemon_is_ended_before_the_next(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from connectors.jobs.burn_in_run import *\n"
        f"asyncio.run(run_test(sys.argv[2:], BurnInFolder(Path(sys.argv[1])), {NODE!r}, 'h', 60, 1))"
    )
    words = sh(f"echo $$ > {tmp_path}/pids; exec sleep 60")
    daemon = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *words])
    places = BurnInFolder(tmp_path)
    while not (tmp_path / "pids").exists() or not pids(tmp_path) or not places.holder(NODE):
        time.sleep(0.02)
    (orphan,) = pids(tmp_path)
    daemon.kill()
    daemon.wait()
    assert alive(orphan)
    assert places.alive(NODE)
    assert found_of(sh("echo fine"), tmp_path) == (True, "fine")
    assert not alive(orphan)


def test_a_disk_that_is_full_costs_the_output_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BurnInFolder, "output", full)
    assert found_of(sh("head -c 300000 /dev/zero | tr '\\0' x; echo end"), tmp_path).passed is True


def test_names_become_files_of_our_folder() -> None:
    stems = [
        BurnInFolder(Path("/x")).stem(n) for n in ("a/b/node0", "a/b_node0", "../../etc", "n" * 500, "é")
    ]
    assert len(set(stems)) == 5
    assert not [s for s in stems if "/" in s or s.startswith(".") or len(s) > 100]


@pytest.mark.parametrize(
    "remote, passed",
    [
        ("echo '{\"status\": \"Pass\"}'", True), ("echo '{\"a\": \"Pass\", \"b\": \"Fail\"}'", False),
        ("echo '\"Fail\"'; exit 226", False), ("echo '\"Pass\" \"Warn\"'", None),
        ("echo '\"Pass\"'; exit 226", None),
        ("echo no route >&2; exit 255", None), ("exit 127", None), ("", None),
    ],
)  # fmt: skip
def test_the_example_for_dcgm(
    remote: str, passed: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{remote}\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = Path(__file__).parents[2] / "deploy" / "burn_in" / "dcgm-diag.sh"
    assert found_of([str(script), "gpu1"], tmp_path / "state").passed is passed
    assert (tmp_path / "asked").read_text().strip().endswith("-- gpu1 dcgmi diag -r 3 -j")


class World:
    """A sink, its work, and what they stage. `ready` and `tested` are what the daemon knows."""

    def __init__(self, folder: Path, words: Sequence[str], **more: Any) -> None:
        self.staged: list[Item] = []
        self.leads, self.back, self.why = True, set[int](), dict[int, str]()
        self.book: dict[int, tuple[int, bool]] = {}
        context = SinkContext(lambda items, now_ns: self.staged.extend(items), lambda: self.leads)
        program = BurnInProgram(command=words, **more)
        self.sink = BurnInSink(SITE, program, folder, context, self, check_s=0.01)
        self.number = 0

    def why_not_now(self, node: int) -> str:
        return self.why.get(node, "")

    def returned(self, node: int) -> bool:
        return node in self.back

    def tested(self, node: int) -> tuple[int, bool] | None:
        return self.book.get(node)

    def host_of(self, node: int) -> str:
        return f"gpu{node}"

    def batch(self, since_s: float, *nodes: int, **more: Any) -> CommandBatch:
        self.number += 100
        k = len(nodes)
        plain: dict[str, Any] = {
            "control": CONTROL, "policy": "p", "epoch": 7, "index": np.array(nodes, np.int32),
            "generation": np.zeros(k, np.int32), "command": self.number + np.arange(k),
            "value": np.full(k, float(since_s)), "reason": "r", "issued_ns": 0, "expires_ns": 2**62,
            "deadline_ns": 2**62,
        }  # fmt: skip
        return CommandBatch(**(plain | more))

    def tests(self, node: int = 0) -> list[NodeTested]:
        name = SITE.name("node", node)
        return [e for e in self.staged if isinstance(e, NodeTested) and e.name == name]

    def acks(self, node: int = 0) -> list[str]:
        name = SITE.name("node", node)
        return [e.state for e in self.staged if isinstance(e, CommandAcked) and e.name == name]

    def run(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            work = asyncio.create_task(self.sink.run())
            try:
                async with asyncio.timeout(30):
                    await story()
            finally:
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work

        asyncio.run(main())


async def until(met: Callable[[], object]) -> None:
    while not met():
        await asyncio.sleep(0.01)


async def a_while() -> None:
    await asyncio.sleep(0.15)


def test_a_node_is_tested_once_for_all_that_ask(tmp_path: Path) -> None:
    world = World(tmp_path, sh(f"echo {{host}} {{node}} >> {tmp_path}/ran; sleep 0.2"))
    since = time.time() - 5

    async def story() -> None:
        batch = world.batch(since, 0)
        await world.sink.apply((batch,))
        await world.sink.apply((batch,))
        await until(lambda: "in_progress" in world.acks())
        await world.sink.apply((world.batch(since - 1, 0, epoch=8),))  # a new term; asked for less
        await world.sink.apply((world.batch(since, 0, epoch=6),))  # an old one
        await until(world.tests)
        await world.sink.apply((world.batch(since, 0, epoch=8, renewal=True),))
        await a_while()

    world.run(story)
    assert (tmp_path / "ran").read_text() == f"gpu0 {NODE}\n"
    (event,) = world.tests()
    assert event.passed is True
    assert since * NS < event.began_ns <= event.ended_ns <= time.time_ns()
    assert world.acks()[:2] == ["accepted", "accepted"]
    assert world.acks()[-2:] == ["done", "done"]
    assert world.sink.counts["old"] == 1


def test_a_later_instant_asks_for_another_test(tmp_path: Path) -> None:
    world = World(tmp_path, sh("exit 1"))

    async def story() -> None:
        await world.sink.apply((world.batch(1, 0),))
        await until(world.tests)
        await world.sink.apply((world.batch(time.time() + 0.2, 0),))
        await a_while()
        assert len(world.tests()) == 1  # its instant is to come
        await until(lambda: len(world.tests()) == 2)

    world.run(story)
    assert [e.passed for e in world.tests()] == [False, False]
    assert world.acks()[-1] == "done"  # tested, and failed: that is an answer


def test_a_result_of_an_earlier_life_is_not_made_again(tmp_path: Path) -> None:
    world = World(tmp_path, sh("exit 0"))
    world.book = {0: (1000 * NS, True)}
    world.sink._tested = world.book.get

    async def story() -> None:
        await world.sink.apply((world.batch(1000, 0, renewal=True),))
        await a_while()
        assert (world.tests(), world.acks()) == ([], ["done"])
        await world.sink.apply((world.batch(1001, 0),))
        await until(world.tests)

    world.run(story)


def test_no_more_at_once_than_allowed_and_never_two_on_a_node(tmp_path: Path) -> None:
    script = (
        f"mkdir {tmp_path}/on-{{host}} || echo two >> {tmp_path}/bad; "
        f"ls {tmp_path} | grep -c on- >> {tmp_path}/n; sleep 0.1; rmdir {tmp_path}/on-{{host}}"
    )
    world = World(tmp_path / "state", sh(script), at_once=2)

    async def story() -> None:
        await world.sink.apply((world.batch(1, 0, 1, 2, 3),))
        for _ in range(3):
            await asyncio.sleep(0.05)
            await world.sink.apply((world.batch(time.time(), 0, 1, 2, 3),))
        await until(lambda: all(world.acks(n)[-1] == "done" for n in range(4)))

    world.run(story)
    assert not (tmp_path / "bad").exists()
    assert max(map(int, (tmp_path / "n").read_text().split())) == 2


def test_a_node_that_is_used_waits_and_one_that_returns_is_left(tmp_path: Path) -> None:
    world = World(tmp_path, sh("sleep 60"))
    world.why[0] = "waits: the node is in service"

    async def story() -> None:
        await world.sink.apply((world.batch(1, 0),))
        await a_while()
        assert world.acks() == ["accepted"]
        world.why.clear()
        await until(lambda: "in_progress" in world.acks())
        world.back.add(0)
        await until(world.tests)

    world.run(story)
    (event,) = world.tests()
    assert (event.passed, event.detail) == (None, "stopped before its end")


@pytest.mark.parametrize("ending", ["lead", "stop"])
def test_tests_end_with_our_term_and_with_us(tmp_path: Path, ending: str) -> None:
    world = World(tmp_path, sh(f"echo $$ > {tmp_path}/pids; exec sleep 60"))

    async def story() -> None:
        await world.sink.apply((world.batch(1, 0),))
        await until(lambda: (tmp_path / "pids").exists() and pids(tmp_path))
        if ending == "lead":
            world.leads = False
            await until(lambda: not alive(pids(tmp_path)[0]))

    world.run(story)
    assert not alive(pids(tmp_path)[0])
    assert [e.passed for e in world.tests()] == [None]


def test_without_a_result_there_are_few_more_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in, "AGAIN_S", 0.01)
    world = World(tmp_path, ["/no/such/test"])

    async def story() -> None:
        batch = world.batch(1, 0)
        await world.sink.apply((batch,))
        await until(lambda: world.acks()[-1] == "failed")
        await world.sink.apply((batch,))
        await a_while()

    world.run(story)
    assert [e.passed for e in world.tests()] == [None] * TRIES
    assert world.acks()[-2:] == ["failed", "failed"]


def test_nobody_asks_any_more(tmp_path: Path) -> None:
    world = World(tmp_path, sh("exit 0"))
    world.why[0] = "waits"

    async def story() -> None:
        await world.sink.apply((world.batch(1, 0, expires_ns=time.time_ns() + NS // 20),))
        await a_while()
        world.why.clear()
        await a_while()

    world.run(story)
    assert world.tests() == []


@pytest.mark.parametrize("value", [float("nan"), -1.0, 1e11])
def test_what_is_no_instant(tmp_path: Path, value: float) -> None:
    world = World(tmp_path, sh("exit 0"))

    async def story() -> None:
        await world.sink.apply((world.batch(value, 0),))
        await a_while()

    world.run(story)
    assert (world.acks(), world.tests()) == (["failed"], [])
