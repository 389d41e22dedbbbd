"""Every line of the catalogue is sound: units as the names declare them, ranges that fit the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

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
        yield f"{line.key}: its name declares {declared}, the line says {line.unit}"


def faults_of_range(gauge: Signal) -> Iterator[str]:
    if not gauge.low < gauge.high:
        yield f"{gauge.key}: low {gauge.low} is not below high {gauge.high}"
    if not gauge.quantum > 0:
        yield f"{gauge.key}: expected a quantum > 0, got {gauge.quantum}"
    elif max(abs(gauge.low), abs(gauge.high)) / gauge.quantum >= LAST_CODE:
        yield f"{gauge.key}: {gauge.high} in steps of {gauge.quantum} does not fit 31 bits"


def by_key(line: Signal | Control) -> str:
    return line.key


@pytest.mark.parametrize("line", [*SIGNALS, *CONTROLS], ids=by_key)
def test_the_unit_is_what_the_name_declares(line: Signal | Control) -> None:
    assert not list(faults_of_unit(line))


@pytest.mark.parametrize("gauge", GAUGES, ids=by_key)
def test_the_range_fits_the_record(gauge: Signal) -> None:
    assert not list(faults_of_range(gauge))


@pytest.mark.parametrize("signal", [s for s in SIGNALS if s.base], ids=by_key)
def test_a_companion_stands_beside_its_signal(signal: Signal) -> None:
    beside = TABLES[signal.table].by_name.get(signal.base or "")
    assert beside is not None
    assert (beside.unit, beside.low, beside.high, beside.quantum) == (
        signal.unit, signal.low, signal.high, signal.quantum,
    )  # fmt: skip


@pytest.mark.parametrize("control", [c for c in CONTROLS if c.readback], ids=by_key)
def test_a_read_back_is_a_signal_of_the_same_table_and_unit(control: Control) -> None:
    echo = TABLES[control.table].by_name.get(control.readback or "")
    assert echo is not None
    assert echo.unit == control.unit


def test_a_bad_line_is_refused() -> None:
    good = TABLES["gpu"].by_name["power_w"]
    assert not [*faults_of_unit(good), *faults_of_range(good)]
    assert list(faults_of_unit(dataclasses.replace(good, unit="kW")))
    assert list(faults_of_unit(dataclasses.replace(good, name="power")))
    assert list(faults_of_range(dataclasses.replace(good, high=good.quantum * LAST_CODE)))
    assert list(faults_of_range(dataclasses.replace(good, low=-good.quantum * LAST_CODE)))
    assert list(faults_of_range(dataclasses.replace(good, low=good.high)))
    assert list(faults_of_range(dataclasses.replace(good, quantum=0.0)))


def test_the_catalogue_is_not_empty() -> None:
    assert len(SIGNALS) > 100
    assert SUFFIX_UNIT["_w"] == "W"
