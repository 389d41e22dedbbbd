"""The embedded broker: it carries messages, dies with its parent, and comes back on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from connectors.mqtt import LinkSettings, MqttLink
from tests.support.inlets import until
from tests.support.patience import PATIENCE_S
from twin.catalogue import ConnectorError
from twin.telemetry import Message
from twin.wiring import EmbeddedBroker


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_carries_messages_and_retains_them_until_it_is_stopped() -> None:
    async def play() -> None:
        broker = EmbeddedBroker()
        port = await broker.start()
        pid = broker.pid
        assert pid is not None
        got: list[Message] = []
        link = MqttLink(LinkSettings("127.0.0.1", port), (("a/#", 1),), canary="IT/v1/x/Canary/y")
        task = asyncio.create_task(link.run(got.append, lambda *lost: None))
        await until(lambda: link.connected, "a connection")
        await link.publish("a/kept", b"1", qos=1, retain=True)
        await link.publish("a/live", bytes(range(256)), qos=0)
        await until(lambda: len(got) == 2, "both messages")
        assert {m.topic: m.payload for m in got} == {"a/kept": b"1", "a/live": bytes(range(256))}
        await until(lambda: link._canary_back.is_set(), "the canary")
        late: list[Message] = []
        second = MqttLink(LinkSettings("127.0.0.1", port, "second"), (("a/#", 1),))
        other = asyncio.create_task(second.run(late.append, lambda *lost: None))
        await until(lambda: bool(late), "the retained message")
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other
        late.clear()
        other = asyncio.create_task(second.run(late.append, lambda *lost: None))
        await until(lambda: bool(late), "the retained message again")
        for each in (task, other):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await each
        await broker.stop()
        await until(lambda: not alive(pid), "the end of the child")

    asyncio.run(play())


def test_run_ends_with_an_error_when_the_child_dies_and_the_next_takes_the_same_port() -> None:
    async def play() -> None:
        broker = EmbeddedBroker()
        port = await broker.start()
        running = asyncio.create_task(broker.run())
        await asyncio.sleep(0)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        with pytest.raises(ConnectorError, match=f"127.0.0.1:{port} ended with -9"):
            await running
        again = asyncio.create_task(broker.run())
        await until(lambda: broker.running and broker.port == port and _listens(port), "the same port")
        again.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await again
        assert not broker.running

    asyncio.run(play())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_says_in_one_line_that_a_port_is_taken() -> None:
    async def play(port: int) -> str:
        with pytest.raises(ConnectorError) as caught:
            await EmbeddedBroker(port).start()
        return str(caught.value)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = asyncio.run(play(taken.getsockname()[1]))
    assert "did not start" in said
    assert "address already in use" in said.lower()
    assert "\n" not in said


def test_dies_with_a_parent_that_is_killed() -> None:
    code = (
        "import asyncio\n"
        "from twin.wiring.embedded_broker import EmbeddedBroker\n"
        "async def main():\n"
        "    broker = EmbeddedBroker()\n"
        "    await broker.start()\n"
        "    print(broker.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    end = time.monotonic() + PATIENCE_S
    while alive(child):
        assert time.monotonic() < end, "the broker outlived its parent"
        time.sleep(0.02)
