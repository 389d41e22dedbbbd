"""A scheduler that is only thought of, which keeps the truth, and daemons in process that command it.

The truth is who drained which node and why, and which jobs run where; what a daemon should never have asked
for is written down in `Scheduler.faults`. Daemons are engines with the replacement policy and the sink that
commands a real Slurm.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from connectors.orders import SinkContext
from connectors.slurm import CONTROL, SlurmSink
from connectors.slurm.hostlist import expand_hosts
from connectors.slurm.nodes import SlurmNode, parse_nodes
from policies.node_replacement import Replacement
from policies.node_replacement.limits import WithdrawalLimits
from policies.node_replacement.phases import WITHDRAWN
from policies.operator import Operator
from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import NS, ActuationError, ConnectorError
from twin.contracts import CommandBatch, Decision, is_failure
from twin.engine import Engine, encode
from twin.engine.snapshot import decode
from twin.telemetry import Frame, Inbox, Reading, events as ev

TESTED, SINCE = "node.burn_in_since_s", "job.checkpoint_since_s"
STATE, OWNER = "service_level_state", "service_owner_state"
BLAST = 6
SITE = site_of(
    two_racks(racks="r[1-4]", controls={CONTROL: {"blast_radius": BLAST}}, max_jobs=64)
)  # fmt: skip
NODES = SITE.sizes["node"]
LIMITS = WithdrawalLimits(site_count=NODES, site_share=0.15, rack_share=0.2, domain_share=0.2, job_share=0.25)
OURS = "racktwin:"
AGAIN_S = 6 * 3600.0  # after which what is broken still may be withdrawn anew


def done(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def host_of(node: int) -> str:
    """As the scheduler calls a node."""
    return f"n{node}"


class Clock:
    """In place of `time` in the sink: the storm's own."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def monotonic(self) -> float:
        """Seconds since the start."""
        return (self.now_ns - START_NS) / NS

    def time_ns(self) -> int:
        """Unix time."""
        return self.now_ns


