"""BMCs that cap power: their common protocol, a fleet of them, and the source that reads their caps.

A BMC is either read or set, never both at once. BMCs that failed last share a few places, so that dead ones
never hold up the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from connectors.backoff import Backoff
from connectors.bmc.power import AgentLevel, no_agent, power_readings
from twin.catalogue import ActuationError, ConnectorError
from twin.contracts import Inlet
from twin.telemetry import Reading

log = logging.getLogger(__name__)
GPU_CAP, NODE_CAP = "gpu.power_cap_w", "node.power_cap_w"
READBACK = {GPU_CAP: ("gpu", "power_limit_w"), NODE_CAP: ("node", "power_cap_readback_w")}
# At most with one BMC at a time, so that one that answers slowly takes no place for long. source: estimate,
# a walk of 100 resources at a second each
VISIT_S = 120.0
REMEDY = "check the address, the user and the password of this BMC; docs/bmc.md lists its requirements"
LONGEST_S = 60.0  # between two readings of a BMC that does not answer, unless its period is longer


class Key(NamedTuple):
    """One cap: the control, and the index of the entity in its table."""

    control: str
    entity: int


class Cap(NamedTuple):
    """A cap as its BMC has it. `limit_w` is what it enforces; where nothing caps (`free`), `high_w`.

    `low_w..high_w` is what it takes; 0 and the site's highest where it does not say. `tag` is the version of
    the resource, to be given back with a change; "" where there is none.
    """

    key: Key
    limit_w: float
    low_w: float
    high_w: float
    free: bool = False
    tag: str = ""


class BmcReading(NamedTuple):
    """Reading of a node by its BMC. `power_w`: (table, entity, W); `faults`: what it leaves out, in words;
    `dpus`: (signal, value) of the node's DPUs.

    `level` of its power, as the states of `node.power_state`; None where the BMC does not say.
    """

    caps: tuple[Cap, ...]
    power_w: tuple[tuple[str, int, float], ...] = ()
    faults: tuple[str, ...] = ()
    level: int | None = None
    dpus: tuple[tuple[str, float], ...] = ()


class Changed(ConnectorError):
    """Another client changed the cap after it was read: read and decide again."""


class Bmc(Protocol):
    """One BMC. A ConnectorError means that this BMC alone does not answer properly now."""

    name: str
    node: int
    keys: tuple[Key, ...]  # that may be commanded

    async def read(self) -> BmcReading:
        """Return caps and power of the node. Raises ConnectorError."""
        ...

    async def cap(self, key: Key) -> Cap:
        """Read one cap again. Raises ConnectorError, or ActuationError if the BMC has no such cap."""
        ...

    async def put(self, cap: Cap, value_w: float, final: bool) -> None:
        """Set a cap that was read as `cap`; `final` gives it back, so that `high_w` then caps nothing.

        Raises Changed, ConnectorError, and ActuationError where the BMC refuses for good.
        """
        ...

    async def close(self) -> None:
        """Release the BMC's session."""
        ...


