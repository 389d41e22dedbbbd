"""Contingency publisher: delivers caps to the node agents for the time when the daemon is away.

A delivery is an action like any other: it is journaled first, made only while this daemon may act and a
policy is armed, and withdrawn when that ends. What a daemon before delivered is withdrawn where agents report
that they hold it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from connectors.agents import ContingencyTerms, Publication, contingency_of, contingency_topic
from twin.api import Runtime
from twin.catalogue import NS, ActuationError, ConnectorError
from twin.contracts import ContingencyNote, DaemonRecord
from twin.daemon.bootstrap import OpenedRun
from twin.daemon.ingest import Ingest
from twin.daemon.leadership import Leadership
from twin.site import contingency_caps, parse_profile
from twin.wiring import Links

log = logging.getLogger(__name__)
CAP = "gpu.power_cap_w"
LOOK_S, AGAIN_S, REFRESH_S, VALID_S = 1.0, 60.0, 600.0, 7 * 86_400.0


class ContingencyPublisher:
    """Service that delivers, refreshes and withdraws plans. `links`: those in use, None before."""

    def __init__(
        self,
        live: Runtime,
        opened: OpenedRun,
        ingest: Ingest,
        leadership: Leadership,
        links: Callable[[], Links | None],
    ) -> None:
        self.live, self.opened, self.ingest = live, opened, ingest
        self.leadership, self._links = leadership, links
        self.delivered: dict[str, None] = {}  # topics that hold a plan of ours
        self._left_s: dict[str, float] = {}  # topics of a daemon before -> when they were withdrawn

    async def run(self) -> None:
        """Look each second whether a plan is due, until cancelled."""
        key: tuple[str, int] | None = None
        delivered_s = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            term, site = self.leadership.term, self.live.engine.site
            if term is None or not self.leadership.may_act():
                key = None  # the leader has plans of its own
                continue
            try:
                if not self._armed():
                    key = None
                    await self._withdraw([*self.delivered, *self._left()])
                    continue
                due = key != (site.spec_hash, term.epoch) or time.monotonic() - delivered_s >= REFRESH_S
                if due and await self._deliver(term.epoch):
                    key, delivered_s = (site.spec_hash, term.epoch), time.monotonic()
            except (ActuationError, ConnectorError) as error:
                log.warning("contingency caps are not delivered: %s; retrying", error)

    def _armed(self) -> bool:
        """True if any policy may act on caps of GPUs."""
        engine = self.live.engine
        return (
            engine.site.sizes["gpu"] > 0
            and engine.arbiter.mode != "released"
            and any(engine.intake.authority[p.name] == "act" and CAP in p.controls for p in engine.policies)
        )

    def _left(self) -> list[str]:
        """Topics with plans of a daemon before, as agents report; each again only after a minute."""
        links, now_s = self._links(), time.monotonic()
        if links is None:
            return []
        racks = dict.fromkeys(node.rpartition("/")[0] for node in sorted(links.router.answers.armed))
        topics = [contingency_topic(links.integration, rack) for rack in racks]
        known = {topic for topic, at_s in self._left_s.items() if now_s - at_s < AGAIN_S}
        left = [topic for topic in topics if topic not in known and topic not in self.delivered]
        self._left_s |= dict.fromkeys(left, now_s)
        return left

    async def _deliver(self, epoch: int) -> bool:
        """Publish the plans; return False if the site has changed."""
        links, site, alarms = self._links(), self.live.engine.site, self.live.alarms
        if links is None or self.ingest.site.spec_hash != site.spec_hash:
            return False
        profiles = {n: parse_profile(t, n) for n, t in self.opened.spec.profiles.items()}
        found = contingency_caps(site, profiles)
        if found.infeasible:
            alarms.condition(
                "contingency",
                "warning",
                "No caps keep every budget with a feed lost",
                found.infeasible[:8],
                "Lower other load, or raise the budgets if the equipment allows it.",
            )
        else:
            alarms.clear("contingency")
        index = np.flatnonzero(np.isfinite(found.caps_w)).astype(np.int32)
        now_ns = time.time_ns()
        plans: list[Publication] = []
        if len(index):
            terms = ContingencyTerms(links.integration, epoch, now_ns, now_ns + round(VALID_S * NS))
            plans = contingency_of(site, index, found.caps_w[index], terms)
        await self._withdraw([t for t in self.delivered if t not in {topic for topic, _ in plans}])
        if plans:
            caps = found.caps_w[index]
            await self._journal(
                ContingencyNote(
                    delivered=len(plans),
                    gpus=len(index),
                    epoch=epoch,
                    low_w=float(caps.min()),
                    high_w=float(caps.max()),
                )
            )
            # Before: what fails half-way has delivered some
            self.delivered |= dict.fromkeys(topic for topic, _ in plans)
            await self._publish(plans)
        return True

    async def _withdraw(self, topics: list[str]) -> None:
        """Withdraw plans by empty retained messages."""
        if topics:
            await self._journal(ContingencyNote(withdrawn=len(topics)))
            await self._publish([(topic, b"") for topic in topics])
            self._left_s |= dict.fromkeys(topics, time.monotonic())  # until their agents have reported
            for topic in topics:
                self.delivered.pop(topic, None)

    async def _publish(self, plans: list[Publication]) -> None:
        links = self._links()
        if links is None:
            raise ActuationError("no link to a broker")
        publish = links.source.publisher(self.leadership.may_act)
        for topic, payload in plans:
            await publish(topic, payload, 1, True)

    async def _journal(self, note: ContingencyNote) -> None:
        """Journal the intent before the action. The line reaches the disk with those of the next tick."""
        ticks = self.live.stats.ticks
        self.live.note(DaemonRecord(contingency=note))
        while self.live.stats.ticks < ticks + 2:  # one may have been on its way to the disk
            await asyncio.sleep(0.05)
