"""Beforehand: contingency caps delivered to the nodes' agents for when the daemon is not there.

An action like any other: journaled before it leaves, only while we may act and a policy is armed, and taken
back when that ends. Part of the shell.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from connectors.it_command import Publication, contingency_of
from twin.contingency import contingency_caps
from twin.errors import ActuationError, ConnectorError
from twin.frame import NS
from twin.profile import parse_profile

if TYPE_CHECKING:
    from twin.app.daemon import Daemon

log = logging.getLogger(__name__)
CAP = "gpu.power_cap_w"
LOOK_S, EVERY_S, LASTS_S = 1.0, 600.0, 7 * 86_400.0


class Beforehand:
    """A service: `run` delivers, refreshes and withdraws the plans."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.told: dict[str, None] = {}  # topics that hold a plan of ours

    async def run(self) -> None:
        """Look each second whether a plan is due, until cancelled."""
        key: tuple[str, int] | None = None
        told_s = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            term, site = self.daemon.leading.term, self.daemon.engine.site
            if term is None or not self.daemon.leading.may_act():
                key = None  # the leader has plans of its own
                continue
            try:
                if not self._armed():
                    key = None
                    await self._withdraw(list(self.told))
                    continue
                due = key != (site.spec_hash, term.epoch) or time.monotonic() - told_s >= EVERY_S
                if due and await self._deliver(term.epoch):
                    key, told_s = (site.spec_hash, term.epoch), time.monotonic()
            except (ActuationError, ConnectorError) as error:
                log.warning("contingency caps: %s; they are tried again", error)

    def _armed(self) -> bool:
        """Whether any policy may act on caps of GPUs."""
        engine = self.daemon.engine
        return (
            engine.site.sizes["gpu"] > 0
            and engine.arbiter.mode != "released"
            and any(engine.intake.authority[p.name] == "act" and CAP in p.controls for p in engine.policies)
        )

    async def _deliver(self, epoch: int) -> bool:
        """Publish the plans; False where the site changed meanwhile."""
        daemon, links = self.daemon, self.daemon.services.links
        site = daemon.engine.site
        if links is None or daemon.inflow.site.spec_hash != site.spec_hash:
            return False
        profiles = {n: parse_profile(t, n) for n, t in daemon.opened.spec.profiles.items()}
        found = contingency_caps(site, profiles)
        if found.infeasible:
            daemon.alarms.condition(
                "contingency", "warning", "No caps keep every budget with a feed lost", found.infeasible[:8],
                "Lower other load, or raise the budgets, if they may be.",
            )  # fmt: skip
        else:
            daemon.alarms.clear("contingency")
        index = np.flatnonzero(np.isfinite(found.caps_w)).astype(np.int32)
        now_ns = time.time_ns()
        plans: list[Publication] = []
        if len(index):
            plans = contingency_of(
                site, index, found.caps_w[index], integration=links.integration, epoch=epoch,
                issued_ns=now_ns, expires_ns=now_ns + round(LASTS_S * NS),
            )  # fmt: skip
        await self._withdraw([t for t in self.told if t not in {topic for topic, _ in plans}])
        if plans:
            caps = found.caps_w[index]
            await self._journaled({"delivered": len(plans), "gpus": len(index), "epoch": epoch,
                                   "low_w": float(caps.min()), "high_w": float(caps.max())})  # fmt: skip
            await self._publish(plans)
            self.told |= dict.fromkeys(topic for topic, _ in plans)
        return True

    async def _withdraw(self, topics: list[str]) -> None:
        """An empty retained message takes a plan back."""
        if topics:
            await self._journaled({"withdrawn": len(topics)})
            await self._publish([(topic, b"") for topic in topics])
            for topic in topics:
                self.told.pop(topic, None)

    async def _publish(self, plans: list[Publication]) -> None:
        links = self.daemon.services.links
        for topic, payload in plans:
            if links is None or not self.daemon.leading.may_act():
                raise ActuationError("another daemon leads by now")
            await links.source.link.publish(topic, payload, 1, True)

    async def _journaled(self, body: dict[str, object]) -> None:
        """Intent before act: the line is on the disk with the lines of the next tick."""
        ticks = self.daemon.live.stats.ticks
        self.daemon.live.note("daemon", {"contingency": body})
        while self.daemon.live.stats.ticks < ticks + 2:  # one may have been on its way to the disk
            await asyncio.sleep(0.05)
