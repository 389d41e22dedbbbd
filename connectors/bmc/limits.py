"""BMCs that cap power: what is asked of one, whatever it speaks, and how many are asked without one in the
way of others.

Each BMC has a lane of its own, so that nobody reads while somebody sets; those that failed last share a few
places, so that dead ones never hold up the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from twin.catalogue import ActuationError, ConnectorError
from twin.contracts import Inlet
from twin.telemetry import Reading

log = logging.getLogger(__name__)
GPU_CAP, NODE_CAP = "gpu.power_cap_w", "node.power_cap_w"
READBACK = {GPU_CAP: ("gpu", "power_limit_w"), NODE_CAP: ("node", "power_cap_readback_w")}
# At most with one BMC at a time, so that one that answers slowly takes no place for long. source: estimate,
# a walk of 100 resources at a second each
VISIT_S = 120.0
LONGEST_S = 60.0  # between two looks at a BMC that does not answer, unless its period is longer


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
    """Reading of a node by its BMC. `power_w`: (table, entity, W); `faults`: what it leaves out, in words."""

    caps: tuple[Cap, ...]
    power_w: tuple[tuple[str, int, float], ...] = ()
    faults: tuple[str, ...] = ()


class Changed(ConnectorError):
    """Somebody else changed the cap since it was read: read it again, and decide again."""


class Bmc(Protocol):
    """One BMC. What it raises is of it alone: ConnectorError where it does not answer as it should, now."""

    name: str
    node: int
    keys: tuple[Key, ...]  # that may be commanded

    async def look(self) -> BmcReading:
        """Caps and power of the node. Raises ConnectorError."""
        ...

    async def cap(self, key: Key) -> Cap:
        """One cap, asked anew. Raises ConnectorError, or ActuationError where it has none such."""
        ...

    async def put(self, cap: Cap, value_w: float, final: bool) -> None:
        """Set a cap that was read as `cap`; `final` gives it back, so that `high_w` then caps nothing.

        Raises Changed, ConnectorError, and ActuationError where the BMC refuses for good.
        """
        ...

    async def close(self) -> None:
        """Give back what the BMC holds for us (a session)."""
        ...


class Fleet:
    """The BMCs of one section: lanes, and what was seen of caps last. `end` closes what they share."""

    def __init__(
        self, bmcs: Iterable[Bmc], at_once: int, end: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.bmcs = tuple(bmcs)
        self.of: dict[Key, Bmc] = {key: bmc for bmc in self.bmcs for key in bmc.keys}
        self.last: dict[Key, tuple[float, Cap]] = {}  # monotonic time, cap; no more than there are keys
        self.failed: dict[str, int] = {}  # BMC -> failures on end
        self._end = end
        self._locks = {bmc.name: asyncio.Lock() for bmc in self.bmcs}
        self._well, self._ailing = asyncio.Semaphore(at_once), asyncio.Semaphore(max(1, at_once // 2))

    @contextlib.asynccontextmanager
    async def lane(self, bmc: Bmc) -> AsyncIterator[None]:
        """The BMC for oneself; whether it answers is counted by what is raised inside."""
        async with self._locks[bmc.name], self._place(bmc):
            try:
                async with asyncio.timeout(VISIT_S) as visit:
                    yield
            except ActuationError:
                self.failed.pop(bmc.name, None)
                raise
            except TimeoutError:
                self.failed[bmc.name] = self.failed.get(bmc.name, 0) + 1
                if not visit.expired():
                    raise
                raise ConnectorError(f"{bmc.name}: no whole visit within {VISIT_S:g} s") from None
            except Exception:
                self.failed[bmc.name] = self.failed.get(bmc.name, 0) + 1
                raise
            self.failed.pop(bmc.name, None)

    def _place(self, bmc: Bmc) -> asyncio.Semaphore:
        return self._ailing if self.failed.get(bmc.name) else self._well

    def note(self, caps: Iterable[Cap], now_ns: int) -> list[Reading]:
        """Remember these caps; what they say as readings."""
        out: list[Reading] = []
        for cap in caps:
            self.last[cap.key] = time.monotonic(), cap
            table, signal = READBACK[cap.key.control]
            out.append(Reading(table, cap.key.entity, signal, cap.limit_w, now_ns))
        return out

    async def close(self) -> None:
        """End what is open, for a moment at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*(bmc.close() for bmc in self.bmcs), return_exceptions=True)
        if self._end is not None:
            await self._end()


class BmcSource:
    """Reads caps and power back, each BMC on its own, every `period_s`; a dead one more and more seldom.

    What `left_to_others(key)` gives a reason for is told by others, more often: it is not told here.
    """

    def __init__(
        self, name: str, fleet: Fleet, period_s: float, now_ns: Callable[[], int] = time.time_ns,
        left_to_others: Callable[[Key], str] = lambda key: "",  # noqa: ARG005
    ) -> None:  # fmt: skip
        self.name, self._fleet, self._period_s, self._now_ns = name, fleet, period_s, now_ns
        self._left_to_others = left_to_others

    async def run(self, inlet: Inlet) -> None:
        """Look at all BMCs until cancelled. What one does wrong is counted under its name."""
        tasks = [asyncio.create_task(self._follow(bmc, inlet), name=bmc.name) for bmc in self._fleet.bmcs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._fleet.close()

    async def _follow(self, bmc: Bmc, inlet: Inlet) -> None:
        # at a phase of its own, so that not all are asked at once
        await asyncio.sleep(self._period_s * (zlib.crc32(bmc.name.encode()) / 2**32))
        while True:
            began_s = time.monotonic()
            try:
                async with self._fleet.lane(bmc):
                    seen = await bmc.look()
                now_ns = self._now_ns()
                items = self._fleet.note(seen.caps, now_ns)
                items += [Reading(t, e, "power_w", w, now_ns) for t, e, w in seen.power_w]
                items = [x for x in items if x.table != "gpu" or not self._left(x.entity)]
                if items:
                    inlet.stage(items, now_ns)
                for fault in seen.faults:
                    inlet.reject(bmc.name, fault)
            except (ConnectorError, ActuationError) as error:
                inlet.reject(bmc.name, str(error))
            except Exception as error:  # what one BMC says must not end the looks at others
                log.exception("%s", bmc.name)
                inlet.reject(bmc.name, f"{type(error).__name__}: {error}"[:300])
            failed = min(self._fleet.failed.get(bmc.name, 0), 16)
            wait_s = max(self._period_s, min(LONGEST_S, self._period_s * 2**failed))
            await asyncio.sleep(max(wait_s - (time.monotonic() - began_s), 0.1 * self._period_s))

    def _left(self, gpu: int) -> bool:
        return bool(self._left_to_others(Key(GPU_CAP, gpu)))
