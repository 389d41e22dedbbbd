"""Service levels in Slurm by `scontrol`: drains nodes, ends its own drains, requeues jobs on request.

Reads what is, asks for what differs, and reads again: that answers the command. What goes on for longer is
followed by the listings of `SlurmSource`. A level once seen in force is not fought for, nor is a new one
asked for soon after: who resumes a node by hand has it, and the read-back reports it. Slurm holds a drain
when we are gone; a lapse sets nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from connectors.orders import (
    OUTRANK,
    RESUMED_S,
    SinkContext,
    SinkOrder,
    keep_newest,
    state_number,
    summary_of,
)
from connectors.slurm.command import (
    AWAY,
    CommandProgress,
    NodeUpdate,
    Wanted,
    answer_of,
    explain,
    jobs_of,
    plan,
    refused_jobs,
    to_empty,
)
from connectors.slurm.control import SlurmControl
from connectors.slurm.nodes import LEVELS, SlurmNode
from connectors.slurm.source import FRESH_PERIODS, SlurmSource
from twin.catalogue import NS, ActuationError
from twin.contracts import CommandBatch, Item
from twin.site import Site

CONTROL = "node.service_level"
LAG_S = 2.0  # between Slurm's clock and ours, when its start is set against our looks. source: estimate
SINGLY = 64  # nodes of a call that failed are asked for one by one, so many at most
MAX_JOBS = 1000  # requeued in one call
# A command that Slurm refused for a node is not repeated within this, unless it changes. source: estimate
REFUSED_S = 30.0
AGAIN_S = 60.0  # a job that Slurm would not requeue is asked for again after this long
BEFORE = "as commanded before"  # a renewal says no more
_RANK = {"failed": 2, "in_progress": 1, "done": 0}


@dataclass(slots=True, eq=False)
class LevelOrder(SinkOrder):
    """The level commanded for a node. `seen_ns`: last time that Slurm had it; 0 = never.

    `refused`: why Slurm would not, when last asked at `refused_s` (monotonic).
    """

    why: str
    policy: str = ""
    seen_ns: int = 0
    answered: CommandProgress | None = None
    refused: str = ""
    refused_s: float = 0.0

    @property
    def level(self) -> int:
        """Return the level by number; -1: none."""
        return state_number(self.value, LEVELS)

    def wanted(self) -> Wanted:
        return Wanted(self.level, self.why)


class SlurmSink(SlurmControl[LevelOrder]):
    """Commands nodes of the Slurm that `source` reads.

    `requeue`: at `drained` and `replace` the jobs that still run are requeued; else it waits for their end.
    """

    name = "slurm"
    controls: tuple[str, ...] = (CONTROL,)

    def __init__(
        self, site: Site, source: SlurmSource, context: SinkContext, *, requeue: bool = False
    ) -> None:
        super().__init__(site, source, context)
        self._requeue = requeue
        self._held: dict[int, int] = {}  # nodes drained while that was wanted: when Slurm last had them so
        # Nodes that others resumed: when last seen drained, first seen resumed
        self._resumed: dict[int, tuple[int, int]] = {}
        self._hosts: dict[int, list[str]] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._read_s = self._done_s = -1e9  # monotonic: of the last listing, of the last end of `apply`
        self._kept: dict[str, tuple[float, str]] = {}  # jobs that Slurm would not requeue: when, why
        self._at_work = False
        self.counts["requeued"] = 0
        source.watch = self.observe

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Bring the nodes of these commands to their levels. Raises ActuationError, ConnectorError."""
        touched = [entity for batch in commands if batch.control == CONTROL for entity in self._note(batch)]
        since_s = time.monotonic() - REFUSED_S
        waits = {e for e in touched if self._orders[e].refused and self._orders[e].refused_s > since_s}
        problems = [self._orders[e].refused for e in waits]
        due = [e for e in touched if e not in waits]
        if due and not self._quiet(due):
            self._at_work = True
            try:
                problems = await self._carry_out(dict.fromkeys(due)) + problems
            finally:
                self._at_work, self._done_s = False, time.monotonic()
        if problems:
            raise ActuationError(f"{self.name}: {summary_of(problems)}")

    def observe(self, nodes: Mapping[str, SlurmNode], asked_s: float) -> Sequence[Item]:
        """Return answers to commands in progress, from a listing that is no older than our last call."""
        if self._at_work or asked_s < self._done_s:
            return ()
        self._take(nodes, asked_s)
        going = [
            e
            for e, order in self._orders.items()
            if order.answered is not None and order.answered.state == "in_progress"
        ]
        return self._answers(going, only_news=True)

    def _note(self, batch: CommandBatch) -> list[int]:
        """Store the commands of a batch, unless a newer one is known; returns the nodes concerned."""
        why, policy = (BEFORE, "") if batch.renewal else (batch.reason, batch.policy)
        concerned, old = keep_newest(self._orders, batch, partial(LevelOrder, why=why, policy=policy))
        self.counts["old"] += old
        for entity in concerned:
            if self._orders[entity].level == 0:  # that it is resumed is wanted by us as well
                self._held.pop(entity, None)
        return concerned

    def _quiet(self, touched: Sequence[int]) -> bool:
        """Return True if all matches a current listing, and was reported."""
        if time.monotonic() - self._read_s > FRESH_PERIODS * self._source.nodes_every_s:
            return False
        orders = [self._orders[e] for e in touched]
        if not all(o.seen_ns and o.answered is not None and o.answered.state == "done" for o in orders):
            return False
        return all(self._answer(e).state == "done" for e in touched)

    async def _carry_out(self, touched: Iterable[int]) -> list[str]:
        """Request the changes that differ, and answer. Return the reasons of Slurm's refusals."""
        await self._read()
        for entity in touched:
            self._heed(entity)
        due = [e for e in touched if self._orders[e].level >= 0 and not self._changed_by_others(e)]
        lost = [e for e in touched if self._changed_by_others(e)]
        due += await self._lost_drains(lost) if lost else []
        problems = await self._ask_for(due)
        if self._requeue and await self._empty(due):
            await self._read()
        items = self._answers(touched, problems=problems)
        if items:
            self._stage(items, self._now_ns())
        self.counts["refused"] += bool(problems)
        return problems

    def _levels_by_host(self, entities: Iterable[int]) -> dict[str, Wanted]:
        return {host: self._orders[e].wanted() for e in entities for host in self._hosts.get(e, ())}

    def _changed_by_others(self, entity: int) -> bool:
        """Return True if a node left the state that we set."""
        return self._orders[entity].seen_ns > 0 and self._answer(entity).state == "failed"

    def _heed(self, entity: int) -> None:
        """Cancel a new level if somebody resumed the node just now."""
        order = self._orders[entity]
        drained_ns, resumed_ns = self._resumed.get(entity, (0, 0))
        soon = abs(self._now_ns() - resumed_ns) < round(RESUMED_S * NS)
        if order.level >= 1 and not order.seen_ns and soon and order.policy not in OUTRANK:
            order.seen_ns = drained_ns

    async def _lost_drains(self, lost: Iterable[int]) -> list[int]:
        """Return those of these nodes whose drains Slurm may have lost in a restart."""
        text = await self._source.ask("scontrol", "show", "config")
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "BOOT_TIME" and value.strip().isdigit():
                began_ns = (int(value) + round(LAG_S)) * NS
                return [e for e in lost if began_ns > self._orders[e].seen_ns]
        return []

    async def _ask_for(self, due: list[int]) -> list[str]:
        """Bring nodes to their wanted levels; returns Slurm's refusals.

        Of a call that it refuses it may have done all or a part: what is left is asked for node by node.
        """
        updates = plan(self._levels_by_host(due), self._nodes)
        refused: dict[str, str] = {}
        singly, alone = set[str](), set[str]()
        for update in updates:
            words = await self._call(update.arguments(), len(update.hosts))
            if words is not None:
                refused |= dict.fromkeys(update.hosts, explain(words))
                if len(update.hosts) > 1 and words == explain(words):
                    singly |= set(update.hosts)
        if updates:
            await self._read()
        for rest in plan(self._levels_by_host(due), self._nodes) if singly else ():
            for host in [host for host in rest.hosts if host in singly][:SINGLY]:
                words = await self._call(NodeUpdate(rest.state, rest.reason, (host,)).arguments(), 1)
                refused[host] = explain(words or "")
                alone.add(host)
                entity = self._source.ledger.entity_of(host)
                if entity in self._orders and _final(refused[host]):  # known also where we are cut off now
                    self._refuse(entity, refused[host])
        if singly:
            await self._read()
        left = {host for rest in plan(self._levels_by_host(due), self._nodes) for host in rest.hosts}
        problems: list[str] = []
        for entity in due:
            hosts = [host for host in self._hosts.get(entity, ()) if host in left and refused.get(host)]
            problems += [refused[host] for host in hosts]
            meant = [refused[h] for h in hosts if _final(refused[h]) and (h in alone or h not in singly)]
            self._refuse(entity, meant[0] if meant and len(meant) == len(hosts) else "")
        return problems

    def _refuse(self, entity: int, words: str) -> None:
        self._orders[entity].refused, self._orders[entity].refused_s = words, time.monotonic()

    async def _empty(self, entities: Iterable[int]) -> bool:
        """Requeue jobs on nodes that are to be empty. Return True if any job was requeued."""
        hosts = to_empty(self._levels_by_host(entities), self._nodes)
        now_s = time.monotonic()
        self._kept = {job: kept for job, kept in self._kept.items() if now_s - kept[0] < AGAIN_S}
        jobs: list[str] = []
        for part in plan(
            dict.fromkeys(hosts, Wanted(0, "")), self._nodes
        ):  # in pieces as long as a call may be
            words = part.arguments()[1].replace("NodeName=", "--nodelist=")
            text = await self._source.ask(
                "squeue",
                "--noheader",
                "--all",
                words,
                "--states=RUNNING,SUSPENDED",
                "--format=%A %F %K",
            )
            jobs += jobs_of(text)
        jobs = [job for job in dict.fromkeys(jobs) if job not in self._kept][:MAX_JOBS]
        if not jobs:
            return False
        words_of_slurm = await self._call(["requeue", ",".join(jobs)], 0)
        refused = {} if words_of_slurm is None else refused_jobs(words_of_slurm.replace("; ", "\n"))
        if words_of_slurm is not None and not refused:
            refused = dict.fromkeys(jobs, words_of_slurm)
        self._kept |= {job: (now_s, why) for job, why in refused.items()}
        self.counts["requeued"] += len(jobs) - len(refused)
        return True

    async def _read(self) -> None:
        asked_s = time.monotonic()
        self._take(await self._source.nodes(), asked_s)

    def _take(self, nodes: Mapping[str, SlurmNode], asked_s: float) -> None:
        """Take a listing: Slurm's state, the host of each node, and the completed levels."""
        self._nodes, self._read_s, hosts = dict(nodes), asked_s, dict[int, list[str]]()
        for host in nodes:
            entity = self._source.ledger.entity_of(host)
            if entity is not None:
                hosts.setdefault(entity, []).append(host)
        self._hosts, now_ns = hosts, self._now_ns()
        for entity, order in self._orders.items():
            if self._answer(entity).state != "failed":
                order.seen_ns = now_ns
            if entity in hosts and order.level >= 1:
                self._note_hand(entity, any(nodes[host].drain for host in hosts[entity]), now_ns)
        if not self._may_act():  # what is resumed from now on, another daemon may have
            self._held.clear()

    def _note_hand(self, entity: int, drained: bool, now_ns: int) -> None:
        """Note drains, while they are wanted: one that is gone was ended by a person."""
        if drained:
            self._held[entity] = now_ns
            self._resumed.pop(entity, None)
        elif entity in self._held:
            self._resumed[entity] = self._held.pop(entity), now_ns

    def _answer(self, entity: int) -> CommandProgress:
        """Return the progress of a node's command by the last listing: the worst of its hosts."""
        order, hosts = self._orders[entity], self._hosts.get(entity)
        if order.level < 0:
            return CommandProgress("failed", f"expected a level from 0 to {len(LEVELS) - 1}")
        if not hosts:
            return self._no_such_node(entity)
        answers = [answer_of(host, order.level, self._nodes.get(host)) for host in hosts]
        worst = max(answers, key=lambda answer: _RANK[answer.state])
        if order.level and order.seen_ns and not any(self._nodes[host].drain for host in hosts):
            return CommandProgress("failed", f"resumed by others: {worst.detail}")
        if worst.state == "in_progress" and self._kept:
            job, (_, why) = next(iter(self._kept.items()))
            return CommandProgress(worst.state, f"{worst.detail}; job {job}, for one, is not requeued: {why}")
        return worst

    def _answers(
        self, entities: Iterable[int], only_news: bool = False, problems: Sequence[str] = ()
    ) -> list[Item]:
        out: list[Item] = []
        for entity in entities:
            order, answer = self._orders[entity], self._answer(entity)
            if answer.state == "failed" and problems:
                answer = CommandProgress("failed", problems[0])
            if only_news and answer in (order.answered, CommandProgress("failed", answer.detail)):
                continue
            order.answered = answer
            out.append(self._acked(entity, answer))
        return out


def _final(words: str) -> bool:
    """Return True if Slurm itself refused."""
    return bool(words) and not any(text in words for text in AWAY)
