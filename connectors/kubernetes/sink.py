"""Service levels on Kubernetes: cordon, taint, eviction, and a condition with the reason.

The node itself says what was done to it, so that a restart goes on where it was, and a node that people open
again is not closed at once.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field

from connectors.kubernetes.client import ApiError, KubernetesClient, now_text
from connectors.kubernetes.drain import Drain, evict_due
from connectors.kubernetes.nodes import (
    DRAINED,
    IN_SERVICE,
    LEVEL,
    LEVELS,
    REASON,
    Hosts,
    Plan,
    condition_patch,
    plan,
)
from connectors.kubernetes.objects import KubernetesNode
from connectors.kubernetes.orders import NodeOrders, NodeWork, path_of
from connectors.orders import OUTRANK, RESUMED_S, SinkContext

log = logging.getLogger(__name__)
CONTROL = "node.service_level"
POLL_S = 5.0  # between two lists of the pods that are leaving
MUTE_S = 600.0
AS_BEFORE = "arbiter"  # it commands anew what was in force, under a new term


@dataclass(slots=True, eq=False)
class _Work(NodeWork):
    """An ordered level. `late`: somebody opened the node just before."""

    late: bool = False
    drain: Drain = field(default_factory=Drain)


class KubernetesSink(NodeOrders[_Work]):
    """Carries out `node.service_level`. `poll_s` lies between two rounds of evictions on a node."""

    name = "kubernetes"
    controls: tuple[str, ...] = (CONTROL,)

    def __init__(
        self,
        client: KubernetesClient,
        hosts: Hosts,
        context: SinkContext,
        *,
        evict_bare_pods: bool = False,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(client, hosts, LEVELS, _Work, context)
        self._bare_too, self._poll_s = evict_bare_pods, poll_s
        self._held: set[int] = set()  # nodes that were closed, with our marks, when last looked at
        self._opened: dict[int, int] = {}  # when those were first seen open again, in ns
        self._mute_s = -math.inf  # until then no conditions are written, as we may not
        self.counts["evicted"] = 0

    def _forget(self) -> None:
        super()._forget()
        if not self._may_act():
            self._held.clear()
            self._opened.clear()

    def _plan(self, node: KubernetesNode, work: _Work) -> Plan:
        wanted = plan(node, work.order)
        refusal = wanted.refusal or self._opened_by_others(node, work)
        return Plan(None, refusal) if refusal else wanted

    async def _carry_out(self, host: str, work: _Work) -> None:
        node = await self._change(host, work)
        if node is None:
            return
        self._look_for_marks(node, work.entity)
        await self._write_condition(host, node, work)
        await self._empty(host, work)

    def _look_for_marks(self, node: KubernetesNode, entity: int) -> bool:
        """Return True if others opened a node that racktwin withdrew, by its marks; notes the time."""
        marked, closed = LEVEL in (node.metadata.annotations or {}), bool(node.spec.unschedulable)
        if marked and closed:
            self._held.add(entity)
            self._opened.pop(entity, None)
        elif entity in self._held:
            self._held.discard(entity)
            if marked:
                self._opened[entity] = self._now_ns()
        return marked and not closed

    def _opened_by_others(self, node: KubernetesNode, work: _Work) -> str:
        """Return the reason to leave a node that people have just opened in service; "" if none."""
        opened = self._look_for_marks(node, work.entity)
        if not opened or work.order.value == IN_SERVICE or work.policy in OUTRANK:
            return ""
        since_ns = self._opened.get(work.entity)
        soon = since_ns is not None and abs(self._now_ns() - since_ns) < round(RESUMED_S * 1e9)
        work.late |= soon or work.policy == AS_BEFORE
        return "resumed by others: somebody made it schedulable again just before" if work.late else ""

    async def _write_condition(self, host: str, node: KubernetesNode, work: _Work) -> None:
        """Write racktwin's condition into the node's status. Without the right to do so, all else
        continues."""
        reason = work.order.reason or (node.metadata.annotations or {}).get(REASON, "")
        patch = condition_patch(node, work.order.value, reason, now_text())
        if patch is None or time.monotonic() < self._mute_s or not self._wanted(work):
            return
        try:
            await self._client.patch(f"{path_of(host)}/status", patch, "strategic")
        except ApiError as error:
            if error.status in (403, 404, 405):
                self._mute_s = time.monotonic() + MUTE_S
                log.warning("%s: conditions of nodes cannot be written: %s", self.name, error)

    async def _empty(self, host: str, work: _Work) -> None:
        """Evict the pods, if wanted. Raises ApiError, Away."""
        if work.order.value < DRAINED:
            self._end(work, "done", LEVELS[work.order.value])
            return
        before = work.drain.evicted
        try:
            left = await evict_due(self._client, host, work.drain, self._bare_too, lambda: self._wanted(work))
        finally:
            self.counts["evicted"] += work.drain.evicted - before
        summary = left.summary(work.drain.evicted)
        if left.empty:
            self._end(work, "done", summary)
        elif left.stuck:
            self._end(work, "failed", summary)
        else:
            self._answer(work, "in_progress", summary)
            work.due_s = time.monotonic() + self._poll_s
