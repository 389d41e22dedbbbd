"""Bytes that wait to be sent leave only while their condition is true at that very moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.mqtt.link import IN_FLIGHT, NOT_ALLOWED, LinkCounts, LinkSettings, MqttLink, Tap
from twin.catalogue import ConnectorError

PING = b"\xc0\x00"
COMMAND = b"\x30\x05\x00\x01t42"  # a publication of "42" on "t"


async def tapped(work: Callable[[Tap, socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Run `work` on a tap, with the library's end and the far end of the broker's socket."""
    raw, broker = socket.socketpair()
    tap = Tap(LinkSettings("nowhere"), LinkCounts())
    near = tap.attach(raw)
    tap.start()
    await asyncio.sleep(0)
    try:
        await work(tap, near, broker)
    finally:
        tap.close()
        for each in (near, broker):
            each.close()


@pytest.fixture(autouse=True)
def _no_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of Unix sockets knows no TCP_NODELAY."""
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *args: None)


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0.001)


def test_bytes_that_wait_behind_the_library_leave_only_while_they_may() -> None:
    async def work(tap: Tap, near: socket.socket, broker: socket.socket) -> None:
        broker.setblocking(False)
        leads = True
        with tap.only_while(lambda: leads):
            near.send(COMMAND)
            await _turns()
            assert broker.recv(100) == COMMAND
            near.send(COMMAND)  # and here the process is stopped until another daemon leads
            leads = False
            await _turns()
            assert tap.down.result() == NOT_ALLOWED
        assert broker.recv(100) == b"", "the connection has ended, without the command"

    asyncio.run(tapped(work))


def test_a_connection_without_a_command_on_its_way_lives_on_when_the_term_ends() -> None:
    async def work(tap: Tap, near: socket.socket, broker: socket.socket) -> None:
        broker.setblocking(False)
        leads = True
        with tap.only_while(lambda: leads):
            near.send(COMMAND)
            await _turns()
        leads = False
        near.send(PING)
        await _turns()
        assert broker.recv(100) == COMMAND + PING
        assert not tap.down.done()
        with pytest.raises(OSError, match="another daemon leads"), tap.only_while(lambda: leads):
            pytest.fail("it may not begin")

    asyncio.run(tapped(work))


def test_a_publication_that_waited_for_others_is_not_begun_after_the_term() -> None:
    """As many as may be on their way at once wait for the broker; one more waits for these."""

    async def work(tap: Tap, near: socket.socket, broker: socket.socket) -> None:
        link, begun, answered = MqttLink(LinkSettings("nowhere")), list[str](), asyncio.Event()
        leads = True

        async def publish(topic: str, *rest: Any) -> None:
            begun.append(topic)
            await answered.wait()

        connection: Any = SimpleNamespace(tap=tap, publish=publish)
        link._connection, link.connected = connection, True
        many = [
            asyncio.create_task(link.publish(str(k), b"", 1, False, lambda: leads))
            for k in range(IN_FLIGHT + 1)
        ]
        await _turns()
        assert len(begun) == IN_FLIGHT
        leads = False
        answered.set()
        results = await asyncio.gather(*many, return_exceptions=True)
        assert len(begun) == IN_FLIGHT
        assert results[:-1] == [None] * IN_FLIGHT
        assert isinstance(results[-1], ConnectorError)
        assert "another daemon leads" in str(results[-1])

    asyncio.run(tapped(work))
