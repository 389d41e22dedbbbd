"""Fault scripts: each does what its kind says, to the right entity, for the right time; draws keep apart."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.evaluation.bench.fault_draws import (
    DEVELOP,
    HELD_OUT,
    RAMP_S,
    SEVERITY,
    above,
    draw,
    draw_pair,
    entities,
    kinds_of,
)
from tests.support.builders import site_of, two_racks
from twin.catalogue import find_signal
from twin.diagnosis import FAULT_KINDS
from twin.plant import BOTH, PUBLISHED, Campaign, Plant, Scenario, Script
from twin.plant.disturbance import Disturbance, neutral
from twin.plant.faults import ALL_SIGNALS, neutral_value
from twin.plant.truth import Truth
from twin.plant.workload import Mix
from twin.site import Site


def whole_site() -> Site:
    """Two racks with everything that a fault can befall."""
    tree = two_racks(loops=[{"name": "fws", "cooling": "dry_cooler"}])
    tree["halls"][0]["cdus"][0]["loop"] = "fws"
    tree["halls"][0]["planes"] = [{"name": "rail", "links_per_node": 1}]
    return site_of(tree)


SITE = whole_site()
BIG = site_of({
    "site": "big",
    "loops": [{"name": "fws[1-2]", "cooling": "dry_cooler"}],
    "halls": [{
        "name": "h", "racks": [{"name": "r[01-16]", "profile": "gb200-nvl72"}],
        "cdus": [{"name": "c[1-2]", "loop": "fws1", "serves": ["r[01-08]"]},
                 {"name": "d[1-2]", "loop": "fws2", "serves": ["r[09-16]"]}],
        "feeders": [{"name": "main", "serves": ["a", "b"]},
                    {"name": "a", "side": "A", "serves": ["r[01-16]"]},
                    {"name": "b", "side": "B", "serves": ["r[01-16]"]}],
    }],
})  # fmt: skip


def difference(d: Disturbance, site: Site = SITE) -> dict[str, Any]:
    """{field: {index: value}} of what is not neutral; `sensors` as they are."""
    out: dict[str, Any] = {}
    well = neutral(site)
    for f in dataclasses.fields(d):
        now, before = getattr(d, f.name), getattr(well, f.name)
        if f.name == "sensors":
            if now:
                out["sensors"] = list(now)
        elif isinstance(now, np.ndarray):
            changed = ~((now == before) | ((now != now) & (before != before)))
            if changed.any():
                out[f.name] = {tuple(i): now[tuple(i)] for i in np.argwhere(changed).tolist()}
        elif now != before:
            out[f.name] = now
    return out


def acting(*scripts: Script, time_s: float = 0.0, site: Site = SITE) -> dict[str, Any]:
    d = neutral(site)
    Campaign(site, scripts).apply(d, time_s, 1.0)
    return difference(d, site)


FACTOR = pytest.approx
EFFECTS: list[tuple[Script, dict[str, Any]]] = [
    (Script("pump_trip", "cdu", 0, 0, part=1), {"cdu_pump_ok": {(0, 1): False}}),
    (Script("pump_trip", "cdu", 0, 0, part=BOTH), {"cdu_pump_ok": {(0, 0): False, (0, 1): False}}),
    (Script("pump_worn", "cdu", 0, 0, severity=0.5), {"cdu_pump_head_factor": {(0, 0): FACTOR(0.7)}}),
    (Script("filter_blocked", "cdu", 0, 0, severity=1 / 3), {"cdu_filter_factor": {(0,): FACTOR(10.0)}}),
    (Script("exchanger_fouled", "cdu", 0, 0, severity=0.4), {"cdu_ua_factor": {(0,): FACTOR(0.66)}}),
    (Script("valve_stuck", "cdu", 0, 0, severity=0.9), {"cdu_valve_stuck_pu": {(0,): FACTOR(0.1)}}),
    (Script("branch_blocked", "rack", 1, 0, severity=0.5), {"rack_branch_factor": {(1,): FACTOR(4.0)}}),
    (Script("branch_blocked", "rack", 1, 0), {"rack_branch_factor": {(1,): 1e12}}),
    (Script("tray_blocked", "node", 3, 0, severity=0.5), {"node_plate_factor": {(3,): FACTOR(3.0)}}),
    (Script("plate_degraded", "gpu", 7, 0, severity=0.5), {"gpu_plate_factor": {(7,): FACTOR(2.0)}}),
    (Script("leak", "node", 2, 0), {"node_leak_lpm": {(2,): 0.5}}),
    (Script("water_detected", "hall", 0, 0), {"hall_wet": {(0,): True}}),
    (Script("leak", "rack", 1, 0, severity=0.5), {"rack_leak_lpm": {(1,): 2.0}}),
    (Script("leak", "cdu", 0, 0), {"cdu_leak_lpm": {(0,): 20.0}}),
    (Script("leak", "loop", 0, 0), {"loop_leak_lpm": {(0,): 60.0}}),
    (Script("coolant_loss", "cdu", 0, 0, severity=0.5), {"cdu_unseen_lpm": {(0,): 2.0}}),
    (Script("cooler_failed", "loop", 0, 0, severity=0.75), {"loop_fan_factor": {(0,): 0.25}}),
    (Script("heat_wave", "site", 0, 0, severity=0.5), {"outdoor_add_k": 10.0}),
    (Script("sensor_biased", "rack", 1, 0, signal="flow_lpm", amount=-9), {"sensors": ["biased", -9]}),
    (Script("sensor_spiking", "gpu", 1, 0, signal="temp_c", amount=20), {"sensors": ["spiking", 20]}),
    (Script("sensor_frozen", "cdu", 0, 0, signal="flow_lpm"), {"sensors": ["frozen", 0]}),
    (Script("sensor_silent", "feeder", 1, 0, signal="power_w"), {"sensors": ["silent", 0]}),
    (Script("psu_lost", "node", 1, 0, part=1), {"node_psu_ok": {(1, 1): False}}),
    (Script("feed_lost", "feeder", 1, 0), {"feeder_ok": {(1,): False}}),
    (Script("breaker_tripped", "feeder", 0, 0), {"feeder_trip": {(0,): True}}),
    (Script("grid_event", "site", 0, 0, severity=0.3), {"grid_voltage_pu": FACTOR(0.7)}),
    (Script("xid_burst", "gpu", 5, 0, amount=63), {"gpu_xid": {(5,): 63}}),
    (Script("ecc_growth", "gpu", 5, 0), {"gpu_sbe_per_s": {(5,): 5.0}, "gpu_dbe_per_s": {(5,): 5 / 20_000}}),
    (Script("nvlink_flaps", "gpu", 5, 0, severity=0.5), {"gpu_nvlink_errors_per_s": {(5,): 1000.0}}),
    (Script("gpu_off_bus", "gpu", 5, 0), {"gpu_alive": {(5,): False}}),
    (Script("node_silent", "node", 4, 0), {"sensors": ["silent", 0]}),
    (Script("node_down", "node", 4, 0), {"node_psu_ok": {(4, 0): False, (4, 1): False}}),
    (Script("link_congested", "link", 3, 0, severity=0.5),
     {"link_rate_factor": {(3,): 0.6}, "link_discards_per_s": {(3,): 2500.0}}),
    (Script("link_down", "link", 3, 0), {"link_down": {(3,): True}}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), EFFECTS, ids=[f"{s.kind}-{s.table}" for s, _ in EFFECTS])
def test_a_script_does_what_its_kind_says_and_nothing_else(script: Script, expected: dict[str, Any]) -> None:
    found = acting(script)
    if "sensors" in expected:
        (fault,) = found["sensors"]
        assert [fault.trouble, fault.amount] == expected["sensors"]
        assert (fault.table, fault.entity) == (script.table, script.entity)
        assert fault.signal == (script.signal or ALL_SIGNALS)
        expected = {"sensors": found["sensors"]}
    assert found == expected


def test_every_kind_has_a_script_on_every_table() -> None:
    """Sensor faults of a node's own sensors and so on: what PUBLISHED names."""
    tested = {(s.kind, s.table) for s, _ in EFFECTS}
    plain = {(k, t) for k in FAULT_KINDS if not k.startswith("sensor_") for t in FAULT_KINDS[k].tables}
    assert plain <= tested
    assert {k for k, _ in tested} == set(FAULT_KINDS)
    assert set(kinds_of(SITE)) == set(FAULT_KINDS) - {"coolant_loss", "water_detected"}, "seen by no detector"


