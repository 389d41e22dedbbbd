"""Command `python -m tests.evaluation health`: scores failure forecasts of simulated fleets, goal by goal.

Draws fleets whose failures are known, lets the twin watch their sensors for months and scores its alarms.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError, clean, number
from twin.cli import write_json

# source: six weeks of scores behind three of learning; in 60 days of 504 nodes some 200 nodes fail
NODES, GPUS_PER_NODE, DAYS, TRAIN_DAYS, SEEDS, STRENGTH = 504, 4, 60.0, 20.0, 1, "1"
MOST_NODES, MOST_GPUS, MOST_DAYS, MOST_SEEDS, MOST_STRENGTHS = 20_000, 16, 400.0, 100, 8
MOST_STRENGTH = 10.0
LEAST_SCORED_D = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size, days and seeds of the fleets, the form of the output."""
    parser.add_argument("--nodes", type=int, default=NODES, metavar="N",
                        help=f"nodes of a fleet; whole racks of 18 (default: {NODES})")  # fmt: skip
    parser.add_argument("--gpus-per-node", type=int, default=GPUS_PER_NODE, metavar="G",
                        help=f"fewer are faster (default: {GPUS_PER_NODE})")  # fmt: skip
    parser.add_argument("--days", type=float, default=DAYS, metavar="D",
                        help=f"that each fleet lives (default: {DAYS:g})")  # fmt: skip
    parser.add_argument("--train-days", type=float, default=TRAIN_DAYS, metavar="T",
                        help=f"before anything is scored (default: {TRAIN_DAYS:g})")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="K",
                        help=f"fleets, each drawn anew (default: {SEEDS})")  # fmt: skip
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="of the first (default: 1)")
    parser.add_argument("--strength", default=STRENGTH, metavar="S,S,..",
                        help="of what shows before failures: 1 as in the table of classes, 0.5 half of it "
                             f"(default: {STRENGTH})")  # fmt: skip
    parser.add_argument("--healthy", action="store_true",
                        help="fleets of which nothing fails: every alarm is false")  # fmt: skip
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="processes side by side (default: as many as processors)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate, score, print. Raises ConfigError for what the operator can mend."""
    strengths = strengths_of(args.strength)
    _check(args)
    from tests.evaluation.health import run as fleets
    from tests.evaluation.health.scores import goals, scores
    from tests.evaluation.health.table import say
    from twin.run import ProgressBar

    seeds = range(args.first_seed, args.first_seed + args.seeds)
    tasks = [
        fleets.FleetRun(
            args.nodes, args.gpus_per_node, args.days, args.train_days, seed, strength, healthy=args.healthy
        )
        for strength in strengths
        for seed in seeds
    ]
    begun = time.monotonic()
    jobs = min(len(tasks), args.jobs or os.cpu_count() or 1)
    with ProgressBar(err, "simulated fleets") as bar:
        courses = fleets.run_tasks(tasks, jobs, bar.move)
    results = []
    for i, strength in enumerate(strengths):
        mine = courses[i * len(seeds) : (i + 1) * len(seeds)]
        told = scores(mine)
        results.append({"strength": strength, "goals": goals(told), **told})
    whole = {
        "simulated": True, "healthy": args.healthy,
        "racks": tasks[0].racks, "nodes": courses[0].n, "gpus": courses[0].gpus, "days": args.days,
        "train_days": args.train_days, "dt_s": tasks[0].dt_s, "seeds": list(seeds), "results": results,
        "models": courses[0].models, "suspended": sorted({s for c in courses for s in c.suspended}),
        "cost": cost_of(courses, jobs), "wall_s": round(time.monotonic() - begun, 3),
    }  # fmt: skip
    if args.json:
        write_json(whole, out)
    else:
        say(whole, out)
    return 0


def cost_of(courses: Sequence[Any], jobs: int) -> dict[str, Any]:
    """Milliseconds per tick by part, as means over the fleets, and how long a fleet took."""
    parts = {
        k: sum(c.cost_ms.get(k, 0.0) for c in courses) / len(courses) for c in courses for k in c.cost_ms
    }
    ticks = courses[0].ticks
    return {"ms_per_tick": parts, "ticks": ticks, "fleet_s": parts["whole"] * ticks / 1e3, "processes": jobs}


def strengths_of(text: str) -> tuple[float, ...]:
    """Strengths in the order given, each once. Raises ConfigError."""
    problems, out = [], dict[float, None]()
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0.0 <= value <= MOST_STRENGTH:
            problems.append(
                f"--strength {clean(word, 40) or '(nothing)'}: expected numbers such as 1 or 1,0.5, "
                f"0 to {MOST_STRENGTH:g}"
            )
        out[value] = None
    if len(out) > MOST_STRENGTHS:
        problems.append(f"--strength: expected at most {MOST_STRENGTHS}, got {len(out)}")
    if problems:
        raise ConfigError(problems)
    return tuple(out)


def _check(args: argparse.Namespace) -> None:
    problems = []
    for name, value, low, high in (
        ("--nodes", args.nodes, 1, MOST_NODES), ("--gpus-per-node", args.gpus_per_node, 1, MOST_GPUS),
        ("--days", args.days, LEAST_SCORED_D, MOST_DAYS), ("--seeds", args.seeds, 1, MOST_SEEDS),
        ("--first-seed", args.first_seed, 0, 2**31), ("--jobs", args.jobs or 1, 1, MOST_SEEDS),
    ):  # fmt: skip
        if not low <= value <= high:
            problems.append(f"{name} {value:g}: expected {number(low)} to {number(high)}")
    if not 0.0 <= args.train_days <= args.days - LEAST_SCORED_D:
        problems.append(
            f"--train-days {args.train_days:g}: expected 0 to {args.days - LEAST_SCORED_D:g}, so that at "
            "least a day is scored"
        )
    if problems:
        raise ConfigError(problems)
