"""Outlooks: future values of quantities from outside sources: weather, day-ahead prices, plans.

Models may use an outlook, and learn how far to trust it. The number and length of outlooks are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F64, I32, I64, NS, find_quantity
from twin.site import Site
from twin.telemetry import events as ev

MAX_OUTLOOKS = 5000  # a weather feed, prices and a plan for each of some thousand racks. source: estimate
MAX_VALUES = 2000  # of one outlook, a fortnight of ten-minute steps. source: estimate
MAX_ALL_VALUES = 2_000_000  # of all of them, 16 MB. source: estimate
MAX_STEP_S = 7 * 86_400.0
_NEVER_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Outlook:
    """External forecast: `values` [n_step] from `start_ns` on, each for `step_ns`; NaN = unknown."""

    quantity: str
    name: str  # full path; "" is the site
    author: str
    id: str
    start_ns: int
    step_s: float
    values: F64

    @property
    def step_ns(self) -> int:
        """Length of one step."""
        return round(self.step_s * NS)

    @property
    def end_ns(self) -> int:
        """Instant at which the last value ends."""
        return self.start_ns + self.step_ns * len(self.values)


@dataclass(frozen=True, slots=True)
class _Group:
    """The outlooks of one quantity side by side [k]; outlook i has `values[first[i]:][:length[i]]`."""

    place: I32
    start_ns: I64
    step_ns: I64
    first: I64
    length: I64
    values: F64


class Outlooks:
    """Table of the newest outlook of each quantity and entity."""

    def __init__(self) -> None:
        self._outlooks: OrderedDict[tuple[str, str], Outlook] = OrderedDict()  # the newest is last
        self._n_values = 0
        self._next_end_ns = _NEVER_NS  # none is over before; what is replaced may leave it too early
        self._site: Site | None = None  # that of the two below
        self._place: dict[tuple[str, str], int | None] = {}
        self._groups: dict[str, _Group] = {}

    def take(self, event: ev.OutlookTold, site: Site, now_ns: int = 0) -> str | None:
        """Store an outlook in place of the former one; return a reason if it is refused.

        An outlook of unknown values only withdraws the former one. With `now_ns` an expired one is refused.
        """
        what = find_quantity(event.quantity)
        if what is None:
            return f"{event.quantity[:200]} is not a quantity that can be forecast"
        if what.table == "job":
            return "jobs come and go in their slots; expected the sum of a plan, as site.gpu_demand_count"
        place = 0 if what.table == "site" and not event.name else site.entity(what.table, event.name)
        if place is None:
            return f"no {what.table} {event.name[:200]}" if event.name else f"names no {what.table}"
        if not (1 <= event.step_s <= MAX_STEP_S and 0 <= event.start_ns < 2**62):
            return (
                f"expected a step from a second to a week and an instant, got {event.step_s} s and "
                f"{event.start_ns}"
            )
        if not 0 < len(event.values) <= MAX_VALUES:
            return f"expected 1 to {MAX_VALUES} values, got {len(event.values)}"
        outside = [v for v in event.values if v is not None and not what.low <= v <= what.high]
        if outside:
            return f"expected values from {what.low:g} to {what.high:g} {what.unit}, got {outside[0]}"
        values = np.array([np.nan if v is None else v for v in event.values], np.float64)
        values.flags.writeable = False
        # By full path: what is unique today may be ambiguous on the site of tomorrow.
        name = "" if what.table == "site" else site.name(what.table, place)
        step_s = float(event.step_s)
        outlook = Outlook(event.quantity, name, event.author, event.id, int(event.start_ns), step_s, values)
        if outlook.end_ns <= now_ns:
            return (
                f"over already, {(now_ns - outlook.end_ns) / NS:.0f} s ago; expected values to come, UTC ns"
            )
        self._drop((event.quantity, name))
        if np.isfinite(values).any():
            self._keep(outlook)
        while len(self._outlooks) > MAX_OUTLOOKS or self._n_values > MAX_ALL_VALUES:
            self._drop(next(iter(self._outlooks)))
        return None

    def _keep(self, outlook: Outlook) -> None:
        self._outlooks[outlook.quantity, outlook.name] = outlook
        self._n_values += len(outlook.values)
        self._next_end_ns = min(self._next_end_ns, outlook.end_ns)
        self._groups.pop(outlook.quantity, None)

    def _drop(self, key: tuple[str, str]) -> None:
        gone = self._outlooks.pop(key, None)
        if gone is not None:
            self._n_values -= len(gone.values)
            self._groups.pop(gone.quantity, None)
            self._place.pop(key, None)

    def at(self, quantity: str, at_ns: int, site: Site) -> F64:
        """Value announced for this instant per entity [n]; NaN where there is none."""
        what = find_quantity(quantity)
        assert what is not None
        out = np.full(site.sizes[what.table], np.nan)
        if not self._outlooks:
            return out
        group = self._group(quantity, site)
        step = (at_ns - group.start_ns) // group.step_ns
        inside = (step >= 0) & (step < group.length)
        out[group.place[inside]] = group.values[group.first[inside] + step[inside]]
        return out

    def expire(self, now_ns: int) -> None:
        """Forget outlooks whose last step is over."""
        if now_ns < self._next_end_ns:
            return
        for key in [key for key, outlook in self._outlooks.items() if outlook.end_ns <= now_ns]:
            self._drop(key)
        self._next_end_ns = min((outlook.end_ns for outlook in self._outlooks.values()), default=_NEVER_NS)

    def entries(self) -> Iterator[Outlook]:
        """All outlooks, the most recent one last."""
        return iter(self._outlooks.values())

    def _group(self, quantity: str, site: Site) -> _Group:
        if self._site is not site:
            self._site, self._place, self._groups = site, {}, {}
        found = self._groups.get(quantity)
        if found is None:
            found = self._groups[quantity] = self._side_by_side(quantity, site)
        return found

    def _side_by_side(self, quantity: str, site: Site) -> _Group:
        """The outlooks of a quantity for entities that the site has."""
        some: list[Outlook] = []
        places: list[int] = []
        for key, outlook in self._outlooks.items():
            if key[0] != quantity:
                continue
            if key not in self._place:
                table = quantity.partition(".")[0]
                self._place[key] = 0 if table == "site" else site.entity(table, outlook.name)
            place = self._place[key]
            if place is not None:
                some.append(outlook)
                places.append(place)
        length = np.array([len(outlook.values) for outlook in some], np.int64)
        return _Group(
            np.array(places, np.int32),
            np.array([outlook.start_ns for outlook in some], np.int64),
            np.array([outlook.step_ns for outlook in some], np.int64),
            np.cumsum(length) - length,
            length,
            np.concatenate([outlook.values for outlook in some]) if some else np.empty(0),
        )

    def dump(self) -> list[Any]:
        """All outlooks as plain data and arrays, oldest first: the order decides which is forgotten."""
        return [
            {"quantity": o.quantity, "name": o.name, "author": o.author, "id": o.id,
             "start_ns": o.start_ns, "step_s": o.step_s, "values": o.values}
            for o in self._outlooks.values()
        ]  # fmt: skip

    def restore(self, data: list[Any]) -> None:
        """Restore the result of `dump`."""
        for key in list(self._outlooks):
            self._drop(key)
        self._next_end_ns = _NEVER_NS
        for one in data:
            values = np.array(one["values"], np.float64)
            values.flags.writeable = False
            self._keep(Outlook(**{**one, "values": values}))