def test_it_acts_in_every_step_that_it_overlaps_and_leaves_nothing_behind() -> None:
    d = neutral(SITE)
    run = Campaign(SITE, [Script("branch_blocked", "rack", 0, 10.5, 12.5, severity=0.5)])
    seen = []
    for t in range(20):
        changed = run.apply(d, float(t), 1.0)
        seen.append((changed, bool(difference(d))))
    assert [t for t, (_, is_on) in enumerate(seen) if is_on] == [10, 11, 12]
    assert [t for t, (changed, _) in enumerate(seen) if changed] == [10, 13]
    assert run.acting == ()


def test_a_ramp_grows_evenly_and_ends_at_its_severity() -> None:
    d = neutral(SITE)
    run = Campaign(SITE, [Script("exchanger_fouled", "cdu", 0, 100, severity=0.8, ramp_s=50)])
    lost = []
    for t in range(90, 170):
        run.apply(d, float(t), 1.0)
        lost.append(1.0 - d.cdu_ua_factor[0])
    assert lost[:10] == [0.0] * 10
    assert lost[10:60] == pytest.approx(0.85 * 0.8 * np.arange(1, 51) / 50)
    assert lost[60:] == pytest.approx([0.85 * 0.8] * 20)


def test_two_of_a_kind_multiply_and_the_one_that_ends_takes_only_its_own() -> None:
    d = neutral(SITE)
    run = Campaign(SITE, [
        Script("plate_degraded", "gpu", 3, 0, severity=0.5),
        Script("plate_degraded", "gpu", 3, 0, 5, severity=1.0),
        Script("leak", "rack", 0, 0, 5),
        Script("leak", "rack", 0, 0, severity=0.5),
        Script("sensor_silent", "rack", 1, 0, 5, signal="flow_lpm"),
    ])  # fmt: skip
    run.apply(d, 0.0, 1.0)
    assert (d.gpu_plate_factor[3], d.rack_leak_lpm[0], len(d.sensors)) == (6.0, 6.0, 1)
    run.apply(d, 5.0, 1.0)
    assert (d.gpu_plate_factor[3], d.rack_leak_lpm[0], len(d.sensors)) == (2.0, 2.0, 0)


