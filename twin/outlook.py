"""Outlooks: values of quantities at coming times, told from outside: weather, day-ahead prices, plans.

Someone who knows better than the past says what will be; models may use it, and learn how far to trust it.
Bounded in number and length. May import events, frames, quantities and the site.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np

from twin import events as ev
from twin.frame import F64, NS
from twin.quantities import find_quantity
from twin.site import Site

MAX_OUTLOOKS = 5000  # a weather feed, prices and a plan for each of some thousand racks. source: estimate
MAX_VALUES = 2000  # a fortnight of ten-minute steps. source: estimate


class Outlooks:
    """The newest outlook of each quantity and entity."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], ev.OutlookTold] = OrderedDict()
        self._index: dict[tuple[str, str], int] = {}
        self._site: Site | None = None

    def tell(self, event: ev.OutlookTold, site: Site) -> str | None:
        """Take an outlook, in place of the one before; the reason why not."""
        what = find_quantity(event.quantity)
        if what is None:
            return f"{event.quantity} is no quantity that can be forecast"
        if self._place(event, site) is None:
            return f"no {what.table} {event.name}"
        if not (0 < event.step_s <= 7 * 86_400 and 0 <= event.start_ns < 2**62):
            return f"expected a step of up to a week and an instant, got {event.step_s} and {event.start_ns}"
        if not 0 < len(event.values) <= MAX_VALUES:
            return f"expected 1 to {MAX_VALUES} values, got {len(event.values)}"
        outside = [v for v in event.values if v is not None and not what.low <= v <= what.high]
        if outside:
            return f"expected values from {what.low:g} to {what.high:g} {what.unit}, got {outside[0]}"
        key = (event.quantity, event.name)
        # As a snapshot would give it back: a whole number is a float all the same.
        self._told[key] = msgspec.convert(msgspec.to_builtins(event), ev.OutlookTold)
        self._told.move_to_end(key)
        while len(self._told) > MAX_OUTLOOKS:
            self._told.popitem(last=False)
        self._site = None
        return None

    def at(self, quantity: str, at_ns: int, site: Site) -> F64:
        """What was told for this instant per entity [n]; NaN where nothing was, or the outlook is over."""
        what = find_quantity(quantity)
        assert what is not None
        out = np.full(site.sizes[what.table], np.nan)
        if not self._told:
            return out
        self._look_up(site)
        for key, place in self._index.items():
            if key[0] == quantity:
                event = self._told[key]
                step = int((at_ns - event.start_ns) // round(event.step_s * NS))
                if 0 <= step < len(event.values):
                    value = event.values[step]
                    out[place] = np.nan if value is None else value
        return out

    def expire(self, now_ns: int) -> None:
        """Forget outlooks whose last step is over."""
        gone = [
            key
            for key, e in self._told.items()
            if e.start_ns + round(len(e.values) * e.step_s * NS) <= now_ns
        ]
        for key in gone:
            del self._told[key]
            self._index.pop(key, None)

    def _look_up(self, site: Site) -> None:
        if self._site is site:
            return
        found = {key: self._place(event, site) for key, event in self._told.items()}
        self._index = {key: place for key, place in found.items() if place is not None}
        self._site = site

    @staticmethod
    def _place(event: ev.OutlookTold, site: Site) -> int | None:
        table = event.quantity.partition(".")[0]
        return 0 if table == "site" and not event.name else site.entity(table, event.name)

    def dump(self) -> list[Any]:
        """All outlooks, oldest first."""
        return [msgspec.to_builtins(event) for event in self._told.values()]

    def restore(self, data: list[Any]) -> None:
        """Take over what `dump` gave."""
        told = [msgspec.convert(one, ev.OutlookTold) for one in data]
        self._told = OrderedDict(((e.quantity, e.name), e) for e in told)
        self._site = None
