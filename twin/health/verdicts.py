"""Verdicts: the rules of health put together: a level, an action and the evidence for each part.

May import rules, the fault book, rates, lemons, wear and the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import I32
from twin.health.fault_book import FaultBook
from twin.health.lemons import Lemons
from twin.health.levels import PAIRED, PARTS, UNKNOWN
from twin.health.now import Now
from twin.health.rates import Rates
from twin.health.records import Evidence, Health
from twin.health.wear import Wear
from twin.site import Site


class Verdicts:
    """Levels of all parts as last judged."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._health = {part: _unknown(part, site) for part in PARTS}

    def update(self, now: Now, book: FaultBook, rates: Rates, lemons: Lemons, wear: Wear) -> None:
        """Judge all parts."""

    def health(self, part: str) -> Health:
        """The verdicts on a kind of part."""
        return self._health[part]

    def evidence(self, part: str, index: int) -> tuple[Evidence, ...]:
        """What speaks for a verdict, the gravest first; what is missing is told too."""
        return ()

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Verdicts:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        return Verdicts(site)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""


def _unknown(part: str, site: Site) -> Health:
    n = site.sizes[PARTS[part]] * (2 if part in PAIRED else 1)
    none = np.zeros(n, np.uint8)
    return Health(
        part, np.full(n, UNKNOWN, np.uint8), np.zeros(n, np.int64), none, np.full(n, np.nan, np.float32), none
    )
