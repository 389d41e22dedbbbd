"""Groups: the CDUs that one decision is for, with their bounds and the set points that stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from policies.cooling_setpoint.margins import SUPPLY, good
from twin.catalogue import F64, I32
from twin.contracts import View
from twin.physics import dew_point_c
from twin.site import Site

CONTROL, SET_POINT = "cdu.supply_temp_target_c", "cdu.supply_temp_setpoint_c"
DEW_K = 3.0  # of the supply above the hall's dew point; domain.md B has 2-3 K
WHY = {
    "best": "GPUs and cooling together draw the least at this supply temperature",
    "heat": "cold enough that every GPU and rack keeps its margin under the load forecast",
    "back": "something is wrong: back to the safe value, or colder where it is",
    "hold": "something is not known: it stays where it is",
    "dew": "warm enough for the dew point of the hall",
}
CODES = tuple(WHY)


@dataclass(frozen=True, slots=True)
class LoopCdus:
    """The CDUs that one decision is for: those of a loop, as the loop follows the coldest; or one without."""

    loop: int  # -1: none is known
    cdus: I32
    racks: I32
    gpus: I32
    nodes: I32


def groups_of(site: Site) -> tuple[LoopCdus, ...]:
    """The CDUs of each loop, and each CDU of which no loop is known; none that cools nothing."""
    return site.derived("cdu_groups", lambda: _groups(site))


def _groups(site: Site) -> tuple[LoopCdus, ...]:
    used = np.isin(np.arange(site.sizes["cdu"]), site.cdu_of_rack)
    places = [(loop, np.flatnonzero((site.loop_of_cdu == loop) & used)) for loop in range(site.sizes["loop"])]
    places += [(-1, np.array([cdu])) for cdu in np.flatnonzero((site.loop_of_cdu < 0) & used)]
    out = []
    for loop, cdus in places:
        cooled = np.isin(site.cdu_of_rack, cdus)
        masks = cooled, cooled[site.rack_of_gpu], cooled[site.rack_of_node]
        racks, gpus, nodes = (np.flatnonzero(mask).astype(np.int32) for mask in masks)
        if len(cdus):
            out.append(LoopCdus(loop, cdus.astype(np.int32), racks, gpus, nodes))
    return tuple(out)


def standing_c(memory: Mapping[str, np.ndarray], group: LoopCdus) -> float:
    """The coldest set point of a group: as asked for, else the BMS's own; inf while neither is known."""
    want_c = memory["want_c"][group.cdus]
    stands_c = np.where(np.isnan(want_c), memory["base_c"][group.cdus], want_c)
    known = stands_c[np.isfinite(stands_c)]
    return float(known.min()) if len(known) else np.inf


def bounds_c(view: View, group: LoopCdus) -> tuple[float, float]:
    """(lowest set point for the dew point of the halls and the envelope, safe value) of a group.

    Where the dew point is not known, nothing goes below the safe value.
    """
    site, envelope, cdus = view.site, view.envelope(CONTROL), group.cdus
    safe_c = float(envelope.safe[cdus].min())
    dew_c: F64 = dew_point_c(good(view, "hall.cold_aisle_temp_c"), good(view, "hall.cold_aisle_rh_pu"))
    halls = np.unique(np.append(site.hall_of_rack[group.racks], site.hall_of_cdu[cdus]))
    halls = halls[halls >= 0]
    low_c = float(envelope.low[cdus].max())
    if not np.isfinite(dew_c[halls]).all():
        return max(low_c, safe_c), safe_c
    return max(low_c, float(dew_c[halls].max(initial=-np.inf)) + DEW_K), safe_c


def own_c(view: View) -> F64:
    """The set points in force [n_cdu]; where none is told, how warm the coolant is."""
    out = good(view, SET_POINT)
    out = np.where(np.isnan(out), good(view, "cdu.supply_temp_setpoint_final_c"), out)
    out = np.where(np.isnan(out), good(view, "cdu.supply_temp_c"), out)
    racks, cdu = good(view, SUPPLY), view.site.cdu_of_rack
    known = np.isfinite(racks) & (cdu >= 0)
    warmest = np.full(len(out), -np.inf)
    np.maximum.at(warmest, cdu[known], racks[known])
    return np.where(np.isnan(out) & (warmest > -np.inf), warmest, out)
