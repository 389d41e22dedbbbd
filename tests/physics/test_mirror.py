"""A mirrored plant stands where the twin stands, goes on as the real one would, and never moves the twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.catalogue import NS
from twin.contracts import Fault
from twin.engine import Engine, encode
from twin.engine.snapshot import decode
from twin.plant import Mix, Plant, Scenario, Sensors
from twin.plant.frozen_workload import FrozenWorkload
from twin.plant.mirror import TwinReadings, mirror_twin
from twin.plant.truth import Truth, blank
from twin.simulation import Simulation
from twin.site import Site
from twin.telemetry import CheckpointTold, JobEnded, JobStarted

START_NS = 1_767_261_600 * NS
STEADY = Scenario("steady", workload=Mix(training_pu=0, inference_pu=0, batch_pu=0, constant_pu=0.8))


@pytest.fixture(scope="module")
def site() -> Site:
    tree = two_racks(racks="r[1-2]", loops=[{"name": "fw1"}])
    tree["halls"][0]["cdus"][0]["loop"] = "fw1"
    return site_of(tree)


def run(site: Site, seconds: int, scenario: Scenario = STEADY, seed: int = 5) -> Simulation:
    plant = Plant(site, seed, scenario)
    simulation = Simulation(Engine(site, [], []), plant, Sensors(site, seed), start_ns=START_NS)
    plant.start_ns = START_NS
    return simulation.run(seconds)


@pytest.fixture(scope="module")
def calm(site: Site) -> Simulation:
    """A twin that has watched a steady plant with hidden parameters for a few minutes."""
    return run(site, 240)


def mirrored(simulation: Simulation, seed: int = 77, **more: Any) -> Plant:
    plant = Plant(simulation.site, seed, spread=0.2)
    mirror_twin(simulation.engine, plant, **more)
    return plant


LEVELS = {
    "gpu_temp_c": 2.0, "rack_flow_lpm": 1.5, "rack_supply_c": 0.2, "rack_return_c": 0.6, "cdu_flow_lpm": 3.0,
    "cdu_supply_c": 0.2, "cdu_return_c": 0.6, "loop_supply_c": 0.3, "cdu_drop_pa": 1500.0,
}  # fmt: skip
RELATIVE = {"gpu_power_w": 0.04, "node_power_w": 0.03, "rack_power_w": 0.01, "feeder_power_w": 0.01}


def close(real: Truth, other: Truth, **wider: float) -> None:
    for name, most in (LEVELS | wider).items():
        away = np.abs(getattr(real, name) - getattr(other, name)).max()
        assert away <= most, f"{name} is off by {away:.3f}"
    for name, share in RELATIVE.items():
        a, b = getattr(real, name), getattr(other, name)
        assert (np.abs(a - b) <= share * a).all(), name


@pytest.mark.long
def test_it_stands_where_the_real_plant_stands_and_stays_beside_it(calm: Simulation) -> None:
    real: Any = calm.plant.fork()
    other = mirrored(calm)
    assert other.now_ns == calm.engine.state.now_ns
    real.step()
    other.step()
    close(real.truth, other.truth)
    for _ in range(300):
        real.step()
        other.step()
    close(real.truth, other.truth, gpu_temp_c=5.0)  # plates differ by 8 %, 1 sigma, until they are learned
    assert max(other.balances().values()) <= 1e-6
    assert other.truth.trips.sum() == other.truth.throttle_s.sum() == 0


@pytest.mark.slow
def test_learned_plates_hold_the_temperatures(calm: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the estimator learns them: over the rack's supply, with what the first half of a tray adds."""
    real: Any = calm.plant.fork()
    p, site = real.parameters, calm.site
    plates = p.gpu_conduction_k_per_w + p.gpu_convection_k_per_w
    later = np.arange(len(plates)) % 4 >= 2
    over_supply = plates + np.where(later, p.rack_upstream_k_per_w[site.rack_of_gpu], 0.0)
    known = {"gpu.resistance": over_supply, "gpu.tau_s": plates * p.gpu_heat_capacity_j_per_k}
    before = TwinReadings.parameter

    def learned(seen: TwinReadings, name: str, n: int, reference: bool = False) -> np.ndarray:
        return known[name].copy() if name in known else before(seen, name, n, reference)

    monkeypatch.setattr(TwinReadings, "parameter", learned)
    other = mirrored(calm)
    for _ in range(300):
        real.step()
        other.step()
    close(real.truth, other.truth, gpu_temp_c=1.5)


