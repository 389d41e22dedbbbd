"""Command `python -m tests.evaluation power`: benefit and cost of power capping on two simulated sites.

Prints tables or one JSON object.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from tests.evaluation.harness import chosen, number_in, print_result
from twin.catalogue import ConfigError

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
    arms = chosen("--arms", args.arms, {arm: arm for arm in ARMS}, ARMS)
    first = FIRST_SEED if args.first_seed is None else args.first_seed
    first = int(number_in("--first-seed", first, 0, 2**31 - 1 - MOST_SEEDS))
    count = int(number_in("--seeds", args.seeds, 1, MOST_SEEDS))
    days = number_in("--days", args.days, 1.0 / 24.0, MOST_DAYS)
    scale = number_in("--scale", args.scale, 0.01, MOST_SCALE)
    jobs = int(number_in("--jobs", args.jobs, 1, MOST_JOBS))
    sites = SITES if args.site == "both" else (args.site,)
    demand = recorded(args.events)
    begun = time.monotonic()
    with ProgressBar(err, "weeks") as bar:
        result = suite(sites, demand, range(first, first + count), arms, days, jobs, scale, bar.move,
                     troubles=args.troubles)  # fmt: skip
    return print_result(result, begun, args, out, say_week)


def _asked_by_grid(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Grid events: a demand response, or a week of prices and carbon."""
    from tests.evaluation.power import carbon as power_carbon, response as power_response
    from tests.evaluation.power.demand import recorded
    from tests.evaluation.power.events import carbon, response, say_carbon, say_response
    from tests.evaluation.power.scores import FIRST_SEED
    from twin.run import ProgressBar

    week = args.suite == "carbon"
    known = power_carbon.ARMS if week else power_response.ARMS
    usual = power_carbon.USUAL_ARMS if week else known
    arms = chosen("--arms", args.arms, {arm: arm for arm in known}, usual)
    first = FIRST_SEED if args.first_seed is None else args.first_seed
    first = int(number_in("--first-seed", first, 0, 2**31 - 1 - MOST_SEEDS))
    seeds = range(first, first + int(number_in("--seeds", args.seeds, 1, MOST_SEEDS)))
    jobs, site = int(number_in("--jobs", args.jobs, 1, MOST_JOBS)), "a" if args.site == "both" else args.site
    hours = round(24 * number_in("--days", args.days, 1.0, MOST_DAYS))
    scale = number_in("--scale", args.scale, 0.01, MOST_SCALE)
    demand, begun = recorded(args.events) * scale, time.monotonic()
    with ProgressBar(err, "runs") as bar:
        if week:
            root = args.events.resolve().parent if args.recordings is None else args.recordings
            result = carbon(root, demand, seeds, arms=arms, site=site, jobs=jobs, move=bar.move, hours=hours)
        else:
            result = response(demand, seeds, site, arms, jobs, bar.move)
    return print_result(result, begun, args, out, say_carbon if week else say_response)
