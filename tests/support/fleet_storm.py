"""A storm over a fleet in simulated time: real engines and codecs of hub and halls, and a network that loses.

The network loses, doubles, delays and reorders messages; leaves are cut; the hub is killed and restarted, or
another daemon takes over; the daemons of halls are killed, and their caps stay for their lease of 30 s; a
hall lies, an old epoch speaks; feeds are lost. A hall draws what it may: at once when its budget rises, and
`LAG_S` late when it falls.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from connectors.nats import BudgetDecoder, BudgetSink, HallSummary, SummaryDecoder, encode
from policies import BY_NAME
from tests.support.builders import START_NS, Twin
from tests.support.fleets import FEEDER_W, GUARANTEED_W, MOST_W, fleet_tree
from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS, BadMessage
from twin.contracts import CommandBatch, Decision
from twin.telemetry import EpochChanged, Event, Frame, Ignored, Message, Reading

LAG_S, CAP_LEASE_S, CURRENT_S = 2, 30, 10
LONG_CUT_S = 600.0
NAMES = ("hall-a", "hall-b")
CAP_LAPSE_S = 30.0


@dataclass
class Parcel:
    """A message on its way, and when it arrives."""

    at_s: float
    to: str
    subject: str
    payload: bytes


class Network:
    """The way between hub and halls."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.now_s = rng, 0.0
        self.cut_until_s = dict.fromkeys(NAMES, 0.0)
        self._parcels: list[Parcel] = []

    def send(self, to: str, hall: str, subject: str, payload: bytes) -> None:
        """Put a message on its way: some are lost, some come twice, some late."""
        if self.cut_until_s[hall] > self.now_s or self.rng.random() < 0.1:
            return
        for _ in range(1 + (self.rng.random() < 0.1)):
            late_s = self.rng.exponential(0.3) + (self.rng.random() < 0.15) * self.rng.uniform(0, 12)
            self._parcels.append(Parcel(self.now_s + late_s, to, subject, payload))

    def take(self, to: str) -> list[Parcel]:
        """Messages that have arrived by now; reordered as the delays have it."""
        come = sorted((p for p in self._parcels if p.to == to and p.at_s <= self.now_s), key=lambda p: p.at_s)
        self._parcels = [p for p in self._parcels if not (p.to == to and p.at_s <= self.now_s)]
        return come

    async def publish(self, subject: str, payload: bytes, key: str = "") -> None:
        """As the hub's link publishes a grant."""
        hall = subject.split(".")[1]
        self.send(hall, hall, subject, payload)


