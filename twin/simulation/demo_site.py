"""Demo site: the plant of a story with its scheduler, and its past.

The past is simulated in closed loop, faster than real time, and recorded as a run on which a daemon goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twin.catalogue import NS
from twin.config import History, make_engine
from twin.contracts import Decision
from twin.plant import Campaign, Disturbance, Observation, Plant, Report, Sensors, Truth
from twin.run import HistoryStore, Recorder, Sampler
from twin.simulation.closed_loop import Simulation
from twin.simulation.plant_wire import NOT_SENT
from twin.simulation.scheduler import Scheduler
from twin.simulation.story import Story
from twin.site import Site, SiteSpec
from twin.telemetry import Event, OutlookTold

SEED = 3
PAST_STEP_S = 15.0
PAUSE_S = 20.0  # about so long after its past the story begins; source: estimate
HISTORY_MB = 500


class WiredSensors(Sensors):
    """Sensors without the readings that the wire cannot carry, so that past and present match."""

    def observe(
        self, truth: Truth, disturbance: Disturbance, now_ns: int, events: Sequence[Event] = ()
    ) -> Observation:
        """See Sensors."""
        seen = super().observe(truth, disturbance, now_ns, events)
        return Observation([r for r in map(_wired, seen.reports) if r is not None], events, now_ns)


def _wired(report: Report) -> Report | None:
    signals = [k for k, name in enumerate(report.signals) if f"{report.table}.{name}" not in NOT_SENT]
    counters = [k for k, name in enumerate(report.counters) if f"{report.table}.{name}" not in NOT_SENT]
    if len(signals) + len(counters) == len(report.signals) + len(report.counters):
        return report
    if not signals and not counters:
        return None
    return Report(
        report.table, tuple(report.signals[k] for k in signals), report.values[signals],
        tuple(report.counters[k] for k in counters), report.counts[counters], report.t_ns,
        report.arrival_ns, report.present,
    )  # fmt: skip


class DemoSite:
    """The plant of a story and what belongs to it, by the plant's own clock."""

    def __init__(self, story: Story, spec: SiteSpec, site: Site, seed: int = SEED) -> None:
        self.story, self.spec, self.site, self.seed = story, spec, site, seed
        self.plant, self.sensors = Plant(site, seed), WiredSensors(site, seed)
        self.zero_s = story.past_s + PAUSE_S
        self.jobs = story.all_jobs(self.zero_s)
        self.scheduler = Scheduler(self.plant, story.past_jobs(self.zero_s), seed)
        self._planned_ns = 0
        self.plant.happened(self.scheduler.step(1.0))
        self.plant.settle()

    def begin(self) -> None:
        """Start the story now: its jobs and faults are due from here on."""
        self.zero_s = self.plant.truth.time_s
        self.jobs = self.story.all_jobs(self.zero_s)
        self.scheduler.reschedule(self.jobs)
        self.plant.campaign = Campaign(self.site, self.story.scripts(self.site, self.zero_s), self.seed)
        self._planned_ns = 0

    def plan(self) -> OutlookTold | None:
        """Yield the scheduler's plan of the site's power, once in each of its steps."""
        plan, now_ns = self.story.plan, self.plant.now_ns
        step_ns = round(plan.step_s * NS)
        from_ns = now_ns // step_ns * step_ns
        if from_ns <= self._planned_ns:
            return None
        self._planned_ns = from_ns
        values = self.story.planned_w(
            self.jobs, (from_ns - self.plant.start_ns) / NS, round(plan.ahead_s / plan.step_s)
        )
        return OutlookTold(id=f"plan-{now_ns}", author="scheduler", quantity="site.power_w",
                           start_ns=from_ns, step_s=plan.step_s, values=tuple(values))  # fmt: skip

    def test(self, host: str) -> tuple[int, str]:
        """Return (exit code, output) of the site's own test of a node: it fails during a fault there."""
        node = self.scheduler.node_of(host)
        gpus = range(*self.site.gpu_start_of_node[node : node + 2].tolist())
        acting = self.plant.campaign.acting if self.plant.campaign is not None else ()
        for script in acting:
            own = script.table == "node" and script.entity == node
            if own or (script.table == "gpu" and script.entity in gpus):
                return 1, f"{self.site.name(script.table, script.entity)}: {script.kind}: failed\n"
        return 0, "all GPUs passed\n"

    def answer(self, words: Sequence[str]) -> tuple[int, str]:
        """Return (exit code, output) of a program of the scheduler, or of the burn-in test."""
        return self.test(words[1]) if words[0] == "burn-in" else self.scheduler.answer(words)


class DemoPast(Simulation):
    """The past of a demo site in closed loop; recorded below `state` if given, with samples of history."""

    def __init__(self, demo: DemoSite, until_ns: int, state: Path | None = None) -> None:
        engine = make_engine(demo.site)
        recorder = store = None
        if state is not None:
            recorder = Recorder(engine, demo.spec, state / "run", simulated=True)
            path = state / "history"
            path.mkdir(parents=True, exist_ok=True)
            store = HistoryStore(path / "history.db", 1.0, 1.0, HISTORY_MB * 10**6)
        begin_ns = until_ns - round(demo.story.past_s * NS)
        super().__init__(
            engine, demo.plant, demo.sensors, dt_s=PAST_STEP_S, start_ns=begin_ns, recorder=recorder
        )
        self.demo, self._store = demo, store
        self._sampler = Sampler(demo.site, PAST_STEP_S, History().expected)

    def step(self) -> Decision:
        """See Simulation; the scheduler moves before the plant, and announces its plan."""
        self.plant.happened(self.demo.scheduler.step(self.dt_s))
        plan = self.demo.plan()
        if plan is not None:
            self.inject(plan)
        decision = super().step()
        sample = self._sampler.offer(self.engine, decision) if self._store is not None else None
        if sample is not None and self._store is not None:
            self._store.add(sample)
        return decision

    def close(self) -> None:
        """See Simulation."""
        super().close()
        if self._store is not None:
            self._store.close()
            self._store = None
