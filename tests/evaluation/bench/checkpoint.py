"""The part of the benchmark that asks what it costs to plan the checkpoints of many jobs.

Made-up jobs, half with a memory tier, most with a rate of failures that is only believed; beside the plan
another search for the same intervals, the golden section, where it applies. In a process of its own with one
thread; figures come under `checkpoint.n10k.`, quick ones of a few jobs under `checkpoint.quick.`, so that no
goal is judged by them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from policies.checkpointing import IntervalPlan, SaveTerms, best_plan, ettr_at
from tests.evaluation.harness import (
    Figures,
    answer_parent,
    ask_child,
    cell,
    part_of,
    percentiles,
    table,
    timed_ms,
)
from tests.support.believed_rates import best_believed
from twin.catalogue import F64

JOBS, ROUNDS = 10_000, 60
# (key, whether more is better, bound), from the requirements of the project
GOALS: tuple[tuple[str, bool, float], ...] = (("checkpoint.n10k.plan_ms_p50", False, 100.0),)
ROWS = (
    ("plan all", "plan_ms"),
    ("  the same in processor time", "plan_cpu_ms"),
    ("what three fixed intervals are worth", "ettr_at_ms"),
    ("one tier alone: plan", "one_tier_ms"),
    ("  the golden section, as good", "golden_ms"),
)


class CheckpointLoad(msgspec.Struct, frozen=True):
    """The numbers of jobs and of repetitions."""

    jobs: int
    rounds: int


def jobs(count: int, seed: int = 9) -> SaveTerms:
    """Made-up jobs: saves of 1-600 s, MTTF from 1 h to 4 months, flushes as long. source: estimate"""
    rng = np.random.default_rng(seed)

    def drawn(low: float, high: float) -> F64:
        return np.asarray(np.exp(rng.uniform(np.log(low), np.log(high), count)))

    tiered = rng.random(count) < 0.5
    shape = np.where(rng.random(count) < 0.1, np.inf, drawn(0.5, 500.0))
    local_block = np.where(tiered, drawn(0.1, 20.0), np.nan)
    local_restart = np.where(tiered, drawn(5.0, 300.0), np.nan)
    hard, soft = 1.0 / drawn(3600.0, 1e7), 1.0 / drawn(3600.0, 1e7)
    return SaveTerms(
        drawn(1.0, 600.0),
        drawn(1.0, 600.0),
        drawn(30.0, 1800.0),
        local_block,
        local_restart,
        shape,
        hard,
        soft,
    )


def measured(task: CheckpointLoad) -> dict[str, float | int]:
    """Figures of a task: times in ms, and how much ETTR the plan leaves to the golden section."""
    x = jobs(task.jobs)
    one = x._replace(local_block_s=np.full(task.jobs, np.nan), soft_per_s=np.zeros(task.jobs))
    few = max(1, task.rounds // 10)
    times: dict[str, F64] = {}
    times["plan_ms"], times["plan_cpu_ms"] = timed_ms(lambda: best_plan(x), task.rounds)
    times["ettr_at_ms"], _ = timed_ms(lambda: [ettr_at(x, s) for s in (1800.0, 3600.0, 7200.0)], task.rounds)
    times["one_tier_ms"], _ = timed_ms(lambda: best_plan(one), task.rounds)
    rival = (one.block_s, one.restart_s, one.hard_shape, one.hard_per_s, one.flush_s)
    times["golden_ms"], _ = timed_ms(lambda: best_believed(*rival), few)
    found: IntervalPlan = best_plan(one)
    out: dict[str, float | int] = {
        "jobs": task.jobs,
        "ettr_left_to_golden_max": float(np.max(best_believed(*rival)[1] - found.ettr)),
    }
    for name, t in times.items():
        out |= percentiles(name, t)
    return out


def measure_checkpoint(quick: bool, _: Path, say: Callable[[str], None]) -> Figures:
    """Figures of the plan, from a process of its own. Raises CalledProcessError if it fails."""
    task = CheckpointLoad(200, 3) if quick else CheckpointLoad(JOBS, ROUNDS)
    say(f"checkpoint: {task.jobs:,} jobs are planned {task.rounds} times")
    prefix = f"checkpoint.{'quick' if quick else 'n10k'}."
    return ask_child("tests.evaluation.bench.checkpoint", task, prefix)


def show(found: Figures, out: Console) -> None:
    """The table of this part."""
    mine = part_of(found, ("checkpoint.n10k.", "checkpoint.quick."), "jobs")
    if not mine:
        return
    title = f"Checkpoints of {mine['jobs']:,} made-up jobs; times as p50 / p99 / max"
    out.print(table(title, ("", "ms"), [(row, cell(mine, key)) for row, key in ROWS]))
    left = mine["ettr_left_to_golden_max"]
    out.print(f"The golden section finds at most {left:.1g} more ETTR.", markup=False, soft_wrap=True)


if __name__ == "__main__":
    answer_parent(CheckpointLoad, measured)
