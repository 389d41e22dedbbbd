"""Placement in Slurm by `scontrol`: racktwin's mark in weights, and its reservation of spares.

Reads what is, asks for what differs, and reads again: that answers the command. Each renewal does the same,
as Slurm forgets weights when it starts again or reads its configuration; where a listing that is not old has
all as wanted, nothing is asked, nor where Slurm refused the same a short while ago. The reservation ends by
itself when nobody renews it; a weight stays. Remembers nothing but the newest command of each node.
"""

from __future__ import annotations

import logging
import math
import os
import pwd
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connectors.orders import SinkContext, SinkOrder, keep_newest, state_number, summary_of
from connectors.slurm.command import AWAY, CommandProgress, explain
from connectors.slurm.control import SlurmControl
from connectors.slurm.marks import (
    CONTROL,
    KEPT,
    STATES,
    Marks,
    Weigh,
    answer_of,
    in_the_way,
    lowered,
    members,
    raised,
    reserve,
)
from connectors.slurm.source import SlurmSource
from twin.catalogue import NS, ConnectorError
from twin.contracts import CommandBatch, Item
from twin.site import Site

log = logging.getLogger(__name__)
# A renewal does not repeat for this long what Slurm refused. source: estimate
REFUSED_S = 300.0


@dataclass(slots=True, eq=False)
class PlacementOrder(SinkOrder):
    """The placement commanded for a node. `answered`: our last answer; `refused_s`: when (monotonic) Slurm
    said no."""

    answered: CommandProgress | None = None
    refused_s: float = -math.inf

    @property
    def placement(self) -> int:
        """Return the placement by number; -1: none."""
        return state_number(self.value, STATES)


