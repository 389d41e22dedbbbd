"""DSX Flex publisher: reports the load of each feed, and the load that could be shed, while this daemon
leads.

`connectors.dsx.flex_state` decides the messages; the publisher looks once a second, signs and sends. Messages
that could not be sent wait, breaches first.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from connectors.agents import Publish
from connectors.dsx import (
    AGENT,
    BREACH,
    FeedNow,
    FeedTarget,
    FlexAgent,
    FlexPublication,
    Hint,
    Signer,
    correlation_of,
    encode_event,
    feed_of,
    plain,
)
from twin.catalogue import F64, I64, ActuationError, ConnectorError
from twin.config import explain_topic
from twin.contracts import LoadTarget, Value
from twin.engine import Engine

log = logging.getLogger(__name__)
LOOK_S = 1.0
MAX_WAITING = 200  # breaches that could not be sent
PUBLISHED = ("powerstate/status", "powerbreach")


class Feeds:
    """Feeds as an engine knows them. `feeders` maps feed tags to feeders by full name ("" the site)."""

    def __init__(self, feeders: Mapping[str, str], engine: Callable[[], Engine]) -> None:
        self.feeders, self._engine = dict(feeders), engine

    def look(self) -> dict[str, FeedNow]:
        """All feeds as they are now."""
        engine = self._engine()
        view, site = engine.view(), engine.site
        rows = {str(row["feeder"]): row for row in explain_topic(engine, "feeds").table("feeds")}
        budget_w = view.budget_w()
        of_tag: dict[str, list[FeedTarget]] = {}
        for t in view.load_targets():
            if t.kind == "flex":
                of_tag.setdefault(feed_of(t.name), []).append(FeedTarget(
                    correlation_of(t.name), t.limit_w, t.start_ns, t.end_ns, t.best_effort))  # fmt: skip
        feeds = {}
        for tag, name in self.feeders.items():
            feeder = site.entity("feeder", name) if name else None
            if name and feeder is None:
                continue
            row = rows["" if feeder is None else site.name("feeder", feeder)]
            limit_w = np.nan if feeder is None else float(budget_w[feeder])
            # What is only feared proves neither a breach nor that there is none
            load_w = float_of(row["load_w"]) if row["metered"] else np.nan
            feeds[tag] = FeedNow(
                load_w,
                float_of(row["least_w"]),
                limit_w if np.isfinite(limit_w) else float_of(row["most_w"]),
                tuple(of_tag.get(tag, ())),
                bool(row["held_back"]),
            )
        return feeds

    def hints(self, tag: str, excess_w: float) -> Sequence[Hint]:
        """Nodes whose GPUs could be cut, in the order of the cuts, until the excess is covered."""
        options: dict[str, Value] = {"feeder": self.feeders[tag], "excess_w": excess_w}
        rows = explain_topic(self._engine(), "sheddable", options).table("nodes")
        return [Hint(str(r["node"]), int(float_of(r["class"])) + 1, float_of(r["keeps_w"])) for r in rows]


class FlexPublisher:
    """Publishes power states and breaches of `identifier` while `may_act`."""

    def __init__(
        self,
        identifier: str,
        feeds: Feeds,
        may_act: Callable[[], bool],
        signer: Signer | None = None,
        *,
        heartbeat_s: float = 60.0,
        last_resort: Sequence[str] = (),
        trace_of: Callable[[str], tuple[str, str]] = lambda _: ("", ""),
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.identifier, self.feeds, self.signer = identifier, feeds, signer
        self._may_act, self._trace_of, self._now_ns = may_act, trace_of, now_ns
        self._heartbeat_s, self._last_resort = heartbeat_s, last_resort
        self.counts = {"status": 0, "breach": 0, "not_sent": 0, "lost": 0}
        self.fault = ""
        self._agent: FlexAgent | None = None
        self._waiting: deque[FlexPublication] = deque()

    async def run(self, publish: Publish) -> None:
        """Look and publish until cancelled."""
        while True:
            await self.look(publish)
            await asyncio.sleep(LOOK_S)

    async def look(self, publish: Publish) -> None:
        """One look. While another daemon leads nothing is said, and nothing remembered."""
        if not self._may_act():
            self._agent, self.fault = None, ""
            self._waiting.clear()
            return
        if self._agent is None:
            self._agent = FlexAgent(lambda: str(uuid.uuid4()), self._heartbeat_s, self._last_resort)
        now_ns = self._now_ns()
        told = self._agent.look(now_ns, self.feeds.look(), self.feeds.hints)
        waiting, self._waiting = [*self._waiting, *told], deque()
        for n, one in enumerate(waiting):
            try:
                await self._send(one, publish)
                self.fault = ""
            except (ConnectorError, ActuationError) as error:
                self.fault = str(error)
                self.counts["not_sent"] += len(waiting) - n
                # Of states the next says all; a breach is told once, and must not be lost
                kept = [w for w in waiting[n:] if w.kind == BREACH]
                self.counts["lost"] += max(len(kept) - MAX_WAITING, 0)
                self._waiting = deque(kept[-MAX_WAITING:])
                return

    async def _send(self, told: FlexPublication, publish: Publish) -> None:
        breach = told.kind == BREACH
        data = told.data if self.signer is None else self.signer.sign(plain(told.data))
        payload = encode_event(
            told.kind, f"{AGENT}{self.identifier}", "powerbreach" if breach else "powerstate", self._now_ns(),
            data, correlation=told.correlation, trace=self._trace_of(told.correlation),
        )  # fmt: skip
        await publish(f"grid/v1/dsx-flex-agent/{self.identifier}/{PUBLISHED[breach]}", payload, 1 + breach)
        self.counts["breach" if breach else "status"] += 1


class LoadNow(NamedTuple):
    """Load of the site (W, NaN where nothing was ever heard), its unheard racks, and of each feeder (W, NaN
    unknown) [n_feeder]."""

    site_w: float
    unheard_racks: int
    feeder_w: F64


def load_now(engine: Engine) -> LoadNow:
    """Loads of the site and its feeders, as bad as they may be where a meter has fallen silent."""
    found = explain_topic(engine, "feeds")
    site, *feeders = (float_of(row["load_w"]) for row in found.table("feeds"))
    unheard = found.figure("unheard_racks")
    return LoadNow(site, unheard if isinstance(unheard, int) else 0, np.array(feeders, np.float64))


def float_of(value: object) -> float:
    """A cell as a number; NaN for none."""
    return float(value) if isinstance(value, int | float) else np.nan


def places_of(target: LoadTarget, load: LoadNow) -> tuple[I64, F64]:
    """(feeder of each place that a target holds, -1 = the site; its load in W), the highest load first."""
    if target.feeders is None:
        return np.array([-1], np.int64), np.array([load.site_w])
    order = np.argsort(-np.nan_to_num(load.feeder_w[target.feeders], nan=np.inf), kind="stable")
    index = target.feeders[order].astype(np.int64)
    return index, load.feeder_w[index]
