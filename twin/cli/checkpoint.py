"""The command `checkpoint plan`: how often jobs should save, why, how sure, and what fixed intervals cost.

With --nodes and --rate for a job that is only thought of; else of a running daemon, for its jobs or one of
them: what it knows of their nodes and saves, what is in force, what it proposes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.backtest import ArgumentCheck, add_term_arguments, parse_time
from twin.catalogue import clean
from twin.cli.arguments import add_connection, client_of

if TYPE_CHECKING:
    from rich.console import Console

MOST_NODES = 10_000_000
MOST_SHOWN = 1000  # jobs of one answer
MOST_PER_1000_D = 1e6  # failures of 1000 nodes in a day: every node each 86 s. source: estimate
OFFLINE = ("nodes", "rate", "rate_shape", "save", "restart", "recall", "precision", "lead", "weibull",
           "local_save", "local_restart", "soft_mttf")  # fmt: skip
LIVE = ("url", "config", "token_file", "ca_file", "cert_file", "key_file", "job")


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin checkpoint`."""
    parser = commands.add_parser("checkpoint", help="how often training jobs should save")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    what = "intervals of a daemon's jobs, or of a job that is only thought of"
    plan = actions.add_parser("plan", help=what, description=what, allow_abbrev=False)
    plan.add_argument("job", nargs="?", metavar="JOB", help="of the daemon; none: all of its jobs")
    thought = plan.add_argument_group("a job that is only thought of")
    thought.add_argument("--nodes", metavar="N", help="that it holds")
    thought.add_argument("--rate", metavar="R", help="failures per 1000 node-days, such as 6.5")
    thought.add_argument("--rate-shape", metavar="K",
                         help="how sure that is, as of K failures seen (default: sure)")  # fmt: skip
    add_term_arguments(thought)
    asked = plan.add_argument_group("of a running daemon")
    add_connection(asked)
    plan.add_argument("--report", type=Path, metavar="DIR", help="write checkpoint.html into this folder")
    parser.set_defaults(refuse=plan.error)
    parser.set_defaults(handler=run_checkpoint)


def run_checkpoint(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Work it out, or ask, and print. Raises ConfigError for what the operator can mend."""
    if given := [_option(name) for name in OFFLINE if getattr(args, name) is not None]:
        if mixed := [_option(name) for name in LIVE if getattr(args, name) is not None]:
            args.refuse(f"{', '.join(given)} are of a job that is only thought of: expected no "
                        f"{', '.join(mixed)}")  # fmt: skip
        return _thought(args, out)
    if parse_time(args.flush) != 0.0:
        args.refuse(
            "--flush is of a job that is only thought of: expected --nodes, --rate, --save, --restart"
        )
    if args.report is not None:
        args.refuse(
            "--report draws a job that is only thought of: expected --nodes, --rate, --save, --restart"
        )
    return _live(args, out)


def _option(name: str) -> str:
    return "JOB" if name == "job" else f"--{name.replace('_', '-')}"


def _thought(args: argparse.Namespace, out: Console) -> int:
    from twin.backtest import check_folder, closed_forms, parse_terms, print_forms, write_curve
    from twin.catalogue import duration, number
    from twin.cli.arguments import write_json

    check_folder(args.report)
    check = ArgumentCheck()
    nodes = _whole(check, "--nodes", args.nodes)
    given = check.needed("--rate", args.rate, "6.5")
    rate = check.between("--rate", given, 1e-9, MOST_PER_1000_D, 1.0)
    shape = check.between("--rate-shape", args.rate_shape, 0.05, 1e9, float("inf"))
    mttf_s = 1000.0 * 86_400.0 / (rate * max(nodes, 1))
    asked = replace(parse_terms(args, check, mttf_s), rate_shape=shape)
    if shape != float("inf") and (asked.weibull != 1.0 or asked.recall > 0.0):
        check.problems.append("--rate-shape: expected no --weibull and no --recall with it")
    check.end()
    result = {"nodes": nodes, "rate_per_1000_node_days": rate, **closed_forms(asked)}
    written = [] if args.report is None else write_curve(result, args.report)
    if args.json:
        write_json(result, out)
        return 0
    text = f"{nodes:,} nodes at {number(rate)} failures per 1000 node-days: one each {duration(mttf_s)}"
    out.print(text, markup=False, soft_wrap=True, highlight=False)
    print_forms(result, out)
    for path in written:
        out.print(f"written: {path}", markup=False, soft_wrap=True, highlight=False)
    return 0


def _whole(check: ArgumentCheck, option: str, text: str | None) -> int:
    given = check.needed(option, text, "128")
    if given is None:
        return 1
    if given.isascii() and given.isdigit() and 1 <= int(given[:12]) <= MOST_NODES:
        return int(given)
    check.problems.append(f"{option} {clean(given, 40)}: expected a whole number from 1 to {MOST_NODES}")
    return 1


def _live(args: argparse.Namespace, out: Console) -> int:
    from twin.api import path_of
    from twin.cli.explain import print_answer

    client = client_of(args)
    if args.json:
        tree = client.get("/checkpoints", job=args.job, limit=MOST_SHOWN)
    else:
        tree = client.get(path_of("explain", "checkpoint", *([f"job:{args.job}"] if args.job else ())))
    print_answer(tree, args.json, out)
    return 0
