"""Command `python -m tests.evaluation checkpoint`: intervals between saves on simulated fleets."""

from __future__ import annotations

import argparse
import time

from rich.console import Console

from tests.evaluation.checkpoint.suite import say_suite, suite
from tests.evaluation.harness import print_result
from twin.backtest import ArgumentCheck, SaveCosts
from twin.run import ProgressBar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Costs of a save, the seed, the form of the output."""
    parser.add_argument("--save", default="60s", metavar="T", help="time of a save (default: 60s)")
    parser.add_argument("--restart", default="600s", metavar="T", help="time of a restart (default: 600s)")
    parser.add_argument("--flush", metavar="T", help="time until a save is durable (default: none)")
    parser.add_argument("--seed", type=int, default=9, help="of fleets and jobs (default: 9)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate and print. Raises ConfigError for a wrong argument."""
    check = ArgumentCheck()
    save_s = check.time("--save", args.save)
    restart_s = check.time("--restart", args.restart, zero=True)
    flush_s = check.time("--flush", args.flush, zero=True)
    if not 0 <= args.seed < 2**31:
        check.problems.append(f"--seed {args.seed}: expected a whole number from 0 to 2147483647")
    check.end()
    begun = time.monotonic()
    with ProgressBar(err, "suite") as bar:
        result = suite(SaveCosts(save_s, restart_s, flush_s), args.seed, bar.move)
    result |= {"save_s": save_s, "restart_s": restart_s, "flush_s": flush_s, "seed": args.seed}
    return print_result(result, begun, args, out, say_suite)
