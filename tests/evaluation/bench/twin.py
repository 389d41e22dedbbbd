"""The part of the benchmark that asks whether the twin is right, and how fast a site is simulated.

Runs `bench_plant`, `bench_estimate` and `bench_diagnosis` in processes of their own and takes their figures
over under `plant.`, `estimate.` and `diagnosis.`. All of it is simulated: the plants hide their parameters
from the twin, and the faults are drawn from ranges that were not used while it was developed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tests.evaluation.bench import plant
from tests.evaluation.harness import run_python

Figures = dict[str, float | int | str]
# (key, whether more is better, bound), from the requirements of the project
GOALS: tuple[tuple[str, bool, float], ...] = (
    *((f"plant.{key}", True, bound) for key, bound in plant.GOALS),
    *(
        (f"estimate.sites.{site}.{name}.mean", False, bound)
        for site in ("liquid", "air")
        for name, bound in (
            ("gpu_power_steady", 2.0),
            ("gpu_power_transient", 4.0),
            ("gpu_temp_rms", 1.5),
            ("gpu_resistance_p95", 10.0),
        )
    ),
    ("diagnosis.single_right_entity_pu", True, 0.95),
    ("diagnosis.single_right_class_pu", True, 0.90),
    ("diagnosis.both_named_pu", True, 0.95),
    ("diagnosis.false_per_1000_rack_hours", False, 1.0),
    ("diagnosis.by_kind.branch_blocked.delay_p50_s", False, 5.0),
)
HOURS = 24.0  # simulated for the peak memory
FIRST_SEED = 9000  # of the estimates; nothing was developed on these and those that follow
SEEDS, SINGLES, PAIRS, HEALTHY_RACK_HOURS = 20, 500, 100, 1000.0


def measure_twin(quick: bool, scratch: Path, say: Callable[[str], None]) -> Figures:
    """Figures of all three. Raises CalledProcessError if one fails."""
    found: Figures = {}
    say("plant: simulated seconds per second")
    command = ["tests.evaluation.bench.plant"]
    command += ["--sizes", "n576", "--steps", "20"] if quick else ["--hours", f"{HOURS:g}"]
    found |= _flat("plant", msgspec.json.decode(_output(command)))
    seeds, seconds = (1, 2400) if quick else (SEEDS, 3600)
    say(f"estimates: {seeds} seeds of {seconds} s")
    command = ["tests.evaluation.bench.estimate", "--json", "--seeds", str(seeds), "--seconds", str(seconds)]
    command += ["--first", str(FIRST_SEED)]
    found |= _flat("estimate", msgspec.json.decode(_output(command)))
    singles, pairs, hours = (4, 1, 2.0) if quick else (SINGLES, PAIRS, HEALTHY_RACK_HOURS)
    say(f"diagnosis: {singles} single and {pairs} double faults, {hours:g} rack-hours of health")
    out = scratch / "diagnosis.json"
    command = ["tests.evaluation.bench.diagnosis", "--ranges", "held_out"]
    command += ["--jobs", str(min(2, os.cpu_count() or 1))]
    command += ["--singles", str(singles), "--pairs", str(pairs), "--healthy-hours", f"{hours:g}"]
    _output([*command, "--out", str(out)], shown=True)
    return found | _flat("diagnosis", msgspec.json.decode(out.read_bytes())["summary"])


def _output(module: list[str], shown: bool = False) -> bytes:
    """Run a module and return its output, `shown` as it came as well."""
    output = run_python(["-m", *module])
    if shown:
        sys.stderr.write(output.decode())
    return output


def _flat(prefix: str, tree: Mapping[str, Any]) -> Figures:
    """Leaves of a tree under their path; what is no number or text is left out."""
    out: Figures = {}
    for key, value in tree.items():
        name = f"{prefix}.{str(key).replace(' ', '_').replace(',', '')}"
        if isinstance(value, dict):
            out |= _flat(name, value)
        elif isinstance(value, float | int | str) and not isinstance(value, bool):
            out[name] = value
    return out


def show(found: Figures, out: Console) -> None:
    """The figures as tables: speed by size, score by figure."""
    speed = Table(title="simulated seconds per second (one core)")
    sizes = [s for s in plant.SIZES if f"plant.{s}.truth_x_real_time" in found]
    speed.add_column("")
    for size in sizes:
        speed.add_column(size, justify="right")
    for mode in plant.MODES:
        cells = [found.get(f"plant.{size}.{mode}_x_real_time") for size in sizes]
        speed.add_row(mode, *[f"{c:,.0f}" if isinstance(c, float | int) else "-" for c in cells])
    if sizes:
        out.print(speed)
    means = [k for k in found if k.startswith("estimate.sites.") and k.endswith(".mean")]
    score = Table(title=f"expected against truth, {found.get('estimate.seeds', 0)} seeds (simulated)")
    for head in ("", "mean", "spread", "worst"):
        score.add_column(head, justify="left" if not head else "right")
    for key in means:
        stem = key.removesuffix(".mean")
        cells = [found.get(f"{stem}.{end}") for end in ("mean", "spread", "worst")]
        score.add_row(stem.removeprefix("estimate.sites."),
                      *[f"{c:.3g}" if isinstance(c, float | int) else "-" for c in cells])  # fmt: skip
    if means:
        out.print(score)
