"""Fault script: one physical cause with its entity, time and severity, and its effect on a Disturbance.

The kind of a script is the kind of fault that the diagnosis should report for it. Each kind states what its
severity means. A `Campaign` runs scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, cast

import numpy as np

from twin.catalogue import Bool
from twin.diagnosis import FAULT_KINDS
from twin.plant.disturbance import Disturbance, SensorFault, SensorTrouble
from twin.site import Site

BOTH = -1  # `part` of a script that acts on both pumps or supplies
KINDS_IN_PARTS = ("pump_trip", "pump_worn", "psu_lost")  # that strike one of two pumps or supplies
ALL_SIGNALS = ""  # signal of a sensor fault that takes a whole device: a node with its GPUs

# Gauges that a simulated site publishes, a sensor fault may spoil, and something else can contradict.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "gpu": ("power_w", "temp_c", "sm_clock_hz"),
    "node": ("power_w",),
    "rack": ("power_w", "flow_lpm", "supply_temp_c", "return_temp_c", "diff_pressure_pa"),
    "cdu": (
        "flow_lpm", "supply_temp_c", "return_temp_c", "diff_pressure_pa", "filter_diff_pressure_pa",
        "facility_flow_lpm", "facility_supply_temp_c", "facility_return_temp_c",
    ),
    "loop": ("supply_temp_c", "return_temp_c", "flow_lpm"),
    "feeder": ("power_w",),
    "site": ("outdoor_temp_c",),
}  # fmt: skip

# The sizes of faults at severity 1; source: estimate where nothing else is said.
PUMP_WEAR_PU = 0.6  # of the head
FILTER_FACTOR = 1000.0  # on the resistance; grows by equal ratios with the severity
FOULING_PU = 0.85  # of the conductance
BLOCKED_FACTOR = 1e12  # no flow
TRAY_FACTOR, PASTE_FACTOR = 5.0, 3.0  # on the thermal resistance
LEAK_LPM = {"node": 0.5, "rack": 4.0, "cdu": 20.0, "loop": 60.0}
UNSEEN_LPM = 4.0
HEAT_WAVE_K = 20.0
XID_PERIOD_S = (120.0, 10.0)  # between reports at severity 0 and 1
XID_CODE = 94  # contained memory error, where a script names none
SBE_PER_S = 5.0  # corrected memory errors; a double one for each 20,000
NVLINK_ERRORS_PER_S = 2000.0
LINK_DISCARDS_PER_S = 5000.0

# A drift over days moves in steps of this share, so that flows need not be solved in each step
DRIFT_S, DRIFT_STEP = 86_400.0, 1e-4

How = Literal["times", "plus", "put"]


class Effect(NamedTuple):
    """One change of a disturbance: `at` is None where the field is one number."""

    field: str
    at: int | tuple[int, int] | None
    how: How
    value: float | bool


@dataclass(frozen=True, slots=True)
class Script:
    """One fault. Times are seconds since the plant began; `end_s` None: it lasts.

    `severity` in 0..1 grows from nothing over `ramp_s`, with the power `shape` of the time. `signal` and
    `amount` (bias or height, in the signal's unit) are of sensor faults; the amount of an XID burst is its
    code. `part` is the pump or supply: 0, 1 or BOTH. Raises ValueError if it makes no sense.
    """

    kind: str
    table: str
    entity: int
    begin_s: float
    end_s: float | None = None
    severity: float = 1.0
    ramp_s: float = 0.0
    signal: str = ""
    amount: float = 0.0
    part: int = 0
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS or self.table not in FAULT_KINDS[self.kind].tables:
            raise ValueError(f"no fault {self.kind!r} of a {self.table!r} is known")
        if not 0.0 <= self.severity <= 1.0 or not self.ramp_s >= 0.0 or self.part not in (BOTH, 0, 1):
            raise ValueError("expected a severity in 0..1, a ramp of no less than 0 s and a part -1, 0 or 1")
        if not 0.0 < self.shape < inf:
            raise ValueError(f"expected a shape above 0, got {self.shape:g}")
        if self.end_s is not None and not self.end_s > self.begin_s:
            raise ValueError(f"expected an end after {self.begin_s:g} s, got {self.end_s:g}")
        if self.is_sensor and self.signal not in PUBLISHED[self.table]:
            raise ValueError(f"{self.table}.{self.signal} is no signal that a sensor fault may spoil")

    @property
    def is_sensor(self) -> bool:
        """True for a faulty sensor on healthy equipment."""
        return self.kind.startswith("sensor_")

    def level(self, time_s: float, dt_s: float = 1.0) -> float:
        """Return the share of the full severity reached at the end of a step from `time_s` on, 0..1.

        It acts in every step that overlaps [begin_s, end_s).
        """
        grown = time_s + dt_s - self.begin_s
        if grown <= 0.0 or (self.end_s is not None and time_s >= self.end_s):
            return 0.0
        if grown >= self.ramp_s:
            return 1.0
        reached = float((grown / self.ramp_s) ** self.shape)
        return reached if self.ramp_s < DRIFT_S else reached // DRIFT_STEP * DRIFT_STEP

    def effects(self, level: float) -> tuple[Effect, ...]:
        """Return the effects at a level above 0; empty for sensor faults and faults that are only
        reported."""
        found = _EFFECTS.get(self.kind)
        return () if found is None else found(self, self.severity * level)

    def sensor_fault(self, level: float) -> SensorFault | None:
        """Return the sensor fault at a level above 0."""
        if self.kind == "node_silent":
            return SensorFault("node", self.entity, ALL_SIGNALS, "silent")
        if not self.is_sensor:
            return None
        trouble = cast(SensorTrouble, self.kind.removeprefix("sensor_"))
        return SensorFault(self.table, self.entity, self.signal, trouble, self.amount * level)

    @property
    def xid_period_s(self) -> float:
        """Return the period of its XIDs, s; 0 if it reports none."""
        slow, fast = XID_PERIOD_S
        return 0.0 if self.kind != "xid_burst" else slow * (fast / slow) ** self.severity

    @property
    def xid_code(self) -> int:
        """Return the XID of its reports."""
        return int(self.amount) or XID_CODE


class Life(NamedTuple):
    """Wear of a kind of part: severity at the end of its life, and the days of a short and a long life.

    `share` of the parts wear.
    """

    table: str
    worn: float
    short_d: float
    long_d: float
    share: float = 1.0


# Worn is what `twin.health.wear` calls the limit. Lives: source: estimate. Filters are changed once or twice
# a year, exchangers cleaned each one to three years, seals and wear rings of pumps last some years, thermal
# interfaces of a few GPUs dry out within years.
LIVES: dict[str, Life] = {
    "filter_blocked": Life("cdu", math.log(2.5) / math.log(FILTER_FACTOR), 120.0, 500.0),
    "exchanger_fouled": Life("cdu", 0.4 / FOULING_PU, 250.0, 1100.0),
    "pump_worn": Life("cdu", 0.3 / PUMP_WEAR_PU, 700.0, 2500.0),
    "plate_degraded": Life("gpu", 1.0 / (PASTE_FACTOR - 1.0), 300.0, 1500.0, 0.05),
}
SHAPES = (0.7, 1.4)  # from wear that slows down to wear that speeds up; source: estimate
BEYOND = 1.25  # of what is worn out: it goes on till there


def wear_scripts(site: Site, seed: int = 0, pace: float = 1.0) -> tuple[Script, ...]:
    """Return the wear of a site's parts, each with its own life and shape; `pace` days pass in one.

    Fans and power supplies do not wear: the twin learns nothing of them that weather and load leave alone.
    """
    rng, out = np.random.default_rng([seed, 5]), list[Script]()
    for kind, life in LIVES.items():
        n = site.sizes[life.table]
        days = np.exp(rng.uniform(math.log(life.short_d), math.log(life.long_d), n))
        shapes, wears = rng.uniform(*SHAPES, n), rng.random(n) < life.share
        for i in np.flatnonzero(wears).tolist():
            shape = float(shapes[i])
            ramp_s = float(days[i]) * DRIFT_S * BEYOND ** (1.0 / shape) / pace
            part = BOTH if kind == "pump_worn" else 0
            out.append(
                Script(kind, life.table, i, 0.0, None, life.worn * BEYOND, ramp_s, part=part, shape=shape)
            )
    return tuple(out)


def neutral_value(field: str) -> float | bool:
    """Return the neutral value of a field of a Disturbance."""
    if field.endswith(("_factor", "_voltage_pu")):
        return 1.0
    if field.endswith(("_ok", "_alive")):
        return True
    return float("nan") if field.endswith("_stuck_pu") else 0.0


def _one(field: str, how: How, value: Callable[[float], float | bool]) -> Callable[..., tuple[Effect, ...]]:
    """Return an effect on the script's own entity that scales with the severity reached."""
    return lambda s, reached: (Effect(field, s.entity, how, value(reached)),)


def _parts(field: str, how: How, value: Callable[[float], float | bool]) -> Callable[..., tuple[Effect, ...]]:
    """Return the same effect on one or both pumps or supplies of an entity."""

    def of(s: Script, reached: float) -> tuple[Effect, ...]:
        parts = (0, 1) if s.part == BOTH else (s.part,)
        return tuple(Effect(field, (s.entity, p), how, value(reached)) for p in parts)

    return of


def _leak(s: Script, reached: float) -> tuple[Effect, ...]:
    return (Effect(f"{s.table}_leak_lpm", s.entity, "plus", LEAK_LPM[s.table] * reached),)


def _congested(s: Script, reached: float) -> tuple[Effect, ...]:
    return (
        Effect("link_rate_factor", s.entity, "times", 1.0 - 0.8 * reached),
        Effect("link_discards_per_s", s.entity, "plus", LINK_DISCARDS_PER_S * reached),
    )


def _ecc(s: Script, reached: float) -> tuple[Effect, ...]:
    return (
        Effect("gpu_sbe_per_s", s.entity, "plus", SBE_PER_S * reached),
        Effect("gpu_dbe_per_s", s.entity, "plus", SBE_PER_S * reached / 20_000.0),
    )


def _branch_factor(reached: float) -> float:
    """Return the factor of a branch. Severity is the share of the flow that is lost at the same pressure:
    dp = k Q^2."""
    return BLOCKED_FACTOR if reached >= 1.0 - 1e-6 else 1.0 / (1.0 - reached) ** 2


_EFFECTS: dict[str, Callable[[Script, float], tuple[Effect, ...]]] = {
    "pump_trip": _parts("cdu_pump_ok", "put", lambda _: False),
    "pump_worn": _parts("cdu_pump_head_factor", "times", lambda x: 1.0 - PUMP_WEAR_PU * x),
    "filter_blocked": _one("cdu_filter_factor", "times", lambda x: FILTER_FACTOR**x),
    "exchanger_fouled": _one("cdu_ua_factor", "times", lambda x: 1.0 - FOULING_PU * x),
    # Severity 1: stuck shut; 0: wide open
    "valve_stuck": lambda s, _: (Effect("cdu_valve_stuck_pu", s.entity, "put", 1.0 - s.severity),),
    "branch_blocked": _one("rack_branch_factor", "times", _branch_factor),
    "tray_blocked": _one("node_plate_factor", "times", lambda x: 1.0 + (TRAY_FACTOR - 1.0) * x),
    "plate_degraded": _one("gpu_plate_factor", "times", lambda x: 1.0 + (PASTE_FACTOR - 1.0) * x),
    "leak": _leak,
    "water_detected": _one("hall_wet", "put", lambda _: True),
    "coolant_loss": _one("cdu_unseen_lpm", "plus", lambda x: UNSEEN_LPM * x),
    "cooler_failed": _one("loop_fan_factor", "times", lambda x: 1.0 - x),
    "heat_wave": lambda _, reached: (Effect("outdoor_add_k", None, "plus", HEAT_WAVE_K * reached),),
    "psu_lost": _parts("node_psu_ok", "put", lambda _: False),
    "node_down": lambda s, _: tuple(Effect("node_psu_ok", (s.entity, p), "put", False) for p in (0, 1)),
    "feed_lost": _one("feeder_ok", "put", lambda _: False),
    "breaker_tripped": _one("feeder_trip", "put", lambda _: True),
    "grid_event": lambda _, reached: (Effect("grid_voltage_pu", None, "times", 1.0 - reached),),
    "ecc_growth": _ecc,
    "nvlink_flaps": _one("gpu_nvlink_errors_per_s", "plus", lambda x: NVLINK_ERRORS_PER_S * x),
    "gpu_off_bus": _one("gpu_alive", "put", lambda _: False),
    "link_congested": _congested,
    "link_down": _one("link_down", "put", lambda _: True),
}


class Campaign:
    """Scripts over one site; the seed spreads the instants of XIDs. Raises ValueError on unknown entities."""

    def __init__(self, site: Site, scripts: Sequence[Script], seed: int = 0) -> None:
        for script in scripts:
            if not 0 <= script.entity < site.sizes[script.table]:
                raise ValueError(f"{site.file.site} has no {script.table} {script.entity}")
            if script.part == 1 and script.kind not in KINDS_IN_PARTS:
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
        """Return all scripts, by their begin."""
        return self._scripts

    @property
    def acting(self) -> tuple[Script, ...]:
        """Return the scripts with an effect in the last step."""
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
        """Update all levels; returns the changed ones."""
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
        """Return the instant until which nothing changes; -inf: changes at any time."""
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
