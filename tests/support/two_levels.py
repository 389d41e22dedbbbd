"""Two levels of a fleet in simulated time: a top hub, site hubs that are halls of it, and the halls of these.

Real engines, codecs and summaries. In a storm the network between each pair loses, doubles, delays and
reorders, and hubs are killed and taken over; halls obey as those of storms do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from connectors.nats import BudgetDecoder, BudgetSink, HallSummary, SummaryDecoder, encode
from policies import BY_NAME
from tests.support.builders import START_NS, Twin
from tests.support.fleet_storm import Network, Parcel, StormHall, finished, take_summaries
from twin.catalogue import NS, BadMessage
from twin.contracts import CommandBatch
from twin.engine import encode as packed
from twin.engine.snapshot import decode
from twin.telemetry import EpochChanged, Event, Ignored, LoadTargetSet, Message
from twin.wiring.fleet import summary_of

SITES, HALLS = ("east", "west"), ("hall-a", "hall-b")
SHARES_W, HALL_MOST_W = (400e3, 300e3), 1e6
SITE_SHARE_W, SITE_MOST_W = 800e3, 1.9e6
TOP_FEEDER_W, SITE_FEEDER_W, LOOP_W = 2.4e6, 1.8e6, 2.2e6


class CalmNetwork(Network):
    """A network that delivers within the next second what is not cut off."""

    def send(self, to: str, hall: str, subject: str, payload: bytes) -> None:
        """Put a message on its way."""
        if self.cut_until_s[hall] <= self.now_s:
            self._parcels.append(Parcel(self.now_s + 0.5, to, subject, payload))


def top_tree() -> dict[str, Any]:
    """The site file of the top hub: both sites below feeders of sides A and B, and on one cooling loop."""
    racks = [
        {"name": name, "priority": priority, "guaranteed_w": SITE_SHARE_W, "max_w": SITE_MOST_W}
        for name, priority in zip(SITES, (1, 0), strict=True)
    ]
    feeders = [
        {"name": f"grid-{side.lower()}", "side": side, "budget_w": TOP_FEEDER_W, "serves": list(SITES)}
        for side in "AB"
    ]
    loop = {"name": "river", "serves": list(SITES), "heat_w": LOOP_W, "machines": 4}
    return {
        "site": "region",
        "halls": [{"name": "grid", "racks": racks, "feeders": feeders}],
        "loops": [loop],
        "policies": {"hall_budgets": {"authority": "act"}},
    }


def hub_tree(site: str) -> dict[str, Any]:
    """The site file of a site's hub: two halls below feeders of sides A and B, and its own grant above."""
    racks = [
        {"name": name, "priority": priority, "guaranteed_w": least_w, "max_w": HALL_MOST_W}
        for name, priority, least_w in zip(HALLS, (2, 0), SHARES_W, strict=True)
    ]
    feeders: list[dict[str, Any]] = [
        {"name": f"f{side.lower()}", "side": side, "budget_w": SITE_FEEDER_W, "serves": list(HALLS)}
        for side in "AB"
    ]
    main = {"name": "main", "external": True, "guaranteed_w": SITE_SHARE_W, "serves": ["fa", "fb"]}
    return {
        "site": site,
        "halls": [{"name": "campus", "racks": racks, "feeders": [*feeders, main]}],
        "policies": {"hall_budgets": {"authority": "act"}},
    }


class SimulatedHub:
    """The daemon of a hub: its engine, what it hears from its halls, and what it lends them."""

    def __init__(self, tree: dict[str, Any], network: Network, skew_s: float = 0.0) -> None:
        self.tree, self.network, self.skew_ns = tree, network, round(skew_s * NS)
        self.lent_w, self.refused, self.epoch = 0.0, 0, 1
        self.away_until_s = -1.0
        self._begin(START_NS + self.skew_ns)

    def _begin(self, now_ns: int) -> None:
        self.twin = Twin(self.tree, [BY_NAME["hall_budgets"]()], act=True)
        self.twin.now_ns = now_ns
        self.decoder = SummaryDecoder(self.twin.site)
        self.sink = BudgetSink(self.twin.site, self.network)  # type: ignore[arg-type]

    def take_over(self, with_snapshot: bool = False) -> None:
        """Another daemon leads from now on, which knows what a snapshot tells, or nothing."""
        self.epoch += 1
        before = self.twin.engine.dump() if with_snapshot else None
        self._begin(self.twin.now_ns)
        if before is not None:
            self.twin.engine.restore(decode(packed(before)))
        self.twin.inbox.put_event(EpochChanged(epoch=self.epoch, adopt=True))

    def tick(self, values: dict[str, Any], *events: Event) -> None:
        """A second of it, with readings of its own meters."""
        self.refused += take_summaries(self.twin, self.decoder, self.network.take("hub"))
        commands = self.twin.tick(values, *events).commands
        finished(self.sink.apply(commands))
        self.lent_w = max(self.lent_w, *(_sum_w(batch) for batch in commands), 0.0)


