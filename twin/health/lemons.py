"""Lemons: nodes that fail more than others, by seven signals over 28 days.

May import events, jobs, the fault book, records and the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.events import Event
from twin.frame import F32, I32, Bool
from twin.health.fault_book import FaultBook
from twin.health.now import Now
from twin.health.records import FailureLog
from twin.jobs import Jobs
from twin.site import Site

SIGNALS = (
    "excluded",
    "xids",
    "tickets",
    "out_of_service",
    "multi_node_failures",
    "single_node_failures",
    "single_node_failure_pu",
)


class Lemons:
    """Daily counts of the signals per node, and who is a lemon."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def take(self, event: Event, jobs: Jobs, now_ns: int) -> None:
        """Note what an event says of nodes, before it is applied: a job that ends still has its nodes."""

    def update(self, now: Now, book: FaultBook, failures: FailureLog) -> None:
        """Judge once in a while."""

    def is_lemon(self) -> Bool:
        """Nodes that are lemons [n_node]."""
        return np.zeros(self.site.sizes["node"], np.bool_)

    def signals(self) -> F32:
        """The seven signals over the last 28 days [n_node, 7]."""
        return np.zeros((self.site.sizes["node"], len(SIGNALS)), np.float32)

    def evidence(self, node: int) -> tuple[str, ...]:
        """Why a node is one, in sentences with figures."""
        return ()

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Lemons:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        return Lemons(site)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
