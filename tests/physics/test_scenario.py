"""Scenario files: what they may say, what they mean, and that every fault of a file is told at once."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from tests.support.builders import profile_tree, site_of, two_racks
from twin.catalogue import NS, ConfigError
from twin.plant import BOTH, MAX_CASES, Plant, Scenario, cases_of, scenario_of
from twin.plant.scenario import ScenarioFile
from twin.site import SiteSpec, build_site
from twin.telemetry import JobStarted

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SITE = site_of(two_racks(policies={"thermal_guard": {"authority": "advise"}}))
LEAST: dict[str, Any] = {"name": "x", "hours": 1}


def problems_of(tree: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        scenario_of(tree, SITE, "s.yaml")
    assert all(p.startswith("s.yaml: $") for p in caught.value.problems), caught.value.problems
    return [p.removeprefix("s.yaml: ") for p in caught.value.problems]


@pytest.mark.parametrize("path", sorted((DEPLOY / "scenarios").glob("*.yaml")), ids=lambda p: p.stem)
def test_examples_fit_the_site_that_they_name(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#"), "says what it shows"
    tree = yaml.load(text, Loader=yaml.CSafeLoader)
    lab = yaml.load((DEPLOY / "sites" / "lab.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    site = build_site(SiteSpec(lab, {"gb200-nvl72": profile_tree("gb200-nvl72")}), "lab.yaml")
    assert cases_of(tree, site, path.name)


def test_all_of_a_scenario_reaches_its_meaning() -> None:
    made = scenario_of(
        {
            "name": "x", "seed": 7, "duration_s": 90.5, "dt_s": 0.5, "start": "2026-07-01T14:30:00+02:00",
            "weather": {"outdoor_mean_c": 30, "swing_k": 4, "rh_pu": 0.3},
            "workload": {"training_pu": 0.2, "inference_pu": 0.1, "batch_pu": 0.0, "job_hours": [1, 2]},
            "faults": [
                {"kind": "pump_trip", "entity": "cdu1", "begin_s": 3, "part": "both"},
                {"kind": "plate_degraded", "entity": "r2/node1/gpu2", "begin_s": 1, "ramp_s": 60},
                {"kind": "grid_event", "begin_s": 9, "end_s": 12, "severity": 0.3},
                {"kind": "sensor_biased", "entity": "lab/h/r2", "begin_s": 1, "signal": "flow_lpm",
                 "amount": -9},
            ],
            "grid": {"price_usd_per_kwh": 0.3, "carbon_g_per_kwh": 100},
            "policies": {"thermal_guard": "act"},
        },
        SITE,
    )  # fmt: skip
    assert (made.seed, made.duration_s, made.dt_s, made.hours) == (7, 90.5, 0.5, 90.5 / 3600)
    assert made.start_ns == int(datetime(2026, 7, 1, 12, 30, tzinfo=UTC).timestamp()) * NS
    assert (made.weather.mean_c, made.weather.swing_k, made.weather.rh_pu) == (30, 4, 0.3)
    assert made.weather.begin_s == 12.5 * 3600
    assert made.workload.hour_at_start == 12.5
    assert (made.workload.training_pu, made.workload.job_hours) == (0.2, (1, 2))
    trip, paste, sag, bias = made.scripts(SITE)
    assert (trip.table, trip.entity, trip.part) == ("cdu", 0, BOTH)
    assert (paste.table, SITE.name("gpu", paste.entity)) == ("gpu", "lab/h/r2/node1/gpu2")
    assert (sag.table, sag.entity, sag.end_s) == ("site", 0, 12)
    assert (bias.table, bias.entity, bias.signal, bias.amount) == ("rack", 1, "flow_lpm", -9)
    assert (made.prices.usd_per_kwh, made.prices.carbon_g_per_kwh) == (0.3, 100)
    assert made.policies == {"thermal_guard": "act"}


def test_an_entity_is_looked_for_in_the_tables_of_its_kind() -> None:
    leaks = [{"kind": "leak", "entity": e, "begin_s": 0} for e in ("r1/node3", "r2", "cdu1")]
    made = scenario_of(LEAST | {"faults": leaks}, SITE)
    assert [(f.table, f.entity) for f in made.faults] == [("node", 3), ("rack", 1), ("cdu", 0)]


def test_instants_may_be_numbers_or_without_a_zone() -> None:
    assert scenario_of(LEAST | {"start": 5 * NS}, SITE).start_ns == 5 * NS
    plain, zoned = (
        scenario_of(LEAST | {"start": s}, SITE) for s in ("2026-01-01T00:00:00", "2026-01-01T00:00Z")
    )
    assert plain.start_ns == zoned.start_ns


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"horus": 3}, r"\$\.horus: unknown key; expected one of .*hours"),
    ({"duration_s": 5}, r"\$\.hours: expected one of hours and duration_s, got both"),
    ({"hours": None}, r"\$\.hours: expected one of hours and duration_s, got neither"),
    ({"hours": 0}, r"\$\.hours: expected a number above 0"),
    ({"hours": float("nan")}, r"\$\.hours: expected a number above 0 .*got nan"),
    ({"hours": 1e9}, r"\$\.hours: .*at most 8784"),
    ({"dt_s": 61}, r"\$\.dt_s: expected a number of 0.01 to 60"),
    ({"dt_s": 0.009}, r"\$\.dt_s: expected a number of 0.01 to 60"),
    (
        {"hours": None, "duration_s": 4.9, "dt_s": 5},
        r"\$\.duration_s: expected at least a step of dt_s \(5 s\)",
    ),
    ({"hours": 0.001, "dt_s": 5}, r"\$\.hours: expected at least a step of dt_s"),
    ({"sweep": {"seeds": [4, 7, 4]}}, r"\$\.sweep\.seeds: expected each seed once, got 4 more than once"),
    ({"seed": -1}, r"\$\.seed: "),
    ({"seed": 2**70}, r"\$\.seed: expected a number of at most 63 bits"),
    ({"name": ""}, r"\$\.name: "),
    ({"start": "yesterday"}, r"\$\.start: expected an instant such as .*'yesterday'"),
    ({"weather": {"rh_pu": 55}}, r"\$\.weather\.rh_pu: expected a number of 0 to 1, got 55"),
    ({"weather": {"rain": 1}}, r"\$\.weather\.rain: unknown key"),
    ({"workload": {"training_pu": 0.9}}, r"\$\.workload: expected shares of 1 or less together, got 1\.27"),
    ({"workload": {"job_hours": [5, 1]}}, r"\$\.workload\.job_hours: expected \[lowest, highest\]"),
    ({"workload": {"job_hours": [0, 1]}}, r"\$\.workload\.job_hours: "),
    (
        {"policies": {"nobody": "act"}},
        r"\$\.policies\.nobody: expected a policy of the site \(thermal_guard\)",
    ),
    ({"policies": {"thermal_guard": "rule"}}, r"\$\.policies\.thermal_guard: expected one of off, advise"),
    ({"faults": {}}, r"\$\.faults: "),
    ({"sweep": {"seeds": [1], "count": 2}}, r"\$\.sweep\.count: expected one of seeds and count, got both"),
    ({"sweep": {"count": 0}}, r"\$\.sweep\.count: "),
    ({"sweep": {"vary": {"faults[0].severity": [1]}}}, r"\$\.sweep\.vary: expected a path of this file"),
    ({"sweep": {"vary": {"seed": [1]}}}, r"\$\.sweep\.vary: expected a path"),
    ({"sweep": {"vary": {"weather[0]": [1]}}}, r"\$\.sweep\.vary: expected a path"),
    ({"sweep": {"vary": {"dt_s.x": [1]}}}, r"\$\.sweep\.vary: expected a path"),
    ({"sweep": {"vary": {"dt_s": []}}}, r"\$\.sweep\.vary\.dt_s: expected at least one value"),
    ({"sweep": {"count": 9999, "vary": {"dt_s": [1, 2]}}}, rf"\$\.sweep: expected at most {MAX_CASES} cases"),
]


@pytest.mark.parametrize(("change", "pattern"), WRONG, ids=[p for _, p in WRONG])
def test_what_is_wrong_is_told_by_path_and_expectation(change: dict[str, Any], pattern: str) -> None:
    found = problems_of(LEAST | change)
    assert len(found) == 1, found
    assert re.match(pattern, found[0]), found


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "gremlins"}, r"kind: expected one of pump_trip, .*got 'gremlins'"),
    ({"entity": "cdu9"}, r"entity: expected the path of a cdu of lab, got 'cdu9'; such as lab/h/cdu1$"),
    ({"kind": "tray_blocked", "entity": "h/r2/node99"}, r"entity: .*; such as lab/h/r2/node"),
    (
        {"kind": "cooler_failed"},
        r"entity: expected the path of a loop of lab, got 'cdu1'; this site has none$",
    ),
    ({"entity": "r1"}, r"entity: expected the path of a cdu"),
    ({"entity": "lab/../etc"}, r"entity: "),
    ({"begin_s": -1}, r"begin_s: "),
    ({"end_s": 5}, r"end_s: expected an instant after begin_s \(10\), got 5"),
    ({"end_s": float("inf")}, r"end_s: "),
    ({"severity": 1.5}, r"severity: expected a number of 0 to 1, got 1.5"),
    ({"ramp_s": float("nan")}, r"ramp_s: "),
    ({"part": "3"}, r"part: expected one of 1, 2, both"),
    ({"kind": "valve_stuck", "part": "2"}, r"part: expected none"),
    ({"signal": "flow_lpm"}, r"signal: expected none"),
    ({"kind": "sensor_biased", "signal": "colour", "amount": 1}, r"signal: expected one of flow_lpm"),
    ({"kind": "sensor_biased", "signal": "flow_lpm"}, r"amount: expected how far it is off"),
]


@pytest.mark.parametrize(("change", "pattern"), FAULTS, ids=[p for _, p in FAULTS])
def test_what_is_wrong_with_a_fault_is_told(change: dict[str, Any], pattern: str) -> None:
    fault = {"kind": "pump_trip", "entity": "cdu1", "begin_s": 10} | change
    found = problems_of(LEAST | {"faults": [fault]})
    assert len(found) == 1, found
    assert re.match(r"\$\.faults\[0\]\." + pattern, found[0]), found


def test_all_problems_come_at_once_and_hold_their_places() -> None:
    found = problems_of({
        "hours": "a", "dt_s": 0, "typo": 1,
        "faults": [{"kind": "x", "begin_s": "now"}, 5, {"kind": "leak", "entity": "r9", "begin_s": 0}],
    })  # fmt: skip
    paths = {p.split(":")[0] for p in found}
    assert {"$.name", "$.hours", "$.dt_s", "$.typo", "$.faults[0].begin_s", "$.faults[0].kind", "$.faults[1]",
            "$.faults[2].entity"} <= paths  # fmt: skip


@pytest.mark.parametrize(
    "tree", [None, [], "text", 5, {1: 2}, {"name": ["x"] * 10**5}, {"name": "x" * 10**6}]
)
def test_hostile_trees_are_refused_in_few_words(tree: Any) -> None:
    found = problems_of(tree)
    assert found
    assert all(len(p) < 400 for p in found)


_scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_tree = st.recursive(
    _scalar,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=6), x, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(ScenarioFile.__struct_fields__), _tree)
@settings(max_examples=300, deadline=None)
def test_any_value_anywhere_is_taken_or_refused_as_a_fault_of_the_file(key: str, value: Any) -> None:
    with suppress(ConfigError):
        scenario_of(LEAST | {key: value}, SITE)


@given(st.text(max_size=20), _tree)
@settings(max_examples=200, deadline=None)
def test_any_path_of_a_sweep_is_taken_or_refused(path: str, value: Any) -> None:
    with suppress(ConfigError):
        cases_of(LEAST | {"sweep": {"vary": {path: [value]}}}, SITE)


def test_a_sweep_is_every_seed_with_every_combination() -> None:
    tree = LEAST | {
        "seed": 5,
        "faults": [{"kind": "leak", "entity": "r1", "begin_s": 0, "severity": 0.1}],
        "sweep": {"count": 2, "vary": {"faults[0].severity": [0.2, 0.4], "weather.swing_k": [1, 2, 3]}},
    }
    cases = cases_of(tree, SITE)
    assert len(cases) == 12
    assert [c.seed for _, c in cases[:2]] == [5, 6]
    assert {(c.faults[0].severity, c.weather.swing_k, c.seed) for _, c in cases} == {
        (s, w, seed) for s in (0.2, 0.4) for w in (1, 2, 3) for seed in (5, 6)
    }
    for varied, case in cases:
        assert varied == {
            "seed": case.seed, "faults[0].severity": case.faults[0].severity,
            "weather.swing_k": case.weather.swing_k,
        }  # fmt: skip
    assert tree["faults"][0]["severity"] == 0.1, "the file's own tree stays as it is"


def test_what_a_run_leaves_out_is_remarked() -> None:
    faults = [{"kind": "pump_trip", "entity": "cdu1", "begin_s": b} for b in (0, 69, 70, 500)]
    made = scenario_of({"name": "x", "duration_s": 70, "faults": faults, "sweep": {"count": 3}}, SITE)
    swept, late = made.remarks(70.0)
    assert "only its base case is run" in swept
    assert late.endswith("after 70 s, before these faults begin: pump_trip (70 s), pump_trip (500 s)")
    (half,) = scenario_of(LEAST, SITE).remarks(70.4)
    assert half == "70.4 s is no whole number of steps of 1 s: 70 s are run"
    assert all(
        case.remarks(501.0) == []
        for _, case in cases_of(
            {"name": "x", "duration_s": 70, "faults": faults, "sweep": {"count": 3}}, SITE
        )
    )


def test_without_a_sweep_there_is_one_case() -> None:
    ((varied, case),) = cases_of(LEAST, SITE)
    assert varied == {}
    assert case == scenario_of(LEAST, SITE)


def test_a_varied_value_is_judged_like_one_of_the_file() -> None:
    tree = LEAST | {"sweep": {"vary": {"weather.rh_pu": [0.5, 7, "wet"]}}}
    with pytest.raises(ConfigError) as caught:
        cases_of(tree, SITE, "s.yaml")
    first, second = caught.value.problems
    assert first.startswith("s.yaml with weather.rh_pu = 7: $.weather.rh_pu: expected a number of 0 to 1")
    assert second.startswith("s.yaml with weather.rh_pu = 'wet': $.weather.rh_pu: expected")


def test_an_ordinary_day_is_the_shortest_file() -> None:
    site = site_of(two_racks())
    found = scenario_of({"name": "an ordinary day", "seed": 5, "hours": 3.0}, site)
    assert Scenario.ordinary(3.0, 5) == found
    plant = Plant(site, 5, Scenario.ordinary(3.0, 5))
    plant.step(dt_s=120.0)
    assert plant.truth.gpu_sm_pu.std() > 0.1  # jobs differ; a constant activity does not
    assert any(isinstance(e, JobStarted) for e in plant.events())
