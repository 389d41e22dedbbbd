"""Speed of a plant: steps per second by size and by what looks on.

Each case runs in a process of its own with one thread, so that its peak memory is its own. `truth` is the
plant with its jobs, `constant` without any; `observed` adds the noisy sensors at every step; `engine` adds
the twin with a policy. What comes out is one flat JSON.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.evaluation.harness import run_python

MODES = ("constant", "truth", "observed", "engine")
# Passes are short, so that one that nobody disturbed is found even on a busy machine
WARM_STEPS, PASSES = 30, 100
SEED = 1


@dataclass(frozen=True, slots=True)
class Size:
    """A site of equal racks; `lump` GPUs are one. `cdu_racks` share a CDU."""

    racks: int
    nodes: int
    gpus_per_node: int
    cdu_racks: int
    lump: int = 1

    def tree(self) -> dict[str, Any]:
        """Its site file: CDUs and feeds A and B for each block of racks, and one tower."""
        blocks = [(i + 1, min(i + self.cdu_racks, self.racks)) for i in range(0, self.racks, self.cdu_racks)]
        names = [f"r[{first:04d}-{last:04d}]" for first, last in blocks]
        watt = self.cdu_racks * self.nodes * (self.gpus_per_node * self.lump * 1500.0 + 2000.0)
        feeders = [
            {"name": f"{side.lower()}{k}", "side": side, "budget_w": watt, "serves": [block]}
            for side in ("A", "B")
            for k, block in enumerate(names)
        ]
        hall = {
            "name": "h",
            "racks": [{"name": f"r[0001-{self.racks:04d}]", "profile": "gb200-nvl72", "nodes": self.nodes,
                       "gpus_per_node": self.gpus_per_node}],
            "cdus": [{"name": f"cdu{k}", "serves": [b], "loop": "tower"} for k, b in enumerate(names)],
            "feeders": feeders,
        }  # fmt: skip
        return {"site": "bench", "halls": [hall], "loops": [{"name": "tower", "cooling": "tower"}]}


SIZES: dict[str, Size] = {
    "n576": Size(8, 18, 4, 4),
    "n10k": Size(139, 18, 4, 4),
    # As many nodes, racks and CDUs as Frontier has
    "n9472_nodes": Size(74, 128, 1, 3, lump=4),
    "n37888": Size(74, 128, 4, 3),
}
# (key, bound): simulated seconds per second, from the requirements of the project
GOALS: tuple[tuple[str, float], ...] = (
    ("n9472_nodes.truth_x_real_time", 4000.0),
    ("n9472_nodes.observed_x_real_time", 1500.0),
    ("n9472_nodes.engine_x_real_time", 200.0),
    ("n37888.truth_x_real_time", 500.0),
)


def measured(size: Size, mode: str, steps: int, hours: float = 0.0) -> dict[str, float]:
    """One case, in this process: the best of several passes, and the mean of all."""
    step, plant = _stepper(size, mode)
    for _ in range(WARM_STEPS):
        step()
    best_s = best_cpu_s = float("inf")
    begun = time.perf_counter()
    for _ in range(PASSES):
        at, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        best_s = min(best_s, (time.perf_counter() - at) / steps)
        best_cpu_s = min(best_cpu_s, (time.process_time() - cpu) / steps)
    mean_s = (time.perf_counter() - begun) / (PASSES * steps)
    settled = _peak_bytes()
    for _ in range(round(hours * 3600.0)):
        step()
    return {
        "step_us": best_s * 1e6,
        "step_cpu_us": best_cpu_s * 1e6,  # what the processor gave; others may run beside
        "x_real_time": 1.0 / best_s,
        "mean_x_real_time": 1.0 / mean_s,
        "balance_error": max(plant.balances().values()),
        "peak_rss_bytes": float(_peak_bytes()),
        "grown_bytes": float(_peak_bytes() - settled),
    }


def _stepper(size: Size, mode: str) -> tuple[Any, Any]:
    """(what makes one step of a second, the plant)."""
    from twin.config import spec_of
    from twin.plant import Plant, Scenario
    from twin.site import build_site

    site = build_site(spec_of(size.tree(), None, "bench"), "bench")
    scenario = None if mode == "constant" else Scenario("bench", seed=SEED)
    if mode == "engine":
        from policies.thermal_guard import ThermalGuard
        from twin.engine import Engine
        from twin.simulation import Simulation

        run = Simulation.of(Engine(site, [ThermalGuard()], []), seed=SEED, scenario=scenario, lump=size.lump)
        return run.step, run.plant
    plant = Plant(site, SEED, scenario, lump=size.lump)
    if mode != "observed":
        return plant.step, plant
    from twin.plant import Sensors

    sensors = Sensors(site, SEED, lump=size.lump)

    def observed() -> None:
        plant.step()
        sensors.observe(plant.truth, plant.present, plant.now_ns, tuple(plant.events()))

    return observed, plant


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cases(sizes: list[str], modes: list[str], steps: int, hours: float) -> dict[str, float]:
    """All cases, each in a process of its own; keys are size.mode_figure."""
    out: dict[str, float] = {}
    for name in sizes:
        for mode in modes:
            arguments = ["-m", "tests.evaluation.bench.plant", "--child", "--sizes", name,
                       "--modes", mode, "--steps", str(steps), "--hours", str(hours)]  # fmt: skip
            found = msgspec.json.decode(run_python(arguments), type=dict[str, float])
            out |= {f"{name}.{mode}_{key}": value for key, value in found.items()}
    return out


def main(argv: list[str] | None = None) -> int:
    """Print the JSON; 1 if a goal that was measured is not met and `--judge` was given."""
    parser = argparse.ArgumentParser(prog="python -m tests.evaluation.bench.plant", description=__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=10, help="in each of 100 passes")
    parser.add_argument("--hours", type=float, default=0.0, help="simulated after that, for the peak memory")
    parser.add_argument("--judge", action="store_true", help="fail where a goal is missed")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    sizes, modes = given.sizes.split(","), given.modes.split(",")
    if given.child:
        found = measured(SIZES[sizes[0]], modes[0], given.steps, given.hours)
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return 0
    figures = cases(sizes, modes, given.steps, given.hours)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(figures)).decode() + "\n")
    missed = [key for key, bound in GOALS if figures.get(key, bound) < bound]
    for key in missed:
        sys.stderr.write(f"{key}: {figures[key]:.0f}, goal {dict(GOALS)[key]:.0f}\n")
    return 1 if missed and given.judge else 0


if __name__ == "__main__":
    sys.exit(main())
