"""Failure timeline of a simulated fleet: every change by failures and repairs, in order of time.

A timeline is drawn ahead of the run. `TimelinePlayer` applies it to a plant, at the cost of one comparison in
a step in which nothing happens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Literal, NamedTuple

import numpy as np

from twin.catalogue import F64, I32, NS, U8, Bool
from twin.plant.disturbance import Disturbance
from twin.plant.faults import neutral_value
from twin.site import Site
from twin.telemetry import EntityReplaced, Event, FaultReported, MaintenanceBegun

Act = Literal["count", "hold", "free", "xid", "work", "replace"]


class TimelineEvent(NamedTuple):
    """One change at `time_s`.

    `count`: counter `field` of the truth grows by `value`. `hold`: field `field` of the Disturbance takes
    `value` on behalf of `cause`, until that cause's `free`. `xid`: GPU `at` reports code `value`. `work`:
    maintenance begins on node `at`, for `value` s. `replace`: another device is installed in slot `at` of
    `field`.
    """

    time_s: float
    act: Act
    field: str
    at: int | tuple[int, int]
    value: float = 0.0
    cause: int = 0


@dataclass(frozen=True, slots=True)
class FailureTable:
    """Failures by their beginning [k]: a node becomes unusable at `begin_s` and is back at `end_s`.

    `kind` is an index into the kinds of failure. `shows`: it has precursors, from `precursor_s` on (NaN
    without). `shared`: a common cause, which no precursor announces. `device`: the GPU or node that fails.
    `again`: a repair did not cure it.
    """

    node: I32
    kind: U8
    device: I32
    begin_s: F64
    end_s: F64
    shows: Bool
    precursor_s: F64
    shared: Bool
    again: Bool
    replaced: Bool

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True)
class FailureTimeline:
    """Failures and benign events of a site within `days`. `reboots`: (node, begin_s, end_s) of restarts."""

    days: float
    seed: int
    strength: float
    events: tuple[TimelineEvent, ...]  # by time
    failures: FailureTable
    lemons: Bool  # [n_node]
    reboots: tuple[tuple[int, float, float], ...] = ()

    def down(self, time_s: float, n_node: int) -> Bool:
        """Return the nodes that are unusable at an instant [n_node]."""
        f, out = self.failures, np.zeros(n_node, np.bool_)
        out[f.node[(f.begin_s <= time_s) & (time_s < f.end_s)]] = True
        return out


Place = tuple[str, int | tuple[int, int]]


class TimelinePlayer:
    """Applies a failure timeline to one site. It may run beside a campaign of other entities."""

    def __init__(self, site: Site, timeline: FailureTimeline) -> None:
        self.site, self.timeline = site, timeline
        self._next = 0  # event
        self._due_s = timeline.events[0].time_s if timeline.events else inf
        self._held: dict[Place, dict[int, float]] = {}  # bounded by what is wrong at once
        self._serial = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> TimelinePlayer:
        out = copy.copy(self)
        memo[id(self)] = out  # tidy: allow id because the memo of deepcopy is keyed by it
        out._held = {place: dict(held) for place, held in self._held.items()}
        return out

    def due(self, until_s: float) -> bool:
        """Return True if an event is due before an instant."""
        return self._due_s < until_s

    def apply(self, disturbance: Disturbance, time_s: float, dt_s: float, start_ns: int = 0) -> bool:
        """Set `disturbance` to what holds at the end of the step; what happened is added to its lists.

        True if what it holds has changed. `start_ns` is the instant of 0 s.
        """
        if not self._due_s < time_s + dt_s:
            return False
        events, moved = self.timeline.events, False
        while self._next < len(events) and events[self._next].time_s < time_s + dt_s:
            event = events[self._next]
            self._next += 1
            if event.act == "count":
                assert isinstance(event.at, int)
                disturbance.counts.append((event.field, event.at, int(event.value)))
            elif event.act in ("hold", "free"):
                self._hold(disturbance, event)
                moved = True
            else:
                disturbance.reports.append(self._reported(event, start_ns))
        self._due_s = events[self._next].time_s if self._next < len(events) else inf
        return moved

    def _hold(self, d: Disturbance, event: TimelineEvent) -> None:
        place = (event.field, event.at)
        held = self._held.setdefault(place, {})
        if event.act == "hold":
            held[event.cause] = event.value
        else:
            held.pop(event.cause, None)
        neutral = neutral_value(event.field)
        if not held:
            del self._held[place]
            getattr(d, event.field)[event.at] = neutral
            return
        values = [held[cause] for cause in sorted(held)]
        factor = event.field.endswith("_factor")
        getattr(d, event.field)[event.at] = prod(values) if factor else max(values)

    def _reported(self, event: TimelineEvent, start_ns: int) -> Event:
        at_ns = start_ns + round(event.time_s * NS)
        assert isinstance(event.at, int)
        if event.act == "xid":
            name = self.site.name("gpu", event.at)
            return FaultReported(table="gpu", name=name, code=int(event.value), at_ns=at_ns)
        name = self.site.name(event.field, event.at)
        if event.act == "work":
            until_ns = at_ns + round(event.value * NS)
            return MaintenanceBegun(
                id=f"work:{name}:{at_ns}", author="plant", table=event.field, names=(name,),
                until_ns=until_ns, reason="a planned restart",
            )  # fmt: skip
        self._serial += 1
        return EntityReplaced(table=event.field, name=name, serial=f"spare-{self._serial:06d}")
