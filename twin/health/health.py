"""Site health: the level of each part with its reasons, failed nodes, lemons, and wear.

Faults are taken in at each tick; all parts are judged every few seconds, and at once where a device reports
something grave. In a storm of faults a look is spread over two ticks. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twin.catalogue import NS, Bool
from twin.contracts import GRAVITY, SAME_S, FailureLog, Fault, Health, NodeFeatures, Windows
from twin.diagnosis import Diagnosis
from twin.estimation import Estimator
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.failures import Failures, failed_nodes
from twin.health.features import node_features
from twin.health.lemons import Lemons
from twin.health.nvlinks import Nvlinks
from twin.health.rates import Rates
from twin.health.recurring import Recurring
from twin.health.rules import DeviceRecords
from twin.health.thermal_history import ThermalHistory
from twin.health.verdicts import Verdicts
from twin.health.wear import Wear
from twin.site import Site
from twin.telemetry import (
    EntityReplaced,
    EntityState,
    EpochChanged,
    Event,
    FaultColumns,
    FaultReported,
    JobSlots,
    NvlinksCounted,
    OldOfNew,
    SiteChanged,
    State,
    entries,
    part,
    scalar,
)

EVERY_S, SOONEST_S = 10.0, 1.0  # between looks; after something grave was reported
DEVICES, MOST_FAULTS = ("gpu", "node", "link"), 10_000  # whose faults are remembered, and how many
# Faults of one tick from which on the second half of a look waits for the next tick; source: estimate
STORM = 2000
SEVERITY_OF = tuple(GRAVITY)
FORMAT = 2


class HealthState(EntityState):
    """State of the site's health."""

    format: int = scalar(FORMAT)
    looked_ns: int = scalar(0)
    _grave: bool = scalar(False)  # something wants to be judged before the next look is due
    _features: list[Any] = scalar([])  # names and values, as of the last look
    # (table, entity, kind) of faults of devices that the diagnosis reports, or did lately: [ns, gravity]
    _faults: dict[tuple[str, int, str], list[int]] = entries()
    book: FaultBook = part()
    rates: Rates = part()
    recurring: Recurring = part()
    lemons: Lemons = part()
    wear: Wear = part()
    nvlinks: Nvlinks = part()
    thermal: ThermalHistory = part()
    verdicts: Verdicts = part()
    failures: Failures = part()

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self.book, self.rates = FaultBook(site), Rates(site)
        self.recurring, self.nvlinks = Recurring(site), Nvlinks(site)
        self.lemons, self.wear = Lemons(site), Wear(site)
        self.verdicts, self.failures = Verdicts(site), Failures(site)
        self.thermal = ThermalHistory(site)
        self._arrived: list[FaultColumns] = []  # since the last tick
        self._counted: list[NvlinksCounted] = []

    def take(self, event: Event, jobs: JobSlots, now_ns: int) -> None:
        """Note an event that is about to be applied."""
        if isinstance(event, FaultReported):
            self.take_faults([event])
            return
        if isinstance(event, NvlinksCounted):
            self._counted.append(event)
            return
        if isinstance(event, EntityReplaced | SiteChanged):  # these faults are of the device that leaves
            self._grave |= self.book.receive(self._take_arrived(), now_ns, jobs)
            self.nvlinks.take(self._counted, now_ns)
            self._counted = []
        if isinstance(event, EpochChanged) and event.returned:
            self.book.take_returns(event.returned, now_ns)
        self.failures.take(event, jobs, now_ns)
        self.lemons.take(event, jobs, now_ns)

    def take_faults(self, faults: Sequence[FaultReported]) -> None:
        """Note faults, in order of arrival."""
        self._arrived.append(FaultColumns.of(faults))

    def _take_arrived(self) -> FaultColumns:
        arrived, self._arrived = FaultColumns.joined(self._arrived), []
        return arrived

    def update(
        self, state: State, estimator: Estimator, diagnosis: Diagnosis, jobs: JobSlots, windows: Windows
    ) -> None:
        """Update the health after the diagnosis of a tick. Never raises for bad or missing data."""
        # The first look is whole: models that run seldom have no second one for minutes
        faults = self._take_arrived()
        halved = len(faults) >= STORM or (self.site.is_large and self.looked_ns > 0)
        if faults:
            self._grave |= self.book.receive(faults, state.now_ns, jobs)
            self.nvlinks.receive(faults, state.now_ns)
        if self._counted:
            self.nvlinks.take(self._counted, state.now_ns)
            self._counted = []
        since_s = (state.now_ns - self.looked_ns) / NS
        rest = self.whole_ns < self.looked_ns  # of a look that was halved
        if self.looked_ns and not rest and since_s < (SOONEST_S if self._grave else EVERY_S) - 1e-3:
            return
        now = HealthContext(
            self.site, state, estimator, diagnosis, jobs, windows, since_s if self.looked_ns else 0.0
        )
        records = DeviceRecords(
            self.book, self.rates, self.lemons, self.wear, self.recurring, self.nvlinks, self.thermal
        )
        if not rest:
            self._judge_parts(now, records)
        if rest or not halved:
            self._judge_nodes(now, records)

    @property
    def whole_ns(self) -> int:
        """Return the instant of the last complete look, ns."""
        return self.failures.now_ns

    def _judge_parts(self, now: HealthContext, records: DeviceRecords) -> None:
        """Run the first half of a look: the level of each part."""
        self.looked_ns, self._grave = now.now_ns, False
        self._note(now.diagnosis.faults, now.now_ns)
        self.book.update(now)
        self.rates.update(now)
        self.recurring.update(now, self.rates, self.failures.broken(self.book), self.book)
        self.wear.update(now)
        self.nvlinks.fade(now.now_ns)
        self.thermal.update(now)
        self.verdicts.update(now, records)

    def _judge_nodes(self, now: HealthContext, records: DeviceRecords) -> None:
        """Run the second half of a look: failed nodes, lemons and features."""
        self.failures.update(now, self.verdicts, self.book)
        failures = self.failures.log()
        self.lemons.update(now, self.book, failures, self.failures.suspects())
        features = node_features(now, records, self.verdicts, failures)
        self._features = [features.names, features.values]

    def _note(self, faults: Sequence[Fault], now_ns: int) -> None:
        """Keep the faults of devices while their consequences belong to the same incident."""
        since_ns = now_ns - round(SAME_S * NS)
        for key in [key for key, (seen_ns, _) in self._faults.items() if seen_ns < since_ns]:
            del self._faults[key]
        for fault in faults:
            key = fault.table, fault.entity, fault.kind
            if fault.signal or fault.table not in DEVICES:
                continue
            if key in self._faults or len(self._faults) < MOST_FAULTS:
                self._faults[key] = [now_ns, GRAVITY[fault.severity]]

    def reported(self, faults: Sequence[Fault]) -> list[Fault]:
        """Return the faults that the diagnosis reports, and those of devices that ended within the last
        hour.

        What a fault leaves behind is of the same incident: the rules that are signs of it hold their matches
        longer.
        """
        now = {(f.table, f.entity, f.kind) for f in faults}
        ended = [
            Fault(kind, table, entity, "", SEVERITY_OF[gravity], 0.0, seen_ns, ())
            for (table, entity, kind), (seen_ns, gravity) in self._faults.items()
            if (table, entity, kind) not in now
        ]
        return [*faults, *ended]

    def health(self, part: str) -> Health:
        """Return the verdicts on all parts of a kind. Raises KeyError for an unknown kind."""
        return self.verdicts.health(part)

    def log(self) -> FailureLog:
        """Return the failed nodes."""
        return self.failures.log()

    def failed_nodes(self, diagnosis: Diagnosis) -> Bool:
        """Return the nodes that have failed by verdict, themselves or one of their GPUs [n_node].

        A node whose GPUs fell silent, without a code, has not: it may have lost no more than its telemetry.
        """
        log, down = self.log(), np.zeros(self.site.sizes["node"], np.bool_)
        down[log.node[log.end_ns == 0]] = True
        return failed_nodes(self.site, diagnosis, self.verdicts, self.book, down)[0]

    def features(self) -> NodeFeatures:
        """Return the failure features as of the last evaluation."""
        names, values = self._features or ((), np.zeros((self.site.sizes["node"], 0), np.float32))
        return NodeFeatures(tuple(names), values)

    def remapped(self, site: Site, old_of_new: OldOfNew) -> HealthState:
        """Return the health state for a changed site, which the next tick judges again."""
        out = HealthState(site)
        out.adopt(self, old_of_new)
        out.looked_ns, out._grave, out._features = 0, False, []
        return out

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; what another format kept is found again."""
        if data.get("format") == 1:
            data = _from_1(data)
        if data.get("format") == FORMAT:
            super().restore(data)


def _from_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot of format 1, with verdicts by part and trends as lists, in format 2."""
    verdicts, wear = dict(data["verdicts"]), dict(data["wear"])
    for k, name in enumerate(("level", "since_ns", "action", "sure_pu", "lowered")):
        verdicts[name] = {part: columns[k] for part, columns in verdicts["health"].items()}
    verdicts["bits"] = {part: bits for part, (_, bits) in verdicts["reported"].items()}
    names = ("index", "value", "reference")
    wear["points"] = {k: dict(zip(names, v, strict=True)) for k, v in wear["points"].items()}
    return {**data, "format": FORMAT, "verdicts": verdicts, "wear": wear}
