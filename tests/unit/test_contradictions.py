"""Contradictions: a reading that the others of its device exclude accuses its sensor; readings that move
together accuse none."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, site_of, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, find_signal
from twin.diagnosis.contradictions import EVERY, LAWS, LEARNS, Contradictions
from twin.diagnosis.topology import Topology
from twin.telemetry import Block

KEPT: dict[str, Any] = {
    "gpu.power_w": 900.0, "gpu.temp_c": 55.0, "gpu.hbm_temp_c": 61.0, "gpu.util_pu": 0.9,
    "gpu.sm_active_pu": 0.7, "gpu.tensor_active_pu": 0.5, "gpu.sm_clock_hz": 1.6e9,
    "gpu.power_limit_w": 900.0,
    "node.power_w": 5000.0, "node.psu1_power_w": 2500.0, "node.psu2_power_w": 2500.0,
    "node.cpu_power_w": 400.0,
    "node.inlet_temp_c": 24.0, "node.outlet_temp_c": 33.0, "node.leak_state": 0.0, "node.power_on_state": 1.0,
    "rack.power_w": 90e3, "rack.inlet_temp_c": 24.0, "rack.flow_lpm": 100.0, "rack.valve_pu": 0.6,
    "rack.liquid_isolation_state": 0.0, "rack.electrical_isolation_state": 0.0,
    "rack.leak_sensor_fault_state": 0.0, "rack.leak_state": 0.0,
    "cdu.flow_lpm": 200.0, "cdu.pump1_speed_pu": 0.7, "cdu.pump2_speed_pu": 0.7, "cdu.running_state": 1.0,
    "cdu.facility_flow_lpm": 200.0, "cdu.facility_valve1_pu": 0.5, "cdu.supply_pressure_pa": 4e5,
    "cdu.return_pressure_pa": 1.6e5, "cdu.diff_pressure_pa": 2.4e5, "cdu.supply_temp_setpoint_c": 25.0,
    "cdu.leak_state": 0.0,
    "feeder.power_w": 90e3, "feeder.apparent_power_va": 91e3, "feeder.power_factor_pu": 0.99,
    "feeder.voltage_v": 415.0, "feeder.current_a": 127.0, "feeder.frequency_hz": 50.0,
    "feeder.breaker_state": 0.0, "feeder.energised_state": 0.0,
}  # fmt: skip
TICKS = 5 * EVERY
LIES = {
    "supply x10": ({"node.psu1_power_w": 15e3}, "node.psu1_power_w"),
    "supply x0.1": ({"node.psu2_power_w": 250.0}, "node.psu2_power_w"),
    "node x2": ({"node.power_w": 10e3}, "node.power_w"),
    "cpu 0": ({"node.cpu_power_w": 0.0}, "node.cpu_power_w"),
    "inlet 0": ({"node.inlet_temp_c": 0.0}, "node.inlet_temp_c"),
    "outlet 0": ({"node.outlet_temp_c": 0.0}, "node.outlet_temp_c"),
    "memory x0.1": ({"gpu.hbm_temp_c": 6.0}, "gpu.hbm_temp_c"),
    "activity 0": ({"gpu.sm_active_pu": 0.0}, "gpu.sm_active_pu"),
    "use 0": ({"gpu.util_pu": 0.0}, "gpu.util_pu"),
    "clock 0": ({"gpu.sm_clock_hz": 0.0}, "gpu.sm_clock_hz"),
    "limit x2": ({"gpu.power_limit_w": 2900.0}, "gpu.power_limit_w"),
    "valve 0": ({"rack.valve_pu": 0.0}, "rack.valve_pu"),
    "isolated": ({"rack.liquid_isolation_state": 1.0}, "rack.liquid_isolation_state"),
    "switched off": ({"rack.electrical_isolation_state": 1.0}, "rack.electrical_isolation_state"),
    "rope faulty": ({"rack.leak_sensor_fault_state": 1.0}, "rack.leak_sensor_fault_state"),
    "not running": ({"cdu.running_state": 0.0}, "cdu.running_state"),
    "pressure x10": ({"cdu.return_pressure_pa": 1.6e6}, "cdu.return_pressure_pa"),
    "pressure 0": ({"cdu.supply_pressure_pa": 0.0}, "cdu.supply_pressure_pa"),
    "set point 0": ({"cdu.supply_temp_setpoint_c": 0.0}, "cdu.supply_temp_setpoint_c"),
    "voltage x10": ({"feeder.voltage_v": 4150.0}, "feeder.voltage_v"),
    "current x10": ({"feeder.current_a": 1270.0}, "feeder.current_a"),
    "current 0": ({"feeder.current_a": 0.0}, "feeder.current_a"),
    "power factor 0": ({"feeder.power_factor_pu": 0.0}, "feeder.power_factor_pu"),
    "hertz 0": ({"feeder.frequency_hz": 0.0}, "feeder.frequency_hz"),
}
HERE = ("supply x0.1", "node x2", "inlet 0", "memory x0.1", "clock 0", "limit x2", "valve 0", "current x10")
LOST = dict.fromkeys(("power_w", "apparent_power_va", "voltage_v", "current_a", "frequency_hz"), 0.0)
TRUE = {
    "a supply is lost": {"node.psu1_power_w": 0.0, "node.psu2_power_w": 5000.0},
    "a feed is lost": {f"feeder.{name}": value for name, value in LOST.items()},
    "the load ends": {
        "gpu.power_w": 90.0, "gpu.sm_active_pu": 0.0, "gpu.util_pu": 0.0, "gpu.temp_c": 30.0,
        "gpu.hbm_temp_c": 31.0, "gpu.sm_clock_hz": 2e8, "node.power_w": 900.0, "node.psu1_power_w": 450.0,
        "node.psu2_power_w": 450.0, "node.cpu_power_w": 90.0, "node.outlet_temp_c": 26.0,
        "feeder.power_w": 16e3, "feeder.apparent_power_va": 17e3, "feeder.current_a": 23.0,
    },
    "more load than was seen before": {
        "gpu.power_w": 1300.0, "gpu.temp_c": 60.0, "gpu.hbm_temp_c": 81.0, "node.power_w": 8000.0,
        "node.psu1_power_w": 4000.0, "node.psu2_power_w": 4000.0, "node.outlet_temp_c": 49.0,
    },
    "a rack is isolated": {
        "rack.liquid_isolation_state": 1.0, "rack.flow_lpm": 0.0, "rack.valve_pu": 0.0,
        "rack.electrical_isolation_state": 1.0, "rack.power_w": 0.0,
    },
    "a CDU stops": {
        "cdu.running_state": 0.0, "cdu.flow_lpm": 0.0, "cdu.pump1_speed_pu": 0.0, "cdu.pump2_speed_pu": 0.0,
        "cdu.supply_pressure_pa": 2e5, "cdu.return_pressure_pa": 2e5, "cdu.diff_pressure_pa": 0.0,
        "cdu.facility_flow_lpm": 0.0, "cdu.facility_valve1_pu": 0.0,
    },
    "a set point moves": {"cdu.supply_temp_setpoint_c": 20.0},
}  # fmt: skip


@cache
def learned() -> Twin:
    pod = Twin(two_racks())
    pod.run(EVERY * (LEARNS + 2), KEPT)
    return pod


def after(changes: dict[str, Any], ticks: int = TICKS, first: bool = True) -> Twin:
    """The learned site, the first entity of whose tables then reads so; all of them unless `first`."""
    pod, now = copy.deepcopy(learned()), dict(KEPT)
    for key, value in changes.items():
        signal = find_signal(key)
        assert signal is not None
        now[key] = np.full(pod.site.sizes[signal.table], KEPT[key])
        now[key][0 if first else slice(None)] = value
    pod.run(ticks, now)
    return pod


def accused(pod: Twin) -> set[tuple[str, int]]:
    return {(f"{a.table}.{a.signal}", a.entity) for a in pod.engine.diagnosis.contradictions.accused.values()}


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(LIES, *HERE))
def test_a_reading_that_the_others_exclude_is_accused(name: str) -> None:
    changes, key = LIES[name]
    pod = after(changes)
    assert accused(pod) == {(key, 0)}
    faults = {(f"{f.table}.{f.signal}", f.entity) for f in pod.engine.diagnosis.faults}
    assert (key, 0) in faults


@pytest.mark.parametrize(
    "name", sampled(TRUE, "a feed is lost", "more load than was seen before", "a CDU stops")
)
def test_readings_that_move_together_accuse_nobody(name: str) -> None:
    assert accused(after(TRUE[name])) == set()
    assert accused(after(TRUE[name], first=False)) == set()


def test_a_meter_that_leaps_is_accused() -> None:
    pod = copy.deepcopy(learned())
    for second in range(60):
        warm = 25.0 if second % 4 < 2 else 0.0
        pod.tick(KEPT | {"gpu.temp_c": KEPT["gpu.temp_c"] + warm})
    n = pod.site.sizes["gpu"]
    assert accused(pod) == {("gpu.temp_c", k) for k in range(min(n, 50))}


@pytest.mark.long
def test_nodes_that_lie_together_are_one_alarm_and_their_racks_are_not_accused() -> None:
    pod = after({"node.inlet_temp_c": 2.4}, first=False)
    assert {key for key, _ in accused(pod)} == {"node.inlet_temp_c"}
    (finding,) = [f for f in pod.decision.findings if f.id.startswith("fault/sensor_biased")]
    n = pod.site.sizes["node"]
    assert finding.entities == ("lab/h/cdu1", "lab/h/r1/node0")
    assert finding.title == (
        "A sensor of lab/h/r1/node0 reads wrong: inlet temperature; "
        f"likewise {n - 1} more nodes of lab/h/cdu1"
    )


def test_an_alarm_of_many_counts_all_of_them() -> None:
    pod = after({"gpu.sm_active_pu": 0.0}, first=False)
    (finding,) = [f for f in pod.decision.findings if f.id.startswith("fault/sensor_biased")]
    assert finding.count == pod.site.sizes["gpu"]
    assert finding.evidence[0].startswith("lab/h/r1/node0/gpu0: "), "the title says how many"


@pytest.mark.long
def test_a_rack_that_lies_beside_its_nodes_is_accused() -> None:
    assert accused(after({"rack.inlet_temp_c": 2.4})) == {("rack.inlet_temp_c", 0)}


@pytest.mark.long
def test_one_odd_reading_accuses_nobody_and_an_accusation_ends() -> None:
    lie = {"node.psu1_power_w": 15e3}
    assert accused(after(lie, EVERY)) == set()
    pod = after(lie)
    pod.run(20 * EVERY, KEPT)
    assert accused(pod) == set()


@pytest.mark.long
def test_who_never_kept_a_law_is_not_judged_by_it() -> None:
    pod = Twin(two_racks())
    odd = KEPT | {"node.psu1_power_w": 0.0, "rack.liquid_isolation_state": 1.0}
    pod.run(EVERY * (LEARNS + 10), odd)
    assert accused(pod) == set()
    pod.run(TICKS, odd | {"rack.liquid_isolation_state": 0.0})
    assert accused(pod) == set()


@pytest.mark.long
def test_memory_that_overshoots_as_work_begins_accuses_nobody() -> None:
    """Metal follows a step of the load late."""
    pod, warm = copy.deepcopy(learned()), KEPT | {"gpu.hbm_temp_c": 76.0}
    pod.run(20 * EVERY, KEPT | TRUE["the load ends"])
    for _ in range(8):
        pod.run(EVERY, warm)
        assert accused(pod) == set()
    pod.run(20 * EVERY, KEPT)
    assert accused(pod) == set()
    pod.run(TICKS, warm)
    assert {key for key, _ in accused(pod)} == {"gpu.hbm_temp_c"}


def test_air_that_leaves_a_node_warmer_than_ever_accuses_nobody() -> None:
    assert accused(after({"node.outlet_temp_c": 59.0})) == set()


MEMORY = next(law for law in LAWS if law.key == "gpu.memory over chip")


def looks_until_steady(book: Contradictions, load_w: float) -> int:
    n = book.sizes["gpu"]
    for look in range(200):
        if book._at_load(MEMORY, slice(None), np.full(n, load_w), np.ones(n, np.bool_)).all():
            return look
    raise AssertionError("never steady")


def test_a_load_that_ends_at_nothing_is_steady_again_within_minutes() -> None:
    book = Contradictions(Topology(site_of(two_racks())))
    assert looks_until_steady(book, 5000.0) == 0
    assert 10 < looks_until_steady(book, 0.0) * EVERY < 400


@pytest.mark.parametrize("parts", [2, 10, 41])
def test_on_a_large_site_a_load_is_steady_as_soon_as_on_a_small_one(parts: int) -> None:
    small, large = (Contradictions(Topology(site_of(two_racks()))) for _ in "ab")
    large._slices["gpu"] = parts
    for load_w in (900.0, 9000.0, 900.0):
        ticks = [looks_until_steady(book, load_w) * every for book, every in ((small, EVERY), (large, parts))]
        assert ticks[1] == pytest.approx(ticks[0], abs=max(parts, EVERY))


def with_energy(ticks: int, every_s: int, counted_s: int, stops_s: int = 10**9) -> Twin:
    """GPUs that are read each `every_s`; their energy is counted each `counted_s`, until it stands still."""
    pod = Twin(two_racks())
    n = pod.site.sizes["gpu"]
    power_w = np.full((1, n), 900.0, np.float32)
    for second in range(ticks):
        if second % every_s == 0:
            counted = min(second, stops_s) // counted_s * counted_s
            energy_mj = np.full((1, n), 900_000 * (counted + 1), np.int64)
            at_ns = pod.now_ns + NS
            pod.inbox.put_block(
                Block("gpu", 0, ("power_w",), power_w, ("energy_mj",), energy_mj, at_ns), at_ns
            )
        pod.tick()
    return pod


@pytest.mark.long
def test_totals_that_a_source_repeats_accuse_nobody() -> None:
    """As of dcgm-exporter, which collects each 30 s and is scraped each 15 s."""
    assert accused(with_energy(1800, 15, 30)) == set()


@pytest.mark.long
def test_a_total_that_stands_still_is_accused() -> None:
    begun_s = EVERY * (LEARNS + 2)
    assert accused(with_energy(begun_s, 1, 1)) == set()
    assert {key for key, _ in accused(with_energy(begun_s + 60, 1, 1, begun_s))} == {"gpu.energy_mj"}


BEGIN_S = EVERY * (LEARNS + 2)


def with_frozen_meter(name: str, rest_s: int) -> Twin:
    """A rack that rests, in which a meter of a node stands still; after `rest_s` load comes that swings."""
    pod, rng = Twin(two_racks()), np.random.default_rng(5)
    n, stuck = pod.site.sizes["node"], 0.0
    for second in range(BEGIN_S + rest_s + 80):
        loaded = second >= BEGIN_S + rest_s
        node_w = (5000.0 + 1500.0 * (second % 20 < 5) if loaded else 1600.0) * (1 + rng.normal(0, 0.004, n))
        values: dict[str, Any] = {
            "node.power_w": node_w,
            "node.psu1_power_w": 0.5 * node_w * (1 + rng.normal(0, 0.004, n)),
            "node.psu2_power_w": 0.5 * node_w * (1 + rng.normal(0, 0.004, n)),
            "rack.power_w": (pod.site.sum_by_rack("node", node_w) + 300.0) * (1 + rng.normal(0, 0.004, 2)),
        }
        if second < BEGIN_S:
            stuck = float(values[name][0])
        else:
            values[name][0] = stuck
        pod.tick(values)
    return pod


@pytest.mark.parametrize("rest_s", [20, 120], ids=["briefly", "for long"])
@pytest.mark.parametrize("name", ["node.power_w", "node.psu2_power_w"])
def test_a_meter_that_stands_still_is_wrong_and_not_those_that_move(name: str, rest_s: int) -> None:
    faults = with_frozen_meter(name, rest_s).engine.diagnosis.faults
    assert [(f.kind, f"{f.table}.{f.signal}", f.entity) for f in faults] == [("sensor_frozen", name, 0)]


def test_beside_a_meter_that_is_known_to_be_wrong_no_other_of_its_law_is_accused() -> None:
    pod = after(LIES["supply x10"][0])
    book, state = pod.engine.diagnosis.contradictions, pod.engine.state

    def signals(*wrong: tuple[str, str, int, str]) -> list[str]:
        return [c.signal for c in book.causes(state, {}, wrong=set(wrong))]

    assert signals() == ["psu1_power_w"]
    assert signals(("sensor_frozen", "node", 1, "power_w")) == ["psu1_power_w"]
    assert signals(("sensor_silent", "node", 0, "power_w")) == ["psu1_power_w"]
    assert signals(("sensor_biased", "node", 0, "psu1_power_w")) == ["psu1_power_w"]  # by this law
    for kind in ("sensor_frozen", "sensor_spiking", "sensor_biased"):
        assert signals((kind, "node", 0, "power_w")) == []
    assert signals(("sensor_spiking", "node", 0, "psu1_power_w")) == []  # it has a name


@pytest.mark.parametrize(
    ("wrong", "factor"), [("power_w", 1.5), ("psu2_power_w", 1.7), ("psu1_power_w", 0.5)]
)
def test_the_meter_that_moved_unlike_the_others_is_wrong_whatever_the_load_does(
    wrong: str, factor: float
) -> None:
    """The load falls by a third at the same time, so that the wrong reading moves the least of all."""
    pod = copy.deepcopy(learned())
    n, now = pod.site.sizes["node"], dict(KEPT)
    for name in ("power_w", "psu1_power_w", "psu2_power_w"):
        now[f"node.{name}"] = np.full(n, KEPT[f"node.{name}"] * 0.65)
    now[f"node.{wrong}"][0] *= factor
    pod.run(TICKS, now)
    assert accused(pod) == {(f"node.{wrong}", 0)}


def test_a_meter_that_reads_0_is_wrong_and_does_not_stand_still() -> None:
    """A sensor that stands still takes its comparisons with it; these show a rack whose GPUs all read 0."""
    pod, now = Twin(two_racks()), dict(KEPT)
    rng, n = np.random.default_rng(8), 36
    for second in range(BEGIN_S + 60):
        noise = 1 + rng.normal(0, 0.003, n)
        now |= {"node.power_w": 5000.0 * noise, "node.psu1_power_w": 2500.0 * noise}
        now["node.psu2_power_w"] = np.where((np.arange(n) == 0) & (second > BEGIN_S), 0.0, 2500.0 * noise)
        pod.tick(now)
    kinds = {a.kind for a in pod.engine.diagnosis.contradictions.accused.values()}
    assert accused(pod) == {("node.psu2_power_w", 0)}
    assert kinds == {"sensor_biased"}


def test_a_meter_that_jumps_is_named_once() -> None:
    """Each third reading leaps: it breaks the law of its power factor as well."""
    pod, rng = Twin(two_racks()), np.random.default_rng(6)
    feeders = {key: value for key, value in KEPT.items() if key.startswith("feeder.") and value}
    n, kinds = pod.site.sizes["feeder"], set[tuple[str, str, int]]()
    for second in range(EVERY * (LEARNS + 2) + 200):
        values = {key: value * (1 + rng.normal(0, 0.003, n)) for key, value in feeders.items()}
        if second > EVERY * (LEARNS + 2) and second % 3 == 0:
            values["feeder.power_w"][0] *= 1.7
        pod.tick(values)
        kinds |= {(f.kind, f.signal, f.entity) for f in pod.engine.diagnosis.faults}
    assert kinds == {("sensor_spiking", "power_w", 0)}
