"""The scoreboard of the estimator: expectations beside a plant's truth.

A plant with hidden parameters runs for an hour per seed; from its twenty-fifth minute on, a third of its GPUs
is capped. Each column of the board scores one figure per run; shown are its mean, spread and worst over the
seeds. Further columns join `COLUMNS`, what they need of each tick joins `TAPS`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.table import Table

from twin.catalogue import F64, Bool
from twin.config import spec_of
from twin.contracts import Columns, Memory, Proposal, View
from twin.engine import Engine
from twin.plant import Plant, Scenario
from twin.simulation import Simulation
from twin.site import Site, build_site

WARM_S = 600  # from here on it is scored
CAPPED_FROM_S = 1500
CAP_PU = 0.65  # of the highest power
MOVING_PU, MOVING_S = 0.02, 10  # a power that steps by this share is in transition, for so long
FIRST_SEED = 7000  # of development; `make bench` scores others


def liquid_site() -> dict[str, Any]:
    """Four racks of 72 GPUs on two CDUs and a loop, feeds A and B."""
    racks = "r[1-4]"
    return {
        "site": "lab",
        "loops": [{"name": "fws1", "cooling": "dry_cooler"}],
        "halls": [{
            "name": "h",
            "racks": [{"name": racks, "profile": "gb200-nvl72"}],
            "cdus": [{"name": "cdu1", "serves": ["r1", "r2"], "loop": "fws1"},
                     {"name": "cdu2", "serves": ["r3", "r4"], "loop": "fws1"}],
            "feeders": [{"name": "a", "side": "A", "budget_w": 700_000, "serves": [racks]},
                        {"name": "b", "side": "B", "budget_w": 700_000, "serves": [racks]}],
        }],
    }  # fmt: skip


def air_site() -> dict[str, Any]:
    """Two racks of four air-cooled nodes with eight GPUs each."""
    racks = "r[1-2]"
    return {
        "site": "lab",
        "halls": [{
            "name": "h",
            "racks": [{"name": racks, "profile": "hgx-h100", "nodes": 4}],
            "feeders": [{"name": "a", "side": "A", "budget_w": 120_000, "serves": [racks]}],
        }],
    }  # fmt: skip


SITES = {"liquid": liquid_site, "air": air_site}


def site_of(name: str) -> Site:
    """A site of the board with its packaged profiles."""
    return build_site(spec_of(SITES[name](), None, f"{name}.yaml"), f"{name}.yaml")


def expected(simulation: Simulation, name: str, n: int) -> F64:
    """Return the values that the twin expects now [n]; NaN if unknown."""
    residual = simulation.engine.estimator.residuals.get(name)
    return np.full(n, np.nan) if residual is None else residual.expected


def _true_psu(simulation: Simulation) -> F64:
    return np.asarray(simulation.plant.truth.node_psu_power_w[:, 0])


def _rack_reading(simulation: Simulation) -> F64:
    """Racks report late, so nobody could tell what is true of them now: what they said stands for it."""
    residual = simulation.engine.estimator.residuals.get("rack.power_w")
    n = simulation.site.sizes["rack"]
    return np.full(n, np.nan) if residual is None else residual.measured


# Per tick, what is true of a relation [n]
TAPS: dict[str, Callable[[Simulation], F64]] = {
    "gpu.power_w": lambda s: s.plant.truth.gpu_power_w,
    "gpu.temp_c": lambda s: s.plant.truth.gpu_temp_c,
    "node.power_w": lambda s: s.plant.truth.node_power_w,
    "node.psu1_power_w": _true_psu,
    "rack.power_w": _rack_reading,
    "rack.heat": lambda s: s.plant.truth.rack_return_c,
}


class CapThird:
    """A policy that caps every third GPU once its time has come: a cap is a regime of its own."""

    name: ClassVar[str] = "cap_third"
    controls: ClassVar[tuple[str, ...]] = ("gpu.power_cap_w",)
    rank: ClassVar[int] = 5
    period_s: ClassVar[float] = 0.0
    urgent: ClassVar[bool] = False
    memory: ClassVar[Columns | None] = None

    def __init__(self, cap_w: F64) -> None:
        self.cap_w, self.index = cap_w[::3], np.arange(0, len(cap_w), 3, dtype=np.int32)
        self.on = False

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """The cap, while it is on."""
        if not self.on:
            return [], memory
        low = np.zeros(len(self.index))
        return [Proposal(self.controls[0], self.index, low, self.cap_w, self.cap_w, "a bench")], memory


@dataclass
class Run:
    """One plant's hour: per relation what was expected and what was true, [ticks, n] from `WARM_S` on."""

    site: str
    simulation: Simulation
    expected: dict[str, F64] = field(default_factory=dict)
    true: dict[str, F64] = field(default_factory=dict)
    moving: Bool = field(default_factory=lambda: np.zeros((0, 0), np.bool_))  # of GPUs
    far: float = np.nan  # share of GPU residuals beyond four sigmas
    per_s: float = np.nan  # simulated seconds per second, measuring included

    def share_off(self, name: str, where: Bool | None = None) -> float:
        """Mean absolute error of a relation over the truth, of cells of `where`; NaN if none."""
        expected, true = self.expected[name], self.true[name]
        off: F64 = np.abs(expected - true) / np.maximum(true, 1.0)
        known = np.isfinite(off) if where is None else np.isfinite(off) & where
        return float(off[known].mean()) if known.any() else np.nan

    def off(self, name: str) -> F64:
        """Errors of a relation that are known, flat."""
        off = self.expected[name] - self.true[name]
        return off[np.isfinite(off)]


