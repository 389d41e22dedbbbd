"""A month for the ledger, whole or compressed: a simulated plant whose meters have gains, gaps, resets, steps
of their clocks and replacements, beside a twin that keeps the ledger, and the plant's own sums.

    python -m tests.support.ledger_month --seed 1 --days 30     # five minutes of CPU for a month

Counters of the plant are without error; here the feeders' have a gain of class 0.2. A whole month is stepped
by five minutes, which is exact for energy: plant, meters and truth take each step at the power of its end.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.builders import site_of
from twin.catalogue import F64, NS
from twin.engine import Engine
from twin.ledger import HourRecord, Statement, decode_hour, statement
from twin.physics import J_PER_KWH
from twin.plant import Observation, Plant, Report, Scenario, Sensors
from twin.simulation import Simulation
from twin.telemetry import EntityReplaced, JobEnded, JobStarted, TicksSkipped

DT_S, LONG_DT_S = 60.0, 300.0  # of a step; of one in a whole month
# Of the parts of a long step, instead of two seconds: its heat is rougher, and still stable
LONG_PART_S = 10.0
LONG_S = 5 * 86_400.0  # from here on a month is stepped coarsely
COUNTER_GAIN = 0.0012
EVER = (0, 2**62)
RACK_PU, SITE_PU = 0.005, 0.002  # goals
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
    dt_s = LONG_DT_S if length_s >= LONG_S else DT_S
    plant = Plant(site, seed=seed, scenario=Scenario("month", dt_s=dt_s))
    if dt_s == LONG_DT_S:
        plant.step_max_s = LONG_PART_S
    sensors = TroubledSensors(site, seed)
    sensors.begin(troubles_of(length_s, racks), START_NS, seed)
    sim = Simulation(engine, plant, sensors, dt_s=dt_s, start_ns=START_NS)
    month = LedgerMonth(site, np.zeros(site.sizes["rack"]), engine=engine)
    held, last = HeldNodes(site), b""
    pause_at = round(0.8 * length_s / dt_s)
    step = 0
    while month.seconds < length_s:
        if step == pause_at:
            for _ in range(round(pause_s / dt_s)):
                plant.step([], dt_s)
                sim.now_ns += round(dt_s * NS)
                sensors.observe(plant.truth, plant.present, sim.now_ns, ())
                _add(month, plant, dt_s)
            sim.inject(TicksSkipped(count=round(pause_s / dt_s), why="a pause of the test"))
        if step == round(0.5 * length_s / dt_s):
            sim.inject(EntityReplaced(id="meter", table="rack", name=site.name("rack", 2), serial="M2"))
        sim.step()
        held.hear(sim.frame.events, sim.now_ns)
        _add(month, plant, dt_s)
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


def _add(month: LedgerMonth, plant: Plant, dt_s: float) -> None:
    truth = plant.truth
    month.rack_j += truth.rack_power_w * dt_s
    month.site_j += float(truth.rack_power_w.sum() + truth.loop_power_w.sum()) * dt_s
    month.seconds += dt_s


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


def racks_of(month: LedgerMonth) -> tuple[F64, F64, Statement]:
    """(relative error, half of the stated 90 % interval over the truth) of racks, and their statement."""
    found = statement(month.hours, "rack", *EVER)
    lines = {row.name: row for row in found.rows}
    names = [month.site.name("rack", i) for i in range(month.site.sizes["rack"])]
    true_kwh = month.rack_j / J_PER_KWH
    energy = np.array([lines[name].energy_kwh for name in names])
    return energy / true_kwh - 1.0, np.array([lines[n].energy_pm_kwh for n in names]) / true_kwh, found


def main() -> None:
    """Run one month and print its errors, in per cent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--days", type=float, default=30.0)
    args = parser.parse_args()
    begun = time.process_time()
    errors, half, found = racks_of(month := run_month(args.seed, args.days * 86_400.0))
    site = found.total.energy_kwh * J_PER_KWH / month.site_j - 1.0
    inside, within = np.abs(errors) <= half, np.abs(errors) < RACK_PU
    print(f"seed {args.seed}, {args.days:g} days, {time.process_time() - begun:.0f} s of CPU")
    print(f"racks: {(100 * errors).round(3).tolist()}, stated {(100 * half).round(3).tolist()}")
    print(f"within {100 * RACK_PU:g} %: {within.sum()} of {len(errors)}; within stated: {inside.sum()}")
    print(f"site: {100 * site:.3f} %, within {100 * SITE_PU:g} %: {abs(site) < SITE_PU}")


if __name__ == "__main__":
    main()
