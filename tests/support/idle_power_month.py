"""A month of recorded demand for GPUs on a simulated site whose idle nodes may sleep.

python -m tests.support.idle_power_month /path/to/gpu-demand-helios-earth

A look a minute: the model forecasts, the policy proposes, nodes obey. With --whole the whole engine ticks,
which takes several times as long; without, all nodes count as healthy, and nothing is diagnosed. What the
recording wants (GPUs that run and wait, summed over its virtual clusters) is granted in one pool of nodes of
eight GPUs, packed, as far as nodes are awake; the recording's own limits of each cluster are not played. Only
counts are recorded, so a job is each rise of the demand: it is late if not all of it is granted at once
although it would be with all nodes awake. Nodes of the simulated site draw and start as the plant's do.
"""

from __future__ import annotations

import argparse
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from models.load import Load
from policies.idle_power import IdlePower
from tests.support.builders import START_NS, site_of
from twin.catalogue import F64, NS
from twin.contracts import ASLEEP, HEALTHY, READY, WAKING
from twin.engine import Engine
from twin.plant.actuators import BOOT_PU, STANDBY_W, WAKE_S
from twin.telemetry import Block, Frame, Inbox, Reading, events as ev

CONTROL, MINUTE_S, GPUS = "node.standby", 60.0, 8
COLUMNS = ("running_gpu_num", "pending_gpu_num")
IDLE_W, BUSY_W = 1900.0, 6500.0  # of a node of eight H100; source: estimate
# Experts that need no fit in a worker
EXPERTS = "last,ewma5,ewma15,climatology"
BUDGET_PU = 1.1  # of what all nodes draw at work: each of the two feeds carries all; source: estimate


@dataclass
class MonthScore:
    """Score of a month: energy of idle nodes that sleep saved, and rises that came late."""

    idle_j: float = 0.0  # what nodes would draw that no job is on, all awake
    drawn_j: float = 0.0  # what they did draw, starts included
    rises: int = 0
    late: int = 0
    waited_gpu_min: float = 0.0
    starts: int = 0
    worst_pu: float = 0.0  # greatest load of a feed that carries all, over its budget
    alarms: set[str] = field(default_factory=set)

    @property
    def saved_pu(self) -> float:
        """Share of the energy of idle nodes that was saved."""
        return 1.0 - self.drawn_j / self.idle_j if self.idle_j else 0.0

    @property
    def in_time_pu(self) -> float:
        """Share of the rises that were granted at once."""
        return 1.0 - self.late / self.rises if self.rises else 1.0


def recorded_demand(folder: Path) -> F64:
    """GPUs that run or are waited for, by the minute; NaN where the log has a gap."""
    total: Any = 0.0
    for path in sorted(folder.glob("*/cluster_sequence_vc.csv.xz")):
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        at = [lines[0].split(",").index(name) for name in COLUMNS]
        total = total + np.array([sum(float(line.split(",")[i] or 0) for i in at) for line in lines[1:]])
    return np.where(total > 0, total, np.nan)


