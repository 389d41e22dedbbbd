"""DSX Flex in the daemon: what each feed draws, who could shed there, and publishing it while we lead.

What it says is decided by `connectors.dsx_flex_state`; this looks once a second, signs and sends. What could
not be sent waits, breaches before all else. Part of the shell.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from connectors.dsx_flex import correlation_of, feed_of
from connectors.dsx_flex_keys import Signer
from connectors.dsx_flex_state import FeedNow, FeedTarget, FlexAgent, Hint, Told
from connectors.dsx_flex_wire import AGENT, BREACH, encode_event, plain
from policies.power_budgets import Carried, carried_by, dead_feeders, gain_of, pairs_of, sums_w
from policies.power_demand import CONTROL, Tenant, classes, tenants_of
from twin.app.load_now import load_now, view_of
from twin.engine import Engine
from twin.errors import ActuationError, ConnectorError
from twin.frame import F64, Bool
from twin.state import GOOD
from twin.view import EngineView

log = logging.getLogger(__name__)
LOOK_S = 1.0
MAX_HINTS = 200
HINTED_PU = (
    1.1  # of the excess that hints come to: some of those who are asked may not follow. source: estimate
)
LEAST_SHED_W = 10.0  # of a node; less is not worth a hint. source: estimate
CAPPED_W = 1.0  # below its most: a GPU is held back
MAX_WAITING = 200  # breaches that could not be sent
PUBLISHED = ("powerstate/status", "powerbreach")
Publish = Callable[[str, bytes, int], Awaitable[None]]


class Sight(NamedTuple):
    """One look at the site: the view, what its places carry, and what each feed is."""

    view: EngineView
    carried: Carried
    feeds: dict[str, FeedNow]


class Feeds:
    """What an engine knows of feeds. `feeders` maps feed tags to feeders by full name ("" the site)."""

    def __init__(self, feeders: Mapping[str, str], engine: Callable[[], Engine]) -> None:
        self.feeders, self._engine = dict(feeders), engine

    def look(self) -> Sight:
        """All feeds as they are now."""
        view = view_of(self._engine())
        site, load = view.site, load_now(view)
        carried = carried_by(view, pairs_of(site, dead_feeders(view), failover=False))
        least_w, most_w = _extremes(view, carried)
        budget_w, held_back = view.budget_w(), _held_back(view, carried)
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
            whole = feeder is None
            at = slice(None) if whole else feeder
            limit_w = np.nan if whole else float(budget_w[feeder])
            load_w = load.site_w if whole else float(load.feeder_w[feeder])
            if whole and load.unheard_racks:
                load_w = np.nan
            if not whole and not load.metered[feeder]:
                load_w = np.nan  # only feared: it proves neither a breach nor that there is none
            most = float(np.sum(most_w[1] if whole else most_w[0][at]))
            feeds[tag] = FeedNow(
                load_w, float(np.sum(least_w[1] if whole else least_w[0][at])),
                limit_w if np.isfinite(limit_w) else most,
                tuple(of_tag.get(tag, ())),
                bool(np.any(held_back[1] if whole else held_back[0][at])),
            )  # fmt: skip
        return Sight(view, carried, feeds)

    def hints(self, sight: Sight, tag: str, excess_w: float) -> Sequence[Hint]:
        """Nodes whose GPUs could be cut to their least, in the order in which the policies cut: what has no
        job, the usual, what is marked high, what people wait for; until the excess is covered."""
        view, site = sight.view, sight.view.site
        name = self.feeders[tag]
        feeder = site.entity("feeder", name) if name else None
        low = np.asarray(view.envelope(CONTROL).low, np.float64)
        heard = view.quality("gpu.power_w") == GOOD
        gpu_w = np.where(heard, view.value("gpu.power_w"), np.nan).astype(np.float64)
        spare_w = np.nan_to_num(np.maximum(gpu_w - low, 0.0))
        node = site.node_of_gpu
        n_node = site.sizes["node"]
        shed_w = np.bincount(node, spare_w, n_node)
        share = (
            np.ones(site.sizes["rack"])
            if feeder is None
            else _share(sight.carried, feeder, site.sizes["rack"])
        )
        here_w = shed_w * (share * gain_of(site))[site.rack_of_node]
        class_of_gpu = classes(view, *_priorities(view)).astype(np.int64)
        class_of = np.zeros(n_node, np.int64)
        np.maximum.at(class_of, node, class_of_gpu)
        order = np.lexsort((-here_w, class_of))
        order = order[here_w[order] >= LEAST_SHED_W]
        enough = int(np.searchsorted(np.cumsum(here_w[order]), HINTED_PU * excess_w)) + 1
        draws_w = _node_w(view, np.bincount(node, np.nan_to_num(gpu_w), n_node).astype(np.float64))
        return [
            Hint(site.name("node", n), int(class_of[n]) + 1, float(max(draws_w[n] - shed_w[n], 0.0)))
            for n in order[: min(enough, MAX_HINTS)].tolist()
        ]


def _priorities(view: EngineView) -> tuple[int, dict[str, Tenant]]:
    """(from where a job is high, tenants), as the policy power_cap of this site has them."""
    named = view.site.file.policies.get("power_cap")
    settings: dict[str, Any] = named.settings if named is not None else {}
    return int(settings.get("high_priority", 1)), tenants_of(str(settings.get("tenants", "")))


def _share(carried: Carried, feeder: int, n_rack: int) -> F64:
    """The part of each rack's watts that a feeder carries [n_rack]."""
    pairs = carried.pairs
    mine = pairs.place == carried.feeder(feeder)
    return np.bincount(pairs.rack[mine], pairs.share[mine], n_rack).astype(np.float64)


