"""Standby on Kubernetes: allows or forbids the cluster autoscaler to remove a node.

`ready` keeps a node that is there; `asleep` ends that, and the autoscaler decides whether and when it goes. A
node that it took away comes back for pods that wait, or before them by a provisioning request of ours.
"""

from __future__ import annotations

import asyncio
import time

from connectors.kubernetes.autoscaler import is_leaving, standby_plan
from connectors.kubernetes.client import ApiError, Away, KubernetesClient
from connectors.kubernetes.nodes import Hosts, Plan
from connectors.kubernetes.objects import KubernetesNode
from connectors.kubernetes.orders import NodeOrders, NodeWork, OrderRefused
from connectors.kubernetes.provisioning import PodTemplateName, Provisioner
from connectors.kubernetes.source import KubernetesSource
from connectors.orders import SinkContext
from twin.catalogue import TABLES
from twin.contracts import ASLEEP, READY

CONTROL = "node.standby"
STATES = TABLES["node"].control_by_name["standby"].states
FOR_PODS = "comes back for pending pods"
REFUSED = "no provisioning request can be made"
POLL_S = 30.0  # between two looks at a node that is not yet as it is wanted


class KubernetesStandby(NodeOrders[NodeWork]):
    """Carries out `node.standby`. `source` gives the pods of a node, and the nodes that the autoscaler
    removed."""

    name = "kubernetes-standby"
    controls: tuple[str, ...] = (CONTROL,)

    def __init__(
        self,
        client: KubernetesClient,
        hosts: Hosts,
        context: SinkContext,
        source: KubernetesSource,
        template: PodTemplateName | None = None,
    ) -> None:
        """`template`: by which nodes are asked for ahead of pods; without it none is."""
        super().__init__(client, hosts, STATES, NodeWork, context)
        self._source = source
        self._provisioner = None if template is None else Provisioner(client, template)
        self._asking = asyncio.Lock()
        self._progress: dict[str, str] = {}  # of the nodes that were last asked for
        self._asked_s = -1e9

    def _plan(self, node: KubernetesNode, work: NodeWork) -> Plan:
        if work.order.value not in (READY, ASLEEP):
            return Plan(None, "expected ready or asleep")
        return standby_plan(node, work.order.value, work.order.epoch)

    async def _carry_out(self, host: str, work: NodeWork) -> None:
        if work.order.value == ASLEEP and self._works_on(host):
            raise OrderRefused("it runs pods that a drain would evict")
        try:
            node = await self._change(host, work)
        except ApiError as error:
            if error.status != 404:
                raise
            raise Away(f"{host} is gone, for an unknown reason") from error
        if node is None:
            return
        ready, leaving = node.condition("Ready"), is_leaving(node)
        if work.order.value == ASLEEP:
            if leaving:
                self._end(work, "done", "the autoscaler is removing it")
            else:
                self._wait(work, "the autoscaler may remove it, and has not started")
        elif leaving:
            self._wait(work, "the autoscaler is removing it")
        elif ready is None or ready.status != "True":
            self._wait(work, "it is kept, but not Ready")
        else:
            self._end(work, "done", "kept")

    def _works_on(self, host: str) -> bool:
        busy = self._source.busy(host)
        if busy is None:
            raise Away("the pods of the cluster are not listed yet")
        return busy

    async def _absent(self, work: NodeWork) -> None:
        if not self._source.took_away(work.entity):
            await super()._absent(work)
        if work.order.value == ASLEEP:
            self._end(work, "done", "the autoscaler removed it")
        elif self._provisioner is None:
            self._wait(work, f"the autoscaler removed it, and {FOR_PODS}")
        else:
            self._wait(work, await self._asked_for(self._provisioner, work))

    async def _asked_for(self, provisioner: Provisioner, work: NodeWork) -> str:
        """Return the progress of a node's request, which covers all wanted and missing nodes.

        Raises Away, BadMessage, and ApiError where another try may help.
        """
        name = self._hosts.name(work.entity)
        async with self._asking:
            if name not in self._progress or time.monotonic() - self._asked_s >= POLL_S:
                away = [w for w in self._works.values() if w.order.value == READY and self._wanted(w)]
                names = [self._hosts.name(w.entity) for w in away if self._source.took_away(w.entity)]
                if name not in names:
                    return "it is no longer wanted"
                try:
                    self._progress = await provisioner.ask(names, work.order.id)
                except ApiError as error:
                    if error.status in (409, 429) or error.status >= 500:
                        raise
                    self._progress = dict.fromkeys(names, f"{REFUSED}: {str(error)[:150]}; it {FOR_PODS}")
                self._asked_s = time.monotonic()
        return self._progress[name]

    def _wait(self, work: NodeWork, why: str) -> None:
        work.due_s = time.monotonic() + POLL_S
        self._answer(work, "in_progress", why)