class Fleet:
    """The BMCs of one section, their lanes and the last caps read. `end` closes shared resources."""

    def __init__(
        self, bmcs: Iterable[Bmc], at_once: int, end: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.bmcs = tuple(bmcs)
        self.of: dict[Key, Bmc] = {key: bmc for bmc in self.bmcs for key in bmc.keys}
        self.last: dict[Key, tuple[float, Cap]] = {}  # monotonic time, cap; no more than there are keys
        self.failing: set[str] = set()  # BMCs whose last visit failed
        self._end, self._closing = end, asyncio.Lock()
        self._locks = {bmc.name: asyncio.Lock() for bmc in self.bmcs}
        self._well, self._ailing = asyncio.Semaphore(at_once), asyncio.Semaphore(max(1, at_once // 2))

    @contextlib.asynccontextmanager
    async def lane(self, bmc: Bmc) -> AsyncIterator[None]:
        """Yield exclusive use of a BMC; an error raised inside marks it as failing."""
        async with self._locks[bmc.name], self._place(bmc):
            try:
                async with asyncio.timeout(VISIT_S) as visit:
                    yield
            except ActuationError:
                self.failing.discard(bmc.name)
                raise
            except TimeoutError:
                self.failing.add(bmc.name)
                if not visit.expired():
                    raise
                raise ConnectorError(f"{bmc.name}: no whole visit within {VISIT_S:g} s") from None
            except Exception:
                self.failing.add(bmc.name)
                raise
            self.failing.discard(bmc.name)

    def _place(self, bmc: Bmc) -> asyncio.Semaphore:
        return self._ailing if bmc.name in self.failing else self._well

    def note(self, caps: Iterable[Cap], now_ns: int) -> list[Reading]:
        """Store these caps; returns them as readings."""
        out: list[Reading] = []
        for cap in caps:
            self.last[cap.key] = time.monotonic(), cap
            table, signal = READBACK[cap.key.control]
            out.append(Reading(table, cap.key.entity, signal, cap.limit_w, now_ns))
        return out

    async def close(self) -> None:
        """Sign out of all BMCs, within a short time.

        The source and the sink both close the fleet that they share: the second waits for the first, whose
        requests would end unanswered with the connections.
        """
        async with self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await asyncio.gather(*(bmc.close() for bmc in self.bmcs), return_exceptions=True)
            if self._end is not None:
                await self._end()


class BmcSource:
    """Reads caps and power of each BMC every `period_s`, and of an unreachable one less and less often.

    A cap for which `left_to_others(key)` returns a reason is read more often by others: it is left out.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        period_s: float,
        left_to_others: Callable[[Key], str] = lambda key: "",  # noqa: ARG005
        agent_level: AgentLevel = no_agent,
    ) -> None:
        self.name, self._fleet, self._period_s = name, fleet, period_s
        self._left_to_others, self._agent_level = left_to_others, agent_level
        self.origins = tuple(f"BMC {bmc.name}" for bmc in fleet.bmcs)  # as the ledger of sources has them

    async def run(self, inlet: Inlet) -> None:
        """Read all BMCs until cancelled. Faults of one are counted under its name."""
        tasks = [asyncio.create_task(self._follow(bmc, inlet), name=bmc.name) for bmc in self._fleet.bmcs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._fleet.close()

    async def _follow(self, bmc: Bmc, every: Inlet) -> None:
        inlet = every.of(f"BMC {bmc.name}")
        # at a phase of its own, so that not all are asked at once
        await asyncio.sleep(self._period_s * (zlib.crc32(bmc.name.encode()) / 2**32))
        backoff = Backoff(2 * self._period_s, max(LONGEST_S, self._period_s))
        while True:
            began_s = time.monotonic()
            try:
                async with self._fleet.lane(bmc):
                    reading = await bmc.read()
                now_ns = time.time_ns()
                items = self._fleet.note(reading.caps, now_ns)
                items += [Reading(t, e, "power_w", w, now_ns) for t, e, w in reading.power_w]
                items = [x for x in items if x.table != "gpu" or not self._left(x.entity)]
                items += [Reading("node", bmc.node, signal, value, now_ns) for signal, value in reading.dpus]
                if reading.level is not None:
                    items += power_readings(bmc.node, reading.level, now_ns, self._agent_level(bmc.node))
                inlet.stage(items, now_ns, self._period_s)
                for fault in reading.faults:
                    inlet.reject(bmc.name, fault, REMEDY)
            except (ConnectorError, ActuationError) as error:
                inlet.fail(str(error), REMEDY)
            except Exception as error:  # one BMC must not end the reading of others
                log.exception("%s", bmc.name)
                inlet.fail(f"{bmc.name}: {type(error).__name__}: {error}"[:300], REMEDY)
            pause_s = self._period_s
            if bmc.name in self._fleet.failing:
                pause_s = max(pause_s, backoff.next_s())
            else:
                backoff.reset()
            await asyncio.sleep(max(pause_s - (time.monotonic() - began_s), 0.1 * self._period_s))

    def _left(self, gpu: int) -> bool:
        return bool(self._left_to_others(Key(GPU_CAP, gpu)))