class Scheduler:
    """`drains`: the reason by node, "" where it works. `jobs`: nodes by job. `leader`: whom it may obey."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.drains = [""] * NODES
        self.jobs: dict[str, list[int]] = {}
        self.number = 0
        self.away, self.deaf = False, 0.0  # no answer; the chance that one is lost though it is done
        self.rng = np.random.default_rng(0)
        self.leader: Daemon | None = None
        self.faults: list[str] = []
        self.since_ns = [0] * NODES  # of the drain
        self.drained_by = [""] * NODES  # the daemon that asked for it
        self.caused = np.zeros(
            NODES, np.int64
        )  # evidence against each node so far, as daemons first heard it
        self.answered = np.full(NODES, -1, np.int64)  # of it, when it came back into service
        self.back_ns = np.zeros(NODES, np.int64)
        # Whom people overruled when they put it back; others see a node that is ill, and in service
        self.knew: list[frozenset[str]] = [frozenset()] * NODES
        self.counts = dict.fromkeys(("withdrawn", "returned", "most_out", "requeued", "by_hand", "raced"), 0)

    def job_on(self, node: int) -> str | None:
        """The job that runs on a node."""
        return next((job for job, nodes in self.jobs.items() if node in nodes), None)

    def ours(self) -> list[int]:
        """Nodes in a drain of ours."""
        return [i for i, reason in enumerate(self.drains) if reason.startswith(OURS)]

    def listing(self) -> dict[str, SlurmNode]:
        """Return the nodes as `sinfo` lists them now. Raises ConnectorError in an outage."""
        if self.away:
            raise ConnectorError("sinfo: Unable to contact slurm controller")
        busy = {i for nodes in self.jobs.values() for i in nodes}
        rows = []
        for i, reason in enumerate(self.drains):
            state = (
                ("draining" if i in busy else "drained") if reason else "allocated" if i in busy else "idle"
            )
            rows.append(f"{host_of(i)}|{state}||||{reason or 'none'}|")
        return parse_nodes("\n".join(rows))

    def ask(self, who: Daemon, words: Sequence[str]) -> str:
        """A command of Slurm's, by this daemon."""
        if self.away:
            raise ConnectorError(f"{words[0]}: Unable to contact slurm controller")
        told = dict(word.partition("=")[::2] for word in words)
        if words[:3] == ("scontrol", "show", "config"):
            return "BOOT_TIME = 1\n"
        if words[0] == "squeue":
            nodes = {int(h[1:]) for h in expand_hosts(told["--nodelist"])}
            return "\n".join(job for job, its in self.jobs.items() if nodes & set(its))
        if who is not self.leader:
            self.faults.append(f"{who.name} commands, but does not lead: {words}")
        if words[1] == "requeue":
            for job in words[2].split(","):
                self.counts["requeued"] += self.jobs.pop(job, None) is not None
        elif told["State"] == "DRAIN":
            for h in expand_hosts(told["NodeName"]):
                self._drain(who, int(h[1:]), told["Reason"])
        else:
            for h in expand_hosts(told["NodeName"]):
                self._undrain(int(h[1:]))
        if self.rng.random() < self.deaf:
            raise ConnectorError("scontrol: no answer within 10 s")
        return ""

    def _drain(self, who: Daemon, node: int, reason: str) -> None:
        now_ns = self.clock.now_ns
        if self.drains[node] and not self.drains[node].startswith(OURS):
            self.faults.append(f"n{node} was drained by others ({self.drains[node]}), {who.name}: {reason}")
        if not self.drains[node]:
            self.counts["withdrawn"] += 1
            if not who.engine.jobs.known:
                self.faults.append(f"n{node} withdrawn by {who.name}, who does not know what runs")
            long_ago = (now_ns - self.back_ns[node]) / NS >= AGAIN_S
            knew = not self.knew[node] or who.name in self.knew[node]
            again = self.caused[node] <= self.answered[node] and knew and not long_ago
            if again and self.knew[node] and who.heard_ns < self.back_ns[node]:
                self.counts["raced"] += 1  # people put it back, and no listing has said so yet
            elif again:
                self.faults.append(f"n{node} withdrawn twice for one cause by {who.name} at "
                                   f"{self.clock.monotonic():g} s, back {self.back_ns[node] - START_NS} ns, "
                                   f"{who.phase(node)}: {reason}")  # fmt: skip
            self.since_ns[node], self.drained_by[node] = now_ns, who.name
            self.drains[node] = reason
            self._limits(who, node)
        self.drains[node] = reason

    def _limits(self, who: Daemon, node: int) -> None:
        """The limits that docs/replacement.md states: the blast radius counts what we took out; the shares
        count all that is out, by whoever and for whatever reason, as far as `who` has heard of it.

        A node that failed is out already, so that its drain takes no more room.
        """
        ours = self.ours()
        known = [i for i in ours if not who.forgot(i)]
        self.counts["most_out"] = max(self.counts["most_out"], len(ours))
        if len(known) > BLAST:
            self.faults.append(f"{len(known)} nodes out at {self.clock.monotonic():g} s: {known}")
        if who.failed(node):
            return
        heard = [i for i, reason in enumerate(self.drains) if reason and self.since_ns[i] < who.heard_ns]
        gone = sorted({*ours, *heard, *(i for i in range(NODES) if who.failed(i))})
        for what, group, share in (
            ("site", np.zeros(NODES, int), LIMITS.site_share),
            ("rack", SITE.rack_of_node, LIMITS.rack_share),
            ("domain", SITE.supernode_of_node, LIMITS.domain_share),
        ):
            out = sum(group[i] == group[node] for i in gone)
            if out > max(1, int(share * np.count_nonzero(group == group[node]) + 1e-9)):
                self.faults.append(f"{out} nodes of the {what} of n{node} are out")
        job = self.job_on(node)
        its = self.jobs.get(job or "", [])
        if job is not None and who.knows(job):
            out = sum(i in its for i in gone)
            if out > max(1, int(LIMITS.job_share * len(its) + 1e-9)):
                self.faults.append(f"{out} nodes of {job} are out")

    def _undrain(self, node: int) -> None:
        if not self.drains[node].startswith(OURS):
            self.faults.append(
                f"n{node} was drained by others ({self.drains[node] or 'nobody'}), and resumed"
            )
        self.counts["returned"] += 1
        self.put_back(node)

    def taken(self, node: int, reason: str) -> None:
        """Out of service by people, or by the scheduler itself."""
        self.drains[node], self.since_ns[node] = reason, self.clock.now_ns

    def resumed(self, node: int, knew: frozenset[str]) -> None:
        """By hand; `knew`: daemons that had taken it out."""
        self.counts["by_hand"] += 1
        self.put_back(node)
        self.knew[node] = knew | {""}

    def put_back(self, node: int) -> None:
        """In service again, whoever did it: what spoke against it until now is answered."""
        self.drains[node], self.knew[node] = "", frozenset()
        self.answered[node], self.back_ns[node] = self.caused[node], self.clock.now_ns


