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
from policies.power_capping.unpowered import unpowered_gpus
from policies.power_capping.unreported import UnreportedGpus
from twin.catalogue import F64, I64, Bool, text
from twin.contracts import Memory, View
from twin.site import Site

# Columns of racks. Each row is a slot for one named place, whichever rack it belongs to.
FIGURES = {"why_place": "i8", "why_ns": "i8", "why_want_w": "f8", "why_limit_w": "f8", "why_short": "i1"}
# Of the limit: by which the expected power, or the limit itself, leaves those of a reason before they are
# renewed. source: estimate
WANT_OFF_PU, LIMIT_OFF_PU = 0.05, 0.01
OTHERS = -3  # in place of a place: those that are not named
MOST_REASONS = 16  # places that are named; the caps below the others say so in one sentence


class PlaceFigures(NamedTuple):
    """Of each place [n_place]: what its racks may want and its limit, W, and if the demand alone is too
    much."""

    want_w: F64
    limit_w: F64
    short: Bool

    def row(self, place: int, now_ns: int) -> tuple[int, int, float, float, int]:
        """Return the values of a slot in the order of FIGURES."""
        want_w, limit_w = float(self.want_w[place]), float(self.limit_w[place])
        return place, now_ns, want_w, limit_w, int(self.short[place])


def place_figures(
    site: Site, carried: Carried, want: Wants, left_w: F64, short: Bool, margin_pu: float
) -> PlaceFigures:
    """Return the figures of all places; `left_w` [n_place] is what each has for its GPUs.

    Where the demand fits (not `short`), what GPUs may want is the most that they can draw.
    """
    demand_w, most_w = (
        sums_w(carried, site.sum_by_rack("gpu", want.of_capped(x)) * gain_of(site))
        for x in (want.demand_w, want.most_w)
    )
    above_w = np.maximum(np.where(short, demand_w, most_w) - left_w, 0.0)
    return PlaceFigures((1.0 - margin_pu) * carried.limit_w + above_w, carried.limit_w, short)


def kept_figures(memory: Memory, found: PlaceFigures, named: I64, now_ns: int, same_layout: bool) -> Memory:
    """Return the figures of the named places for the memory: the earlier ones, or those of now if they are
    off.

    A place beyond the last slot is given none.
    """
    names, used = list(FIGURES), np.flatnonzero(memory["why_ns"])
    earlier = {row[0]: row for row in zip(*(memory[name][used].tolist() for name in names), strict=True)}
    rows = []
    for place in named[: len(memory["why_ns"])].tolist():
        now, before = found.row(place, now_ns), earlier.get(place) if same_layout else None
        rows.append(now if before is None or _is_off(before, now) else before)
    kept: Memory = {name: np.zeros_like(memory[name]) for name in names}
    for name, column in zip(names, zip(*rows, strict=True), strict=True) if rows else ():
        kept[name][: len(rows)] = column
    return kept


def _is_off(before: tuple[int, int, float, float, int], now: tuple[int, int, float, float, int]) -> bool:
    """Return True if figures of a slot are no longer those of now."""
    (*_, before_w, before_limit_w, before_short), (*_, want_w, limit_w, short) = before, now
    off = abs(want_w - before_w) > WANT_OFF_PU * limit_w or short != before_short
    return off or abs(limit_w - before_limit_w) > LIMIT_OFF_PU * limit_w


@dataclass(frozen=True, slots=True)
class LimitReasons:
    """Reasons why GPUs are capped [n_gpu]: the place whose budget is full, or an external limit."""

    view: View
    carried: Carried
    limits: ExternalLimits
    unreported: UnreportedGpus
    held_by: I64
    short: Bool
    shaved: Bool
    margin_pu: float

    def binding_places(self, capped: Bool) -> tuple[I64, int]:
        """Return (the named ones of the places that hold a capped GPU back, ascending, the number of others).

        The places that hold back most GPUs are named.
        """
        many = np.bincount(self.held_by[capped] + 1, minlength=len(self.short) + 1)[1:]  # by place
        found = np.flatnonzero(many)
        named = np.sort(found[np.argsort(-many[found], kind="stable")[:MOST_REASONS]])
        return named, len(found) - len(named)

    def sentences(self, named: I64, n_other: int, figures: Memory) -> dict[int, str]:
        """Return one sentence per named place, and one for all others; `figures` are of `kept_figures`."""
        return {place: self._sentence(place, figures) for place in named.tolist()} | {
            OTHERS: f"below {n_other:,} more places the demand is more than the budget: "
            "`racktwin power show` lists them"
        }

    def _sentence(self, place: int, figures: Memory) -> str:
        what = "the demand" if self.short[place] else "the maximum power of GPUs"
        name, why = self.carried.name(self.view.site, place), ""
        first, n = self.carried.pairs.drawn, self.carried.n_feeder
        if name == "site":
            name, why = "the site", self.limits.site_why
        elif (
            first <= place < first + n and self.carried.limit_w[place] >= self.limits.feeder_w[place - first]
        ):
            why = self.limits.feeder_why[place - first]
        more = self._figures(place, figures) + self._unreported(place)
        if why:
            return f"{what} of {name} is more than it may draw now: {why}{more}"
        lost = " if the other side fails" if self._stands_in(place) else ""
        return f"{what} below {name} is more than its budget{lost}{more}"

    def _figures(self, place: int, figures: Memory) -> str:
        """Return the power that is expected, allowed and to be given; "" where none is remembered."""
        at = np.flatnonzero((figures["why_place"] == place) & (figures["why_ns"] > 0))
        if not len(at):
            return ""
        at_ns, short = int(figures["why_ns"][at[0]]), bool(figures["why_short"][at[0]])
        want_w, limit_w = (float(figures[f"why_{name}_w"][at[0]]) for name in ("want", "limit"))
        planned_w = (1.0 - self.margin_pu) * limit_w
        want, limit, give = (text.quantity(x, "W") for x in (want_w, limit_w, want_w - planned_w))
        kept = f" less {100 * self.margin_pu:.3g} %" if self.margin_pu else ""
        return (
            f"; {want} {'expected' if short else 'possible'}, limit {limit}{kept}, {give} to cut "
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

    def _unreported(self, place: int) -> str:
        """Return a text on the GPUs below a place that never reported, and their assumed power; "" for none.

        Those that count with their most go before those that a meter above measures.
        """
        pairs, unreported = self.carried.pairs, self.unreported
        below = np.zeros(self.carried.n_rack, np.bool_)
        below[pairs.rack[pairs.place == place]] = True
        mine = below[self.view.site.rack_of_gpu] & ~unpowered_gpus(self.view)
        for kind, counted in (
            (unreported.at_most, "their maximum, as no meter above them reports"),
            (unreported.metered, "the power that the meters above them leave"),
        ):
            if (never := mine & kind).any():
                gpus = f"{never.sum():,} of its {mine.sum():,} GPUs"
                return f"; {gpus} have never reported and count with {counted}"
        return ""
