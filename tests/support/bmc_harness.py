"""A sink and a source of BMCs driven by a test: commands in, answers and read-backs out, a clock to turn.

mine = Driven(site, fleet)
async with mine:
    await mine.command({0: 500.0})
    assert await mine.answer(0) == ("done", "")
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from connectors.bmc import GPU_CAP, BmcSink, BmcSource, Fleet
from connectors.orders import SinkContext
from tests.support.patience import PATIENCE_S
from twin.catalogue import NS
from twin.contracts import CommandBatch, Item
from twin.site import Site
from twin.telemetry import CommandAcked, Reading


class Driven:
    """`shift_s` moves the clock; `leads` is asked before each change; `spoiled` has a source's complaints."""

    def __init__(self, site: Site, fleet: Fleet, *, period_s: float = 0.2, looks: bool = False,
                 left: Any = lambda key: "", found: Any = lambda key: math.nan) -> None:  # fmt: skip
        self.site, self.fleet = site, fleet
        self.staged: list[Item] = []
        self.spoiled: list[tuple[str, str]] = []
        self.poll_s = 0.0
        self.leads, self.shift_s, self.number, self.epoch = True, 0.0, 0, 3
        context = SinkContext(self.stage, lambda: self.leads, self.now_ns)
        self.sink = BmcSink("bmc", site, fleet, context, left, found)
        self.source = BmcSource("bmc", fleet, period_s, left_to_others=left)
        self._looks, self._tasks = looks, list[asyncio.Task[None]]()

    async def __aenter__(self) -> Driven:
        self._tasks.append(asyncio.create_task(self.sink.run()))
        if self._looks:
            self._tasks.append(asyncio.create_task(self.source.run(self)))
        return self

    async def __aexit__(self, *_: type | BaseException | TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        for left in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert left is None or isinstance(left, asyncio.CancelledError), left

    def now_ns(self) -> int:
        """The clock of leases."""
        return time.time_ns() + round(self.shift_s * NS)

    def stage(self, items: Sequence[Item], now_ns: int, poll_s: float = 0.0) -> None:
        """As an inlet does."""
        self.staged += items
        self.poll_s = poll_s

    def of(self, source: str, outside: bool = False) -> Self:
        return self

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        """As an inlet does."""

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        """As an inlet does."""
        self.spoiled.append((where, why))

    def fail(self, why: str, remedy: str = "") -> None:
        """As an inlet does."""
        self.spoiled.append(("", why))

    def drop(self, where: str, why: str, count: int = 1) -> None:
        """As an inlet does."""

    async def command(
        self, values: Mapping[int, float], control: str = GPU_CAP, *, lease_s: float = 30.0,
        deadline_s: float = 10.0, **more: Any,
    ) -> CommandBatch:  # fmt: skip
        """New commands, each with a number of its own."""
        first = self.number + 1
        self.number += len(values)
        now_ns = self.now_ns()
        n = len(values)
        batch = CommandBatch(
            control, more.pop("policy", "power_cap"), more.pop("epoch", self.epoch),
            np.array(list(values), np.int32),
            np.zeros(n, np.int32), more.pop("command", first + np.arange(n)), np.array(list(values.values())),
            "a test", now_ns, now_ns + round(lease_s * NS), now_ns + round(deadline_s * NS), **more,
        )  # fmt: skip
        await self.sink.apply((batch,))
        return batch

    async def again(self, batch: CommandBatch, lease_s: float = 30.0) -> None:
        """Renew a batch."""
        from dataclasses import replace

        now_ns = self.now_ns()
        renewed = replace(batch, issued_ns=now_ns, expires_ns=now_ns + round(lease_s * NS),
                          deadline_ns=now_ns + 10 * NS, renewal=True)  # fmt: skip
        await self.sink.apply((renewed,))

    def answers(self, name: str | None = None) -> list[CommandAcked]:
        """All answers, of one entity."""
        acks = [x for x in self.staged if isinstance(x, CommandAcked)]
        return [a for a in acks if name is None or a.name == name]

    async def answer(self, entity: int, table: str = "gpu") -> tuple[str, str]:
        """(state, words) of how the newest command of an entity ended."""
        name = self.site.name(table, entity)

        def ended() -> CommandAcked | None:
            acks = [a for a in self.answers(name) if a.state in ("done", "failed")]
            return acks[-1] if acks else None

        await self.until(lambda: ended() is not None)
        ack = ended()
        assert ack is not None
        return ack.state, ack.detail

    def forget(self) -> None:
        """Remove all staged events."""
        self.staged.clear()

    def read(self, signal: str) -> list[tuple[int, float | None]]:
        """Read-backs of a signal, in order."""
        return [(x.entity, x.value) for x in self.staged if isinstance(x, Reading) and x.signal == signal]

    async def until(self, true: Any, what: str = "") -> None:
        """Wait for something, for as long as a busy machine may need."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.005)
