"""Groups: the CDUs of one decision, with their bounds and present set points."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from policies.cooling_setpoint.margins import CONTROL, SUPPLY
from policies.cooling_setpoint.sections import LoopCdus, good, last_good
from twin.catalogue import F64, I32
from twin.contracts import View
from twin.physics import dew_point_c
from twin.site import Site

SET_POINT = "cdu.supply_temp_setpoint_c"
DEW_K = 3.0  # of the supply above the hall's dew point; domain.md B has 2-3 K
_WHICH = "`racktwin policy explain cooling_setpoint` says which"
WHY = {
    "best": "GPUs and cooling together draw the least at this supply temperature",
    "heat": "cold enough that every GPU and rack keeps its margin under the load forecast",
    "back": f"a fault or a limit: back to the safe value, or colder ({_WHICH})",
    "hold": f"a needed reading is unknown or contradicts another: no warmer until it is known ({_WHICH})",
    "dew": "warm enough for the dew point of the hall",
}
CODES = tuple(WHY)


def groups_of(site: Site) -> tuple[LoopCdus, ...]:
    """Return the CDUs of each loop, and each CDU without a known loop, if they cool anything."""
    return site.derived("cdu_groups", lambda: _groups(site))


def numbers_of(site: Site) -> dict[str, I32]:
    """Return the group number of every row of a table; -1 for none."""
    return site.derived("cdu_group_numbers", lambda: _numbers(site))


def _numbers(site: Site) -> dict[str, I32]:
    out = {
        table: np.full(site.sizes[table], -1, np.int32) for table in ("cdu", "rack", "node", "gpu", "loop")
    }
    for group in groups_of(site):
        places = (("cdu", group.cdus), ("rack", group.racks), ("node", group.nodes), ("gpu", group.gpus))
        for table, rows in places:
            out[table][rows] = group.number
        if group.loop >= 0:
            out["loop"][group.loop] = group.number
    return out


def _groups(site: Site) -> tuple[LoopCdus, ...]:
    used = np.isin(np.arange(site.sizes["cdu"]), site.cdu_of_rack)
    places = [(loop, np.flatnonzero((site.loop_of_cdu == loop) & used)) for loop in range(site.sizes["loop"])]
    places += [(-1, np.array([cdu])) for cdu in np.flatnonzero((site.loop_of_cdu < 0) & used)]
    out = list[LoopCdus]()
    for loop, cdus in places:
        cooled = np.isin(site.cdu_of_rack, cdus)
        masks = cooled, cooled[site.rack_of_gpu], cooled[site.rack_of_node]
        racks, gpus, nodes = (np.flatnonzero(mask).astype(np.int32) for mask in masks)
        halls = np.unique(np.append(site.hall_of_rack[racks], site.hall_of_cdu[cdus]))
        halls = halls[halls >= 0].astype(np.int32)
        if len(cdus):
            out.append(LoopCdus(len(out), loop, cdus.astype(np.int32), racks, gpus, nodes, halls))
    return tuple(out)


def standing_c(memory: Mapping[str, np.ndarray], group: LoopCdus) -> float:
    """Return the coldest set point of a group: as requested, otherwise the BMS's own; inf if neither is
    known."""
    want_c = memory["want_c"][group.cdus]
    stands_c = np.where(np.isnan(want_c), memory["base_c"][group.cdus], want_c)
    known = stands_c[np.isfinite(stands_c)]
    return float(known.min()) if len(known) else np.inf


def dew_points_c(view: View) -> F64:
    """Return the dew point of each hall [n_hall]; NaN if unknown."""
    out: F64 = dew_point_c(good(view, "hall.cold_aisle_temp_c"), good(view, "hall.cold_aisle_rh_pu"))
    return out


def bounds_c(view: View, group: LoopCdus, dew_c: F64) -> tuple[float, float]:
    """Return (lowest set point for the dew point of the halls and the envelope, safe value) of a group.

    Where the dew point is not known, nothing goes below the safe value.
    """
    envelope, cdus = view.envelope(CONTROL), group.cdus
    safe_c, low_c = float(envelope.safe[cdus].min()), float(envelope.low[cdus].max())
    wet_c = float(dew_c[group.halls].max(initial=-np.inf))  # NaN where one is
    return (max(low_c, safe_c) if np.isnan(wet_c) else max(low_c, wet_c + DEW_K)), safe_c


def own_c(view: View) -> F64:
    """Return the set points in force [n_cdu]; the coolant's temperature where none is reported."""
    out = last_good(view, SET_POINT)
    out = np.where(np.isnan(out), last_good(view, "cdu.supply_temp_setpoint_final_c"), out)
    out = np.where(np.isnan(out), good(view, "cdu.supply_temp_c"), out)
    racks, cdu = good(view, SUPPLY), view.site.cdu_of_rack
    known = np.isfinite(racks) & (cdu >= 0)
    warmest = np.full(len(out), -np.inf)
    np.maximum.at(warmest, cdu[known], racks[known])
    return np.where(np.isnan(out) & (warmest > -np.inf), warmest, out)
