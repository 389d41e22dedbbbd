"""Replacement in a seeded storm: restarts, outages, lost and late words, two daemons, people who drain nodes.

What is checked is the scheduler's truth, not what a daemon says of itself: no node is withdrawn twice for
one cause, none is forgotten in drain, no more are out than may be, and what people drained is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from connectors.slurm import sink
from connectors.slurm.nodes import SlurmNode
from policies.node_replacement import PHASES
from policies.node_replacement.phases import CORDONED, RMA
from tests.support.simulated_scheduler import NODES, OURS, SINCE, SITE, TESTED, Clock, Daemon, Scheduler
from twin.catalogue import NS, ConnectorError
from twin.telemetry import events as ev

GRAVE = (79, 79, 48, 95, 119, 64)  # XIDs after which a GPU wants a reset, a restart or people
STEP_S = 20.0
THEIRS, DOWN = "fan broke", "Not responding"


@dataclass
class Trial:
    """The site's test of a node: `end_ns` 0 says that it never answers."""

    began_ns: int
    end_ns: int
    passed: bool | None


@dataclass
class Truth:
    """True state of nodes and jobs, whether or not a daemon knows of it."""

    bad: set[int] = field(default_factory=set)
    mended_ns: dict[int, int] = field(default_factory=dict)  # nodes under repair: until when
    tests: dict[int, Trial] = field(default_factory=dict)
    tested_ns: dict[int, int] = field(default_factory=dict)  # the begin of the last test with a result
    saves: dict[str, int] = field(default_factory=dict)  # jobs that save: since when
    saved_ns: dict[str, int] = field(default_factory=dict)


