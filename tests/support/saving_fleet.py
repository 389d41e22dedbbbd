"""Fleet of jobs that save to one file system, between two feeders, each told its intervals by an advisor.

The file system shares its bandwidth equally among the transfers that run (processor sharing): saves, and
restores after failures. Training stands still for all of a save. Jobs begin a save up to STEP_S late, between
two steps of training, and hear advice a tick late. Rounds are counted in planned intervals.

    python -m tests.support.saving_fleet 1000     # staggered; then not, begun at once and at random
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from policies.checkpointing import Checkpoint, SaveTerms
from policies.checkpointing.costs import JobBatch
from policies.checkpointing.hazard import InterruptionRates, JobNodes
from policies.checkpointing.stagger import stagger_saves
from policies.checkpointing.texts import INTERVAL
from tests.support.builders import START_NS, site_of
from tests.support.saving_jobs import Saving
from twin.catalogue import F64, NS
from twin.telemetry import events as ev

NODE_W, SAVING_PU = 5000.0, 0.3  # of a node that trains; what it draws of that while it saves
STEP_S = 5.0
RAMP_S = 10.0
PER_RACK = 50
Advisor = Callable[[float, list[ev.CheckpointTold]], F64]


@dataclass(frozen=True)
class FleetSettings:
    """A fleet: `n` jobs of a node each, every `interval_s`; a save takes `work_s` alone."""

    n: int = 200
    interval_s: float = 1200.0
    work_s: tuple[float, float] = (2.0, 4.0)
    tick_s: float = 30.0
    mttf_s: float = 2e5  # of a job: 1,095 s would be its best interval by Young's rule
    start_s: float = 60.0  # of a restart, before it reads
    seed: int = 1
    ramp_pu: float = 0.04  # of a feeder's budget: six jobs of a hundred
    begin_s: float = 60.0  # within which all jobs began


@dataclass
class FleetScore:
    """Figures of one run. `worst_pu`: greatest change within RAMP_S beside the limit, of both feeders."""

    rounds: float
    effective_pu: float
    worst_pu: float
    beyond: int  # windows beyond the limit
    saves: int
    mean_save_s: float


class SavingFleet:
    """The plant of it, in steps of one second."""

    def __init__(self, settings: FleetSettings, advise: Advisor | None) -> None:
        s, n = settings, settings.n
        self.settings, self.advise = settings, advise
        self.rng = np.random.default_rng(s.seed)
        self.names = [f"j{i}" for i in range(n)]
        self.feeder = feeder_of_jobs(n)
        self.work_s = self.rng.uniform(*s.work_s, n)
        self.t = 0.0
        self.state = np.zeros(n, np.int64)  # 0 trains, 1 saves, 2 starts again, 3 restores
        self.left_s = np.zeros(n)
        self.kept_s = np.zeros(n)
        self.interval_s = np.full(n, s.interval_s)
        self.jitter_s = self.rng.uniform(0.0, STEP_S, n)
        self.trained_s = self.rng.uniform(0.0, s.begin_s, n)  # since the last save
        self.began_s, self.took_s = np.zeros(n), np.zeros(n)
        self.events: list[ev.CheckpointTold] = []
        self.power_w: list[F64] = []
        self.limit_w = s.ramp_pu * budget_w(n)
        self.score = FleetScore(0.0, 0.0, 0.0, 0, 0, 0.0)
        self._saved_s = 0.0

    def second(self) -> None:
        """One second of all jobs."""
        busy = (self.state == 1) | (self.state == 3)
        k = max(1, int(busy.sum()))
        self.left_s[busy] -= 1.0 / k
        self.left_s[self.state == 2] -= 1.0
        self.took_s[self.state != 0] += 1.0
        self.trained_s[self.state == 0] += 1.0
        ended = (self.state != 0) & (self.left_s <= 0.0)
        for i in np.flatnonzero(ended).tolist():
            self._end(i)
        due = (self.state == 0) & (self.trained_s >= self.interval_s + self.jitter_s)
        self.state[due], self.left_s[due], self.took_s[due] = 1, self.work_s[due], 0.0
        self.began_s[due] = self.t
        fails = self.rng.random(len(self.state)) < 1.0 / self.settings.mttf_s
        fails &= self.state < 2
        self.state[fails], self.left_s[fails], self.took_s[fails] = 2, self.settings.start_s, 0.0
        self.trained_s[fails] = 0.0
        self.t += 1.0
        draws = NODE_W * np.where(self.state == 0, 1.0, SAVING_PU)
        self.power_w.append(np.bincount(self.feeder, np.where(self.state >= 2, NODE_W, draws), minlength=2))

    def _end(self, i: int) -> None:
        at_ns = START_NS + round(self.t * NS)
        if self.state[i] == 1:
            self.kept_s[i] += self.trained_s[i]
            self.trained_s[i], self.state[i] = 0.0, 0
            self.jitter_s[i] = self.rng.uniform(0.0, STEP_S)
            self.score.saves += 1
            self._saved_s += self.took_s[i]
            began_ns = START_NS + round(self.began_s[i] * NS)
            took_s = float(self.took_s[i])
            told = {"save_s": took_s, "block_s": took_s, "flush_s": took_s, "began_ns": began_ns}
            self._tell(i, at_ns, **told)
        elif self.state[i] == 2:
            self.state[i], self.left_s[i] = 3, self.work_s[i]
        else:
            self.state[i] = 0
            took_s = float(self.took_s[i])
            self._tell(i, at_ns, restart_s=took_s)

    def _tell(self, i: int, at_ns: int, **said: Any) -> None:
        every_s = float(self.interval_s[i])
        self.events.append(ev.CheckpointTold(job=self.names[i], at_ns=at_ns, interval_s=every_s, **said))

    def run(self, rounds: float) -> FleetScore:
        """So many planned intervals, after two to settle; the figures of all after those."""
        s = self.settings
        settle, total = 2.0 * s.interval_s, (2.0 + rounds) * s.interval_s
        before = 0.0
        while self.t < total:
            for _ in range(round(s.tick_s)):
                self.second()
            events, self.events = self.events, []
            if self.advise is not None:
                self.interval_s = self.advise(self.t, events)
            if self.t - s.tick_s < settle <= self.t:
                before = float((self.kept_s + self.trained_s).sum())
                self.score.saves, self._saved_s = 0, 0.0
                self.power_w.clear()
            if len(self.power_w) >= 36_000:
                self._judge()
        self._judge()
        self.score.rounds = rounds
        self.score.effective_pu = (float((self.kept_s + self.trained_s).sum()) - before) / (
            s.n * (self.t - settle)
        )
        self.score.mean_save_s = self._saved_s / max(self.score.saves, 1)
        return self.score

    def _judge(self) -> None:
        """Changes of what was drawn within RAMP_S, failures aside: a job that restarts counts as training."""
        power = np.array(self.power_w)
        step = round(RAMP_S)
        if len(power) > step:
            change = np.abs(power[step:] - power[:-step]) / self.limit_w
            self.score.worst_pu = max(self.score.worst_pu, float(change.max()))
            self.score.beyond += int((change > 1.0).any(axis=1).sum())
        self.power_w = self.power_w[-step:]


def feeder_of_jobs(n: int) -> np.ndarray:
    """0 or 1: the first half of the racks hangs on feeder a."""
    racks = -(-n // PER_RACK)
    return np.array([0 if i // PER_RACK < racks // 2 else 1 for i in range(n)])


def budget_w(n: int) -> F64:
    """A fifth more than what the jobs of each feeder draw."""
    return 1.2 * NODE_W * np.bincount(feeder_of_jobs(n), minlength=2)


def site_tree(n: int) -> dict[str, Any]:
    """Racks of one-GPU nodes on feeders a and b, and a file system."""
    racks = -(-n // PER_RACK)
    a_w, b_w = budget_w(n).tolist()
    rack = {"profile": "air-8gpu", "nodes": PER_RACK, "gpus_per_node": 1}
    hall = {
        "name": "h", "racks": [{"name": f"r[1-{racks}]", **rack}],
        "feeders": [{"name": "a", "budget_w": a_w, "serves": [f"r[1-{racks // 2}]"]},
                    {"name": "b", "budget_w": b_w, "serves": [f"r[{racks // 2 + 1}-{racks}]"]}],
    }  # fmt: skip
    return {"site": "lab", "halls": [hall], "storage": [{"name": "fs"}], "max_jobs": n + 8}


def engine_advisor(settings: FleetSettings) -> Advisor:
    """The policy within a real engine, at `act`."""
    s = settings
    nodes = {f"j{i}": (f"r{1 + i // PER_RACK}/node{i % PER_RACK}",) for i in range(s.n)}
    told = {"checkpoint_interval_s": s.interval_s, "checkpoint_save_s": 3.0}
    twin = Saving(nodes, policy=Checkpoint(ramp_pu=s.ramp_pu), told=told, tree=site_tree(s.n))
    twin.says.day = -np.expm1(-86_400.0 / s.mttf_s)
    power = np.full(twin.site.sizes["node"], NODE_W)

    def advise(_: float, events: list[ev.CheckpointTold]) -> F64:
        twin.tick({"node.power_w": power}, *events, dt_s=s.tick_s)
        lease = twin.lease(INTERVAL)[: s.n]
        return np.where(np.isfinite(lease), lease, s.interval_s)

    return advise


class _Columns:
    """Stand-in for a job table: the columns that staggering reads."""

    def __init__(self, n: int) -> None:
        self.saved_ns, self.recovered_ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.queues, self.storages = [""] * n, [""] * n


class _View:
    """Stand-in for a view: the values that staggering reads."""

    power: ClassVar[Any]

    def __init__(self, n: int) -> None:
        self.site, self.jobs, self.now_ns = site_of(site_tree(n)), _Columns(n), START_NS
        self._node_w = np.full(self.site.sizes["node"], NODE_W)
        self._rack_w = np.full(self.site.sizes["rack"], NODE_W * PER_RACK)
        self._budget_w = budget_w(n)

    def believed(self, key: str) -> F64:
        return self._node_w if key == "node.power_w" else self._rack_w

    def budget_w(self) -> F64:
        return self._budget_w


def calendar_advisor(settings: FleetSettings) -> Advisor:
    """Staggering alone, at intervals that stay: what a thousand rounds have time for."""
    s, n = settings, settings.n
    view, slots = _View(n), np.arange(n, dtype=np.int32)
    node = np.arange(n, dtype=np.int32)
    held = JobNodes(node, np.arange(n), np.ones(n, np.int64))
    nothing, save_s = np.zeros(n), np.full(n, 3.0)
    rates = InterruptionRates(nothing, nothing, nothing, nothing)
    every_s = np.full(n, s.interval_s)
    kept: dict[str, Any] = {
        "interval_s": every_s.copy(), "least_s": nothing.copy(), "save_since_s": nothing.copy(),
        "round_s": nothing.copy(), "slot_ns": np.zeros(n, np.int64), "anchor_ns": np.zeros(n, np.int64),
    }  # fmt: skip

    def advise(t: float, events: list[ev.CheckpointTold]) -> F64:
        view.now_ns = START_NS + round(t * NS)
        for event in events:
            i = int(event.job[1:])
            if event.began_ns:
                view.jobs.saved_ns[i] = event.began_ns
                save_s[i] += 0.2 * (event.block_s - save_s[i])
            else:
                view.jobs.recovered_ns[i] = event.at_ns
        terms = SaveTerms(save_s, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
        batch = JobBatch(slots, held, rates, terms, nothing, every_s, every_s, nothing)
        stagger_saves(view, batch, {}, s.ramp_pu, kept)  # type: ignore[arg-type]
        return np.where(kept["round_s"] > 0, kept["round_s"], kept["interval_s"])

    return advise


def main(rounds: float) -> None:
    """Print three runs: staggered, and without advice."""
    herd = FleetSettings()
    spread = replace(herd, begin_s=herd.interval_s)
    for name, settings, advise in (
        ("staggered, begun within a minute", herd, calendar_advisor(herd)),
        ("not staggered, begun within a minute", herd, None),
        ("not staggered, begun at random", spread, None),
    ):
        score = SavingFleet(settings, advise).run(rounds)
        print(
            f"simulated: {name}: {score.rounds:g} rounds, effective {score.effective_pu:.5f}, worst ramp "
            f"{score.worst_pu:.2f} of its limit, {score.beyond} s beyond, {score.saves} saves of "
            f"{score.mean_save_s:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
