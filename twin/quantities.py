"""Quantities: what a forecast may be about: the signals of the catalogue, and sums that follow from them.

Nobody measures the heat that a CDU takes up, the power of a whole site or the GPUs that are wanted; operators
plan by them. May import the catalogue, contracts, the site, the state and the physics of liquids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twin.contracts import View
from twin.frame import F64
from twin.physics.liquid import COOLANTS, heat_w
from twin.signals import find_signal
from twin.state import GOOD


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a number is: its table, unit and physical bounds."""

    table: str
    unit: str
    low: float
    high: float


def good(view: View, key: str) -> F64:
    """Present readings of a signal [n]; NaN where there is none that is good and fresh."""
    return np.where(view.quality(key) == GOOD, view.value(key), np.nan).astype(np.float64)


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
    ever, now = np.isfinite(view.value("rack.power_w")), good(view, "rack.power_w")
    return np.array([now[ever].sum() if ever.any() else np.nan])


def _gpu_demand_count(view: View) -> F64:
    """GPUs that run jobs, and those for which jobs wait."""
    return good(view, "site.gpu_running_count") + good(view, "site.gpu_pending_count")


def _nobody_measures(table: str) -> Callable[[View], F64]:
    """Of what is only ever forecast."""
    return lambda view: np.full(view.site.sizes[table], np.nan)


_DERIVED: dict[str, tuple[Quantity, Callable[[View], F64]]] = {
    # The chance that a node fails within the horizon, and the number of nodes of the site that do
    "node.failure_pu": (Quantity("node", "1", 0.0, 1.0), _nobody_measures("node")),
    "site.node_failure_count": (Quantity("site", "count", 0.0, 1e6), _nobody_measures("site")),
    # The share of a job's time that waits for the clock of its GPUs: what a cap costs it
    "job.compute_pu": (Quantity("job", "1", 0.0, 1.0), _nobody_measures("job")),
    "cdu.power_w": (Quantity("cdu", "W", 0.0, 1e8), _cdu_power_w),
    "cdu.heat_w": (Quantity("cdu", "W", -1e7, 1e8), _cdu_heat_w),
    "site.power_w": (Quantity("site", "W", 0.0, 1e10), _site_power_w),
    "site.gpu_demand_count": (Quantity("site", "count", 0.0, 4e6), _gpu_demand_count),
}


def find_quantity(key: str) -> Quantity | None:
    """A signal of the catalogue or a derived quantity."""
    if key in _DERIVED:
        return _DERIVED[key][0]
    signal = find_signal(key)
    if signal is None or signal.kind == "counter":
        return None
    return Quantity(signal.table, signal.unit, signal.low, signal.high)


def measured(view: View, key: str) -> F64:
    """Present values of a quantity per entity [n] float64; NaN where unknown, and where people work."""
    values = _DERIVED[key][1](view) if key in _DERIVED else good(view, key)
    under_work = view.maintenance(key.partition(".")[0])
    return values if under_work is None else np.where(under_work, np.nan, values)
