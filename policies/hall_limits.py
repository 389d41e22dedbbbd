"""Hall limits: the limits of feeders, cooling loops and contracts above the halls of a fleet, with reasons.

The place of a limit is one of `Carried`: a feeder, a loop, all racks together, or a feeder as it is fed now.
A contract is a load target, or the mean of a quarter hour, with the notice and ramps of `external_limits`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.power_capping import (
    LEAST_FLOW_PU,
    Carried,
    ExternalLimits,
    Settings,
    carried_by,
    columns_of,
    course_of,
    dead_feeders,
    outside,
    pairs_of,
    sums_w,
)
from twin.catalogue import F64, NS, Bool
from twin.contracts import Memory, View, machines_awaited, machines_unknown, measured
from twin.physics import COOLANTS, heat_rate_w_per_k, heat_w
from twin.site import Site, guaranteed_heat_w
from twin.telemetry import GOOD

WATER = COOLANTS["water"]  # of a facility loop
# Beyond its nominal rise of temperature by this factor, a loop whose flow is low has more heat than its flow
# is for: pumps that follow the load keep the rise. source: estimate
RISE_PU = 1.05
BACK_S = (
    6000.0  # in which a loop without flow is believed to have it again: valves hide that. source: estimate
)
MOST_UNSEEN_S = 120.0  # between two calls, for which lost heat is given back. source: estimate
WHOLE_PU = 0.999  # of its heat: a loop that takes less has lost some


@dataclass(frozen=True, slots=True)
class HallLimits:
    """Limits of all places, `left_w` what of each is for halls [n_place] (inf: no limit), and why; `beside_w`
    [n_rack]: what racks that are no halls may draw; `machine_assumed` [n_loop]: one counts as lost;
    `machines_awaited` [n_loop]: how many are lost has not been reported since the hub was away"""

    carried: Carried
    left_w: F64
    beside_w: F64
    outside: ExternalLimits
    machine_assumed: Bool
    machines_awaited: Bool

    def kind(self, site: Site, place: int) -> str:
        """One of feeder, loop and contract; "" for a place that halls do not share."""
        first, loop = self.carried.feeder(0), self._first_loop(site)
        if place >= loop + site.sizes["loop"]:
            return "contract"
        if place >= loop:
            return "loop"
        return "feeder" if first <= place < first + self.carried.n_feeder else ""

    def shared_places(self, site: Site, is_hall: Bool) -> list[int]:
        """The places with a limit that halls share, and the feeders above them that have no power."""
        pairs, first = self.carried.pairs, self.carried.feeder(0)
        bound = np.zeros(len(self.left_w), np.bool_)
        bound[pairs.place[is_hall[pairs.rack]]] = True
        bound &= np.isfinite(self.carried.limit_w)
        feeder, rack = site.served_racks()
        bound[first + feeder[is_hall[rack]]] = True
        found: list[int] = np.flatnonzero(bound).tolist()
        return [place for place in found if self.kind(site, place)]

    def why(self, site: Site, place: int) -> str:
        """The reason for a limit below what the site file states of a place; "" for none."""
        first = self.carried.pairs.drawn
        if place == self.carried.whole:
            return self.outside.site_why
        if first <= place < first + self.carried.n_feeder:
            said = self.outside.feeder_why[place - first]
            return said if self.carried.limit_w[place] >= self.outside.feeder_w[place - first] else ""
        loop = place - self._first_loop(site)
        if 0 <= loop < site.sizes["loop"]:
            limit_w = self.carried.limit_w[place]
            if self.machines_awaited[loop] and limit_w >= guaranteed_heat_w(site)[loop]:
                return "how many of its machines are lost has not been reported since this hub was away"
            part_pu = limit_w / site.design.loop_heat_w[loop]
            why = f"it can take {100 * part_pu:.0f} % of its nominal heat now" if part_pu < WHOLE_PU else ""
            unknown = " (how many of its machines are lost is unknown: one of several counts as lost)"
            return why + unknown if why and self.machine_assumed[loop] else why
        return ""

    def full(self, site: Site, place: int) -> str:
        """Words for a place that is full."""
        why, name = self.why(site, place), self.carried.name(site, place)
        if self.kind(site, place) == "loop":
            return f"{name} is full{f', as {why}' if why else ''}"
        if not why:
            return f"{name} is full"
        return f"the load is limited{'' if place == self.carried.whole else f' at {name}'} by {why}"

    def _first_loop(self, site: Site) -> int:
        return self.carried.n_rack + self.carried.n_feeder + site.sizes["cdu"]


def hall_limits(
    view: View, terms: Settings, failover: bool, is_hall: Bool, draws_w: F64, memory: Memory
) -> tuple[HallLimits, Memory]:
    """The limits, with all that is no hall taken off, and what to remember of them.

    `draws_w` [n_rack]: what each hall draws; memory: the columns `COURSE_COLUMNS` and `lost_w` of loops, and
    `seen_ns`.
    """
    site = view.site
    carried = carried_by(view, pairs_of(site, dead_feeders(view), failover))
    beside_w = np.where(is_hall, 0.0, np.nan_to_num(view.worst("rack.power_w").astype(np.float64)))
    all_w = np.where(is_hall, draws_w, beside_w)
    found, course = outside(
        view, terms, course_of(memory), float(all_w.sum()), _of_feeders_w(view, carried, all_w)
    )
    seen_ns = int(memory["seen_ns"])
    lost_w = _lost_w(view, memory["lost_w"], max(view.now_ns - seen_ns, 0) / NS if seen_ns else 0.0)
    awaited = machines_awaited(view)
    most_w = site.design.loop_heat_w - lost_w
    most_w = np.where(awaited, np.fmin(guaranteed_heat_w(site), most_w), most_w)
    carried = _cooled(site, carried, most_w).within(found.site_w, found.feeder_w)
    left_w = carried.limit_w - sums_w(carried, beside_w)
    assumed = machines_unknown(view) & ~awaited & (view.site.machines_of_loop > 1.0)
    found_now = HallLimits(carried, left_w, beside_w, found, assumed, awaited)
    return found_now, columns_of(course) | {"lost_w": lost_w}


def loop_heat_w(view: View) -> F64:
    """The heat that each loop takes by its flow and temperatures [n_loop]; NaN where these are not
    reported."""
    flow, supply, back = (
        measured(view, key) for key in ("loop.flow_lpm", "loop.supply_temp_c", "loop.return_temp_c")
    )
    return heat_w(WATER, flow, supply, back)


def _of_feeders_w(view: View, carried: Carried, of_rack_w: F64) -> F64:
    """The load of feeders [n_feeder]: by their meters, else by their racks."""
    first = carried.pairs.drawn
    sum_w = sums_w(carried, of_rack_w)[first : first + carried.n_feeder]
    metered = view.quality("feeder.power_w") == GOOD
    return np.where(metered, view.believed("feeder.power_w"), sum_w).astype(np.float64)


def _cooled(site: Site, carried: Carried, most_w: F64) -> Carried:
    """With loops that take so much heat at most [n_loop]."""
    limit_w, first = carried.limit_w.copy(), carried.n_rack + carried.n_feeder + site.sizes["cdu"]
    mine = slice(first, first + len(most_w))
    limit_w[mine] = np.fmin(limit_w[mine], np.maximum(most_w, 0.0))
    return carried._replace(limit_w=limit_w)


def _lost_w(view: View, before_w: F64, since_s: float) -> F64:
    """The heat that loops of halls lack the flow for [n_loop].

    A flow that is low, with a rise of temperature above the nominal one, is all that there is: it takes its
    heat at the nominal rise. Once halls have given way the rise says nothing about what the flow could be:
    what is lost is given back slowly, until the rise shows again that it is too much. While flow or
    temperatures is not reported, nothing is given back, and of a time in which the hub was away
    `MOST_UNSEEN_S` counts.
    """
    site, design = view.site, view.site.design
    whole_w, nominal_lpm = design.loop_heat_w, design.loop_flow_lpm
    keys = ("loop.flow_lpm", "loop.supply_temp_c", "loop.return_temp_c")
    flow, supply, back = (view.believed(key).astype(np.float64) for key in keys)
    reporting = np.logical_and.reduce([view.quality(key) == GOOD for key in keys])
    reporting &= (np.diff(site.halls_of_loop.start) > 0) & (nominal_lpm > 0)
    rate = heat_rate_w_per_k(WATER, nominal_lpm, np.nan_to_num((supply + back) / 2))
    nominal_k = np.divide(whole_w, rate, out=np.full(len(whole_w), np.inf), where=rate > 0)
    short = reporting & (flow < LEAST_FLOW_PU * nominal_lpm) & (back - supply > RISE_PU * nominal_k)
    can_w = np.where(short, np.nan_to_num(heat_w(WATER, flow, supply, supply + nominal_k), posinf=0.0), 0.0)
    given_back_w = np.where(reporting, whole_w * min(since_s, MOST_UNSEEN_S) / BACK_S, 0.0)
    return np.where(short, np.maximum(whole_w - can_w, 0.0), np.maximum(before_w - given_back_w, 0.0))
