"""A tray leaks in a simulated site: what is told, what is done about it, and what the neighbour feels.

The whole loop in one process: leak in the plant, detectors, diagnosis, leak_guard, arbiter, plant, echo.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from policies.leak_guard import GRACE_S, LeakGuard
from policies.operator import Operator
from tests.support.builders import Twin, site_of, two_racks
from twin.catalogue import TABLES
from twin.contracts import CommandBatch, Decision
from twin.engine import Engine
from twin.plant import Plant, Sensors, scenario_of
from twin.plant.actuators import Actuators
from twin.plant.workload import Workload
from twin.simulation import Simulation
from twin.telemetry import Frame

pytestmark = pytest.mark.slow
SAVE, CAP, SERVICE = "job.checkpoint_since_s", "gpu.power_cap_w", "node.service_level"
LIQUID, ELECTRICAL = "rack.liquid_isolation", "rack.electrical_isolation"
LOW_W, BEGIN_S = 300.0, 10.0
LATE_S = 5.0  # a BMS's values are up to 3 s old and come each 2 s
GPUS, NODES = slice(0, 72), slice(0, 18)  # of the first rack


class Story:
    """A site under a leak, and all that was decided: (second, batch) of new commands and of advice."""

    def __init__(
        self,
        authority: str,
        *leaking: str,
        actuators: type[Actuators] = Actuators,
    ) -> None:
        controls: dict[str, dict[str, float]] = {CAP: {"min": LOW_W}, SERVICE: {"blast_radius": 36}}
        controls |= {LIQUID: {"blast_radius": 2}, ELECTRICAL: {"blast_radius": 2}}
        layout = two_racks(controls=controls, loops=[{"name": "fw1"}])
        layout["halls"][0]["racks"][0]["nodes_from"] = "bottom"
        site = site_of(layout)
        faults = [{"kind": "leak", "entity": e, "begin_s": BEGIN_S, "severity": 0.5} for e in leaking]
        tree = {"name": "leak", "hours": 1, "seed": 3, "faults": faults}
        authorities = {"leak_guard": authority, "operator": "act"}
        plant = Plant(site, 3, scenario_of(tree, site))
        engine = Engine(site, [LeakGuard(), Operator()], [], authorities)
        sensors = Sensors(site, 3, drop_out_pu=0.0)
        self.sim = Simulation(engine, plant, sensors)
        self.sim.observers = (self,)
        self.plant, self.truth = self.sim.plant, self.sim.plant.truth
        self.plant.actuators = actuators(site)
        self.commands: list[tuple[float, CommandBatch]] = []
        self.advice: list[tuple[float, CommandBatch]] = []
        self.findings: dict[str, float] = {}
        self.asked: tuple[float, list[str]] | None = None  # the jobs that were told to save, and when
        self.saved_s: dict[str, float | None] = {}  # age of their last whole save as the grace ends
        self.first_s: dict[str, float] = {}  # when a thing first was so in the plant
        # Flow, return, hottest GPU and lowest clock of the second rack, each second
        self.neighbour: list[tuple[float, float, float, float]] = []

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        now_s = (frame.now_ns - self.sim.begun_ns) / 1e9
        self.commands += [(now_s, c) for c in decision.commands if not c.renewal]
        self.advice += [(now_s, c) for c in decision.advice]
        saves = [c.index.tolist() for c in decision.commands if c.control == SAVE]
        if saves and self.asked is None:
            self.asked = now_s, [name for name, slot in engine.jobs.slot_of.items() if slot in saves[0]]
        for finding in decision.findings:
            self.findings.setdefault(finding.id, now_s)

    def run(self, seconds: float, until: Callable[[Story], bool] | None = None) -> Story:
        for _ in range(round(seconds)):
            self.sim.step()
            t, now_s = self.truth, self.sim.time_s
            second = t.node_leak.sum() + t.rack_leak.sum() >= 2
            truths = {"tray": t.node_leak, "second": second, "isolated": t.rack_isolated}
            for name, so in truths.items():
                if so.any():
                    self.first_s.setdefault(name, now_s)
            hot, clock = t.gpu_temp_c[72:].max(), t.gpu_clock_pu[72:].min()
            self.neighbour.append((t.rack_flow_lpm[1], t.rack_return_c[1], hot, clock))
            workload = self.plant.workload
            assert isinstance(workload, Workload)
            if self.asked is not None and self.asked[0] + GRACE_S - 2.0 < now_s < self.asked[0] + GRACE_S:
                self.saved_s = {j: workload.checkpoint_age_s(j, t.time_s) for j in self.asked[1]}
            if until is not None and until(self):
                return self
        assert until is None, f"did not happen within {seconds:g} s"
        return self

    def first(self, control: str) -> tuple[float, CommandBatch]:
        """The first command on a control."""
        return next((s, c) for s, c in self.commands if c.control == control)

    def said(self, key: str) -> np.ndarray:
        """Return the values of a signal that the twin heard last."""
        table, _, name = key.partition(".")
        row = TABLES[table].by_name[name].row
        return np.asarray(self.sim.engine.state.tables[table].value[row])

    def lease(self, control: str) -> np.ndarray:
        return self.sim.engine.arbiter.leases[control].value


@pytest.fixture(scope="module")
def acted() -> Story:
    return Story("act", "r1/node5").run(190.0)


@pytest.mark.long
def test_nothing_is_done_before_a_second_detector_is_wet(acted: Story) -> None:
    assert acted.first_s["tray"] < acted.first_s["second"] - 10.0
    assert min(s for s, _ in acted.commands) >= acted.first_s["second"] - 1.0


@pytest.mark.parametrize("first", ["tray", "sum"])
def test_a_tray_and_the_sum_of_the_trays_are_one_detector(first: str) -> None:
    """Whichever speaks first, and when the tray's own reading is missing for a second."""
    twin = Twin(two_racks(), [LeakGuard()], authority={"leak_guard": "act"})
    tray, missing = np.zeros(36), np.zeros(36)
    tray[5], missing[5] = 1.0, np.nan
    dry, wet = (
        {"node.leak_state": np.zeros(36)},
        {"node.leak_state": tray, "rack.tray_leak_state": [1.0, 0.0]},
    )
    twin.tick(dry | {"rack.tray_leak_state": 0.0})
    twin.tick({"node.leak_state": tray} if first == "tray" else dry | {"rack.tray_leak_state": [1.0, 0.0]})
    twin.tick(wet)
    twin.tick(wet | {"node.leak_state": missing})
    assert not twin.engine.memory["leak_guard"]["since_ns"].any()
    twin.tick(wet | {"rack.leak_state": [1.0, 0.0]})
    assert twin.engine.memory["leak_guard"]["since_ns"].astype(bool).tolist() == [True, False]