def test_one_that_grows_leaves_another_of_its_kind_as_it_is() -> None:
    d = neutral(SITE)
    run = Campaign(SITE, [
        Script("plate_degraded", "gpu", 3, 0, severity=0.5),
        Script("plate_degraded", "gpu", 3, 5, severity=0.5, ramp_s=10),
        Script("plate_degraded", "gpu", 4, 0, severity=0.5),
    ])  # fmt: skip
    for t in range(20):
        run.apply(d, float(t), 1.0)
        grown = min(max(t - 4, 0) / 10, 1.0)
        assert d.gpu_plate_factor[3] == pytest.approx(2.0 * (1.0 + grown))
        assert d.gpu_plate_factor[4] == 2.0


def test_what_no_script_touches_is_left_alone() -> None:
    d = neutral(SITE)
    d.rack_leak_lpm[1] = 3.0
    run = Campaign(SITE, [Script("leak", "rack", 0, 1, 2)])
    for t in range(5):
        run.apply(d, float(t), 1.0)
    assert d.rack_leak_lpm.tolist() == [0.0, 3.0]


def test_xids_come_one_by_one_at_their_pace() -> None:
    d = neutral(SITE)
    run = Campaign(SITE, [Script("xid_burst", "gpu", 9, 20, 3620, severity=1.0, amount=31)], seed=5)
    raised = []
    for t in range(4000):
        run.apply(d, float(t), 1.0)
        if d.gpu_xid.any():
            assert difference(d) == {"gpu_xid": {(9,): 31}}
            raised.append(t)
    assert raised[0] == 20
    assert raised[-1] < 3620
    assert len(raised) == pytest.approx(3600 / 11, rel=0.15)


