"""Every line of the catalogue is sound: units as the names declare them, ranges that fit the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from twin.catalogue import TABLES, Control, Signal, unit_of
from twin.catalogue.units import SUFFIX_UNIT

# A recorded gauge is an int32 count of quanta; the last few codes are kept for "no reading" and its kin.
LAST_CODE = 2**31 - 16

SIGNALS = [s for t in TABLES.values() for s in (*t.gauges, *t.counters)]
GAUGES = [s for t in TABLES.values() for s in t.gauges]
CONTROLS = [c for t in TABLES.values() for c in t.controls]


def faults_of_unit(line: Signal | Control) -> Iterator[str]:
    declared = unit_of(line.name)
    if declared is None and isinstance(line, Control) and line.states:
        declared = "state"
    if declared != line.unit:
        yield (
            f"{line.key}: its name declares {declared}, the line says {line.unit}; remedy: a suffix of "
            'twin/catalogue/units.py (a share is `_pu` with unit "1", never percent)'
        )


def faults_of_range(gauge: Signal) -> Iterator[str]:
    if not gauge.low < gauge.high:
        yield f"{gauge.key}: low {gauge.low} is not below high {gauge.high}"
    if not gauge.quantum > 0:
        yield f"{gauge.key}: expected a quantum > 0, got {gauge.quantum}"
    elif max(abs(gauge.low), abs(gauge.high)) / gauge.quantum >= LAST_CODE:
        yield f"{gauge.key}: {gauge.high} in steps of {gauge.quantum} does not fit 31 bits"


def faults_of_companion(signal: Signal) -> Iterator[str]:
    base = TABLES[signal.table].by_name.get(signal.base or "")
    if base is None:
        yield f"{signal.key}: expected a signal {signal.base} beside it"
    elif (base.unit, base.low, base.high, base.quantum) != (
        signal.unit, signal.low, signal.high, signal.quantum,
    ):  # fmt: skip
        yield f"{signal.key}: expected unit, range and quantum of {base.key}"


def faults_of_readback(control: Control) -> Iterator[str]:
    echo = TABLES[control.table].by_name.get(control.readback or "")
    if echo is None or echo.unit != control.unit:
        yield f"{control.key}: expected a signal {control.readback} in {control.unit}"


def test_every_line_is_sound() -> None:
    found = [fault for line in (*SIGNALS, *CONTROLS) for fault in faults_of_unit(line)]
    found += [fault for gauge in GAUGES for fault in faults_of_range(gauge)]
    found += [fault for signal in SIGNALS if signal.base for fault in faults_of_companion(signal)]
    found += [fault for control in CONTROLS if control.readback for fault in faults_of_readback(control)]
    assert found == []


def test_a_bad_line_is_refused() -> None:
    good = TABLES["gpu"].by_name["power_w"]
    assert not [*faults_of_unit(good), *faults_of_range(good)]
    assert list(faults_of_unit(dataclasses.replace(good, unit="kW")))
    assert list(faults_of_unit(dataclasses.replace(good, name="power")))
    assert list(faults_of_range(dataclasses.replace(good, high=good.quantum * LAST_CODE)))
    assert list(faults_of_range(dataclasses.replace(good, low=-good.quantum * LAST_CODE)))
    assert list(faults_of_range(dataclasses.replace(good, low=good.high)))
    assert list(faults_of_range(dataclasses.replace(good, quantum=0.0)))
    peak = next(s for s in SIGNALS if s.base)
    assert list(faults_of_companion(dataclasses.replace(peak, name="absent_w_max")))
    assert list(faults_of_companion(dataclasses.replace(peak, unit="kW")))
    cap = next(c for c in CONTROLS if c.readback)
    assert list(faults_of_readback(dataclasses.replace(cap, readback="absent_w")))
    assert list(faults_of_readback(dataclasses.replace(cap, unit="kW")))


def test_the_catalogue_is_not_empty() -> None:
    assert len(SIGNALS) > 100
    assert SUFFIX_UNIT["_w"] == "W"
