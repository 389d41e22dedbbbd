"""Standby in Slurm by its power saving: POWER_DOWN and POWER_UP of `scontrol`.

Reads what is, asks for what differs, and reads again: that answers the command. A node with a job, or that is
drained, is never powered down. Slurm ignores a POWER_UP of a node that still powers down, so that `run` asks
again once it is off. When we are gone Slurm keeps nodes as they are, and wakes them for jobs by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connectors.orders import SinkContext, SinkOrder, keep_newest, state_number, summary_of
from connectors.slurm.command import AWAY, NODE_NAME, CommandProgress, compress_hosts, explain, pieces
from connectors.slurm.control import SlurmControl
from connectors.slurm.nodes import ASLEEP, READY, STANDBY, WAKING, SlurmNode
from connectors.slurm.source import SlurmSource
from twin.catalogue import TABLES, ActuationError, ConnectorError
from twin.contracts import CommandBatch, Item
from twin.site import Site
from twin.telemetry import Reading

log = logging.getLogger(__name__)
CONTROL = "node.standby"
STATES = TABLES["node"].control_by_name["standby"].states
OFF = (
    "Slurm's power saving is off: set SuspendProgram, ResumeProgram and a SuspendTime other than INFINITE in "
    "slurm.conf"
)


@dataclass(slots=True, eq=False)
class StandbyOrder(SinkOrder):
    """The standby commanded for a node until `expires_ns`. `answered`: our last answer."""

    expires_ns: int = 0
    answered: CommandProgress | None = None

    @property
    def standby(self) -> int:
        """Return the standby by number; -1: none."""
        number = state_number(self.value, STATES)
        return -1 if number == WAKING else number


class SlurmStandby(SlurmControl[StandbyOrder]):
    """Puts nodes of the Slurm that `source` reads to sleep, and wakes them."""

    name = "slurm-standby"
    controls: tuple[str, ...] = (CONTROL,)

    def __init__(self, site: Site, source: SlurmSource, context: SinkContext) -> None:
        super().__init__(site, source, context)
        self._hosts: dict[int, list[str]] = {}
        self._nodes: dict[str, SlurmNode] = {}

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Bring the nodes of these commands to their standby, and answer each; a refusal of Slurm is a
        failure.

        Raises ConnectorError where Slurm is away, ActuationError where another daemon leads.
        """
        noted = [entity for batch in commands if batch.control == CONTROL for entity in self._note(batch)]
        if noted:
            await self._carry_out(list(dict.fromkeys(noted)))

    async def run(self) -> None:
        """Retry nodes that could not be woken while they powered down, until cancelled."""
        while True:
            await asyncio.sleep(self._source.nodes_every_s)
            now_ns = self._now_ns()
            going = [
                entity
                for entity, order in self._orders.items()
                if order.answered is not None
                and order.answered.state == "in_progress"
                and now_ns < order.expires_ns
            ]
            if going and self._may_act():
                try:
                    await self._carry_out(going)
                except (ConnectorError, ActuationError) as error:
                    log.warning("%s: retrying: %s", self.name, error)

    def _note(self, batch: CommandBatch) -> list[int]:
        """Store the commands of a batch, unless a newer one is known; returns the nodes concerned."""
        concerned, old = keep_newest(self._orders, batch, StandbyOrder)
        self.counts["old"] += old
        for entity in concerned:
            self._orders[entity].expires_ns = batch.deadline_ns if batch.final else batch.expires_ns
        return concerned

    async def _read(self) -> None:
        self._nodes, self._hosts = await self._source.nodes(), {}
        for host in self._nodes:
            found = self._source.ledger.entity_of(host)
            if found is not None:
                self._hosts.setdefault(found, []).append(host)

    async def _carry_out(self, touched: Sequence[int]) -> None:
        await self._read()
        refused: dict[str, str] = {}
        updates = self._due(touched)
        for state, hosts in updates:
            for part in pieces(hosts):
                words = ["update", f"NodeName={compress_hosts(part)}", f"State={state}"]
                said = await self._call(words, len(part))
                if said is not None and any(text in said for text in AWAY):
                    raise ConnectorError(said)
                if said is not None:
                    why = f"{explain(said)}: {OFF}" if "Invalid node state" in said else explain(said)
                    refused |= dict.fromkeys(part, why)
        if updates:
            await self._read()
        self._answer(touched, refused)

    def _due(self, touched: Iterable[int]) -> list[tuple[str, list[str]]]:
        """Return (state to request, its hosts) of the differences; wakes first."""
        up, down = list[str](), list[str]()
        for entity in touched:
            wanted = self._orders[entity].standby
            for host in self._hosts.get(entity, ()):
                node = self._nodes[host]
                if not NODE_NAME.fullmatch(host):
                    continue
                if wanted == READY and node.standby == ASLEEP and not node.stopping:
                    up.append(host)
                elif wanted == ASLEEP and node.standby == READY and not node.works and not node.drain:
                    down.append(host)
        return [(state, hosts) for state, hosts in (("POWER_UP", up), ("POWER_DOWN", down)) if hosts]

    def _answer(self, touched: Sequence[int], refused: dict[str, str]) -> None:
        """Answer the commands, and report at once how the nodes are now: they fall silent before long."""
        now_ns = time.time_ns()
        items, problems = list[Item](), list[str]()
        for entity in touched:
            order, hosts = self._orders[entity], self._hosts.get(entity, [])
            answers = [_progress(self._nodes[h], order.standby, refused.get(h, "")) for h in hosts]
            answer = self._no_such_node(entity)
            if order.standby < 0:
                answer = CommandProgress("failed", "expected ready or asleep")
            elif answers:
                answer = max(answers, key=lambda a: ("done", "in_progress", "failed").index(a.state))
            levels = {self._nodes[h].standby for h in hosts}
            if len(levels) == 1 and None not in levels:
                items.append(Reading("node", entity, STANDBY, levels.pop(), now_ns))
            if answer != order.answered or answer.state != "in_progress":
                items.append(self._acked(entity, answer))
            order.answered = answer
            problems += [refused[h] for h in hosts if h in refused]
        if problems:
            self.counts["refused"] += 1
            log.warning("%s: %s", self.name, summary_of(problems))
        self._stage(items, self._now_ns())


def _progress(node: SlurmNode, wanted: int, refused: str) -> CommandProgress:
    """Return the progress of a node towards this standby, by its present state in Slurm."""
    if node.standby == wanted:
        return CommandProgress("done")
    if refused:
        return CommandProgress("failed", refused)
    if wanted == READY and node.standby is not None:
        return CommandProgress("in_progress", f"Slurm has it {node.state}")
    if wanted == ASLEEP and node.works:
        return CommandProgress("failed", "a job is on it")
    if wanted == ASLEEP and node.drain:
        return CommandProgress("failed", f"it is drained: {node.reason[:80] or 'no reason given'}")
    return CommandProgress("failed", f"Slurm has it {node.state}")
