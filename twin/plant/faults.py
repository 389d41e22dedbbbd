"""Fault scripts: what goes wrong, where, when and how badly, and what that does to a Disturbance.

One script is one physical cause; its kind has the name by which a diagnosis should tell it. What a severity
means is stated beside each kind. Drawing scripts is `twin.plant.draws`, running them `twin.plant.campaign`.
Months of a fleet have failures of the classes in `FAILURES`, drawn by `twin.plant.fleet_life`. May import
disturbances, the kinds of fault and the table of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from twin.diagnosis.kinds import KINDS
from twin.plant.disturbance import SensorFault, SensorTrouble
from twin.plant.failure_classes import BENIGN, FAILURES, NODE_DAY_RATE

__all__ = ["ALL_SIGNALS", "BENIGN", "BOTH", "FAILURES", "NODE_DAY_RATE", "PUBLISHED", "Effect", "Script",
           "neutral_value"]  # fmt: skip

BOTH = -1  # `part` of a script that acts on both pumps or supplies
ALL_SIGNALS = ""  # signal of a sensor fault that takes a whole device: a node with its GPUs

# What a simulated site publishes and a sensor fault may spoil: gauges that something else can contradict.
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
HEAT_WAVE_K = 20.0
XID_PERIOD_S = (120.0, 10.0)  # between reports at severity 0 and 1
XID_CODE = 94  # contained memory error, where a script names none
SBE_PER_S = 5.0  # corrected memory errors; a double one for each 20,000
NVLINK_ERRORS_PER_S = 2000.0
LINK_DISCARDS_PER_S = 5000.0

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

    `severity` in 0..1 grows linearly from nothing over `ramp_s`. `signal` and `amount` (bias or height, in
    the signal's unit) are of sensor faults; the amount of an XID burst is its code. `part` tells pumps or
    supplies apart: 0, 1 or BOTH. Raises ValueError if it makes no sense.
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

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.table not in KINDS[self.kind].tables:
            raise ValueError(f"no fault {self.kind!r} of a {self.table!r} is known")
        if not 0.0 <= self.severity <= 1.0 or not self.ramp_s >= 0.0 or self.part not in (BOTH, 0, 1):
            raise ValueError("expected a severity in 0..1, a ramp of no less than 0 s and a part -1, 0 or 1")
        if self.end_s is not None and not self.end_s > self.begin_s:
            raise ValueError(f"expected an end after {self.begin_s:g} s, got {self.end_s:g}")
        if self.is_sensor and self.signal not in PUBLISHED[self.table]:
            raise ValueError(f"{self.table}.{self.signal} is no signal that a sensor fault may spoil")

    @property
    def is_sensor(self) -> bool:
        """A sensor lies; the equipment is well."""
        return self.kind.startswith("sensor_")

    def level(self, time_s: float, dt_s: float = 1.0) -> float:
        """How far it has grown at the end of a step from `time_s` on: 1 = to its whole severity, 0 = nothing.

        It acts in every step that overlaps [begin_s, end_s).
        """
        grown = time_s + dt_s - self.begin_s
        if grown <= 0.0 or (self.end_s is not None and time_s >= self.end_s):
            return 0.0
        return 1.0 if grown >= self.ramp_s else grown / self.ramp_s

    def effects(self, level: float) -> tuple[Effect, ...]:
        """What it does at a level above 0; empty where it acts through its sensor fault or reports alone."""
        found = _EFFECTS.get(self.kind)
        return () if found is None else found(self, self.severity * level)

    def sensor_fault(self, level: float) -> SensorFault | None:
        """What it does to a sensor at a level above 0."""
        if self.kind == "node_silent":
            return SensorFault("node", self.entity, ALL_SIGNALS, "silent")
        if not self.is_sensor:
            return None
        trouble = cast(SensorTrouble, self.kind.removeprefix("sensor_"))
        return SensorFault(self.table, self.entity, self.signal, trouble, self.amount * level)

    @property
    def xid_period_s(self) -> float:
        """Between its reports of an XID; 0 if it makes none."""
        slow, fast = XID_PERIOD_S
        return 0.0 if self.kind != "xid_burst" else slow * (fast / slow) ** self.severity

    @property
    def xid_code(self) -> int:
        """What it reports."""
        return int(self.amount) or XID_CODE


def neutral_value(field: str) -> float | bool:
    """What a field of a Disturbance holds where all is well."""
    if field.endswith(("_factor", "_voltage_pu")):
        return 1.0
    if field.endswith(("_ok", "_alive")):
        return True
    return float("nan") if field.endswith("_stuck_pu") else 0.0


def _one(field: str, how: How, value: Callable[[float], float | bool]) -> Callable[..., tuple[Effect, ...]]:
    """An effect on the script's own entity whose size follows from the severity reached."""
    return lambda s, reached: (Effect(field, s.entity, how, value(reached)),)


def _parts(field: str, how: How, value: Callable[[float], float | bool]) -> Callable[..., tuple[Effect, ...]]:
    """The same on one or both pumps or supplies of an entity."""

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
    """Severity is the share of the flow that is lost at the same pressure: dp = k Q^2."""
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
