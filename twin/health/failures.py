"""Failures: nodes that became unusable, since when, of what class, and when they were back.

May import verdicts, the fault book and the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import I32
from twin.health.fault_book import FaultBook
from twin.health.now import Now
from twin.health.records import FailureLog
from twin.health.verdicts import Verdicts
from twin.site import Site

CLASSES = ("off_bus", "memory", "link", "thermal", "power", "software", "silent", "taken_out", "other")


class Failures:
    """The log of failures, bounded, and which nodes are down now."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def update(self, now: Now, verdicts: Verdicts, book: FaultBook) -> None:
        """Begin and end failures by what is judged now; mark those with a cause in common."""

    def log(self) -> FailureLog:
        """All that are remembered."""
        none = np.zeros(0, np.int32)
        return FailureLog(
            none,
            none.astype(np.int64),
            none.astype(np.int64),
            none.astype(np.uint8),
            none.astype(np.bool_),
            CLASSES,
            0,
        )

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Failures:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        return Failures(site)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