class SlurmPlacement(SlurmControl[PlacementOrder]):
    """Places nodes of the Slurm that `source` reads."""

    name = "slurm-placement"
    controls: tuple[str, ...] = (CONTROL,)

    def __init__(self, site: Site, source: SlurmSource, context: SinkContext) -> None:
        super().__init__(site, source, context)
        self._listed: Marks | None = None  # the listing that `_hosts` is of
        self._hosts: dict[int, list[str]] = {}
        self.counts["renewed"] = 0

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Place the nodes of these commands, and answer each; a refusal of Slurm is a failure.

        Raises ConnectorError where Slurm is away, ActuationError where another daemon leads.
        """
        since_s = time.monotonic() - REFUSED_S
        noted = [
            entity
            for batch in commands
            if batch.control == CONTROL
            for entity in self._note(batch)
            if not (batch.renewal and self._orders[entity].refused_s > since_s)
        ]
        touched = list(dict.fromkeys(noted))
        if not touched or self._quiet(touched):
            return
        await self._source.read_marks()
        refused = await self._weigh(raised(self._wanted(touched), self._source.marks))
        refused |= await self._reserve(touched, refused)
        refused |= await self._weigh(lowered(self._wanted(touched), self._source.marks))
        problems = self._answer(touched, refused)
        if problems:
            self.counts["refused"] += 1
            log.warning("%s: %s", self.name, summary_of(problems))  # whole: an answer holds less

    def _note(self, batch: CommandBatch) -> list[int]:
        """Store the commands of a batch, unless a newer one is known; returns the nodes concerned."""
        concerned, old = keep_newest(self._orders, batch, PlacementOrder)
        self.counts["old"] += old
        return concerned

    def _quiet(self, touched: Iterable[int]) -> bool:
        """Return True if all is answered and matches a current listing."""
        if time.monotonic() - self._source.marks_s > self._source.marks_every_s + self._source.nodes_every_s:
            return False
        if any(self._orders[e].answered is None for e in touched):
            return False
        wanted, marks = self._wanted(touched), self._source.marks
        due = raised(wanted, marks) or lowered(wanted, marks)
        if due or self._reservation(wanted, members(wanted, marks)):
            return False
        return all(self._found(e) == self._orders[e].answered for e in touched)

    def _hosts_of(self, entity: int) -> Sequence[str]:
        """Return the hosts of a node in the last listing."""
        if self._listed is not self._source.marks:
            self._listed, self._hosts = self._source.marks, {}
            for host in self._listed.weights:
                found = self._source.ledger.entity_of(host)
                if found is not None:
                    self._hosts.setdefault(found, []).append(host)
        return self._hosts.get(entity, ())

    def _wanted(self, touched: Iterable[int]) -> dict[str, int]:
        """Return the wanted placement of hosts."""
        return {host: self._orders[e].placement for e in touched for host in self._hosts_of(e)}

    def _reservation(self, wanted: dict[str, int], hosts: Iterable[str]) -> list[str]:
        renew = KEPT in wanted.values()
        return reserve(frozenset(hosts), self._source.marks, _user(), self._now_ns() / NS, renew)

    async def _weigh(self, updates: Sequence[Weigh]) -> dict[str, str]:
        """Give nodes these weights; returns Slurm's refusals by host."""
        refused: dict[str, str] = {}
        for update in updates:
            words = await self._ask_for(update.arguments(), len(update.hosts))
            refused |= dict.fromkeys(update.hosts, words) if words else {}
        if updates:
            await self._source.read_marks()
        return refused

    async def _reserve(self, touched: Sequence[int], unraised: dict[str, str]) -> dict[str, str]:
        """Give our reservation its members, and extend it; returns Slurm's refusals by host.

        One that could not be marked stays kept. Slurm refuses a call for one node that others reserved: then
        all but those are asked for. A member that others reserved for later leaves a little early by that.
        """
        wanted = {host: p for host, p in self._wanted(touched).items() if host not in unraised}
        marks = self._source.marks
        hosts, now = members(wanted, marks), marks.reserved
        call = self._reservation(wanted, hosts)
        if not call:
            return {}
        kept = {host for host, p in wanted.items() if p == KEPT}
        words = await self._ask_for(call, len(hosts))
        refused = dict.fromkeys((now - hosts) | kept, words) if words else {}
        busy = in_the_way(hosts, marks, self._now_ns() / NS) if words and kept else {}
        if busy:
            rest = hosts - set(busy)
            again = self._reservation(wanted, rest) if rest or now - hosts else []
            words_of_rest = await self._ask_for(again, len(rest)) if again else None
            refused = dict.fromkeys((now - hosts) | kept, words_of_rest) if words_of_rest else {}
            refused |= {host: f"{words}: {name}" for host, name in busy.items()}
        moved = call[0] == "update" and any(word.startswith("EndTime=") for word in call)
        self.counts["renewed"] += moved and not words
        await self._source.read_marks()
        return refused

    async def _ask_for(self, words: list[str], nodes: int) -> str | None:
        """Run scontrol. Return why Slurm refuses, or None. Raises ConnectorError if Slurm does not answer."""
        said = await self._call(words, nodes)
        if said is not None and any(text in said for text in AWAY):
            raise ConnectorError(said)
        return said and explain(said)

    def _found(self, entity: int) -> CommandProgress:
        """Return the progress of a node's placement by the last listing: the worst of its hosts."""
        order, hosts = self._orders[entity], self._hosts_of(entity)
        if order.placement < 0:
            return CommandProgress("failed", f"expected a placement from 0 to {len(STATES) - 1}")
        if not hosts:
            return self._no_such_node(entity)
        answers = [answer_of(host, order.placement, self._source.marks) for host in hosts]
        return max(answers, key=lambda answer: answer.state == "failed")

    def _answer(self, touched: Sequence[int], refused: dict[str, str]) -> list[str]:
        """Answer the commands. Return the reasons of Slurm's refusals."""
        problems, now_s = list[str](), time.monotonic()
        items: list[Item] = []
        for entity in touched:
            order, answer = self._orders[entity], self._found(entity)
            why = next((refused[h] for h in self._hosts_of(entity) if h in refused), "")
            if why:
                answer = CommandProgress(
                    answer.state, why if answer.state == "failed" else f"but Slurm refuses: {why}"
                )
                problems.append(why)
            order.answered, order.refused_s = answer, now_s if why else -math.inf
            items.append(self._acked(entity, answer))
        self._stage(items, self._now_ns())
        return problems


def _user() -> str:
    """Return the user of the reservation: the one that runs scontrol."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
