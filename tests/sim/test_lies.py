"""One wire of a site lies while all policies act: nobody else pays for it, and it is named. What is true is
believed at once, however sudden. Simulated."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from policies import REGISTRY
from tests.sim.test_power_story import SITE
from tests.support.builders import site_of
from tests.support.lying_sensors import Change, Lie, LyingSensors
from tests.support.sampled_cases import sampled
from twin.engine import Engine
from twin.plant import Campaign, Script, scenario_of
from twin.simulation import Simulation

pytestmark = [pytest.mark.slow, pytest.mark.long]
POLICIES = ("thermal_guard", "power_guard", "power_cap", "leak_guard", "cooling_setpoint")
LEARNED_S, LIE_S = 600, 60
MOST_LOST_PU = 0.01  # of the work of what the sensor does not belong to
MOST_OF_OWN_PU = 0.3  # of the work of its own rack, where a minute of the lowest caps would be half of it
LOAD_PU = 0.6


class Outcome(NamedTuple):
    """GPU energy [n_gpu] J since a lie began, caps commanded at the end [n_gpu] W, sensors named, and the
    signals that were told not to be believed."""

    energy_j: np.ndarray
    cap_w: np.ndarray
    named: set[tuple[str, int, str]]
    doubted: set[str]


@cache
def learned() -> Simulation:
    """A site with all policies at act, after ten minutes."""
    site = site_of(SITE)
    tree = {"name": "lie", "hours": 1, "seed": 3, "workload": {"constant_pu": LOAD_PU}}
    engine = Engine(site, [REGISTRY[name]() for name in POLICIES], [], dict.fromkeys(POLICIES, "act"))
    return Simulation.of(engine, seed=3, scenario=scenario_of(tree, site)).run(LEARNED_S)


def outcome(*lies: Lie) -> Outcome:
    """Live on for a while with these lies."""
    sim = learned().fork()
    sim.sensors = LyingSensors(sim.sensors, *lies)  # type: ignore[assignment]
    before = sim.plant.truth.gpu_energy_j.copy()
    named, told = set[tuple[str, int, str]](), set[str]()
    for _ in range(LIE_S):
        sim.step()
        told |= {key.removeprefix("doubt/") for key in sim.engine.findings.active if key.startswith("doubt/")}
        named |= {(f.table, f.entity, f.signal) for f in sim.engine.diagnosis.faults}
    leases = sim.engine.arbiter.leases["gpu.power_cap_w"].value
    return Outcome(sim.plant.truth.gpu_energy_j - before, leases.copy(), named, told)


@cache
def honest() -> Outcome:
    return outcome()


def times(factor: float) -> Change:
    return lambda value, _: value * np.float32(factor)


def reads(value: float) -> Change:
    return lambda old, _: np.full_like(old, value)


def leaps(by: float) -> Change:
    return lambda value, second: value + np.float32(by if second % 4 < 2 else 0.0)


def spikes(factor: float) -> Change:
    return lambda value, second: value * np.float32(factor if second % 8 < 2 else 1.0)


LIES = {
    "rack-x7": Lie("rack", "power_w", (0,), times(7.0), 5),
    "rack-x1.5": Lie("rack", "power_w", (0,), times(1.5), 5),
    "rack-x0.1": Lie("rack", "power_w", (0,), times(0.1), 5),
    "feeder-x10": Lie("feeder", "power_w", (0,), times(10.0), 5),
    "feeder-x1.6": Lie("feeder", "power_w", (0,), times(1.6), 5),
    "feeder-x0.1": Lie("feeder", "power_w", (0,), times(0.1), 5),
    "feeder-spikes": Lie("feeder", "power_w", (0,), spikes(3.0), 5),
    "feeder-leaps": Lie("feeder", "power_w", (0,), leaps(2.5e5), 5),
    "node-x3": Lie("node", "power_w", (1,), times(3.0), 5),
    "gpu-x1.6": Lie("gpu", "power_w", (5,), times(1.6), 5),
    "gpu-x10": Lie("gpu", "power_w", (5,), times(10.0), 5),
    "cdu-flow-10%": Lie("cdu", "flow_lpm", (0,), times(0.1), 5),
    "rack-flow-0": Lie("rack", "flow_lpm", (0,), reads(0.0), 5),
    "supply-60": Lie("rack", "supply_temp_c", (0,), reads(60.0), 5),
    "supply-leaps": Lie("rack", "supply_temp_c", (0,), leaps(25.0), 5),
}
# Out of range, below all range, or half of the time right: another word for it
UNNAMED = ("feeder-x0.1", "gpu-x10", "feeder-leaps")


@cache
def lied(name: str) -> Outcome:
    return outcome(LIES[name])


HERE = ("rack-x1.5", "feeder-x10", "feeder-leaps", "gpu-x1.6", "cdu-flow-10%", "supply-60")


@pytest.mark.parametrize("name", sampled(LIES, *HERE))
def test_a_lie_moves_nobody_else(name: str) -> None:
    lie, site = LIES[name], learned().site
    found, usual = lied(name), honest()
    own = np.zeros(site.sizes["gpu"], np.bool_)
    if lie.table in ("rack", "node", "gpu"):
        at = {"rack": site.rack_of_gpu, "node": site.node_of_gpu, "gpu": np.arange(len(own))}[lie.table]
        own = np.isin(at, lie.entities)
    lost_pu = 1.0 - found.energy_j[~own].sum() / usual.energy_j[~own].sum()
    assert lost_pu <= MOST_LOST_PU
    if name not in UNNAMED:
        assert (lie.table, lie.entities[0], lie.signal) in found.named


@pytest.mark.parametrize(
    "name",
    ["rack-x7", "rack-x1.5", "rack-x0.1", "feeder-x10", "feeder-x1.6", "feeder-spikes", "feeder-leaps",
     "node-x3", "gpu-x1.6"],
)  # fmt: skip
def test_a_lie_of_power_moves_no_cap(name: str) -> None:
    found, usual = lied(name), honest()
    np.testing.assert_allclose(np.nan_to_num(found.cap_w), np.nan_to_num(usual.cap_w), rtol=0.02)
    assert found.doubted == {f"{LIES[name].table}.power_w"}, "people are told"
    assert not usual.doubted


@pytest.mark.parametrize("name", ["rack-flow-0", "supply-leaps"])
def test_a_lie_of_coolant_costs_its_own_rack_seconds(name: str) -> None:
    own = learned().site.rack_of_gpu == LIES[name].entities[0]
    lost_pu = 1.0 - lied(name).energy_j[own].sum() / honest().energy_j[own].sum()
    assert lost_pu < MOST_OF_OWN_PU


def doubted(sim: Simulation, key: str, seconds: int) -> int:
    """Seconds in which a reading of this signal was not believed."""
    out = 0
    for _ in range(seconds):
        sim.step()
        found = sim.engine.diagnosis.reconciliation.of(key, sim.now_ns)
        out += found is not None
    return out


def struck(kind: str, table: str, entity: int, after_s: float) -> Simulation:
    """The learned site, in which a true fault begins so much later."""
    sim = learned().fork()
    plant = sim.plant
    plant.campaign = Campaign(plant.site, [Script(kind, table, entity, plant.truth.time_s + after_s)], 3)
    return sim


def test_a_feed_that_is_lost_is_believed() -> None:
    assert doubted(struck("feed_lost", "feeder", 0, 10.0), "feeder.power_w", 60) == 0


def test_a_feed_that_is_lost_after_its_meters_lied_is_believed() -> None:
    sim = struck("feed_lost", "feeder", 0, 50.0)
    both = (Lie("feeder", "power_w", (feeder,), spikes(3.0), 10, 40) for feeder in (0, 1))
    sim.sensors = LyingSensors(sim.sensors, *both)  # type: ignore[assignment]
    assert doubted(sim, "feeder.power_w", 40) > 0
    assert doubted(sim.run(8), "feeder.power_w", 60) == 0


def test_a_flow_that_is_lost_is_believed() -> None:
    assert doubted(struck("branch_blocked", "rack", 1, 10.0), "rack.flow_lpm", 60) == 0
