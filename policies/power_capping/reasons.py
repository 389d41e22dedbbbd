"""Reasons of power_cap: the place whose budget is full, with its figures.

A reason keeps its figures until they are clearly off, and gives their instant: the journal writes all caps of
a reason again when its text changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.power_capping.budgets import Carried, gain_of, sums_w
from policies.power_capping.demand import Wants
from policies.power_capping.external_limits import ExternalLimits
from policies.power_capping.unheard import Unheard
from policies.power_capping.unpowered import unpowered_gpus
from twin.catalogue import F64, I64, Bool, text
from twin.contracts import Memory, View

FIGURES = {"why_ns": "i8", "why_want_w": "f8", "why_drawn_w": "f8", "why_limit_w": "f8"}  # of the memory
# Of the limit: by which the expected power, or the limit itself, leaves those of a reason before they are
# renewed. source: estimate
WANT_OFF_PU, LIMIT_OFF_PU = 0.05, 0.01
MOST_REASONS = 16  # places that are named; the caps below the others say so in one sentence


class PlaceFigures(NamedTuple):
    """Of each place, W [n_place]: what its racks may want, what they draw, and its limit."""

    want_w: F64
    drawn_w: F64
    limit_w: F64


class CappedPower(NamedTuple):
    """Power that GPUs want and draw, W [n_gpu], and that racks draw beside them, W [n_rack]."""

    want: Wants
    drawn_w: F64
    other_w: F64


def place_loads(
    view: View, carried: Carried, power: CappedPower, short: Bool, left_w: F64, margin_pu: float
) -> PlaceFigures:
    """Return the figures of all places; `left_w` [n_place] is what each has for its GPUs.

    Where the demand fits (not `short`), what GPUs may want is the most that they can draw.
    """
    site, want, gain = view.site, power.want, gain_of(view.site)

    def of_places(gpu_w: F64) -> F64:
        return sums_w(carried, site.sum_by_rack("gpu", gpu_w) * gain)

    demand_w, most_w = (of_places(np.where(want.capped, x, 0.0)) for x in (want.demand_w, want.most_w))
    planned_w = (1.0 - margin_pu) * carried.limit_w
    above_w = np.maximum(np.where(short, demand_w, most_w) - left_w, 0.0)
    drawn_w = sums_w(carried, power.other_w) + of_places(power.drawn_w)
    return PlaceFigures(planned_w + above_w, drawn_w, carried.limit_w)


def kept_figures(memory: Memory, loads: PlaceFigures, places: I64, now_ns: int, same_layout: bool) -> Memory:
    """Return the figures of these places for the memory: the earlier ones, or those of now if they are off.

    They are in the first rows of columns of GPUs, as the sums of places are. A place beyond the last row is
    given none.
    """
    n = len(memory["why_ns"])
    out: Memory = {name: np.zeros(n, memory[name].dtype) for name in FIGURES}
    at = places[places < n]
    now = {"why_want_w": loads.want_w, "why_drawn_w": loads.drawn_w, "why_limit_w": loads.limit_w}
    limit_w = loads.limit_w[at]
    off = (memory["why_ns"][at] == 0) | (not same_layout)
    off |= np.abs(loads.want_w[at] - memory["why_want_w"][at]) > WANT_OFF_PU * limit_w
    off |= np.abs(limit_w - memory["why_limit_w"][at]) > LIMIT_OFF_PU * limit_w
    out["why_ns"][at] = np.where(off, now_ns, memory["why_ns"][at])
    for name, values in now.items():
        out[name][at] = np.where(off, values[at], memory[name][at])
    return out


@dataclass(frozen=True, slots=True)
class LimitReasons:
    """Reasons why GPUs are capped [n_gpu]: the place whose budget is full, or an external limit."""

    view: View
    carried: Carried
    limits: ExternalLimits
    unheard: Unheard
    held_by: I64
    short: Bool
    shaved: Bool
    margin_pu: float

    def binding_places(self, capped: Bool) -> tuple[I64, I64]:
        """Return (all places that hold a capped GPU back, those of them that are named), ascending."""
        many = np.bincount(self.held_by[capped] + 1, minlength=len(self.short) + 1)[1:]  # by place
        found = np.flatnonzero(many)
        return found, np.sort(found[np.argsort(-many[found], kind="stable")[:MOST_REASONS]])

    def of(self, place: int, figures: Memory) -> str:
        """One sentence; `figures` as `kept_figures` returns them."""
        what = "the demand" if self.short[place] else "the maximum power of GPUs"
        name, why = self.carried.name(self.view.site, place), ""
        first, n = self.carried.pairs.drawn, self.carried.n_feeder
        if name == "site":
            name, why = "the site", self.limits.site_why
        elif (
            first <= place < first + n and self.carried.limit_w[place] >= self.limits.feeder_w[place - first]
        ):
            why = self.limits.feeder_why[place - first]
        more = self._figures(place, figures) + self._unheard(place)
        if why:
            return f"{what} of {name} is more than it may draw now: {why}{more}"
        lost = " if the other side fails" if self._stands_in(place) else ""
        return f"{what} below {name} is more than its budget{lost}{more}"

    def _figures(self, place: int, figures: Memory) -> str:
        """Return the power that is expected, drawn, allowed and to be given; "" where none is remembered."""
        if place >= len(figures["why_ns"]) or not (at_ns := int(figures["why_ns"][place])):
            return ""
        want_w, drawn_w, limit_w = (
            float(figures[f"why_{name}_w"][place]) for name in ("want", "drawn", "limit")
        )
        planned_w = (1.0 - self.margin_pu) * limit_w
        want, drawn, limit, give = (
            text.quantity(x, "W") for x in (want_w, drawn_w, limit_w, want_w - planned_w)
        )
        may = "expected" if self.short[place] else "possible"
        kept = f" less {100 * self.margin_pu:.3g} %" if self.margin_pu else ""
        return (
            f"; {want} {may}, {drawn} drawn, limit {limit}{kept}, {give} to give "
            f"(at {text.utc(at_ns, '%H:%M:%S')} UTC)"
        )

    def _stands_in(self, place: int) -> bool:
        """Return True for a feeder that carries more if a side fails than it does now."""
        carried, pairs = self.carried, self.carried.pairs
        feeder = place - carried.n_rack
        if pairs.drawn == carried.n_rack or not 0 <= feeder < carried.n_feeder:
            return False
        alone, now = (pairs.share[pairs.place == at].sum() for at in (place, pairs.drawn + feeder))
        return bool(alone > now)

    def _unheard(self, place: int) -> str:
        """Return a text on the GPUs below a place that never reported, and their assumed power; "" for none.

        Those that count with their most go before those that a meter above tells of.
        """
        pairs, unheard = self.carried.pairs, self.unheard
        below = np.zeros(self.carried.n_rack, np.bool_)
        below[pairs.rack[pairs.place == place]] = True
        mine = below[self.view.site.rack_of_gpu] & ~unpowered_gpus(self.view)
        for kind, counted in (
            (unheard.at_most, "their maximum, as no meter above them reports"),
            (unheard.metered, "the power that the meters above them leave"),
        ):
            if (never := mine & kind).any():
                gpus = f"{never.sum():,} of its {mine.sum():,} GPUs"
                return f"; {gpus} have never reported and count with {counted}"
        return ""
