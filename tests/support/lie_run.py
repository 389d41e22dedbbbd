"""Runs of a simulated site some of whose wires lie while all policies act: what was commanded, what it cost,
and what people were told. One site is learned, and each run is a fork of it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from policies import REGISTRY
from tests.sim.test_power_story import SITE
from tests.support.builders import site_of
from tests.support.late_messages import LateMessages
from tests.support.lie_cells import BEGIN_S, PAST_S, Cell, entities_of, lies_of, own_gpus, tables_of
from tests.support.lying_sensors import LyingSensors
from twin.catalogue import F32, F64, find_signal
from twin.engine import Engine
from twin.physics import performance_pu
from twin.plant import Plant, Sensors
from twin.simulation import Simulation
from twin.site import Site

POLICIES = ("thermal_guard", "power_guard", "power_cap", "leak_guard", "cooling_setpoint")
CAP = "gpu.power_cap_w"
LEARNED_S, LIVED_S = 600, 80
PARTS = (1.0, 0.9, 0.7)  # activity of SMs, tensor cores, memory
MEAN_PU, SWING_PU, SWING_S = 0.6, 0.12, 45.0
RISE_PU, RISE_S = 0.3, (35.0, 55.0)  # of all, since the run began
COMPUTE_SHARE_PU = 0.8  # of a kernel's time, which waits for the clock; source: estimate
DISPLACED_PU = 0.02


class SwingingLoad:
    """Activity of all GPUs: each rack swings by itself, and all rise for a while after `begun_s`."""

    def __init__(self, site: Site) -> None:
        rng = np.random.default_rng(11)
        self.site, self.begun_s = site, np.inf
        self._phase = rng.uniform(0.0, 2.0 * np.pi, site.sizes["rack"])
        self._of_gpu = rng.uniform(0.95, 1.05, site.sizes["gpu"])

    def set(self, plant: Plant) -> None:
        """Set the activities of now."""
        t = plant.truth
        level = MEAN_PU + SWING_PU * np.sin(2.0 * np.pi * t.time_s / SWING_S + self._phase)
        since_s = t.time_s - self.begun_s
        if RISE_S[0] <= since_s < RISE_S[1]:
            level = level + RISE_PU
        of_gpu = np.clip(level[self.site.rack_of_gpu] * self._of_gpu, 0.0, 1.0)
        for column, part in zip((t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu), PARTS, strict=True):
            column[:] = part * of_gpu


@dataclass
class Learned:
    """A site that has learned, what it measures, and what was read in the last `PAST_S` before."""

    simulation: Simulation
    load: SwingingLoad
    past: list[dict[str, F32 | F64]]

    @property
    def measured(self) -> tuple[str, ...]:
        """Keys of all that is measured and moves, or is a state."""
        return tuple(sorted(self.past[0]))


@cache
def learned() -> Learned:
    """The site of the power story under a load that swings, after ten minutes."""
    site = site_of(SITE)
    engine = Engine(site, [REGISTRY[name]() for name in POLICIES], [], dict.fromkeys(POLICIES, "act"))
    plant, load = Plant(site, seed=3), SwingingLoad(site)
    load.set(plant)
    plant.settle()
    simulation = Simulation(engine, plant, Sensors(site, 3))
    last: dict[str, F32 | F64] = {}
    past: deque[dict[str, F32 | F64]] = deque(maxlen=PAST_S)
    for _ in range(LEARNED_S):
        load.set(plant)
        simulation.step()
        for report in simulation.observation.reports:
            for row, name in enumerate(report.signals):
                last[f"{report.table}.{name}"] = report.values[row].copy()
            for row, name in enumerate(report.counters):
                last[f"{report.table}.{name}"] = report.counts[row].astype(np.float64)
        past.append(dict(last))
    return Learned(simulation, load, list(past))


@dataclass
class Outcome:
    """Of one run. `work` [n_gpu]: GPU-seconds at the highest clock. `caps` [second, n_gpu] W: in force by the
    arbiter. `hottest_c` [second]. `said`: finding or line -> (second, entities, severity)."""

    work: F64
    caps: F64
    hottest_c: F64
    commands: dict[str, int] = field(default_factory=dict)
    tripped: int = 0
    off: int = 0
    said: dict[str, tuple[int, tuple[str, ...], str]] = field(default_factory=dict)


def outcome(*cells: Cell) -> Outcome:
    """Live on for a while with the lies of these cells; at most one of time."""
    known = learned()
    simulation, load = known.simulation.fork(), copy.copy(known.load)
    load.begun_s = simulation.plant.truth.time_s
    lies = [lie for cell in cells if not cell.of_time
            for lie in lies_of(cell, simulation.site, known.measured, known.past)]  # fmt: skip
    simulation.sensors = LyingSensors(simulation.sensors, *lies)  # type: ignore[assignment]
    timely = [cell for cell in cells if cell.of_time]
    sources = LateMessages(simulation, timely[0]) if timely else None
    if sources is not None:
        simulation.inbox = sources  # type: ignore[assignment]
    return _lived(simulation, load.set, sources)


def _lived(simulation: Simulation, load: Callable[[Plant], None], sources: LateMessages | None) -> Outcome:
    plant, n = simulation.plant, simulation.site.sizes["gpu"]
    out = Outcome(np.zeros(n), np.zeros((LIVED_S, n)), np.zeros(LIVED_S))
    t, burnt = plant.truth, np.zeros(n, np.bool_)
    off, tripped = np.zeros(len(t.node_on), np.bool_), np.zeros(len(t.feeder_tripped), np.bool_)

    class Count:
        def observe(self, engine: Engine, frame: object, decision: object) -> None:
            for batch in decision.commands:  # type: ignore[attr-defined]
                out.commands[batch.control] = out.commands.get(batch.control, 0) + len(batch.index)

    simulation.observers = (Count(),)
    for second in range(LIVED_S):
        load(plant)
        simulation.step()
        clock = np.maximum(t.gpu_clock_pu, 0.01)
        out.work += np.where(t.gpu_alive, t.gpu_sm_pu * performance_pu(clock, COMPUTE_SHARE_PU), 0.0)
        out.caps[second] = simulation.engine.arbiter.leases[CAP].value
        out.hottest_c[second] = t.gpu_temp_c[t.gpu_alive].max(initial=0.0)
        burnt |= plant.compute.burnt
        off |= ~t.node_on
        tripped |= t.feeder_tripped
        _hear(simulation, sources, second - BEGIN_S, out.said)
    out.tripped = int(burnt.sum() + tripped.sum())
    out.off = int(off.sum())
    return out


def _hear(
    simulation: Simulation,
    sources: LateMessages | None,
    second: int,
    said: dict[str, tuple[int, tuple[str, ...], str]],
) -> None:
    """Take down what people are told for the first time."""
    for key, finding in simulation.engine.findings.active.items():
        if key not in said:
            said[key] = second, finding.entities, finding.severity
    for signal, entity, *_ in simulation.inbox.absurd:
        name = simulation.site.name(signal.table, entity)
        said.setdefault(f"range/{signal.key}", (second, (name,), "info"))
    for line in sources.told(simulation.now_ns) if sources is not None else ():
        who, _, what = line.partition(": ")
        said.setdefault(f"source/{line if len(line) < 60 else who}", (second, (who,), what[:40]))


@cache
def honest(through_sources: bool = False) -> Outcome:
    """The run without any lie."""
    return outcome(Cell("time.*", "", "")) if through_sources else outcome()


class Row(NamedTuple):
    """A line of the table. Lost work in %, of those to whom no lying sensor belongs and of the others;
    displaced: the longest time for which caps were not as without the lie, of the same two."""

    cells: str
    commands: int
    others: str
    lost_pct: float
    own_lost_pct: float
    displaced_s: int
    own_displaced_s: int
    tripped: int
    off: int
    hotter_k: float
    named_s: int | None
    named_by: str
    wrong_alarms: int


def row_of(*cells: Cell) -> Row:
    """Live through these lies, and compare with the run without."""
    site = learned().simulation.site
    found, usual = outcome(*cells), honest(any(cell.of_time for cell in cells))
    own = np.zeros(site.sizes["gpu"], np.bool_)
    liars = set[str]()
    for cell in cells:
        own |= own_gpus(site, cell)
        liars |= _names(site, cell)
    away = np.abs(np.nan_to_num(found.caps, nan=1e9) - np.nan_to_num(usual.caps, nan=1e9))
    displaced = away > DISPLACED_PU * np.nan_to_num(usual.caps, nan=1e9)
    second, by, wrong = _named(site, cells, liars, found, usual)
    every = set(found.commands) | set(usual.commands)
    more = {c: found.commands.get(c, 0) - usual.commands.get(c, 0) for c in sorted(every)}
    return Row(
        " + ".join(cell.key for cell in cells),
        more.pop(CAP, 0),
        " ".join(f"{control}:{n:+d}" for control, n in more.items() if n),
        _lost_pct(found.work, usual.work, ~own),
        _lost_pct(found.work, usual.work, own),
        _longest(displaced[:, ~own]),
        _longest(displaced[:, own]),
        found.tripped - usual.tripped,
        found.off - usual.off,
        round(float((found.hottest_c - usual.hottest_c)[BEGIN_S:].max()), 1),
        second,
        by,
        wrong,
    )


def _names(site: Site, cell: Cell) -> set[str]:
    """Names of the entities that lie, and of their sources."""
    tables = tables_of(cell)
    out = {site.name(table, i) for table in tables for i in entities_of(site, table, cell)}
    if cell.of_time:
        out |= {f"agent {name}" for name in out} | ({"bms"} if "rack" in tables else set())
    return out


def _named(
    site: Site, cells: Sequence[Cell], liars: set[str], found: Outcome, usual: Outcome
) -> tuple[int | None, str, int]:
    """(seconds until a liar was named, by what, alarms of warning and above that name none of them)."""
    new = {key: what for key, what in found.said.items() if key not in usual.said}
    right = [(what[0], key) for key, what in new.items() if liars & set(what[1])]
    wrong = sum(what[2] in ("warning", "critical") and not liars & set(what[1]) for what in new.values())
    if not right:
        return None, "", wrong
    second, key = min(right)
    parts = key.split("/")
    return second, parts[0] if parts[0] in ("source", "silence") else "/".join(parts[:2]), wrong


def _lost_pct(work: F64, usual: F64, of: np.ndarray) -> float:
    whole = float(usual[of].sum())
    return round(100.0 * (1.0 - float(work[of].sum()) / whole), 2) if whole else 0.0


def _longest(displaced: np.ndarray) -> int:
    """Longest run of seconds in which a cap is displaced, of the worst GPU."""
    run, most = np.zeros(displaced.shape[1], np.int64), 0
    for now in displaced:
        run = np.where(now, run + 1, 0)
        most = max(most, int(run.max(initial=0)))
    return most


def moves(key: str) -> bool:
    """Return True for a gauge, a state and the energy counter: other counters stand at zero here."""
    signal = find_signal(key)
    return signal is not None and (signal.kind != "counter" or signal.name == "energy_mj")
