"""A storm over a fleet in simulated time: real engines, codecs and run folders of hub and halls.


Their network loses, doubles, delays and reorders messages. Daemons of halls and of the hub are killed in the
midst of a tick and start again from their files; the caps of a hall stay for their lease of 30 s. Leaves are
killed with all that is on its way through them, and some stay away for ten minutes. Another daemon takes over
the hub while the one before still speaks; a hall lies, an old epoch speaks; feeds are lost. A hall draws what
it may: at once when its budget rises, and `LAG_S` late when it falls.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from connectors.nats import BudgetDecoder, BudgetSink, HallSummary, SummaryDecoder, encode
from policies import BY_NAME
from tests.support.builders import START_NS, Twin
from tests.support.fleets import FEEDER_W, GUARANTEED_W, MOST_W, fleet_tree
from tests.support.recorded_twin import RecordedTwin
from twin.catalogue import NS, BadMessage
from twin.contracts import CommandBatch, HallHead, HallHeadsRecord
from twin.run import OPEN, journal_lines, line_hash
from twin.telemetry import BudgetGranted, Event, Ignored, Message, Reading

LAG_S, CAP_LEASE_S, CURRENT_S = 2, 30, 10
LONG_CUT_S, MOST_AWAY_S = 600.0, 70.0
ANCHOR_EVERY_S = 60
# From the last grant of a leader that lost its lease to the first of the next one, and how long the former
# goes on speaking in its epoch, as one that was paused does
TAKEOVER_S, ZOMBIE_S = 6.0, 20.0
TAKEOVER_SHARE = 0.3  # of kills of the hub in which another daemon goes on
KINDS = ("hall killed", "hub killed", "leaf killed")
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

    def cut(self, hall: str, until_s: float) -> None:
        """The leaf of a hall is killed, and all that is on its way through it is lost."""
        self.cut_until_s[hall] = until_s
        self._parcels = [p for p in self._parcels if p.subject.split(".")[1] != hall]

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


class Wire:
    """The link of a daemon of the hub: it notes under whose epoch who grants."""

    def __init__(self, network: Network, author: str, authors: dict[int, set[str]]) -> None:
        self.network, self._author, self._authors = network, author, authors

    async def publish(self, subject: str, payload: bytes, key: str = "") -> None:
        """As the hub's link publishes a grant."""
        epoch = int(msgspec.json.decode(payload)["epoch"])
        self._authors.setdefault(epoch, set()).add(self._author)
        await self.network.publish(subject, payload, key)


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


