"""Sink for power caps of BMCs. BMCs know no leases, so the daemon holds the leases while it runs.

A command is read, set, and read again: what is enforced answers it. The newest wins, an older epoch or number
is ignored, and each try ends at the command's deadline. A lease that is not renewed ends at the site's safe
value, set by us; if the daemon dies, a BMC keeps its last cap. What was found is given back by the last
command of a lease, which carries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from connectors.bmc.limits import READBACK, Bmc, Cap, Changed, Fleet, Key
from connectors.orders import SinkContext, SinkOrder, order_rows
from twin.catalogue import ActuationError, ConnectorError
from twin.contracts import CommandBatch
from twin.site import Site

log = logging.getLogger(__name__)
LOOK_S = 1.0  # between looks at which leases are over
FIRST_S, LONGEST_S = 0.25, 4.0  # between tries of a command
LAPSE_LONGEST_S = 30.0  # between tries of a lapse, which has no deadline
SETTLE_S = 2.0  # a BMC that took a value may enforce it this much later. source: estimate
CHANGED_TRIES = 3  # somebody else sets the same cap: so often in a row we read again
FRESH_S = 90.0  # a look this old still says whether a renewal needs anything. source: estimate
LEAD_LOOK_S = 0.25  # so often a change that is under way is asked whether we still lead
MIN_TOLERANCE_W = 1.0  # BMCs take whole watts
Phase = Literal["waiting", "done", "failed"]


@dataclass(slots=True, eq=False)
class CapOrder(SinkOrder):
    """The commanded cap. `lapsing`: its lease has ended, and the safe value is set."""

    cap: Key
    issued_ns: int
    expires_ns: int
    deadline_ns: int
    final: bool
    phase: Phase = "waiting"
    lapsing: bool = False
    sent_s: float = -1e9  # when the BMC last took it, monotonic
    answered: str = ""
    why: str = ""


class BmcSink:
    """Commands the caps of a fleet of BMCs.

    `left_to_others(key)` returns the reason why a cap is not ours to set, or "". `found_before(key)` returns
    the cap that was found before a lease that is older than this sink; NaN if none is known.
    """

    enforces_safe = False  # a BMC keeps its last cap, whoever lives

    def __init__(
        self,
        name: str,
        site: Site,
        fleet: Fleet,
        context: SinkContext,
        left_to_others: Callable[[Key], str] = lambda key: "",  # noqa: ARG005
        found_before: Callable[[Key], float] = lambda key: math.nan,  # noqa: ARG005
    ) -> None:
        self.name, self.controls = name, tuple(dict.fromkeys(key.control for key in fleet.of))
        self._site, self._fleet, self._left_to_others = site, fleet, left_to_others
        self._found_before = found_before
        self._stage, self._may_act, self._now_ns = context.stage, context.may_act, context.now_ns
        self._orders: dict[Key, CapOrder] = {}  # no more than there are caps
        self._found: dict[Key, float] = {}  # caps as they were before we set them, W
        self._due: dict[str, dict[Key, None]] = {}  # BMC -> caps with something to do
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._away: dict[str, str] = {}  # BMCs that do not carry out what they should, and why
        self._stuck: dict[Key, str] = {}  # safe values that a BMC refuses, and why
        self._wake = asyncio.Event()
        self._epoch, self._next_end_ns = 0, 0
        self._over_s = math.inf  # when leases were first seen to be over
        self.counts = dict.fromkeys(
            ("commands", "old", "set", "as_wanted", "refused", "lapsed", "left_to_others"), 0
        )

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Take these commands; answers to them are staged."""
        for batch in commands:
            if batch.control in self.controls:
                self._take(batch)
        self._wake.set()

    async def run(self) -> None:
        """Carry out accepted orders and end expired leases, until cancelled."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
                self._wake.clear()
                self._end_leases()
                for name in [name for name in self._due if name not in self._tasks]:
                    bmc = self._fleet.of[next(iter(self._due[name]))]
                    task = asyncio.create_task(self._work(bmc), name=f"{self.name}/{name}")
                    self._tasks[name] = task
                    task.add_done_callback(partial(self._ended, name))
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._fleet.close()

    @property
    def fault(self) -> str:
        """Return the first BMC that does not carry out its command, and the reason; empty if none."""
        away = [(name, why) for name, why in self._away.items() if name in self._fleet.failing]
        away += [(self._name(key), f"its lease ended: {why}") for key, why in self._stuck.items()]
        if not away:
            return ""
        more = f" (and {len(away) - 1} more)" if len(away) > 1 else ""
        return f"{away[0][0]}: {away[0][1]}{more}"[:300]

    def _take(self, batch: CommandBatch) -> None:
        if batch.epoch < self._epoch:  # of a daemon that leads no more
            self.counts["old"] += len(batch.index)
            return
        self._epoch = batch.epoch
        for entity, row in order_rows(batch):
            key = Key(batch.control, entity)
            bmc = self._fleet.of.get(key)
            if bmc is None:
                continue
            if self._left_to_others(key):
                self.counts["left_to_others"] += 1
                self._hand_over(key, bmc)
                continue
            order = CapOrder(
                row.epoch,
                row.number,
                row.generation,
                row.value,
                key,
                batch.issued_ns,
                batch.expires_ns,
                batch.deadline_ns,
                batch.final,
            )
            if self._is_news(order):
                self.counts["commands"] += 1
                self._orders[key] = order
                self._stuck.pop(key, None)
                self._due.setdefault(bmc.name, {})[key] = None
                self._next_end_ns = min(self._next_end_ns, order.expires_ns)

    def _hand_over(self, key: Key, bmc: Bmc) -> None:
        """Give back a cap that others set from now on: theirs could not rise above what a BMC keeps."""
        order, found_w = self._orders.get(key), self._found.pop(key, None)
        if not math.isnan(before_w := self._found_before(key)):
            found_w = before_w  # what was found since is the cap of the daemon before
        if order is None or found_w is None:
            if order is None or not order.lapsing:
                self._drop(key)
            return
        order.value, order.final, order.lapsing = found_w, True, True
        order.phase, order.sent_s = "waiting", -1e9
        self._due.setdefault(bmc.name, {})[key] = None

    def _is_news(self, order: CapOrder) -> bool:
        """Return True if there is work; a renewal of an applied order only moves the end of its lease."""
        held = self._orders.get(order.cap)
        if held is None or order.epoch > held.epoch:
            return True
        # A lower number that was issued later is no straggler: the daemon lost its count with its disk
        if order.issued_ns < held.issued_ns or (
            order.number < held.number and order.issued_ns == held.issued_ns
        ):
            self.counts["old"] += 1
            return False
        if order.number != held.number or held.lapsing or order.value != held.value:
            return True
        held.expires_ns, held.deadline_ns = order.expires_ns, max(held.deadline_ns, order.deadline_ns)
        held.issued_ns = order.issued_ns
        if held.phase == "waiting":
            return False
        seen_s, cap = self._fleet.last.get(order.cap, (-1e9, None))
        fresh = time.monotonic() - seen_s < FRESH_S
        return not (held.phase == "done" and fresh and cap is not None and self._as_wanted(cap, held))

    def _end_leases(self) -> None:
        """Set caps without a renewal to their safe value; does nothing if another daemon leads.

        Not at the first look: where our clock was set ahead, the next tick renews what is still wanted.
        """
        now_ns, now_s = self._now_ns(), time.monotonic()
        if now_ns < self._next_end_ns or not self._orders:
            self._over_s = math.inf
            return
        self._over_s = min(self._over_s, now_s)
        if now_s - self._over_s < LOOK_S:
            return
        if not self._may_act():
            self._orders.clear()
            self._found.clear()
            self._due.clear()
            self._stuck.clear()
            return
        ends = []
        for key, order in self._orders.items():
            if order.final or order.lapsing:
                continue
            if order.expires_ns > now_ns:
                ends.append(order.expires_ns)
                continue
            safe_w = float(self._site.envelopes[key.control].safe[key.entity])
            if math.isnan(safe_w):
                order.final = True  # nothing to lapse to: it stays as it is
                continue
            self.counts["lapsed"] += 1
            order.lapsing, order.phase, order.value, order.sent_s = True, "waiting", safe_w, -1e9
            self._due.setdefault(self._fleet.of[key].name, {})[key] = None
            log.warning("%s of %s: its lease ended, set to %g", key.control, self._name(key), safe_w)
        self._next_end_ns = min(ends, default=2**62)

    async def _work(self, bmc: Bmc) -> None:
        """Carry out the orders of this BMC, in rounds of growing distance, until none is left."""
        wait_s = FIRST_S
        while orders := self._waiting(bmc):
            if not self._may_act():  # another daemon has the site
                for order in orders:
                    self._drop(order.cap)
                continue
            if not await self._round(bmc, orders):
                wait_s = FIRST_S
                continue
            now_ns = self._now_ns()
            left = self._waiting(bmc)
            for order in left:
                if not order.lapsing and now_ns >= order.deadline_ns:
                    self._settle(order, "failed", order.why or "no answer before the deadline")
                elif order.why != order.answered:
                    self._report(order, "in_progress", order.why)
            longest_s = LAPSE_LONGEST_S if all(order.lapsing for order in left) else LONGEST_S
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)

    def _waiting(self, bmc: Bmc) -> list[CapOrder]:
        """Return the waiting orders, decreases first: power released by one GPU may serve another."""
        due = self._due.get(bmc.name, {})
        orders = [order for key in list(due) if (order := self._orders.get(key)) is not None]
        orders = [order for order in orders if order.phase == "waiting"]
        self._due[bmc.name] = {order.cap: None for order in orders}
        if not orders:
            del self._due[bmc.name]

        def rise_w(order: CapOrder) -> float:
            _, cap = self._fleet.last.get(order.cap, (0.0, None))
            return order.value - (math.inf if cap is None else cap.limit_w)

        return sorted(orders, key=rise_w)

    async def _round(self, bmc: Bmc, orders: list[CapOrder]) -> bool:
        """Try each order once. Return True if any order is left that must wait."""
        left = False
        for order in orders:
            if self._orders.get(order.cap) is not order:
                continue
            try:
                async with self._fleet.lane(bmc):
                    await self._try(bmc, order)
                self._away.pop(bmc.name, None)
            except ActuationError as error:
                self.counts["refused"] += 1
                self._settle(order, "failed", str(error))
            except ConnectorError as error:
                order.why = self._away[bmc.name] = str(error)[:200]
                for other in orders:
                    other.why = other.why or order.why
                return True
            except Exception as error:  # of this BMC alone
                log.exception("%s", bmc.name)
                order.why = self._away[bmc.name] = f"{type(error).__name__}: {error}"[:200]
            left |= order.phase == "waiting" and self._orders.get(order.cap) is order
        return left

    async def _try(self, bmc: Bmc, order: CapOrder) -> None:
        """Read, set, read again. Raises ActuationError, ConnectorError."""
        for _ in range(CHANGED_TRIES):
            cap = await self._read(bmc, order.cap)
            if self._as_wanted(cap, order):
                self.counts["as_wanted"] += order.sent_s < 0
                self._settle(order, "done", "")
                return
            if time.monotonic() - order.sent_s < SETTLE_S:
                return
            if not cap.low_w <= order.value <= cap.high_w:
                raise ActuationError(
                    f"{order.value:g} W is outside {cap.low_w:g}..{cap.high_w:g} W, the limits of the BMC"
                )
            if self._orders.get(order.cap) is not order or not self._may_act():
                return
            try:
                await self._put(bmc, cap, order)
            except Changed as error:
                order.why = str(error)
                continue
            self._found.setdefault(order.cap, cap.limit_w)
            self.counts["set"] += 1
            order.sent_s = time.monotonic()
            cap = await self._read(bmc, order.cap)
            if self._as_wanted(cap, order):
                self._settle(order, "done", "")
            else:
                order.why = (
                    f"the BMC took {order.value:g} W and enforces "
                    f"{'nothing' if cap.free else f'{cap.limit_w:g} W'}"
                )
            return

    async def _put(self, bmc: Bmc, cap: Cap, order: CapOrder) -> None:
        """Set the cap in one or several steps. Stop between steps if another daemon leads by then."""
        task = asyncio.ensure_future(bmc.put(cap, order.value, order.final))
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=LEAD_LOOK_S)
                if not task.done() and not self._may_act():
                    raise ConnectorError(f"{bmc.name}: another daemon leads now; the request was abandoned")
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _read(self, bmc: Bmc, key: Key) -> Cap:
        cap = await bmc.cap(key)
        now_ns = self._now_ns()
        self._stage(self._fleet.note((cap,), now_ns), now_ns)
        return cap

    def _as_wanted(self, cap: Cap, order: CapOrder) -> bool:
        if cap.free:
            return order.value >= cap.high_w
        tolerance_w = max(MIN_TOLERANCE_W, self._site.envelopes[order.cap.control].deadband)
        return abs(cap.limit_w - order.value) <= tolerance_w

    def _settle(self, order: CapOrder, state: Literal["done", "failed"], why: str) -> None:
        """End the processing of an order for now. A lapse is retried until it succeeds."""
        if order.lapsing and state == "failed":
            order.why = self._stuck[order.cap] = why
            return
        self._stuck.pop(order.cap, None)
        if order.final and state == "done":
            self._found.pop(order.cap, None)
        order.phase = state
        self._report(order, state, why)

    def _report(self, order: CapOrder, state: Literal["in_progress", "done", "failed"], why: str) -> None:
        order.answered = why
        if order.lapsing or self._orders.get(order.cap) is not order:
            return
        ack = order.acked(order.cap.control, self._name(order.cap), state, why)
        self._stage([ack], self._now_ns())

    def _drop(self, key: Key) -> None:
        self._orders.pop(key, None)
        self._found.pop(key, None)
        self._stuck.pop(key, None)

    def _name(self, key: Key) -> str:
        return self._site.name(READBACK[key.control][0], key.entity)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s: %s", self.name, name, error)
        if name in self._due:
            self._wake.set()
