"""Coincidence: how much less than the sum of their peaks GPUs drew together, so that it can be shared out.

Jobs that take turns never draw their peaks at once. Of every place the peak of the sum is remembered beside
the peaks of its GPUs; what lies between the two, and what GPUs that are not held have above their peaks, is
given to those who want more, less a risk that the sum may rise by, and no more of it than a breaker bears for
ever. Who wants more is thought to want it with all others
at once, so that no raise leads over a budget by itself. Where a place carried more than was planned, what was
learned of it is forgotten, and its caps add up to its budget again.
"""

from __future__ import annotations

import zlib

import numpy as np

from policies.power_capping.budgets import Carried, gain_of, sums_w
from policies.power_capping.demand import RESERVE_PU, Wants
from twin.catalogue import F64
from twin.contracts import Memory
from twin.site import Site

RISK_PU = 0.02  # by which a sum may rise above what it was at most of late. source: estimate
# Time constant with which a sum is forgotten, slower than the peaks of GPUs: that all of many jobs draw at
# once is rare. source: estimate
TOGETHER_S = 3600.0
# Of a budget, by which caps may come to more than it. A breaker holds 1/0.8 of its continuous load for ever.
# source: US National Electrical Code, 80 % of the rating for continuous loads
MOST_PU = 0.25


def spared_w(
    site: Site, carried: Carried, want: Wants, left_w: F64, memory: Memory, since_s: float, most_pu: float
) -> tuple[F64, Memory]:
    """(watts that each place may give on top of what is left for its GPUs [n_place], memory `sum_w`,
    `layout`).

    Sums are kept in the first rows of the columns of GPUs, and begin anew with every other layout of places.
    A place beyond the last row is given nothing.
    """
    n, gain = min(len(left_w), site.sizes["gpu"]), gain_of(site)

    def of_places(gpu_w: F64) -> F64:
        return sums_w(carried, site.sum_by_rack("gpu", np.where(want.capped, gpu_w, 0.0)) * gain)

    now_w = of_places(want.power_w)
    # What was cut cannot peak as it did, and is no coincidence
    bound_w = np.where(memory["cap_w"] > 0, memory["cap_w"], np.inf)
    peaks_w = of_places(np.maximum(np.minimum(want.peak_w, bound_w), want.power_w))
    # What is kept free above peaks is for the few that will need it
    may_w = np.minimum(want.demand_w, (1.0 + RESERVE_PU) * want.peak_w)
    apart_w = of_places(np.maximum(np.minimum(may_w, bound_w), want.power_w))
    layout = _layout(site, carried)
    known = (memory["layout"] == layout).all()
    sum_w = apart_w.copy()
    if known:
        before_w = memory["sum_w"][:n] * np.exp(-since_s / TOGETHER_S)
        sum_w[:n] = np.where((now_w > left_w)[:n], apart_w[:n], np.clip(before_w, now_w[:n], peaks_w[:n]))
    most_w = most_pu * np.where(np.isfinite(carried.limit_w), carried.limit_w, 0.0)
    spared = np.clip(apart_w - (1.0 + RISK_PU) * sum_w, 0.0, most_w)
    kept = np.zeros(site.sizes["gpu"])
    kept[:n] = sum_w[:n]
    return spared, {"sum_w": kept, "layout": np.full(site.sizes["gpu"], layout, np.int64)}


def _layout(site: Site, carried: Carried) -> int:
    """A number of the places and what each carries; never 0."""
    pairs, sum_of = carried.pairs, zlib.crc32(site.spec_hash.encode())
    for part in (pairs.place, pairs.rack, pairs.share):
        sum_of = zlib.crc32(np.ascontiguousarray(part).tobytes(), sum_of)
    return sum_of + 1
