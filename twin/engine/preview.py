"""Preview: the state of the site if all advice had been obeyed, as advising policies see it.

The leases are the shadow leases, and controls read back the advised values. The power that advised caps would
save is subtracted from the power of GPUs, nodes, racks and feeders, and from their forecasts. Jobs save as
advised. Everything else is unchanged: temperatures, flows, leaks, faults, health, the placement of jobs and
service levels. Alarms, diagnosis, models and acting policies never see the preview.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np

from twin.catalogue import F32, F64, TABLES, U8, Bool
from twin.contracts import Forecast, read_only
from twin.engine.shadow_power import POWER_TABLES, ShadowPower, SparedPower
from twin.engine.shadow_saves import ShadowSaves
from twin.engine.view import EngineView
from twin.site import Site
from twin.telemetry import EntityState, part

GPU_CAP, NODE_CAP = "gpu.power_cap_w", "node.power_cap_w"
# Jobs, people and the scheduler answer a level of service. A policy keeps a record of who left and why, and
# counts those who are out before another may leave: what never was must enter neither.
SERVICE, OWNER, OURS = "node.service_level", "node.service_owner_state", 1.0
POWER = {f"{table}.{name}" for table in POWER_TABLES for name in ("power_w", "power_w_max")}
SUPPLIES = ("node.psu1_power_w", "node.psu2_power_w")
CONTROL_OF = {f"{t}.{c.readback}": c.key for t, spec in TABLES.items() for c in spec.controls if c.readback}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreviewView(EngineView):
    """View of the site as if the advice had been obeyed.

    By control, `obeyed` counts as carried out, and `held` are the leases that there would be [n].
    """

    real: EngineView
    obeyed: Mapping[str, F64]
    held: Mapping[str, F64]
    spared: SparedPower | None
    _read: dict[tuple[str, str], F32 | None] = field(default_factory=dict, init=False, repr=False)

    def value(self, key: str) -> F32:
        """Return the last good value per entity, or its preview."""
        return self._expected("value", key, self.real.value(key))

    def believed(self, key: str) -> F32:
        """Return the believed value per entity, or its preview."""
        return self._expected("believed", key, self.real.believed(key))

    def worst(self, key: str) -> F32:
        """Return the preview of the worst value."""
        return self._expected("worst", key, self.real.worst(key))

    def quality(self, key: str) -> U8:
        """Quality per entity: that of the readings."""
        return self.real.quality(key)

    def commanded(self, control: str) -> F64:
        """Return the value of the shadow lease; NaN without one."""
        value = self.held.get(control)
        if value is None or control == SERVICE:
            return EngineView.commanded(self, control)
        return cast(F64, read_only(value))

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


class PreviewState(EntityState):
    """State of previews between ticks: for advice, and for the first commands of a newly armed policy."""

    power: ShadowPower = part()
    handed: ShadowPower = part()
    saves: ShadowSaves = part()

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.power, self.handed, self.saves = (
            ShadowPower(site),
            ShadowPower(site),
            ShadowSaves(site.sizes["job"]),
        )


def preview_of(view: EngineView, state: PreviewState) -> EngineView:
    """The view of a policy that advises; the same object while no advice waits to be obeyed."""
    jobs = state.saves.update(view.jobs, view.arbiter, view.now_ns)
    if not view.arbiter.shadow and not state.power.turn_ns and jobs is None:
        return view
    return _carried_out(view, state.power, None, {} if jobs is None else {"jobs": jobs})


def handover_of(view: EngineView, state: PreviewState, armed: Sequence[int]) -> EngineView:
    """The view of the policies (by place in the order) that were just armed: their own advice counts.

    The same object where all that they command may be read back.
    """
    handed = any(shadow.handed_ns.any() for shadow in view.arbiter.shadow.values())
    if not armed and not handed and not state.handed.turn_ns:
        return view
    return _carried_out(view, state.handed, armed, {})


def _carried_out(
    view: EngineView, power: ShadowPower, owners: Sequence[int] | None, changed: dict[str, Any]
) -> PreviewView:
    """The view with all advice carried out, or that of the `owners`, and what is handed over."""
    obeyed: dict[str, F64] = {}
    held: dict[str, F64] = {}
    metered: dict[str, Bool] = {}
    for key, shadow in view.arbiter.shadow.items():
        real = view.arbiter.leases[key]
        held[key], metered[key] = shadow.value_beside(real, owners), shadow.metered(view.now_ns)
        value = shadow.obeyed(real, owners)
        if np.isfinite(value).any():
            obeyed[key] = value
    caps = [(obeyed.get(key), metered.get(key)) for key in (GPU_CAP, NODE_CAP)]
    spared = power.update(view, view.estimator, *caps)
    given: dict[str, Any] = {f.name: getattr(view, f.name) for f in fields(EngineView) if f.init} | changed
    if spared is not None:
        given["forecasts"] = LoweredForecasts(view.forecasts, spared)
    return PreviewView(**given, real=view, obeyed=obeyed, held=held, spared=spared)


class LoweredForecasts(Mapping[tuple[str, float], Forecast]):
    """Forecasts less the power that advised caps would save. Each one is computed on request."""

    def __init__(self, real: Mapping[tuple[str, float], Forecast], spared: SparedPower) -> None:
        self._real, self._spared = real, spared
        self._known: dict[tuple[str, float], Forecast] = {}

    def __getitem__(self, key: tuple[str, float]) -> Forecast:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _lowered(self._real[key], self._spared)
        return found

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return iter(self._real)

    def __len__(self) -> int:
        return len(self._real)


def _lowered(forecast: Forecast, spared: SparedPower) -> Forecast:
    """Return a power forecast less the power that the advised caps would save."""
    table, _, name = forecast.signal.partition(".")
    if name != "power_w" or (table != "site" and table not in spared.watts):
        return forecast
    watts = spared.watts["rack"].sum() if table == "site" else spared.watts[table]
    mean, lo, hi = (
        np.maximum(band - watts, 0.0).astype(np.float32) for band in (forecast.mean, forecast.lo, forecast.hi)
    )
    return replace(forecast, mean=mean, lo=lo, hi=hi)
