"""Catalogue schema: signals, controls and the tables that collect them.

The lines themselves are in `twin.catalogue.signals`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from twin.catalogue.units import unit_of

Reduce = Literal["last", "mean", "max", "min", "sum", "latch"]
Danger = Literal["high", "low", "both", "none"]
OnExpiry = Literal["safe", "keep", "restore"]


@dataclass(frozen=True, slots=True)
class Signal:
    """One measured quantity of a table.

    `reduce` combines several readings within a tick (`latch` is a bitwise or). `danger` is the side towards
    which an unheard value is assumed to drift, by `slew_per_s`. `period_s` is how often a healthy source
    speaks. `quantum` is the resolution to which the Inbox rounds, at or below the sensor's own. A line named
    like another plus `_max` or `_min` is its *companion*: whoever reports `power_w` feeds `power_w_max` too.
    A reading at or above `urgent_at`, or below the share `urgent_drop_pu` of the one before, is urgent.
    """

    table: str
    name: str
    row: int
    kind: Literal["gauge", "counter", "state"]
    unit: str
    low: float
    high: float
    reduce: Reduce
    quantum: float
    period_s: float
    slew_per_s: float
    danger: Danger
    states: tuple[str, ...]
    urgent_at: float | None
    wrap: int
    urgent_drop_pu: float = 0.0

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

    table: str
    name: str
    row: int
    unit: str
    low: float
    high: float
    on_expiry: OnExpiry
    protective: Literal["low", "high", "none"]
    readback: str | None
    slew_per_s: float
    deadband: float
    lease_s: float
    deadline_s: float
    disruptive: bool
    states: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}"


def signal(
    unit: str,
    low: float,
    high: float,
    *,
    quantum: float,
    reduce: Reduce = "last",
    period_s: float = 1.0,
    slew_per_s: float = 0.0,
    danger: Danger = "none",
    urgent_at: float | None = None,
    urgent_drop_pu: float = 0.0,
) -> dict[str, object]:
    """A gauge: float32, rounded to `quantum`, missing as NaN."""
    return dict(
        spec="gauge",
        unit=unit,
        low=low,
        high=high,
        quantum=quantum,
        reduce=reduce,
        period_s=period_s,
        slew_per_s=slew_per_s,
        danger=danger,
        urgent_at=urgent_at,
        urgent_drop_pu=urgent_drop_pu,
    )


def counter(unit: str, *, wrap: int = 0, max_per_s: float, period_s: float = 1.0) -> dict[str, object]:
    """An ever-growing int64; `wrap` is its modulus (0: none), `max_per_s` the fastest plausible growth."""
    return dict(spec="counter", unit=unit, high=max_per_s, wrap=wrap, period_s=period_s)


def state(
    *states: str,
    reduce: Reduce = "last",
    period_s: float = 1.0,
    high: int = 0,
    urgent_at: float | None = None,
) -> dict[str, object]:
    """A small integer with names for its values, or a plain code or bit field up to `high`."""
    return dict(
        spec="state",
        states=states,
        high=high or len(states) - 1,
        reduce=reduce,
        period_s=period_s,
        urgent_at=urgent_at,
    )


def control(
    unit: str,
    low: float,
    high: float,
    *,
    on_expiry: OnExpiry,
    protective: Literal["low", "high", "none"],
    readback: str | None = None,
    slew_per_s: float = 0.0,
    deadband: float = 0.0,
    lease_s: float = 30.0,
    deadline_s: float = 10.0,
    disruptive: bool = False,
    states: tuple[str, ...] = (),
) -> dict[str, object]:
    """A level that policies may move; min, max and safe are narrowed by profile and site."""
    return dict(
        spec="control",
        unit=unit,
        low=low,
        high=high,
        on_expiry=on_expiry,
        protective=protective,
        readback=readback,
        slew_per_s=slew_per_s,
        deadband=deadband,
        lease_s=lease_s,
        deadline_s=deadline_s,
        disruptive=disruptive,
        states=states,
    )


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
        for name, line in list(vars(cls).items()):
            if not isinstance(line, dict) or "spec" not in line:
                continue
            kind = line.pop("spec")
            if kind == "control":
                controls.append(Control(cls.table, name, len(controls), **line))
            elif kind == "counter":
                counters.append(
                    Signal(
                        cls.table,
                        name,
                        len(counters),
                        "counter",
                        line["unit"],
                        0.0,
                        line["high"],
                        "last",
                        1.0,
                        line["period_s"],
                        0.0,
                        "none",
                        (),
                        None,
                        line["wrap"],
                    )
                )
            elif kind == "state":
                gauges.append(
                    Signal(
                        cls.table,
                        name,
                        len(gauges),
                        "state",
                        unit_of(name) or "state",
                        0.0,
                        float(line["high"]),
                        line["reduce"],
                        1.0,
                        line["period_s"],
                        0.0,
                        "none",
                        line["states"],
                        line["urgent_at"],
                        0,
                    )
                )
            else:
                gauges.append(Signal(cls.table, name, len(gauges), "gauge", **line, states=(), wrap=0))
        cls.gauges, cls.counters, cls.controls = tuple(gauges), tuple(counters), tuple(controls)
        cls.by_name = {s.name: s for s in (*gauges, *counters)}
        cls.control_by_name = {c.name: c for c in controls}
