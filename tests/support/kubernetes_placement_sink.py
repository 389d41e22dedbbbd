"""A sink of placement that a test commands by hand, beside that of service levels; a source to watch it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from connectors.kubernetes import (
    PLACEMENT,
    STANDBY,
    Hosts,
    KubernetesClient,
    KubernetesPlacement,
    KubernetesSource,
)
from connectors.kubernetes.access import Access
from connectors.kubernetes.nodes import PLACEMENT_TAINT, TAINT
from connectors.kubernetes.objects import KubernetesNode
from connectors.kubernetes.placement import CONTROL
from connectors.orders import SinkContext
from tests.support.inlets import RecordingInlet, until
from tests.support.kubernetes_apiserver import Cluster
from tests.support.kubernetes_service_sink import Driven
from twin.contracts import CommandBatch
from twin.site import Site
from twin.telemetry import Reading

LAST = {"key": PLACEMENT_TAINT, "value": "last", "effect": "PreferNoSchedule"}
KEPT = {"key": PLACEMENT_TAINT, "value": "kept", "effect": "NoSchedule"}
OUT = {"key": TAINT, "value": "draining", "effect": "NoSchedule"}
GARBAGE: list[list[dict[str, Any]]] = [
    [{**LAST, "effect": "NoSchedule"}],
    [{**KEPT, "effect": "PreferNoSchedule"}],
    [{**KEPT, "effect": "NoExecute"}],
    [{"key": PLACEMENT_TAINT, "effect": "NoSchedule"}],
    [{"key": PLACEMENT_TAINT, "value": "usual", "effect": "NoSchedule"}],
    [{"key": PLACEMENT_TAINT, "value": ["kept"], "effect": {"a": 1}}],
    [LAST, KEPT],
]


class Placing(Driven):
    """Both sinks of one daemon; `order` and `reach` are of placement, `level` of the service level."""

    def __init__(
        self,
        site: Site,
        port: int | None,
        epoch: int,
        seen: Callable[[str], KubernetesNode | None] = lambda _: None,
    ) -> None:
        super().__init__(site, port, epoch)
        self.hosts: Hosts = self.sink._hosts
        self.placing = KubernetesPlacement(
            KubernetesClient(lambda: Access(f"http://127.0.0.1:{port}"), timeout_s=5),
            self.hosts,
            SinkContext(self._stage, lambda: self.leads),
            seen,
        )

    async def order(
        self, level: int, nodes: Sequence[int] = (0,), number: int | None = None, renewal: bool = False,
        lease_s: float = 600, deadline_s: float = 120, why: str = "suspect", policy: str = "replacement",
    ) -> None:  # fmt: skip
        self.number = self.number + 1 if number is None else number
        now_ns, n = time.time_ns(), len(nodes)
        await self.placing.apply((CommandBatch(
            CONTROL, policy, self.epoch, np.array(nodes, np.int32), np.full(n, 4, np.int32),
            np.full(n, self.number, np.int64), np.full(n, float(level)), "" if renewal else why, now_ns,
            now_ns + round(lease_s * 1e9), now_ns + round(deadline_s * 1e9), renewal,
        ),))  # fmt: skip

    async def level(self, level: int) -> None:
        """Node 0 has this service level."""
        before = len(self.acks)
        await super().order(level)
        await self.until(lambda: any(a.state == "done" for a in self.acks[before:]))

    async def idle(self) -> None:
        """All that was ordered has been looked at, and waits for nothing."""
        await self.until(lambda: all(w.due_s == float("inf") for w in self.placing._works.values()))


@asynccontextmanager
async def placing(site: Site, cluster: Cluster, epoch: int = 3, **more: Any) -> AsyncIterator[Placing]:
    mine = Placing(site, cluster.port, epoch, **more)
    tasks = [asyncio.create_task(mine.sink.run()), asyncio.create_task(mine.placing.run())]
    try:
        yield mine
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def taints(cluster: Cluster, node: str = "n0") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.node(node)["spec"].get("taints", [])
    return found


class Heard(RecordingInlet):
    """An inlet, by signals of nodes."""

    def of(self, node: int, signal: str = "placement_state") -> list[Reading]:
        return [r for r in self.items if isinstance(r, Reading) and (r.entity, r.signal) == (node, signal)]

    def last(self, node: int, signal: str = "placement_state") -> float | None:
        told = self.of(node, signal)
        return told[-1].value if told else -1.0


@asynccontextmanager
async def followed(
    site: Site, cluster: Cluster, placement: bool = True, standby: bool = False
) -> AsyncIterator[tuple[KubernetesSource, Heard]]:
    """A source that has heard of all four nodes."""
    client = KubernetesClient(lambda: Access(f"http://127.0.0.1:{cluster.port}"), timeout_s=5)
    hosts = Hosts(site, {"n[0-3]": "r1/node[0-3]"})
    also = [s for s, read in ((PLACEMENT, placement), (STANDBY, standby)) if read]
    source = KubernetesSource(client, hosts, settle_s=0.02, also=also)
    heard = Heard()
    task = asyncio.create_task(source.run(heard))
    try:
        await until(lambda: heard.last(3, "service_level_state") == 0.0)
        yield source, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
