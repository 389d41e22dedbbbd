"""Healthy racks: rack-time under load steps with both guards at `act`, and what they did in it without need.

Nothing leaks, nothing is blocked, no sensor lies. Caps are counted apart: they take nothing from service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies import REGISTRY
from tests.support.builders import spec_of
from tests.support.flow_loss_run import CAP, FULL_PU, POWER
from tests.support.flow_losses import DRAWS, RACKS
from tests.support.leak_run import LIQUID
from twin.catalogue import Bool
from twin.contracts import Decision
from twin.engine import Engine
from twin.plant import Plant, Sensors
from twin.run import Report
from twin.simulation import Simulation
from twin.site import Site, build_site
from twin.telemetry import Frame

GUARDS = ("thermal_guard", "leak_guard")
DAY_S = 86_400.0
STEP_S = (30, 600)  # between load steps of the racks of a CDU, which work on one job; source: estimate
WHOLE_PU = 0.1  # of the steps, which all of the site takes at once; source: estimate


@dataclass(frozen=True)
class HealthyRacks:
    """A site of so many racks for so many seconds, with a tick each `tick_s`."""

    profile: str
    seed: int
    racks: int
    seconds: int
    tick_s: int = 1

    def site(self) -> Site:
        """Four racks on each CDU."""
        racks = f"r[1-{self.racks}]"
        hall = {
            "name": "h",
            "racks": [{"name": racks, "profile": self.profile, "nodes_from": "bottom"}],
            "cdus": [{"name": f"cdu[1-{self.racks // RACKS}]", "serves": [racks], "loop": "fws0"}],
            "feeders": [{"name": "a", "side": "A", "budget_w": 3e5 * self.racks, "serves": [racks]}],
        }
        loop = {"name": "fws0", "cooling": "tower"}
        return build_site(spec_of({"site": "healthy", "halls": [hall], "loops": [loop]}), "healthy")


@dataclass(frozen=True)
class HealthyOutcome:
    """Rack-days, load steps of CDUs; racks isolated, nodes ordered off or to stop, GPUs capped, GPUs lost."""

    profile: str
    seed: int
    rack_days: float
    steps: int
    isolated: int
    ordered: int
    capped: int
    shut_down: int


class HealthyWatch:
    """Observer of a run: what the guards commanded [n]."""

    def __init__(self, plant: Plant) -> None:
        n = plant.site.sizes
        self.of: dict[str, Bool] = {
            key: np.zeros(n[key.partition(".")[0]], np.bool_) for key in (LIQUID, POWER, CAP)
        }

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Called after each tick."""
        for batch in decision.commands:
            if batch.control in self.of and not batch.final:
                moves = batch.value > 0 if batch.control != CAP else np.ones(len(batch.index), np.bool_)
                self.of[batch.control][batch.index[moves]] = True


def live_through_health(healthy: HealthyRacks, report: Report) -> HealthyOutcome:
    """The run to its end."""
    site = healthy.site()
    plant = Plant(site, seed=healthy.seed)
    engine = Engine(site, [REGISTRY[x]() for x in GUARDS], [], dict.fromkeys(GUARDS, "act"))
    simulation = Simulation(engine, plant, Sensors(site, healthy.seed), dt_s=float(healthy.tick_s))
    watch, t = HealthyWatch(plant), plant.truth
    simulation.observers = (watch,)
    rng, circuits = np.random.default_rng((healthy.seed, 0x4EA1)), site.sizes["cdu"]
    due_s, steps = rng.uniform(0.0, STEP_S[1], circuits), 0
    for second in range(0, healthy.seconds, healthy.tick_s):
        at = np.flatnonzero(due_s <= second)
        if len(at):
            at = np.arange(circuits) if rng.random() < WHOLE_PU / circuits else at
            due_s[at] = second + rng.uniform(*STEP_S, len(at))
            level, steps = rng.uniform(0.05, 1.0, len(at)), steps + len(at)
            for column, part in zip((t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu), FULL_PU, strict=True):
                column.reshape(circuits, -1)[at] = part * level[:, None]
        simulation.step()
        if second % 60 == 0:
            report(second / healthy.seconds, "healthy racks")
    return HealthyOutcome(
        profile=healthy.profile,
        seed=healthy.seed,
        rack_days=healthy.racks * healthy.seconds / DAY_S,
        steps=steps,
        isolated=int(watch.of[LIQUID].sum()),
        ordered=int(watch.of[POWER].sum()),
        capped=int(watch.of[CAP].sum()),
        shut_down=int(plant.compute.burnt.sum()),
    )


def healthy_of(draw: str, plants: int, racks: int, hours: float, tick_s: int) -> list[HealthyRacks]:
    """So many sites, in turn over the profiles."""
    chosen = DRAWS[draw]
    return [
        HealthyRacks(
            chosen.racks[k % len(chosen.racks)],
            chosen.first_seed + 900_000 + k,
            racks,
            round(3600 * hours),
            tick_s,
        )
        for k in range(plants)
    ]


def healthy_row(some: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over sites, and the upper 95 % end of isolations and orders in a rack-day: the rule of three for
    none, else by the variance-stabilising root of a Poisson count."""
    sums = {
        name: sum(x[name] for x in some)
        for name in ("rack_days", "steps", "isolated", "ordered", "capped", "shut_down")
    }
    wrong, days = sums["isolated"] + sums["ordered"], sums["rack_days"]
    most = 3.0 if wrong == 0 else (float(np.sqrt(wrong + 1.0)) + 0.98) ** 2
    return {"plants": len(some), **sums, "wrong_per_rack_day_at_most": most / days}