class SimulatedSite(SimulatedHub):
    """The hub of a site, which is a hall of the top hub, with its halls."""

    def __init__(self, name: str, rng: np.random.Generator, up: Network, folder: Path) -> None:
        super().__init__(hub_tree(name), type(up)(rng), rng.uniform(-1.0, 1.0))
        self.name, self.up, self.sequence = name, up, 0
        self.grants = BudgetDecoder(name, "main")
        self.halls = [
            StormHall(hall, least_w, rng.uniform(-1.5, 1.5), folder / name / hall)
            for hall, least_w in zip(HALLS, SHARES_W, strict=True)
        ]

    def step(self, second: float) -> None:
        """A second of the site: its halls, then its hub where that is there."""
        self.network.now_s = second
        for hall in self.halls:
            hall.step(second, self.network)
        come = self.up.take(self.name)
        if second < self.away_until_s:
            self.twin.now_ns += NS
            return
        events: list[Event] = []
        for parcel in come:
            try:
                items = self.grants.decode(Message(self.twin.now_ns + NS, parcel.subject, parcel.payload))
            except BadMessage:
                self.refused += 1
                continue
            events += () if isinstance(items, Ignored) else items  # type: ignore[arg-type]
        self.tick({"feeder.energised_state": [0.0, 0.0, 0.0]}, *events)
        self.sequence += 1
        told = self.summary()
        self.up.send("hub", self.name, f"cpc.{self.name}.v1.summary", encode(told))

    def summary(self) -> HallSummary:
        """Return the summary of all its halls."""
        blank = HallSummary(hall=self.name, epoch=self.epoch, sequence=self.sequence, t_ns=self.twin.now_ns)
        return summary_of(self.twin.engine, "main", blank)

    @property
    def budget_w(self) -> float:
        """The budget of the site in force."""
        site = self.twin.site
        at = site.entity("feeder", "main")
        assert at is not None
        return float(self.twin.engine.intake.budget_w(site, self.twin.now_ns)[at])

    @property
    def draw_w(self) -> float:
        """The power of all its halls."""
        return sum(hall.draw_w for hall in self.halls)


class Region:
    """Both levels in simulated time; the runs of halls are kept in `folder`. `over`: what was above a limit,
    and when; `drawn_w`: all, by second."""

    def __init__(self, seed: int, folder: Path, network: type[Network] = Network) -> None:
        self.rng = np.random.default_rng(seed)
        self.up = network(self.rng)
        self.up.cut_until_s = dict.fromkeys(SITES, 0.0)
        self.top = SimulatedHub(top_tree(), self.up)
        self.sites = [SimulatedSite(name, self.rng, self.up, folder) for name in SITES]
        self.lost_until_s = [0.0, 0.0]
        self.machines_out = 0.0
        self.over: list[tuple[int, str, float]] = []
        self.drawn_w: list[float] = []
        self.pending: list[Event] = []
        self.contracts: list[Event] = []

    def close(self) -> None:
        """End all daemons of halls."""
        for site in self.sites:
            for hall in site.halls:
                hall.twin.recorder.close()

    def contract(self, second: int, limit_w: float) -> None:
        """A load target from the grid, received at the top hub."""
        found = LoadTargetSet(id=f"c{second}", author="grid", target="peak", limit_w=limit_w, kind="utility")
        self.contracts = [found]
        self.pending += self.contracts

    def step(self, second: int) -> None:
        """A second of everything."""
        self.up.now_s = float(second)
        for site in self.sites:
            site.step(float(second))
        if second >= self.top.away_until_s:
            events, self.pending = self.pending, []
            lost = [float(until > second) for until in self.lost_until_s]
            self.top.tick(
                {"feeder.energised_state": lost, "loop.machine_out_count": self.machines_out}, *events
            )
        else:
            self.top.twin.now_ns += NS
        self._watch(second)

    def _watch(self, second: int) -> None:
        total_w = sum(site.draw_w for site in self.sites)
        self.drawn_w.append(total_w)
        limits = {"grid": (total_w, TOP_FEEDER_W), "river": (total_w, LOOP_W)}
        limits |= {site.name: (site.draw_w, SITE_FEEDER_W) for site in self.sites}
        for name, (load_w, limit_w) in limits.items():
            if load_w > limit_w + 1.0:
                self.over.append((second, name, load_w))

    def strike(self, second: int) -> None:
        """Faults at all levels."""
        rng = self.rng
        for site in self.sites:
            for hall in site.halls:
                if rng.random() < 0.05:
                    hall.demand_w = float(rng.choice([200e3, HALL_MOST_W, HALL_MOST_W]))
                if rng.random() < 0.005:
                    site.network.cut_until_s[hall.name] = second + rng.uniform(1, 90)
                if hall.dead_since_s is None and rng.random() < 0.003:
                    hall.dying = True
                elif hall.dead_since_s is not None and rng.random() < 0.03:
                    hall.start_again()
            if rng.random() < 0.005:
                self.up.cut_until_s[site.name] = second + rng.uniform(1, 120)
            if second >= site.away_until_s and rng.random() < 0.006:
                site.away_until_s = second + float(rng.uniform(1, 90))
            elif rng.random() < 0.003:
                site.take_over(with_snapshot=True)  # which grant is the newest is in it
        if second >= self.top.away_until_s and rng.random() < 0.006:
            self.top.away_until_s = second + float(rng.uniform(1, 60))
        elif rng.random() < 0.003:
            self.top.take_over()
            self.pending += self.contracts  # as the file of targets tells again
        if max(self.lost_until_s) <= second and rng.random() < 0.01:
            self.lost_until_s[int(rng.integers(2))] = second + float(rng.uniform(5, 60))


def _sum_w(batch: CommandBatch) -> float:
    return float(batch.value.sum())
