"""Preview: the site as it would be read by now if the advice had been obeyed, for the policies that advise.

Leases are the shadow's, controls read back what they would be set to, and what the capped devices would not
draw is missing from their power, their nodes', racks' and feeders', and from forecasts of it. Jobs save when
and as often as they are advised to. All else is as it is: temperatures, flows, leaks, faults, health, the
placement of jobs, and levels of service. Alarms, diagnosis, models and the policies that act never see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np

from twin.catalogue import F32, F64, TABLES
from twin.contracts import Forecast, read_only
from twin.engine.shadow_power import POWER_TABLES, ShadowPower, SparedPower
from twin.engine.shadow_saves import ShadowSaves
from twin.engine.view import EngineView

GPU_CAP, NODE_CAP = "gpu.power_cap_w", "node.power_cap_w"
# Jobs, people and the scheduler answer a level of service. A policy keeps a record of who left and why, and
# counts those who are out before another may leave: what never was must enter neither.
SERVICE, OWNER, OURS = "node.service_level", "node.service_owner_state", 1.0
POWER = {f"{table}.{name}" for table in POWER_TABLES for name in ("power_w", "power_w_max")}
SUPPLIES = ("node.psu1_power_w", "node.psu2_power_w")
CONTROL_OF = {f"{t}.{c.readback}": c.key for t, spec in TABLES.items() for c in spec.controls if c.readback}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreviewView(EngineView):
    """A view on the site as the advice expects it. `obeyed`: by control, what counts as carried out [n]."""

    obeyed: Mapping[str, F64]
    spared: SparedPower | None
    _read: dict[tuple[str, str], F32 | None] = field(default_factory=dict, init=False, repr=False)

    def value(self, key: str) -> F32:
        """Last good value per entity, or the one that there would be."""
        return self._expected("value", key, EngineView.value(self, key))

    def worst(self, key: str) -> F32:
        """The value as bad as it would be by now."""
        return self._expected("worst", key, EngineView.worst(self, key))

    def commanded(self, control: str) -> F64:
        """The value of the lease that there would be; NaN where none."""
        shadow = self.arbiter.shadow.get(control)
        if shadow is None or control == SERVICE:
            return EngineView.commanded(self, control)
        return cast(F64, read_only(shadow.value_beside(self.arbiter.leases[control])))

    def _expected(self, how: str, key: str, real: F32) -> F32:
        if (how, key) not in self._read:
            found = self._carried_out(key, real)
            self._read[how, key] = None if found is None else cast(F32, read_only(found.astype(np.float32)))
        changed = self._read[how, key]
        return real if changed is None else changed

    def _carried_out(self, key: str, real: F32) -> np.ndarray | None:
        """`real` as it would be [n]; None where nothing changes."""
        if key in CONTROL_OF:
            return self._readback(CONTROL_OF[key], real)
        if self.spared is None:
            return None
        table = key.partition(".")[0]
        if key in POWER:
            return self.spared.left_w(table, real.astype(np.float64))
        if key in SUPPLIES:
            return real * (1.0 - self.spared.node_pu)
        return None

    def _readback(self, control: str, real: F32) -> np.ndarray | None:
        """The read-back of a control under advice; nothing where no device ever reported any."""
        if control not in self.obeyed or control == SERVICE:
            return None
        value = self.obeyed[control]
        return np.where(np.isfinite(value) & np.isfinite(real), value, real)


def preview_of(view: EngineView, power: ShadowPower, saves: ShadowSaves) -> EngineView:
    """The view of a policy that advises; the same object while no advice waits to be obeyed."""
    jobs = saves.update(view.jobs, view.arbiter, view.now_ns)
    if not view.arbiter.shadow and not power.turn_ns and jobs is None:
        return view
    obeyed: dict[str, F64] = {}
    for key, shadow in view.arbiter.shadow.items():
        value = shadow.obeyed(view.arbiter.leases[key])
        if np.isfinite(value).any():
            obeyed[key] = value
    spared = power.update(view, view.estimator, obeyed.get(GPU_CAP), obeyed.get(NODE_CAP))
    given: dict[str, Any] = {f.name: getattr(view, f.name) for f in fields(EngineView) if f.init}
    if jobs is not None:
        given["jobs"] = jobs
    if spared is not None:
        given["forecasts"] = {key: _lowered(forecast, spared) for key, forecast in view.forecasts.items()}
    return PreviewView(**given, obeyed=obeyed, spared=spared)


def _lowered(forecast: Forecast, spared: SparedPower) -> Forecast:
    """A forecast of power without what the capped devices would not draw."""
    table, _, name = forecast.signal.partition(".")
    if name != "power_w" or (table != "site" and table not in spared.watts):
        return forecast
    watts = spared.watts["rack"].sum() if table == "site" else spared.watts[table]
    mean, lo, hi = (
        np.maximum(band - watts, 0.0).astype(np.float32) for band in (forecast.mean, forecast.lo, forecast.hi)
    )
    return replace(forecast, mean=mean, lo=lo, hi=hi)
