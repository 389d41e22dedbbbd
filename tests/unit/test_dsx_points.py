"""The table of DSX points: complete against bms.yaml, sound against the catalogue, tolerant of spelling."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.dsx.points import (
    AREAS,
    POINT_TYPES,
    ROWS,
    SIGNAL_WORDS,
    STATE_WORDS,
    Metadata,
    StateText,
    apply_template,
    find_row,
    find_template,
    reading_rule,
    site_name,
    split_areas,
)
from twin.catalogue import TABLES


def test_every_row_names_signals_of_the_catalogue_with_one_unit() -> None:
    keys = {(r.object_type, r.point_type, r.areas, r.setpoint, r.ours, r.phase, r.table) for r in ROWS}
    assert len(keys) == len(ROWS)
    for row in ROWS:
        specs = [TABLES[row.table].by_name[s] for s in row.signals]
        assert len({(s.unit, s.kind, s.states) for s in specs}) == 1, row
        assert row.alone in row.signals
        assert row.areas <= set(AREAS)
        assert row.point_type in POINT_TYPES


def test_the_words_of_states_are_of_states_that_exist() -> None:
    states = {state for table in TABLES.values() for s in table.gauges for state in s.states}
    assert set(STATE_WORDS) <= states
    for key, words in SIGNAL_WORDS.items():
        table, _, name = key.partition(".")
        assert tuple(words) == TABLES[table].by_name[name].states


def test_the_point_types_are_those_of_the_published_schema(recording: Callable[[str], Path]) -> None:
    text = (recording("dsx-bms-capture") / "bms.yaml").read_text()
    published = set(re.findall(r"pointType:\n\s+type: string\n\s+enum: \[(\w+)\]", text))
    assert len(published) > 40
    assert published <= POINT_TYPES


@pytest.mark.parametrize(
    "wire, meant",
    [
        ("Secondary", "Secondary"),
        ("Seccondary", "Secondary"),
        ("secondray", "Secondary"),
        ("SECONDARY", "Secondary"),
        ("Cold Aisle", "ColdAisle"),
        ("ColdAsle", "ColdAisle"),
        ("Filter1", "Filter"),
        ("Retrun", "Return"),
        ("Outlte", "Outlet"),
        ("Suply", "Supply"),
        ("CoAisle", None),  # as close to the cold aisle as to the hot one
        ("Pod1C", None),
        ("Full", None),
        ("Tertiary", None),
        ("", None),
        ("1", None),
        ("Primary\u0000", "Primary"),
        ("x" * 64, None),
    ],
)
def test_process_areas_tolerate_slips(wire: str, meant: str | None) -> None:
    areas = split_areas([wire])
    assert areas.known == (frozenset([meant]) if meant else frozenset())
    assert areas.places == (() if meant else (wire,))


def test_a_slip_is_noted_and_a_true_word_is_not() -> None:
    assert split_areas(["Seccondary", "Supply"]).misspelt == (("Seccondary", "Secondary"),)
    assert split_areas("Filter2").misspelt == ()


def _rule(kind: str, point: str, table: str, texts: dict[int, str] | None, unit: str | None = None) -> object:
    states = [StateText(n, t) for n, t in texts.items()] if texts is not None else None
    meta = Metadata(kind, point, eng_unit=unit, state_text=states)
    row = find_row(meta, frozenset(), table)
    assert row is not None
    rule = reading_rule(meta, row)
    return rule if isinstance(rule, str) else (rule.states or (rule.factor, rule.offset))


@pytest.mark.parametrize(
    "kind, point, table, texts, expected",
    [
        ("Rack", "RackLeakDetect", "rack", {0: "NoLeak", 1: "Leak"}, {0: 0.0, 1: 1.0}),
        ("Rack", "RackLeakDetect", "rack", {0: "Leak", 1: "NoLeak"}, {0: 1.0, 1: 0.0}),
        ("Rack", "RackLeakDetect", "rack", {0: "no leak", 1: "LEAK DETECTED"}, {0: 0.0, 1: 1.0}),
        ("Rack", "RackLeakDetect", "rack", {2: "Leak", 7: "no-leak"}, {2: 1.0, 7: 0.0}),
        ("Rack", "RackLeakDetect", "rack", {0: "Leak", 1: "Foo"}, {0: 1.0, 1: None}),
        ("Rack", "RackLeakDetect", "rack", {0: "trocken", 1: "nass", 5: "?"}, {0: 0.0, 1: 1.0, 5: None}),
        ("Rack", "RackLeakDetect", "rack", None, {0: 0.0, 1: 1.0}),
        ("Rack", "RackLeakSensorFault", "rack", {0: "NoFault", 1: "Fault"}, {0: 0.0, 1: 1.0}),
        ("Rack", "RackLiquidIsolationRequest", "rack", {0: "NoIsolateRequest", 1: "isolate request", -1: "?"},
         {0: 0.0, 1: 1.0, -1: None}),
        ("Rack", "RackLiquidIsolationRequest", "rack", {0: "NoIsolationRequested", 1: "IsolationRequested"},
         {0: 0.0, 1: 1.0}),
        ("Breaker", "Status", "feeder", {0: "Open", 1: "Closed"}, {0: 1.0, 1: 0.0}),
        ("Breaker", "Status", "feeder", {0: "Off", 1: "On"}, {0: 1.0, 1: 0.0}),
        ("CDU", "Status", "cdu", {0: "NotOperating", 1: "Operating"}, {0: 0.0, 1: 1.0}),
    ],
)  # fmt: skip
def test_texts_decide_the_states(
    kind: str, point: str, table: str, texts: dict[int, str] | None, expected: dict[int, float | None]
) -> None:
    assert _rule(kind, point, table, texts) == expected


def test_a_breaker_without_known_texts_means_nothing() -> None:
    assert "unknown texts" in str(_rule("Breaker", "Status", "feeder", {0: "foo", 1: "bar"}))
    assert "no texts" in str(_rule("Breaker", "Status", "feeder", None))


@pytest.mark.parametrize(
    "unit, expected",
    [("kW", (1000.0, 0.0)), ("W", (1.0, 0.0)), ("MW", (1e6, 0.0)), ("BTU", "unit 'BTU'"), ("A", "measures W"),
     (None, "no unit")],
)  # fmt: skip
def test_units_are_converted_or_named(unit: str | None, expected: object) -> None:
    rule = _rule("Rack", "RackPower", "rack", None, unit)
    assert rule == expected if isinstance(expected, tuple) else str(expected) in str(rule)


def test_a_state_with_a_unit_is_refused() -> None:
    assert "expected the states no_leak, leak" in str(_rule("Rack", "RackLeakDetect", "rack", None, "%"))


def test_areas_must_fit_exactly() -> None:
    meta = Metadata("CDU", "LiquidTemperature", eng_unit="C")
    assert find_row(meta, frozenset({"Secondary", "Supply"}), "cdu") is not None
    assert find_row(meta, frozenset({"Secondary"}), "cdu") is None
    assert find_row(meta, frozenset({"Secondary", "Supply", "Filter"}), "cdu") is None


def test_phases_have_two_spellings() -> None:
    for phase, signal in (("A", "phase_a_current_a"), ("2", "phase_b_current_a"), (3, "phase_c_current_a")):
        row = find_row(Metadata("PowerMeter", "PhaseCurrent", phase=phase), frozenset(), "feeder")
        assert row is not None
        assert row.signals == (signal,)
    assert find_row(Metadata("PowerMeter", "PhaseCurrent", phase="D"), frozenset(), "feeder") is None
    assert find_row(Metadata("PowerMeter", "PhaseCurrent"), frozenset(), "feeder") is None


def test_ids_become_names() -> None:
    assert site_name("Pod1C-E05") == "Pod1C-E05"
    assert site_name("rack 5/ä[1]") == "rack+20+5+2f++e4++5b+1+5d+"


def test_names_of_taps_and_racks_go_together() -> None:
    template = find_template("C-E05-TAP-E1", "Pod1C-E05")
    assert template is not None
    assert apply_template(template, "C-E06-TAP-E1") == "Pod1C-E06"
    assert apply_template(template, "C-E06-TAP-E2") is None
    assert apply_template(template, "C-E06_TAP-E1") is None
    assert apply_template(template, "E06") is None
    assert find_template("TAP-A", "RACK-B") is None
    twice = find_template("P1-R2-R2", "P1-R2")
    assert twice is not None
    assert apply_template(twice, "P9-R4-R4") == "P9-R4"
    assert apply_template(twice, "P9-R4-R5") is None