class FaithfulNetwork(Network):
    """A network that loses nothing, and keeps what it has delivered."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self.kept: list[Parcel] = []

    def send(self, to: str, hall: str, subject: str, payload: bytes) -> None:
        """Deliver within the next second."""
        self.kept.append(Parcel(self.now_s + 0.5, to, subject, payload))
        self._parcels.append(self.kept[-1])

    def withhold(self, parcel: Parcel) -> None:
        """Let it wait on its way."""
        self._parcels.remove(parcel)

    def release(self, parcel: Parcel) -> None:
        """Deliver it with what comes next."""
        self._parcels.append(parcel)


class Recorded:
    """The frames that a twin takes, and the proof that they give its decisions again, byte for byte."""

    def __init__(self, twin: Twin) -> None:
        self.twin, self.frames = twin, list[Frame]()
        self._take, self._bodies = twin.inbox.take, list[bytes]()
        vars(twin.inbox)["take"] = self._kept

    def _kept(self, *given: Any) -> Frame:
        if self.frames:
            self._bodies.append(encoded(self.twin.decision))
        self.frames.append(self._take(*given))
        return self.frames[-1]

    def replays(self, again: Twin) -> bool:
        """True if a fresh engine, given these frames, decides the same and ends in the same state."""
        bodies = [encoded(again.engine.tick(frame)) for frame in self.frames]
        same = [*self._bodies, encoded(self.twin.decision)] == bodies
        return same and again.engine.checksum() == self.twin.engine.checksum()


def encoded(decision: Decision) -> bytes:
    """The journal of a decision."""
    return msgspec.json.encode(bodies_of(decision))


class StormHall:
    """The daemon of a hall, and what the hall draws."""

    def __init__(self, name: str, guaranteed_w: float, skew_s: float) -> None:
        feeder = {"name": "main", "external": True, "guaranteed_w": guaranteed_w, "serves": ["r"]}
        tree = {"site": name, "halls": [{"name": "h", "racks": [{"name": "r"}], "feeders": [feeder]}]}
        self.name, self.guaranteed_w, self.skew_ns = name, guaranteed_w, round(skew_s * NS)
        self.tree = tree
        self.twin, self.decoder = Twin(tree), BudgetDecoder(name, "main")
        self.recorded = Recorded(self.twin)
        self.twin.now_ns += self.skew_ns
        self.demand_w = guaranteed_w
        self.dead_since_s: float | None = None
        self.epoch, self.sequence, self.refused = 100, 0, 0
        self.cap_w = guaranteed_w
        self._caps_w = [guaranteed_w] * LAG_S

    def step(self, now_s: float, network: Network) -> None:
        """A second of it."""
        come = network.take(self.name)
        if self.dead_since_s is not None:
            self.twin.now_ns += NS
            if now_s - self.dead_since_s >= CAP_LAPSE_S:
                self._cap(self.guaranteed_w)
            return
        events: list[Event] = []
        for parcel in come:
            message = Message(self.twin.now_ns + NS, parcel.subject, parcel.payload)
            try:
                items = self.decoder.decode(message)
            except BadMessage:
                self.refused += 1
                continue
            if not isinstance(items, Ignored):
                events += items  # type: ignore[arg-type]
        self.twin.tick(None, *events)
        engine = self.twin.engine
        self._cap(float(engine.intake.budget_w(self.twin.site, self.twin.now_ns)[0]))
        self.sequence += 1
        told = HallSummary(
            hall=self.name, epoch=self.epoch, sequence=self.sequence, t_ns=self.twin.now_ns,
            power_w=self.draw_w, demand_w=self.demand_w, budget_w=self._caps_w[-1],
            guaranteed_w=self.guaranteed_w, granted_ns=int(engine.intake.grant_order[0, 1]),
        )  # fmt: skip
        network.send("hub", self.name, f"cpc.{self.name}.v1.summary", encode(told))
        if network.rng.random() < 0.05:  # ten times what it draws, or the daemon before
            lie = {"power_w": 10 * MOST_W} if network.rng.random() < 0.5 else {"epoch": 99}
            false = msgspec.structs.replace(told, sequence=told.sequence + 1000, **lie)
            network.send("hub", self.name, f"cpc.{self.name}.v1.summary", encode(false))

    def _cap(self, budget_w: float) -> None:
        self._caps_w = [*self._caps_w[1:], budget_w]
        self.cap_w = max(self._caps_w)

    @property
    def draw_w(self) -> float:
        """The power of the hall."""
        return min(self.demand_w, self.cap_w)


@dataclass
class Storm:
    """A storm; `over_s`: the longest time that each feeder was above its budget, `lent_w`: most lent,
    `stale_s`: the oldest summary that the hub had of a hall, `CURRENT_S` after the last fault of both.
    """

    seed: int
    failover: bool = True
    over_s: dict[str, int] = field(default_factory=lambda: {"fa": 0, "fb": 0})
    lent_w: float = 0.0
    stale_s: float = 0.0
    refused: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.network = Network(self.rng)
        self.halls = [
            StormHall(name, least_w, self.rng.uniform(-1.5, 1.5))
            for name, least_w in zip(NAMES, GUARANTEED_W, strict=True)
        ]
        self.epoch, self.hub_away_until_s = 1, 0.0
        self.lost_until_s = [0.0, 0.0]
        self._run_s = [0, 0]
        self._well_s = dict.fromkeys(NAMES, 0)
        self._begin_hub()

    def _begin_hub(self, now_ns: int = START_NS) -> None:
        policy = BY_NAME["hall_budgets"](failover=self.failover)
        self.hub = Twin(fleet_tree(), [policy], act=True)
        self.hub.now_ns = now_ns
        self.decoder = SummaryDecoder(self.hub.site)
        self.sink = BudgetSink(self.hub.site, self.network)  # type: ignore[arg-type]

    def run(self, seconds: int) -> Storm:
        """So many seconds of it."""
        for second in range(seconds):
            self.network.now_s = float(second)
            self._strike(second)
            self.step(second)
        return self

    def step(self, second: int) -> None:
        """A second of halls and hub."""
        self.network.now_s = float(second)
        for hall in self.halls:
            hall.step(second, self.network)
        if second >= self.hub_away_until_s:
            self._tick_hub(second)
        else:
            self.hub.now_ns += NS
        self._watch(second)

    def _strike(self, second: int) -> None:
        rng = self.rng
        for hall in self.halls:
            if rng.random() < 0.05:
                hall.demand_w = float(rng.uniform(200e3, MOST_W))
            if rng.random() < 0.005:
                self._note("cut")
                is_long = rng.random() < 0.1
                self.network.cut_until_s[hall.name] = second + (LONG_CUT_S if is_long else rng.uniform(1, 90))
            if hall.dead_since_s is None and rng.random() < 0.004:
                self._note("hall killed")
                hall.dead_since_s = float(second)
            elif hall.dead_since_s is not None and rng.random() < 0.03:
                hall.dead_since_s, hall.epoch, hall.sequence = None, hall.epoch + 1, 0
        if second >= self.hub_away_until_s and rng.random() < 0.008:
            self._note("hub killed")
            self.hub_away_until_s = second + float(rng.uniform(1, 60))
        elif rng.random() < 0.004:
            self._note("takeover")
            self.epoch += 1
            self._begin_hub(self.hub.now_ns)
            self._well_s = dict.fromkeys(NAMES, 0)
            self.hub.inbox.put_event(EpochChanged(epoch=self.epoch, adopt=True))
        if max(self.lost_until_s) <= second and rng.random() < 0.01:
            self._note("feed lost")
            self.lost_until_s[int(rng.integers(2))] = second + float(rng.uniform(5, 90))

    def _note(self, what: str) -> None:
        self.faults[what] = self.faults.get(what, 0) + 1

    def _tick_hub(self, second: int) -> None:
        now_ns = self.hub.now_ns + NS
        for parcel in self.network.take("hub"):
            try:
                items = self.decoder.decode(Message(now_ns, parcel.subject, parcel.payload))
            except BadMessage:
                self.refused += 1
                continue
            for item in () if isinstance(items, Ignored) else items:
                assert isinstance(item, Reading)
                self.hub.inbox.put(item, now_ns)
        lost = [float(until > second) for until in self.lost_until_s]
        commands = self.hub.tick({"feeder.energised_state": lost}).commands
        finished(self.sink.apply(commands))
        self.lent_w = max(self.lent_w, *(_most_w(c) for c in commands), 0.0)

    def _watch(self, second: int) -> None:
        alive = [until <= second for until in self.lost_until_s]
        # With failover each feed has to be able to carry all at any moment
        both = 1.0 if self.failover else 0.5
        share = [0.0 if not me else 1.0 if not other else both
                 for me, other in (alive, alive[::-1])]  # fmt: skip
        age_s = self.hub.engine.view().age_s("rack.hall_power_w")
        for i, hall in enumerate(self.halls):
            cut = self.network.cut_until_s[hall.name] > second or second < self.hub_away_until_s
            is_well = not cut and hall.dead_since_s is None
            self._well_s[hall.name] = self._well_s[hall.name] + 1 if is_well else 0
            if self._well_s[hall.name] > CURRENT_S:
                self.stale_s = max(self.stale_s, float(np.nan_to_num(age_s[i], nan=np.inf)))
        load_w = sum(hall.draw_w for hall in self.halls)
        for k, name in enumerate(self.over_s):
            is_over = share[k] * load_w > FEEDER_W + 1.0
            self._run_s[k] = self._run_s[k] + 1 if is_over else 0
            self.over_s[name] = max(self.over_s[name], self._run_s[k])


def _most_w(batch: CommandBatch) -> float:
    return float(batch.value.max(initial=0.0))


def finished(work: Coroutine[Any, Any, None]) -> None:
    """Run what never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


def main() -> None:
    """So many storms of ten minutes: `python -m tests.support.fleet_storm 50`."""
    for seed in range(1, int(sys.argv[1]) + 1):
        storm = Storm(seed).run(600)
        same = all(hall.recorded.replays(Twin(hall.tree)) for hall in storm.halls)
        print(f"{seed}: over {storm.over_s} s, stale {storm.stale_s:.1f} s, replay {same}, {storm.faults}")


if __name__ == "__main__":
    main()
