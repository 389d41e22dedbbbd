"""Node orders: commands on nodes of a Kubernetes cluster, carried out while their lease runs and we lead.

The sink that inherits `NodeOrders` says what is done to a node. `apply` notes an order and returns; `run`
carries out what is due, a few nodes at a time. It tries again while the server is away, and answers with what
the server refuses. No order outlives its lease, nor our lead.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from connectors.backoff import Backoff
from connectors.kubernetes.client import ApiError, Away, KubernetesClient
from connectors.kubernetes.nodes import Hosts, NodeCommand, Plan
from connectors.kubernetes.objects import KubernetesNode, read_object
from connectors.orders import SinkContext, SinkOrder, order_rows
from twin.catalogue import BadMessage
from twin.contracts import CommandBatch
from twin.telemetry import CommandAcked

log = logging.getLogger(__name__)
AT_ONCE = 16  # nodes that are worked on at the same time
FIRST_S, LONGEST_S = 1.0, 30.0  # pauses while the server is away
CONFLICTS = 6  # times that a node may change between our reading and our writing
REPEAT_S = 30.0  # between two acknowledgements that differ in words only
IDLE_S = 1.0
State = Literal["in_progress", "done", "failed"]


class OrderRefused(Exception):
    """A refused order; its text is the reason."""


@dataclass(slots=True, eq=False)
class NodeWork:
    """An order on a node and its progress. `due_s`: monotonic; 0 = ordered or renewed, and not begun."""

    entity: int
    generation: int
    order: NodeCommand
    expires_ns: int
    deadline_ns: int
    policy: str = ""  # "" where it is only renewed
    due_s: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_S, LONGEST_S))
    state: State | None = None
    detail: str = ""
    answered_s: float = 0.0
    fault: str = ""  # of the server, or of us


Kind = TypeVar("Kind", bound=NodeWork)


class NodeOrders(ABC, Generic[Kind]):
    """A sink's orders. `states` are those of the control; `kind` makes the record of an order."""

    name: str
    controls: tuple[str, ...]
    enforces_safe = False  # what a node says stays until somebody changes it

    def __init__(
        self,
        client: KubernetesClient,
        hosts: Hosts,
        states: tuple[str, ...],
        kind: type[Kind],
        context: SinkContext,
    ) -> None:
        self._client, self._hosts, self._states, self._kind = client, hosts, states, kind
        self._stage, self._may_act, self._now_ns = context.stage, context.may_act, context.now_ns
        self._works: dict[int, Kind] = {}
        self._wake = asyncio.Event()
        self.counts = {"patched": 0, "done": 0, "failed": 0, "conflicts": 0, "away": 0}

    @property
    def fault(self) -> str:
        """Return a fault that keeps nodes from their commanded state and lies outside them; "" if none."""
        return next((w.fault for w in self._works.values() if w.fault), "")

    @abstractmethod
    async def _carry_out(self, host: str, work: Kind) -> None:
        """Take a node as far as it goes now, and answer. Raises OrderRefused, ApiError, Away, BadMessage."""

    @abstractmethod
    def _plan(self, node: KubernetesNode, work: Kind) -> Plan:
        """Return the changes to a node, or the reason for none."""

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Note the wanted state of each node; a renewal checks if it still holds."""
        for batch in commands:
            if batch.control not in self.controls:
                continue
            for entity, order in order_rows(batch):
                self._note(batch, entity, order)
        self._wake.set()

    def _note(self, batch: CommandBatch, entity: int, row: SinkOrder) -> None:
        value, generation = min(max(round(row.value), 0), len(self._states) - 1), row.generation
        order = NodeCommand(value, row.epoch, row.number, batch.reason)
        was = self._works.get(entity)
        expires_ns = batch.deadline_ns if batch.final else batch.expires_ns
        if was is None or (was.order.value, was.order.id) != (order.value, order.id):
            policy = "" if batch.renewal else batch.policy
            work = self._kind(entity, generation, order, expires_ns, batch.deadline_ns, policy)
            self._works[entity] = work
            return
        was.generation, was.expires_ns, was.deadline_ns = generation, expires_ns, batch.deadline_ns
        if not batch.renewal:  # it is sent again, and wants an answer of its own
            was.state = None
        if was.state != "in_progress":
            was.due_s = 0.0

    async def run(self) -> None:
        """Carry out orders until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._forget()
                now_s = time.monotonic()
                due = [w for w in self._works.values() if w.due_s <= now_s]
                if due:
                    await self._take_up(due)
                    continue
                next_s = min((w.due_s for w in self._works.values()), default=math.inf)
                try:
                    async with asyncio.timeout(max(0.01, min(IDLE_S, next_s - now_s))):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            await self._client.close()

    def _forget(self) -> None:
        """Drop orders that ended, and all if another daemon leads; the nodes stay as they are."""
        now_ns = self._now_ns()
        if not self._may_act():
            self._works.clear()
        for entity in [e for e, w in self._works.items() if w.expires_ns <= now_ns]:
            del self._works[entity]

    async def _take_up(self, due: Sequence[Kind]) -> None:
        """Continue with the orders that have waited longest."""
        first = heapq.nsmallest(AT_ONCE, due, key=lambda w: w.due_s)
        await asyncio.gather(*(self._advance(w) for w in first))

    def _wanted(self, work: Kind) -> bool:
        """Return True if this order is still in force, and this daemon leads."""
        stands = self._works.get(work.entity) is work and self._now_ns() < work.expires_ns
        return stands and self._may_act()

    async def _advance(self, work: Kind) -> None:
        """Carry out an order, or set the time of the next try."""
        if work.state != "done" and self._now_ns() >= work.deadline_ns:
            self._end(work, "failed", f"not done in time: {work.detail or 'not started'}", work.fault)
            return
        host = self._hosts.host_of(work.entity)
        try:
            if host is None:
                await self._absent(work)
            else:
                await self._carry_out(host, work)
            work.backoff.reset()
            work.fault = ""
        except (OrderRefused, BadMessage) as error:
            self._end(work, "failed", str(error))
        except ApiError as error:
            if error.status in (409, 429) or error.status >= 500:
                self._later(work, str(error))
            else:
                self._end(work, "failed", str(error), str(error))
        except Away as error:
            self._later(work, str(error))
        except Exception as error:  # one node must not stop the others
            log.exception("%s: %s", self.name, host)
            self._end(work, "failed", f"{type(error).__name__}: {error}")

    async def _absent(self, work: Kind) -> None:
        """Answer for a node that the cluster does not have. Raises OrderRefused, Away."""
        if self._hosts.listed:
            raise OrderRefused("the cluster has no such node; see kubernetes.node_names")
        raise Away("the nodes of the cluster are not listed yet")

    async def _change(self, host: str, work: Kind) -> KubernetesNode | None:
        """Return the node once it has the wanted state; None if that is no longer wanted.

        Raises OrderRefused, ApiError, Away, BadMessage.
        """
        for _ in range(CONFLICTS):
            node = read_object(await self._client.get(path_of(host)), KubernetesNode)
            wanted = self._plan(node, work)
            if wanted.refusal:
                raise OrderRefused(wanted.refusal)
            if not self._wanted(work):
                return None
            if wanted.patch is None:
                return node
            try:
                answer = await self._patch(host, work, wanted.patch)
            except ApiError as error:
                if error.status != 409:
                    raise
                self.counts["conflicts"] += 1
                continue
            self.counts["patched"] += 1
            return read_object(answer, KubernetesNode)
        raise Away(f"{host} changes faster than it can be written")

    async def _patch(self, host: str, work: Kind, patch: dict[str, Any]) -> bytes:
        return await self._client.patch(path_of(host), patch)

    def _later(self, work: Kind, why: str) -> None:
        """Try the node again later, during its lease."""
        self.counts["away"] += 1
        work.fault = why[:300]
        work.due_s = time.monotonic() + work.backoff.next_s()
        self._answer(work, "in_progress", f"retrying: {why}")

    def _end(self, work: Kind, state: State, detail: str, fault: str = "") -> None:
        """Answer, and leave the node alone until the next renewal."""
        if work.state != state:
            self.counts[state] += 1
        work.backoff.reset()
        work.due_s, work.fault = math.inf, fault[:300]
        self._answer(work, state, detail)

    def _answer(self, work: Kind, state: State, detail: str) -> None:
        """Acknowledge, unless this was answered already or the order has ended."""
        now_s = time.monotonic()
        same = state == work.state and (detail == work.detail or now_s - work.answered_s < REPEAT_S)
        work.detail = detail
        if same or not self._wanted(work):
            return
        work.state, work.answered_s = state, now_s
        ack = CommandAcked(
            control=self.controls[0],
            name=self._hosts.name(work.entity),
            generation=work.generation,
            command=work.order.id,
            state=state,
            detail=detail[:200],
        )
        self._stage([ack], self._now_ns())


def path_of(host: str) -> str:
    """Return the path of a node on the server."""
    return f"/api/v1/nodes/{quote(host, safe='')}"
