"""A month for the ledger, compressed: a simulated plant whose meters have gains, gaps, resets, steps of their
clocks and replacements, beside a twin that keeps the ledger, and the plant's own sums.

Each day is `hours_a_day` long, with steps of a minute. Counters of the plant are without error; here the
feeders' have a gain of class 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.builders import site_of
from twin.catalogue import F64, NS
from twin.engine import Engine
from twin.ledger import HourRecord, decode_hour
from twin.plant import Observation, Plant, Report, Scenario, Sensors
from twin.simulation import Simulation
from twin.telemetry import EntityReplaced, JobEnded, JobStarted, TicksSkipped

DT_S = 60.0
COUNTER_GAIN = 0.0012
START_NS = 1_793_491_200 * NS  # 2026-11-01T00:00:00Z


def tree(racks: int = 4, cooling: str = "") -> dict[str, Any]:
    """Two halls with racks, a CDU and feeds A and B each, and meters everywhere; `cooling` of the loop of
    both, where there is one.
    """
    looped = {"loop": "fws"} if cooling else {}
    return {
        "site": "lab",
        "max_jobs": 64,
        **({"loops": [{"name": "fws", "cooling": cooling}]} if cooling else {}),
        "halls": [
            {
                "name": h,
                "racks": [{"name": f"{h}r[1-{racks}]", "profile": "gb200-nvl72"}],
                "cdus": [{"name": f"{h}cdu1", "serves": [f"{h}r[1-{racks}]"], **looped}],
                "feeders": [
                    {
                        "name": f"{h}{s.lower()}",
                        "side": s,
                        "budget_w": 900_000,
                        "serves": [f"{h}r[1-{racks}]"],
                    }
                    for s in ("A", "B")
                ],
            }
            for h in ("h1", "h2")
        ],
    }


@dataclass(frozen=True)
class Trouble:
    """A time in which reports of some entities are missing, or an instant at which their meters change."""

    kind: str  # gap, reset, replaced, back
    table: str
    entities: tuple[int, ...]
    begin_s: float
    end_s: float = 0.0


class TroubledSensors(Sensors):
    """Sensors whose reports are spoiled by troubles, after they were taken."""

    troubles: list[Trouble]

    def begin(self, troubles: list[Trouble], start_ns: int, seed: int) -> None:
        """Draw the gains of the feeders' counters."""
        self.troubles, self.start_ns = troubles, start_ns
        self.rng = np.random.default_rng((seed, 77))
        n = self.site.sizes
        self.counter_gain = 1.0 + COUNTER_GAIN * self.rng.standard_normal(n["feeder"])
        self.counter_off = np.zeros(n["feeder"], np.int64)
        self.rack_gain = np.ones(n["rack"], np.float32)
        self.done: set[Trouble] = set()

    def observe(self, *given: Any) -> Observation:
        out = super().observe(*given)
        at_s = (out.now_ns - self.start_ns) / NS
        reports = [self._spoiled(report.copy(), at_s) for report in out.reports]
        return Observation(reports, out.events, out.now_ns)

    def _new(self, kinds: tuple[str, ...], table: str, at_s: float) -> list[Trouble]:
        """Troubles that begin with this report."""
        found = [t for t in self.troubles if t.kind in kinds and t.table == table and at_s >= t.begin_s]
        new = [t for t in found if t not in self.done]
        self.done |= set(new)
        return new

    def _spoiled(self, report: Report, at_s: float) -> Report:
        if report.table == "feeder" and len(report.counters):
            counts = (report.counts[0] * self.counter_gain).astype(np.int64)
            for trouble in self._new(("reset", "replaced"), "feeder", at_s):
                of = list(trouble.entities)
                # A counter that begins anew; a new meter has another reading
                self.counter_off[of] = -counts[of] if trouble.kind == "reset" else 10**13
            report.counts[0] = counts + self.counter_off
        if report.table == "rack" and "power_w" in report.signals:
            for trouble in self._new(("replaced",), "rack", at_s):
                self.rack_gain[list(trouble.entities)] += np.float32(0.003 * self.rng.standard_normal())
            report.values[report.signals.index("power_w")] *= self.rack_gain
        present = np.ones(len(report.t_ns), np.bool_) if report.present is None else report.present.copy()
        for trouble in self.troubles:
            if trouble.table == report.table and trouble.begin_s <= at_s < trouble.end_s:
                if trouble.kind == "gap":
                    present[list(trouble.entities)] = False
                elif trouble.kind == "back":  # its clock is two minutes behind: the Inbox takes none of it
                    report.t_ns[list(trouble.entities)] -= round(120 * NS)
        report.present = present
        return report


