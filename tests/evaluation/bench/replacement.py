"""The part of the benchmark that asks what withdrawing nodes costs and is worth.

A thousand nodes that are flagged in one minute are triaged by the policy itself; and a stated subset of the
simulated quarter (two seeds of a month, 6.5 failures per 1000 node-days) is lived by every arm. In a process
of its own with one thread; figures come under `replacement.n1k.`, quick ones under `replacement.quick.`, so
that no goal is judged by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from tests.evaluation.harness import (
    Figures,
    answer_parent,
    ask_child,
    cell,
    part_of,
    percentiles,
    short,
    table,
)
from twin.catalogue import NS

ROUNDS, FLAGGED = 12, 1000
SEEDS, DAYS, WARM_DAYS = (100, 101), 30.0, 14.0
# (key, whether more is better, bound), from the requirements of the project
GOALS: tuple[tuple[str, bool, float], ...] = (("replacement.n1k.triage_ms_max", False, 1000.0),)
ARM_ROWS = (
    ("GPU-hours that jobs lost", "lost_gpu_h"), ("interruptions", "interruptions"),
    ("false drains a node-month", "false_drains"), ("512+ GPU jobs that failed", "large_failed_pu"),
    ("goodput", "goodput_pu"),
)  # fmt: skip


class ReplacementLoad(msgspec.Struct, frozen=True):
    """Rounds of triage, and the simulated fleets: racks of each hall, days and seeds."""

    rounds: int
    flagged: int
    racks: int
    days: float
    warm_days: float
    seeds: tuple[int, ...]


def triage(task: ReplacementLoad) -> dict[str, float | int]:
    """Milliseconds of the policy's looks in the minutes after so many nodes are flagged at once."""
    from tests.evaluation.replacement.rivals import Ours
    from tests.evaluation.replacement.view import START_NS, FleetView, quarter_site
    from twin.telemetry import JobSlots, JobStarted

    wall = []
    for _ in range(task.rounds):
        site = quarter_site(racks=task.racks)
        n = site.sizes["node"]
        jobs = JobSlots(site.sizes["job"], n)
        for first in range(0, n - 32, 16):
            told = JobStarted(job=f"job{first}", nodes=(), kind="training", time_limit_s=86_400.0,
                              checkpoint_interval_s=1800.0, checkpoint_save_s=60.0,
                              checkpoint_restart_s=600.0)  # fmt: skip
            jobs.start(told, list(range(first, first + 16)), 0, START_NS)
        view = FleetView(site, jobs, dt_s=10.0)
        view.rows.begin(n - 1, START_NS)
        arm = Ours(view)
        for step in range(12):
            view.refresh(START_NS + (600 + 10 * step) * NS)
            if step == 3:
                flagged = min(task.flagged, n)
                view.told[:flagged] = True
                view.since_ns[:flagged] = view.now_ns
            begun = time.perf_counter()
            arm.decide(view)
            if step >= 3:
                wall.append(1e3 * (time.perf_counter() - begun))
    return {"flagged": min(task.flagged, n), **percentiles("triage_ms", wall)}


def measured(task: ReplacementLoad) -> dict[str, float | int]:
    """Figures of a task: the triage, then every arm's means over the seeds."""
    from tests.evaluation.replacement.fleet import MEASURED, SCENARIOS
    from tests.evaluation.replacement.scores import suite

    out = triage(task)
    told = suite([SCENARIOS["rate_6.5"]], [MEASURED], task.seeds, days=task.days, racks=task.racks,
                 warm_days=task.warm_days)  # fmt: skip
    part = told["fleets"][0]
    out |= {"nodes": part["nodes"], "days": task.days, "seeds": len(task.seeds)}
    for arm in part["arms"]:
        out |= {f"{arm['arm']}.{key}": float(arm[key]) for _, key in ARM_ROWS}
        out[f"{arm['arm']}.cpu_s"] = float(
            np.mean([r["cpu_s"] for r in part["rows"] if r["arm"] == arm["arm"]])
        )
        if "lost_gpu_h_of_oracle" in arm:
            out[f"{arm['arm']}.of_oracle"] = float(arm["lost_gpu_h_of_oracle"]["pu"])
    return out


def measure_replacement(quick: bool, _: Path, say: Callable[[str], None]) -> Figures:
    """Figures from a process of its own. Raises CalledProcessError if it fails."""
    task = (
        ReplacementLoad(1, 100, 2, 2.0, 1.0, (100,))
        if quick
        else ReplacementLoad(ROUNDS, FLAGGED, 32, DAYS, WARM_DAYS, SEEDS)
    )
    say(
        f"replacement: {task.flagged:,} nodes flagged at once; {len(task.seeds)} fleets of {task.days:g} days"
    )
    prefix = f"replacement.{'quick' if quick else 'n1k'}."
    return ask_child("tests.evaluation.bench.replacement", task, prefix)


def show(found: Figures, out: Console) -> None:
    """The table of this part."""
    mine = part_of(found, ("replacement.n1k.", "replacement.quick."), "flagged")
    if not mine:
        return
    arms = [k.removesuffix(".lost_gpu_h") for k in mine if k.endswith(".lost_gpu_h")]
    title = f"Simulated: {mine['nodes']:,} nodes, {mine['days']:g} days, {mine['seeds']} seeds"
    heads = ["", *(arm.replace("_", " ") for arm in arms)]
    rows = [
        (row, *(short(mine[f"{arm}.{key}"]) for arm in arms))
        for row, key in (*ARM_ROWS, ("processor time, s", "cpu_s"))
    ]
    out.print(table(title, heads, rows))
    times = cell(mine, "triage_ms")
    out.print(f"{mine['flagged']:,} flagged nodes are triaged in {times} ms (p50 / p99 / max of looks).",
              markup=False, soft_wrap=True)  # fmt: skip


if __name__ == "__main__":
    answer_parent(ReplacementLoad, measured)