class Storm:
    """Draws what happens from one generator."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.rng, self.clock = np.random.default_rng(seed), clock
        self.scheduler, self.truth = Scheduler(clock), Truth()
        self.scheduler.rng = self.rng
        self.daemons = [Daemon(name, self.scheduler, self.rng) for name in ("a", "b")]
        self.epoch, self.count = 0, 0
        self.down: dict[str, int] = {}  # daemons that are down: for so many ticks
        self.deposed: dict[str, int] = {}  # and that do not know yet that they are
        self.lag: list[tuple[int, Daemon, dict[str, SlurmNode], dict[str, list[int]], int]] = []
        self.outage, self.calm = 0, False
        self.queue: list[tuple[int, Daemon, ev.Event]] = []
        self.returned: dict[str, int] = {}
        self.told = dict.fromkeys(("restarts", "lost", "takeovers", "outages", "faults", "tests"), 0)
        self.lead(self.daemons[0], adopt=False)

    def chance(self, pu: float) -> bool:
        """Draw an event of this probability per tick; False once the storm is calm."""
        return not self.calm and bool(self.rng.random() < pu)

    def lead(self, daemon: Daemon, adopt: bool) -> None:
        """A new term."""
        self.epoch += 1
        daemon.term_ns = self.clock.now_ns
        before, self.scheduler.leader = self.scheduler.leader, daemon
        if before is not None and before is not daemon:
            self.deposed[before.name] = int(self.rng.integers(3, 20))
        self.deposed.pop(daemon.name, None)
        returned = self.returned if adopt else {}
        daemon.tell(ev.EpochChanged(epoch=self.epoch, adopt=adopt, returned=returned), self._authority("act"))

    @staticmethod
    def _authority(level: str) -> ev.Event:
        return ev.AuthorityChanged(author="a term", policy="replacement", authority=level)  # type: ignore[arg-type]

    def publish(self, event: ev.Event) -> None:
        """To each daemon that is up: some late, some twice, so that their order changes."""
        for daemon in self.daemons:
            for _ in range(int(self.rng.choice([1, 1, 1, 2, 3]))):
                self.queue.append((int(self.rng.choice([0, 0, 0, 1, 3, 8])), daemon, event))

    def tick(self, dt_s: float) -> None:
        """Advance the truth by one tick, then the daemons."""
        self.clock.now_ns += round(dt_s * NS)
        self._work()
        self._break()
        self._people()
        self._repairs()
        self._tests()
        self._daemons()
        self._listings()
        for daemon in self.daemons:
            if daemon.name in self.down:
                continue
            daemon.tick(dt_s)
            self._obey(daemon)
            if self.scheduler.leader is daemon:  # what it hands over
                self.returned = daemon.engine.health.book.returned()

    def _obey(self, daemon: Daemon) -> None:
        """Tests and saves that the leader asks for."""
        now_ns = self.clock.now_ns
        for batch in daemon.orders:
            for i, value in zip(batch.index.tolist(), batch.value.tolist(), strict=True):
                if batch.control == SINCE:
                    job = daemon.engine.jobs.names[i]
                    if job in self.scheduler.jobs:
                        self.truth.saves.setdefault(job, now_ns)
                elif batch.control == TESTED:
                    out = self.scheduler.drains[i] and self.scheduler.job_on(i) is None
                    if out and i not in self.truth.tests and self.truth.tested_ns.get(i, 0) < value * NS:
                        self._test(i, now_ns)

    def _test(self, node: int, now_ns: int) -> None:
        """A test begins. It resets what a reset can mend."""
        if node in self.truth.bad and self.rng.random() < 0.6:
            self.truth.bad.discard(node)
        passed = None if self.chance(0.15) else node not in self.truth.bad
        end_ns = 0 if self.chance(0.1) else now_ns + int(self.rng.integers(20, 300)) * NS
        self.truth.tests[node] = Trial(now_ns, end_ns, passed)
        self.told["tests"] += 1

    def _tests(self) -> None:
        for node, test in list(self.truth.tests.items()):
            if test.end_ns == 0 and self.calm:
                test.end_ns = self.clock.now_ns
            if not 0 < test.end_ns <= self.clock.now_ns:
                continue
            del self.truth.tests[node]
            passed = test.passed if self.scheduler.drains[node] else None
            if passed is not None:
                self.truth.tested_ns[node] = test.began_ns
            self.publish(ev.NodeTested(id=f"t{node}-{test.began_ns}", name=SITE.name("node", node),
                                       began_ns=test.began_ns, ended_ns=test.end_ns,
                                       passed=passed))  # fmt: skip

    def _work(self) -> None:
        """Jobs end, save and begin."""
        s, rng, now_ns = self.scheduler, self.rng, self.clock.now_ns
        for job in [j for j in s.jobs if rng.random() < (0.03 if self.calm else 0.006)]:
            del s.jobs[job]
        busy = {i for nodes in s.jobs.values() for i in nodes}
        free = [i for i in range(NODES) if i not in busy and not s.drains[i]]
        while len(free) > 12 and len(s.jobs) < 40 and not s.away:
            s.number += 1
            width = int(rng.choice([1, 2, 4, 8]))
            s.jobs[str(s.number)], free = sorted(free[:width]), free[width:]
        for job in list(s.jobs):
            if rng.random() < 0.01:
                self.truth.saves.setdefault(job, now_ns)
        for job, began_ns in list(self.truth.saves.items()):
            if job not in s.jobs:
                del self.truth.saves[job]
            elif now_ns - began_ns >= 40 * NS:
                del self.truth.saves[job]
                self.publish(ev.CheckpointTold(job=job, at_ns=now_ns, began_ns=began_ns, save_s=30.0))

    def _break(self) -> None:
        """A GPU fails, or says something that means little; some nodes die of it."""
        s, rng = self.scheduler, self.rng
        if not self.chance(0.015):
            return
        node, self.count = int(rng.integers(NODES)), self.count + 1
        code = int(rng.choice(GRAVE)) if rng.random() < 0.7 else 31
        gpu = int(rng.choice(np.flatnonzero(SITE.node_of_gpu == node)))
        if code != 31:
            self.truth.bad.add(node)
            self.told["faults"] += 1
        s.caused[node] += 1
        self.publish(ev.FaultReported(id=f"f{self.count}", table="gpu", name=SITE.name("gpu", gpu), code=code,
                                      at_ns=self.clock.now_ns))  # fmt: skip
        if code == 79 and rng.random() < 0.4:
            job = s.job_on(node)
            s.jobs.pop(job or "", None)
            if not s.drains[node] and rng.random() < 0.5:
                s.taken(node, DOWN)

    def _people(self) -> None:
        """Drain and resume nodes as people do."""
        s, rng = self.scheduler, self.rng
        if s.away:
            return
        theirs = [i for i, reason in enumerate(s.drains) if reason and not reason.startswith(OURS)]
        for i in theirs:
            at_work = i in self.truth.bad or i in self.truth.mended_ns or i in self.truth.tests
            if (self.calm or rng.random() < 0.01) and not at_work:
                s.resumed(i, self._knew(i))
        if self.chance(0.008) and len(theirs) < 6:
            ours = s.ours()  # where it is ours they take it over
            node = int(rng.choice(ours)) if ours and rng.random() < 0.5 else int(rng.integers(NODES))
            s.taken(node, THEIRS)
        if self.chance(0.003) and (ours := s.ours()):
            node = int(rng.choice(ours))
            s.resumed(node, self._knew(node))
        leader = s.leader
        if self.calm and leader is not None:
            for i in [i for i in s.ours() if i not in self.truth.bad and leader.forgot(i)]:
                s.resumed(i, self._knew(i))
            for i in [i for i in self.truth.bad if not s.drains[i]]:
                s.taken(i, THEIRS)
        if self.chance(0.002):
            self.publish(ev.Held(id=f"h{self.clock.now_ns}", author="eve"))
        elif self.chance(0.01):
            self.publish(ev.Resumed(id=f"r{self.clock.now_ns}", author="eve"))

    def _knew(self, node: int) -> frozenset[str]:
        """Daemons that took it out, or heard that it is out.

        A standby that planned the same and heard no listing since is not overruled: to it the node is ill and
        was in service all along.
        """
        s = self.scheduler
        return frozenset(
            d.name
            for d in self.daemons
            if d.mine(node) and (d.name == s.drained_by[node] or d.heard_ns > s.since_ns[node])
        )

    def _repairs(self) -> None:
        """People mend what is out and broken; some say so, and bring another GPU."""
        s, now_ns, mended = self.scheduler, self.clock.now_ns, self.truth.mended_ns
        asked = {i for i in s.ours() if s.drains[i].startswith("racktwin:4:")}
        for i in sorted(self.truth.bad | asked):
            out = s.drains[i] and s.job_on(i) is None
            if i not in mended and out and self.rng.random() < (0.05 if self.calm else 0.01):
                mended[i] = now_ns + int(self.rng.integers(300, 2400)) * NS
        for i in [i for i, until_ns in mended.items() if until_ns <= now_ns]:
            del mended[i]
            self.truth.bad.discard(i)
            name, key = SITE.name("node", i), f"{i}-{now_ns}"
            if self.rng.random() < 0.3:
                gpu = SITE.name("gpu", int(np.flatnonzero(SITE.node_of_gpu == i)[0]))
                self.publish(ev.EntityReplaced(id=f"x{key}", table="gpu", name=gpu, serial=key))
            self.publish(ev.NodeRepaired(id=f"m{key}", author="ada", name=name))
            if not s.drains[i].startswith(OURS):  # who has it out tests it too
                self.truth.tests[i] = Trial(now_ns, now_ns + 60 * NS, True)

    def _daemons(self) -> None:
        """They die and come back, with their files or without, and lose the lead."""
        s = self.scheduler
        for daemon in self.daemons:
            if self.chance(0.004) and daemon.name not in self.down:
                self.down[daemon.name] = int(self.rng.choice([0, 1, 3, 30]))
            elif self.chance(0.02):
                daemon.save()
        for name in list(self.down):
            self.down[name] -= 1
            if self.down[name] < 0:
                del self.down[name]
                self._back(next(d for d in self.daemons if d.name == name))
        for name in list(self.deposed):
            self.deposed[name] -= 1
            if self.deposed[name] < 0:
                del self.deposed[name]
                daemon = next(d for d in self.daemons if d.name == name)
                daemon.tell(self._authority("advise"))
        leader = s.leader
        others = [d for d in self.daemons if d is not leader and d.name not in self.down]
        if others and (self.chance(0.008) or (leader is not None and leader.name in self.down)):
            self.told["takeovers"] += 1
            self.lead(others[0], adopt=True)

    def _back(self, daemon: Daemon) -> None:
        remembers = bool(self.rng.random() < 0.75)
        self.told["restarts" if remembers else "lost"] += 1
        daemon.restart(remembers)
        daemon.tell(ev.TicksSkipped(count=1, why="restart"))
        if self.scheduler.leader is daemon:
            self.lead(daemon, adopt=not remembers)
        else:
            daemon.tell(self._authority("advise"))

    def _listings(self) -> None:
        """Hand over listings of Slurm, sometimes late, and other events that are due."""
        s = self.scheduler
        if self.outage <= 0 and self.chance(0.006):
            self.outage, s.away = int(self.rng.integers(2, 60)), True
            self.told["outages"] += 1
        self.outage -= 1
        s.away = self.outage > 0 and not self.calm
        s.deaf = 0.0 if self.calm else 0.2
        for daemon in self.daemons:
            if daemon.name not in self.down and (self.calm or self.rng.random() < 0.3):
                try:
                    listing = s.listing()
                except ConnectorError:
                    continue
                jobs = {job: list(nodes) for job, nodes in s.jobs.items()}
                lag = 1 if self.chance(0.1) else 0
                self.lag.append((lag, daemon, listing, jobs, self.clock.now_ns))
        due, self.lag = [x for x in self.lag if x[0] <= 0], [(x[0] - 1, *x[1:]) for x in self.lag if x[0] > 0]
        for _, daemon, listing, jobs, asked_ns in due:
            if daemon.name not in self.down:
                daemon.hear(listing, jobs, asked_ns)
        kept: list[tuple[int, Daemon, ev.Event]] = []
        for wait, daemon, event in self.queue:
            if wait > 0 or daemon.name in self.down:
                kept.append((wait - 1, daemon, event))
            else:
                daemon.tell(event)
        self.queue = kept

    def settle(self, hours: float) -> None:
        """The storm is over: all is told, repaired and tested."""
        self.calm = True
        self.scheduler.away, self.outage = False, 0
        self.down = dict.fromkeys(self.down, 0)
        self.publish(ev.Resumed(id="calm", author="eve"))
        for _ in range(round(hours * 60)):
            self.tick(60.0)


def weather(seed: int, ticks: int, clock: Clock, calm_h: float) -> Storm:
    """A storm and the calm after it, checked at each command and at the end."""
    storm = Storm(seed, clock)
    for _ in range(ticks):
        storm.tick(STEP_S)
        assert not storm.scheduler.faults, storm.scheduler.faults[:3]
    storm.settle(calm_h)
    assert not storm.scheduler.faults, storm.scheduler.faults[:3]
    forgotten(storm)
    return storm


def forgotten(storm: Storm) -> None:
    """Whatever is still out is to be exchanged, and said to be; or nobody remembers that it was us."""
    s = storm.scheduler
    leader = s.leader
    assert leader is not None
    assert not [i for i, reason in enumerate(s.drains) if reason and not reason.startswith(OURS)]
    told = {i: p.reason for p in leader.engine.in_force["replacement"] for i in p.index.tolist()}
    for i in s.ours():
        phase = leader.phase(i)
        assert phase == RMA, f"n{i} is forgotten in drain: {PHASES[phase]}, {s.drains[i]}"
        assert told[i].startswith("to be exchanged"), told[i]
        assert s.drains[i].startswith("racktwin:4:")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(sink, "time", found)
    return found


def test_what_should_never_be_asked_for_is_seen(clock: Clock) -> None:
    storm = Storm(0, clock)
    s, (a, b) = storm.scheduler, storm.daemons
    a.engine.jobs.known = b.engine.jobs.known = True
    drain = ("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=racktwin:3:why")
    s.ask(b, drain)
    assert "does not lead" in s.faults.pop()
    s.put_back(3)
    s.ask(a, drain)
    assert "twice" in s.faults.pop()
    s.drains[3] = THEIRS
    s.ask(a, ("scontrol", "update", "NodeName=n3", "State=UNDRAIN"))
    assert "by others" in s.faults.pop()
    for i in range(4, 8):
        s.caused[i] += 1
        s.ask(a, ("scontrol", "update", f"NodeName=n{i}", "State=DRAIN", "Reason=racktwin:3:why"))
    assert any("of the rack" in fault for fault in s.faults)


def test_who_only_planned_a_drain_is_not_overruled(clock: Clock) -> None:
    storm = Storm(0, clock)
    a, b = storm.daemons
    a.engine.jobs.known = True
    for daemon in (a, b):
        daemon.engine.memory["replacement"]["phase"][3] = CORDONED
    storm.scheduler.ask(a, ("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=racktwin:1:why"))
    assert storm._knew(3) == {"a"}
    b.heard_ns = clock.now_ns + 1
    assert storm._knew(3) == {"a", "b"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_short_storm(clock: Clock, seed: int) -> None:
    storm = weather(seed, 500, clock, 5.0)
    print(storm.told, storm.scheduler.counts, storm.scheduler.ours())
    assert storm.scheduler.counts["withdrawn"] >= 3


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(20, 26))
def test_a_long_storm(clock: Clock, seed: int) -> None:
    storm = weather(seed, 4000, clock, 10.0)
    print(storm.told, storm.scheduler.counts, storm.scheduler.ours())
    assert storm.scheduler.counts["withdrawn"] >= 10
