"""Burn-in: the site's own test of nodes out of service, run as a program on this host.

A node shall have been tested at an instant or later; a result that is new enough is not made again. Never
two on a node: a lock that the program inherits outlasts us. What a program said is kept as a file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from connectors.jobs.burn_in_run import BurnInFolder, BurnInOutcome, run_test
from connectors.orders import SinkContext, SinkOrder, State, keep_newest
from twin.catalogue import NS
from twin.contracts import CommandBatch, Item
from twin.site import Site
from twin.telemetry import NodeTested

CONTROL = "node.burn_in_since_s"
CHECK_S = 1.0  # between two checks of tests that may begin, or must end
TRIES = 3  # tests without a result, for one command
AGAIN_S = 300.0  # after the first of them; after the second, twice that
MAX_DETAIL = 1000  # characters of the last lines in the event


@dataclass(slots=True, eq=False)
class BurnInOrder(SinkOrder):
    """The commanded test of a node: at the instant `value` [s] or later."""

    expires_ns: int
    tries: int = 0
    again_s: float = 0.0  # monotonic
    answered: tuple[State, str] | None = None

    @property
    def since_ns(self) -> int:
        """Return the instant; -1 for none."""
        return round(self.value * NS) if 0 <= self.value <= 1e10 else -1


@dataclass(frozen=True, kw_only=True)
class BurnInProgram:
    """The program of a test, run at most `at_once` times; {node} and {host} in `command` are filled in."""

    command: Sequence[str]
    at_once: int = 4
    timeout_s: float = 3600.0
    test: str = "burn-in"


class TestedNodes(Protocol):
    """Nodes as the daemon knows them."""

    def why_not_now(self, node: int) -> str:
        """Return the reason that a node cannot be tested now; "" if it can."""
        ...

    def returned(self, node: int) -> bool:
        """Return True if a node is in service, so that its test must end."""
        ...

    def tested(self, node: int) -> tuple[int, bool] | None:
        """Return (begin of the last test with a result, True if it passed)."""
        ...

    def host_of(self, node: int) -> str | None:
        """Return the name of a node in its scheduler."""
        ...


class BurnInSink:
    """Tests nodes with the site's program; `run` works beside the dispatcher."""

    name = "burn-in"
    controls: tuple[str, ...] = (CONTROL,)
    enforces_safe = False

    def __init__(
        self,
        site: Site,
        program: BurnInProgram,
        folder: Path,
        context: SinkContext,
        nodes: TestedNodes,
        check_s: float = CHECK_S,
    ) -> None:
        self._site, self._program, self.places = site, program, BurnInFolder(folder)
        self._stage, self._may_act, self._now_ns = context.stage, context.may_act, context.now_ns
        self._nodes, self._check_s = nodes, check_s
        self._orders: dict[int, BurnInOrder] = {}  # by node: no more than the site has
        self._done: dict[int, tuple[int, bool]] = {}  # results, until they are in the service book
        self._running: dict[int, asyncio.Task[None]] = {}
        self._begun_ns: dict[int, int] = {}
        self.counts = {"passed": 0, "failed": 0, "no_result": 0, "stopped": 0, "old": 0}

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Note what shall be tested, and say how far it is."""
        touched: list[int] = []
        for batch in commands:
            if batch.control == CONTROL:
                touched += self._note(batch)
        items = [item for entity in dict.fromkeys(touched) for item in self._answer(entity, again=True)]
        if items:
            self._stage(items, self._now_ns())

    async def run(self) -> None:
        """Start due tests and end those that may not continue, until cancelled; then end all tests."""
        try:
            while True:
                await self._check()
                await asyncio.sleep(self._check_s)
        finally:
            await self._end(list(self._running))

    def _note(self, batch: CommandBatch) -> list[int]:
        make = partial(BurnInOrder, expires_ns=batch.expires_ns)
        concerned, old = keep_newest(self._orders, batch, make)
        self.counts["old"] += old
        for entity in concerned:
            self._orders[entity].expires_ns = batch.expires_ns
        return concerned

    def _result(self, entity: int) -> tuple[int, bool] | None:
        """Return the last result, from the service book or not there yet."""
        results = [r for r in (self._nodes.tested(entity), self._done.get(entity)) if r is not None]
        return max(results, default=None)

    def _state(self, entity: int) -> tuple[State, str]:
        order, result = self._orders[entity], self._result(entity)
        if order.since_ns < 0:
            return "failed", "expected an instant in seconds since 1970"
        if result is not None and result[0] >= order.since_ns:
            return "done", "passed" if result[1] else "failed the test"
        if entity in self._running:
            return "in_progress", "the test runs"
        if order.tries >= TRIES:
            return "failed", f"{order.tries} tests gave no result; see {self.places.folder}"
        if order.since_ns > self._now_ns():
            return "accepted", "its instant is to come"
        return "accepted", self._nodes.why_not_now(entity) or "waits for its turn"

    def _answer(self, entity: int, again: bool = False) -> list[Item]:
        """Progress of the command of a node, if it changed or is asked for `again`."""
        order, (state, detail) = self._orders[entity], self._state(entity)
        if not again and order.answered is not None and order.answered[0] == state:
            return []
        order.answered = (state, detail)
        return [order.acked(CONTROL, self._site.name("node", entity), state, detail)]

    async def _check(self) -> None:
        if not self._may_act():
            await self._end(list(self._running))
            return
        await self._end([e for e in self._running if self._nodes.returned(e)])
        now_ns, now_s = self._now_ns(), time.monotonic()
        for entity in [
            e for e, o in self._orders.items() if o.expires_ns <= now_ns and e not in self._running
        ]:
            del self._orders[entity]  # nobody asks any more
        for entity in sorted(self._orders, key=lambda e: (self._orders[e].since_ns, e)):
            if len(self._running) >= self._program.at_once:
                break
            order = self._orders[entity]
            if (
                entity not in self._running
                and self._state(entity)[0] == "accepted"
                and order.since_ns <= now_ns
                and order.again_s <= now_s
                and not self._nodes.why_not_now(entity)
            ):
                order.tries += 1
                order.again_s = now_s + AGAIN_S * order.tries
                task = asyncio.create_task(self._one(entity), name=f"burn-in {entity}")
                self._running[entity] = task
                self._stage(self._answer(entity), now_ns)

    async def _end(self, entities: Sequence[int]) -> None:
        """Stop tests; their programs are gone when this returns."""
        tasks = [self._running[e] for e in entities if e in self._running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _one(self, entity: int) -> None:
        name, began_ns = self._site.name("node", entity), self._now_ns()
        host = self._nodes.host_of(entity) or name.rpartition("/")[2]
        words = [w.replace("{node}", name).replace("{host}", host) for w in self._program.command]
        try:
            outcome = await run_test(words, self.places, name, host, self._program.timeout_s, began_ns)
        except asyncio.CancelledError:
            self.counts["stopped"] += 1
            self._report(entity, name, began_ns, BurnInOutcome(None, "stopped before its end"))
            raise
        except Exception as error:  # of our own files, such as a full disk: it says nothing of the node
            outcome = BurnInOutcome(None, f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(entity, None)
        self._report(entity, name, began_ns, outcome)

    def _report(self, entity: int, name: str, began_ns: int, outcome: BurnInOutcome) -> None:
        self._running.pop(entity, None)
        ended_ns = max(self._now_ns(), began_ns)
        kind = "no_result" if outcome.passed is None else "passed" if outcome.passed else "failed"
        self.counts[kind] += 1
        if outcome.passed is not None:
            self._done[entity] = (began_ns, outcome.passed)
        items: list[Item] = [
            NodeTested(
                id=f"burn-in:{name}:{began_ns}",
                name=name,
                began_ns=began_ns,
                ended_ns=ended_ns,
                passed=outcome.passed,
                test=self._program.test,
                detail=outcome.detail[-MAX_DETAIL:],
            )
        ]
        if entity in self._orders:
            items += self._answer(entity, again=True)
        self._stage(items, ended_ns)
