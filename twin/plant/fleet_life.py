"""Months of a simulated fleet: failures with and without precursors, benign noise, repairs and lemons.

`draw_life` draws all of it ahead from a seed; `FleetLife` plays it, one comparison in a step in which nothing
happens. May import the life as data, its drawing, disturbances, events and the site.
"""

from __future__ import annotations

import copy
from math import inf, prod
from typing import Any

from twin.events import EntityReplaced, Event, FaultReported, MaintenanceBegun
from twin.frame import NS
from twin.plant.disturbance import Disturbance
from twin.plant.failure_classes import DAY_S
from twin.plant.faults import neutral_value
from twin.plant.life import KINDS, Fallen, Life, Stroke
from twin.plant.life_draws import draw_failing, draw_shared, fallen_of
from twin.plant.life_strokes import Writer
from twin.site import Site

__all__ = ["KINDS", "Fallen", "FleetLife", "Life", "Stroke", "draw_life"]

Place = tuple[str, int | tuple[int, int]]


def draw_life(site: Site, seed: int, days: float, strength: float = 1.0) -> Life:
    """What befalls `site` in so many days; `strength` scales precursors and nothing else.

    The same failures and the same noise come at every strength. Raises ValueError for no days or a strength
    outside 0..10.
    """
    if not days > 0.0 or not 0.0 <= strength <= 10.0:
        raise ValueError(f"expected more than 0 days and a strength in 0..10, got {days:g} and {strength:g}")
    single, lemons = draw_failing(site, seed, days)
    failing = single + draw_shared(site, seed, days, single)
    writer = Writer(site, seed, strength)
    down: dict[int, list[tuple[float, float]]] = {}
    for number, one in enumerate(failing):
        writer.fail(one)
        writer.show(number, one)
        down.setdefault(one.node, []).append((one.begin_s, one.end_s))
    for feeder, begin_s, end_s in sorted({(f.feeder, f.begin_s, f.end_s) for f in failing if f.feeder >= 0}):
        writer.hold("feeder_ok", feeder, 0.0, begin_s, end_s)
    writer.benign(days, down)
    within = sorted(
        (s for s in writer.strokes if s.time_s < days * DAY_S), key=lambda s: (s.time_s, s.act, s.cause)
    )
    reboots = tuple(sorted(writer.reboots, key=lambda r: r[1]))
    return Life(days, seed, strength, tuple(within), fallen_of(failing), lemons, reboots)


class FleetLife:
    """A life being played on one site. It may act beside a campaign of other entities."""

    def __init__(self, site: Site, life: Life) -> None:
        self.site, self.life = site, life
        self._next = 0  # stroke
        self._due_s = life.strokes[0].time_s if life.strokes else inf
        self._held: dict[Place, dict[int, float]] = {}  # bounded by what is wrong at once
        self._serial = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> FleetLife:
        out = copy.copy(self)
        memo[id(self)] = out  # tidy: allow id because the memo of deepcopy is keyed by it
        out._held = {place: dict(held) for place, held in self._held.items()}
        return out

    def due(self, until_s: float) -> bool:
        """Whether anything happens before an instant."""
        return self._due_s < until_s

    def apply(self, disturbance: Disturbance, time_s: float, dt_s: float, start_ns: int = 0) -> bool:
        """Set `disturbance` to what holds at the end of the step; what happened is added to its lists.

        True if what it holds has changed. `start_ns` is the instant of 0 s.
        """
        if not self._due_s < time_s + dt_s:
            return False
        strokes, moved = self.life.strokes, False
        while self._next < len(strokes) and strokes[self._next].time_s < time_s + dt_s:
            stroke = strokes[self._next]
            self._next += 1
            if stroke.act == "count":
                assert isinstance(stroke.at, int)
                disturbance.counts.append((stroke.field, stroke.at, int(stroke.value)))
            elif stroke.act in ("hold", "free"):
                self._hold(disturbance, stroke)
                moved = True
            else:
                disturbance.told.append(self._told(stroke, start_ns))
        self._due_s = strokes[self._next].time_s if self._next < len(strokes) else inf
        return moved

    def _hold(self, d: Disturbance, stroke: Stroke) -> None:
        place = (stroke.field, stroke.at)
        held = self._held.setdefault(place, {})
        if stroke.act == "hold":
            held[stroke.cause] = stroke.value
        else:
            held.pop(stroke.cause, None)
        neutral = neutral_value(stroke.field)
        if not held:
            del self._held[place]
            getattr(d, stroke.field)[stroke.at] = neutral
            return
        values = [held[cause] for cause in sorted(held)]
        factor = stroke.field.endswith("_factor")
        getattr(d, stroke.field)[stroke.at] = prod(values) if factor else max(values)

    def _told(self, stroke: Stroke, start_ns: int) -> Event:
        at_ns = start_ns + round(stroke.time_s * NS)
        assert isinstance(stroke.at, int)
        if stroke.act == "xid":
            name = self.site.name("gpu", stroke.at)
            return FaultReported(table="gpu", name=name, code=int(stroke.value), at_ns=at_ns)
        name = self.site.name(stroke.field, stroke.at)
        if stroke.act == "work":
            until_ns = at_ns + round(stroke.value * NS)
            return MaintenanceBegun(
                id=f"work:{name}:{at_ns}", author="plant", table=stroke.field, names=(name,),
                until_ns=until_ns, reason="a planned restart",
            )  # fmt: skip
        self._serial += 1
        return EntityReplaced(table=stroke.field, name=name, serial=f"spare-{self._serial:06d}")
