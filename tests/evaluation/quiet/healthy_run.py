"""A healthy plant with the twin beside it: every alarm is false, and is kept with what the plant did then.

Equal runs give equal alarms.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from policies import REGISTRY
from tests.evaluation.incidents import OpenIncidents
from tests.evaluation.quiet.calibration import CalibrationCell, ResidualCounts
from tests.evaluation.quiet.circumstances import (
    events_of,
    load_target,
    moving_air,
    replace_gpus,
    sensors_of,
    site_change,
    weather_of,
)
from tests.evaluation.quiet.healthy_sites import LOADS, POLICIES_ACT, HealthyRun, healthy_site
from twin.catalogue import F64, NS
from twin.contracts import Finding
from twin.diagnosis import Topology
from twin.engine import Engine
from twin.plant import Plant, Scenario, TimelinePlayer
from twin.run import Report
from twin.simulation import Simulation

CAPPING = ("power_guard", "power_cap")
HOLD_S = (60.0, 1200.0)  # of a level of the load that steps
ALL_AT_ONCE_PU = 0.5  # of its steps: the whole site; else each rack to a level of its own
# Activities of kinds of work: SMs, tensor cores, memory; source: estimate, as the plant's jobs
WORK = ((0.0, 0.0, 0.0), (0.95, 0.6, 0.45), (0.85, 0.25, 0.7), (0.6, 0.1, 0.3), (0.95, 0.9, 0.2))
SPREAD_PU = 0.03  # between GPUs of one level
GAP_S = 60  # for which a twin that is started again was away
YOUNG_S, BACK_S, MOVED_S = 900.0, 300.0, 300.0  # after a start from nothing, a restart, a step of the load
MOVED_PU = 0.1  # of the highest power that a rack drew
SAMPLE_S = 10
# Alarms that say what the plant truly does, such as a GPU beyond its limit: none of them is false
STATES = ("beyond", "unguarded")


@dataclass(frozen=True)
class FalseAlarm:
    """One alarm of a healthy site: who spoke, of what, resting on which comparisons, and when."""

    profile: str
    cooling: str
    racks: int
    load: str
    sensors: str
    season: str
    seed: int
    time_s: float
    detector: str  # kind, and the signal of a sensor
    entity: str
    severity: str
    relations: str
    circumstance: str
    evidence: str
    again: bool = False  # it was over, and goes on with the same incident: it does not ring


class Restart(NamedTuple):
    """The twin ends at `at_s`; `cold`: what begins then knows nothing."""

    at_s: int
    cold: bool


class Lived(NamedTuple):
    """Outcome of a run: its false alarms, and the counts of its residuals if they were asked for."""

    alarms: list[FalseAlarm]
    calibration: list[CalibrationCell]


def run_healthy(run: HealthyRun, report: Report, calibrated: bool = False) -> Lived:
    """Live through a run. Findings of severity info, and what is true of the plant, are no false alarms."""
    site = healthy_site(run)
    mix = LOADS[run.load]
    scenario = None if mix is None else Scenario("quiet", run.seed, float(run.seconds), 1.0, workload=mix)
    plant = Plant(site, seed=run.seed, scenario=scenario, weather=weather_of(run))
    simulation = Simulation(_engine(run, site), plant, sensors_of(run, site))
    log, restarts = AlarmLog(run, simulation), restarts_of(run)
    counts = ResidualCounts(run) if calibrated else None
    drive = _driven(run, simulation, counts)
    for second in range(run.seconds):
        if drive is not None:
            drive(second)
        if restarts and restarts[0].at_s == second:
            restart = restarts.pop(0)
            simulation = _started_again(run, simulation, restart.cold)
            log.begin(simulation, restart.cold)
            if counts is not None:
                counts.begin("start" if restart.cold else "restart", GAP_S)
        simulation.step()
        log.look(simulation)
        if counts is not None:
            counts.look(simulation.engine)
        if second % SAMPLE_S == 0:
            report((second + 1) / run.seconds, run.load)
    return Lived(log.alarms, [] if counts is None else counts.cells())


def _driven(
    run: HealthyRun, simulation: Simulation, counts: ResidualCounts | None
) -> Callable[[int], None] | None:
    """The part of a load that jobs do not make, called before each second."""
    plant = simulation.plant
    if run.load == "steps":
        return level_steps(plant, run.seed)
    if run.load == "doors":
        return moving_air(plant, run.seed)
    if (timeline := events_of(run, plant.site)) is not None:
        plant.play(TimelinePlayer(plant.site, timeline))
        if run.load == "replaced":
            return _replacing(simulation, timeline.reboots, counts)
    if run.load == "response":
        return _at(run.seconds // 3, lambda: simulation.inject(load_target(run, simulation)))
    if run.load == "changed":

        def change() -> None:
            simulation.inbox.put_event(site_change(run))  # of the same devices: the plant stays as it is
            if counts is not None:
                counts.begin("site change")

        return _at(run.seconds // 3, change)
    return None


def _at(at_s: int, act: Callable[[], None]) -> Callable[[int], None]:
    def drive(second: int) -> None:
        if second == at_s:
            act()

    return drive


def _replacing(
    simulation: Simulation, reboots: Sequence[tuple[int, float, float]], counts: ResidualCounts | None
) -> Callable[[int], None]:
    """While a node is away for a reboot its GPUs are replaced; that is known before it speaks again."""
    plant, away = simulation.plant, sorted(reboots, key=lambda reboot: reboot[2])

    def drive(second: int) -> None:
        while away and second >= int(away[0][2]) - 2:
            node = away.pop(0)[0]
            simulation.inject(*replace_gpus(plant, node))
            if counts is not None:
                counts.replace("replaced", "gpu", plant.site.node_of_gpu == node)

    return drive


def restarts_of(run: HealthyRun) -> list[Restart]:
    """With its state after a third of a run, from nothing after two; none for other loads."""
    third = run.seconds // 3
    return [Restart(third, False), Restart(2 * third, True)] if run.load == "restarts" else []


def _engine(run: HealthyRun, site: Any) -> Engine:
    names = CAPPING if run.load in POLICIES_ACT else ()
    return Engine(site, [REGISTRY[name]() for name in names], [], dict.fromkeys(names, "act"))


def _started_again(run: HealthyRun, old: Simulation, cold: bool) -> Simulation:
    """The twin is away while the plant goes on."""
    engine = _engine(run, old.site)
    if not cold:
        engine.restore(copy.deepcopy(old.engine.dump()))
    for _ in range(GAP_S):
        old.plant.step((), 1.0)
        old.now_ns += NS
        old.sensors.observe(old.plant.truth, old.plant.present, old.now_ns, tuple(old.plant.events()))
    out = Simulation(engine, old.plant, old.sensors, start_ns=old.now_ns)
    out.now_ns = old.now_ns
    out.plant.start_ns = old.now_ns - round(old.plant.truth.time_s * NS)
    return out


def level_steps(plant: Plant, seed: int) -> Callable[[int], None]:
    """A load without jobs: racks change their work and its level, all at once or each by itself, and stay
    there for minutes."""
    site, t = plant.site, plant.truth
    rng = np.random.default_rng((seed, 0x57))
    columns = (t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu)
    spread = 1.0 + SPREAD_PU * rng.standard_normal(site.sizes["gpu"])
    next_s = 0.0

    def drive(second: int) -> None:
        nonlocal next_s
        if second < next_s:
            return
        next_s = second + float(np.exp(rng.uniform(*np.log(HOLD_S))))
        racks = site.sizes["rack"]
        drawn = 1 if rng.uniform() < ALL_AT_ONCE_PU else racks
        work, level = np.array(WORK)[rng.integers(len(WORK), size=drawn)], rng.uniform(0.3, 1.0, (drawn, 1))
        of_rack = np.broadcast_to(work * level, (racks, 3))
        for column, pu in zip(columns, of_rack[site.rack_of_gpu].T, strict=True):
            np.clip(pu * spread, 0.0, 1.0, out=column)

    return drive


def _is_true(finding: Finding, simulation: Simulation) -> bool:
    """True of a state of the plant, and of the health of a node whose GPUs have truly slowed down."""
    detector, _, name = finding.id.partition("/")
    site, node = simulation.site, None if detector != "health" else simulation.site.entity("node", name)
    if node is None:
        return detector in STATES
    return bool(simulation.plant.truth.throttle_s[site.node_of_gpu == node].any())


class AlarmLog:
    """Looks on after each round, and keeps each alarm once it begins."""

    def __init__(self, run: HealthyRun, simulation: Simulation) -> None:
        self.run, self.alarms = run, list[FalseAlarm]()
        self.topology = Topology(simulation.site)
        self._second = 0
        self._born_s, self._back_s = 0, -np.inf
        self._most_w = np.full(simulation.site.sizes["rack"], 1.0)
        self._power_w: deque[F64] = deque(maxlen=int(MOVED_S) // SAMPLE_S)
        self._open = OpenIncidents()

    def begin(self, simulation: Simulation, cold: bool) -> None:
        """The twin was started again. What it reported before is not reported anew."""
        if cold:
            self._born_s = self._second
            self._open.begin()
        else:
            self._back_s = self._second
        self._second += GAP_S

    def look(self, simulation: Simulation) -> None:
        """After a round."""
        power_w = simulation.plant.truth.rack_power_w
        if self._second % SAMPLE_S == 0:
            self._power_w.append(power_w.copy())
            np.maximum(self._most_w, power_w, out=self._most_w)
        self._second += 1
        active = {
            f.id: f
            for f in simulation.engine.findings.active.values()
            if f.severity != "info" and not _is_true(f, simulation)
        }
        for finding, again in self._open.look(active, simulation.now_ns):
            self._keep(simulation, finding, again)

    def _keep(self, simulation: Simulation, finding: Finding, again: bool) -> None:
        run, engine = self.run, simulation.engine
        detector, relations = finding.id.partition("/")[0], ""
        racks = np.arange(simulation.site.sizes["rack"])
        for (kind, table, entity, signal), cause in engine.diagnosis.book.reported.items():
            name = simulation.site.name(table, entity)
            if finding.id == f"fault/{kind}/{name}" + (f"/{signal}" if signal else ""):
                detector = f"{kind} {table}.{signal}" if signal else f"{kind} {table}"
                relations = ", ".join(sorted(cause.covers))
                if self.topology.knows(table, "rack"):
                    racks = self.topology.above(table, "rack")[[entity]]
        self.alarms.append(
            FalseAlarm(
                run.profile.name, run.profile.cooling, run.racks, run.load, run.sensors, run.season, run.seed,
                float(self._second), detector, " ".join(finding.entities), finding.severity, relations,
                self._circumstance(racks), "; ".join(finding.evidence), again,
            )
        )  # fmt: skip

    def _circumstance(self, racks: np.ndarray) -> str:
        """The plant's or the twin's doing at the time, the nearest first."""
        if self._second - self._born_s < YOUNG_S:
            return "start"
        if self._second - self._back_s < BACK_S:
            return "restart"
        lately = np.array(self._power_w)[:, racks]
        moved = (lately.max(axis=0) - lately.min(axis=0)) / self._most_w[racks]
        return "load moved" if float(moved.max()) > MOVED_PU else "steady"
