"""Straggler trial: simulated synchronous jobs, healthy ones and ones with a slow GPU or node.

    python -m tests.support.straggler_trial --hours 10000 --cases 400

The jobs, their swings, saves and imbalance are those of the plant's workload, in which members wait for
slower ones; clocks are drawn here. Half of the jobs run under a power cap, where clocks of like GPUs differ.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import F64, NS, find_signal
from twin.engine.job_reports import checkpoint_told
from twin.goodput import GoodputState, expected_end
from twin.goodput.goodput import EVERY_S
from twin.physics import performance_pu
from twin.plant.jobs import Mix
from twin.plant.sensors import ACTIVITY, CLOCK_STEP_HZ, MAX_CLOCK_HZ
from twin.plant.truth import blank
from twin.plant.work import COMPUTE_SHARE_PU, dated
from twin.plant.workload import Workload
from twin.site import Site
from twin.telemetry import CheckpointTold, JobEnded, JobSlots, JobStarted, State, TableUpdate

CAPPED_SIGMA = 0.015  # of the clocks of like GPUs under one cap; source: estimate
SLOW_CLOCKS = (0.5, 0.9)  # a slow member's over its peers': 11 to 80 % slower
SLOW_S, NAMED_BY_S = (1500.0, 3600.0), 900.0  # how long it is slow; asked for this long after it began
SIGNALS = tuple(find_signal(f"gpu.{s}") for s in ("sm_active_pu", "tensor_active_pu", "sm_clock_hz"))


@dataclass
class Trial:
    """Counts of a trial."""

    healthy_job_h: float = 0.0
    jobs: set[str] = field(default_factory=set)
    false_jobs: set[str] = field(default_factory=set)
    cases: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    errors_pu: list[float] = field(default_factory=list)  # of the slowdown that is told
    misses: list[str] = field(default_factory=list)


class JobFeed:
    """Simulated jobs with the goodput state that watches them."""

    def __init__(self, seed: int, racks: str = "r[1-7]", tensor: bool = True) -> None:
        self.site: Site = site_of(two_racks("gb200-nvl72", racks))
        self.rng, n = np.random.default_rng([seed, 7]), self.site.sizes["gpu"]
        mix = Mix(training_pu=1.0, inference_pu=0.0, batch_pu=0.0)
        self.workload, self.truth = Workload(self.site, seed, mix), blank(self.site)
        self.truth.gpu_alive[:] = self.truth.node_on[:] = True
        self.state = State(self.site.sizes, self.site.file.periods_s)
        self.jobs = JobSlots(self.site.sizes["job"], self.site.sizes["node"])
        self.goodput = GoodputState(self.site)
        self.usual_clock, self.slow_clock = np.ones(n), np.ones(n)
        self.time_s, self.tensor = 0.0, tensor

    def step(self) -> None:
        """Ten seconds: work, readings, a look."""
        t = self.truth
        t.gpu_clock_pu[:] = self.usual_clock * self.slow_clock
        events = self.workload.step(t, self.time_s, EVERY_S)
        self.time_s += EVERY_S
        now_ns = START_NS + round(self.time_s * NS)
        self.state.now_ns = now_ns
        for event in events:
            if isinstance(event, JobStarted):
                nodes = [self.site.entity("node", name) for name in event.nodes]
                slot = self.jobs.start(event, [i for i in nodes if i is not None], 0, now_ns)
                if slot is not None:
                    gpus = self.gpus_of(slot)
                    capped = self.rng.random() < 0.5
                    spread = self.rng.standard_normal(len(gpus)) * CAPPED_SIGMA
                    self.usual_clock[gpus] = np.minimum(0.8 * np.exp(spread), 1.0) if capped else 1.0
            elif isinstance(event, JobEnded):
                self.jobs.end(event, now_ns)
            elif isinstance(event, CheckpointTold):
                checkpoint_told(dated(event, START_NS), self.jobs, self.state)
        self._read(now_ns)
        self.goodput.update(self.state, self.jobs)

    def gpus_of(self, slot: int) -> np.ndarray:
        """GPUs of a job."""
        start = self.site.gpu_start_of_node
        return np.concatenate([np.arange(start[i], start[i + 1]) for i in self.jobs.nodes[slot]])

    def _read(self, now_ns: int) -> None:
        t, n = self.truth, self.site.sizes["gpu"]
        noise = 1.0 + ACTIVITY * self.rng.standard_normal((2, n))
        clock_hz = np.round(t.gpu_clock_pu * MAX_CLOCK_HZ / CLOCK_STEP_HZ) * CLOCK_STEP_HZ
        values = [t.gpu_sm_pu * noise[0], t.gpu_tensor_pu * noise[1], clock_hz]
        signals = [s for s in SIGNALS if s is not None]
        if not self.tensor:
            del values[1], signals[1]
        order = np.argsort([s.row for s in signals])
        rows = np.array([signals[i].row for i in order], np.int32)
        q = np.stack([np.round(np.minimum(values[i], signals[i].high) / signals[i].quantum) for i in order])
        update = TableUpdate("gpu", rows, None, q.astype(np.int32), np.full(n, now_ns, np.int64))
        self.state.tables["gpu"].apply_update(update, now_ns)


def run_healthy(hours: float, seed: int, trial: Trial, tensor: bool = True) -> None:
    """Healthy jobs until so many job-hours have passed."""
    feed = JobFeed(seed, tensor=tensor)
    while trial.healthy_job_h < hours:
        feed.step()
        alive = np.flatnonzero(feed.jobs.alive)
        trial.healthy_job_h += len(alive) * EVERY_S / 3600.0
        trial.jobs |= {feed.jobs.names[i] for i in alive.tolist()}
        for finding in feed.goodput.findings(feed.state, feed.jobs):
            trial.false_jobs.add(finding.id.partition("/")[2])


def run_ends(jobs: int, seed: int) -> list[float]:
    """Errors of the ends that are expected of jobs by their progress, over what is left until their true end.

    Each is asked once, when a fifth or more of an hour has passed.
    """
    feed, asked, errors = JobFeed(seed), dict[str, tuple[float, float]](), list[float]()
    while len(errors) < jobs:
        before = dict(feed.jobs.slot_of)
        feed.step()
        for name in before.keys() - feed.jobs.slot_of.keys():
            at_s, end_s = asked.pop(name, (0.0, 0.0))
            if end_s:
                errors.append((end_s - feed.time_s) / (feed.time_s - at_s))
        for name, slot in feed.jobs.slot_of.items():
            age_s = (feed.state.now_ns - int(feed.jobs.started_ns[slot])) / NS
            end = expected_end(feed.state, feed.jobs, feed.goodput, slot)
            if name not in asked and age_s > 720.0 and end is not None and end.by == "progress":
                asked[name] = feed.time_s, (end.at_ns - START_NS) / NS
    return errors


def run_slow(cases: int, seed: int, trial: Trial, tensor: bool = True) -> None:
    """Jobs with a slow GPU, node or rack, one at a time in each job."""
    feed = JobFeed(seed, tensor=tensor)
    rng, begun = feed.rng, 0
    slow: dict[str, dict[str, Any]] = {}
    while begun < cases or slow:
        feed.step()
        for name, case in list(slow.items()):
            if name not in feed.jobs.slot_of:  # it ended first
                feed.slow_clock[case["gpus"]] = 1.0
                begun -= case["judged"] is None
                del slow[name]
            elif feed.time_s >= case["by_s"] and case["judged"] is None:
                _judge(feed, name, case, trial)
                feed.slow_clock[case["gpus"]] = 1.0
                case["until_s"] = feed.time_s + 1200.0
            elif case["judged"] is not None and feed.time_s >= case["until_s"]:
                del slow[name]
        for name, slot in feed.jobs.slot_of.items():
            age_s = (feed.state.now_ns - int(feed.jobs.started_ns[slot])) / NS
            if begun < cases and name not in slow and age_s > 1200.0 and rng.random() < 0.02:
                slow[name] = _begin(feed, slot)
                begun += 1


def _begin(feed: JobFeed, slot: int) -> dict[str, Any]:
    rng, site, mine = feed.rng, feed.site, feed.gpus_of(slot)
    gpu = int(rng.choice(mine))
    table = ("gpu", "node")[int(rng.random() < 0.3 and len(mine) >= 12)]
    gpus = np.array([gpu]) if table == "gpu" else mine[site.node_of_gpu[mine] == site.node_of_gpu[gpu]]
    factor = float(rng.uniform(*SLOW_CLOCKS))
    feed.slow_clock[gpus] = factor
    entity = site.name(table, gpu if table == "gpu" else int(site.node_of_gpu[gpu]))
    return {"gpus": gpus, "table": table, "entity": entity, "by_s": feed.time_s + NAMED_BY_S,
            "factor": factor, "judged": None}  # fmt: skip


def true_slowdown(clock_pu: F64) -> float:
    """Of a job with these clocks, over that at their median."""
    pace = performance_pu(np.array([np.median(clock_pu), clock_pu.min()]), COMPUTE_SHARE_PU)
    return float(pace[0] / pace[1])


def _judge(feed: JobFeed, name: str, case: dict[str, Any], trial: Trial) -> None:
    slot = feed.jobs.slot_of[name]
    held = feed.goodput.held_back(slot, feed.state, feed.jobs)
    case["judged"] = held is not None and held.entity == case["entity"]
    trial.cases[case["table"]] += 1
    trial.right[case["table"]] += case["judged"]
    if case["judged"] and held is not None:
        true = true_slowdown(feed.truth.gpu_clock_pu[feed.gpus_of(slot)])
        trial.errors_pu.append(held.slowdown / true - 1.0)
    else:
        said = None if held is None else held.entity
        trial.misses.append(f"{case['table']} {case['entity']} x {case['factor']:.2f} of "
                            f"{len(feed.gpus_of(slot))} GPUs: {said}")  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=10_000.0, help="healthy job-hours")
    parser.add_argument("--cases", type=int, default=400, help="slow members")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-tensor", action="store_true", help="only SM activity and clocks are read")
    args = parser.parse_args()
    trial, begun = Trial(), time.monotonic()
    run_slow(args.cases, args.seed, trial, not args.no_tensor)
    total, right = sum(trial.cases.values()), sum(trial.right.values())
    for table, n in trial.cases.items():
        print(f"slow {table}: {trial.right[table]} of {n} named")
    print(f"named right: {100.0 * right / max(total, 1):.1f} % of {total}")
    if trial.errors_pu:
        errors = 100.0 * np.abs(trial.errors_pu)
        middle, high = np.quantile(errors, (0.5, 0.95))
        print(f"slowdown told: median error {middle:.1f} %, 95th percentile {high:.1f} %")
    print("\n".join(trial.misses))
    run_healthy(args.hours, args.seed + 1000, trial, not args.no_tensor)
    ends = 100.0 * np.abs(run_ends(100, args.seed + 2000))
    print(f"end by progress: median error {np.median(ends):.1f} % of what was left, "
          f"95th percentile {np.quantile(ends, 0.95):.1f} %")  # fmt: skip
    jobs, wrong = len(trial.jobs), len(trial.false_jobs)
    print(f"healthy: {trial.healthy_job_h:.0f} job-hours, {jobs} jobs, {wrong} falsely named "
          f"({100.0 * wrong / max(jobs, 1):.2f} %)")  # fmt: skip
    print(f"simulated jobs; {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
