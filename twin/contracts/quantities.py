"""Quantities that a forecast may describe: signals of the catalogue, and sums of them.

No meter reads the heat of a CDU, the power of a whole site or the demand for GPUs, but operators plan with
these sums.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twin.catalogue import F64, NS, Bool
from twin.contracts.contracts import View
from twin.physics import COOLANTS, heat_w
from twin.telemetry import GOOD, watched_ns

# From which on the number of lost machines of a loop is unknown: 36 of its periods. source: estimate
MACHINES_S = 3600.0
# In which it reports again once the daemon was away: three of its periods. source: estimate
RETURN_S = 300.0


def good(view: View, key: str) -> F64:
    """Present readings of a signal [n]; NaN where there is none that is good and fresh."""
    return np.where(view.quality(key) == GOOD, view.believed(key), np.nan).astype(np.float64)


def machines_unknown(view: View) -> Bool:
    """Loops with stated machines of which nobody reported for `MACHINES_S` how many are lost [n_loop]."""
    silent: Bool = view.age_s("loop.machine_out_count") > MACHINES_S
    return silent & np.isfinite(view.site.machines_of_loop)


def machines_awaited(view: View) -> Bool:
    """Loops whose lost machines are unknown only since the daemon was away [n_loop].

    This stays so for `RETURN_S` after its return, and not where nobody had reported them before.
    """
    unknown = machines_unknown(view)
    if not unknown.any():
        return unknown
    gaps, age_s = view.failures().unwatched_ns, view.age_s("loop.machine_out_count")
    if not len(gaps) or view.now_ns - int(gaps[-1, 1]) > round(RETURN_S * NS):
        return np.zeros(len(age_s), np.bool_)
    received_ns = view.now_ns - np.round(np.where(np.isfinite(age_s), age_s, 0.0) * NS).astype(np.int64)
    watched_age_s = (watched_ns(view.now_ns, gaps) - watched_ns(received_ns, gaps)) / NS
    awaited: Bool = unknown & np.isfinite(age_s) & (watched_age_s <= MACHINES_S)
    return awaited


def machines_pu(view: View) -> F64:
    """Chillers and pumps of each loop that are in service, of all [n_loop]; 1 where no machines are stated.

    The last reported number of lost ones stands. While it is unknown, one of several counts as lost; a single
    one does not, as silence alone is no failure. A cooler that the diagnosis holds for failed is lost.
    """
    out = np.nan_to_num(view.believed("loop.machine_out_count").astype(np.float64))
    spare = machines_unknown(view) & (view.site.machines_of_loop > 1.0)
    out = np.where(spare, np.maximum(out, 1.0), out)
    for fault in view.faults():
        if fault.kind == "cooler_failed" and fault.table == "loop":
            out[fault.entity] = max(out[fault.entity], 1.0)
    kept = 1.0 - out / np.nan_to_num(view.site.machines_of_loop, nan=np.inf)
    return np.maximum(kept, 0.0)


def _cdu_heat_w(view: View) -> F64:
    """Heat into the coolant of each CDU; from its racks where it does not meter its own flow."""
    coolant = COOLANTS[view.site.file.coolant]
    own = heat_w(
        coolant, good(view, "cdu.flow_lpm"), good(view, "cdu.supply_temp_c"), good(view, "cdu.return_temp_c")
    )
    of_rack = heat_w(
        coolant,
        good(view, "rack.flow_lpm"),
        good(view, "rack.supply_temp_c"),
        good(view, "rack.return_temp_c"),
    )
    served = (view.site.cdu_of_rack >= 0) & view.site.design.liquid
    cdu_of, n = view.site.cdu_of_rack[served], view.site.sizes["cdu"]
    racks = np.full(n, np.nan)
    some = np.bincount(cdu_of, minlength=n) > 0
    racks[some] = np.bincount(cdu_of, weights=of_rack[served], minlength=n)[some]
    # A flow of nothing beside racks that do get coolant is a meter that is not there.
    return np.where(np.isfinite(own) & (own > 0), own, racks)


def _cdu_power_w(view: View) -> F64:
    """Power of the racks that each CDU serves; NaN while one of them is not known."""
    now, site = good(view, "rack.power_w"), view.site
    served = site.cdu_of_rack >= 0
    n = site.sizes["cdu"]
    total = np.bincount(site.cdu_of_rack[served], weights=now[served], minlength=n).astype(np.float64)
    total[np.bincount(site.cdu_of_rack[served], minlength=n) == 0] = np.nan
    return total


def _site_power_w(view: View) -> F64:
    """Sum over the racks that ever reported; NaN while one of them is silent, as a part is not the whole."""
    ever, now = np.isfinite(view.believed("rack.power_w")), good(view, "rack.power_w")
    return np.array([now[ever].sum() if ever.any() else np.nan])


def _gpu_demand_count(view: View) -> F64:
    """GPUs that run jobs, and those for which jobs wait."""
    return good(view, "site.gpu_running_count") + good(view, "site.gpu_pending_count")


def _nobody_measures(table: str) -> Callable[[View], F64]:
    """Of what is only ever forecast."""
    return lambda view: np.full(view.site.sizes[table], np.nan)


_COMPUTE: dict[str, Callable[[View], F64]] = {
    "node.failure_pu": _nobody_measures("node"),
    "site.node_failure_count": _nobody_measures("site"),
    "job.compute_pu": _nobody_measures("job"),
    "job.least_energy_w": _nobody_measures("job"),
    "cdu.power_w": _cdu_power_w,
    "cdu.heat_w": _cdu_heat_w,
    "site.power_w": _site_power_w,
    "site.gpu_demand_count": _gpu_demand_count,
}


def measured(view: View, key: str) -> F64:
    """Present values of a quantity per entity [n] float64; NaN where unknown, and where people work."""
    values = _COMPUTE[key](view) if key in _COMPUTE else good(view, key)
    under_work = view.maintenance(key.partition(".")[0])
    return values if under_work is None else np.where(under_work, np.nan, values)
