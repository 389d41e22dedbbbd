"""Service levels carried out on Kubernetes: cordon, taint, eviction, and a condition that tells why.

`apply` notes what is wanted and returns; `run` brings it about, node by node, for as long as the lease lives
and we lead. A server that is away is waited for, what it refuses is told. The node itself says what was done
to it, so that a restart goes on where it was, and what people open again is not closed at once. May import
the core's contracts and events.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from connectors.kubernetes_client import ApiError, Away, KubernetesClient, now_text
from connectors.kubernetes_drain import Drain, look
from connectors.kubernetes_nodes import (
    DRAINED,
    IN_SERVICE,
    LEVEL,
    LEVELS,
    REASON,
    Hosts,
    Order,
    condition_patch,
    plan,
)
from connectors.kubernetes_objects import Node, read_object
from twin.contracts import CommandBatch, Item
from twin.errors import BadMessage
from twin.events import CommandAcked

log = logging.getLogger(__name__)
CONTROL = "node.service_level"
AT_ONCE = 16  # nodes that are worked on at the same time
POLL_S = 5.0  # between looks at pods that are leaving
FIRST_S, LONGEST_S = 1.0, 30.0  # between tries while the server is away
CONFLICTS = 6  # times that a node may change between our reading and our writing
TELL_S = 30.0  # between two acknowledgements that differ in words only
IDLE_S = 1.0
MUTE_S = 600.0
# A policy that withdraws a node again sooner may not have heard that somebody opened it: that is read back
# once a minute, and shall have lasted for a while. source: estimate
RESUMED_S = 180.0
# Policies that a hand does not stop: people speak by the one, the other sees water
OUTRANK = ("operator", "leak_guard")
AS_BEFORE = "arbiter"  # it commands anew what was in force, under a new term
State = Literal["in_progress", "done", "failed"]


class _Refused(Exception):
    """Why an order is not carried out."""


@dataclass(slots=True, eq=False)
class _Work:
    """An order on a node, and how far it is."""

    entity: int
    generation: int
    order: Order
    expires_ns: int
    deadline_ns: int
    policy: str = ""
    late: bool = False  # somebody opened the node just before
    due_s: float = 0.0
    wait_s: float = 0.0
    state: State | None = None
    detail: str = ""
    told_s: float = 0.0
    drain: Drain = field(default_factory=Drain)


class KubernetesSink:
    """Carries out `node.service_level`. `stage` takes answers; before each change `may_act` is asked.

    `poll_s` lies between looks at the pods of a node that is drained.
    """

    name = "kubernetes"
    controls: tuple[str, ...] = (CONTROL,)
    enforces_safe = False  # what a node says stays until somebody changes it

    def __init__(
        self, client: KubernetesClient, hosts: Hosts, *, stage: Callable[[Sequence[Item], int], None],
        may_act: Callable[[], bool], evict_bare_pods: bool = False, poll_s: float = POLL_S,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._client, self._hosts, self._stage, self._may_act = client, hosts, stage, may_act
        self._bare_too, self._poll_s, self._now_ns = evict_bare_pods, poll_s, now_ns
        self._works: dict[int, _Work] = {}
        self._held: set[int] = set()  # nodes that were closed, with our marks, when last looked at
        self._opened: dict[int, int] = {}  # when those were first seen open again, in ns
        self._wake = asyncio.Event()
        self._mute_s = -math.inf  # until then no conditions are written, as we may not
        self.fault = ""
        self.counts = {"patched": 0, "evicted": 0, "done": 0, "failed": 0, "conflicts": 0, "away": 0}

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Note what is wanted of each node; a renewal looks whether it is still so."""
        for batch in commands:
            if batch.control != CONTROL:
                continue
            columns = (batch.index, batch.generation, batch.command, batch.value)
            for entity, generation, number, value in zip(*(c.tolist() for c in columns), strict=True):
                self._note(batch, entity, generation, number, value)
        self._wake.set()

    def _note(self, batch: CommandBatch, entity: int, generation: int, number: int, value: float) -> None:
        level = min(max(round(value), 0), len(LEVELS) - 1)
        was = self._works.get(entity)
        order = Order(level, batch.epoch, number, batch.reason)
        expires_ns = batch.deadline_ns if batch.final else batch.expires_ns
        if was is None or (was.order.level, was.order.id) != (level, order.id):
            policy = "" if batch.renewal else batch.policy
            self._works[entity] = _Work(entity, generation, order, expires_ns, batch.deadline_ns, policy)
            return
        was.generation, was.expires_ns, was.deadline_ns = generation, expires_ns, batch.deadline_ns
        if not batch.renewal:  # it is sent again, and wants an answer of its own
            was.state = None
        if was.state != "in_progress":
            was.due_s = 0.0

    async def run(self) -> None:
        """Bring about what is wanted, until cancelled."""
        try:
            while True:
                self._wake.clear()
                if not self._may_act():
                    for kept in (self._works, self._held, self._opened):
                        kept.clear()  # another daemon may have the nodes
                now_ns, now_s = self._now_ns(), time.monotonic()
                for entity in [e for e, w in self._works.items() if w.expires_ns <= now_ns]:
                    del self._works[entity]  # nobody wants it any more; the node stays as it is
                waiting = sorted(self._works.values(), key=lambda w: w.due_s)
                due = [w for w in waiting[:AT_ONCE] if w.due_s <= now_s]
                if due:
                    await asyncio.gather(*(self._advance(w) for w in due))
                    continue
                wait_s = min([IDLE_S, *(w.due_s - now_s for w in waiting[:1])])
                try:
                    async with asyncio.timeout(max(0.01, wait_s)):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            await self._client.close()

    def _wanted(self, work: _Work) -> bool:
        """Whether this is still what is wanted, by us."""
        return self._works.get(work.entity) is work and self._may_act()

    async def _advance(self, work: _Work) -> None:
        """Take a node as far as it goes now, and say when to come again."""
        if work.state != "done" and self._now_ns() >= work.deadline_ns:
            self._end(work, "failed", f"not done in time: {work.detail or 'it was not begun'}")
            return
        host = self._hosts.host_of(work.entity)
        try:
            if host is None:
                if self._hosts.listed:
                    raise _Refused("the cluster has no such node; see kubernetes.node_names")
                raise Away("the nodes of the cluster are not listed yet")
            if not await self._mark(host, work):
                return
            await self._empty(host, work)
            work.wait_s, self.fault = 0.0, ""
        except (_Refused, BadMessage) as error:
            self._end(work, "failed", str(error))
        except ApiError as error:
            if error.status in (409, 429) or error.status >= 500:
                self._later(work, str(error))
            else:
                self.fault = str(error)[:300]
                self._end(work, "failed", str(error))
        except Away as error:
            self._later(work, str(error))
        except Exception as error:  # one node must not stop the others
            log.exception("%s: %s", self.name, host)
            self._end(work, "failed", f"{type(error).__name__}: {error}")

    async def _mark(self, host: str, work: _Work) -> bool:
        """Make the node say what is wanted; whether that is still wanted. Raises _Refused, ApiError, Away."""
        path = f"/api/v1/nodes/{quote(host, safe='')}"
        for _ in range(CONFLICTS):
            node = read_object(await self._client.get(path), Node)
            wanted = plan(node, work.order)
            refusal = wanted.refusal or self._opened_by_others(node, work)
            if refusal:
                raise _Refused(refusal)
            if not self._wanted(work):
                return False
            if wanted.patch is None:
                break
            try:
                node = read_object(await self._client.patch(path, wanted.patch), Node)
            except ApiError as error:
                if error.status != 409:
                    raise
                self.counts["conflicts"] += 1
                continue
            self.counts["patched"] += 1
            self._look_for_marks(node, work.entity)
            break
        else:
            raise Away(f"{host} keeps changing while it is written")
        await self._tell_why(path, node, work)
        return True

    def _look_for_marks(self, node: Node, entity: int) -> bool:
        """Whether a node that we withdrew was opened by others, as its marks say; since when is noted."""
        marked, closed = LEVEL in (node.metadata.annotations or {}), bool(node.spec.unschedulable)
        if marked and closed:
            self._held.add(entity)
            self._opened.pop(entity, None)
        elif entity in self._held:
            self._held.discard(entity)
            if marked:
                self._opened[entity] = self._now_ns()
        return marked and not closed

    def _opened_by_others(self, node: Node, work: _Work) -> str:
        """Why a node is not withdrawn so soon after people opened it; "" if it may be."""
        opened = self._look_for_marks(node, work.entity)
        if not opened or work.order.level == IN_SERVICE or work.policy in OUTRANK:
            return ""
        since_ns = self._opened.get(work.entity)
        soon = since_ns is not None and abs(self._now_ns() - since_ns) < round(RESUMED_S * 1e9)
        work.late |= soon or work.policy == AS_BEFORE
        return "resumed by others: somebody made it schedulable again just before" if work.late else ""

    async def _tell_why(self, path: str, node: Node, work: _Work) -> None:
        """Our condition in the node's status. Without the right to write it, all else goes on."""
        reason = work.order.reason or (node.metadata.annotations or {}).get(REASON, "")
        patch = condition_patch(node, work.order.level, reason, now_text())
        if patch is None or time.monotonic() < self._mute_s or not self._wanted(work):
            return
        try:
            await self._client.patch(f"{path}/status", patch, "strategic")
        except ApiError as error:
            if error.status in (403, 404, 405):
                self._mute_s = time.monotonic() + MUTE_S
                log.warning("%s: conditions of nodes cannot be written: %s", self.name, error)

    async def _empty(self, host: str, work: _Work) -> None:
        """Have the pods leave, if that is wanted. Raises ApiError, Away."""
        if work.order.level < DRAINED:
            self._end(work, "done", LEVELS[work.order.level])
            return
        before = work.drain.evicted
        try:
            left = await look(self._client, host, work.drain, self._bare_too, lambda: self._wanted(work))
        finally:
            self.counts["evicted"] += work.drain.evicted - before
        told = left.told(work.drain.evicted)
        if left.empty:
            self._end(work, "done", told)
        elif left.stuck:
            self._end(work, "failed", told)
        else:
            self._tell(work, "in_progress", told)
            work.due_s = time.monotonic() + self._poll_s

    def _later(self, work: _Work, why: str) -> None:
        """Nothing is lost: the node is tried again while its lease lives."""
        self.counts["away"] += 1
        self.fault = why[:300]
        work.wait_s = min(LONGEST_S, 2 * work.wait_s or FIRST_S)
        work.due_s = time.monotonic() + work.wait_s
        self._tell(work, "in_progress", f"is tried again: {why}")

    def _end(self, work: _Work, state: State, detail: str) -> None:
        if work.state != state:
            self.counts[state] += 1
        self._tell(work, state, detail)
        work.due_s, work.wait_s = float("inf"), 0.0

    def _tell(self, work: _Work, state: State, detail: str) -> None:
        """Acknowledge, unless that was said already, or we are no longer asked."""
        now_s = time.monotonic()
        same = state == work.state and (detail == work.detail or now_s - work.told_s < TELL_S)
        work.detail = detail
        if same or self._works.get(work.entity) is not work or not self._may_act():
            return
        work.state, work.told_s = state, now_s
        ack = CommandAcked(
            control=CONTROL, name=self._hosts.name(work.entity), generation=work.generation,
            command=work.order.id, state=state, detail=detail[:200],
        )  # fmt: skip
        self._stage([ack], self._now_ns())
