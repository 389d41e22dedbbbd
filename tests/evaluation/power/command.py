"""Command `python -m tests.evaluation power`: benefit and cost of power capping on two simulated sites.

Prints tables or one JSON object.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from rich.console import Console

from twin.catalogue import ConfigError, clean
from twin.cli import write_json

SUITES = ("week", "response", "carbon")
SITES = ("a", "b")
MOST_SEEDS, MOST_DAYS, MOST_JOBS, MOST_SCALE = 200, 30.0, 64, 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite, the recorded demand, seeds, days and arms, the form of the output."""
    parser.add_argument("--suite", choices=SUITES, required=True,
                        help="week: a week of demand, a feed lost; response: the grid asks for 30 %% less; "
                        "carbon: a week of recorded prices and carbon")  # fmt: skip
    parser.add_argument("--events", type=Path, required=True, metavar="FILE",
                        help="the recorded demand: folder gpu-demand-helios-earth, or one CSV")  # fmt: skip
    parser.add_argument("--recordings", type=Path, metavar="FOLDER",
                        help="carbon: where grid-hourly is (default: beside --events)")  # fmt: skip
    parser.add_argument("--site", choices=(*SITES, "both"), default="both",
                        help="a: 144 nodes, one path; b: 174 nodes, two feeds (default: both)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each site (default: 3)")
    parser.add_argument("--first-seed", type=int, metavar="N", help="the first of them (default: 100)")
    parser.add_argument("--days", type=float, default=7.0, metavar="N", help="days of a run (default: 7)")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="times the recorded demand (default: 1)"
    )
    parser.add_argument(
        "--troubles",
        action="store_true",
        help="week: beside the lost feed, faults of network, meters, agents, nodes and the daemon, drawn "
        "from the seed; the goal is then that no breaker opens",
    )
    parser.add_argument("--arms", metavar="NAME,..", help="who decides (default: all, see the table)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes side by side (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Live all runs, and print. Raises ConfigError for what the operator can mend."""
    from tests.evaluation.power.demand import recorded
    from tests.evaluation.power.scores import FIRST_SEED, suite
    from tests.evaluation.power.table import say_week
    from tests.evaluation.power.week import ARMS
    from twin.run import ProgressBar

    if args.suite != "week":
        if args.troubles:
            raise ConfigError(f"--troubles with --suite {args.suite}: expected --suite week")
        return _asked_by_grid(args, out, err)
    arms = list(ARMS)
    if args.arms is not None:
        arms = list(dict.fromkeys(word.strip() for word in args.arms.split(",")))
        wrong = [word for word in arms if word not in ARMS]
        if wrong:
            raise ConfigError(f"--arms {clean(', '.join(wrong), 100)}: expected some of {', '.join(ARMS)}")
    first = FIRST_SEED if args.first_seed is None else args.first_seed
    first = int(_number("--first-seed", first, 0, 2**31 - 1 - MOST_SEEDS))
    count = int(_number("--seeds", args.seeds, 1, MOST_SEEDS))
    days = _number("--days", args.days, 1.0 / 24.0, MOST_DAYS)
    scale = _number("--scale", args.scale, 0.01, MOST_SCALE)
    jobs = int(_number("--jobs", args.jobs, 1, MOST_JOBS))
    sites = SITES if args.site == "both" else (args.site,)
    demand = recorded(args.events)
    begun = time.monotonic()
    with ProgressBar(err, "weeks") as bar:
        told = suite(sites, demand, range(first, first + count), arms, days, jobs, scale, bar.move,
                     troubles=args.troubles)  # fmt: skip
    told["wall_s"] = round(time.monotonic() - begun, 3)
    if args.json:
        write_json(told, out)
    else:
        say_week(told, out)
    return 0


def _asked_by_grid(args: argparse.Namespace, out: Console, err: Console) -> int:
    """What the grid asks for: a demand response, or a week of prices and carbon."""
    from tests.evaluation.power import carbon as power_carbon, response as power_response
    from tests.evaluation.power.demand import recorded
    from tests.evaluation.power.events import carbon, response, say_carbon, say_response
    from tests.evaluation.power.scores import FIRST_SEED
    from twin.run import ProgressBar

    week = args.suite == "carbon"
    known = power_carbon.ARMS if week else power_response.ARMS
    arms: list[str] = list(power_carbon.USUAL_ARMS) if week else list(known)
    if args.arms is not None:
        arms = list(dict.fromkeys(word.strip() for word in args.arms.split(",")))
        wrong = [word for word in arms if word not in known]
        if wrong:
            raise ConfigError(f"--arms {clean(', '.join(wrong), 100)}: expected some of {', '.join(known)}")
    first = FIRST_SEED if args.first_seed is None else args.first_seed
    first = int(_number("--first-seed", first, 0, 2**31 - 1 - MOST_SEEDS))
    seeds = range(first, first + int(_number("--seeds", args.seeds, 1, MOST_SEEDS)))
    jobs, site = int(_number("--jobs", args.jobs, 1, MOST_JOBS)), "a" if args.site == "both" else args.site
    hours = round(24 * _number("--days", args.days, 1.0, MOST_DAYS))
    scale = _number("--scale", args.scale, 0.01, MOST_SCALE)
    demand, begun = recorded(args.events) * scale, time.monotonic()
    with ProgressBar(err, "runs") as bar:
        if week:
            root = args.events.resolve().parent if args.recordings is None else args.recordings
            told = carbon(root, demand, seeds, arms=arms, site=site, jobs=jobs, move=bar.move, hours=hours)
        else:
            told = response(demand, seeds, site, arms, jobs, bar.move)
    told["wall_s"] = round(time.monotonic() - begun, 3)
    if args.json:
        write_json(told, out)
    else:
        (say_carbon if week else say_response)(told, out)
    return 0


def _number(option: str, value: float, low: float, high: float) -> float:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{option} {value:g}: expected {low:g} to {high:g}")
    return value