def measure(site_name: str, seed: int, seconds: int = 3600) -> Run:
    """Run a plant and its twin, and record."""
    site = site_of(site_name)
    policy = CapThird(CAP_PU * site.design.gpu_max_w[site.rack_of_gpu])
    engine = Engine(site, [policy], [], {policy.name: "act"})
    simulation = Simulation.of(engine, seed=seed, scenario=Scenario("bench", seed))
    run = Run(site_name, simulation)
    seen: dict[str, tuple[list[F64], list[F64]]] = {name: ([], []) for name in TAPS}
    far, counted = 0, 0
    begun = time.perf_counter()
    for second in range(seconds):
        policy.on = second >= CAPPED_FROM_S
        simulation.step()
        if second < WARM_S:
            continue
        for name, tap in TAPS.items():
            true = tap(simulation).copy()
            seen[name][0].append(expected(simulation, name, len(true)).astype(np.float32))
            seen[name][1].append(true)
        for name in ("gpu.power_w", "gpu.temp_c"):
            residual = simulation.engine.estimator.residuals.get(name)
            if residual is not None:
                z = np.abs(residual.difference) / residual.sigma
                far, counted = far + int((z > 4.0).sum()), counted + int(np.isfinite(z).sum())
    run.per_s = seconds / (time.perf_counter() - begun)
    run.expected = {k: np.array(v[0], np.float64) for k, v in seen.items()}
    run.true = {k: np.array(v[1]) for k, v in seen.items()}
    run.far = far / counted if counted else np.nan
    power = run.true["gpu.power_w"]
    step = np.abs(np.diff(power, axis=0, prepend=power[:1])) > MOVING_PU * power.max(initial=1.0)
    run.moving = step.copy()
    for late in range(1, MOVING_S):
        run.moving[late:] |= step[:-late]
    return run


def _resistance(run: Run) -> F64:
    """Relative errors of the learned resistance over supply, at the flow that there is [n_gpu]."""
    found = _parameter(run, "gpu.resistance")
    plant, site = run.simulation.plant, run.simulation.site
    assert isinstance(plant, Plant)
    p = plant.parameters
    true = p.gpu_conduction_k_per_w + p.gpu_convection_k_per_w
    if run.site == "air":  # there is no nominal flow of air that anybody states: at that of now
        estimator = getattr(run.simulation.engine.estimator, "gpus", None)
        if estimator is None:
            return np.full(len(true), np.nan)
        found = found * estimator.temp.trays.spread(estimator.temp.node_factor)
        true = plant.compute.resistance
    else:
        place = np.arange(len(true)) - site.gpu_start_of_node[site.node_of_gpu]
        later = place >= np.diff(site.gpu_start_of_node)[site.node_of_gpu] // 2
        true = true + np.where(later, p.rack_upstream_k_per_w[site.rack_of_gpu], 0.0)
    return np.asarray(found / true - 1.0, np.float64)


def _parameter(run: Run, name: str) -> F64:
    parameters = getattr(run.simulation.engine.estimator, "parameters", {})
    found = parameters.get(name)
    return (
        np.full(run.simulation.site.sizes[name.partition(".")[0]], np.nan) if found is None else found.value
    )