def _tree(nodes: int) -> dict[str, Any]:
    racks = [f"r{i}" for i in range(-(-nodes // 8))]
    made = [{"name": r, "profile": "hgx-h100", "nodes": min(8, nodes - 8 * i)} for i, r in enumerate(racks)]
    budget_w = BUDGET_PU * nodes * BUSY_W
    feeders = [{"name": s, "side": s.upper(), "budget_w": budget_w, "serves": racks} for s in "ab"]
    return {"site": "lab", "max_jobs": 2 * nodes, "halls": [{"name": "h", "racks": made, "feeders": feeders}]}


class AllWell:
    """A view of an engine in which all nodes and GPUs are healthy."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def health(self, part: str) -> Any:
        return replace(self._view.health(part), level=np.full(self._view.site.sizes[part], HEALTHY, np.uint8))


class MonthSite:
    """Nodes that work, idle, sleep and start; a scheduler that packs, and tells; an engine beside them."""

    def __init__(self, nodes: int, seed: int, whole: bool = False, **settings: Any) -> None:
        self.site, self.whole = site_of(_tree(nodes)), whole
        self.n, self.rng = nodes, np.random.default_rng(seed)
        model = Load(signals=("site.gpu_demand_count",), horizons_s=(300.0, 900.0), experts=EXPERTS)
        model.fit_every_s = 0.0  # type: ignore[misc]
        self.policy = IdlePower(**settings)
        self.engine = Engine(self.site, [self.policy], [model], {"idle_power": "act"})
        self.model, self.inbox = model, Inbox(self.site.sizes)
        self.memory = self.engine.memory["idle_power"]
        self.standby, self.used = np.zeros(nodes, np.int64), np.zeros(nodes)
        self.ready_s, self.time_s = np.full(nodes, np.inf), 0.0
        self.busy: np.ndarray = np.zeros(nodes, np.bool_)
        self.score = MonthScore()

    def minute(self, demand: float, scored: bool) -> None:
        """A minute of this demand; NaN: the scheduler tells nothing, and what runs goes on."""
        self.time_s += MINUTE_S
        self.standby = np.where((self.standby == WAKING) & (self.ready_s <= self.time_s), READY, self.standby)
        if np.isfinite(demand):
            self._grant(demand)
        power_w = self._power_w()
        self._tell(demand, power_w)
        frame = self.inbox.take(self.engine.state.tick + 1, START_NS + round(self.time_s * NS), MINUTE_S)
        if self.whole:
            decision = self.engine.tick(frame)
            self.memory = self.engine.memory["idle_power"]
            orders = [(b.index, b.value) for b in decision.commands if b.control == CONTROL]
            if scored:
                self.score.alarms |= {f.id for f in decision.findings if f.severity != "info"}
        else:
            orders = self._look(frame)
        for index, value in orders:
            self._obey(index, value, scored)
        if scored:
            self._count(power_w)

    def _look(self, frame: Frame) -> list[tuple[Any, Any]]:
        """A look of the model and the policy alone; what the policy asks for."""
        e = self.engine
        e.state.now_ns, e.state.tick = frame.now_ns, frame.tick
        for event in frame.events:
            assert e.intake.apply(event, e.site, e.state, e.jobs, e.arbiter, e.models) is None
        e.state.apply(frame)
        e.windows.update_standby(e.state)
        view: Any = AllWell(e.view(frame.dt_s))
        self.model.update(view)
        e.forecasts |= {(f.signal, f.horizon_s): f for f in self.model.predict(view)}
        proposals, self.memory = self.policy.propose(view, self.memory)
        return [(p.index, p.want) for p in proposals]

    def _grant(self, demand: float) -> None:
        """Place what is wanted on nodes that are awake: those that work already first, then by number."""
        left = min(demand, GPUS * self.n)
        order = np.lexsort((np.arange(self.n), -self.used))
        order = order[self.standby[order] == READY]
        used = np.zeros(self.n)
        used[order] = np.clip(left - GPUS * np.arange(len(order)), 0.0, GPUS)
        self.used = used

    def _power_w(self) -> F64:
        awake = IDLE_W + (BUSY_W - IDLE_W) * self.used / GPUS
        return np.select(
            [self.standby == ASLEEP, self.standby == WAKING], [STANDBY_W, BOOT_PU * IDLE_W], awake
        )

    def _tell(self, demand: float, power_w: F64) -> None:
        """Readings of nodes, GPUs, racks and the scheduler; jobs as nodes begin and end to work."""
        now_ns = START_NS + round(self.time_s * NS)
        busy, site = self.used > 0, self.site
        for node in np.flatnonzero(busy != self.busy).tolist():
            name = site.name("node", node)
            event = ev.JobStarted(id=f"s{now_ns}-{node}", job=name, nodes=(name,), kind="training") \
                if busy[node] else ev.JobEnded(id=f"e{now_ns}-{node}", job=name)  # fmt: skip
            self.inbox.put_event(event)
        self.busy = busy
        running = float(self.used.sum())
        counts = {"gpu_running_count": running, "gpu_pending_count": demand - running}
        for signal, value in counts.items():
            if np.isfinite(value):
                self.inbox.put(Reading("site", 0, signal, max(value, 0.0), now_ns), now_ns)
        awake = (self.standby == READY)[site.node_of_gpu]
        jitter = self.rng.normal(0.0, 1.0, site.sizes["gpu"])
        gpu_w = np.where(awake, (power_w[site.node_of_gpu] - 1300.0) / GPUS + jitter, np.nan)
        temp_c = np.where(awake, 35.0 + 0.04 * gpu_w + 0.2 * jitter, np.nan)
        on = np.where(self.standby == ASLEEP, 0.0, 1.0)
        level = np.zeros(self.n)
        self._block("gpu", {"power_w": gpu_w, "temp_c": temp_c}, now_ns)
        node_w = power_w + self.rng.normal(0, 1, self.n)
        states = {"power_on_state": on, "service_level_state": level, "standby_state": self.standby}
        self._block("node", {"power_w": node_w, **states}, now_ns)
        rack_w = np.bincount(site.rack_of_node, power_w) * (1.0 + self.rng.normal(0, 1e-4))
        self._block("rack", {"power_w": rack_w}, now_ns)

    def _block(self, table: str, values: dict[str, Any], now_ns: int) -> None:
        rows, n = np.array(list(values.values()), np.float32), self.site.sizes[table]
        self.inbox.put_block(
            Block(table, 0, tuple(values), rows, (), np.empty((0, n), np.int64), now_ns), now_ns
        )

    def _obey(self, index: Any, value: Any, scored: bool) -> None:
        """As the plant does; a node that works is not put to sleep."""
        for node, wanted in zip(index.tolist(), value.tolist(), strict=True):
            if wanted == ASLEEP and self.standby[node] == READY and self.used[node] == 0:
                self.standby[node] = ASLEEP
            elif wanted == READY and self.standby[node] == ASLEEP:
                self.standby[node], self.score.starts = WAKING, self.score.starts + scored
                self.ready_s[node] = self.time_s + self.rng.uniform(*WAKE_S)

    def _count(self, power_w: F64) -> None:
        idle = self.used == 0
        self.score.idle_j += IDLE_W * float(idle.sum()) * MINUTE_S
        self.score.drawn_j += float(power_w[idle].sum()) * MINUTE_S
        self.score.worst_pu = max(self.score.worst_pu, float(power_w.sum()) / (BUDGET_PU * self.n * BUSY_W))


def played(demand: F64, learn_min: int, nodes: int = 107, seed: int = 1, **settings: Any) -> MonthSite:
    """The site after these minutes, of which the first `learn_min` are not scored. `settings`: of the site,
    and of the policy."""
    world, before = MonthSite(nodes, seed, **settings), np.nan
    for number, wanted in enumerate(demand.tolist()):
        scored = number >= learn_min
        world.minute(wanted, scored)
        if scored and np.isfinite(wanted):
            could, got = min(wanted, GPUS * nodes), float(world.used.sum())
            world.score.waited_gpu_min += could - got
            if not wanted <= before:  # also when it is told again after a gap
                world.score.rises += 1
                world.score.late += got < could
        before = wanted
    return world


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was saved and what came late."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="recording gpu-demand-helios-earth")
    parser.add_argument("--learn-days", type=float, default=7.0, help="first days, which are not scored")
    parser.add_argument("--days", type=float, default=31.0)
    parser.add_argument("--late-pu", type=float, default=5e-4)
    parser.add_argument("--whole", action="store_true", help="tick the whole engine, and tell of alarms")
    given = parser.parse_args(arguments)
    demand = recorded_demand(given.folder)[: round(given.days * 1440)]
    world = played(demand, round(given.learn_days * 1440), whole=given.whole, late_pu=given.late_pu)
    score = world.score
    print(f"simulated: {len(demand) / 1440:.0f} days, the first {given.learn_days:.0f} to learn from")
    print(f"energy of idle nodes saved: {score.saved_pu:.1%} of {score.idle_j / 3.6e6:,.0f} kWh")
    print(f"rises of demand granted at once: {score.in_time_pu:.3%} ({score.late} of {score.rises} late, "
          f"{score.waited_gpu_min:.0f} GPU-minutes)")  # fmt: skip
    print(f"starts: {score.starts}; a feed that carries all: at most {score.worst_pu:.1%} of its budget")
    if given.whole:
        print(f"alarms: {', '.join(sorted(score.alarms)) or 'none'}")
    kept = {name: float(world.memory[name][0]) for name in ("late", "counted", "saved_j", "expected_j")}
    print(f"the policy's own account: {kept['late']:.0f} late of {kept['counted']:.0f}, saved "
          f"{kept['saved_j'] / 3.6e6:,.0f} kWh, expected {kept['expected_j'] / 3.6e6:,.0f} kWh")  # fmt: skip


if __name__ == "__main__":
    main()
