"""Limits of a simulated course: how near it comes to each kind of limit, and which is reached first.

A kind has a value and a limit per entity. Its use is value over limit, or limit over value where low values
are bad; from 1 on the limit is reached. What something would carry if the other side failed counts as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F64, duration, quantity
from twin.contracts import finite
from twin.plant import Plant
from twin.site import Site


@dataclass
class LimitUse:
    """Greatest use of one kind of limit so far [n], its value then, and the time it was reached (inf:
    never)."""

    name: str
    table: str
    unit: str
    limit: F64
    low: bool  # low values are bad
    used_pu: F64
    value: F64
    reached_s: F64

    @classmethod
    def of(cls, name: str, table: str, unit: str, limit: F64, low: bool = False) -> LimitUse:
        """Return the state before the first value."""
        n = len(limit)
        return cls(name, table, unit, limit, low, np.zeros(n), np.full(n, np.nan), np.full(n, np.inf))

    def see(self, value: F64, time_s: float) -> None:
        """Take in the values of now [n]; NaN is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            used = self.limit / np.maximum(value, 1e-9) if self.low else value / self.limit
        more = used > self.used_pu
        np.copyto(self.used_pu, used, where=more)
        np.copyto(self.value, value, where=more)
        np.copyto(self.reached_s, time_s, where=(used >= 1.0) & np.isinf(self.reached_s))

    def tightest(self, site: Site) -> dict[str, Any] | None:
        """Return the entity nearest to its limit, the first to reach it first; None without limits."""
        if not np.isfinite(self.value).any():
            return None
        at = int(np.lexsort((-self.used_pu, self.reached_s))[0])
        reached_s, by = float(self.reached_s[at]), int(np.count_nonzero(np.isfinite(self.reached_s)))
        return {
            "text": self._said(site.name(self.table, at), at, by),
            "limit": self.name, "entity": site.name(self.table, at), "unit": self.unit,
            "value": float(self.value[at]), "most": float(self.limit[at]), "used_pu": float(self.used_pu[at]),
            "reached_s": finite(reached_s),
            "reached_by": by,
        }  # fmt: skip

    def _said(self, entity: str, at: int, by: int) -> str:
        """Return a sentence on the nearest entity, and the number that reached the limit."""
        value, most = (quantity(float(x[at]), self.unit) for x in (self.value, self.limit))
        of = value if self.unit == "1" else f"{value}, at least {most}" if self.low else f"{value} of {most}"
        reached = self.reached_s[at]
        when = f"; reached after {duration(float(reached))}" if np.isfinite(reached) else ""
        others = f" and by {by - 1} more" if by > 1 else ""
        return f"{self.name}: {entity}, {of}{when}{others}"


class CourseLimits:
    """All limits of a plant that a course may reach."""

    def __init__(self, plant: Plant) -> None:
        site, p = plant.site, plant.parameters
        self.plant, ones = plant, np.ones(site.sizes["cdu"])
        none = np.full(site.sizes["rack"], np.nan)

        def of_rack(key: str) -> F64:
            return np.asarray(site.limits[key].guard, np.float64) if key in site.limits else none

        self._below = site.served_racks()
        self.budget = LimitUse.of("the budget of a feeder", "feeder", "W", site.budget_w)
        self.alone = LimitUse.of(
            "the budget of a feeder, if the other side failed", "feeder", "W",
            np.where(site.side_of_feeder > 0, site.budget_w, np.nan),
        )  # fmt: skip
        self.rack_power = LimitUse.of("the power of a rack", "rack", "W", of_rack("rack.power_w"))
        self.supply = LimitUse.of(
            "the coolant supply of a rack", "rack", "degC", of_rack("rack.supply_temp_c")
        )
        self.flow = LimitUse.of("the coolant flow of a rack", "rack", "l/min", of_rack("rack.flow_lpm"), True)
        self.pump = LimitUse.of("the pumps of a CDU, at full speed", "cdu", "1", ones)
        self.valve = LimitUse.of("the exchanger of a CDU, its valve open", "cdu", "1", ones)
        self.fans = LimitUse.of("the fans of a loop, at full speed", "loop", "1", np.ones(site.sizes["loop"]))
        self.heat = LimitUse.of("the temperature at which GPUs slow down", "gpu", "degC", p.gpu_slowdown_c)

    def see(self, time_s: float) -> None:
        """Take in the plant as it is now."""
        t, site = self.plant.truth, self.plant.site
        self.budget.see(t.feeder_power_w, time_s)
        feeder, rack = self._below
        self.alone.see(
            np.bincount(feeder, t.rack_power_w[rack], site.sizes["feeder"]).astype(np.float64), time_s
        )
        self.rack_power.see(t.rack_power_w, time_s)
        wet = self.plant.parameters.rack_liquid & ~t.rack_isolated
        self.supply.see(np.where(wet, t.rack_supply_c, np.nan), time_s)
        self.flow.see(np.where(wet, t.rack_flow_lpm, np.nan), time_s)
        self.pump.see(t.cdu_pump_speed_pu.max(axis=1, initial=0.0), time_s)
        self.valve.see(t.cdu_valve_pu, time_s)
        self.fans.see(t.loop_fan_pu[: site.sizes["loop"]], time_s)
        self.heat.see(t.gpu_temp_c, time_s)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each kind: reached ones in order of time, then the nearest."""
        uses = (self.budget, self.alone, self.rack_power, self.supply, self.flow, self.pump, self.valve,
                self.fans, self.heat)  # fmt: skip
        rows = [row for use in uses if (row := use.tightest(self.plant.site)) is not None]
        return sorted(rows, key=lambda r: (r["reached_s"] is None, r["reached_s"] or 0.0, -r["used_pu"]))
