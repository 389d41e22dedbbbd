"""Late messages: a simulated site whose reports come through the sources of a daemon, some with wrong stamps.

Each node has an agent, the building one gateway. What they send passes the account and the clock of its
source and `Ingest`, as live.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from tests.support.lie_cells import BEGIN_S, Cell, entities_of
from twin.catalogue import NS
from twin.daemon.ingest import Ingest
from twin.plant import Report
from twin.simulation import Simulation
from twin.telemetry import Block, Event, Frame

STAMPS_S = {"back_10s": -10.0, "back_1h": -3600.0, "ahead_10s": 10.0, "ahead_1h": 3600.0}
DELAYS_S = {"late_10s": 10.0, "late_60s": 60.0}
JITTER_S, TWICE_S, REORDER_S = 4.0, 1.3, 3.0


class LateMessages:
    """Stands for the Inbox of a simulation: reports become messages of sources, and some of these lie."""

    def __init__(self, simulation: Simulation, cell: Cell | None) -> None:
        site, self.inbox = simulation.site, simulation.inbox
        self.ingest = Ingest(site, {}, passed_ns=lambda: self.now_ns)
        self.ingest.inbox = self.inbox
        self.ledger = self.ingest.ledger
        self.ledger.now_ns, self.ledger._is_logged = lambda: self.now_ns, False
        self.kind, self.begin_ns = "" if cell is None else cell.kind, simulation.now_ns + BEGIN_S * NS
        self.now_ns, self._count = simulation.now_ns, 0
        self._queue: list[tuple[int, int, str, Block]] = []
        self._kept: list[tuple[int, str, Block]] = []
        self._rng = np.random.default_rng(7)
        extent = "" if cell is None else cell.extent
        nodes = () if cell is None or extent in ("", "bms") else entities_of(site, "node", cell)
        self.liars = {f"agent {site.name('node', i)}" for i in nodes}
        if extent in ("bms", "all"):
            self.liars.add("bms")
        self._agents = [f"agent {site.name('node', i)}" for i in range(site.sizes["node"])]
        self._starts = {"node": np.arange(len(self._agents)), "gpu": site.gpu_start_of_node[:-1]}

    @property
    def urgent(self) -> bool:
        return self.inbox.urgent

    @property
    def absurd(self) -> list[object]:
        return list(self.inbox.absurd)

    def put_event(self, event: Event) -> bool:
        return self.inbox.put_event(event)

    def forget(self, table: str, entity: int) -> None:
        self.inbox.forget(table, entity)

    def put_report(self, report: Report, now_ns: int) -> None:
        """Send the report as messages, one of each agent."""
        for block in report.blocks():
            starts = self._starts.get(report.table)
            if starts is None:
                self._send("bms", block, now_ns)
                continue
            n = block.values.shape[1]
            first, last = np.searchsorted(starts, [block.start, block.start + n])
            edges = [*starts[first:last].tolist(), block.start + n]
            for node, a, b in zip(range(first, last), edges[:-1], edges[1:], strict=True):
                at = slice(a - block.start, b - block.start)
                part = dataclasses.replace(
                    block, start=a, values=block.values[:, at], counts=block.counts[:, at]
                )
                self._send(self._agents[node], part, now_ns)

    def take(self, tick: int, now_ns: int, dt_s: float) -> Frame:
        """Let what is due arrive, and cut a frame."""
        while self._queue and self._queue[0][0] <= now_ns:
            due_ns, _, source, block = heapq.heappop(self._queue)
            self._arrive(source, block, due_ns)
        self.now_ns = now_ns
        return self.ingest.take(tick, now_ns, dt_s)

    def told(self, now_ns: int) -> list[str]:
        """Lines about the clocks of sources, and reasons why readings were not used, of the liars first."""
        wrong = self.ledger.wrong_clocks(now_ns) or self.ledger.odd_clocks(now_ns)
        late = [f"{row['source']}: {row['what']}" for row in self.ledger.overview(now_ns)]
        return [*wrong, *late]

    def _arrive(self, source: str, block: Block, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        self.ingest.of(source, True).stage([block], self.now_ns)

    def _later(self, source: str, block: Block, due_ns: int) -> None:
        self._count += 1
        copy = dataclasses.replace(block, values=block.values.copy(), counts=block.counts.copy())
        heapq.heappush(self._queue, (due_ns, self._count, source, copy))

    def _send(self, source: str, block: Block, now_ns: int) -> None:
        if source not in self.liars:
            self._arrive(source, block, now_ns)
            return
        if now_ns < self.begin_ns:
            self._arrive(source, block, now_ns)
            if self.kind == "replayed_old":
                kept = dataclasses.replace(block, values=block.values.copy(), counts=block.counts.copy())
                self._kept.append((now_ns + BEGIN_S * NS, source, kept))
            return
        self._lie(source, block, now_ns)

    def _lie(self, source: str, block: Block, now_ns: int) -> None:
        kind = self.kind

        def moved(t_ns: int) -> Block:
            return dataclasses.replace(block, t_ns=t_ns)

        if kind in STAMPS_S:
            self._arrive(source, moved(block.t_ns + round(STAMPS_S[kind] * NS)), now_ns)
        elif kind == "stands":
            self._arrive(source, moved(self.begin_ns), now_ns)
        elif kind in DELAYS_S:
            self._later(source, block, now_ns + round(DELAYS_S[kind] * NS))
        elif kind == "stamps_jitter":
            self._arrive(
                source, moved(block.t_ns + round(self._rng.uniform(-JITTER_S, JITTER_S) * NS)), now_ns
            )
        elif kind == "out_of_order":
            self._later(source, block, now_ns + round(self._rng.uniform(0.0, REORDER_S) * NS))
        elif kind == "twice":
            self._arrive(source, block, now_ns)
            self._later(source, block, now_ns + round(TWICE_S * NS))
        elif kind == "replayed_old":
            self._arrive(source, block, now_ns)
            while self._kept and self._kept[0][0] <= now_ns:
                _, whose, old = self._kept.pop(0)
                self._arrive(whose, old, now_ns)
