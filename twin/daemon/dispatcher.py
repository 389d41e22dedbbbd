"""Dispatcher: the queue and task of one sink that carry commands to it, so that no sink waits for another.

A sink that refuses or fails gives a negative acknowledgement, and the engine sends again while the lease
lives. A failed renewal is repeated here, since the engine takes it for sent, until something newer is
commanded of the same device. Commands leave only while `may_act` is true at that very moment, and never after
their lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from twin.catalogue import ActuationError, ConnectorError
from twin.contracts import CommandBatch, Item, Sink
from twin.site import Site
from twin.telemetry import CommandAcked

log = logging.getLogger(__name__)
QUEUE = 64  # ticks' worth of commands; a sink that lags further has lost its link
MAX_ACKS = 20_000  # negative acks of one failure; what is beyond runs into its deadline
APPLY_S = 10.0
AGAIN_S = 2.0  # between two tries of a renewal
FORGET_S = 60.0  # a failure that nothing followed is over
SAY_S = 60.0  # between two lines of log on one failure that lasts

Commands = tuple[CommandBatch, ...]


class Dispatcher:
    """Command queue of one sink. `now_ns` is the clock of the leases."""

    def __init__(
        self,
        sink: Sink,
        stage: Callable[[Sequence[Item], int], None],
        may_act: Callable[[], bool],
        now_ns: Callable[[], int],
    ) -> None:
        self.sink, self._stage, self._may_act, self._now_ns = sink, stage, may_act, now_ns
        self._queue: asyncio.Queue[tuple[Site, Commands]] = asyncio.Queue(QUEUE)
        self._again: tuple[Site, Commands] | None = None
        self._again_s = self._failed_s = 0.0
        self._fault = self._said = ""
        self._said_s = -SAY_S
        self.counts = {"sent": 0, "failed": 0, "dropped": 0, "expired": 0, "not_leading": 0}

    def offer(self, site: Site, commands: Commands) -> None:
        """Queue a tick's commands for this sink's controls; the oldest go when it lags."""
        mine = tuple(c for c in commands if c.control in self.sink.controls)
        if not mine:
            return
        if self._queue.full():
            self.counts["dropped"] += _size(self._queue.get_nowait()[1])
        self._queue.put_nowait((site, mine))

    def clear(self) -> None:
        """Drop waiting commands, after the term ended or the site changed."""
        self._again, self._fault = None, ""
        while not self._queue.empty():
            self.counts["not_leading"] += _size(self._queue.get_nowait()[1])

    async def run(self) -> None:
        """Carry out the queued commands in order, until cancelled."""
        while True:
            left_s = self._again_s - time.monotonic()
            if self._again is not None and left_s <= 0:
                (site, commands), self._again = self._again, None
            else:
                try:
                    async with asyncio.timeout(None if self._again is None else left_s):
                        site, commands = await self._queue.get()
                except TimeoutError:
                    continue
            await self._carry_out(site, commands)

    @property
    def fault(self) -> str:
        """Reason why the last commands did not leave; empty once others did, or when it is long over."""
        old = time.monotonic() - self._failed_s >= FORGET_S and self._again is None and self._queue.empty()
        return "" if old else self._fault

    def forgive(self) -> None:
        """Clear the fault while the connection to the sink is being made."""
        self._fault = ""

    async def _carry_out(self, site: Site, commands: Commands) -> None:
        if not self._may_act():
            self.counts["not_leading"] += _size(commands)
            return
        now_ns = self._now_ns()
        alive = tuple(c for c in commands if c.expires_ns > now_ns or c.final)
        self.counts["expired"] += _size(commands) - _size(alive)
        if not alive:
            return
        waited = self._again[1] if self._again is not None and self._again[0] is site else ()
        if waited:
            left = _about(waited, alive, False)
            self._again = (site, left) if left else None
        try:
            async with asyncio.timeout(APPLY_S):
                await self.sink.apply(alive)
            self.counts["sent"] += _size(alive)
            self._fault = ""
            self._again_s = 0.0  # the way is free
            if self._again is None:
                self._said = ""
            return
        except (ActuationError, ConnectorError, TimeoutError) as error:
            why = str(error) or f"no answer within {APPLY_S:g} s"
            self._say(why)
        except Exception as error:
            log.exception("%s failed", self.sink.name)
            why = f"{type(error).__name__}: {error}"
        if not self._may_act():
            self.counts["not_leading"] += _size(alive)
            return
        self.counts["failed"] += _size(alive)
        self._fault, self._failed_s = why[:300], time.monotonic()
        # A device that waits for a renewal may not have the time that the engine takes until it sends again
        instead = _about(tuple(c for c in alive if not (c.renewal or c.final)), waited, True)
        renewals = tuple(c for c in alive if c.renewal)
        renewals += tuple(replace(c, renewal=True) for c in instead)
        if renewals:
            before = self._again[1] if self._again is not None and self._again[0] is site else ()
            self._again = (site, (*before, *renewals)[-QUEUE:])
            again_s = time.monotonic() + AGAIN_S
            self._again_s = min(self._again_s, again_s) if before else again_s
        self._stage(_refusals(site, tuple(c for c in alive if not c.renewal), why), now_ns)

    def _say(self, why: str) -> None:
        """Log a failure, but not the same one at each attempt."""
        now_s = time.monotonic()
        if why != self._said or now_s - self._said_s >= SAY_S:
            log.warning("commands do not reach %s: %s", self.sink.name, why)
            self._said, self._said_s = why, now_s


def _about(commands: Commands, others: Commands, same: bool) -> Commands:
    """Commands for the same devices as `others` (`same`), or for other devices."""
    out = []
    for batch in commands:
        both = np.zeros(len(batch.index), np.bool_)
        for other in others:
            if other.control == batch.control:
                both |= np.isin(batch.index, other.index)
        keep = both == same
        if keep.all():
            out.append(batch)
        elif keep.any():
            columns = {
                name: getattr(batch, name)[keep] for name in ("index", "generation", "command", "value")
            }
            out.append(replace(batch, **columns))
    return tuple(out)


def _size(commands: Commands) -> int:
    return sum(len(c.index) for c in commands)


def _refusals(site: Site, commands: Commands, why: str) -> list[CommandAcked]:
    """Negative acknowledgements: a command that could not be sent counts as refused by the device."""
    acks: list[CommandAcked] = []
    for batch in commands:
        table = batch.control.partition(".")[0]
        for k, entity in enumerate(batch.index[: MAX_ACKS - len(acks)].tolist()):
            acks.append(
                CommandAcked(
                    control=batch.control,
                    name=site.name(table, entity),
                    generation=int(batch.generation[k]),
                    command=f"{batch.epoch}-{batch.command[k]}",
                    state="failed",
                    detail=why[:200],
                )
            )
    return acks