@dataclass
class LedgerMonth:
    """The month as it went: truths, and the hours of the ledger."""

    site: Any
    rack_j: F64
    hours: list[HourRecord] = field(default_factory=list)
    site_j: float = 0.0
    water_l: float = 0.0
    seconds: float = 0.0
    granted_ns: dict[str, int] = field(default_factory=dict)  # by job: of GPUs
    engine: Engine | None = None


def troubles_of(length_s: float, racks: int) -> list[Trouble]:
    """Troubles of a month of this length, in all of its parts."""
    every = tuple(range(2 * racks))
    at = length_s / 100.0
    return [
        Trouble("gap", "rack", (0,), 10 * at, 13 * at),
        Trouble("gap", "node", tuple(range(18, 36)), 20 * at, 22 * at),
        Trouble("gap", "gpu", tuple(range(72, 144)), 20 * at, 22 * at),
        Trouble("gap", "feeder", (0, 1), 30 * at, 33 * at),
        Trouble("reset", "feeder", (1,), 40 * at),
        Trouble("back", "rack", every, 45 * at, 45 * at + 600.0),
        Trouble("replaced", "rack", (2,), 50 * at),
        Trouble("replaced", "feeder", (2,), 55 * at),
        Trouble("gap", "rack", every, 60 * at, 61 * at),
        Trouble("gap", "feeder", (0, 1, 2, 3), 60 * at, 61 * at),
    ]


def run_month(
    seed: int, length_s: float, racks: int = 4, pause_s: float = 1200.0, cooling: str = ""
) -> LedgerMonth:
    """Run it; a pause of the daemon at four fifths."""
    site = site_of(tree(racks, cooling))
    engine = Engine(site, [], [])
    plant = Plant(site, seed=seed, scenario=Scenario("month", dt_s=DT_S))
    sensors = TroubledSensors(site, seed)
    sensors.begin(troubles_of(length_s, racks), START_NS, seed)
    sim = Simulation(engine, plant, sensors, dt_s=DT_S, start_ns=START_NS)
    month = LedgerMonth(site, np.zeros(site.sizes["rack"]), engine=engine)
    held, last = HeldNodes(site), b""
    pause_at = round(0.8 * length_s / DT_S)
    step = 0
    while month.seconds < length_s:
        if step == pause_at:
            for _ in range(round(pause_s / DT_S)):
                plant.step([], DT_S)
                sim.now_ns += round(DT_S * NS)
                sensors.observe(plant.truth, plant.present, sim.now_ns, ())
                _add(month, plant)
            sim.tell(TicksSkipped(count=round(pause_s / DT_S), why="a pause of the test"))
        if step == round(0.5 * length_s / DT_S):
            sim.tell(EntityReplaced(id="meter", table="rack", name=site.name("rack", 2), serial="M2"))
        sim.step()
        held.hear(sim.frame.events, sim.now_ns)
        _add(month, plant)
        step += 1
        if engine.ledger.closed and engine.ledger.closed[-1] != last:
            last = engine.ledger.closed[-1]
            known = {hour.begin_ns for hour in month.hours}
            found = map(decode_hour, engine.ledger.closed)
            month.hours += [hour for hour in found if hour.begin_ns not in known]
    month.granted_ns, month.water_l = held.granted_ns, float(plant.truth.loop_water_l.sum())
    running = engine.ledger.running()
    assert running is not None
    month.hours.append(running)
    return month


def _add(month: LedgerMonth, plant: Plant) -> None:
    truth = plant.truth
    month.rack_j += truth.rack_power_w * DT_S
    month.site_j += float(truth.rack_power_w.sum() + truth.loop_power_w.sum()) * DT_S
    month.seconds += DT_S


class HeldNodes:
    """Jobs of nodes by the events alone, and the GPU time of each job."""

    def __init__(self, site: Any) -> None:
        self.job: list[str] = [""] * site.sizes["node"]
        self.gpus = np.diff(site.gpu_start_of_node).tolist()
        self.site, self.since_ns, self.granted_ns = site, 0, dict[str, int]()

    def hear(self, events: Any, now_ns: int) -> None:
        """Book the time until now, then take the events."""
        if self.since_ns:
            for node, job in enumerate(self.job):
                if job:
                    spent_ns = self.gpus[node] * (now_ns - self.since_ns)
                    self.granted_ns[job] = self.granted_ns.get(job, 0) + spent_ns
        self.since_ns = now_ns
        for event in events:
            if isinstance(event, JobStarted | JobEnded):
                self.job = ["" if job == event.job else job for job in self.job]
            if isinstance(event, JobStarted):
                for name in event.nodes:
                    self.job[self.site.entity("node", name)] = event.job
