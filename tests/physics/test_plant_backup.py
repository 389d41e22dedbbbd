"""The utility is lost: what UPSs carry runs on, other pumps run down, and a generator brings them back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.plant import Plant
from twin.plant.hydraulics import COAST_S, FRICTION_PU, START_PER_S
from twin.plant.power import RECHARGE_PU, Backup


def plant_with(**backup: float) -> Plant:
    tree = two_racks(loops=[{"name": "l1", "cooling": "tower"}])
    tree["halls"][0]["cdus"][0]["loop"] = "l1"
    plant = Plant(site_of(tree), seed=1)
    for name, value in backup.items():
        setattr(plant.power.backup, name, value)
    return plant


def seconds_on(plant: Plant, seconds: int) -> list[tuple[bool, bool, bool]]:
    """Flags of racks, pumps and the facility that run, for each second."""
    t, out = plant.truth, []
    for _ in range(seconds):
        plant.step()
        assert max(plant.balances().values()) < 1e-6
        out.append(
            (
                bool(t.node_on.all()),
                bool(t.cdu_pump_power_w[0] > 0.0),
                bool(t.cdu_primary_flow_lpm[0] > 0.0),
            )
        )
    return out


def test_each_load_runs_as_long_as_its_battery_and_again_with_the_generator() -> None:
    plant = plant_with(it_s=40.0, pumps_s=20.0, cooling_s=0.0, generator_s=60.0)
    plant.disturbance.utility_ok = False
    on = seconds_on(plant, 70)
    assert [sum(x) for x in zip(*on, strict=True)] == [50, 30, 10]
    assert on[:20] == [(True, True, False)] * 20
    assert on[20:40] == [(True, False, False)] * 20
    assert on[40:60] == [(False, False, False)] * 20
    assert on[60:] == [(True, True, True)] * 10
    assert plant.truth.utility_power_w == 0.0, "a generator is no utility"


def test_a_battery_that_was_used_lasts_shorter_until_it_is_charged() -> None:
    plant = plant_with(it_s=40.0, pumps_s=20.0, generator_s=np.inf)
    for utility_ok, seconds in ((False, 15), (True, 50)):
        plant.disturbance.utility_ok = utility_ok
        assert all(it and pumps for it, pumps, _ in seconds_on(plant, seconds))
    plant.disturbance.utility_ok = False
    left_s = 20.0 - (15.0 - 50.0 * RECHARGE_PU)
    assert sum(pumps for _, pumps, _ in seconds_on(plant, 30)) == left_s


def test_a_dip_that_batteries_bridge_changes_nothing() -> None:
    plant, other = plant_with(cooling_s=60.0), plant_with()
    plant.disturbance.utility_ok = False
    for _ in range(30):
        plant.step()
        other.step()
    assert plant.truth.cdu_flow_lpm.tolist() == other.truth.cdu_flow_lpm.tolist()
    assert plant.truth.gpu_temp_c.tolist() == other.truth.gpu_temp_c.tolist()


@pytest.mark.parametrize("dt_s", [0.1, 0.5, 1.0])
def test_pumps_run_down_as_the_closed_form_says(dt_s: float) -> None:
    """dn/dt = -(n^2 + f)/T from n0: n = sqrt(f) tan(atan(n0/sqrt f) - sqrt(f) t/T), whatever the step."""
    plant = plant_with(pumps_s=0.0, generator_s=np.inf)
    speed, lpm = float(plant.hydraulics.speed[0]), float(plant.truth.cdu_flow_lpm[0])
    plant.disturbance.utility_ok = False
    root = FRICTION_PU**0.5
    for k in range(1, round(6.0 / dt_s)):
        plant.step(dt_s=dt_s)
        left = np.arctan(speed / root) - root * k * dt_s / COAST_S
        expected = root * np.tan(left) if left > 0 else 0.0
        assert plant.truth.cdu_flow_lpm[0] == pytest.approx(lpm * expected / speed, abs=1e-6 * lpm)
    assert plant.truth.cdu_flow_lpm[0] == 0.0
    assert plant.truth.cdu_pump_power_w[0] == 0.0


def test_drives_ramp_up_from_where_the_pumps_are() -> None:
    plant = plant_with(pumps_s=0.0, generator_s=10.0)
    lpm, speed = float(plant.truth.cdu_flow_lpm[0]), float(plant.hydraulics.speed[0])
    plant.disturbance.utility_ok = False
    seen = []
    for _ in range(40):
        plant.step()
        seen.append(float(plant.truth.cdu_flow_lpm[0]))
    assert seen[9] == 0.0
    ramp = seen[10:15]
    assert np.diff([0.0, *ramp]) == pytest.approx(lpm * START_PER_S / speed, rel=1e-6)
    assert max(seen[10:]) < 1.15 * lpm
    assert seen[-1] == pytest.approx(lpm, rel=0.02)


def test_a_short_dip_lowers_the_flow_and_does_not_stop_it() -> None:
    plant = plant_with(pumps_s=0.0, generator_s=np.inf)
    lpm = float(plant.truth.cdu_flow_lpm[0])
    plant.disturbance.utility_ok = False
    plant.step(dt_s=0.4)
    plant.disturbance.utility_ok = True
    plant.step()
    assert 0.3 * lpm < plant.truth.cdu_flow_lpm[0] < 0.9 * lpm


def test_gpus_without_pumps_shut_down_and_with_a_short_start_of_the_generator_do_not() -> None:
    lost = []
    for generator_s in (1.0, np.inf):
        plant = plant_with(pumps_s=0.0, generator_s=generator_s)
        plant.truth.gpu_sm_pu[:], plant.truth.gpu_tensor_pu[:] = 0.95, 0.8
        plant.settle()
        plant.disturbance.utility_ok = False
        for _ in range(60):
            plant.step()
        lost.append(int(plant.compute.burnt.sum()))
    assert lost[0] == 0
    assert lost[1] == len(plant.compute.burnt)


def test_without_a_loss_nothing_is_reckoned() -> None:
    backup, plant = Backup(), plant_with()
    assert not backup.step(plant.present, 1.0)
    assert plant.present.it_fed
    assert plant.present.pumps_fed
    assert plant.present.cooling_fed