def _root_mean_square(values: F64) -> float:
    return float(np.sqrt((values**2).mean())) if len(values) else np.nan


def _percentile(values: F64, q: float) -> float:
    known = np.abs(values[np.isfinite(values)])
    return float(np.percentile(known, q)) if len(known) else np.nan


def _capped(run: Run) -> Bool:
    out = np.zeros(run.moving.shape, np.bool_)
    cap_w = run.simulation.plant.truth.gpu_cap_w
    out[CAPPED_FROM_S - WARM_S + 60 :, cap_w < 0.9 * cap_w.max()] = True
    return out


@dataclass(frozen=True)
class Column:
    """A figure of the board: `goal` is the most that it should be, NaN where there is none."""

    name: str
    unit: str
    goal: float
    score: Callable[[Run], float]
    scale: float = 1.0


COLUMNS: list[Column] = [
    Column("gpu power, steady", "%", 2.0, lambda r: r.share_off("gpu.power_w", ~r.moving), 100.0),
    Column("gpu power, transient", "%", 4.0, lambda r: r.share_off("gpu.power_w", r.moving), 100.0),
    Column("gpu power, capped third", "%", 4.0, lambda r: r.share_off("gpu.power_w", _capped(r)), 100.0),
    Column("gpu temp, rms", "K", 1.5, lambda r: _root_mean_square(r.off("gpu.temp_c"))),
    Column("gpu temp, p95", "K", np.nan, lambda r: _percentile(r.off("gpu.temp_c"), 95)),
    Column("gpu resistance, median", "%", 10.0, lambda r: _percentile(_resistance(r), 50), 100.0),
    Column("gpu resistance, p95", "%", 10.0, lambda r: _percentile(_resistance(r), 95), 100.0),
    Column("gpu beyond 4 sigma", "%", 0.1, lambda r: r.far, 100.0),
    Column("node power", "%", 2.0, lambda r: r.share_off("node.power_w"), 100.0),
    Column("node supply A", "%", 2.0, lambda r: r.share_off("node.psu1_power_w"), 100.0),
    Column("rack power", "%", 2.0, lambda r: r.share_off("rack.power_w"), 100.0),
    Column("rack return, rms", "K", 1.0, lambda r: _root_mean_square(r.off("rack.heat"))),
    Column("seconds simulated per second", "1", np.nan, lambda r: r.per_s),
]


def scores(site_name: str, seed: int, seconds: int) -> dict[str, float]:
    """Every column of one run."""
    run = measure(site_name, seed, seconds)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {c.name: c.scale * c.score(run) for c in COLUMNS}


def summary(found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Per column mean, spread (1 sigma) and worst over runs; NaN where no run had it."""
    out: dict[str, dict[str, float]] = {}
    for c in COLUMNS:
        values = np.array([f[c.name] for f in found])
        values = values[np.isfinite(values)]
        some = len(values) > 0
        out[c.name] = {"mean": float(values.mean()) if some else np.nan,
                       "spread": float(values.std()) if some else np.nan,
                       "worst": float(values.max()) if some else np.nan}  # fmt: skip
    return out


def main() -> None:
    """Print the board, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="seed of the first run")
    parser.add_argument("--site", choices=[*SITES, "all"], default="all")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.seconds < CAPPED_FROM_S + 120:
        parser.error(f"--seconds: expected at least {CAPPED_FROM_S + 120}, got {given.seconds}")
    boards: dict[str, dict[str, dict[str, float]]] = {}
    for site in SITES if given.site == "all" else [given.site]:
        runs = [scores(site, given.first + i, given.seconds) for i in range(given.seeds)]
        boards[site] = summary(runs)
    if given.json:
        told = json.loads(json.dumps(boards), parse_constant=lambda _: None)  # NaN is no JSON
        print(json.dumps({"seeds": given.seeds, "seconds": given.seconds, "sites": told}, indent=1))
        return
    for site, board in boards.items():
        table = Table(title=f"{site}, {given.seeds} seeds")
        for head in ("figure", "unit", "goal", "mean", "spread", "worst"):
            table.add_column(head)
        for c in COLUMNS:
            row = board[c.name]
            cells = [f"{row[k]:.3g}" for k in ("mean", "spread", "worst")]
            table.add_row(c.name, c.unit, "" if np.isnan(c.goal) else f"<= {c.goal:g}", *cells)
        Console().print(table)


if __name__ == "__main__":
    main()
