"""Rates: how fast error counters grow, recently and usually, and how the telemetry of a device gaps.

May import the moment, the site and frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import F32, I32
from twin.health.now import Now
from twin.site import Site


class Rates:
    """Decayed growth per counter and device."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def update(self, now: Now) -> None:
        """Look at all counters."""

    def recent_per_h(self, key: str) -> F32:
        """Growth per hour over about the last ten minutes [n]; NaN where the counter is not heard."""
        return np.full(self.site.sizes[key.partition(".")[0]], np.nan, np.float32)

    def daily_per_h(self, key: str) -> F32:
        """The same over about the last day [n]."""
        return np.full(self.site.sizes[key.partition(".")[0]], np.nan, np.float32)

    def gap_pu(self, table: str) -> F32:
        """Share of the last hour in which a device that had spoken was silent [n]; NaN: it never spoke."""
        return np.full(self.site.sizes[table], np.nan, np.float32)

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Rates:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        return Rates(site)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
