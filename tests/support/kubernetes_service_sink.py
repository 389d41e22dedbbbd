"""A sink of service levels that a test commands by hand, and a cluster of four nodes to try it on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from connectors.kubernetes import (
    Hosts,
    KubernetesClient,
    KubernetesSink,
    client as kubernetes_client,
    drain,
    orders,
)
from connectors.kubernetes.access import Access
from connectors.kubernetes.sink import CONTROL
from connectors.orders import SinkContext
from tests.support.kubernetes_apiserver import Cluster
from tests.support.patience import PATIENCE_S
from twin.contracts import CommandBatch, Item
from twin.site import Site
from twin.telemetry import CommandAcked

THEIRS = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short."""
    monkeypatch.setattr(kubernetes_client, "FIRST_S", 0.01)
    monkeypatch.setattr(drain, "FIRST_S", 0.02)
    monkeypatch.setattr(drain, "LONGEST_S", 0.05)
    monkeypatch.setattr(orders, "FIRST_S", 0.02)
    monkeypatch.setattr(orders, "REPEAT_S", 0.0)


class Driven:
    """A sink that is commanded by hand, of one daemon."""

    def __init__(self, site: Site, port: int | None, epoch: int, **more: Any) -> None:
        self.epoch, self.acks, self.leads = epoch, list[CommandAcked](), True
        hosts = Hosts(site, {"n[0-3]": "r1/node[0-3]"})
        hosts.take(["n0", "n1", "n2", "n3"])
        client = KubernetesClient(lambda: Access(f"http://127.0.0.1:{port}"), timeout_s=5)
        self.sink = KubernetesSink(
            client, hosts, SinkContext(self._stage, lambda: self.leads), poll_s=0.02, **more
        )
        self.number = 0

    def _stage(self, items: Sequence[Item], now_ns: int) -> None:
        self.acks += [i for i in items if isinstance(i, CommandAcked)]

    async def order(
        self, level: int, nodes: Sequence[int] = (0,), number: int | None = None, renewal: bool = False,
        lease_s: float = 300, deadline_s: float = 7200, why: str = "XID 79 twice",
        policy: str = "replacement",
    ) -> None:  # fmt: skip
        self.number = self.number + 1 if number is None else number
        now_ns, n = time.time_ns(), len(nodes)
        await self.sink.apply((CommandBatch(
            CONTROL, policy, self.epoch, np.array(nodes, np.int32), np.full(n, 4, np.int32),
            np.full(n, self.number, np.int64), np.full(n, float(level)), "" if renewal else why, now_ns,
            now_ns + round(lease_s * 1e9), now_ns + round(deadline_s * 1e9), renewal,
        ),))  # fmt: skip

    def last(self) -> tuple[str, str]:
        return (self.acks[-1].state, self.acks[-1].detail) if self.acks else ("", "")

    async def until(self, met: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not met():
            assert time.monotonic() < deadline, (self.acks, self.sink.fault)
            await asyncio.sleep(0.01)

    async def reach(self, state: str, level: int, **more: Any) -> str:
        """NodeCommand a level; what is said when it comes to this state."""
        before = len(self.acks)
        await self.order(level, **more)
        await self.until(lambda: any(a.state == state for a in self.acks[before:]))
        return self.acks[-1].detail


@asynccontextmanager
async def driven(site: Site, cluster: Cluster, epoch: int = 3, **more: Any) -> AsyncIterator[Driven]:
    mine = Driven(site, cluster.port, epoch, **more)
    task = asyncio.create_task(mine.sink.run())
    try:
        yield mine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(story: Callable[[Cluster], Any], provisioning: bool = False) -> Cluster:
    """Run a story with a cluster of four nodes."""
    cluster = Cluster(provisioning=provisioning)

    async def run() -> None:
        async with cluster.serving():
            for n in range(4):
                cluster.put_node(f"n{n}", taints=[THEIRS])
            await story(cluster)

    asyncio.run(run())
    assert not cluster.asked("DELETE", "/")
    return cluster