def test_rates_of_errors_are_told_in_every_step() -> None:
    d = neutral(SITE)
    run = Campaign(SITE, [Script("ecc_growth", "gpu", 9, 2, 6)])
    assert [t for t in range(10) if run.apply(d, float(t), 1.0)] == [2, 3, 4, 5, 6]


def test_a_fork_goes_on_alike_and_apart() -> None:
    scripts = [Script("xid_burst", "gpu", 9, 0, severity=1.0)]
    one, d1 = Campaign(SITE, scripts, seed=1), neutral(SITE)
    for t in range(100):
        one.apply(d1, float(t), 1.0)
    two, d2 = copy.deepcopy((one, d1))
    for t in range(100, 300):
        assert one.apply(d1, float(t), 1.0) == two.apply(d2, float(t), 1.0)
        assert np.array_equal(d1.gpu_xid, d2.gpu_xid)


@pytest.mark.parametrize("change", [
    {"kind": "gremlins"}, {"table": "rack"}, {"severity": 1.1}, {"severity": float("nan")}, {"ramp_s": -1.0},
    {"end_s": 1.0}, {"part": 2}, {"kind": "sensor_biased", "signal": "colour"}, {"ramp_s": float("nan")},
])  # fmt: skip
def test_a_script_without_sense_is_refused(change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"kind": "pump_trip", "table": "cdu", "entity": 0, "begin_s": 5.0}
    with pytest.raises(ValueError, match=r"expected|no fault|no signal"):
        Script(**(plain | change))


def test_a_campaign_refuses_what_its_site_has_not() -> None:
    for entity in (-1, 1):
        with pytest.raises(ValueError, match="has no cdu"):
            Campaign(SITE, [Script("pump_trip", "cdu", entity, 0)])
    with pytest.raises(ValueError, match="no second part"):
        Campaign(SITE, [Script("valve_stuck", "cdu", 0, 0, part=1)])


def test_neutral_values_are_those_of_a_disturbance() -> None:
    well = neutral(SITE)
    for script, _ in EFFECTS:
        for effect in script.effects(1.0):
            now = getattr(well, effect.field)
            assert np.array_equal(
                now if effect.at is None else now[effect.at], neutral_value(effect.field), equal_nan=True
            )


# Draws.


def test_published_signals_are_gauges_of_the_catalogue() -> None:
    for table, names in PUBLISHED.items():
        for name in names:
            signal = find_signal(f"{table}.{name}")
            assert signal is not None
            assert signal.kind == "gauge"


@pytest.mark.parametrize("kind", list(FAULT_KINDS))
def test_draws_reach_a_kind_within_its_ranges_and_keep_apart(kind: str) -> None:
    low, high = SEVERITY.get(kind, (1.0, 1.0))
    quarter = max(high - low, 1e-9) / 4
    for ranges in (DEVELOP, HELD_OUT):
        for seed in range(40):
            s = draw(SITE, ranges.generator(seed), kind, ranges, 60.0)
            assert (s.kind, s.begin_s) == (kind, 60.0)
            assert s == draw(SITE, ranges.generator(seed), kind, ranges, 60.0)
            if high > low and s.severity < 1.0:
                assert int((s.severity - low) / quarter) in ranges.quarters
            if kind in RAMP_S:
                first, last = RAMP_S[kind]
                assert int((s.ramp_s - first) / (last - first) * 4) in ranges.quarters
            found = acting(s, time_s=60.0)
            assert found, s


