"""Straggler trial: simulated synchronous jobs, healthy ones and ones with a slow GPU, node or link.

    python -m tests.support.straggler_trial --hours 10000 --cases 400

The jobs, their swings, saves and imbalance are those of the plant's workload, in which members wait for
slower ones; clocks are drawn here. Half of the jobs run under a power cap, where clocks of like GPUs differ.
All members wait for a slow link alike; what its counters and bandwidth show is drawn here, as is what some
links without any effect count all the time. No recording of such jobs is public.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import F64, NS, find_signal
from twin.engine.job_reports import checkpoint_reported
from twin.goodput import GoodputState, LinkRecords, expected_end
from twin.goodput.goodput import EVERY_S
from twin.health.nvlinks import Nvlinks
from twin.health.rates import Rates
from twin.physics import performance_pu
from twin.plant.jobs import Mix
from twin.plant.sensors import ACTIVITY, CLOCK_STEP_HZ, MAX_CLOCK_HZ
from twin.plant.truth import blank
from twin.plant.work import COMPUTE_SHARE_PU, dated
from twin.plant.workload import Workload
from twin.site import Site
from twin.telemetry import CheckpointTold, Counts, JobEnded, JobSlots, JobStarted, State, TableUpdate

CAPPED_SIGMA = 0.015  # of the clocks of like GPUs under one cap; source: estimate
SLOW_CLOCKS = (0.5, 0.9)  # a slow member's over its peers': 11 to 80 % slower
SLOW_S, NAMED_BY_S = (1500.0, 3600.0), 900.0  # how long it is slow; asked for this long after it began
SLOW_LINKS = (1.08, 1.6)  # slowdown of a job by a slow link
NOISY_PU = 0.02  # of links, which err all the time and slow nobody; source: estimate
NOISY_PER_S = (0.05, 2.0)
PORT_BYTES_PER_S, NVLINK_BYTES_PER_S = 3e10, 4e11
COUNTED = {"link": ("error_count", "flap_count", "discard_count"),
           "gpu": ("nvlink_error_count", "nvlink_recovery_count")}  # fmt: skip
# Counters of a slow link: counter, events per second. source: estimates
SIGNS = {"link": (("error_count", (1.0, 1000.0)), ("flap_count", (0.004, 0.03)),
                  ("discard_count", (5.0, 1000.0)), ("", (0.2, 0.6))),
         "gpu": (("nvlink_error_count", (1.0, 1000.0)), ("nvlink_recovery_count", (0.01, 0.1)),
                 ("", (0.2, 0.6)))}  # fmt: skip
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


class LinkFeed:
    """Counters and bandwidths of ports, and of the NVLinks of each GPU, with the rates that health makes."""

    def __init__(self, site: Site, rng: np.random.Generator) -> None:
        self.site, self.rng = site, rng
        self.rates, self.nvlinks = Rates(site), Nvlinks(site)
        n = site.sizes
        self.width = {table: np.ones(n[table]) for table in COUNTED}
        self.counts = {table: np.zeros((len(names), n[table])) for table, names in COUNTED.items()}
        self.per_s = {table: np.zeros((len(names), n[table])) for table, names in COUNTED.items()}
        for table in COUNTED:
            noisy = rng.random(n[table]) < NOISY_PU
            rate = np.exp(rng.uniform(*np.log(NOISY_PER_S), n[table]))
            self.per_s[table][0, noisy] = rate[noisy]

    def spoil(self, table: str, entity: int, sign: str, size: float) -> None:
        """Let a link show a sign from now on, beside what it counts anyway; "" is less bandwidth."""
        if sign:
            self.per_s[table][COUNTED[table].index(sign), entity] += size
        else:
            self.width[table][entity] = size

    def mend(self, table: str, entity: int, sign: str, size: float) -> None:
        """End a sign."""
        if sign:
            self.per_s[table][COUNTED[table].index(sign), entity] -= size
        else:
            self.width[table][entity] = 1.0

    def read(self, state: State) -> None:
        """Ten seconds of counts, then a look at them."""
        for table, names in COUNTED.items():
            rates = np.maximum(self.per_s[table], 0.0)
            grown = self.rng.poisson(rates * EVERY_S)
            self.counts[table] += grown
            rows = np.array([_signal(f"{table}.{name}").row for name in names], np.int32)
            order, t_ns = np.argsort(rows), np.full(grown.shape[1], state.now_ns, np.int64)
            raw = self.counts[table].astype(np.int64)
            told = Counts(table, rows[order], None, raw[order], grown[order].astype(np.int64), t_ns)
            state.tables[table].apply_counts(told, state.now_ns)
        for key, usual in (("link.rx_bytes_per_s", PORT_BYTES_PER_S),
                           ("gpu.nvlink_tx_bytes_per_s", NVLINK_BYTES_PER_S)):  # fmt: skip
            signal = _signal(key)
            width = self.width[signal.table]
            value = usual * width * (1.0 + 0.02 * self.rng.standard_normal(len(width)))
            q = np.round(value / signal.quantum).astype(np.int32)[None]
            t_ns = np.full(len(width), state.now_ns, np.int64)
            update = TableUpdate(signal.table, np.array([signal.row], np.int32), None, q, t_ns)
            state.tables[signal.table].apply_update(update, state.now_ns)
        context: Any = SimpleNamespace(state=state, now_ns=state.now_ns, dt_s=EVERY_S,
                                       under_work=lambda _: None, without_data=lambda _: None)  # fmt: skip
        self.rates.update(context)


def _signal(key: str) -> Any:
    found = find_signal(key)
    assert found is not None, key
    return found


def pod_tree(racks: str) -> dict[str, Any]:
    """Racks of a pod whose nodes have four ports each, on leaf switches."""
    tree = two_racks("gb200-nvl72", racks)
    tree["halls"][0]["planes"] = [{"name": "rail", "links_per_node": 4}]
    tree["halls"][0]["switches"] = [{"name": "leaf[1-4]", "serves": [racks], "planes": ["rail"]}]
    return tree


class JobFeed:
    """Simulated jobs with the goodput state that watches them."""

    def __init__(self, seed: int, racks: str = "r[1-7]", tensor: bool = True) -> None:
        self.site: Site = site_of(pod_tree(racks))
        self.rng, n = np.random.default_rng([seed, 7]), self.site.sizes["gpu"]
        mix = Mix(training_pu=1.0, inference_pu=0.0, batch_pu=0.0)
        self.workload, self.truth = Workload(self.site, seed, mix), blank(self.site)
        self.truth.gpu_alive[:] = self.truth.node_on[:] = True
        self.state = State(self.site.sizes, self.site.file.periods_s)
        self.jobs = JobSlots(self.site.sizes["job"], self.site.sizes["node"])
        self.goodput = GoodputState(self.site)
        self.usual_clock, self.slow_clock = np.ones(n), np.ones(n)
        self.links, self.wait_pu = LinkFeed(self.site, np.random.default_rng([seed, 8])), np.ones(n)
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
                checkpoint_reported(dated(event, START_NS), self.jobs, self.state)
        self._read(now_ns)
        self.links.read(self.state)
        self.goodput.update(self.state, self.jobs, LinkRecords(self.links.rates, self.links.nvlinks))

    def gpus_of(self, slot: int) -> np.ndarray:
        """GPUs of a job."""
        start = self.site.gpu_start_of_node
        return np.concatenate([np.arange(start[i], start[i + 1]) for i in self.jobs.nodes[slot]])

    def _read(self, now_ns: int) -> None:
        t, n = self.truth, self.site.sizes["gpu"]
        noise = 1.0 + ACTIVITY * self.rng.standard_normal((2, n))
        clock_hz = np.round(t.gpu_clock_pu * MAX_CLOCK_HZ / CLOCK_STEP_HZ) * CLOCK_STEP_HZ
        values = [t.gpu_sm_pu * noise[0], t.gpu_tensor_pu * self.wait_pu * noise[1], clock_hz]
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


def run_slow(cases: int, seed: int, trial: Trial, tensor: bool = True, links: bool = False) -> None:
    """Jobs with a slow GPU or node, or a slow link, one at a time in each job."""
    feed = JobFeed(seed, tensor=tensor)
    rng, begun = feed.rng, 0
    slow: dict[str, dict[str, Any]] = {}
    while begun < cases or slow:
        feed.step()
        for name, case in list(slow.items()):
            if name not in feed.jobs.slot_of:  # it ended first
                _mend(feed, case)
                begun -= case["judged"] is None
                del slow[name]
            elif feed.time_s >= case["by_s"] and case["judged"] is None:
                _judge(feed, name, case, trial)
                _mend(feed, case)
                case["until_s"] = feed.time_s + 1200.0
            elif case["judged"] is not None and feed.time_s >= case["until_s"]:
                del slow[name]
        for name, slot in feed.jobs.slot_of.items():
            age_s = (feed.state.now_ns - int(feed.jobs.started_ns[slot])) / NS
            if begun < cases and name not in slow and age_s > 1200.0 and rng.random() < 0.02:
                slow[name] = (_begin_link if links else _begin)(feed, slot)
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


def _begin_link(feed: JobFeed, slot: int) -> dict[str, Any]:
    """A link of the job gets slow: all members wait for it, and one of its signs shows."""
    rng, site, mine = feed.rng, feed.site, feed.gpus_of(slot)
    table = ("link", "gpu")[int(rng.random() < 0.5)]
    nodes = feed.jobs.nodes[slot]
    entity = int(rng.choice(mine if table == "gpu" else np.flatnonzero(np.isin(site.node_of_link, nodes))))
    signs = SIGNS[table]
    sign, (low, high) = signs[int(rng.integers(len(signs)))]
    size = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    factor = float(rng.uniform(*SLOW_LINKS))
    feed.links.spoil(table, entity, sign, size)
    feed.wait_pu[mine] = 1.0 / factor
    return {"gpus": mine, "table": {"link": "port", "gpu": "nvlink"}[table],
            "entity": site.name(table, entity), "link": (table, entity, sign, size), "factor": factor,
            "by_s": feed.time_s + NAMED_BY_S, "judged": None}  # fmt: skip


def _mend(feed: JobFeed, case: dict[str, Any]) -> None:
    feed.slow_clock[case["gpus"]] = feed.wait_pu[case["gpus"]] = 1.0
    if "link" in case:
        feed.links.mend(*case["link"])


def true_slowdown(clock_pu: F64) -> float:
    """Of a job with these clocks, over that at their median."""
    pace = performance_pu(np.array([np.median(clock_pu), clock_pu.min()]), COMPUTE_SHARE_PU)
    return float(pace[0] / pace[1])


def _judge(feed: JobFeed, name: str, case: dict[str, Any], trial: Trial) -> None:
    slot = feed.jobs.slot_of[name]
    held = feed.goodput.held_back(slot, feed.state, feed.jobs)
    case["judged"] = (
        held is not None and held.entity == case["entity"] and bool(held.ends) == ("link" in case)
    )
    trial.cases[case["table"]] += 1
    trial.right[case["table"]] += case["judged"]
    if case["judged"] and held is not None:
        true = (
            case["factor"] if "link" in case else true_slowdown(feed.truth.gpu_clock_pu[feed.gpus_of(slot)])
        )
        trial.errors_pu.append(held.slowdown / true - 1.0)
    else:
        said = None if held is None else held.ends or held.entity
        sign = f" {case['link'][2] or 'bandwidth'} {case['link'][3]:.3g}" if "link" in case else ""
        trial.misses.append(f"{case['table']} {case['entity']} x {case['factor']:.2f}{sign} of "
                            f"{len(feed.gpus_of(slot))} GPUs: {said}")  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=10_000.0, help="healthy job-hours")
    parser.add_argument("--cases", type=int, default=400, help="slow members")
    parser.add_argument("--links", type=int, default=400, help="slow links")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-tensor", action="store_true", help="only SM activity and clocks are read")
    args = parser.parse_args()
    trial, begun = Trial(), time.monotonic()
    run_slow(args.cases, args.seed, trial, not args.no_tensor)
    if not args.no_tensor:
        run_slow(args.links, args.seed + 500, trial, links=True)
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