class StormHall:
    """The daemon of a hall, and what the hall draws."""

    def __init__(self, name: str, guaranteed_w: float, skew_s: float, folder: Path) -> None:
        feeder = {"name": "main", "external": True, "guaranteed_w": guaranteed_w, "serves": ["r"]}
        tree = {"site": name, "halls": [{"name": "h", "racks": [{"name": "r"}], "feeders": [feeder]}]}
        self.name, self.guaranteed_w, self.skew_ns = name, guaranteed_w, round(skew_s * NS)
        self.epoch, self.sequence, self.refused = 100, 0, 0
        self.twin, self.decoder = RecordedTwin(folder, tree, epoch=self.epoch), BudgetDecoder(name, "main")
        self.twin.now_ns += self.skew_ns
        self.demand_w = guaranteed_w
        self.dead_since_s: float | None = None
        self.dying = False
        self.cap_w = guaranteed_w
        self._caps_w = [guaranteed_w] * LAG_S

    def start_again(self) -> None:
        """Go on after a kill, as the next leader of this hall."""
        self.dead_since_s, self.epoch, self.sequence = None, self.epoch + 1, 0
        self.twin.start_again(self.epoch)

    def step(self, now_s: float, network: Network) -> None:
        """A second of it."""
        come = network.take(self.name)
        if self.dead_since_s is not None:
            self.twin.now_ns += NS
            if now_s - self.dead_since_s >= CAP_LAPSE_S:
                self._cap(self.guaranteed_w)
            return
        events = self._events(come)
        if self.dying:
            self.dying, self.dead_since_s = False, now_s
            self.twin.die(network.rng, *events)
            return
        self.twin.tick(None, *events)
        engine = self.twin.engine
        self._cap(float(engine.intake.budget_w(self.twin.site, self.twin.now_ns)[0]))
        self.sequence += 1
        lines, head = self.twin.acknowledge()
        told = HallSummary(
            hall=self.name, epoch=self.epoch, sequence=self.sequence, t_ns=self.twin.now_ns,
            power_w=self.draw_w, demand_w=self.demand_w, budget_w=self._caps_w[-1],
            guaranteed_w=self.guaranteed_w, granted_ns=int(engine.intake.grant_order[0, 1]),
            run=self.name, lines=lines, head=head,
        )  # fmt: skip
        network.send("hub", self.name, f"cpc.{self.name}.v1.summary", encode(told))
        if network.rng.random() < 0.05:  # ten times what it draws, or the daemon before
            lie = {"power_w": 10 * MOST_W} if network.rng.random() < 0.5 else {"epoch": 99}
            false = msgspec.structs.replace(told, sequence=told.sequence + 1000, **lie)
            network.send("hub", self.name, f"cpc.{self.name}.v1.summary", encode(false))

    def _events(self, come: list[Parcel]) -> list[Event]:
        events: list[Event] = []
        for parcel in come:
            try:
                items = self.decoder.decode(Message(self.twin.now_ns + NS, parcel.subject, parcel.payload))
            except BadMessage:
                self.refused += 1
                continue
            for item in () if isinstance(items, Ignored) else items:
                assert isinstance(item, BudgetGranted)
                events.append(item)
        return events

    def _cap(self, budget_w: float) -> None:
        self._caps_w = [*self._caps_w[1:], budget_w]
        self.cap_w = max(self._caps_w)

    @property
    def draw_w(self) -> float:
        """The power of the hall."""
        return min(self.demand_w, self.cap_w)


def take_summaries(twin: Twin, decoder: SummaryDecoder, parcels: Iterable[Parcel]) -> int:
    """Put summaries of halls into the inbox of a hub; the number of those that it refuses."""
    now_ns, refused = twin.now_ns + NS, 0
    for parcel in parcels:
        try:
            items = decoder.decode(Message(now_ns, parcel.subject, parcel.payload))
        except BadMessage:
            refused += 1
            continue
        for item in () if isinstance(items, Ignored) else items:
            assert isinstance(item, Reading)
            twin.inbox.put(item, now_ns)
    return refused


class StormHub:
    """A daemon of the hub: its engine with its run folder, and both ends of its wire."""

    def __init__(self, folder: Path, policy: Any, epoch: int, storm: Storm) -> None:
        self.twin = RecordedTwin(folder, fleet_tree(), [policy], epoch)
        self.decoder = SummaryDecoder(self.twin.site)
        self.wire = Wire(storm.network, folder.name, storm.authors)
        self.sink = BudgetSink(self.twin.site, self.wire)  # type: ignore[arg-type]
        self.refused = 0

    def hear(self, parcels: list[Parcel]) -> None:
        """Take in summaries."""
        self.refused += take_summaries(self.twin, self.decoder, parcels)

    def tick(self, second: int, energised: list[float]) -> float:
        """A second of it; the most that it grants to a hall, W."""
        commands = self.twin.tick({"feeder.energised_state": energised}).commands
        if second % ANCHOR_EVERY_S == 0 and self.decoder.newest:
            heads = {
                hall: HallHead(told.run, told.lines, told.head, told.epoch, told.sequence)
                for hall, told in self.decoder.newest.items()
            }
            self.twin.recorder.note(HallHeadsRecord(heads=heads), sync=True)
        self.twin.acknowledge()
        finished(self.sink.apply(commands))
        return max((_most_w(c) for c in commands), default=0.0)

    def anchored(self) -> list[tuple[str, int, str]]:
        """(hall, lines, head) of all that the journal holds of halls, read back."""
        found = []
        for line in journal_lines(self.twin.folder / OPEN):
            entry = msgspec.json.decode(line)
            if entry["kind"] == "hall_heads":
                found += [(hall, h["lines"], h["head"]) for hall, h in entry["body"]["heads"].items()]
        return found


