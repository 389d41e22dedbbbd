"""Site health: the level of each part with its reasons, failed nodes, lemons, and wear.

Faults are taken in at each tick; all parts are judged every few seconds, and at once where a device reports
something grave. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.catalogue import I32, NS
from twin.contracts import FailureLog, Health, NodeFeatures, Windows
from twin.diagnosis import Diagnosis
from twin.estimation import Estimator
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.failures import Failures
from twin.health.features import node_features
from twin.health.lemons import Lemons
from twin.health.rates import Rates
from twin.health.recurring import Recurring
from twin.health.verdicts import Verdicts
from twin.health.wear import Wear
from twin.site import Site
from twin.telemetry import EntityReplaced, EntityState, Event, FaultReported, JobSlots, SiteChanged, State

EVERY_S, SOONEST_S = 10.0, 1.0  # between looks; after something grave was reported
FORMAT = 1
_PARTS = ("book", "rates", "recurring", "lemons", "wear", "verdicts", "failures")


class HealthState:
    """All that is known of the health of a site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.book, self.rates = FaultBook(site), Rates(site)
        self.recurring = Recurring(site)
        self.lemons, self.wear = Lemons(site), Wear(site)
        self.verdicts, self.failures = Verdicts(site), Failures(site)
        self.looked_ns = 0
        self._grave = False  # something wants to be judged before the next look is due
        self._heard: list[FaultReported] = []  # since the last tick
        self._features = _no_features(site)

    def take(self, event: Event, jobs: JobSlots, now_ns: int) -> None:
        """Note an event that is about to be applied."""
        if isinstance(event, FaultReported):
            self._heard.append(event)
            return
        if isinstance(event, EntityReplaced | SiteChanged):  # what was heard was of the device that leaves
            self._grave |= self.book.hear(self._heard, now_ns, jobs)
            self._heard = []
        self.failures.take(event, jobs, now_ns)
        self.lemons.take(event, jobs, now_ns)

    def update(
        self, state: State, estimator: Estimator, diagnosis: Diagnosis, jobs: JobSlots, windows: Windows
    ) -> None:
        """Look at this tick, after the diagnosis. Raises nothing for bad or missing data."""
        if self._heard:
            self._grave |= self.book.hear(self._heard, state.now_ns, jobs)
            self._heard = []
        since_s = (state.now_ns - self.looked_ns) / NS
        if self.looked_ns and since_s < (SOONEST_S if self._grave else EVERY_S) - 1e-3:
            return
        now = HealthContext(
            self.site, state, estimator, diagnosis, jobs, windows, since_s if self.looked_ns else 0.0
        )
        self.looked_ns, self._grave = state.now_ns, False
        self.book.look(now)
        self.rates.update(now)
        self.recurring.update(now, self.rates, self.failures.broken(self.book), self.book)
        self.wear.update(now)
        self.verdicts.update(now, self.book, self.rates, self.lemons, self.wear, self.recurring)
        self.failures.update(now, self.verdicts, self.book)
        failures = self.failures.log()
        self.lemons.update(now, self.book, failures, self.failures.suspects())
        self._features = node_features(
            now, self.book, self.rates, self.verdicts, self.lemons, failures, self.recurring
        )

    def health(self, part: str) -> Health:
        """Verdicts on all parts of a kind. Raises KeyError for an unknown kind."""
        return self.verdicts.health(part)

    def log(self) -> FailureLog:
        """Nodes that failed."""
        return self.failures.log()

    def features(self) -> NodeFeatures:
        """Return the failure features as of the last evaluation."""
        return self._features

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot: what was wrong with the old one is not true of it."""
        for name in _PARTS:
            getattr(self, name).forget(table, entity)

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> HealthState:
        """Return the health state for a changed site."""
        out = HealthState(site)
        for name in _PARTS:
            part = getattr(out, name)
            if isinstance(part, EntityState):
                part.adopt(getattr(self, name), old_of_new)
            else:
                setattr(out, name, getattr(self, name).remapped(site, old_of_new))
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {"format": FORMAT, "looked_ns": self.looked_ns, "grave": self._grave,
                "features": [list(self._features.names), self._features.values],
                **{name: getattr(self, name).dump() for name in _PARTS}}  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; what another format kept is found again."""
        if data.get("format") != FORMAT:
            return
        self.looked_ns, self._grave = int(data["looked_ns"]), bool(data["grave"])
        names, values = data["features"]
        self._features = NodeFeatures(tuple(names), np.array(values))
        for name in _PARTS:
            if name in data:  # a version before knew nothing of it: it begins anew
                getattr(self, name).restore(data[name])


def _no_features(site: Site) -> NodeFeatures:
    return NodeFeatures((), np.zeros((site.sizes["node"], 0), np.float32))