def test_the_leak_is_named_where_it_is_and_nobody_else_is_blamed(acted: Story) -> None:
    told = {k: s for k, s in acted.findings.items() if k.startswith("fault/")}
    assert next(iter(told)) == "fault/leak/lab/h/r1/node5"
    assert told["fault/leak/lab/h/r1/node5"] <= acted.first_s["tray"] + 2.0
    before = [k for k, s in told.items() if s < acted.first_s["isolated"]]
    assert before == ["fault/leak/lab/h/r1/node5"]
    assert not [k for k in told if "lab/h/r1" not in k], "neither the neighbour nor the CDU"


def test_work_is_saved_power_lowered_and_nodes_drained_at_once(acted: Story) -> None:
    wet_s = acted.first_s["second"]
    for control in (SAVE, CAP, SERVICE):
        assert wet_s - 1.0 <= acted.first(control)[0] <= wet_s + LATE_S, control
    assert (acted.truth.gpu_cap_w[GPUS] == LOW_W).all()
    assert (acted.truth.node_service_level[NODES] == 3).all()


def test_the_jobs_of_the_rack_save_before_it_is_isolated(acted: Story) -> None:
    assert acted.saved_s, "jobs were asked"
    ages = [age for age in acted.saved_s.values() if age is not None]
    assert ages, "and some of them save at all"
    assert all(0.0 <= age <= GRACE_S for age in ages), "their whole save began when they were asked"


def test_it_is_isolated_after_the_grace_and_says_so(acted: Story) -> None:
    first_s = acted.first(SAVE)[0]
    for control in (LIQUID, ELECTRICAL):
        at_s, batch = acted.first(control)
        assert GRACE_S <= at_s - first_s <= GRACE_S + 2.0
        assert batch.index.tolist() == [0]
    assert acted.truth.rack_isolated.tolist() == [True, False]
    assert acted.truth.rack_unpowered.tolist() == [True, False]
    assert acted.truth.rack_flow_lpm[0] < 0.1
    assert acted.said("rack.liquid_isolation_state").tolist() == [1.0, 0.0]
    assert acted.said("rack.electrical_isolation_state").tolist() == [1.0, 0.0]
    assert not [k for k in acted.findings if k.startswith("unread/rack.")]


def test_wet_trays_and_those_below_are_off_and_no_other_rack_is(acted: Story) -> None:
    """Its power is cut with its coolant; the orders on its nodes keep them off when it is closed again."""
    wet = np.flatnonzero(acted.truth.node_leak)
    assert wet.max() == 5
    assert len(wet) >= 2, "it drips into the tray below"
    ordered = acted.lease("node.power_state")
    assert (ordered[: wet.max() + 1] == 2.0).all()
    assert (ordered[NODES] >= 1.0).all()
    assert np.isnan(ordered[18:]).all()


def test_an_isolated_rack_leaks_no_more(acted: Story) -> None:
    before_l = acted.truth.cdu_leaked_l.copy()
    assert 0.05 < before_l[0] < 2.0
    twin = acted.sim.fork()
    twin.run(10.0)
    assert twin.plant.truth.cdu_leaked_l == pytest.approx(before_l, abs=1e-9)
    assert max(twin.plant.balances().values()) < 1e-6


def test_the_neighbour_stays_within_its_limits(acted: Story) -> None:
    flow, back, hot, clock = np.array(acted.neighbour).T
    assert flow.min() > 0.9 * flow[0]
    shut = int(np.argmax(flow > 1.1 * flow[0]))
    assert flow[shut + 20 :].max() < 1.05 * flow[0], "pumps follow the valve that shut within seconds"
    assert back.max() < 50.0
    assert hot.max() < acted.sim.site.limits["gpu.temp_c"].guard[72:].min()
    assert clock.min() == 1.0
    assert (acted.truth.gpu_cap_w[72:] > 1000.0).all()
    assert (acted.truth.node_service_level[18:] == 0).all()
    assert acted.truth.gpu_alive[72:].all()
