"""The closed loop: both ways into the Inbox agree, urgent things come at once, forks and recordings hold."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from policies.thermal_guard import ThermalGuard
from tests.support.builders import START_NS, Wish, site_of, spec_of, two_racks
from tests.support.journal_bodies import bodies_of
from tests.support.static_plant import StillPlant
from twin.catalogue import NS
from twin.engine import Engine
from twin.plant import Campaign, Script, Sensors
from twin.plant.disturbance import SensorFault
from twin.plant.workload import Workload
from twin.run import Recorder, TraceReader, replay_frames
from twin.simulation import Simulation
from twin.simulation.closed_loop import ReportInbox
from twin.site import Site
from twin.telemetry import (
    Counts,
    EntityReplaced,
    Frame,
    IdentityTold,
    Inbox,
    JobStarted,
    OperatorRequest,
    SiteChanged,
    TableUpdate,
)

CAP = "gpu.power_cap_w"


@pytest.fixture(scope="module")
def pod() -> Site:
    tree = two_racks(loops=[{"name": "fw1"}])
    tree["halls"][0]["planes"] = [{"name": "p", "links_per_node": 1, "racks": ["r[1-2]"]}]
    return site_of(tree)


def loop_of(site: Site, policies: Any = (), authority: Any = None, observers: Any = ()) -> Simulation:
    engine = Engine(site, policies, [], authority)
    out = Simulation(engine, cast(Any, StillPlant(site)), Sensors(site, 3))
    out.observers = observers
    return out


def content(frame: Frame) -> list[Any]:
    """A frame as plain data."""
    parts: list[Any] = [frame.tick, frame.now_ns, frame.dt_s, frame.urgent, frame.events]
    for part in (*frame.updates, *frame.counts):
        cells = (part.q,) if isinstance(part, TableUpdate) else (part.raw, part.gain)
        arrays = (part.rows, part.entity, *cells, part.t_ns)
        parts.append((part.table, [None if a is None else a.tolist() for a in arrays]))
    return parts


class Frames:
    """Keeps every frame."""

    def __init__(self) -> None:
        self.kept: list[Frame] = []

    def observe(self, engine: Engine, frame: Frame, decision: Any) -> None:
        self.kept.append(frame)


def trouble(simulation: Simulation, second: int) -> None:
    """A rough minute: silent nodes, dead GPUs, resets, leaks, lost readings, lies."""
    plant: Any = simulation.plant
    t = plant.truth
    lies = {
        10: [SensorFault("node", 3, "", "silent"), SensorFault("node", 19, "", "silent")],
        14: [SensorFault("gpu", 5, "energy_mj", "silent")],
        18: [SensorFault("gpu", 5, "energy_mj", "frozen"), SensorFault("rack", 0, "flow_lpm", "silent")],
        22: [],
    }
    if second in lies:
        plant.disturbance.sensors = lies[second]
    if second == 12:
        t.gpu_alive[40:44] = False
    if second == 16:
        t.gpu_alive[:] = True
        t.gpu_energy_j[7] = 0.0  # a new board: its counter begins anew
        t.gpu_sbe_count[9] += 10**7  # more than can be
    if second == 20:
        t.rack_leak[1] = t.node_leak[30] = True
    if second == 24:
        t.node_on[2], t.rack_unpowered[1] = False, True


def test_whole_reports_and_blocks_give_the_same_frames(pod: Site) -> None:
    frames = []
    for whole in (True, False):
        looker = Frames()
        simulation = loop_of(pod, [ThermalGuard()], {"thermal_guard": "act"}, [looker])
        simulation.whole = whole
        for second in range(32):
            trouble(simulation, second)
            simulation.step()
        frames.append(looker.kept)
        counts = simulation.inbox.counts
        assert min(counts[k] for k in ("missing", "counter_resets", "counter_jumps")) > 0
    assert any(f.urgent for f in frames[0])
    assert len(frames[0]) == len(frames[1])
    for one, other in zip(*frames, strict=True):
        assert content(one) == content(other)
    assert all(isinstance(c, Counts) for f in frames[0] for c in f.counts)


def test_reports_that_meet_in_one_tick_or_come_late_are_taken_as_their_blocks(pod: Site) -> None:
    plant, sensors = StillPlant(pod), Sensors(pod, 3)
    seen = []
    for second in range(6):
        plant.step()
        now_ns = START_NS + (second + 1) * NS
        seen.append(sensors.observe(plant.truth, plant.disturbance, now_ns).copy())
    whole, blocks = ReportInbox(pod.sizes), Inbox(pod.sizes)
    for tick, rounds in enumerate(([0], [1, 2], [4], [3], [5, 5])):
        for report in (r for k in rounds for r in seen[k].reports):
            whole.put_report(report, seen[5].now_ns)
            for block in report.copy().blocks():
                blocks.put_block(block, seen[5].now_ns)
        frames = [inbox.take(tick, seen[5].now_ns + tick, 1.0) for inbox in (whole, blocks)]
        assert content(frames[0]) == content(frames[1])
    assert whole.counts == blocks.counts
    assert whole.counts["older"] > 0
    assert whole.counts["coalesced"] > 0


def test_the_engine_sees_what_the_sensors_said(pod: Site) -> None:
    simulation = loop_of(pod).run(5)
    state = simulation.engine.state.tables["gpu"]
    report = simulation.observation.find("gpu", "power_w")
    assert report is not None
    seen = state.value[0]
    assert state.signals[0].name == "power_w"
    known = ~np.isnan(report.column("power_w"))
    assert np.array_equal(seen[known], report.column("power_w")[known])
    assert np.array_equal(state.t_ns[state.partition.group_of_row[0]], report.t_ns)


def test_a_leak_brings_an_urgent_tick_before_the_regular_one(pod: Site) -> None:
    looker = Frames()
    simulation = loop_of(pod, observers=[looker]).run(6)
    assert not any(f.urgent for f in looker.kept)
    plant: Any = simulation.plant
    plant.truth.node_leak[4] = True
    looker.kept.clear()
    simulation.step()
    urgent, regular = looker.kept
    assert (urgent.urgent, regular.urgent) == (True, False)
    assert regular.now_ns == simulation.now_ns
    assert regular.now_ns - NS < urgent.now_ns < regular.now_ns
    assert urgent.dt_s + regular.dt_s == pytest.approx(1.0)
    simulation.step()
    assert not looker.kept[-1].urgent  # what lasts is urgent once
    assert len(looker.kept) == 3


def test_an_urgent_tick_does_not_wait_for_what_comes_later(pod: Site) -> None:
    looker = Frames()
    simulation = loop_of(pod, observers=[looker]).run(6)
    plant: Any = simulation.plant
    plant.truth.rack_leak[1] = True
    looker.kept.clear()
    simulation.run(4)  # the building is late
    (urgent,) = [f for f in looker.kept if f.urgent]
    assert {u.table for u in urgent.updates} == {"rack", "cdu", "loop", "feeder", "hall"}
    later = next(f for f in looker.kept if f.tick == urgent.tick + 1)
    assert {u.table for u in later.updates} >= {"gpu", "node"}
    assert "rack" not in {u.table for u in later.updates}


def test_commands_reach_the_plant_and_its_answers_the_twin(pod: Site) -> None:
    wish = Wish()
    wish.ask(CAP, [4, 5], 800.0, 900.0, 850.0)
    simulation = loop_of(pod, [wish], {"wish": "act"}).run(4)
    plant: Any = simulation.plant
    assert plant.truth.gpu_cap_w[[3, 4, 5, 6]].tolist() == [1200.0, 850.0, 850.0, 1200.0]
    lease = simulation.engine.arbiter.leases[CAP]
    assert lease.value[4] == 850.0
    limit = simulation.engine.state.tables["gpu"].value[9]
    assert simulation.engine.state.tables["gpu"].signals[9].name == "power_limit_w"
    assert limit[4] == 850.0
    acked = [r for r in bodies_of(simulation.decision) if r["kind"] == "acks"]
    assert acked == []
    wish.ask(CAP, [4, 5], 700.0, 900.0, 750.0)
    kinds = []
    for _ in range(4):
        simulation.step()
        kinds += [(r["control"], r["count"]) for r in bodies_of(simulation.decision) if r["kind"] == "acks"]
    assert kinds
    assert sum(count for _, count in kinds) >= 2


def test_a_node_says_which_service_level_it_was_told(pod: Site) -> None:
    wish = Wish()
    wish.ask("node.service_level", [6], 1.0, 1.0, 1.0)
    simulation = loop_of(pod, [wish], {"wish": "act"})
    simulation.inject(JobStarted(job="elsewhere", nodes=()))  # so that it is known what runs where
    simulation.run(4)
    state = simulation.engine.state.tables["node"]
    row = next(s.row for s in state.signals if s.name == "service_level_state")
    assert np.flatnonzero(state.value[row]).tolist() == [6]


def test_what_an_operator_says_is_in_the_next_frame(pod: Site) -> None:
    looker = Frames()
    simulation = loop_of(pod, observers=[looker]).run(2)
    request = OperatorRequest(id="a", author="me", control=CAP, names=("lab/h/r1",), lo=300.0, hi=800.0)
    simulation.inject(request)
    simulation.step()
    assert request in looker.kept[-1].events


def test_a_replaced_device_is_new_and_the_site_stays(pod: Site) -> None:
    simulation = loop_of(pod).run(4)
    with pytest.raises(ValueError, match="does not change"):
        simulation.inject(SiteChanged(site_hash="x", spec=b"{}"))
    simulation.inject(EntityReplaced(table="gpu", name="lab/h/r1/node0/gpu2", serial="new"))
    plant: Any = simulation.plant
    plant.truth.gpu_energy_j[2] = 0.0
    simulation.step()
    assert simulation.engine.state.tables["gpu"].generation[:4].tolist() == [0, 0, 1, 0]
    assert simulation.inbox.counts["counter_resets"] == 0


def test_a_device_that_tells_another_serial_is_new_and_the_first_one_is_not(pod: Site) -> None:
    simulation = loop_of(pod).run(4)
    plant: Any = simulation.plant
    for serial, generation in (("S-0001", 0), ("S-0001", 0), ("S-0002", 1)):
        simulation.inject(IdentityTold(table="gpu", name="lab/h/r1/node0/gpu2", serial=serial))
        if generation:
            plant.truth.gpu_energy_j[2] = 0.0
        simulation.step()
        assert simulation.engine.state.tables["gpu"].generation[:4].tolist() == [0, 0, generation, 0]
    assert simulation.inbox.counts["counter_resets"] == 0


def test_a_fork_goes_on_as_the_original_would_and_leaves_it_alone(pod: Site) -> None:
    wish = Wish()
    wish.ask(CAP, [1], 700.0, 900.0, 750.0)
    simulation = loop_of(pod, [ThermalGuard(), wish], {"wish": "act", "thermal_guard": "act"}).run(20)
    before = simulation.engine.checksum()
    fork = simulation.fork()
    assert fork.engine.checksum() == before
    assert fork.engine.site is simulation.engine.site
    fork.run(25)
    assert simulation.engine.checksum() == before
    simulation.run(25)
    assert simulation.engine.checksum() == fork.engine.checksum()
    plants: list[Any] = [simulation.plant, fork.plant]
    assert np.array_equal(plants[0].truth.gpu_energy_j, plants[1].truth.gpu_energy_j)
    plants[1].truth.gpu_temp_c[:] = 84.0  # what befalls the fork is nobody else's
    fork.run(5)
    simulation.run(5)
    assert simulation.engine.state.tables["gpu"].value[2].max() < 60
    assert fork.engine.checksum() != simulation.engine.checksum()


def test_a_fork_of_a_fork_at_once_shares_no_array_that_changes(pod: Site) -> None:
    simulation = loop_of(pod, [ThermalGuard()], {"thermal_guard": "act"}).run(3)
    fork = simulation.fork()
    mine, other = _arrays(simulation.engine), _arrays(fork.engine)
    shared = [path for path in mine if path in other and np.shares_memory(mine[path], other[path])]
    assert [p for p in shared if mine[p].flags.writeable and mine[p].size] == []


def _arrays(engine: Engine) -> dict[str, np.ndarray]:
    """Every array of what an engine would save, by path."""
    found: dict[str, np.ndarray] = {}

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, np.ndarray):
            found[path] = tree
        elif isinstance(tree, dict):
            for key, value in tree.items():
                walk(value, f"{path}.{key}")
        elif isinstance(tree, list | tuple):
            for i, value in enumerate(tree):
                walk(value, f"{path}.{i}")

    walk(engine.dump(), "")
    return found


def test_a_recorded_run_replays_line_by_line(tmp_path: Path) -> None:
    spec = spec_of(two_racks())
    site = site_of(two_racks())
    wish = Wish()
    engine = Engine(site, [ThermalGuard(), wish], [], {"thermal_guard": "act", "wish": "act"})
    recorder = Recorder(engine, spec, tmp_path / "run", simulated=True)
    with Simulation(engine, cast(Any, StillPlant(site)), Sensors(site, 3), recorder=recorder) as simulation:
        for second in range(30):
            trouble(simulation, second)
            simulation.step()
    assert b'"simulated":true' in (tmp_path / "run" / "journal.jsonl").read_bytes()
    again = Engine(site, [ThermalGuard(), wish], [], {"thermal_guard": "act", "wish": "act"})
    outcome = replay_frames(again, TraceReader(tmp_path / "run"), tmp_path / "run" / "journal.jsonl")
    assert outcome.ticks == simulation.ticks
    assert outcome.compared_lines > 5
    assert again.checksum() == engine.checksum()


@pytest.fixture(scope="module")
def plant_run(pod: Site) -> Simulation:
    """A plant with jobs and a fault to come, two minutes on."""
    simulation = Simulation.of(Engine(pod, [ThermalGuard()], [], {"thermal_guard": "act"}), seed=5)
    plant: Any = simulation.plant
    plant.workload = Workload(pod, 5)
    plant.campaign = Campaign(pod, [Script("pump_trip", "cdu", 0, plant.truth.time_s + 130.0)], 5)
    return simulation.run(120)


@pytest.mark.long
def test_a_plant_in_the_loop_is_read_in_range_and_its_jobs_are_known(plant_run: Simulation) -> None:
    counts = plant_run.inbox.counts
    assert counts["out_of_range"] == counts["unknown_entity"] == counts["older"] == 0
    assert counts["counter_resets"] == counts["counter_jumps"] == 0
    engine, plant = plant_run.engine, plant_run.plant
    assert not plant._watched  # or it would look for changes of its disturbance at each step
    assert engine.jobs.slot_of
    assert plant_run.plant.job_names == {slot: name for name, slot in engine.jobs.slot_of.items()}
    table = engine.state.tables["rack"]
    signal = next(s for s in table.signals if s.name == "return_temp_c")
    truth = plant_run.plant.truth
    assert np.allclose(table.value[signal.row], truth.rack_return_c, atol=1.0)


def test_a_fork_of_a_plant_lives_through_the_same_fault(plant_run: Simulation) -> None:
    fork = plant_run.fork()
    clone: Any = fork.plant
    healthy = clone.truth.cdu_pump_speed_pu.copy()
    before = plant_run.engine.checksum()
    fork.run(40)
    assert (clone.truth.cdu_pump_speed_pu == 0).any()
    assert plant_run.engine.checksum() == before
    other = plant_run.fork().run(40)
    assert other.engine.checksum() == fork.engine.checksum()
    assert np.array_equal(plant_run.plant.truth.cdu_pump_speed_pu, healthy)


def test_lumped_gpus_are_read_as_one_of_those_they_stand_for(pod: Site) -> None:
    simulation = Simulation.of(Engine(pod, [], []), seed=5, lump=4, noise=0.0).run(3)
    assert simulation.inbox.counts["out_of_range"] == 0
    report = simulation.observation.find("gpu", "power_w")
    assert report is not None
    assert np.allclose(report.column("power_w") * 4, simulation.plant.truth.gpu_power_w, atol=2.01)
    assert report.column("power_limit_w").max() <= 1200.0


@pytest.mark.long
def test_memory_stays_flat(pod: Site) -> None:
    simulation = loop_of(pod, [ThermalGuard()], {"thermal_guard": "act"}).run(120)
    tracemalloc.start()
    simulation.run(60)
    gc.collect()  # garbage that waits for its collection is no growth
    first, _ = tracemalloc.get_traced_memory()
    simulation.run(120)
    gc.collect()
    later, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert later - first < 40_000
