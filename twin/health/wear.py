"""Wear: what is left of parts whose learned parameter drifts, with an interval.

May import the moment, records and the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twin.frame import F64, I32
from twin.health.now import Now
from twin.site import Site


@dataclass(frozen=True, slots=True)
class Remaining:
    """Time until a limit [n]: middle and 90 % interval; NaN: no drift that can be told from noise."""

    what: str  # such as cdu.ua
    table: str
    mid_s: F64
    lo_s: F64
    hi_s: F64


class Wear:
    """Trends of learned parameters."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def update(self, now: Now) -> None:
        """Take a point of each trend once in a while."""

    def remaining(self) -> tuple[Remaining, ...]:
        """What is left, by parameter."""
        return ()

    def evidence(self, table: str, entity: int) -> tuple[str, ...]:
        """What drifts at an entity and how long it lasts, in sentences with figures."""
        return ()

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Wear:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        return Wear(site)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
