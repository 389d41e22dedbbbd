"""A simulated day of a fleet, with its hub and without: the work that is done, and what the feed carries.

`python -m tests.support.fleet_day` lets two halls of 144 nodes (576 GPUs, 806 kW at full) live through the
same day twice, in closed loops: drawn jobs, GPUs that follow caps late, meters that are late, the engines
with power_guard and power_cap, the codecs of summaries and budgets. In one arm the hub lends; in the other it
is away, and both have their guaranteed shares. Time is compressed: engines are asked in steps of `STEPS_S`
from the beginning of each minute, at which loads change; plants go by seconds. So grants last for a minute.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import msgspec
import numpy as np

from connectors.nats import BudgetDecoder, BudgetSink, HallSummary, SummaryDecoder, encode, summary_subject
from policies import BY_NAME
from tests.evaluation.power.arms import START_NS, Ours, jobs_told
from tests.evaluation.power.demand import draw
from tests.evaluation.power.plant import MINUTE_S, Plant
from tests.evaluation.power.site import PROFILE, site_of_nodes
from tests.evaluation.power.week import Watch
from tests.support.builders import Twin
from tests.support.fleet_storm import FaithfulNetwork, finished
from twin.catalogue import F64, NS
from twin.site import HALL_BUDGET
from twin.telemetry import BudgetGranted, Event, Message, Reading
from twin.wiring.fleet import summary_of

NAMES, STEPS_S = ("hall-a", "hall-b"), (5, 15, 40)
SHARED_W, MOST_W, SHARE_PU = 1.2e6, 806e3, 0.45  # the last: of the first, guaranteed to each hall
# Share of GPUs that run, by hour of the day: the halls peak six hours apart. source: estimate
MEAN_PU, SWING_PU = 0.78, 0.17
PLENTY_W = 1e9  # that the plant of a hall puts on its own feeder: what limits it is the shared one
DUE_S = 2  # that a lease of the hub has left at each of its ticks


class Figures(NamedTuple):
    """Of an arm: work of all and of its free course in GPU-seconds, seconds above the shared budget with one
    feed carrying all, the longest spell of them, the most carried (as a share), trips."""

    work: float
    free: float
    over_s: int
    longest_s: int
    worst_pu: float
    trips: int

    @property
    def lost_pu(self) -> float:
        """Share of the work that caps cost."""
        return 1.0 - self.work / self.free


class DayHall:
    """A hall: its plant, its engine and its end of the wire."""

    def __init__(self, name: str, seed: int, hours: int, shared_w: float) -> None:
        feeder = {"name": "main", "external": True, "guaranteed_w": SHARE_PU * shared_w, "serves": ["r[1-8]"]}
        hall = {"name": "h", "racks": [{"name": "r[1-8]", "profile": PROFILE}], "feeders": [feeder]}
        site = site_of_nodes(name, {"site": name, "halls": [hall]})
        self.name = name
        self.site = site._replace(budget_w=np.array([PLENTY_W]))
        phase = 6.0 * NAMES.index(name)
        clock = np.arange(14 * 24)
        running_pu: F64 = MEAN_PU + SWING_PU * np.sin((clock - phase) * np.pi / 12.0)
        self.demand = draw(self.site, running_pu, seed, hours)
        self.arm, self.plant = Ours(self.site), Plant(self.site, self.demand)
        self.feeder = self.site.site.names["feeder"][0]
        self.decoder, self.sequence = BudgetDecoder(name, self.feeder), 0

    def step(self, dt_s: int, events: list[Event], granted: list[Message]) -> Message:
        """Go on; the summary of it."""
        self.plant.step(dt_s)
        now_ns = START_NS + (self.plant.time_s + 1) * NS
        for message in granted:
            for item in self.decoder.decode(message):
                assert isinstance(item, BudgetGranted)
                events.append(msgspec.structs.replace(item, expires_ns=now_ns + MINUTE_S * NS))
        caps = self.arm.decide(self.plant.read(), self.plant.time_s, dt_s, events)
        if caps is not None:
            self.plant.command(caps)
        self.sequence += 1
        blank = HallSummary(hall=self.name, epoch=1, sequence=self.sequence, t_ns=now_ns)
        told = summary_of(self.arm.engine, self.feeder, blank)
        return Message(now_ns, summary_subject(self.name), encode(told))


class DayHub:
    """The hub: its engine, and the grants of its last tick."""

    def __init__(self, shared_w: float) -> None:
        racks: list[dict[str, Any]] = [
            {"name": name, "guaranteed_w": SHARE_PU * shared_w, "max_w": MOST_W} for name in NAMES
        ]
        feeders = [
            {"name": f"f{side}", "side": side, "budget_w": shared_w, "serves": list(NAMES)} for side in "AB"
        ]
        tree = {"site": "fleet", "halls": [{"name": "campus", "racks": racks, "feeders": feeders}]}
        self.twin = Twin(tree, [BY_NAME["hall_budgets"]()], act=True)
        self.twin.now_ns = START_NS + NS
        self.network = FaithfulNetwork(np.random.default_rng(1))
        self.decoder = SummaryDecoder(self.twin.site)
        self.sink = BudgetSink(self.twin.site, self.network)  # type: ignore[arg-type]

    def tick(self, dt_s: int, summaries: list[Message]) -> dict[str, list[Message]]:
        """Grants by hall."""
        now_ns = self.twin.now_ns + dt_s * NS
        for message in summaries:
            for item in self.decoder.decode(message):
                assert isinstance(item, Reading)
                self.twin.inbox.put(item, now_ns)
        lease = self.twin.engine.arbiter.leases[HALL_BUDGET]
        running = lease.running()
        lease.expires_ns[running] = now_ns + DUE_S * NS  # time is compressed: it is due for renewal
        finished(self.sink.apply(self.twin.tick(None, dt_s=dt_s).commands))
        self.network.now_s += 1.0
        return {
            name: [Message(now_ns, p.subject, p.payload) for p in self.network.take(name)] for name in NAMES
        }


def live_day(with_hub: bool, hours: int = 24, seed: int = 1, shared_w: float = SHARED_W) -> Figures:
    """The day of an arm."""
    halls, hub = [DayHall(name, seed + i, hours, shared_w) for i, name in enumerate(NAMES)], DayHub(shared_w)
    watch = Watch(np.array([shared_w]))
    grants: dict[str, list[Message]] = {name: [] for name in NAMES}
    for minute in range(hours * 60):
        for k, dt_s in enumerate(STEPS_S):
            told = []
            for hall in halls:
                events = jobs_told(hall.site, hall.demand, minute) if k == 0 else []
                told.append(hall.step(dt_s, events, grants[hall.name] if with_hub else []))
            series = sum(hall.plant.rack_series[:, -dt_s:].sum(axis=0) for hall in halls)
            watch.look(np.atleast_2d(series), minute * MINUTE_S)
            grants = hub.tick(dt_s, told)
    return Figures(
        float(sum(hall.plant.work.sum() for hall in halls)),
        float(sum(hall.plant.free_work.sum() for hall in halls)),
        watch.over_s,
        watch.longest_s,
        1.0 + watch.worst_pu,
        sum(hall.plant.trips for hall in halls),
    )


def main() -> None:
    """Both arms of a day."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shared-w", type=float, default=SHARED_W)
    args = parser.parse_args()
    arms = {}
    for with_hub in (True, False):
        arms[with_hub] = live_day(with_hub, args.hours, args.seed, args.shared_w)
        print(f"{'with the hub' if with_hub else 'hub away'}: {arms[with_hub]}", flush=True)
    print(f"work lost to caps: {arms[True].lost_pu:.2%} with, {arms[False].lost_pu:.2%} without the hub; "
          f"without it {1.0 - arms[False].work / arms[True].work:.2%} less work")  # fmt: skip


if __name__ == "__main__":
    main()
