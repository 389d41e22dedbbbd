"""Quantities: what a forecast may be about: the signals of the catalogue, and sums that follow from them.

Nobody measures the heat that a CDU takes up, the power of a whole site or the GPUs that are wanted; operators
plan by them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twin.catalogue import F64
from twin.contracts.contracts import View
from twin.physics import COOLANTS, heat_w
from twin.telemetry import GOOD


def good(view: View, key: str) -> F64:
    """Present readings of a signal [n]; NaN where there is none that is good and fresh."""
    return np.where(view.quality(key) == GOOD, view.believed(key), np.nan).astype(np.float64)


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
