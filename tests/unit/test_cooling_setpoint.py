"""cooling_setpoint: the set point of least total power, what keeps it from warmer coolant, its account."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from policies import REGISTRY
from policies.cooling_setpoint.groups import groups_of
from policies.cooling_setpoint.loop_model import LoopPoint, loop_power_w, plates_of
from policies.cooling_setpoint.loop_state import COLUMNS, LEARNED_PU, balance_of, learn_leakage
from policies.cooling_setpoint.margins import SENSORS_K, SPREAD_S, SUPPLY_K, ceilings, learn, supply_sigma_k
from policies.cooling_setpoint.obstacles import Obstacle, obstacles_of
from policies.cooling_setpoint.plan import ahead_of
from policies.cooling_setpoint.policy import CoolingSetpoint, GroupLook
from policies.cooling_setpoint.pressure import (
    FLOW_ROOM_PU,
    PRESSURE,
    PRESSURE_SET,
    has_flow,
    is_left,
    note_own,
    pumps_of,
    unheld,
)
from policies.cooling_setpoint.sections import section_of
from tests.support.builders import site_of
from tests.support.sampled_cases import sampled
from twin.catalogue import ContractError, find_signal
from twin.contracts import Explanation, Forecast, View
from twin.engine import Engine, explain
from twin.physics import LEAK_PU_PER_K
from twin.plant import Plant, SensorFault, Sensors
from twin.plant.sensors import Periods
from twin.plant.weather import Weather
from twin.simulation import Simulation
from twin.site import Site
from twin.telemetry import GOOD, MaintenanceBegun, OutlookTold

NAME, CONTROL = "cooling_setpoint", "cdu.supply_temp_target_c"
STEP_S = 60.0
BUSY = (0.9, 0.7, 0.6)


def lab(cooling: str = "chiller", **more: Any) -> Site:
    """A rack of four nodes on a CDU and a loop."""
    racks = [{"name": "r1", "profile": "gb200-nvl72", "nodes": 4}]
    cdus = [{"name": "cdu1", "loop": "fw1", "serves": ["r1"]}]
    hall = {"name": "h", "racks": racks, "cdus": cdus}
    loops = [{"name": "fw1", "cooling": cooling}]
    return site_of({"site": "lab", "max_jobs": 4, "halls": [hall], "loops": loops} | more)


def plant_of(site: Site, outdoor_c: float, spread: float = 1.0) -> Plant:
    """A plant at constant load in steady weather."""
    plant = Plant(site, 3, spread=spread, weather=Weather(mean_c=outdoor_c, swing_k=0.0))
    plant.step_max_s = 4.0
    t = plant.truth
    for column, level in zip((t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu), BUSY, strict=True):
        column[:] = level
    plant.settle(1800.0)
    return plant


class Flat:
    """Forecasts the present power of racks times a factor, an hour ahead, and nearer by another factor."""

    name: ClassVar[str] = "flat"
    period_s: ClassVar[float] = 10.0
    fit_every_s: ClassVar[float] = 0.0

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.soon = factor, factor

    def update(self, view: View) -> None:
        """Nothing to learn."""

    def predict(self, view: View) -> list[Forecast]:
        """The present power of racks."""
        out = []
        for ahead_s, factor in ((900.0, self.soon), (3600.0, self.factor)):
            mean = (view.value("rack.power_w") * factor).astype(np.float32)
            out.append(Forecast("rack.power_w", ahead_s, mean, mean, mean, "flat@0"))
        return out

    def fit(self, series: Any, seed: int) -> dict[str, np.ndarray]:
        """Nothing to fit."""
        return {}

    def load(self, parameters: Any) -> None:
        """No parameters."""

    def parameters(self) -> dict[str, np.ndarray]:
        """No parameters."""
        return {}

    def memory(self) -> dict[str, np.ndarray]:
        """No memory."""
        return {}

    def restore(self, memory: Any) -> None:
        """No memory."""

    def remap(self, old_of_new: Any) -> None:
        """No memory."""


def simulated(plant: Plant, authority: str = "act", **settings: Any) -> Simulation:
    """The policy alone beside a plant."""
    given = {"learn_s": 900.0} | settings
    engine = Engine(plant.site, [REGISTRY[NAME](**given)], [Flat()], {NAME: authority})  # type: ignore[list-item]
    periods = Periods(STEP_S, STEP_S, STEP_S, STEP_S)
    return Simulation(engine, plant, Sensors(plant.site, 5, periods), dt_s=STEP_S)


def set_point(sim: Simulation) -> float:
    """The set point in force in the plant."""
    return float(sim.plant.truth.cdu_setpoint_c[0])


def wanted(sim: Simulation) -> float:
    """The set point that the policy asks for; NaN for none."""
    return float(sim.engine.memory[NAME]["want_c"][0])


def explained(sim: Simulation) -> Explanation:
    """The explanation of the policy now."""
    found = explain(sim.engine, sim.engine.policies[0])
    assert isinstance(found, Explanation)
    return found


def text_of(sim: Simulation) -> str:
    """All sentences of the explanation."""
    return " ".join(s.text for s in explained(sim).sentences)


def total_w(plant: Plant) -> float:
    """All that racks and cooling draw."""
    return float(plant.truth.rack_power_w.sum()) + plant.truth.cooling_power_w


@pytest.fixture(scope="module")
def settled() -> Simulation:
    """The policy after four hours of a mild day: it has gone to warmer coolant."""
    sim = simulated(plant_of(lab(), 18.0))
    sim.run(4 * 3600.0)
    assert sim.engine.suspended == {}
    return sim


@pytest.mark.parametrize(
    ("cooling", "outdoor_c"),
    sampled([("tower", 20.0), ("dry_cooler", 12.0), ("chiller", 20.0)], ("tower", 20.0)),
)
def test_the_model_with_the_designs_numbers_is_the_plant_of_the_design(
    cooling: str, outdoor_c: float
) -> None:
    site = lab(cooling)
    plant, plate, factors = plant_of(site, outdoor_c, spread=0.0), plates_of(site)[0], np.zeros(4)
    t = plant.truth
    for supply_c in (30.0, 34.0, 40.0):
        plant.cooling.target_c[:] = supply_c
        plant.apply_set_points()
        plant.settle(2400.0)
        air_c = t.wet_bulb_c if plate.wet else t.outdoor_c
        at = LoopPoint(float(t.loop_supply_c[0]), float(t.cdu_heat_w.sum()), air_c, float(t.loop_flow_lpm[0]))
        assert loop_power_w(plate, factors, at) == pytest.approx(float(t.loop_power_w[0]), rel=0.03)


@pytest.mark.long
def test_it_ends_where_total_power_is_least_within_its_doubt(settled: Simulation) -> None:
    plant = settled.plant.fork()
    memory = settled.engine.memory[NAME]
    asked_c, powers = wanted(settled), {}
    for supply_c in sorted({*np.arange(28.0, 42.1, 1.0).tolist(), asked_c}):
        plant.cooling.target_c[:] = supply_c
        plant.apply_set_points()
        plant.settle(1800.0)
        powers[supply_c] = total_w(plant)
    assert set_point(settled) == pytest.approx(asked_c, abs=0.1)
    assert asked_c > 33.0
    assert powers[asked_c] - min(powers.values()) <= 2.0 * float(memory["doubt_w"][0])
    saved_w = powers[32.0] - powers[asked_c]
    assert abs(float(memory["expected_w"][0]) - saved_w) <= 2.0 * float(memory["doubt_w"][0])


def test_what_it_expected_is_what_came(settled: Simulation) -> None:
    memory = settled.engine.memory[NAME]
    assert float(memory["saved_j"][0]) > 0.0
    assert float(memory["expected_j"][0]) == pytest.approx(float(memory["saved_j"][0]), rel=0.1)
    (row,) = explained(settled).table("loops")
    assert (row["loop"], row["own_c"], row["basis"]) == ("lab/fw1", 32.0, "meter")
    assert "should save" in text_of(settled)


def test_no_gpu_passes_its_guard(settled: Simulation) -> None:
    assert (settled.plant.truth.gpu_temp_c < settled.site.limits["gpu.temp_c"].guard).all()


def test_the_plant_goes_back_to_the_safe_value_when_nobody_renews(settled: Simulation) -> None:
    plant = settled.plant.fork()
    assert float(plant.truth.cdu_setpoint_c[0]) > 33.0
    plant.step((), 301.0)
    assert float(plant.truth.cdu_setpoint_c[0]) == plant.site.envelopes[CONTROL].safe[0]


def _leaks(sim: Simulation) -> None:
    sim.plant.truth.cdu_leak[:] = True


def _maintained(sim: Simulation) -> None:
    sim.inject(
        MaintenanceBegun(id="m", author="ada", table="loop", names=("fw1",), until_ns=sim.now_ns + 10**13)
    )


def _hot(sim: Simulation) -> None:
    sim.plant.disturbance.sensors = [SensorFault("gpu", 0, "temp_c", "biased", 40.0)]


@pytest.mark.parametrize("happens", [_leaks, _maintained, _hot])
def test_what_is_wrong_brings_it_back(settled: Simulation, happens: Callable[[Simulation], None]) -> None:
    sim = settled.fork()
    happens(sim)
    sim.run(5 * STEP_S)
    assert wanted(sim) <= 32.0
    assert "because" in text_of(sim)


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "signal"),
    sampled(
        [("gpu", "temp_c"), ("cdu", "supply_temp_c"), ("loop", "supply_temp_c"), ("site", "outdoor_temp_c")],
        ("gpu", "temp_c"),
        ("loop", "supply_temp_c"),
    ),
)
def test_what_is_not_heard_moves_nothing_up_and_after_a_while_comes_back(
    settled: Simulation, table: str, signal: str
) -> None:
    sim = simulated(plant_of(lab(), 18.0))
    sim.run(1800.0)
    sim.plant.disturbance.sensors = [SensorFault(table, 0, signal, "silent", 0.0)]
    sim.run(300.0)
    before_c = np.nan_to_num(wanted(sim), nan=32.0)
    sim.run(3600.0)
    assert not wanted(sim) > max(before_c, 32.0) + 0.01
    assert not wanted(sim) > 32.0


LIES = (
    ("cdu", "supply_temp_c", "frozen", 0.0),
    ("cdu", "supply_temp_c", "biased", -4.0),
    ("cdu", "supply_temp_c", "biased", 300.0),
    ("site", "outdoor_wet_bulb_c", "biased", 20.0),
    ("site", "outdoor_temp_c", "biased", -10.0),
    ("site", "outdoor_temp_c", "biased", 8.0),
    ("gpu", "temp_c", "frozen", 0.0),
    ("gpu", "temp_c", "biased", -12.0),
    ("gpu", "temp_c", "biased", 600.0),
    ("loop", "power_w", "frozen", 0.0),
)


HERE = (
    ("cdu", "supply_temp_c", "biased", -4.0),
    ("site", "outdoor_temp_c", "biased", 8.0),
    ("gpu", "temp_c", "frozen", 0.0),
)


@pytest.mark.long
@pytest.mark.parametrize(("table", "signal", "trouble", "amount"), sampled(LIES, *HERE))
def test_a_sensor_that_lies_moves_nothing_up(
    settled: Simulation, table: str, signal: str, trouble: str, amount: float
) -> None:
    sim = simulated(plant_of(lab(), 18.0))
    sim.run(600.0)
    sim.plant.disturbance.sensors = [SensorFault(table, 0, signal, trouble, amount)]
    sim.run(2.0 * 3600.0)
    assert sim.engine.suspended == {}
    assert not wanted(sim) > wanted(settled) + 0.5
    assert (sim.plant.truth.gpu_temp_c < sim.site.limits["gpu.temp_c"].guard).all()


def test_a_ramp_in_the_forecast_lowers_the_ceiling_before_it_comes() -> None:
    plant = plant_of(lab(), 18.0)
    for column in (plant.truth.gpu_sm_pu, plant.truth.gpu_tensor_pu, plant.truth.gpu_dram_pu):
        column *= 0.6
    sim = simulated(plant)
    sim.run(1200.0)
    section = section_of(sim.site, groups_of(sim.site))

    def ceiling_c(probability: float) -> float:
        """With memory so much hotter than its chips that these bind, and not the rack."""
        memory = dict(sim.engine.memory[NAME])
        memory["hbm_rise_k"] = np.full_like(memory["hbm_rise_k"], 35.0)
        return float(ceilings(sim.engine.view(), memory, section, probability, 3600.0).supply_c[0])

    calm_c, tight_c, model = ceiling_c(1e-3), ceiling_c(1e-9), sim.engine.models["flat"]
    model.factor = model.soon = 1.5  # type: ignore[attr-defined]
    sim.run(STEP_S)
    soon_c = ceiling_c(1e-3)
    assert soon_c < calm_c - 3.0
    assert tight_c < calm_c - 0.5
    model.soon = 1.0  # type: ignore[attr-defined]
    sim.run(STEP_S)
    # A quarter of an hour without it: of the kelvins that the BMS goes until then, some are room now
    assert soon_c + 2.0 < ceiling_c(1e-3) < calm_c - 1.0
    model.soon = np.nan  # type: ignore[attr-defined]
    sim.run(STEP_S)
    # Where nothing is forecast of it, the load may come within it
    assert ceiling_c(1e-3) < soon_c + 1.0


def test_a_cdu_that_holds_its_set_point_needs_less_room(settled: Simulation) -> None:
    """The prior is forgotten by e in `SPREAD_S`, and what thermometers are off against each other stays."""
    memory, section = settled.engine.memory[NAME], section_of(settled.site, groups_of(settled.site))
    left = SUPPLY_K**2 * np.exp(-4 * 3600.0 / SPREAD_S)
    assert supply_sigma_k(memory, section)[0] == pytest.approx(np.sqrt(left + SENSORS_K**2), abs=0.02)
    spread = dict(memory) | {"over_k2": np.full(1, 0.5**2)}
    loose, tight = (ceilings(settled.engine.view(), m, section, 1e-3, 3600.0) for m in (spread, memory))
    assert loose.supply_c[0] < tight.supply_c[0] - 0.3


def test_a_decision_is_made_for_the_air_that_is_announced_or_else_goes_on(settled: Simulation) -> None:
    sim = settled.fork()
    (group,) = groups_of(sim.site)
    balance = balance_of(sim.engine.view(), sim.engine.memory[NAME], group)
    assert balance is not None
    late = dataclasses.replace(balance, at=dataclasses.replace(balance.at, air_c=balance.at.air_c - 0.6))
    assert ahead_of(sim.engine.view(), late, group, 300.0).at.air_c == pytest.approx(
        balance.at.air_c + 0.6, abs=0.3
    )
    sim.inject(
        OutlookTold(id="o", author="ada", quantity="site.outdoor_temp_c", start_ns=sim.now_ns, step_s=600.0,
                    values=(30.0, 35.0))
    )  # fmt: skip
    sim.run(STEP_S)
    assert ahead_of(sim.engine.view(), balance, group, 300.0).at.air_c == 30.0
    assert ahead_of(sim.engine.view(), balance, group, 900.0).at.air_c == 35.0


def test_hours_ahead_are_planned_and_coolers_that_come_to_their_end_are_told() -> None:
    sim = simulated(plant_of(lab("dry_cooler"), 18.0))
    sim.run(900.0)
    air = [18.0] * 6 + [30.0] * 12 + [44.0] * 12
    sim.inject(
        OutlookTold(id="o", author="ada", quantity="site.outdoor_temp_c", start_ns=sim.now_ns, step_s=600.0,
                    values=tuple(air))
    )  # fmt: skip
    sim.engine.models["flat"].factor = 1.2  # type: ignore[attr-defined]
    sim.run(STEP_S)
    plan = list(explained(sim).table("plan"))
    assert [row["ahead_s"] for row in plan] == [900.0, 3600.0, 7200.0, 10_800.0, 14_400.0]
    assert [row["air_c"] for row in plan] == [18.0, 30.0, 30.0, 44.0, 44.0]
    assert [row["heat_pu"] for row in plan[:2]] == [1.0, 1.2]
    assert plan[1]["supply_c"] > plan[0]["supply_c"]
    assert plan[-1]["reached_c"] > 44.0
    assert "its load has to be lower" in text_of(sim)


def test_work_that_beats_with_rare_readings_is_no_bad_plate(settled: Simulation) -> None:
    """Real: a chiller ran 15 K too cold for hours, as readings met the work in its pauses and the plates did
    not."""
    memory, section = dict(settled.engine.memory[NAME]), section_of(settled.site, groups_of(settled.site))
    memory["error_k2"] = np.full_like(memory["error_k2"], 2.0)
    memory["peak_w"] = np.full_like(memory["peak_w"], 900.0)
    memory["hbm_rise_k"] = np.full_like(memory["hbm_rise_k"], 10.0)

    def found(error_k: float, power_w: float) -> tuple[float, bool]:
        some = {"error_k": error_k, "power_w": power_w, "trough_w": power_w, "rise_k": 34.0}
        changed = {name: memory[name].copy() for name in some}
        for name, value in some.items():
            changed[name][0] = value
        out = ceilings(settled.engine.view(), memory | changed, section, 1e-3, 3600.0)
        return float(out.supply_c[0]), bool(out.doubted[0])

    calm_c = found(0.0, 900.0)[0]
    assert found(9.0, 500.0) == (pytest.approx(calm_c, abs=0.1), False)  # 400 W below its peak
    clogged_c, doubted = found(9.0, 900.0)
    assert doubted
    assert clogged_c < calm_c
    assert found(-9.0, 900.0)[1]


@pytest.mark.parametrize(("follows", "slows"), [(False, True), (True, False)])
def test_pumps_are_slowed_where_no_flow_moves_what_binds(
    settled: Simulation, monkeypatch: pytest.MonkeyPatch, follows: bool, slows: bool
) -> None:
    sim = settled.fork()
    policy, view, memory = sim.engine.policies[0], sim.engine.view(), sim.engine.memory[NAME]
    assert isinstance(policy, CoolingSetpoint)
    (group,) = groups_of(sim.site)
    out = {name: column.copy() for name, column in memory.items()}
    out["want_pa"][:], out["pump_wrong_ns"][:] = np.nan, 0
    ceiling_c = float(out["want_c"][0])
    limit_c = lambda *args: ceiling_c - 0.2 * follows  # noqa: E731
    monkeypatch.setattr(policy, "_ceiling_c", limit_c)
    look = GroupLook(group, ceiling_c, Obstacle(), 25.0, 32.0, 10.0)
    balance = balance_of(view, out, group)
    assert balance is not None
    pumps = pumps_of(view, out, group, balance)
    assert pumps is not None
    policy._press(view, out, look, dataclasses.replace(pumps, share_pu=1.0, pump_w=5.0 * pumps.pump_w))
    assert bool(out["want_pa"][0] < out["own_pa"][0]) == slows


def test_a_set_point_that_a_daemon_left_is_not_taken_for_the_bms_s_own() -> None:
    plant = plant_of(lab(), 18.0)
    plant.cooling.target_c[:] = 40.0
    plant.apply_set_points()
    plant.settle(600.0)
    sim = simulated(plant)
    sim.run(3 * STEP_S)
    assert sim.engine.view().value("cdu.supply_temp_request_c")[0] == pytest.approx(40.0)
    assert float(sim.engine.memory[NAME]["base_c"][0]) == 32.0


@pytest.mark.long
def test_it_only_advises_a_first_step_while_nobody_obeys() -> None:
    sim = simulated(plant_of(lab(), 18.0), authority="advise")
    sim.run(3 * 3600.0)
    assert set_point(sim) == 32.0
    assert 32.0 < wanted(sim) <= 33.5
    assert float(sim.engine.memory[NAME]["saved_j"][0]) == pytest.approx(0.0, abs=0.1 * 3.6e6)


@pytest.mark.long
def test_without_a_meter_savings_are_called_estimates() -> None:
    sim = simulated(plant_of(lab(), 26.0))
    sim.plant.disturbance.sensors = [SensorFault("loop", 0, "power_w", "silent", 0.0)]
    sim.run(2 * 3600.0)
    assert wanted(sim) > 32.0
    assert "savings are estimates" in text_of(sim)


@pytest.mark.long
def test_a_hall_of_unknown_dew_point_is_not_cooled_below_the_safe_value() -> None:
    sim = simulated(plant_of(lab(), -5.0))
    sim.plant.disturbance.sensors = [SensorFault("hall", 0, "cold_aisle_rh_pu", "silent", 0.0)]
    sim.run(2 * 3600.0)
    assert not wanted(sim) < 32.0
    sim = simulated(plant_of(lab(), -5.0))
    sim.run(2 * 3600.0)
    assert wanted(sim) < 32.0  # in the cold, leakage is all that coolant saves


@pytest.mark.parametrize("slope", [2e-4, 6e-4])
def test_a_move_tells_how_much_more_gpus_draw_per_kelvin(slope: float) -> None:
    """The expectation counts with `LEAK_PU_PER_K` and has taken over a tenth of the rest when it is read."""
    memory = {
        name: dataclasses.replace(spec, table="loop").fresh({"loop": 1}) for name, spec in COLUMNS.items()
    }
    memory["watched_s"][:], memory["error_var"][:] = 1e5, 1e-12
    for _ in range(30):
        memory["before_c"][:], memory["before_pu"][:] = 60.0, 0.0
        memory["loop_temp_c"][:] = 62.0
        memory["loop_error_pu"][:] = 2.0 * (slope - LEAK_PU_PER_K) * (1.0 - LEARNED_PU)
        learn_leakage(memory, 0, 600.0)
    assert memory["leak_pu_per_k"][0] == pytest.approx(slope, abs=3e-5)
    assert np.sqrt(memory["leak_var"][0]) < 3e-5


def test_a_bad_setting_is_refused() -> None:
    with pytest.raises(ContractError, match=r"probability: expected a number from 1e-09 to 0\.1, got 2"):
        REGISTRY[NAME](probability=2)
    with pytest.raises(ContractError, match="step_k"):
        REGISTRY[NAME](step_k="much")


def test_a_healthy_group_has_no_obstacle(settled: Simulation) -> None:
    view, memory = settled.engine.view(), settled.engine.memory[NAME]
    groups = groups_of(settled.site)
    found = ceilings(view, memory, section_of(settled.site, groups), 1e-3, 3600.0)
    assert [obstacle.text for obstacle in obstacles_of(view, groups, found)] == [""]


def asked_pa(sim: Simulation) -> float:
    """The pressure that the policy asks for; NaN for none."""
    return float(sim.engine.memory[NAME]["want_pa"][0])


def held_pa(sim: Simulation) -> float:
    """The set point of the pumps in force in the plant."""
    return float(sim.plant.truth.cdu_drop_set_pa[0])


@pytest.mark.parametrize(
    ("kind", "table", "signal", "holds"),
    [
        ("sensor_biased", "rack", "return_temp_c", "hold"),
        ("sensor_biased", "rack", "supply_temp_c", "hold"),
        ("sensor_spiking", "rack", "supply_temp_c", "hold"),
        ("sensor_spiking", "rack", "return_temp_c", ""),  # power and flow tell it
        ("sensor_biased", "gpu", "temp_c", "hold"),
        ("sensor_biased", "gpu", "power_w", ""),  # it counts with the most that it may draw
    ],
)
def test_a_doubted_sensor_holds_the_water_unless_its_margin_is_known_without_it(
    settled: Simulation, monkeypatch: pytest.MonkeyPatch, kind: str, table: str, signal: str, holds: str
) -> None:
    """The rise was learned from a return that read 8 K low for hours: it is half of the true one."""
    view, groups = settled.engine.view(), groups_of(settled.site)
    found = ceilings(view, settled.engine.memory[NAME], section_of(settled.site, groups), 1e-3, 3600.0)
    fault = SimpleNamespace(table=table, signal=signal, kind=kind, entity=0)
    monkeypatch.setattr(type(view), "faults", lambda self: [fault])
    (obstacle,) = obstacles_of(view, groups, found)
    assert (obstacle.kind, f"{table}.{signal}" in obstacle.text) == (holds, bool(holds))


@pytest.mark.parametrize(
    ("power_w", "rise_k", "jumps"),
    [(200.0, 0.3, False), (0.0, 0.3, False), (30_000.0, -0.3, False), (30_000.0, 9.0, True)],
)
def test_a_rack_without_heat_or_with_a_return_that_jumps_teaches_no_rise(
    settled: Simulation, monkeypatch: pytest.MonkeyPatch, power_w: float, rise_k: float, jumps: bool
) -> None:
    """Its thermometers are 0.3 K apart, which at full power would be 58 K."""
    fault = SimpleNamespace(table="rack", signal="return_temp_c", kind="sensor_spiking", entity=0)
    monkeypatch.setattr(type(settled.engine.view()), "faults", lambda self: [fault] if jumps else [])
    view, section = settled.engine.view(), section_of(settled.site, groups_of(settled.site))
    told, supply_c = view.believed, view.believed("rack.supply_temp_c")
    changed = {"rack.power_w": np.full_like(supply_c, power_w), "rack.return_temp_c": supply_c + rise_k}
    monkeypatch.setattr(
        type(view), "believed", lambda self, key: changed[key] if key in changed else told(key)
    )
    new = {
        name: np.full_like(settled.engine.memory[NAME][name], np.nan) for name in ("rack_w", "rack_rise_k")
    }
    new |= {name: np.zeros_like(settled.engine.memory[NAME][name]) for name in ("rack_s_k", "rack_s_w")}
    out = learn(view, settled.engine.memory[NAME] | new, section, np.full(1, 10.0))
    assert (out["rack_s_k"] == 0.0).all()
    assert (out["rack_s_w"] == 0.0).all()


@pytest.mark.parametrize("jumps", [False, True])
def test_a_return_that_was_never_heard_or_jumps_counts_as_the_heat_balance_has_it(
    settled: Simulation, monkeypatch: pytest.MonkeyPatch, jumps: bool
) -> None:
    view, memory = settled.engine.view(), dict(settled.engine.memory[NAME])
    memory |= {"rack_s_k": np.zeros(1), "rack_s_w": np.zeros(1), "rack_rise_k": np.full(1, np.nan)}
    if jumps:
        memory |= {"rack_s_k": np.ones(1), "rack_s_w": np.full(1, 1e6), "rack_rise_k": np.full(1, 40.0)}
        fault = SimpleNamespace(table="rack", signal="return_temp_c", kind="sensor_spiking", entity=0)
        monkeypatch.setattr(type(view), "faults", lambda self: [fault])
    section = section_of(settled.site, groups_of(settled.site))
    # Water carries 69 W per l/min and kelvin
    rise_k = memory["rack_peak_w"] / (69.0 * view.believed("rack.flow_lpm"))
    limits = {"rack.return_temp_c": SimpleNamespace(guard=25.0 + rise_k)}
    monkeypatch.setattr(type(view), "limit", lambda self, key: limits.get(key))
    found = ceilings(view, memory, section, 1e-3, 3600.0)
    assert found.rack[0] == 0
    assert found.supply_c[0] == pytest.approx(25.0, abs=1.5)


def test_slower_pumps_save_what_was_expected(settled: Simulation) -> None:
    memory, plant = settled.engine.memory[NAME], settled.plant.fork()
    own_pa = float(memory["own_pa"][0])
    assert own_pa == plant.parameters.cdu_drop_set_pa[0]
    assert held_pa(settled) == pytest.approx(asked_pa(settled), abs=1000.0)
    assert asked_pa(settled) < 0.8 * own_pa
    slow_w = total_w(plant)
    plant.hydraulics.ask(plant.truth, plant.parameters, np.full(1, np.nan))
    plant.settle(1800.0)
    saved_w = total_w(plant) - slow_w
    assert float(memory["pump_expected_w"][0]) == pytest.approx(saved_w, abs=2.0 * memory["pump_doubt_w"][0])
    assert saved_w > 0.0
    assert "kPa in place of 220 kPa should save" in text_of(settled)


@pytest.mark.parametrize("slower", [0.9, 0.7])
def test_with_slower_pumps_every_gpu_keeps_its_margin(settled: Simulation, slower: float) -> None:
    plant, view = settled.plant.fork(), settled.engine.view()
    section = section_of(settled.site, groups_of(settled.site))
    found = ceilings(view, settled.engine.memory[NAME], section, 1e-3, 3600.0, slower)
    plant.cooling.target_c[:] = found.supply_c[0]
    plant.hydraulics.ask(plant.truth, plant.parameters, plant.truth.cdu_drop_set_pa * slower**2)
    plant.apply_set_points()
    plant.settle(1800.0)
    assert (plant.truth.gpu_temp_c < settled.site.limits["gpu.temp_c"].guard).all()
    usual = ceilings(view, settled.engine.memory[NAME], section, 1e-3, 3600.0)
    assert found.supply_c[0] < usual.supply_c[0] - 0.5


def test_no_pressure_goes_near_the_guard_of_the_flow(settled: Simulation) -> None:
    view, (group,) = settled.engine.view(), groups_of(settled.site)
    guard_lpm = settled.site.limits["rack.flow_lpm"].guard[0]
    flow_lpm = float(view.believed("rack.flow_lpm")[0])
    assert has_flow(view, group, 1.0)
    assert not has_flow(view, group, 0.99 * FLOW_ROOM_PU * guard_lpm / flow_lpm)


def test_pumps_are_the_bms_s_own_again_when_nobody_renews(settled: Simulation) -> None:
    plant = settled.plant.fork()
    assert plant.truth.cdu_drop_set_pa[0] < 200e3
    plant.step((), 301.0)
    assert plant.truth.cdu_drop_set_pa[0] == plant.parameters.cdu_drop_set_pa[0]


@pytest.mark.parametrize("happens", [_leaks, _maintained, _hot])
def test_what_is_wrong_gives_the_pressure_back_at_once(
    settled: Simulation, happens: Callable[[Simulation], None]
) -> None:
    sim = settled.fork()
    happens(sim)
    sim.run(3 * STEP_S)
    own_pa = sim.plant.parameters.cdu_drop_set_pa[0]
    assert held_pa(sim) == pytest.approx(own_pa, abs=20.0)
    sim.run(1200.0)
    assert np.isnan(asked_pa(sim))
    assert held_pa(sim) == pytest.approx(own_pa, abs=20.0)


PRESSURE_LIES = (
    ("rack", "flow_lpm", "silent", 0.0),
    ("cdu", "flow_lpm", "silent", 0.0),
    ("cdu", "diff_pressure_pa", "silent", 0.0),
    ("cdu", "diff_pressure_setpoint_pa", "silent", 0.0),
    ("cdu", "diff_pressure_setpoint_pa", "biased", 60e3),
)


@pytest.mark.parametrize("lie", PRESSURE_LIES)
def test_an_unknown_flow_or_a_pressure_that_is_not_held_gives_it_back(
    settled: Simulation, lie: tuple[str, str, str, float]
) -> None:
    table, signal, how, size = lie
    sim = settled.fork()
    sim.plant.disturbance.sensors = [SensorFault(table, 0, signal, how, size)]  # type: ignore[arg-type]
    own_pa = sim.plant.parameters.cdu_drop_set_pa[0]
    for _ in range(4):
        sim.run(300.0)
        assert held_pa(sim) == pytest.approx(own_pa, abs=20.0)
    assert np.isnan(asked_pa(sim))


@pytest.mark.long
def test_one_lever_is_moved_at_a_time() -> None:
    sim, moves = simulated(plant_of(lab(), 18.0)), set[int]()
    for _ in range(150):
        before = dict(sim.engine.memory[NAME])
        sim.run(STEP_S)
        after = sim.engine.memory[NAME]
        moved = [bool(before[n][0] != after[n][0]) for n in ("moved_ns", "pump_moved_ns")]
        assert not all(moved)
        moves |= {k for k, one in enumerate(moved) if one}
    assert moves == {0, 1}


@pytest.mark.long
def test_a_site_may_keep_its_pressures() -> None:
    sim = simulated(plant_of(lab(controls={PRESSURE: {"min": 220e3}}), 18.0))
    sim.run(2.5 * 3600.0)
    assert wanted(sim) > 33.0
    assert np.isnan(asked_pa(sim))


@pytest.mark.long
def test_an_own_pressure_above_the_envelope_is_left_alone() -> None:
    """It could be lowered to the envelope only, which is further than was weighed, and not given back."""
    sim = simulated(plant_of(lab(controls={PRESSURE: {"max": 150e3, "safe": 150e3}}), 18.0))
    for _ in range(9):
        sim.run(1000.0)
        assert np.isnan(asked_pa(sim))
        assert held_pa(sim) == 220e3
    assert wanted(sim) > 33.0


@pytest.mark.parametrize("how", ["suspended", "advise"])
def test_a_policy_that_may_act_no_longer_leaves_no_slow_pumps_to_a_bms_that_hears_the_daemon(
    settled: Simulation, how: str
) -> None:
    sim, before_pa = settled.fork(), held_pa(settled)
    sim.plant.actuators.lapse = lambda time_s: []  # type: ignore[method-assign]  # as a BMS
    if how == "suspended":
        sim.engine.suspended[NAME] = sim.now_ns
    else:
        sim.engine.intake.authority[NAME] = "advise"
    sim.run(600.0)
    assert held_pa(sim) > before_pa + 10e3
    sim.run(1800.0)
    assert held_pa(sim) == sim.plant.parameters.cdu_drop_set_pa[0]


def view_of_pressure(requested_pa: float, set_pa: float, commanded_pa: float = np.nan) -> View:
    """View of one CDU with the signals that `note_own` and `is_left` read."""
    value = {"cdu.diff_pressure_request_pa": requested_pa, PRESSURE_SET: set_pa}
    found = SimpleNamespace(
        value=lambda key: np.array([value[key]]),
        believed=lambda key: np.array([value[key]]),
        quality=lambda key: np.array([GOOD if np.isfinite(value[key]) else 0]),
        commanded=lambda key: np.array([commanded_pa]),
    )
    return found


@pytest.mark.parametrize(
    ("own_pa", "requested_pa", "set_pa", "expected_pa"),
    [
        (220e3, np.nan, 90e3, 90e3),  # the BMS has another one, and nobody asked for it
        (220e3, 120e3, 90e3, 90e3),
        (220e3, 90e3, 90e3, 220e3),  # left behind by a lapse, a release, or the leader before
        (np.nan, 90e3, 90e3, np.nan),
        (220e3, 240e3, 240e3, 240e3),
        (np.nan, np.nan, 90e3, 90e3),
    ],
)
def test_a_pressure_that_was_asked_for_is_not_taken_for_the_bms_s_own(
    own_pa: float, requested_pa: float, set_pa: float, expected_pa: float
) -> None:
    view = view_of_pressure(requested_pa, set_pa)
    out = {"want_pa": np.array([np.nan]), "own_pa": np.array([own_pa])}
    note_own(view, out)
    np.testing.assert_equal(out["own_pa"], [expected_pa])


def test_a_low_pressure_that_nobody_asks_for_any_more_is_given_back(settled: Simulation) -> None:
    (group,), none = groups_of(settled.site), np.nan
    memory = {"want_pa": np.array([none]), "own_pa": np.array([220e3])}
    assert is_left(view_of_pressure(90e3, 90e3), memory, group)
    assert not is_left(view_of_pressure(90e3, 90e3, 90e3), memory, group)  # an operator asks for it
    assert not is_left(view_of_pressure(none, 90e3), memory, group)
    assert not is_left(view_of_pressure(220e3, 220e3), memory, group)
    sim = settled.fork()
    sim.plant.actuators.lapse = lambda time_s: []  # type: ignore[method-assign]  # as a BMS
    sim.engine.arbiter.leases[PRESSURE].disown()
    sim.engine.memory[NAME]["want_pa"] = np.array([none])
    table = sim.engine.state.tables["cdu"]
    request = find_signal("cdu.diff_pressure_request_pa")
    assert request is not None
    row = table.freshness.row_of(request)
    table.value[row] = held_pa(sim)
    assert held_pa(sim) < 200e3
    sim.run(2 * STEP_S)
    assert held_pa(sim) == sim.plant.parameters.cdu_drop_set_pa[0]


def test_water_goes_no_warmer_while_pumps_are_slow_and_the_flow_is_unknown(settled: Simulation) -> None:
    moved_c, (group,) = [], groups_of(settled.site)
    for silent in (False, True):
        sim = settled.fork()
        if silent:
            sim.plant.disturbance.sensors = [SensorFault("rack", 0, "flow_lpm", "silent", 0.0)]
            while not unheld(sim.engine.view(), sim.engine.memory[NAME], group).kind:
                sim.run(STEP_S)
        memory, before_c = sim.engine.memory[NAME], wanted(sim) - 2.0
        sim.engine.memory[NAME] = dict(memory) | {
            "want_c": np.array([before_c]), "decided_ns": np.zeros(1, np.int64)
        }  # fmt: skip
        sim.run(STEP_S)
        assert asked_pa(sim) < 200e3
        moved_c.append(wanted(sim) - before_c)
    assert moved_c[0] > 0.2
    assert moved_c[1] <= 0.0


@pytest.mark.long
def test_advice_on_a_pressure_that_nobody_follows_is_one_move() -> None:
    sim, moves, asked = simulated(plant_of(lab(), 18.0), authority="advise"), set[int](), set[float]()
    for _ in range(150):
        sim.run(STEP_S)
        moves.add(int(sim.engine.memory[NAME]["pump_moved_ns"][0]))
        asked.add(asked_pa(sim))
    assert held_pa(sim) == 220e3
    assert np.nanmin(list(asked)) == pytest.approx(187e3, rel=0.02)
    assert len(moves - {0}) == 1
