"""A campaign runs fault scripts: each step it sets a Disturbance to what they do now, from neutral.

What no script touches is left alone, and a step in which nothing changes costs one comparison. May import
fault scripts and disturbances.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from twin.frame import Bool
from twin.plant.disturbance import Disturbance
from twin.plant.faults import Effect, Script, neutral_value
from twin.site import Site


class Campaign:
    """Scripts over one site; the seed spreads the instants of XIDs. Raises ValueError on unknown entities."""

    def __init__(self, site: Site, scripts: Sequence[Script], seed: int = 0) -> None:
        for script in scripts:
            if not 0 <= script.entity < site.sizes[script.table]:
                raise ValueError(f"{site.file.site} has no {script.table} {script.entity}")
            if script.part == 1 and script.kind not in ("pump_trip", "pump_worn", "psu_lost"):
                raise ValueError(f"a fault {script.kind} has no second part")
        self._scripts = tuple(sorted(scripts, key=lambda s: s.begin_s))
        self._rng = np.random.default_rng([seed, 4])
        self._level = np.zeros(len(self._scripts))
        self._next_xid_s = np.array([s.begin_s for s in self._scripts])
        self._raised: list[int] = []  # GPUs with an XID in this step
        self._counting = False  # a rate of errors acts
        self._quiet_until_s = -inf  # until then nothing changes

    @property
    def scripts(self) -> tuple[Script, ...]:
        """All scripts, by their beginning."""
        return self._scripts

    @property
    def acting(self) -> tuple[Script, ...]:
        """Those that acted in the last step."""
        return tuple(s for s, x in zip(self._scripts, self._level, strict=True) if x > 0)

    def apply(self, disturbance: Disturbance, time_s: float, dt_s: float) -> bool:
        """Set `disturbance` to what acts in the step from `time_s` on.

        True if that is not what it was, or if it holds rates of errors, which add up in every step.

        A script acts in every step that it overlaps; its ramp is taken at the step's end. Two of a kind on
        one entity multiply or add; a switch that both turn stays turned.
        """
        if time_s + dt_s <= self._quiet_until_s:
            return False
        changed = self._levels(time_s, dt_s)
        if changed.any():
            self._rebuild(disturbance, changed)
        reported = self._xids(disturbance, time_s, dt_s)
        self._quiet_until_s = self._next_change(time_s)
        return bool(changed.any()) or reported or self._counting

    def _levels(self, time_s: float, dt_s: float) -> Bool:
        """Move all levels; which ones changed."""
        now = np.array([s.level(time_s, dt_s) for s in self._scripts])
        changed: Bool = now != self._level
        self._level = now
        return changed

    def _rebuild(self, disturbance: Disturbance, changed: Bool) -> None:
        touched = [s for s, c, x in zip(self._scripts, changed, self._level, strict=True) if c or x > 0]
        for script in touched:
            for effect in script.effects(1.0):
                _set(disturbance, effect._replace(how="put", value=neutral_value(effect.field)))
        sensors = []
        self._counting = False
        for script, level in zip(self._scripts, self._level.tolist(), strict=True):
            if level > 0:
                for effect in script.effects(level):
                    _set(disturbance, effect)
                    self._counting |= effect.field.endswith("_per_s")
                fault = script.sensor_fault(level)
                sensors += [] if fault is None else [fault]
        disturbance.sensors[:] = sensors

    def _xids(self, disturbance: Disturbance, time_s: float, dt_s: float) -> bool:
        """Raise the XIDs that are due; True if any was raised, or the last ones were taken back."""
        before = bool(self._raised)
        for gpu in self._raised:
            disturbance.gpu_xid[gpu] = 0
        self._raised.clear()
        for i, script in enumerate(self._scripts):
            due = script.xid_period_s > 0 and self._level[i] > 0
            if due and self._next_xid_s[i] < time_s + dt_s:
                disturbance.gpu_xid[script.entity] = script.xid_code
                self._raised.append(script.entity)
                self._next_xid_s[i] = time_s + dt_s + script.xid_period_s * self._rng.uniform(0.5, 1.5)
        return before or bool(self._raised)

    def _next_change(self, time_s: float) -> float:
        """Nothing can change in a step that ends by then; -inf: at any time."""
        if self._raised or self._counting:
            return -inf
        soonest = inf
        for i, script in enumerate(self._scripts):
            end_s = inf if script.end_s is None else script.end_s
            if self._level[i] > 0:
                if self._level[i] < 1.0:
                    return -inf
                soonest = min(soonest, end_s)
                if script.xid_period_s > 0:
                    soonest = min(soonest, float(self._next_xid_s[i]))
            elif end_s > time_s:
                soonest = min(soonest, script.begin_s)
        return soonest


def _set(disturbance: Disturbance, effect: Effect) -> None:
    if effect.at is None:
        old = getattr(disturbance, effect.field)
        setattr(disturbance, effect.field, _combined(old, effect))
    else:
        array: np.ndarray = getattr(disturbance, effect.field)
        array[effect.at] = _combined(array[effect.at], effect)


def _combined(old: float, effect: Effect) -> float | bool:
    if effect.how == "put":
        return effect.value
    return old * effect.value if effect.how == "times" else old + effect.value