def _extremes(view: EngineView, carried: Carried) -> tuple[tuple[F64, F64], tuple[F64, F64]]:
    """((of feeders, of racks) at the least their caps allow, the same at the most) in W."""
    site, design, envelope = view.site, view.site.design, view.envelope(CONTROL)
    nodes = np.diff(site.node_start_of_rack)
    rest_w = nodes * np.nan_to_num(design.cpu_idle_w + design.node_other_w) + np.nan_to_num(
        design.rack_overhead_w
    )
    most_gpu_w = np.nan_to_num(design.gpu_max_w)[site.rack_of_gpu]
    floor_w = np.where(np.isfinite(envelope.low), envelope.low, most_gpu_w)
    least_w = rest_w + site.sum_by_rack("gpu", floor_w) * gain_of(site)
    all_w = (
        nodes * np.nan_to_num(design.cpu_max_w + design.node_other_w)
        + np.nan_to_num(design.rack_overhead_w)
        + site.sum_by_rack("gpu", most_gpu_w) * gain_of(site)
    )
    most_w = np.where(np.isfinite(design.rack_max_w), design.rack_max_w, all_w)
    first, n = carried.feeder(0), site.sizes["feeder"]
    return (sums_w(carried, least_w)[first : first + n], least_w), (
        sums_w(carried, most_w)[first : first + n], most_w)  # fmt: skip


def _held_back(view: EngineView, carried: Carried) -> tuple[Bool, Bool]:
    """(feeders, racks) below which a GPU is capped to less than its most."""
    site, most_w = view.site, view.envelope(CONTROL).high
    capped = view.commanded(CONTROL) < most_w - CAPPED_W  # NaN: no lease, not capped
    racks = site.sum_by_rack("gpu", capped.astype(np.float64)) > 0
    first, n = carried.feeder(0), site.sizes["feeder"]
    return sums_w(carried, racks.astype(np.float64))[first : first + n] > 0, racks


def _node_w(view: EngineView, gpus_w: F64) -> F64:
    """What nodes draw [n_node]: by their meter, else their GPUs and the most of the rest."""
    site, design = view.site, view.site.design
    rest_w = np.nan_to_num(design.cpu_max_w + design.node_other_w)[site.rack_of_node]
    heard = view.quality("node.power_w") == GOOD
    return np.where(heard, view.value("node.power_w"), gpus_w + rest_w).astype(np.float64)


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
        self._waiting: deque[Told] = deque()

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
        sight = self.feeds.look()
        told = self._agent.look(now_ns, sight.feeds, lambda tag, w: self.feeds.hints(sight, tag, w))
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

    async def _send(self, told: Told, publish: Publish) -> None:
        breach = told.kind == BREACH
        data = told.data if self.signer is None else self.signer.sign(plain(told.data))
        payload = encode_event(
            told.kind, f"{AGENT}{self.identifier}", "powerbreach" if breach else "powerstate", self._now_ns(),
            data, correlation=told.correlation, trace=self._trace_of(told.correlation),
        )  # fmt: skip
        await publish(f"grid/v1/dsx-flex-agent/{self.identifier}/{PUBLISHED[breach]}", payload, 1 + breach)
        self.counts["breach" if breach else "status"] += 1