@pytest.mark.slow
def test_a_plate_whose_line_has_an_offset_holds_its_temperature(
    calm: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At steady work the twin may take part of a resistance for an offset of the sensor: the line is one."""
    real: Any = calm.plant.fork()
    p, site = real.parameters, calm.site
    plates = p.gpu_conduction_k_per_w + p.gpu_convection_k_per_w
    later = np.arange(len(plates)) % 4 >= 2
    line = plates + np.where(later, p.rack_upstream_k_per_w[site.rack_of_gpu], 0.0)
    works_w = TwinReadings(calm.engine).reading("gpu.power_w")
    assert works_w.min() > 0.5 * site.design.gpu_max_w[0]
    offset_k = np.linspace(-4.0, 9.0, len(plates))
    known = {"gpu.resistance": line - offset_k / works_w, "gpu.offset_k": offset_k,
             "gpu.tau_s": plates * p.gpu_heat_capacity_j_per_k}  # fmt: skip
    before = TwinReadings.parameter

    def learned(seen: TwinReadings, name: str, n: int, reference: bool = False) -> np.ndarray:
        return known[name].copy() if name in known else before(seen, name, n, reference)

    monkeypatch.setattr(TwinReadings, "parameter", learned)
    other = mirrored(calm)
    for _ in range(300):
        real.step()
        other.step()
    close(real.truth, other.truth, gpu_temp_c=1.5)


def test_it_is_not_the_plant_that_was_drawn(calm: Simulation) -> None:
    """Without what the twin knows the same test would fail: the hidden parameters differ that much."""
    drawn = Plant(calm.site, 77, spread=0.2)
    drawn.step()
    with pytest.raises(AssertionError):
        close(calm.plant.truth, drawn.truth)


def test_the_twin_is_only_read(calm: Simulation) -> None:
    before = calm.engine.checksum()
    plant = mirrored(calm)
    for _ in range(5):
        plant.step()
    assert calm.engine.checksum() == before


def test_a_snapshot_gives_the_same_plant(calm: Simulation) -> None:
    engine = Engine(calm.site, [], [])
    engine.restore(decode(encode(calm.engine.dump())))
    again = Plant(calm.site, 77, spread=0.2)
    mirror_twin(engine, again)
    first = mirrored(calm)
    for _ in range(3):
        first.step()
        again.step()
    for name in ("gpu_temp_c", "rack_flow_lpm", "cdu_supply_c", "gpu_power_w"):
        assert np.array_equal(getattr(first.truth, name), getattr(again.truth, name)), name


def test_another_site_a_moved_or_a_lumped_plant_is_refused(calm: Simulation) -> None:
    moved = Plant(calm.site)
    moved.step()
    stranger = Plant(site_of(two_racks(racks="r[1-3]")))
    for plant in (moved, stranger, Plant(calm.site, lump=True)):
        with pytest.raises(ValueError, match="a fresh plant of the same site"):
            mirror_twin(calm.engine, plant)


def test_a_twin_that_heard_nothing_gives_a_settled_plant(site: Site) -> None:
    engine = Engine(site, [], [])
    engine.state.now_ns = START_NS
    plant = Plant(site, 1, spread=0.2)
    assert mirror_twin(engine, plant) == []
    for _ in range(60):
        plant.step()
    assert np.isfinite(plant.truth.gpu_temp_c).all()
    assert 20.0 < plant.truth.gpu_temp_c.mean() < 70.0
    assert max(plant.balances().values()) <= 1e-6


def test_what_stands_still_stays_so(site: Site) -> None:
    simulation = run(site, 60)
    real: Any = simulation.plant
    d = real.disturbance
    d.cdu_pump_ok[0, 0] = False
    d.node_psu_ok[3] = False
    d.feeder_ok[1] = False
    d.link_down[:] = False
    simulation.run(30)
    other = mirrored(simulation)
    assert other.present.cdu_pump_ok.tolist() == [[False, True]]
    assert not other.present.feeder_ok[1]
    for _ in range(5):
        other.step()
    assert other.truth.cdu_pump_speed_pu[0, 0] == 0.0
    assert other.truth.feeder_power_w[1] == 0.0
    assert not other.truth.node_on[3]
    assert other.truth.node_on.sum() == len(other.truth.node_on) - 1
    assert other.truth.rack_flow_lpm == pytest.approx(real.truth.rack_flow_lpm, rel=0.03)


def test_a_cap_of_now_is_a_cap_there(site: Site) -> None:
    simulation = run(site, 20)
    real: Any = simulation.plant
    real.truth.gpu_cap_w[:9] = 600.0
    simulation.run(5)
    other = mirrored(simulation)
    other.step()
    assert other.truth.gpu_cap_w[:9].tolist() == [600.0] * 9
    assert (other.truth.gpu_power_w[:9] <= 601.0).all()
    assert (other.truth.gpu_cap_w[9:] >= 1000.0).all()


def jobs_of(site: Site) -> Any:
    engine = Engine(site, [], [])
    engine.state.now_ns = START_NS
    nodes = [site.name("node", i) for i in range(4)]
    for name, some, coupling in (("a", nodes[:2], "synchronous"), ("b", nodes[2:], "independent")):
        event = JobStarted(
            job=name, nodes=tuple(some), kind="training", coupling=coupling, checkpoint_interval_s=100.0,  # type: ignore[arg-type]
            checkpoint_save_s=10.0, checkpoint_restart_s=30.0,
        )  # fmt: skip
        engine.jobs.start(event, [site.entity("node", n) or 0 for n in some], 0, START_NS)
    return engine.jobs


class Held:
    """A held workload on a truth of its own; `told` are columns of job `a` that its reports would set."""

    def __init__(self, site: Site, **told: float) -> None:
        jobs = jobs_of(site)
        for name, value in told.items():
            getattr(jobs, name)[jobs.slot_of["a"]] = value
        self.truth = blank(site)
        self.truth.gpu_clock_pu[:] = 1.0
        self.truth.gpu_alive[:] = self.truth.node_on[:] = True
        self.work = FrozenWorkload(
            site,
            jobs,
            np.full((3, site.sizes["gpu"]), 0.6),
            np.full(site.sizes["job"], np.nan),
            START_NS,
        )
        self.events: list[Any] = []

    def run(self, seconds: int) -> Held:
        for _ in range(seconds):
            self.events += self.work.step(self.truth, self.truth.time_s, 1.0)
            self.truth.time_s += 1.0
        return self

    def reports(self) -> list[CheckpointTold]:
        return [e for e in self.events if isinstance(e, CheckpointTold)]

    def others(self) -> list[Any]:
        return [e for e in self.events if not isinstance(e, CheckpointTold)]


def test_held_work_saves_at_its_interval_and_goes_on(site: Site) -> None:
    held = Held(site).run(99)
    assert (held.truth.gpu_sm_pu == 0.6).all()
    held.run(5)
    assert (held.truth.gpu_sm_pu[:16] < 0.1).all()  # both jobs, of four nodes with four GPUs each
    assert (held.truth.gpu_sm_pu[16:] == 0.6).all()
    held.run(10)
    assert (held.truth.gpu_sm_pu == 0.6).all()
    assert held.work.checkpoint_age_s("a", 114.0) == pytest.approx(14.0)
    assert [(e.job, e.at_ns // NS, e.began_ns // NS) for e in held.reports()] == [
        ("a", 110, 100), ("b", 110, 100)
    ]  # fmt: skip
    assert held.others() == []


def test_a_synchronous_job_loses_what_it_had_not_saved_and_starts_again(site: Site) -> None:
    held = Held(site).run(150)  # saved at 100
    held.truth.gpu_alive[1] = False
    held.run(1)
    (ended,) = held.others()
    assert ended == JobEnded(job="a", reason="node_fail")
    assert held.work.progress.lost_gpu_s == pytest.approx(8 * 40.0)  # done since the save was whole, at 110
    assert held.work.progress.interruptions == 1
    assert (held.truth.gpu_sm_pu[:8] == 0.0).all()
    held.run(30)
    _, started = held.others()
    assert isinstance(started, JobStarted)
    assert started.nodes == (site.name("node", 1),)
    back = held.reports()[-1]
    assert (back.job, back.restart_s, back.began_ns) == ("a", 30.0, 0)
    assert held.events.index(started) < held.events.index(back), "or nobody knows whose report it is"
    assert (held.truth.gpu_sm_pu[4:8] == 0.6).all()


def test_an_independent_job_loses_nothing_else(site: Site) -> None:
    held = Held(site).run(50)
    held.truth.gpu_alive[9] = False
    held.run(5)
    assert held.others() == []
    assert held.work.lost_work() == 0.0
    assert len(held.work.jobs) == 2


def test_a_save_on_demand_saves_the_work(site: Site) -> None:
    held = Held(site).run(90)
    assert held.work.checkpoint("nobody", 90.0) is None
    assert held.work.checkpoint("a", 90.0) == pytest.approx(10.0)
    held.run(12)
    assert held.work.checkpoint("a", 90.0) == 0.0
    held.truth.gpu_alive[1] = False
    held.run(1)
    assert held.work.lost_work() < 8 * 5.0


def test_another_save_may_be_asked_for_while_one_runs(site: Site) -> None:
    held = Held(site).run(105)
    assert held.work.checkpoint("a", 104.0) == pytest.approx(16.0)
    held.run(20)
    assert [e.began_ns // NS for e in held.reports() if e.job == "a"] == [100, 110]


def test_an_interval_holds_from_the_last_save_on_and_is_told_at_once(site: Site) -> None:
    held = Held(site).run(130)
    assert held.work.checkpoint_interval("a", 40.0)
    assert held.work.checkpoint_interval("a", 40.0), "again: nothing new is said"
    held.run(1)
    now = held.reports()[-1]
    assert (now.job, now.interval_s, now.save_s, now.began_ns) == ("a", 40.0, 0.0, 100 * NS)
    held.run(31)
    assert [e.began_ns // NS for e in held.reports()[3:]] == [150]
    assert not held.work.checkpoint_interval("nobody", 40.0)


def test_a_flush_in_the_background_costs_no_work_but_is_lost_with_the_node(site: Site) -> None:
    told = {"checkpoint_block_s": 2.0, "checkpoint_flush_s": 60.0, "saved_ns": START_NS - 30 * NS}
    held = Held(site, **told).run(71)  # 30 s old at the beginning: it saves at 70
    assert (held.truth.gpu_sm_pu[:8] < 0.1).all()
    held.run(2)
    assert (held.truth.gpu_sm_pu[:8] == 0.6).all()
    assert held.work.checkpoint_age_s("a", 73.0) == pytest.approx(103.0), "not durable yet"
    held.run(58)
    (report,) = (e for e in held.reports() if e.job == "a")
    assert (report.at_ns, report.began_ns, report.block_s, report.flush_s) == (130 * NS, 70 * NS, 2.0, 60.0)
    held.run(50)  # the next begins at 172
    held.truth.gpu_alive[1] = False
    held.run(1)
    assert held.work.lost_work() == pytest.approx(8 * (181 - 72 - 2), abs=8.1)


def test_a_job_whose_saves_nobody_heard_of_does_not_invent_one(site: Site) -> None:
    held = Held(site, checkpoint_interval_s=5000.0, checkpoint_save_s=10.0).run(301)
    first = next(e for e in held.reports() if e.job == "a")
    assert (first.at_ns, first.began_ns, first.interval_s) == (300 * NS, 0, 5000.0)
    assert Held(site, checkpoint_interval_s=0.0).run(400).reports()[-1].job == "b", "one that never saves"


def test_a_slow_member_slows_a_synchronous_job_and_only_itself_another(site: Site) -> None:
    held = Held(site)
    held.truth.gpu_clock_pu[0] = held.truth.gpu_clock_pu[8] = 0.5
    held.run(31)
    slowed = held.work.progress.slowed_gpu_s
    assert slowed > 8 * 30 * 0.3  # all of the first job, an eighth of the second
    held.truth.gpu_clock_pu[0] = 1.0
    before = held.work.progress.slowed_gpu_s
    held.run(30)
    assert held.work.progress.slowed_gpu_s - before < 0.3 * slowed


def told(kind: str, table: str, entity: int = 0, signal: str = "") -> Fault:
    return Fault(kind, table, entity, signal, "warning", 0.9, START_NS, ())


def test_told_faults_go_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = run(site, 40)
    real: Any = simulation.plant
    real.disturbance.cdu_filter_factor[0] = 30.0
    real.disturbance.cdu_valve_stuck_pu[0] = 0.31
    simulation.run(30)
    clean, before = real.parameters.cdu_filter.copy(), TwinReadings.parameter

    def learned(seen: TwinReadings, name: str, n: int, reference: bool = False) -> np.ndarray:
        return clean.copy() if (name, reference) == ("cdu.filter", True) else before(seen, name, n, reference)

    monkeypatch.setattr(TwinReadings, "parameter", learned)
    simulation.engine.diagnosis.faults = (
        told("filter_blocked", "cdu"), told("valve_stuck", "cdu"), told("leak", "rack", 1),
        told("gpu_off_bus", "gpu", 7),
        told("sensor_frozen", "rack", 0, "flow_lpm"), told("node_silent", "node", 2),
        told("ecc_growth", "gpu", 3),
    )  # fmt: skip
    other = Plant(site, 77, spread=0.2)
    assert mirror_twin(simulation.engine, other) == [f"ecc_growth of {site.name('gpu', 3)}"]
    d = other.present
    assert d.cdu_filter_factor[0] == pytest.approx(30.0, rel=0.05)
    assert d.cdu_valve_stuck_pu[0] == pytest.approx(0.31, abs=0.01)
    assert d.rack_leak_lpm.tolist() == [0.0, 1.0]
    assert d.gpu_alive.sum() == len(d.gpu_alive) - 1
    assert [(s.table, s.trouble) for s in d.sensors] == [("rack", "frozen"), ("node", "silent")]
    for _ in range(30):
        real.step()
        other.step()
    assert other.truth.cdu_flow_lpm == pytest.approx(real.truth.cdu_flow_lpm, rel=0.03)
    assert other.truth.cdu_filter_drop_pa == pytest.approx(real.truth.cdu_filter_drop_pa, rel=0.06)
    assert not other.truth.gpu_alive[7]
    assert other.truth.cdu_leaked_l[0] > 0.3


def test_a_blocked_branch_stays_shut(site: Site) -> None:
    simulation = run(site, 40)
    real: Any = simulation.plant
    real.disturbance.rack_branch_factor[1] = 1e12
    simulation.run(15)
    simulation.engine.diagnosis.faults = (told("branch_blocked", "rack", 1),)
    other = mirrored(simulation)
    hot = real.truth.gpu_temp_c[72:].mean()
    assert other.truth.gpu_temp_c[72:].mean() == pytest.approx(hot, abs=3.0)
    real.step()
    other.step()
    assert other.truth.rack_flow_lpm[1] < 0.01 * other.truth.rack_flow_lpm[0]
    assert other.truth.rack_flow_lpm[0] == pytest.approx(real.truth.rack_flow_lpm[0], rel=0.03)