@dataclass
class Storm:
    """A storm whose runs are kept in `folder`.

    `over_s`: the longest time that each feeder was above its budget; `lent_w`: most lent; `stale_s`: the
    oldest summary that the hub had of a hall, `CURRENT_S` after the last fault of both. `kills`: of each of
    `KINDS`, spread over the run; `authors`: who granted in each epoch.
    """

    seed: int
    folder: Path
    kills: int = 0
    failover: bool = True
    over_s: dict[str, int] = field(default_factory=lambda: {"fa": 0, "fb": 0})
    lent_w: float = 0.0
    stale_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    authors: dict[int, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.network = Network(self.rng)
        self.halls = [
            StormHall(name, least_w, self.rng.uniform(-1.5, 1.5), self.folder / name)
            for name, least_w in zip(NAMES, GUARANTEED_W, strict=True)
        ]
        self.epoch, self.hub_dead = 0, False
        self.hub_away_until_s, self.takes_over = 0.0, False
        self.lost_until_s = [0.0, 0.0]
        self.hubs: list[StormHub] = []
        self.zombie, self.zombie_until_s = 0, 0.0
        self.back_s = dict.fromkeys(NAMES, 0.0)  # when each hall that was killed starts again
        self._due_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._run_s = [0, 0]
        self._well_s = dict.fromkeys(NAMES, 0)
        self._begin_hub(START_NS)

    @property
    def hub(self) -> StormHub:
        """The daemon that leads, or led last."""
        return self.hubs[-1]

    def won(self) -> int:
        """The epoch of a daemon that begins to lead the hub."""
        self.epoch += 1
        return self.epoch

    def _begin_hub(self, now_ns: int) -> None:
        policy = BY_NAME["hall_budgets"](failover=self.failover)
        folder = self.folder / f"hub-{len(self.hubs)}"
        self.hubs.append(StormHub(folder, policy, self.won(), self))
        self.hub.twin.now_ns = now_ns

    def run(self, seconds: int) -> Storm:
        """So many seconds of it."""
        for kind in KINDS:
            self._due_s[kind] = sorted(self.rng.uniform(20.0, 0.9 * seconds, self.kills).tolist())
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
        energised = [float(until > second) for until in self.lost_until_s]
        is_away, goes_on = second < self.hub_away_until_s, second < self.zombie_until_s
        come = self.network.take("hub") if goes_on or not is_away else []
        if goes_on:
            former = self.hubs[self.zombie]
            former.hear(come)
            former.tick(second, energised)
        if is_away:
            if not goes_on or former is not self.hub:
                self.hub.twin.now_ns += NS
        elif self.hub_dead:
            self.hub_dead = False
            self.hub.hear(come)
            self.hub.twin.die(self.rng)
            self.hub_away_until_s = second + self._away_s()
            self.takes_over = False
        else:
            self.hub.hear(come)
            self.lent_w = max(self.lent_w, self.hub.tick(second, energised))
        self._watch(second)

    def _away_s(self) -> float:
        long = self.rng.random() < 0.15
        return float(self.rng.uniform(20.0, MOST_AWAY_S) if long else self.rng.uniform(1.0, 12.0))

    def _strike(self, second: int) -> None:
        rng = self.rng
        for hall in self.halls:
            if rng.random() < 0.05:
                hall.demand_w = float(rng.uniform(200e3, MOST_W))
            if hall.dead_since_s is not None and second >= self.back_s[hall.name]:
                hall.start_again()
        self._strike_hub(second)
        hall = self.halls[int(rng.integers(len(self.halls)))]
        if hall.dead_since_s is None and self._is_due("hall killed", second):
            hall.dying, self.back_s[hall.name] = True, second + 1.0 + self._away_s()
        cuts = self.network.cut_until_s
        if cuts[hall.name] <= second and self._is_due("leaf killed", second):
            is_long = self.faults["leaf killed"] % 25 == 7
            self._note("cut of ten minutes", int(is_long))
            self.network.cut(hall.name, second + (LONG_CUT_S if is_long else self._away_s()))
        if max(self.lost_until_s) <= second and rng.random() < 0.01:
            self._note("feed lost")
            self.lost_until_s[int(rng.integers(2))] = second + float(rng.uniform(5, 90))

    def _strike_hub(self, second: int) -> None:
        """The hub is killed, and is started again or another daemon takes over; or one does from a leader
        that lives on and knows nothing of it."""
        if self.hub_away_until_s and second >= self.hub_away_until_s:
            self.hub_away_until_s = 0.0
            self._well_s = dict.fromkeys(NAMES, 0)
            if self.takes_over:
                self._begin_hub(self.hub.twin.now_ns)
            else:
                self.hub.twin.start_again(self.won())
            return
        if self.hub_away_until_s or second < self.zombie_until_s:
            return
        if self._is_due("hub killed", second):
            self.takes_over = bool(self.rng.random() < TAKEOVER_SHARE)
            if self.takes_over:
                self._note("takeover")
                self.hub_away_until_s = second + TAKEOVER_S
                self.zombie, self.zombie_until_s = len(self.hubs) - 1, second + self.rng.uniform(1, ZOMBIE_S)
            else:
                self.hub_dead = True

    def _is_due(self, kind: str, second: int) -> bool:
        if not self._due_s[kind] or self._due_s[kind][0] > second:
            return False
        self._due_s[kind].pop(0)
        self._note(kind)
        return True

    def _note(self, what: str, count: int = 1) -> None:
        self.faults[what] = self.faults.get(what, 0) + count

    def _watch(self, second: int) -> None:
        alive = [until <= second for until in self.lost_until_s]
        # With failover each feed has to be able to carry all at any moment
        both = 1.0 if self.failover else 0.5
        share = [0.0 if not me else 1.0 if not other else both
                 for me, other in (alive, alive[::-1])]  # fmt: skip
        age_s = self.hub.twin.engine.view().age_s("rack.hall_power_w")
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

    def close(self) -> None:
        """End all daemons."""
        for one in (*self.halls, *self.hubs):
            one.twin.recorder.close()

    @property
    def refused(self) -> int:
        """Messages that the hub refused."""
        return sum(hub.refused for hub in self.hubs)

    def damage(self) -> list[str]:
        """All that breaks a promise but the load: records that were acknowledged and are gone, epochs of two
        leaders, runs that a replay decides otherwise."""
        for one in (*self.halls, *self.hubs):
            if one.twin.recorder.journal is None:  # it is dead, or never came back
                one.twin.start_again(self.won())
        out = [f"epoch {e}: granted by {sorted(a)}" for e, a in self.authors.items() if len(a) > 1]
        for one in (*self.halls, *self.hubs):
            name = one.twin.folder.name
            out += [f"{name}: the first {lines} lines, acknowledged, are gone" for lines in one.twin.lost()]
            if fault := one.twin.replay_fault():
                out.append(f"{name}: replayed: {fault}")
        heads = {
            hall.name: [line_hash(line) for line in journal_lines(hall.twin.folder / OPEN)]
            for hall in self.halls
        }
        for hub in self.hubs:
            for hall, lines, head in hub.anchored():
                if lines > len(heads[hall]) or heads[hall][lines - 1] != head:
                    out.append(f"{hall}: {lines} lines that {hub.twin.folder.name} anchored are gone")
        return out


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
    """So many storms of half an hour: `python -m tests.support.fleet_storm 50`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seeds", type=int)
    parser.add_argument("--from", dest="first", type=int, default=1, help="the first seed")
    parser.add_argument("--seconds", type=int, default=1800, help="simulated")
    parser.add_argument("--kills", type=int, default=50, help="of halls, of the hub and of leaves, each")
    args = parser.parse_args()
    for seed in range(args.first, args.first + args.seeds):
        with tempfile.TemporaryDirectory() as kept:
            storm = Storm(seed, Path(kept), args.kills).run(args.seconds)
            found = storm.damage()
            storm.close()
        print(f"{seed}: over {storm.over_s} s, stale {storm.stale_s:.1f} s, {len(found)} broken {found[:3]}, "
              f"{len(storm.authors)} epochs, {storm.faults}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