def test_biases_are_well_above_noise_and_below_nonsense() -> None:
    sizes: dict[str, list[float]] = {}
    for seed in range(400):
        s = draw(BIG, DEVELOP.generator(seed), "sensor_biased")
        sizes.setdefault(f"{s.table}.{s.signal}", []).append(abs(s.amount))
    assert set(sizes) == {f"{t}.{n}" for t, names in PUBLISHED.items() for n in names}
    for key, found in sizes.items():
        if key.endswith("_c"):
            assert min(found) >= 2.0, key
            assert max(found) <= 6.0, key
    flow = BIG.design.rack_flow_lpm[0]
    assert min(sizes["rack.flow_lpm"]) >= 0.08 * flow
    assert max(sizes["rack.flow_lpm"]) <= 0.25 * flow
    assert max(sizes["gpu.power_w"]) < 0.25 * BIG.design.gpu_max_w[0]


def test_spikes_rise_well_above_a_bias() -> None:
    found = [draw(BIG, DEVELOP.generator(seed), "sensor_spiking") for seed in range(100)]
    temps = [s.amount for s in found if s.signal.endswith("_c")]
    assert min(temps) >= 8.0
    assert max(temps) <= 24.0


def test_pairs_are_never_above_one_another() -> None:
    for seed in range(150):
        a, b = draw_pair(BIG, HELD_OUT.generator(seed), HELD_OUT, 100.0)
        assert (a.table, a.entity) != (b.table, b.entity)
        assert (a.table, a.entity) not in above(BIG, b.table, b.entity)
        assert (b.table, b.entity) not in above(BIG, a.table, a.entity)
        assert "site" not in (a.table, b.table)
        assert a.begin_s == 100.0
        assert 100.0 <= b.begin_s <= 160.0


def test_above_is_place_cooling_and_power() -> None:
    node = int(BIG.node_of_gpu[5])
    names = [BIG.name(t, e) for t, e in above(BIG, "gpu", 5) if t != "site"]
    assert names[0] == BIG.name("node", node)
    assert {"big/h/r01", "big/h/c1", "big/fws1", "big/h/a", "big/h/b", "big/h/main"} <= set(names)
    assert [BIG.name(t, e) for t, e in above(BIG, "cdu", 3) if t != "site"] == ["big/fws2"]


def test_a_site_without_cooling_has_no_cooling_faults() -> None:
    air = site_of({"site": "x", "halls": [{"name": "h", "racks": [{"name": "r1", "profile": "hgx-h100"}]}]})
    found = kinds_of(air)
    assert not {"pump_trip", "branch_blocked", "tray_blocked", "leak", "feed_lost", "link_down"} & set(found)
    assert {"plate_degraded", "gpu_off_bus", "sensor_biased", "heat_wave", "node_silent"} <= set(found)
    with pytest.raises(ValueError, match="nothing that a pump_trip could befall"):
        draw(air, DEVELOP.generator(0), "pump_trip")
    assert len(entities(air, "pump_trip", "cdu")) == 0


# The plant's response.


def truth_after(*scripts: Script, seconds: int = 120) -> Truth:
    steady = Mix(constant_pu=0.9)
    plant = Plant(SITE, seed=1, scenario=Scenario("x", workload=steady, faults=scripts))
    for _ in range(seconds):
        plant.step()
    return plant.truth


@pytest.fixture(scope="module")
def well() -> Truth:
    return truth_after()


