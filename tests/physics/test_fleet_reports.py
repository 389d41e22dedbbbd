"""Reports of a fleet with a failure timeline: precursors, the failure and the repair, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.evaluation.health.failure_classes import CLASSES, KINDS
from tests.evaluation.health.failure_draws import Failing, failure_table
from tests.evaluation.health.failure_timeline import TimelineWriter
from tests.support.builders import site_of, two_racks
from twin.catalogue import NS, find_signal
from twin.engine import Engine
from twin.plant import FailureTimeline, Observation, Plant, Scenario, Sensors, TimelinePlayer
from twin.plant.workload import Mix
from twin.simulation import Simulation
from twin.site import Site
from twin.telemetry import EntityReplaced, Event, FaultReported, JobEnded, JobStarted, MaintenanceBegun

HOUR_S, STEP_S = 3600.0, 60.0


def lab() -> Site:
    tree = two_racks()
    tree["halls"][0]["planes"] = [{"name": "rail", "links_per_node": 1}]
    return site_of(tree)


SITE = lab()
NODE, GPU = 4, int(SITE.gpu_start_of_node[4]) + 1
BEGIN_S, OFF_S, END_S = 6.0 * HOUR_S, 6.25 * HOUR_S, 8.0 * HOUR_S


def life_of(writer: TimelineWriter, *failing: Failing) -> FailureTimeline:
    events = sorted(writer.events, key=lambda s: (s.time_s, s.act, s.cause))
    lemons = np.zeros(SITE.sizes["node"], np.bool_)
    return FailureTimeline(1.0, 1, writer.strength, tuple(events), failure_table(list(failing)), lemons)


def one(
    name: str, shows: bool = True, code: int = 0, strength: float = 1.0, seed: int = 1, **more: Any
) -> FailureTimeline:
    """A timeline in which one node fails, in this way, after six hours."""
    kind = KINDS.index(name)
    device = NODE if name in ("power", "host", "network") else GPU
    precursor_s = 60.0 if shows else np.nan
    failing = Failing(NODE, kind, device, BEGIN_S, OFF_S, END_S, precursor_s, code, **more)
    writer = TimelineWriter(SITE, seed, strength)
    writer.fail(failing)
    writer.show(0, failing)
    return life_of(writer, failing)


def stand_still(plant: Plant) -> None:
    """Only who has power is found anew; a minute is one step."""
    plant.step_max_s = STEP_S
    plant.physics = lambda dt_s: plant.connect() if plant.power.stale else None  # type: ignore[method-assign]


class Fleet:
    """Plant and sensors with a timeline, a minute at a time."""

    def __init__(self, timeline: FailureTimeline | None, warm: bool = False, **mix: Any) -> None:
        """`warm`: with all of the physics; else heat and flows stand still, which is far quicker."""
        scenario = Scenario("life", seed=1, dt_s=STEP_S, workload=Mix(**(mix or {"constant_pu": 0.6})))
        self.plant = Plant(SITE, 1, scenario)
        self.plant.step_max_s = 4.0
        if not warm:
            stand_still(self.plant)
        if timeline is not None:
            self.plant.play(TimelinePlayer(SITE, timeline))
        self.sensors = Sensors(SITE, 1, drop_out_pu=0.0)
        self.events: list[tuple[float, Event]] = []
        self.seen: Observation | None = None

    def until(self, time_s: float, look: Callable[[Fleet], None] | None = None) -> Fleet:
        while self.plant.truth.time_s < time_s - 1e-6:
            self.plant.step(dt_s=STEP_S)
            now_ns = self.plant.now_ns
            self.seen = self.sensors.observe(self.plant.truth, self.plant.present, now_ns,
                                             tuple(self.plant.events()))  # fmt: skip
            self.events += [(self.plant.truth.time_s, e) for e in self.seen.events]
            if look is not None:
                look(self)
        return self

    def read(self, key: str, entity: int) -> float:
        """Return the value that the last round reported; NaN if it reported none."""
        table, _, name = key.partition(".")
        assert self.seen is not None
        for report in self.seen.reports:
            if report.table != table or (report.present is not None and not report.present[entity]):
                continue
            if name in report.signals:
                return float(report.values[report.signals.index(name), entity])
            if name in report.counters:
                count = int(report.counts[report.counters.index(name), entity])
                return float(count) if count >= 0 else np.nan
        return np.nan

    def told(self, kind: type[Event]) -> list[Any]:
        return [e for _, e in self.events if isinstance(e, kind)]


# One sign of each class that counts something: (class, XID, signal)
GROWS = [
    ("memory", 95, "gpu.row_remap_count"), ("memory", 64, "gpu.row_remap_count"),
    ("nvlink", 74, "gpu.nvlink_replay_count"), ("pcie", 79, "gpu.pcie_replay_count"),
    ("host", 0, "node.reboot_count"), ("network", 0, "link.flap_count"),
]  # fmt: skip


def seed_that(name: str, field: str, **more: Any) -> int:
    """A seed whose precursors include this one."""
    for seed in range(200):
        events = one(name, seed=seed, **more).events
        if any(s.field == field and s.time_s < BEGIN_S - 2 * STEP_S for s in events):
            return seed
    raise AssertionError(f"no {name} shows {field}")


FIELD = {
    "gpu.row_remap_count": "gpu_row_remaps", "gpu.nvlink_replay_count": "gpu_nvlink_replays",
    "gpu.pcie_replay_count": "gpu_pcie_replays", "node.reboot_count": "node_reboots",
    "link.flap_count": "link_flap_count",
}  # fmt: skip


@pytest.mark.parametrize(("name", "code", "key"), GROWS)
def test_counters_grow_before_a_failure_that_shows_and_not_before_one_that_does_not(
    name: str, code: int, key: str
) -> None:
    signal = find_signal(key)
    assert signal is not None
    entity = {"gpu": GPU, "node": NODE, "link": NODE}[signal.table]
    seed = seed_that(name, FIELD[key])
    shown = Fleet(one(name, code=code, seed=seed)).until(BEGIN_S - STEP_S)
    hidden = Fleet(one(name, shows=False, code=code, seed=seed)).until(BEGIN_S - STEP_S)
    assert shown.read(key, entity) >= 1.0
    assert hidden.read(key, entity) == 0.0
    assert not hidden.told(FaultReported)
    assert shown.plant.truth.node_on.all()


def test_a_remapped_row_is_told_of_and_waits_for_a_reset() -> None:
    seed = seed_that("memory", "gpu_row_remaps", code=64)
    pending: list[float] = []
    fleet = Fleet(one("memory", code=64, seed=seed))
    fleet.until(BEGIN_S - STEP_S, lambda f: pending.append(f.read("gpu.row_remap_pending_state", GPU)))
    assert {e.code for e in fleet.told(FaultReported)} >= {63}
    assert max(pending) == 1.0
    fleet.until(BEGIN_S + STEP_S)
    assert fleet.read("gpu.row_remap_failed_state", GPU) == 1.0
    assert fleet.read("gpu.recovery_action_state", GPU) == 1.0
    assert fleet.read("gpu.ecc_dbe_count", GPU) == 1.0


def test_gaps_come_before_a_gpu_falls_off_the_bus() -> None:
    seed = seed_that("off_bus", "gpu_silent", code=79)
    heard: list[bool] = []
    others: list[bool] = []

    def look(f: Fleet) -> None:
        heard.append(np.isfinite(f.read("gpu.power_w", GPU)))
        others.append(np.isfinite(f.read("gpu.power_w", GPU + 8)))

    fleet = Fleet(one("off_bus", code=79, seed=seed)).until(BEGIN_S - STEP_S, look)
    assert 3 <= heard.count(False) < 0.5 * len(heard)
    assert all(others)
    assert not fleet.told(FaultReported)


@pytest.mark.evaluation
def test_a_plate_that_conducts_worse_warms_its_gpu_before_it_shuts_down() -> None:
    timeline = one("thermal", code=79)
    margins: list[float] = []
    hot = Fleet(timeline, warm=True).until(
        BEGIN_S - STEP_S, lambda f: margins.append(f.read("gpu.thermal_margin_k", GPU))
    )
    half = Fleet(one("thermal", code=79, strength=0.5), warm=True).until(BEGIN_S - STEP_S)
    well = Fleet(None, warm=True).until(BEGIN_S - STEP_S)
    rise = [f.read("gpu.temp_c", GPU) - well.read("gpu.temp_c", GPU) for f in (hot, half)]
    assert rise[0] > 4.0
    assert rise[1] == pytest.approx(0.5 * rise[0], abs=1.5)
    assert margins[10] - margins[-1] == pytest.approx(rise[0], abs=2.0)


@pytest.mark.parametrize(
    ("name", "code", "gone"),
    [("off_bus", 79, True), ("pcie", 79, True), ("thermal", 79, True), ("memory", 95, False),
     ("nvlink", 74, False), ("firmware", 119, False)],
)  # fmt: skip
def test_a_gpu_fails_its_node_is_switched_off_repaired_and_back(name: str, code: int, gone: bool) -> None:
    fleet = Fleet(one(name, shows=False, code=code, replaced=True)).until(BEGIN_S + 2 * STEP_S)
    fault = fleet.told(FaultReported)
    assert [(e.name, e.code) for e in fault] == [(SITE.name("gpu", GPU), code)]
    assert fault[0].at_ns == fleet.plant.start_ns + round(BEGIN_S * NS)
    assert np.isnan(fleet.read("gpu.power_w", GPU)) == gone
    assert fleet.read("gpu.xid_code", GPU) == code or gone
    assert fleet.read("node.power_on_state", NODE) == 1.0
    fleet.until(OFF_S + 2 * STEP_S)
    assert fleet.read("node.power_on_state", NODE) == 0.0
    assert fleet.read("node.agent_state", NODE) == 1.0
    assert np.isnan(fleet.read("gpu.power_w", GPU + 1))
    fleet.until(END_S + 2 * STEP_S)
    assert fleet.read("node.power_on_state", NODE) == 1.0
    assert fleet.read("gpu.power_w", GPU) > 50.0
    assert fleet.read("node.reboot_count", NODE) == 1.0
    assert [(e.table, e.name) for e in fleet.told(EntityReplaced)] == [("gpu", SITE.name("gpu", GPU))]
    assert fleet.read("gpu.xid_code", GPU) == 0.0  # the new one has reported nothing
    assert fleet.read("gpu.recovery_action_state", GPU) == 0.0


@pytest.mark.parametrize("name", ["host", "network"])
def test_a_node_that_hangs_is_silent_while_its_board_speaks(name: str) -> None:
    fleet = Fleet(one(name, shows=False)).until(BEGIN_S + 2 * STEP_S)
    assert np.isnan(fleet.read("gpu.power_w", GPU))
    assert fleet.read("node.power_w", NODE) > 100.0
    assert fleet.read("node.agent_state", NODE) == 1.0
    assert np.isnan(fleet.read("node.reboot_count", NODE))
    assert fleet.plant.truth.link_down[NODE] == (name == "network")
    assert np.isfinite(fleet.read("gpu.power_w", 0))


def test_only_the_job_on_the_node_that_fails_ends() -> None:
    mix = {"training_pu": 0.9, "inference_pu": 0.0, "batch_pu": 0.0, "job_hours": (900.0, 1000.0)}
    fleet = Fleet(one("nvlink", shows=False, code=74), **mix).until(BEGIN_S + STEP_S)
    ended = fleet.told(JobEnded)
    assert [e.reason for e in ended] == ["node_fail"]
    jobs = {e.job: e.nodes for e in fleet.told(JobStarted)}
    assert SITE.name("node", NODE) in jobs[ended[0].job]
    assert len(jobs) > 1
    at_s = next(t for t, e in fleet.events if isinstance(e, JobEnded))
    assert at_s == pytest.approx(BEGIN_S + STEP_S)  # at the failure, long before the node is switched off


def test_a_planned_restart_is_announced_and_ends_no_job() -> None:
    writer = TimelineWriter(SITE, 1, 1.0)
    writer.reboot(NODE, 600.0, np.random.default_rng(1), planned=True)
    writer.reboot(NODE + 1, 600.0, np.random.default_rng(1))
    (_, begin_s, end_s), _ = writer.reboots
    mix = {"training_pu": 0.9, "inference_pu": 0.0, "batch_pu": 0.0, "job_hours": (900.0, 1000.0)}
    fleet = Fleet(life_of(writer), **mix).until(begin_s + 120.0)
    work = fleet.told(MaintenanceBegun)
    assert [w.names for w in work] == [(SITE.name("node", NODE),)]
    assert (work[0].until_ns - fleet.plant.start_ns) / NS > end_s
    assert np.isnan(fleet.read("gpu.power_w", GPU))
    fleet.until(end_s + 120.0)
    assert fleet.read("node.reboot_count", NODE) == 1.0
    assert len(fleet.told(JobEnded)) == 1  # that of the restart which nobody planned


def test_where_nothing_befalls_all_else_is_reported_as_without_a_life() -> None:
    """Bit by bit; beside it only what agents tell of the health of parts."""
    nothing = life_of(TimelineWriter(SITE, 1, 1.0))
    fleets = [Fleet(None, training_pu=0.9, inference_pu=0.0, batch_pu=0.1), Fleet(
        nothing, training_pu=0.9, inference_pu=0.0, batch_pu=0.1)]  # fmt: skip
    for k in range(1, 31):
        plain, alive = (f.until(k * STEP_S).seen for f in fleets)
        assert plain is not None
        assert alive is not None
        health = [r for r in alive.reports if "thermal_margin_k" in r.signals or "reboot_count" in r.counters]
        assert len(health) == 2
        rest = [r for r in alive.reports if not any(r is h for h in health)]
        assert len(rest) == len(plain.reports)
        for a, b in zip(plain.reports, rest, strict=True):
            assert (a.table, a.signals, a.arrival_ns) == (b.table, b.signals, b.arrival_ns)
            assert np.array_equal(a.values, b.values, equal_nan=True)
            assert np.array_equal(a.counts, b.counts)
        assert list(plain.events) == list(alive.events)


def test_a_life_of_another_site_is_refused() -> None:
    with pytest.raises(ValueError, match="the failure timeline is of"):
        Plant(SITE, 1).play(TimelinePlayer(site_of(two_racks(racks="r[1-3]")), one("host")))


@pytest.mark.evaluation
def test_a_twin_hears_it_all() -> None:
    """Through the Inbox into the state: growth, the report, the new device whose counters begin anew."""
    timeline = one("memory", code=95, replaced=True, seed=seed_that("memory", "gpu_row_remaps", code=95))
    scenario = Scenario("life", dt_s=STEP_S, workload=Mix(constant_pu=0.6))
    with Simulation.of(Engine(SITE, [], []), scenario=scenario, dt_s=STEP_S) as run:
        run.plant.play(TimelinePlayer(SITE, timeline))
        stand_still(run.plant)
        heard: list[FaultReported] = []
        run.run(END_S + 3 * STEP_S, lambda r: heard.extend(
            e for e in r.frame.events if isinstance(e, FaultReported)))  # fmt: skip
        gpu = run.engine.state.tables["gpu"]
        remaps = find_signal("gpu.row_remap_count")
        assert remaps is not None
        assert 95 in [e.code for e in heard]
        assert gpu.generation[GPU] == 1
        assert gpu.total[remaps.row, GPU] == 0
        assert gpu.raw[remaps.row, GPU] == 0
        assert run.inbox.counts["counter_resets"] == 0
        assert run.time_s == pytest.approx(END_S + 3 * STEP_S)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_leaves_all_well_again(name: str) -> None:
    fleet = Fleet(one(name, code=95 if name == "memory" else 0))
    fleet.until(END_S + 4 * STEP_S)
    d, t = fleet.plant.present, fleet.plant.truth
    assert t.node_on.all()
    assert t.gpu_alive.all()
    for none in (d.gpu_silent, d.node_silent, d.node_unfit, t.node_unfit, d.gpu_recovery_action):
        assert not none.any()
    assert d.node_psu_ok.all()
    assert (d.gpu_plate_factor == 1.0).all()
    assert not d.link_down.any()
