"""A simulated fleet's months with the twin beside it, and what is kept of them for scoring.

The engine hears what sensors report and nothing else, so that it cannot look ahead; what truly happens is
noted apart. Equal tasks give equal courses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.evaluation.bench.plant import Size
from tests.evaluation.health.course import DAY_S, HORIZONS_S, HOUR_S, Course, Failed, Spell
from tests.evaluation.health.failure_classes import KINDS
from tests.evaluation.health.failure_timeline import draw_timeline, ordinary_life
from tests.evaluation.health.incidents import FORECAST, IncidentLog
from twin.catalogue import NS, TwinError
from twin.config import spec_of
from twin.contracts import ACTION_WORDS, ACTIONS, DEGRADED, FAILED, Finding, action, is_failure
from twin.engine import Engine
from twin.health import RECURS, alarms
from twin.plant import FailureTimeline, Mix, Scenario, TimelinePlayer
from twin.run import Pool, Report
from twin.simulation import Simulation
from twin.site import Site, build_site

NODES_PER_RACK, RACKS_PER_CDU, LINKS_PER_NODE = 18, 4, 4
DT_S = 60.0
PLANT_STEP_S = 4.0  # of the physics within a tick: cooling stays calm, and a month takes half the time
CHANCE, COUNT = "node.failure_pu", "site.node_failure_count"
DRAINS = action("reset_gpu")  # this and what comes after it takes a node out of service
LEMON_DAYS = 28.0
MOST_SPELLS, MOST_NOTICED = 200_000, 200_000
_ACTION_OF = {words: ACTIONS.index(name) for name, words in ACTION_WORDS.items()}


@dataclass(frozen=True, slots=True)
class FleetRun:
    """One fleet to live through. `strength` scales what shows before failures."""

    nodes: int
    gpus_per_node: int
    days: float
    train_days: float
    seed: int
    strength: float = 1.0
    dt_s: float = DT_S
    healthy: bool = False  # nothing fails

    @property
    def racks(self) -> int:
        """Whole racks for so many nodes."""
        return max(1, -(-self.nodes // NODES_PER_RACK))

    @property
    def work(self) -> float:
        """About how long it takes, in any unit. source: estimate"""
        return self.days * (500.0 + self.nodes)

    @property
    def words(self) -> str:
        """Name of the run in tables."""
        return f"seed {self.seed}, " + ("healthy" if self.healthy else f"strength {self.strength:g}")


def fleet_site(task: FleetRun) -> Site:
    """The site of a task: liquid-cooled racks of 18 nodes on CDUs, feeds A and B, links to one network."""
    per_rack = min(NODES_PER_RACK, max(1, task.nodes))
    tree = Size(task.racks, per_rack, task.gpus_per_node, RACKS_PER_CDU).tree()
    tree["halls"][0]["planes"] = [{"name": "compute", "links_per_node": LINKS_PER_NODE}]
    return build_site(spec_of(tree, None, "fleet"), "fleet")


def run_course(task: FleetRun, tell: Callable[[float], None] | None = None) -> Course:
    """Live through a task; `tell` hears the share that is done. Raises TwinError where that cannot be."""
    site = fleet_site(task)
    timeline = (
        ordinary_life(site, task.seed, task.days)
        if task.healthy
        else draw_timeline(site, task.seed, task.days, task.strength)
    )
    scenario = Scenario("fleet", task.seed, task.days * DAY_S, task.dt_s, workload=Mix(swing_pu=0.0))
    engine = Engine(site, [], failure_models())
    simulation = Simulation.of(engine, seed=task.seed, scenario=scenario, dt_s=task.dt_s)
    simulation.plant.play(TimelinePlayer(site, timeline))
    simulation.plant.step_max_s = PLANT_STEP_S
    watch = Watch(simulation, task, course_of(task, site, timeline, simulation.plant.truth.time_s))
    with simulation:
        simulation.run(task.days * DAY_S, watch.look if tell is None else _both(watch.look, tell, task))
    return watch.end()


def run_tasks(tasks: Sequence[FleetRun], jobs: int, report: Report) -> list[Course]:
    """All courses, the same whatever `jobs` is. Raises TwinError for a task that failed."""
    return Pool(_run_task, jobs, report).results(tasks, [task.work for task in tasks])


def _run_task(task: FleetRun, report: Report) -> Course:
    try:
        return run_course(task, lambda share: report(share, task.words))
    except TwinError:
        raise
    except Exception as error:
        raise TwinError(f"{task.words}: {type(error).__name__}: {error}") from error


def failure_models() -> list[Any]:
    """The one model whose forecasts are scored."""
    import models

    made = models.REGISTRY.get("failure")
    if made is None:
        raise TwinError("no model of failures is installed")
    return [made()]


def course_of(task: FleetRun, site: Site, timeline: FailureTimeline, begin_s: float) -> Course:
    """A course of which only the truth is known yet."""
    f = timeline.failures
    rows = zip(f.node.tolist(), f.kind.tolist(), f.begin_s.tolist(), f.end_s.tolist(),
               f.precursor_s.tolist(), f.shared.tolist(), strict=True)  # fmt: skip
    failures = [Failed(node, KINDS[kind], *rest) for node, kind, *rest in rows]
    end_s = begin_s + task.days * DAY_S
    return Course(
        task.seed,
        task.strength,
        site.sizes["node"],
        site.sizes["gpu"],
        begin_s,
        begin_s + task.train_days * DAY_S,
        end_s,
        failures,
        np.flatnonzero(timeline.lemons).tolist(),
        flagged_s=np.full(site.sizes["node"], np.inf),
    )


def _both(
    look: Callable[[Simulation], None], tell: Callable[[float], None], task: FleetRun
) -> Callable[[Simulation], None]:
    def observer(simulation: Simulation) -> None:
        look(simulation)
        tell(simulation.time_s / (task.days * DAY_S))

    return observer


class Watch:
    """Looks on after each round and keeps what is scored. Bounded by the alarms and the hours of a course."""

    def __init__(self, simulation: Simulation, task: FleetRun, course: Course) -> None:
        self.task, self.course = task, course
        self.node_of = {simulation.site.name("node", i): i for i in range(course.n)}
        self._open: dict[int, list[Any]] = {}  # node -> [begin_s, last_s, reason, whether it was down]
        self._active: tuple[str, ...] = ()
        self._incidents = IncidentLog()
        self._noticed: dict[tuple[int, int], None] = {}
        self._origin_s: list[float] = []
        self._said: dict[float, list[np.ndarray]] = {h: [] for h in HORIZONS_S}
        self._counted: dict[float, list[tuple[float, float, float]]] = {h: [] for h in HORIZONS_S}
        self._start_ns, self._next_s = simulation.plant.start_ns, -np.inf
        self._begun = time.perf_counter()
        self._cost_s = _timed(simulation)
        self._day_28 = False

    def look(self, simulation: Simulation) -> None:
        """After a round."""
        engine, now_s = simulation.engine, simulation.plant.truth.time_s
        begun = time.perf_counter()
        found = alarms.findings(
            engine.health, engine.forecasts, engine.site, engine.windows, (), self._active
        )
        self._active = tuple(f.id for f in found)
        self.take(engine, found, now_s)
        self._incidents.look(engine, found, now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + HOUR_S - self.task.dt_s / 2
            self._hourly(engine, now_s)
        self._cost_s["scoring"] = self._cost_s.get("scoring", 0.0) + time.perf_counter() - begun
        self.course.ticks += 1

    def take(self, engine: Engine, found: list[Finding], now_s: float) -> None:
        """Begin, extend or pause alarms by the findings of an instant."""
        wanted, down = drains(found, self.node_of), engine.health.failures.down()
        # A finding on a node that is down is not the reason once it is back
        for node in [n for n, held in self._open.items() if n not in wanted or held[3] != down[n]]:
            self._close(node)
        for node in wanted:
            held = self._open.get(node)
            if held is None:
                self._open[node] = [now_s, now_s, reason_of(engine, node), bool(down[node])]
            else:
                held[1] = now_s

    def _close(self, node: int) -> None:
        begin_s, last_s, reason, _ = self._open.pop(node)
        if len(self.course.spells) < MOST_SPELLS:
            self.course.spells.append(Spell(node, begin_s, last_s, reason))

    def _hourly(self, engine: Engine, now_s: float) -> None:
        course = self.course
        log = engine.health.log()
        for node, start_ns, fails in zip(
            log.node.tolist(), log.start_ns.tolist(), is_failure(log).tolist(), strict=True
        ):
            if not fails:  # a mere restart is told from a failure once it is over
                self._noticed.pop((node, start_ns), None)
            elif len(self._noticed) < MOST_NOTICED:
                self._noticed[node, start_ns] = None
        course.suspended = sorted({*course.suspended, *engine.suspended})
        lemons = engine.health.lemons.is_lemon()
        course.flagged_s[lemons] = np.minimum(course.flagged_s[lemons], now_s)
        if not self._day_28 and now_s >= course.begin_s + LEMON_DAYS * DAY_S - HOUR_S:
            self._day_28, course.flagged_28d = True, np.flatnonzero(lemons).tolist()
        if now_s < course.train_s:
            return
        self._origin_s.append(now_s)
        for h in HORIZONS_S:
            one, all_ = engine.forecasts.get((CHANCE, h)), engine.forecasts.get((COUNT, h))
            self._said[h].append(np.full(course.n, np.nan, np.float32) if one is None else one.mean.copy())
            self._counted[h].append((np.nan,) * 3 if all_ is None else
                                    (float(all_.mean[0]), float(all_.lo[0]), float(all_.hi[0])))  # fmt: skip
            if one is not None:
                course.models[f"{h:g}"] = f"{one.model} {one.basis}".strip()[:200]

    def end(self) -> Course:
        """The course, complete."""
        for node in list(self._open):
            self._close(node)
        course = self.course
        course.noticed = sorted((node, (at_ns - self._start_ns) / NS) for node, at_ns in self._noticed)
        course.incidents = self._incidents.incidents
        course.origin_s = np.array(self._origin_s)
        course.said = {h: np.array(rows).reshape(-1, course.n) for h, rows in self._said.items()}
        course.counted = {h: np.array(rows).reshape(-1, 3) for h, rows in self._counted.items()}
        took_s, ticks = time.perf_counter() - self._begun, max(course.ticks, 1)
        course.cost_ms = {k: 1e3 * s / ticks for k, s in [*self._cost_s.items(), ("whole", took_s)]}
        return course


def drains(found: list[Finding], node_of: Mapping[str, int]) -> dict[int, Finding]:
    """Nodes that these findings would have drained: warnings or worse that suggest no less."""
    out = {}
    for f in found:
        kind, _, name = f.id.partition("/")
        node = node_of.get(name) if kind == "health" and f.severity in ("warning", "critical") else None
        if node is not None and drain_like(f.action):
            out[node] = f
    return out


def drain_like(sentence: str) -> bool:
    """Return True if a suggested action takes the node out of service."""
    words = sentence[:1].lower() + sentence[1:].rstrip(".")
    return _ACTION_OF.get(words, 0) >= DRAINS


def reason_of(engine: Engine, node: int) -> str:
    """The rule that speaks loudest for draining a node, of its own or of a GPU of its; or the forecast."""
    health, site = engine.health, engine.site
    parts = [("node", node)]
    parts += [("gpu", g) for g in range(*site.gpu_start_of_node[node : node + 2].tolist())]
    best, rule = (0, 0), FORECAST
    for part, index in parts:
        held = health.health(part)
        rank = int(held.level[index]), int(held.action[index])
        if rank[0] >= DEGRADED and rank[1] >= DRAINS and rank > best:
            told = [e.rule for e in health.verdicts.evidence(part, index)]
            best, rule = rank, told[0] if told else f"{part}, no evidence"
            if RECURS in told and rank[0] < FAILED:  # what else is degraded asks for nothing at once
                rule = RECURS
    return rule


def _timed(simulation: Simulation) -> dict[str, float]:
    """Seconds spent in the parts of a round, from now on."""
    spent: dict[str, float] = {}
    joints: list[tuple[str, Any, str]] = [
        ("plant", simulation.plant, "step"), ("sensors", simulation.sensors, "observe"),
        ("engine", simulation.engine, "tick"), ("health", simulation.engine.health, "update"),
        *[(name, model, call) for name, model in simulation.engine.models.items()
          for call in ("update", "predict")],
    ]  # fmt: skip
    for part, owner, name in joints:
        setattr(owner, name, _clocked(spent, part, getattr(owner, name)))
    return spent


def _clocked(spent: dict[str, float], part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*given, **named)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - begun

    return run
