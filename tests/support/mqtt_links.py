"""Links to a broker that run beside a test.

async with held(Link(settings(broker), (("a/#", 1),))) as run:
    await until(lambda: len(run.got) == 3, "all of them")
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.mqtt import LinkSettings, MqttLink
from tests.support.inlets import PATIENCE_S, until
from tests.support.mosquitto import Mosquitto
from twin.catalogue import ConnectorError
from twin.telemetry import Message

Server = Callable[..., Path]


class Held:
    """A link that runs, what it delivered and what it lost."""

    def __init__(self, link: MqttLink, delay_s: float = 0.0) -> None:
        self.link, self.delay_s = link, delay_s
        self.got: list[Message] = []
        self.lost: list[tuple[str, str, int]] = []
        self.peak = 0
        self.task: asyncio.Task[None] = asyncio.create_task(link.run(self.take, self.lose))

    def take(self, message: Message) -> None:
        self.got.append(message)
        if self.link._connection is not None:
            self.peak = max(self.peak, len(self.link._connection.tap.backlog))
        if self.delay_s:
            end = time.perf_counter() + self.delay_s
            while time.perf_counter() < end:
                pass

    def lose(self, where: str, why: str, count: int) -> None:
        self.lost.append((where, why, count))

    async def ended(self) -> str:
        with pytest.raises(ConnectorError) as caught:
            await asyncio.wait_for(self.task, PATIENCE_S)
        return str(caught.value)


@contextlib.asynccontextmanager
async def held(link: MqttLink, delay_s: float = 0.0) -> AsyncIterator[Held]:
    run = Held(link, delay_s)
    try:
        await until(lambda: link.connected or run.task.done(), "a connection")
        yield run
    finally:
        run.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectorError):
            await run.task


def settings(broker: Mosquitto, name: str = "racktwin", **more: Any) -> LinkSettings:
    return LinkSettings("127.0.0.1", broker.port, name, **more)