class Source:
    """As the sink has its source; asks for one daemon."""

    nodes_every_s = 0.0  # no listing is fresh enough to go by: it asks each time
    watch: Any = None

    def __init__(self, scheduler: Scheduler, daemon: Daemon) -> None:
        self.scheduler, self.daemon, self.ledger = scheduler, daemon, self

    def entity_of(self, host: str) -> int | None:
        """The node of a host."""
        return int(host[1:])

    async def nodes(self) -> dict[str, SlurmNode]:
        """As `sinfo` has them."""
        return self.scheduler.listing()

    async def ask(self, *words: str) -> str:
        """Return the answer of a program of Slurm."""
        return self.scheduler.ask(self.daemon, words)


def new_engine(authority: str) -> Engine:
    """Of a daemon that begins."""
    policies = [Replacement(burn_in=True, probation_days=0.05, **LIMITS._asdict()), Operator()]
    return Engine(SITE, policies, [], {"replacement": authority, "operator": "act"})


class Daemon:
    """An engine, its sink and what it keeps: a snapshot, and the frames since."""

    def __init__(self, name: str, scheduler: Scheduler, rng: np.random.Generator) -> None:
        self.name, self.scheduler, self.rng = name, scheduler, rng
        self.lost_ns = 0  # when it last began without a snapshot
        self.term_ns = 0  # when its term began
        self.heard_ns = 0  # as of when it knows what the scheduler has
        self.orders: list[CommandBatch] = []
        self.begin()

    def begin(self) -> None:
        """Without anything from before."""
        self.engine = new_engine("advise")
        self._open()
        self.save()

    def _open(self) -> None:
        self.inbox = Inbox(SITE.sizes, 10.0)
        self.inbox.resume(self.engine.state)
        self.late: list[tuple[int, ev.Event]] = []  # in so many ticks
        self.source = Source(self.scheduler, self)
        clock = self.scheduler.clock
        source: Any = self.source
        context = SinkContext(self.stage, self.leads, clock.time_ns)
        self.sink = SlurmSink(SITE, source, context, requeue=True)

    def leads(self) -> bool:
        """Return True if this daemon may act: its lease is fenced by time, so it knows."""
        return self.scheduler.leader is self

    def phase(self, node: int) -> int:
        """Of the policy's memory."""
        return int(self.engine.memory["replacement"]["phase"][node])

    def failed(self, node: int) -> bool:
        """Return True if this daemon knows that a node failed and is not back."""
        log = self.engine.health.log()
        return bool(((log.node == node) & (log.end_ns == 0) & is_failure(log)).any())

    def knows(self, job: str) -> bool:
        """Return True if this daemon has the nodes of a job as the scheduler has them."""
        jobs = self.engine.jobs
        held = {i for i in range(NODES) if (s := jobs.job_of_node[i]) >= 0 and jobs.names[s] == job}
        return held == set(self.scheduler.jobs[job])

    def forgot(self, node: int) -> bool:
        """Return True if this daemon has lost its drain of a node: one of an earlier term, or before a loss.

        Such a drain counts as that of a stranger.
        """
        before = self.scheduler.since_ns[node] <= max(self.lost_ns, self.term_ns)
        return before and not self.mine(node)

    def mine(self, node: int) -> bool:
        """Return True if this daemon remembers that it took a node out."""
        memory = self.engine.memory["replacement"]
        return bool(memory["withdrawn_ns"][node] > 0) or self.phase(node) in WITHDRAWN

    def save(self) -> None:
        """Take a snapshot."""
        self.kept, self.frames = encode(self.engine.dump()), list[Frame]()

    def restart(self, remembers: bool) -> None:
        """Die, and begin again from the snapshot and the trace, or from nothing."""
        number = self.engine.state.tick
        if not remembers:
            self.lost_ns = self.scheduler.clock.now_ns
            self.begin()
            return
        before = self.engine
        self.engine = new_engine("advise")
        self.engine.restore(decode(self.kept))
        for frame in self.frames:
            self.engine.tick(frame)
        assert self.engine.checksum() == before.checksum(), f"{self.name}: not as it was"
        assert self.engine.state.tick == number
        self._open()

    def stage(self, items: Sequence[Any], _ns: int) -> None:
        """Answers of the sink: some are lost, some come twice, some late."""
        for item in items:
            for _ in range(int(self.rng.choice([0, 1, 1, 1, 2]))):
                self.late.append((int(self.rng.choice([0, 0, 1, 5])), item))

    def tell(self, *events: ev.Event) -> None:
        """Events, at once."""
        for event in events:
            self.inbox.put_event(event)

    def hear(
        self, listing: Mapping[str, SlurmNode], jobs: Mapping[str, Sequence[int]], asked_ns: int
    ) -> None:
        """A listing of nodes and jobs that was asked for then."""
        now_ns, self.heard_ns = self.scheduler.clock.now_ns, max(asked_ns, self.heard_ns)
        held = set(self.engine.jobs.slot_of)
        for job in sorted(held - set(jobs)):
            self.tell(ev.JobEnded(job=job))
        for job, nodes in jobs.items():
            if job not in held:
                names = tuple(SITE.name("node", i) for i in nodes)
                self.tell(ev.JobStarted(job=job, nodes=names, kind="training", coupling="synchronous",
                                        checkpoint_interval_s=1800.0, checkpoint_save_s=30.0,
                                        checkpoint_restart_s=300.0))  # fmt: skip
        if not jobs and not held:
            self.tell(ev.JobStarted(job="none", nodes=()), ev.JobEnded(job="none"))
        for host, node in listing.items():
            if node.level is not None:
                self.inbox.put(Reading("node", int(host[1:]), STATE, node.level, asked_ns), now_ns)
            if node.owner is not None:
                self.inbox.put(Reading("node", int(host[1:]), OWNER, node.owner, asked_ns), now_ns)
        for item in self.source.watch(listing, (asked_ns - START_NS) / NS):
            self.stage([item], now_ns)

    def tick(self, dt_s: float) -> Decision:
        """One tick; what it commands goes to its sink, whether it leads or not."""
        due, self.late = [e for k, e in self.late if k <= 0], [(k - 1, e) for k, e in self.late if k > 0]
        self.tell(*due)
        now_ns = self.scheduler.clock.now_ns
        frame = self.inbox.take(self.engine.state.tick + 1, now_ns, dt_s)
        decision = self.engine.tick(frame)
        self.frames.append(frame)
        mine = tuple(b for b in decision.commands if b.control == CONTROL)
        if mine:
            with suppress(ActuationError, ConnectorError):
                done(self.sink.apply(mine))
        self.orders = [b for b in decision.commands if b.control != CONTROL] if self.leads() else []
        return decision
