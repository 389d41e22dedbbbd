"""Power sink: BMCs shut down systems and switch nodes off. Nodes are switched on only at people's request.

Each order has a task of its own beside the lanes of the BMCs, so that nothing that reads or caps delays it,
and a newer one ends it: an off overtakes a shutdown. A reset that a BMC carried out is not sent again under
the same number, so that renewals do not overrule people who switch a node on again; a lapse does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from connectors.orders import SinkContext, SinkOrder, State, keep_newest, state_number
from twin.catalogue import ActuationError, ConnectorError
from twin.contracts import CommandBatch
from twin.site import Site
from twin.telemetry import Reading

log = logging.getLogger(__name__)
POWER = "node.power_state"
LEVELS = ("on", "shutdown", "off")
ON, STOP, OFF = range(3)
PEOPLE = "operator"  # the policy that carries out what people ask for
AGENT_S = 5.0  # an agent that has not begun to stop its system by then does not. source: estimate, two ticks
FIRST_S, LONGEST_S = 0.25, 2.0  # between looks at an order under way
# From a reset that was taken until it is sent again where nothing follows. source: estimate: power is cut
# within 2-4 s, a system stops within 12-45 s, a board takes seconds to power on
SETTLE_S = {ON: 15.0, STOP: 60.0, OFF: 4.0}
# (node) -> the level that its agent reads back, NaN where it reads none; None without an agent online
AgentLevel = Callable[[int], float | None]


class Switch(Protocol):
    """Switch of one node."""

    name: str

    async def level(self) -> int:
        """Return the present level. Raises ConnectorError, or ActuationError if no source reports it."""
        ...

    async def put(self, level: int) -> None:
        """Switch the node. Raises ConnectorError, or ActuationError if the BMC refuses."""
        ...


def no_agent(node: int) -> float | None:  # noqa: ARG001
    """Return False: for sites without agents."""
    return None


def power_readings(node: int, level: int, now_ns: int, agent_level: float | None) -> list[Reading]:
    """Return the level as readings; an agent that stops its system reports this before the BMC does."""
    out = [Reading("node", node, "power_on_state", float(level != OFF), now_ns)]
    if level != ON or agent_level != STOP:
        out.append(Reading("node", node, "power_readback_state", float(level), now_ns))
    return out


@dataclass(slots=True, eq=False)
class PowerOrder(SinkOrder):
    """The commanded level of a node. `taken`: its BMC accepted a reset, last at `sent_s`, monotonic."""

    policy: str
    deadline_ns: int
    phase: Literal["new", "under_way", "over"] = "new"
    taken: bool = False
    sent_s: float = -math.inf
    answered: tuple[str, str] = ("", "")

    def is_reached(self, level: int) -> bool:
        """Return True if the level is as wanted: a node that is off has also stopped."""
        return level == self.value if self.value == ON else level >= self.value


class PowerSink:
    """Commands the power of nodes. `switches` by node; `agent_level` gives the nodes that stop themselves.

    `end` closes what the switches share.
    """

    enforces_safe = False
    controls: tuple[str, ...] = (POWER,)

    def __init__(
        self,
        name: str,
        site: Site,
        switches: Mapping[int, Switch],
        context: SinkContext,
        agent_level: AgentLevel = no_agent,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name, self._site, self._switches, self._agent_level = name, site, switches, agent_level
        self._end = end
        self._stage, self._may_act, self._now_ns = context.stage, context.may_act, context.now_ns
        self._orders: dict[int, PowerOrder] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._away: dict[int, str] = {}  # nodes whose order is not carried out now, and why
        self.counts = dict.fromkeys(("commands", "old", "sent", "refused", "left_to_agents"), 0)

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Begin to carry out these commands; stages the answers."""
        for batch in commands:
            if batch.control != POWER:
                continue

            make = partial(PowerOrder, policy=batch.policy, deadline_ns=batch.deadline_ns)
            nodes, old = keep_newest(self._orders, batch, make)
            self.counts["old"] += old
            for node in nodes:
                if node in self._switches:
                    self._begin(node, self._orders[node], batch.deadline_ns)

    def _begin(self, node: int, order: PowerOrder, deadline_ns: int) -> None:
        """Carry out an order in place of the one before; one that comes again only where it failed and has
        more time."""
        again = order.phase == "over" and order.answered[0] == "failed"
        if order.phase == "under_way":
            order.deadline_ns = max(order.deadline_ns, deadline_ns)
        if order.phase != "new" and not (again and deadline_ns > order.deadline_ns):
            return
        self.counts["commands"] += order.phase == "new"
        order.phase, order.deadline_ns = "under_way", deadline_ns
        if (before := self._tasks.get(node)) is not None:
            before.cancel()
        self._tasks[node] = asyncio.create_task(self._carry_out(node, order), name=f"{self.name}/{node}")

    async def run(self) -> None:
        """Carry out orders until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._end is not None:
                await self._end()

    @property
    def fault(self) -> str:
        """Return the first node with a pending order, and the reason; "" if none."""
        return next((f"{self._switches[n].name}: {why}"[:300] for n, why in self._away.items()), "")

    async def _carry_out(self, node: int, order: PowerOrder) -> None:
        try:
            if self._now_ns() >= order.deadline_ns:  # a renewal of what this daemon does not remember
                self._report(node, order, "failed", "the deadline has passed; no further step is started")
                return
            if order.value == STOP and await self._is_agents(node):
                self.counts["left_to_agents"] += 1
                return
            wait_s = FIRST_S
            while self._may_act() and not await self._is_done(node, order):
                if self._now_ns() >= order.deadline_ns:
                    why = order.answered[1] or f"is not {LEVELS[int(order.value)]} by the deadline"
                    self._report(node, order, "failed", why)
                    return
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_S)
        finally:
            order.phase = "over"
            self._away.pop(node, None)

    async def _is_agents(self, node: int) -> bool:
        """Return True once the node's agent stops its system; False without an agent online, or if it does
        not."""
        until_s = time.monotonic() + AGENT_S
        while (level := self._agent_level(node)) is not None and time.monotonic() < until_s:
            if level == STOP:
                return True
            await asyncio.sleep(FIRST_S)
        return False

    async def _is_done(self, node: int, order: PowerOrder) -> bool:
        """One try; True if the node is as wanted. A refusal is reported, and the order tried again: the state
        that a BMC refuses in may pass."""
        try:
            if await self._try(node, order):
                self._report(node, order, "done", "")
                return True
            self._away.pop(node, None)
        except ActuationError as error:
            self.counts["refused"] += 1
            self._report(node, order, "failed", str(error))
        except ConnectorError as error:
            self._away[node] = str(error)[:200]
            self._report(node, order, "in_progress", str(error))
        except Exception as error:  # of this BMC alone
            log.exception("%s", self._switches[node].name)
            self._report(node, order, "in_progress", f"{type(error).__name__}: {error}")
        return False

    async def _try(self, node: int, order: PowerOrder) -> bool:
        """Read, switch, read again; an off is sent before any query, because each second counts."""
        switch, wanted = self._switches[node], state_number(order.value, LEVELS)
        if wanted < 0:
            raise ActuationError(f"{order.value:g} is not a power state of a node")
        asks = wanted != OFF or order.taken
        if asks and order.is_reached(await self._read(node)):
            return True
        if time.monotonic() - order.sent_s >= SETTLE_S[wanted]:
            if wanted == ON and order.policy != PEOPLE:
                raise ActuationError(f"{switch.name}: is off; racktwin never switches a node on")
            if not self._may_act():
                return False
            try:
                await switch.put(wanted)
            except ActuationError:
                if not asks and order.is_reached(await self._read(node)):
                    return True  # it was off before
                raise
            order.taken, order.sent_s = True, time.monotonic()
            self.counts["sent"] += 1
        return order.is_reached(await self._read(node))

    async def _read(self, node: int) -> int:
        level, now_ns = await self._switches[node].level(), self._now_ns()
        self._stage(power_readings(node, level, now_ns, self._agent_level(node)), now_ns)
        return level

    def _report(self, node: int, order: PowerOrder, state: State, why: str) -> None:
        if (state, why) != order.answered:
            order.answered = state, why
            ack = order.acked(POWER, self._site.name("node", node), state, why)
            self._stage([ack], self._now_ns())
