"""Set points that move: nothing is called wrong that is not, and a sensor that lies is still found."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of
from tests.support.sampled_cases import sampled
from twin.contracts import Fault
from twin.engine import Engine
from twin.plant import Plant, SensorFault, Sensors
from twin.plant.sensors import Periods
from twin.plant.weather import Weather
from twin.simulation import Simulation
from twin.site import Site

STEP_S, MOVE_S, CALM_S = 60.0, 600.0, 3600.0
CONTROL = "cdu.supply_temp_target_c"


def lab(cooling: str) -> Site:
    """A rack of four nodes on a CDU and a loop."""
    racks = [{"name": "r1", "profile": "gb200-nvl72", "nodes": 4}]
    cdus = [{"name": "cdu1", "loop": "fw1", "serves": ["r1"]}]
    hall = {"name": "h", "racks": racks, "cdus": cdus}
    return site_of(
        {"site": "lab", "max_jobs": 4, "halls": [hall], "loops": [{"name": "fw1", "cooling": cooling}]}
    )


class MovingSetPoints:
    """A plant at constant load whose set points walk through their envelope, and a twin that looks on."""

    def __init__(self, cooling: str, moves_k: tuple[float, ...], seed: int = 11) -> None:
        self.site, self.rng, self.moves_k = lab(cooling), np.random.default_rng(seed), moves_k
        self.plant = Plant(self.site, seed, weather=Weather(mean_c=14.0))
        self.plant.step_max_s = 4.0
        t = self.plant.truth
        t.gpu_sm_pu[:], t.gpu_tensor_pu[:], t.gpu_dram_pu[:] = 0.9, 0.7, 0.6
        self.plant.settle(CALM_S)
        sensors = Sensors(self.site, seed, Periods(STEP_S, STEP_S, STEP_S, STEP_S))
        self.sim = Simulation(Engine(self.site, [], [], {}), self.plant, sensors, dt_s=STEP_S)
        self.reached_c: list[float] = []

    def faults(self, hours: float) -> set[tuple[str, str, str]]:
        """(kind, table, signal) of every fault that was named meanwhile."""
        out, envelope = set[tuple[str, str, str]](), self.site.envelopes[CONTROL]
        for step in range(round(3600.0 * hours / STEP_S)):
            calm = self.plant.truth.time_s < 2.0 * CALM_S  # settling included
            if not calm and step % round(MOVE_S / STEP_S) == 0:
                target_c = self.plant.cooling.target_c
                low = float(target_c[0]) <= envelope.low[0]
                move_k = max(self.moves_k) if low else self.rng.choice(self.moves_k)
                target_c[:] = np.clip(target_c + move_k, envelope.low, envelope.high)
                self.plant.apply_set_points()
            self.sim.step()
            self.reached_c.append(float(self.plant.truth.cdu_setpoint_c[0]))
            out |= {_named(fault) for fault in self.sim.engine.diagnosis.faults}
        return out


def _named(fault: Fault) -> tuple[str, str, str]:
    return fault.kind, fault.table, fault.signal


@pytest.mark.long
@pytest.mark.parametrize(
    ("cooling", "moves_k"),
    sampled([("chiller", (-6.0, -4.0, 4.0, 6.0)), ("dry_cooler", (-1.0, 2.0))], ("dry_cooler", (-1.0, 2.0))),
)
def test_set_points_that_move_through_their_envelope_are_no_fault(
    cooling: str, moves_k: tuple[float, ...]
) -> None:
    moving = MovingSetPoints(cooling, moves_k)
    assert moving.faults(9.0) == set()
    assert (min(moving.reached_c), max(moving.reached_c)) == (pytest.approx(27.0, abs=5.0), 45.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "signal", "off_k"),
    sampled(
        [("site", "outdoor_temp_c", 6.0), ("loop", "supply_temp_c", -3.0)], ("site", "outdoor_temp_c", 6.0)
    ),
)
def test_a_sensor_that_lies_is_found_while_set_points_move(table: str, signal: str, off_k: float) -> None:
    moving = MovingSetPoints("chiller", (-1.0, 1.0, 2.0))
    assert moving.faults(4.0) == set()
    moving.plant.disturbance.sensors = [SensorFault(table, 0, signal, "biased", off_k)]
    assert moving.faults(1.0) == {("sensor_biased", table, signal)}
