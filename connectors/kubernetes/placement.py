"""Placement on Kubernetes: the taint by which a scheduler uses a node last, or not at all.

What the source has just seen as it is wanted needs no request, so that thousands of renewals ask nothing. The
taint itself is the only memory of what was done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from connectors.kubernetes.client import WATCH_S, KubernetesClient
from connectors.kubernetes.nodes import PLACEMENTS, Hosts, Plan, placement_plan
from connectors.kubernetes.objects import KubernetesNode
from connectors.kubernetes.orders import NodeOrders, NodeWork
from connectors.orders import SinkContext

CONTROL = "node.placement"
SLICE = 500  # nodes that are compared with what was seen at a stretch
# A view of the nodes is no older than two watches: our own write of longer ago is in it.
ECHO_NS = 2 * WATCH_S * 10**9


class KubernetesPlacement(NodeOrders[NodeWork]):
    """Carries out `node.placement`.

    `seen` gives a node as the source last reported it, by its name in the cluster, or None where that is
    older than two watches.
    """

    name = "kubernetes-placement"
    controls: tuple[str, ...] = (CONTROL,)

    def __init__(
        self,
        client: KubernetesClient,
        hosts: Hosts,
        context: SinkContext,
        seen: Callable[[str], KubernetesNode | None],
    ) -> None:
        super().__init__(client, hosts, PLACEMENTS, NodeWork, context)
        self._seen = seen
        self._wrote_ns: dict[int, int] = {}  # when we last asked for a change of a node
        self.counts["seen"] = 0

    def _forget(self) -> None:
        super()._forget()
        now_ns = self._now_ns()
        for entity in [e for e, at_ns in self._wrote_ns.items() if abs(now_ns - at_ns) > ECHO_NS]:
            del self._wrote_ns[entity]

    async def _take_up(self, due: Sequence[NodeWork]) -> None:
        """Complete orders that the source already sees fulfilled; requests all others."""
        new = [w for w in due if w.due_s == 0.0]
        if not new:
            await super()._take_up(due)
        for first in range(0, len(new), SLICE):
            for work in new[first : first + SLICE]:
                work.due_s = time.monotonic()
                if self._is_so(work):
                    self.counts["seen"] += 1
                    self._complete(work)
            await asyncio.sleep(0)

    def _is_so(self, work: NodeWork) -> bool:
        """Return True if a node is known to have the wanted placement, without a request."""
        host = self._hosts.host_of(work.entity)
        if host is None or work.entity in self._wrote_ns:  # our own change may not have been received yet
            return False
        node = self._seen(host)
        return node is not None and self._plan(node, work) == Plan(None)

    def _plan(self, node: KubernetesNode, work: NodeWork) -> Plan:
        return placement_plan(node, work.order.value, work.order.epoch)

    async def _carry_out(self, host: str, work: NodeWork) -> None:
        if await self._change(host, work) is not None:
            self._complete(work)

    async def _patch(self, host: str, work: NodeWork, patch: dict[str, Any]) -> bytes:
        self._wrote_ns[work.entity] = self._now_ns()  # before, as the answer may be lost
        try:
            return await super()._patch(host, work, patch)
        finally:
            self._wrote_ns[work.entity] = self._now_ns()

    def _complete(self, work: NodeWork) -> None:
        self._end(work, "done", PLACEMENTS[work.order.value])
