"""Catalogue schema: signals, controls and the tables that collect them.

The lines themselves are in `twin.catalogue.signals`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, Literal

from twin.catalogue.units import unit_of

Reduce = Literal["last", "mean", "max", "min", "sum", "latch"]
Danger = Literal["high", "low", "both", "none"]
OnExpiry = Literal["safe", "keep", "restore"]


@dataclass(frozen=True, slots=True)
class Signal:
    """One measured quantity of a table: a gauge unless said otherwise (see `counter` and `state`).

    Gauges are float32, missing as NaN. `reduce` combines several readings within a tick (`latch` is a bitwise
    or). `danger` is the side towards which a value that is not reported is assumed to drift, by `slew_per_s`.
    `period_s` is how often a healthy source reports. `quantum` is the resolution to which the Inbox rounds,
    at or below the sensor's own. A line named like another plus `_max` or `_min` is its *companion*: whoever
    reports `power_w` feeds `power_w_max` too. A reading at or above `urgent_at`, or below the share
    `urgent_drop_pu` of the one before, is urgent.
    """

    unit: str
    low: float
    high: float
    _: KW_ONLY
    quantum: float
    kind: Literal["gauge", "counter", "state"] = "gauge"
    reduce: Reduce = "last"
    period_s: float = 1.0
    slew_per_s: float = 0.0
    danger: Danger = "none"
    states: tuple[str, ...] = ()
    urgent_at: float | None = None
    urgent_drop_pu: float = 0.0
    wrap: int = 0
    # Set by the table
    table: str = ""
    name: str = ""
    row: int = -1

    @property
    def base(self) -> str | None:
        """The signal that this one accompanies, or None."""
        return self.name[:-4] if self.name.endswith(("_max", "_min")) else None

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}"


@dataclass(frozen=True, slots=True)
class Control:
    """One commandable level of a table. `low` is the restrictive end if `protective` is "low".

    `on_expiry` says what becomes of the value when its lease lapses; `readback` is the signal that echoes it.
    `slew_per_s` limits un-protective moves, `deadband` is the smallest change worth a command.
    """

    unit: str
    low: float
    high: float
    _: KW_ONLY
    on_expiry: OnExpiry
    protective: Literal["low", "high", "none"]
    readback: str | None = None
    slew_per_s: float = 0.0
    deadband: float = 0.0
    lease_s: float = 30.0
    deadline_s: float = 10.0
    disruptive: bool = False
    states: tuple[str, ...] = ()
    # Set by the table
    table: str = ""
    name: str = ""
    row: int = -1

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}"


def counter(unit: str, *, wrap: int = 0, max_per_s: float, period_s: float = 1.0) -> Signal:
    """An ever-growing int64; `wrap` is its modulus (0: none), `max_per_s` the fastest plausible growth."""
    return Signal(unit, 0.0, max_per_s, quantum=1.0, kind="counter", period_s=period_s, wrap=wrap)


def state(
    *states: str,
    reduce: Reduce = "last",
    period_s: float = 1.0,
    high: int = 0,
    urgent_at: float | None = None,
) -> Signal:
    """A small integer with names for its values, or a plain code or bit field up to `high`."""
    return Signal("state", 0.0, float(high or len(states) - 1), quantum=1.0, kind="state", reduce=reduce,
                  period_s=period_s, states=states, urgent_at=urgent_at)  # fmt: skip


class Table:
    """Base of the catalogue's classes: collects the lines of a subclass into tuples, in order."""

    table: ClassVar[str]
    gauges: ClassVar[tuple[Signal, ...]]  # gauges and states share the float32 matrix; row = index here
    counters: ClassVar[tuple[Signal, ...]]  # int64 matrix of their own; row = index here
    controls: ClassVar[tuple[Control, ...]]
    by_name: ClassVar[dict[str, Signal]]
    control_by_name: ClassVar[dict[str, Control]]

    def __init_subclass__(cls) -> None:
        cls.table = cls.__name__.removesuffix("Signals").lower()
        gauges: list[Signal] = []
        counters: list[Signal] = []
        controls: list[Control] = []
        # A class of lines that several tables share is a base beside Table: its lines come first
        lines = [item for part in reversed(cls.__mro__) for item in vars(part).items()]
        for name, line in lines:
            if isinstance(line, Control):
                controls.append(replace(line, table=cls.table, name=name, row=len(controls)))
            elif isinstance(line, Signal):
                unit = unit_of(name) or "state" if line.kind == "state" else line.unit
                rows = counters if line.kind == "counter" else gauges
                rows.append(replace(line, unit=unit, table=cls.table, name=name, row=len(rows)))
        cls.gauges, cls.counters, cls.controls = tuple(gauges), tuple(counters), tuple(controls)
        cls.by_name = {s.name: s for s in (*gauges, *counters)}
        cls.control_by_name = {c.name: c for c in controls}
