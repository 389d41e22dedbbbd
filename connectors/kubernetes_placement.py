"""Placement carried out on Kubernetes: the taint by which a scheduler takes a node last, or not at all.

`apply` notes what is wanted and returns; `run` brings it about while the lease lives and we lead. What the
source has just seen as it is wanted needs no request, so that thousands of renewals ask nothing. A server
that is away is waited for, what it refuses is told. The taint itself is the only memory of what was done.
May import the core's contracts and events.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from connectors.kubernetes_client import WATCH_S, ApiError, Away, KubernetesClient
from connectors.kubernetes_nodes import PLACEMENTS, Hosts, placement_plan
from connectors.kubernetes_objects import Node, read_object
from connectors.kubernetes_sink import AT_ONCE, CONFLICTS, FIRST_S, IDLE_S, LONGEST_S, TELL_S
from twin.contracts import CommandBatch, Item
from twin.errors import BadMessage
from twin.events import CommandAcked

log = logging.getLogger(__name__)
CONTROL = "node.placement"
SLICE = 500  # nodes that are compared with what was seen at a stretch
# What is seen is no older than two watches: our own write of longer ago is in it.
ECHO_NS = 2 * WATCH_S * 10**9
State = Literal["in_progress", "done", "failed"]


class _Refused(Exception):
    """Why an order is not carried out."""


@dataclass(slots=True, eq=False)
class _Work:
    """An order on a node, and how far it is. `id` as acknowledgements name it."""

    entity: int
    placement: int
    epoch: int
    id: str
    generation: int
    expires_ns: int
    deadline_ns: int
    seen: bool = False  # compared with what the source sees, since it became due
    due_s: float = 0.0
    wait_s: float = 0.0
    state: State | None = None
    detail: str = ""
    told_s: float = 0.0
    fault: str = ""


class KubernetesPlacement:
    """Carries out `node.placement`. `stage` takes answers; before each change `may_act` is asked.

    `seen` gives a node as the source last heard of it, by its name in the cluster, or None where that is
    older than two watches.
    """

    name = "kubernetes-placement"
    controls: tuple[str, ...] = (CONTROL,)
    enforces_safe = False  # a taint stays until somebody takes it away

    def __init__(
        self, client: KubernetesClient, hosts: Hosts, *, stage: Callable[[Sequence[Item], int], None],
        may_act: Callable[[], bool], seen: Callable[[str], Node | None],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._client, self._hosts, self._stage, self._may_act = client, hosts, stage, may_act
        self._seen, self._now_ns = seen, now_ns
        self._works: dict[int, _Work] = {}
        self._wrote_ns: dict[int, int] = {}  # when we last asked for a change of a node
        self._wake = asyncio.Event()
        self.counts = {"patched": 0, "seen": 0, "done": 0, "failed": 0, "conflicts": 0, "away": 0}

    @property
    def fault(self) -> str:
        """Why some node is not as it is wanted; "" without such a reason."""
        return next((w.fault for w in self._works.values() if w.fault), "")

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
        placement = min(max(round(value), 0), len(PLACEMENTS) - 1)
        order, was = f"{batch.epoch}-{number}", self._works.get(entity)
        expires_ns = batch.deadline_ns if batch.final else batch.expires_ns
        if was is None or (was.placement, was.id) != (placement, order):
            self._works[entity] = _Work(
                entity, placement, batch.epoch, order, generation, expires_ns, batch.deadline_ns
            )
            return
        was.generation, was.expires_ns, was.deadline_ns = generation, expires_ns, batch.deadline_ns
        if not batch.renewal:  # it is sent again, and wants an answer of its own
            was.state = None
        if was.state != "in_progress":
            was.due_s, was.seen = 0.0, False

    async def run(self) -> None:
        """Bring about what is wanted, until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._forget()
                now_s = time.monotonic()
                due = [w for w in self._works.values() if w.due_s <= now_s]
                new = [w for w in due if not w.seen]
                if new:
                    await self._compare(new)
                    continue
                if due:
                    first = heapq.nsmallest(AT_ONCE, due, key=lambda w: w.due_s)
                    await asyncio.gather(*(self._advance(w) for w in first))
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
        """What nobody wants any more, or another daemon may want: the nodes stay as they are."""
        now_ns = self._now_ns()
        if not self._may_act():
            self._works.clear()
        for entity in [e for e, w in self._works.items() if w.expires_ns <= now_ns]:
            del self._works[entity]
        for entity in [e for e, at_ns in self._wrote_ns.items() if abs(now_ns - at_ns) > ECHO_NS]:
            del self._wrote_ns[entity]

    def _wanted(self, work: _Work) -> bool:
        """Whether this is still what is wanted, by us."""
        asked = self._works.get(work.entity) is work and self._now_ns() < work.expires_ns
        return asked and self._may_act()

    async def _compare(self, works: list[_Work]) -> None:
        """What the source sees as it is wanted is done; all others are asked for."""
        for first in range(0, len(works), SLICE):
            acks: list[CommandAcked] = []
            for work in works[first : first + SLICE]:
                work.seen = True
                if self._is_so(work):
                    self.counts["seen"] += 1
                    acks += self._end(work, "done", PLACEMENTS[work.placement])
            self._answer(acks)
            await asyncio.sleep(0)

    def _is_so(self, work: _Work) -> bool:
        """Whether a node is known to be as it is wanted, without asking the server."""
        host = self._hosts.host_of(work.entity)
        if host is None or work.entity in self._wrote_ns:  # our own change may not have been heard of yet
            return False
        node = self._seen(host)
        if node is None:
            return False
        wanted = placement_plan(node, work.placement, work.epoch)
        return wanted.patch is None and not wanted.refusal

    async def _advance(self, work: _Work) -> None:
        """Make a node as it is wanted, or say when to try again."""
        if work.state != "done" and self._now_ns() >= work.deadline_ns:
            self._fail(work, f"not done in time: {work.detail or 'it was not begun'}", work.fault)
            return
        host = self._hosts.host_of(work.entity)
        try:
            if host is None:
                if self._hosts.listed:
                    raise _Refused("the cluster has no such node; see kubernetes.node_names")
                raise Away("the nodes of the cluster are not listed yet")
            if await self._mark(host, work):
                self._answer(self._end(work, "done", PLACEMENTS[work.placement]))
        except (_Refused, BadMessage) as error:
            self._fail(work, str(error))
        except ApiError as error:
            if error.status in (409, 429) or error.status >= 500:
                self._later(work, str(error))
            else:
                self._fail(work, str(error), str(error))
        except Away as error:
            self._later(work, str(error))
        except Exception as error:  # one node must not stop the others
            log.exception("%s: %s", self.name, host)
            self._fail(work, f"{type(error).__name__}: {error}")

    async def _mark(self, host: str, work: _Work) -> bool:
        """Make the node say what is wanted; whether that is still wanted. Raises _Refused, ApiError, Away."""
        path = f"/api/v1/nodes/{quote(host, safe='')}"
        for _ in range(CONFLICTS):
            node = read_object(await self._client.get(path), Node)
            wanted = placement_plan(node, work.placement, work.epoch)
            if wanted.refusal:
                raise _Refused(wanted.refusal)
            if not self._wanted(work):
                return False
            if wanted.patch is None:
                return True
            self._wrote_ns[work.entity] = self._now_ns()  # before, as the answer may be lost
            try:
                await self._client.patch(path, wanted.patch)
            except ApiError as error:
                if error.status != 409:
                    raise
                self.counts["conflicts"] += 1
                continue
            finally:
                self._wrote_ns[work.entity] = self._now_ns()
            self.counts["patched"] += 1
            return True
        raise Away(f"{host} keeps changing while it is written")

    def _later(self, work: _Work, why: str) -> None:
        """Nothing is lost: the node is tried again while its lease lives."""
        self.counts["away"] += 1
        work.fault = why[:300]
        work.wait_s = min(LONGEST_S, 2 * work.wait_s or FIRST_S)
        work.due_s, work.seen = time.monotonic() + work.wait_s, False
        self._answer(self._say(work, "in_progress", f"is tried again: {why}"))

    def _fail(self, work: _Work, why: str, fault: str = "") -> None:
        """It is not tried again before the next renewal. `fault`: what is wrong with the server or us."""
        self._answer(self._end(work, "failed", why))
        work.fault = fault[:300]

    def _end(self, work: _Work, state: State, detail: str) -> list[CommandAcked]:
        if work.state != state:
            self.counts[state] += 1
        work.due_s, work.wait_s, work.fault = math.inf, 0.0, ""
        return self._say(work, state, detail)

    def _say(self, work: _Work, state: State, detail: str) -> list[CommandAcked]:
        """The acknowledgement; none if that was said already, or we are no longer asked."""
        now_s = time.monotonic()
        same = state == work.state and (detail == work.detail or now_s - work.told_s < TELL_S)
        work.detail = detail
        if same or not self._wanted(work):
            return []
        work.state, work.told_s = state, now_s
        return [CommandAcked(
            control=CONTROL, name=self._hosts.name(work.entity), generation=work.generation, command=work.id,
            state=state, detail=detail[:200],
        )]  # fmt: skip

    def _answer(self, acks: Sequence[CommandAcked]) -> None:
        if acks:
            self._stage(acks, self._now_ns())