SYMPTOMS: list[tuple[Script, str, int | tuple[int, int], str]] = [
    (Script("pump_trip", "cdu", 0, 10, part=0), "cdu_pump_speed_pu", (0, 0), "zero"),
    (Script("pump_trip", "cdu", 0, 10, part=BOTH), "cdu_flow_lpm", 0, "zero"),
    (Script("pump_worn", "cdu", 0, 10, severity=0.8, part=BOTH), "cdu_pump_speed_pu", (0, 0), "up"),
    (Script("filter_blocked", "cdu", 0, 10, severity=0.9), "cdu_filter_drop_pa", 0, "up"),
    (Script("exchanger_fouled", "cdu", 0, 10, severity=0.9), "cdu_valve_pu", 0, "up"),
    (Script("valve_stuck", "cdu", 0, 10, severity=0.95), "cdu_supply_c", 0, "up"),
    (Script("branch_blocked", "rack", 1, 10), "rack_flow_lpm", 1, "zero"),
    (Script("branch_blocked", "rack", 1, 10, severity=0.5), "rack_return_c", 1, "up"),
    (Script("tray_blocked", "node", 3, 10, severity=0.4), "gpu_temp_c", 12, "up"),
    (Script("plate_degraded", "gpu", 7, 10, severity=0.4), "gpu_temp_c", 7, "up"),
    (Script("leak", "node", 2, 10), "node_leak", 2, "up"),
    (Script("leak", "rack", 1, 10), "rack_leak", 1, "up"),
    (Script("leak", "cdu", 0, 10, severity=0.2), "cdu_leaked_l", 0, "up"),
    (Script("leak", "loop", 0, 10), "loop_leak", 0, "up"),
    (Script("water_detected", "hall", 0, 10), "hall_wet", 0, "up"),
    (Script("coolant_loss", "cdu", 0, 10), "cdu_leaked_l", 0, "up"),
    (Script("cooler_failed", "loop", 0, 10), "loop_supply_c", 0, "up"),
    (Script("heat_wave", "site", 0, 10), "loop_supply_c", 0, "up"),
    (Script("psu_lost", "node", 1, 10, part=1), "node_psu_power_w", (1, 1), "zero"),
    (Script("node_down", "node", 1, 10), "node_power_w", 1, "zero"),
    (Script("feed_lost", "feeder", 0, 10), "feeder_voltage_pu", 0, "zero"),
    (Script("feed_lost", "feeder", 0, 10), "feeder_power_w", 1, "up"),
    (Script("breaker_tripped", "feeder", 1, 10), "feeder_tripped", 1, "up"),
    (Script("grid_event", "site", 0, 10, severity=0.4), "feeder_voltage_pu", 0, "down"),
    (Script("xid_burst", "gpu", 5, 10), "gpu_xid_code", 5, "up"),
    (Script("ecc_growth", "gpu", 5, 10), "gpu_sbe_count", 5, "up"),
    (Script("nvlink_flaps", "gpu", 5, 10), "gpu_nvlink_errors", 5, "up"),
    (Script("gpu_off_bus", "gpu", 5, 10), "gpu_power_w", 5, "zero"),
    (Script("link_congested", "link", 3, 10), "link_discard_count", 3, "up"),
    (Script("link_down", "link", 3, 10), "link_down", 3, "up"),
]


@pytest.mark.parametrize(
    ("script", "column", "at", "how"), SYMPTOMS, ids=[f"{s.kind}-{s.table}-{c}" for s, c, _, _ in SYMPTOMS]
)
def test_the_plant_feels_it(
    script: Script, column: str, at: int | tuple[int, int], how: str, well: Truth
) -> None:
    before, now = float(getattr(well, column)[at]), float(getattr(truth_after(script), column)[at])
    if how == "zero":
        assert before > 0
        assert abs(now) <= 1e-3 * before
    else:
        assert (now - before) * (1 if how == "up" else -1) > 0.05 * abs(before)


def test_error_counts_grow_as_long_as_the_fault_lasts() -> None:
    counts = truth_after(Script("ecc_growth", "gpu", 5, 10, 110, severity=1.0), seconds=200).gpu_sbe_count
    assert counts[5] == pytest.approx(500, rel=0.2)


def test_faults_of_sensors_change_nothing_but_sensors(well: Truth) -> None:
    scripts = [
        Script("sensor_biased", "rack", 0, 10, signal="flow_lpm", amount=-9),
        Script("sensor_frozen", "cdu", 0, 10, signal="flow_lpm"),
        Script("node_silent", "node", 0, 10),
    ]
    now = truth_after(*scripts)
    for f in dataclasses.fields(now):
        assert np.array_equal(getattr(now, f.name), getattr(well, f.name)), f.name
