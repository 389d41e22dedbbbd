"""DSX Flex publisher: the present load of site and feeders, reported with the load that could be shed.

`connectors.dsx.flex_state` decides the messages; the publisher signs and sends them once a second while
this daemon leads. Messages that could not be sent wait, breaches first. The site is its racks together: the
meter of each, or the power of its GPUs where the meter is silent. A rack without any reading is counted, so
that a part is not taken for the whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from connectors.agents import Publish
from connectors.dsx import (
    AGENT,
    BREACH,
    EventCause,
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
EVERY_S = 1.0
MAX_WAITING = 200  # breaches that could not be sent
PUBLISHED = ("powerstate/status", "powerbreach")


class Feeds:
    """Feeds as an engine knows them. `feeders` maps feed tags to feeders by full name ("" the site)."""

    def __init__(self, feeders: Mapping[str, str], engine: Callable[[], Engine]) -> None:
        self.feeders, self._engine = dict(feeders), engine

    def current(self) -> dict[str, FeedNow]:
        """All feeds as they are now."""
        engine = self._engine()
        view, site = engine.view(), engine.site
        rows = {str(row["feeder"]): row for row in explain_topic(engine, "feeds").table("feeds")}
        budget_w = view.budget_w()
        of_tag: dict[str, list[FeedTarget]] = {}
        for t in view.load_targets():
            if t.kind == "flex":
                target = FeedTarget(correlation_of(t.name), t.limit_w, t.start_ns, t.end_ns, t.best_effort)
                of_tag.setdefault(feed_of(t.name), []).append(target)
        feeds = {}
        for tag, name in self.feeders.items():
            feeder = site.entity("feeder", name) if name else None
            if name and feeder is None:
                continue
            row = rows["" if feeder is None else site.name("feeder", feeder)]
            limit_w = np.nan if feeder is None else float(budget_w[feeder])
            # A feared loss proves neither a breach nor that there is none
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


@dataclass(frozen=True, kw_only=True)
class FlexIdentity:
    """The name of our agent, its key, and its periods; `last_resort` are actions that it names for others."""

    identifier: str
    signer: Signer | None = None
    heartbeat_s: float = 60.0
    last_resort: Sequence[str] = ()


class FlexPublisher:
    """Publishes power states and breaches while `may_act`. `trace_of` gives the trace of a correlation."""

    def __init__(
        self,
        identity: FlexIdentity,
        feeds: Feeds,
        may_act: Callable[[], bool],
        trace_of: Callable[[str], tuple[str, str]] = lambda _: ("", ""),
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.identity, self.feeds = identity, feeds
        self._may_act, self._trace_of, self._now_ns = may_act, trace_of, now_ns
        self.counts = {"status": 0, "breach": 0, "not_sent": 0, "lost": 0}
        self.fault = ""
        self._agent: FlexAgent | None = None
        self._waiting: deque[FlexPublication] = deque()

    async def run(self, publish: Publish) -> None:
        """Publish what is due until cancelled."""
        while True:
            await self.publish_due(publish)
            await asyncio.sleep(EVERY_S)

    async def publish_due(self, publish: Publish) -> None:
        """Publish once. While another daemon leads, publish nothing and forget the state."""
        if not self._may_act():
            self._agent, self.fault = None, ""
            self._waiting.clear()
            return
        if self._agent is None:
            identity = self.identity
            self._agent = FlexAgent(lambda: str(uuid.uuid4()), identity.heartbeat_s, identity.last_resort)
        due = self._agent.publications(self._now_ns(), self.feeds.current(), self.feeds.hints)
        waiting, self._waiting = [*self._waiting, *due], deque()
        for n, one in enumerate(waiting):
            try:
                await self._send(one, publish)
                self.fault = ""
            except (ConnectorError, ActuationError) as error:
                self.fault = str(error)
                self.counts["not_sent"] += len(waiting) - n
                # The next state replaces one that was lost; a breach is published once, and must not be lost
                kept = [w for w in waiting[n:] if w.kind == BREACH]
                self.counts["lost"] += max(len(kept) - MAX_WAITING, 0)
                self._waiting = deque(kept[-MAX_WAITING:])
                return

    async def _send(self, publication: FlexPublication, publish: Publish) -> None:
        name, signer, breach = self.identity.identifier, self.identity.signer, publication.kind == BREACH
        data = publication.data if signer is None else signer.sign(plain(publication.data))
        cause = EventCause(publication.correlation, *self._trace_of(publication.correlation))
        subject = "powerbreach" if breach else "powerstate"
        payload = encode_event(publication.kind, f"{AGENT}{name}", subject, self._now_ns(), data, cause)
        await publish(f"grid/v1/dsx-flex-agent/{name}/{PUBLISHED[breach]}", payload, 1 + breach)
        self.counts["breach" if breach else "status"] += 1


class LoadNow(NamedTuple):
    """Load of the site and of each feeder [n_feeder] in W, NaN where it is unknown.

    `unheard_racks` is the number of racks without any reading.
    """

    site_w: float
    unheard_racks: int
    feeder_w: F64


def load_now(engine: Engine) -> LoadNow:
    """Loads of the site and its feeders, as bad as they may be where a meter has fallen silent."""
    feeds = explain_topic(engine, "feeds")
    site, *feeders = (float_of(row["load_w"]) for row in feeds.table("feeds"))
    unreported = feeds.figure("unheard_racks")
    return LoadNow(site, unreported if isinstance(unreported, int) else 0, np.array(feeders, np.float64))


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
