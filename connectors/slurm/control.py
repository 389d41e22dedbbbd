"""Slurm control: orders on nodes that `scontrol` carries out, and their acknowledgements."""

from __future__ import annotations

from typing import Generic

from connectors.orders import Kept, SinkContext
from connectors.slurm.command import CommandProgress
from connectors.slurm.source import SlurmSource
from twin.catalogue import ActuationError, ConnectorError
from twin.site import Site
from twin.telemetry import CommandAcked


class SlurmControl(Generic[Kept]):
    """Orders by node, of one control of the Slurm that `source` reads."""

    name: str
    controls: tuple[str, ...]
    enforces_safe = False  # Slurm keeps a node as it is, whoever lives

    def __init__(self, site: Site, source: SlurmSource, context: SinkContext) -> None:
        self._site, self._source = site, source
        self._stage, self._may_act, self._now_ns = context.stage, context.may_act, context.now_ns
        self._orders: dict[int, Kept] = {}  # no more than the site has nodes
        self.counts = {"calls": 0, "nodes": 0, "old": 0, "refused": 0}

    async def _call(self, words: list[str], nodes: int) -> str | None:
        """Run scontrol; its words where it fails. Raises ActuationError when we may act no longer."""
        if not self._may_act():
            raise ActuationError("another daemon leads now")
        self.counts["calls"] += 1
        try:
            await self._source.ask("scontrol", *words)
        except ConnectorError as error:
            return str(error)
        self.counts["nodes"] += nodes
        return None

    def _acked(self, entity: int, answer: CommandProgress) -> CommandAcked:
        name = self._site.name("node", entity)
        return self._orders[entity].acked(self.controls[0], name, answer.state, answer.detail)

    def _no_such_node(self, entity: int) -> CommandProgress:
        name = self._site.name("node", entity)
        return CommandProgress("failed", f"Slurm has no node for {name}; name it in jobs.slurm.node_names")
