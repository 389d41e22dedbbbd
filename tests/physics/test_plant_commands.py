"""A plant obeys what it is told, answers, and falls back when a lease runs out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import NS
from twin.contracts import CommandBatch
from twin.plant import Mix, Plant, Scenario, Sensors
from twin.plant.workload import Workload
from twin.telemetry import CommandAcked


def batch(
    control: str, index: list[int], value: float, lease_s: float = 15.0, epoch: int = 3, **more: bool
) -> CommandBatch:
    n = len(index)
    return CommandBatch(
        control, "test", epoch, np.array(index, np.int32), np.zeros(n, np.int32), np.arange(n) + 40,
        np.full(n, value), "a test", START_NS, START_NS + round(lease_s * NS), START_NS + 5 * NS, **more,
    )  # fmt: skip


@pytest.fixture
def plant() -> Plant:
    made = Plant(site_of(two_racks()), seed=1)
    made.truth.gpu_sm_pu[:], made.truth.gpu_tensor_pu[:] = 0.95, 0.8
    made.settle()
    return made


def test_caps_hold_and_clocks_fall(plant: Plant) -> None:
    free = plant.truth.gpu_power_w.copy()
    plant.step([batch("gpu.power_cap_w", [0, 5], 600.0)])
    t = plant.truth
    assert free[[0, 5]].min() > 650.0
    assert t.gpu_power_w[[0, 5]] == pytest.approx(600.0)
    assert (t.gpu_clock_pu[[0, 5]] < 0.95).all()
    assert (t.gpu_event_bits[[0, 5]] == 0x4).all()
    assert t.gpu_power_w[1] > 650.0
    assert t.gpu_clock_pu[1] == 1.0
    # Dynamic power goes with the clock to the hidden exponent
    p = plant.parameters
    static = p.gpu_idle_w[0] + p.gpu_leak_w_per_k[0] * 0  # at 40 degC; leakage is small beside the rest
    room = (600.0 - static) / (free[0] - static)
    assert t.gpu_clock_pu[0] == pytest.approx(room ** (1 / p.gpu_exponent[0]), abs=0.02)
    assert plant.figures()["lost_gpu_s"] > 0.0


def test_a_cap_below_the_lowest_clock_is_exceeded(plant: Plant) -> None:
    plant.step([batch("gpu.power_cap_w", [0], 10.0)])
    assert plant.truth.gpu_power_w[0] > 150.0
    assert plant.truth.gpu_clock_pu[0] == pytest.approx(0.17)


def test_locked_clocks_lower_dynamic_power_until_the_lease_lapses(plant: Plant) -> None:
    """f V(f)^2 is the law of caps too; what leaks goes on."""
    sensors, t, p = Sensors(plant.site, noise=0.0), plant.truth, plant.parameters
    free_w, top_mhz = t.gpu_power_w.copy(), plant.site.envelopes["gpu.clock_lock_mhz"].high
    plant.step([batch("gpu.clock_lock_mhz", [0, 5], 0.5 * top_mhz[0], lease_s=3.0)])
    assert t.gpu_clock_pu[[0, 1, 5]].tolist() == [0.5, 1.0, 0.5]
    assert t.gpu_power_w[1] > 0.95 * free_w[1]
    static_w = p.gpu_idle_w[0] + p.gpu_leak_w_per_k[0] * (t.gpu_temp_c[0] - 40.0)
    room = (t.gpu_power_w[0] - static_w) / (free_w[0] - static_w)
    assert room == pytest.approx(0.5 ** p.gpu_exponent[0], abs=0.03)
    (read,) = [r for r in sensors.observe(t, plant.disturbance, START_NS).reports
               if "clock_lock_readback_mhz" in r.signals]  # fmt: skip
    assert read.values[0, [0, 1]].tolist() == [0.5 * top_mhz[0], top_mhz[1]]
    assert t.gpu_event_bits[0] == 0, "neither heat nor a cap"
    for _ in range(5):
        plant.step()
    assert t.gpu_clock_pu[0] == 1.0
    assert t.gpu_power_w[0] == pytest.approx(free_w[0], rel=0.05)
    assert t.gpu_lock_mhz[0] == top_mhz[0]


def test_a_lock_and_a_cap_are_both_kept(plant: Plant) -> None:
    low_mhz = plant.site.envelopes["gpu.clock_lock_mhz"].low[0]
    plant.step([batch("gpu.power_cap_w", [0, 1], 400.0), batch("gpu.clock_lock_mhz", [0], low_mhz)])
    t = plant.truth
    assert t.gpu_power_w[0] < 300.0 < t.gpu_power_w[1] == pytest.approx(400.0)


def test_answers_name_epoch_and_number_and_come_once(plant: Plant) -> None:
    plant.step([batch("gpu.power_cap_w", [0, 5], 600.0)])
    assert plant.acks() == [
        CommandAcked(control="gpu.power_cap_w", name=f"lab/h/r1/node{n}/gpu{g}", generation=0,
                     command=f"3-{40 + k}", state="done")
        for k, (n, g) in enumerate([(0, 0), (1, 1)])
    ]  # fmt: skip
    assert plant.acks() == []
    plant.step([batch("gpu.power_cap_w", [0], 600.0, renewal=True)])
    assert plant.acks() == []


def test_a_deposed_daemon_is_refused(plant: Plant) -> None:
    plant.step([batch("gpu.power_cap_w", [0], 600.0, epoch=4)])
    plant.step([batch("gpu.power_cap_w", [0], 500.0, epoch=3)])
    assert [a.state for a in plant.acks()] == ["done", "failed"]
    assert plant.truth.gpu_cap_w[0] == 600.0


def test_a_lease_that_runs_out_gives_the_safe_value_and_a_renewal_keeps_it(plant: Plant) -> None:
    safe = plant.site.envelopes["gpu.power_cap_w"].safe[0]
    plant.step([batch("gpu.power_cap_w", [0, 5], 600.0, lease_s=15.0)])
    for k in range(20):
        renew = [batch("gpu.power_cap_w", [0], 600.0, lease_s=15.0, renewal=True)] if k % 5 == 0 else []
        plant.step(renew)
    assert plant.truth.gpu_cap_w[0] == 600.0
    assert plant.truth.gpu_cap_w[5] == safe
    assert plant.truth.gpu_cap_w[1] == plant.parameters.gpu_cap_max_w[1]
    plant.step([batch("gpu.power_cap_w", [0], 700.0, final=True)])
    plant.step(dt_s=60.0)
    assert plant.truth.gpu_cap_w[0] == 700.0


def test_a_cap_of_a_node_divides_over_its_gpus(plant: Plant) -> None:
    plant.step([batch("node.power_cap_w", [2], 3000.0)])
    assert 2500.0 < plant.truth.node_power_w[2] <= 3000.0
    assert plant.truth.node_power_w[3] > 3500.0


def test_supply_follows_its_target_but_stays_off_the_dew_point(plant: Plant) -> None:
    for target in (36.0, 30.0):
        for k in range(120):
            plant.step([batch("cdu.supply_temp_target_c", [0], target, renewal=k > 0)], dt_s=10.0)
        assert plant.truth.cdu_setpoint_c[0] == target
        assert plant.truth.cdu_supply_c[0] == pytest.approx(target, abs=0.2)
    plant.step([batch("cdu.supply_temp_target_c", [0], 5.0)])
    dew = plant.parameters.hall_moisture_c[0]
    assert plant.truth.cdu_setpoint_c[0] == pytest.approx(dew + 2.5)


def test_pumps_hold_the_pressure_that_is_asked_for_and_the_bms_s_own_when_the_lease_lapses(
    plant: Plant,
) -> None:
    t, own_pa = plant.truth, 190e3  # not what the profile calls safe
    plant.parameters.cdu_drop_set_pa[:] = own_pa
    plant.hydraulics.ask(t, plant.parameters, np.full(plant.site.sizes["cdu"], np.nan))
    plant.step(dt_s=600.0)
    before_lpm, before_w, speed = t.cdu_flow_lpm[0], t.cdu_pump_power_w[0], t.cdu_pump_speed_pu[0, 0]
    plant.step([batch("cdu.diff_pressure_target_pa", [0], 0.5 * own_pa, lease_s=700.0)], dt_s=600.0)
    assert t.cdu_drop_set_pa[0] == 0.5 * own_pa == pytest.approx(t.cdu_drop_pa[0], rel=0.01)
    # A given network: flow goes with the speed, power with its cube
    assert t.cdu_flow_lpm[0] / before_lpm == pytest.approx(0.5**0.5, rel=0.01)
    cubed = (t.cdu_pump_speed_pu[0, 0] / speed) ** 3
    assert t.cdu_pump_power_w[0] / before_w == pytest.approx(cubed, rel=0.01)
    plant.step(dt_s=200.0)
    plant.step(dt_s=600.0)
    assert t.cdu_drop_set_pa[0] == own_pa == pytest.approx(t.cdu_drop_pa[0], rel=0.01)


def test_isolation_lasts_beyond_its_lease(plant: Plant) -> None:
    plant.step([batch("rack.liquid_isolation", [0], 1.0), batch("rack.electrical_isolation", [0], 1.0)])
    plant.step(dt_s=600.0)
    t = plant.truth
    assert t.rack_isolated.tolist() == [True, False]
    assert t.rack_unpowered.tolist() == [True, False]
    assert t.rack_flow_lpm[0] < 1e-3 < t.rack_flow_lpm[1]
    assert t.rack_power_w[0] == 0.0
    assert not t.node_on[:18].any()
    assert not t.gpu_alive[:72].any()
    plant.step([batch("rack.liquid_isolation", [0], 0.0), batch("rack.electrical_isolation", [0], 0.0)])
    plant.step(dt_s=60.0)
    assert t.rack_flow_lpm[0] > 50.0
    assert t.gpu_alive.all()


def test_what_it_cannot_do_it_refuses(plant: Plant) -> None:
    plant.step([batch("job.power_cap_w", [0], 1.0)])
    assert [a.state for a in plant.acks()] == ["failed"]


def test_a_node_holds_its_cap_in_every_state_and_reads_it_back(plant: Plant) -> None:
    t = plant.truth
    highest = plant.site.envelopes["node.power_cap_w"].high
    assert (t.node_cap_w == highest).all()
    nodes = list(range(len(t.node_power_w)))
    plant.step([batch("node.power_cap_w", nodes, 3000.0, lease_s=400.0)])
    plant.disturbance.node_psu_ok[:10, 0] = False  # one that carries all loses more
    plant.truth.hall_cold_c[:] = 40.0  # fans at full speed
    for _ in range(60):
        plant.step()
        assert t.node_power_w.max() <= 3000.0
    assert t.node_power_w.min() > 2500.0
    assert (t.node_cap_w == 3000.0).all()
    for _ in range(350):
        plant.step()
    assert (t.node_cap_w == plant.site.envelopes["node.power_cap_w"].safe).all()
    assert 3000.0 < t.node_power_w.max() <= plant.site.envelopes["node.power_cap_w"].safe.max()
    seen = Sensors(plant.site, noise=0.0).observe(t, plant.present, plant.now_ns)
    report = seen.find("node", "power_cap_readback_w")
    assert report is not None
    assert report.column("power_cap_readback_w") == pytest.approx(t.node_cap_w)


def test_own_caps_of_gpus_and_that_of_their_node_both_hold(plant: Plant) -> None:
    plant.step([batch("node.power_cap_w", [0], 3500.0), batch("gpu.power_cap_w", [1], 300.0)])
    t = plant.truth
    assert t.gpu_power_w[1] <= 300.0 + 1e-9
    assert t.gpu_cap_w[0] == t.gpu_cap_w[2] > 300.0
    assert t.node_power_w[0] <= 3500.0


def test_the_next_job_in_a_slot_was_told_nothing() -> None:
    plant = Plant(site_of(two_racks()), 1, Scenario("training", workload=Mix(1.0, 0.0, 0.0)))
    plant.step()
    work = plant.workload
    assert isinstance(work, Workload)
    first, second = work.jobs[:2]
    own_s = second.interval_s
    every = "job.checkpoint_interval_s"
    plant.job_names = {0: first.name}
    plant.step([batch(every, [0], 777.0)])
    assert first.interval_s == 777.0
    plant.job_names = {0: second.name}
    plant.step([batch(every, [1], 888.0)])
    assert (first.interval_s, second.interval_s) == (777.0, own_s)
