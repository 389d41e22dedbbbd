"""Command `python -m tests.evaluation replacement`: the worth of withdrawing nodes before they fail.

With --suite simulated quarters of a fleet whose truth is known; with --events a replay of recorded faults.
Prints tables or one JSON object.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from rich.console import Console

from tests.evaluation.harness import chosen, number_in, print_result
from twin.catalogue import ConfigError, clean

SUITES = ("simulated",)
LEAST_DAYS = 14  # of a replay. source: estimate
MOST_SEEDS, MOST_DAYS, MOST_JOBS = 200, 366.0, 64
OF_EVENTS = ("nodes", "start", "until", "mend")
OF_SUITE = ("seeds", "first_seed", "days", "rate", "warnings", "arms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source of faults, seeds, days and arms, the form of the output."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--suite", choices=SUITES, help="quarters of 1,024 nodes whose truth is known")
    source.add_argument("--events", type=Path, metavar="FILE", help="replay recorded faults, JSON or CSV")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the recorded fleet, all of them")
    parser.add_argument("--from", dest="start", type=float, metavar="DAY",
                        help="decide from this day of the log (default: half of it)")  # fmt: skip
    parser.add_argument("--until", type=float, metavar="DAY", help="the log ends this day")
    parser.add_argument("--mend", action="store_true", help="let doubles and disorder in the log pass")
    parser.add_argument("--seeds", type=int, metavar="N", help="fleets of each kind (default: 3)")
    parser.add_argument("--first-seed", type=int, metavar="N", help="the first of them (default: 100)")
    parser.add_argument("--days", type=float, metavar="N", help="days that are scored (default: 90)")
    parser.add_argument("--rate", metavar="NAME,..", help="fleets: 6.5, 2.34, lemons (default: all)")
    parser.add_argument("--warnings", metavar="NAME,..",
                        help="how much is known ahead: measured, half, none (default: measured)")  # fmt: skip
    parser.add_argument("--arms", metavar="NAME,..", help="who decides (default: all, see the table)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes side by side (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Live or replay it, and print. Raises ConfigError for what the operator can mend."""
    others = OF_EVENTS if args.events is None else OF_SUITE
    given = ["--from" if x == "start" else f"--{x.replace('_', '-')}" for x in others
             if getattr(args, x) not in (None, False)]  # fmt: skip
    if given:
        args.refuse(f"expected {'--events' if args.events is None else '--suite'} for {', '.join(given)}")
    return _suite(args, out, err) if args.events is None else _replayed(args, out, err)


def _suite(args: argparse.Namespace, out: Console, err: Console) -> int:
    from tests.evaluation.replacement.fleet import SCENARIOS, WARNINGS
    from tests.evaluation.replacement.scores import ARMS, FIRST_SEED, suite
    from tests.evaluation.replacement.table import say_suite
    from twin.run import ProgressBar

    fleets = {name.removeprefix("rate_"): found for name, found in SCENARIOS.items()}
    scenarios = chosen("--rate", args.rate, fleets, list(fleets))
    warnings = chosen("--warnings", args.warnings, dict(WARNINGS), ["measured"])
    arms = chosen("--arms", args.arms, {a: a for a in ARMS}, list(ARMS))
    first = int(number_in("--first-seed", _or(args.first_seed, FIRST_SEED), 0, 2**31 - 1 - MOST_SEEDS))
    count = int(number_in("--seeds", _or(args.seeds, 3), 1, MOST_SEEDS))
    days = number_in("--days", _or(args.days, 90.0), 1.0, MOST_DAYS)
    jobs = int(number_in("--jobs", args.jobs, 1, MOST_JOBS))
    begun = time.monotonic()
    with ProgressBar(err, "quarters") as bar:
        result = suite(scenarios, warnings, range(first, first + count), arms, days, jobs, bar.move)
    return print_result(result, begun, args, out, say_suite)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _replayed(args: argparse.Namespace, out: Console, err: Console) -> int:
    from tests.evaluation.replacement.replay import replay
    from tests.evaluation.replacement.table import say_replay
    from twin.run import ProgressBar
    from twin.tables import read_faults

    if args.nodes is None:
        raise ConfigError("--nodes is missing: expected the number of nodes of the fleet, such as 400")
    read = read_faults(args.events, args.nodes, until_d=args.until, mend=args.mend)
    log = read.log
    from_d = math.ceil(0.5 * (log.begin_d + log.until_d)) if args.start is None else args.start
    last = log.until_d - LEAST_DAYS
    if not (math.isfinite(from_d) and log.begin_d <= from_d <= last):
        raise ConfigError(
            f"--from {from_d:g}: expected a day from {log.begin_d:g} to {last:.4g}, so that at least "
            f"{LEAST_DAYS} days follow; the log ends on day {log.until_d:.4g}"
        )
    begun = time.monotonic()
    with ProgressBar(err, "replay") as bar:
        rules = replay(log, from_d, bar.move)
    result = {
        "events": args.events.name, "nodes": log.n, "faults": log.k, "faults_scored": rules[0]["faults"],
        "from_day": from_d, "until_day": log.until_d, "simulated": False, "notes": list(read.notes),
        "rules": rules,
    }  # fmt: skip
    for note in () if args.json else read.notes:
        err.print(clean(note, 500), style="dim", markup=False, soft_wrap=True)
    return print_result(result, begun, args, out, say_replay)
