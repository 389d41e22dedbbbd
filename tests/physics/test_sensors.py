"""Sensors against a truth that is known: exact without noise, and noise, delays, gaps and lies as stated."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import START_NS, eight_nodes, site_of, two_racks
from tests.support.static_plant import StillPlant
from twin.catalogue import NS, TABLES
from twin.plant import Observation, Sensors
from twin.plant.disturbance import SensorFault
from twin.plant.meters import SPIKES_PU, Noise
from twin.plant.sensors import Periods
from twin.site import Site
from twin.telemetry import FaultReported

EVERY_SECOND = Periods(1.0, 1.0, 1.0, 1.0)
EIGHT_RACKS = two_racks(racks="r[1-8]")
LOCKS = ("clock_lock_readback_mhz",)  # a report of its own, without noise


class Bench:
    """A still plant and its sensors, second by second."""

    def __init__(self, site: Site, noise: float = 1.0, seed: int = 3, drop_out_pu: float = 0.0,
                 periods: Periods | None = EVERY_SECOND) -> None:  # fmt: skip
        self.plant = StillPlant(site)
        self.sensors = Sensors(site, seed, periods, noise, drop_out_pu)
        self.now_ns = START_NS

    def look(self, *events: FaultReported) -> Observation:
        self.plant.step()
        self.now_ns += NS
        seen = self.sensors.observe(self.plant.truth, self.plant.disturbance, self.now_ns, events)
        # Of standby the scheduler tells, whatever sensors do
        reports = [r for r in seen.reports if tuple(r.signals) != ("standby_state",)]
        return Observation(reports, seen.events, seen.now_ns)

    def read(self, key: str) -> np.ndarray:
        table, _, signal = key.partition(".")
        report = self.look().find(table, signal)
        assert report is not None
        return report.column(signal).copy()

    def series(self, key: str, seconds: int) -> np.ndarray:
        """[seconds, n] float64."""
        return np.array([self.read(key) for _ in range(seconds)], np.float64)

    def lie(self, table: str, entity: int, signal: str, trouble: str, amount: float = 0.0) -> None:
        self.plant.disturbance.sensors = [SensorFault(table, entity, signal, trouble, amount)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pod() -> Site:
    tree = two_racks(loops=[{"name": "fw1"}])
    tree["halls"][0]["planes"] = [{"name": "p", "links_per_node": 1, "racks": ["r[1-2]"]}]
    return site_of(tree)


def test_without_noise_each_reading_is_the_truth_to_its_step(pod: Site) -> None:
    bench = Bench(pod, noise=0.0)
    t = bench.plant.truth
    t.gpu_xid_code[5], t.gpu_event_bits[6], t.node_leak[7], t.cdu_filling[:] = 79, 0x24, True, True
    t.feeder_voltage_pu[:] = 1.0
    t.rack_leak[1] = t.rack_isolated[1] = True
    seen = bench.look()
    expected = {
        "gpu.power_w": (t.gpu_power_w, 1.0), "gpu.temp_c": (t.gpu_temp_c, 1.0), "gpu.util_pu": (1.0, 0.0),
        "gpu.hbm_temp_c": (t.gpu_hbm_temp_c, 1.0), "gpu.sm_active_pu": (t.gpu_sm_pu, 0.0),
        "gpu.tensor_active_pu": (t.gpu_tensor_pu, 0.0), "gpu.dram_active_pu": (t.gpu_dram_pu, 0.0),
        "gpu.sm_clock_hz": (t.gpu_clock_pu * 1.98e9, 15e6), "gpu.power_limit_w": (t.gpu_cap_w, 0.0),
        "gpu.clock_event_bits": (t.gpu_event_bits, 0.0), "gpu.xid_code": (t.gpu_xid_code, 0.0),
        "node.power_w": (t.node_power_w, 1.0), "node.cpu_power_w": (t.node_cpu_power_w, 1.0),
        "node.inlet_temp_c": (t.node_inlet_c, 0.5), "node.outlet_temp_c": (t.node_outlet_c, 0.5),
        "node.psu1_power_w": (t.node_psu_power_w[:, 0], 1.0), "node.leak_state": (t.node_leak, 0.0),
        "node.psu2_power_w": (t.node_psu_power_w[:, 1], 1.0), "node.power_on_state": (1.0, 0.0),
        "node.power_cap_readback_w": (t.node_cap_w, 0.0),
        "node.agent_state": (0.0, 0.0), "node.service_level_state": (0.0, 0.0),
        "rack.power_w": (t.rack_power_w, 10.0), "rack.inlet_temp_c": (t.rack_inlet_c, 0.1),
        "rack.leak_state": (t.rack_leak, 0.0), "rack.tray_leak_state": ([1.0, 0.0], 0.0),
        "rack.leak_sensor_fault_state": (0.0, 0.0), "rack.electrical_isolation_state": (0.0, 0.0),
        "rack.supply_temp_c": (t.rack_supply_c, 0.01), "rack.return_temp_c": (t.rack_return_c, 0.01),
        "rack.flow_lpm": (t.rack_flow_lpm, 0.01), "rack.diff_pressure_pa": (t.rack_drop_pa, 10.0),
        "rack.valve_pu": (t.rack_valve_pu, 0.001), "rack.liquid_isolation_state": (t.rack_isolated, 0.0),
        "cdu.supply_temp_c": (t.cdu_supply_c, 0.01), "cdu.return_temp_c": (t.cdu_return_c, 0.01),
        "cdu.flow_lpm": (t.cdu_flow_lpm, 0.1), "cdu.supply_pressure_pa": (t.cdu_supply_pa, 10.0),
        "cdu.return_pressure_pa": (t.cdu_return_pa, 10.0), "cdu.diff_pressure_pa": (t.cdu_drop_pa, 10.0),
        "cdu.filter_diff_pressure_pa": (t.cdu_filter_drop_pa, 10.0), "cdu.fill_pump_state": (1.0, 0.0),
        "cdu.facility_return_temp_c": (t.cdu_primary_return_c, 0.01), "cdu.available_state": (1.0, 0.0),
        "cdu.facility_flow_lpm": (t.cdu_primary_flow_lpm, 0.1), "cdu.running_state": (1.0, 0.0),
        "cdu.facility_valve1_pu": (t.cdu_valve_pu, 0.001), "cdu.pump1_speed_pu": (0.75, 0.001),
        "cdu.pump2_speed_pu": (0.75, 0.001), "cdu.leak_state": (0.0, 0.0),
        "cdu.facility_supply_temp_c": (t.cdu_primary_supply_c, 0.01),
        "cdu.supply_temp_setpoint_c": (t.cdu_setpoint_c, 0.01),
        "cdu.supply_temp_request_c": (t.cdu_setpoint_c, 0.01),
        "cdu.diff_pressure_setpoint_pa": (t.cdu_drop_set_pa, 10.0),
        "feeder.power_w": (t.feeder_power_w, 10.0), "feeder.voltage_v": (415.0, 0.1),
        "feeder.apparent_power_va": (t.feeder_power_w / 0.99, 10.0), "feeder.power_factor_pu": (0.99, 0.0),
        "feeder.current_a": (t.feeder_power_w / 0.99 / (np.sqrt(3) * 415.0), 0.1),
        "feeder.frequency_hz": (50.0, 0.01), "feeder.energised_state": (0.0, 0.0),
        "feeder.breaker_state": (0.0, 0.0), "hall.cold_aisle_temp_c": (t.hall_cold_c, 0.1),
        "hall.hot_aisle_temp_c": (t.hall_hot_c, 0.1), "hall.cold_aisle_rh_pu": (0.45, 0.001),
        "node.power_readback_state": (0.0, 0.0), "gpu.clock_lock_readback_mhz": (t.gpu_lock_mhz, 0.0),
        "site.outdoor_temp_c": (15.0, 0.1),
        "site.outdoor_wet_bulb_c": (11.0, 0.1), "loop.supply_temp_c": (t.loop_supply_c, 0.01),
        "loop.return_temp_c": (t.loop_return_c, 0.01), "loop.flow_lpm": (t.loop_flow_lpm, 0.1),
        "loop.power_w": (t.loop_power_w, 10.0), "loop.leak_state": (0.0, 0.0), "link.up_state": (0.0, 0.0),
        "link.rx_bytes_per_s": (t.link_bytes_per_s, 0.0), "link.tx_bytes_per_s": (t.link_bytes_per_s, 0.0),
    }  # fmt: skip
    told = {f"{r.table}.{s}" for r in seen.reports for s in r.signals}
    assert told == {k for k in expected if pod.sizes[k.partition(".")[0]]}
    for key in sorted(told):
        truth, step = expected[key]
        table, _, signal = key.partition(".")
        report = seen.find(table, signal)
        assert report is not None
        spec = TABLES[table].by_name[signal]
        column = report.column(signal)
        assert np.allclose(column, truth, rtol=1e-6, atol=0.501 * step), key
        assert ((column >= spec.low) & (column <= spec.high)).all(), key
        if step:
            assert np.allclose(column / step, np.rint(column / step), atol=2e-3), key


@pytest.mark.parametrize(
    ("key", "relative", "absolute"),
    [
        ("gpu.power_w", 0.005, 0.3),
        ("gpu.temp_c", 0.0, np.hypot(0.3, 1 / np.sqrt(12))),
        ("gpu.sm_active_pu", 0.005, 0.0),
        ("node.power_w", 0.001, 0.3),
        ("rack.return_temp_c", 0.0, 0.05),
        ("rack.flow_lpm", 0.005, 0.0),
        ("rack.diff_pressure_pa", 0.003, 3.0),
        ("cdu.supply_temp_c", 0.0, 0.05),
        ("feeder.power_w", 0.001, 3.0),
    ],
)
def test_noise_has_the_stated_size(pod: Site, key: str, relative: float, absolute: float) -> None:
    bench = Bench(pod)
    series = bench.series(key, 700)
    # Mean square over entities: one alone near a step of its meter has less or more of it.
    seen = np.sqrt(series.var(axis=0).mean())
    assert seen == pytest.approx(np.hypot(relative * series.mean(), absolute), rel=0.12)


def test_readings_of_one_sensor_and_of_neighbours_are_independent(pod: Site) -> None:
    series = Bench(pod).series("gpu.power_w", 600)
    off = series - series.mean(axis=0)
    off /= off.std(axis=0)
    lag = (off[1:] * off[:-1]).mean(axis=0)  # 144 of them, each about 0.04 wide
    assert abs(lag.mean()) < 0.015
    assert np.abs(lag).max() < 0.2
    apart = off.T @ off / len(off)
    assert np.abs(apart - np.eye(len(apart))).max() < 0.25


def test_pool_of_noise_is_standard_and_drawn_anew() -> None:
    noise = Noise(np.random.default_rng(5), 1000)
    before = noise.pool.copy()
    taken = np.concatenate([noise.take(1000) for _ in range(400)])
    assert abs(taken.mean()) < 0.01
    assert taken.std() == pytest.approx(1.0, abs=0.01)
    assert (np.abs(taken) > 3).mean() == pytest.approx(0.0027, rel=0.25)
    for _ in range(1200):
        noise.refresh()
    assert (noise.pool != before).mean() > 0.98


def test_each_meter_has_a_gain_of_its_own_that_stays(pod: Site) -> None:
    bench = Bench(pod)
    first, later = (bench.series("gpu.power_w", 300).mean(axis=0) for _ in range(2))
    gain = first / bench.plant.truth.gpu_power_w - 1.0
    assert gain.std() == pytest.approx(0.003, rel=0.25)
    again = later / bench.plant.truth.gpu_power_w - 1.0
    assert np.abs(again - gain).max() < 0.002


def test_the_building_is_one_to_three_seconds_late() -> None:
    bench = Bench(site_of(two_racks(racks="r[1-40]")))
    for _ in range(5):
        bench.look()
    bench.plant.truth.rack_supply_c[:] = 40.0
    changed = bench.series("rack.supply_temp_c", 5) > 36.0
    assert not changed[0].any()  # 0 s old is too early
    late = changed.argmax(axis=0)
    assert set(late.tolist()) == {1, 2, 3}
    assert changed[3:].all()


@pytest.mark.parametrize(("step_s", "rounds"), [(0.5, {2, 4, 6}), (5.0, {0, 1}), (60.0, {0})])
def test_with_other_steps_the_nearest_moment_is_read(step_s: float, rounds: set[int]) -> None:
    bench = Bench(site_of(two_racks(racks="r[1-40]")), periods=Periods(step_s, step_s, step_s, step_s))
    changed = []
    for k in range(20):
        bench.plant.truth.rack_supply_c[:] = 20.0 if k < 10 else 40.0
        bench.now_ns += round(step_s * NS)
        seen = bench.sensors.observe(bench.plant.truth, bench.plant.disturbance, bench.now_ns)
        report = seen.find("rack", "supply_temp_c")
        assert report is not None
        changed.append(report.column("supply_temp_c") > 30.0)
    assert not np.array(changed[:10]).any()
    assert set(np.array(changed[10:]).argmax(axis=0).tolist()) == rounds


def test_periods() -> None:
    bench = Bench(site_of(two_racks()), periods=None)
    spoken: dict[str, int] = {}
    for _ in range(120):
        for report in bench.look().reports:
            if report.signals != LOCKS:
                spoken[report.table] = spoken.get(report.table, 0) + 1
    assert (spoken["gpu"], spoken["node"], spoken["cdu"], spoken["site"]) == (120, 120, 120, 2)
    assert spoken["rack"] == 120  # two kinds of report, each every other second, as of a CDU


def test_drop_outs_are_as_rare_as_stated() -> None:
    bench = Bench(site_of(EIGHT_RACKS), drop_out_pu=0.001)
    missing, cells = dict.fromkeys(("gpu", "rack"), 0), dict.fromkeys(("gpu", "rack"), 0)
    rows: set[str] = set()
    for _ in range(1500):
        for report in bench.look().reports:
            if report.table not in missing or report.signals == LOCKS:
                continue
            gaps = np.isnan(report.values)
            missing[report.table] += int(gaps.sum())
            cells[report.table] += gaps.size
            if report.table == "gpu":
                rows |= {s for s, row in zip(report.signals, gaps, strict=True) if row.any()}
    assert missing["gpu"] / cells["gpu"] == pytest.approx(0.001, rel=0.03)
    assert missing["rack"] / cells["rack"] == pytest.approx(0.001, rel=0.3)  # of 144,000 cells
    assert len(rows) == 11


def test_a_frozen_sensor_stands_still_and_thaws(pod: Site) -> None:
    bench = Bench(pod)
    bench.lie("rack", 1, "flow_lpm", "frozen")
    held = bench.series("rack.flow_lpm", 30)
    assert held[:, 1].std() == 0.0
    assert held[:, 0].std() > 0.1
    bench.plant.truth.rack_flow_lpm[:] = 50.0
    still = bench.series("rack.flow_lpm", 6)
    assert still[-1, 1] == held[0, 1]
    bench.plant.disturbance.sensors = []
    assert bench.read("rack.flow_lpm")[1] == pytest.approx(50.0, rel=0.05)


def test_biased_spiking_and_silent_sensors(pod: Site) -> None:
    bench = Bench(pod)
    bench.lie("gpu", 7, "temp_c", "biased", 8.0)
    biased = bench.series("gpu.temp_c", 60)
    assert (biased[:, 7] - biased[:, 8]).mean() == pytest.approx(8.0, abs=0.5)
    bench.lie("cdu", 0, "supply_temp_c", "spiking", 5.0)
    spiking = bench.series("cdu.supply_temp_c", 400)[:, 0] - bench.plant.truth.cdu_supply_c[0]
    assert (np.abs(spiking) > 2.5).mean() == pytest.approx(SPIKES_PU, abs=0.06)
    assert (spiking > 2.5).any()
    assert (spiking < -2.5).any()
    bench.lie("feeder", 1, "power_w", "silent")
    assert np.isnan(bench.read("feeder.power_w")).tolist() == [False, True]
    bench.lie("rack", 0, "leak_state", "biased", 1.0)  # a detector that cries wolf
    assert bench.read("rack.leak_state").tolist() == [1.0, 0.0]
    bench.lie("gpu", 3, "energy_mj", "frozen")
    counts = [bench.look().find("gpu", "power_w") for _ in range(1)]
    first = counts[0]
    assert first is not None
    before = first.counts[0].copy()
    later = bench.look().find("gpu", "power_w")
    assert later is not None
    assert later.counts[0, 3] == before[3]
    assert (np.delete(later.counts[0] - before, 3) > 0).all()


def test_a_fault_of_every_table_and_of_entities_that_are_not_there(pod: Site) -> None:
    bench = Bench(pod)
    bench.plant.disturbance.sensors = [
        SensorFault(table, entity, signal.name, "silent")
        for table in ("gpu", "node", "rack", "cdu", "loop", "feeder", "site", "hall", "link")
        for signal in (*TABLES[table].gauges, *TABLES[table].counters)
        for entity in (0, 10**6)
    ]
    for report in bench.look().reports:
        assert np.isnan(report.values[:, 0]).all(), report.table
        assert (report.counts[:, 0] < 0).all()
        assert np.isfinite(report.values[:, 1:]).all()


def test_a_gpu_off_the_bus_reads_nothing(pod: Site) -> None:
    bench = Bench(pod)
    bench.lie("gpu", 9, "temp_c", "frozen")  # not even a lie
    bench.look()
    bench.plant.truth.gpu_alive[9] = False
    report = bench.look().find("gpu", "power_w")
    assert report is not None
    assert np.isnan(report.values[:, 9]).all()
    assert (report.counts[:, 9] == -1).all()
    assert np.isfinite(np.delete(report.values, 9, axis=1)).all()


def test_a_mute_node_sends_no_block_and_one_that_is_off_only_its_board(pod: Site) -> None:
    bench = Bench(pod)
    bench.lie("node", 2, "", "silent")
    bench.plant.truth.node_on[5] = False
    blocks = bench.look().blocks
    heard = {
        table: sorted(
            i
            for b in blocks
            if b.table == table and b.signals != LOCKS
            for i in range(b.start, b.start + b.values.shape[1])
        )
        for table in ("gpu", "node")
    }
    assert heard["node"] == [i for i in range(36) if i != 2]
    assert heard["gpu"] == [i for i in range(144) if i // 4 not in (2, 5)]
    (board,) = [b for b in blocks if b.table == "node" and b.start <= 5 < b.start + b.values.shape[1]]
    at = 5 - board.start
    assert board.values[board.signals.index("power_on_state"), at] == 0
    assert board.values[board.signals.index("agent_state"), at] == 1


def test_nothing_comes_from_a_rack_without_power_but_what_the_building_says(pod: Site) -> None:
    bench = Bench(pod)
    bench.plant.truth.rack_unpowered[0] = True
    for _ in range(4):
        seen = bench.look()
    assert min(b.start for b in seen.blocks if b.table == "node") == 18
    report = seen.find("rack", "electrical_isolation_state")
    assert report is not None
    assert report.column("electrical_isolation_state").tolist() == [1.0, 0.0]


def test_racks_speak_at_instants_of_their_own_within_the_round(pod: Site) -> None:
    bench = Bench(pod)
    seen = bench.look()
    instants = {b.t_ns for b in seen.blocks if b.table == "gpu"}
    assert len(instants) == 2
    assert all(bench.now_ns - NS < b.t_ns <= r.arrival_ns <= bench.now_ns for r in seen.reports
               for b in r.blocks())  # fmt: skip
    assert [r.arrival_ns for r in seen.reports] == sorted(r.arrival_ns for r in seen.reports)


def test_air_cooled_racks_have_no_liquid_to_report() -> None:
    seen = Bench(site_of(eight_nodes())).look()
    assert seen.find("rack", "flow_lpm") is None
    assert seen.find("rack", "power_w") is not None


def test_equal_seeds_read_equally_and_a_fork_goes_on_by_itself(pod: Site) -> None:
    one, two, other = Bench(pod, drop_out_pu=0.01), Bench(pod, drop_out_pu=0.01), Bench(pod, seed=4)
    a, b = one.series("gpu.power_w", 20), two.series("gpu.power_w", 20)
    assert np.array_equal(a, b, equal_nan=True)
    assert not np.array_equal(a, other.series("gpu.power_w", 20), equal_nan=True)
    twin = Bench(pod)
    twin.plant, twin.sensors, twin.now_ns = one.plant.fork(), one.sensors.fork(), one.now_ns
    forked = twin.series("node.power_w", 20)
    assert twin.sensors.site is one.sensors.site
    assert np.array_equal(forked, one.series("node.power_w", 20), equal_nan=True)


def test_counters_grow_with_what_they_count(pod: Site) -> None:
    bench = Bench(pod)
    bench.plant.truth.gpu_event_bits[4] = 0x4
    bench.look()
    first = bench.look().copy()
    bench.plant.truth.throttle_s[3] += 0.25
    second = bench.look()
    growth = {}
    for report in second.reports:
        before = first.find(report.table, report.signals[0])
        assert before is not None
        for k, name in enumerate(report.counters):
            growth[f"{report.table}.{name}"] = report.counts[k] - before.counts[k]
    power_w = bench.plant.truth.gpu_power_w
    assert np.allclose(growth["gpu.energy_mj"], power_w * 1e3, atol=2)
    assert growth["gpu.throttle_thermal_ns"][3] == 250_000_000
    assert growth["gpu.throttle_power_ns"][4] == NS
    assert growth["gpu.throttle_power_ns"].sum() == NS
    assert np.allclose(growth["feeder.energy_mj"], bench.plant.truth.feeder_power_w * 1e3, atol=2)


def test_events_pass_through_and_a_copy_keeps_what_was_read(pod: Site) -> None:
    bench = Bench(pod)
    event = FaultReported(table="gpu", name="lab/h/r1/node0/gpu0", code=79)
    seen = bench.look(event)
    assert list(seen.events) == [event]
    kept = seen.copy()
    power = seen.find("gpu", "power_w")
    bench.look()
    old = kept.find("gpu", "power_w")
    assert power is not None
    assert old is not None
    assert not np.array_equal(old.values, power.values)  # the sensors write over their own
