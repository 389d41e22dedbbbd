"""The command `checkpoint plan`: how often jobs should save, why, how sure, and what fixed intervals cost.

With --nodes and --rate for a hypothetical job; else of a running daemon, for its jobs or one of
them: what it knows of their nodes and saves, what is in force, what it proposes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twin.backtest import ArgumentCheck
from twin.catalogue import clean
from twin.cli.arguments import client_of, present
from twin.cli.backtest import TERMS
from twin.cli.grammar import Verb, WrongCall
from twin.cli.operate.explain import show_answer
from twin.report import print_line

if TYPE_CHECKING:
    from rich.console import Console

MOST_NODES = 10_000_000
MOST_SHOWN = 1000  # jobs of one answer
MOST_PER_1000_D = 1e6  # failures of 1000 nodes in a day: every node each 86 s. source: estimate
OFFLINE = ("nodes", "rate", "rate_shape", "save", "restart", "recall", "precision", "lead", "weibull",
           "local_save", "local_restart", "soft_mttf", "report")  # fmt: skip
LIVE = ("url", "config", "token_file", "ca_file", "cert_file", "key_file", "job")


def run_plan(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Work it out, or ask, and print. Raises ConfigError for what the operator can mend."""
    given = [_option(name) for name in OFFLINE if getattr(args, name) is not None]
    if args.flush != "0":
        given.append("--flush")
    if not given:
        return present(args, _live(args), show_answer, out)
    if mixed := [_option(name) for name in LIVE if getattr(args, name) is not None]:
        raise WrongCall(f"{', '.join(given)} are of a hypothetical job: expected no {', '.join(mixed)}")
    return _thought(args, out)


def _option(name: str) -> str:
    return "JOB" if name == "job" else f"--{name.replace('_', '-')}"


def _thought(args: argparse.Namespace, out: Console) -> int:
    from twin.backtest import check_folder, closed_forms, parse_terms, print_forms, write_curve
    from twin.catalogue import duration, number

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

    def show(result: dict[str, Any], out: Console) -> None:
        print_line(out, text)
        print_forms(result, out)
        for path in written:
            print_line(out, f"written: {path}")

    text = f"{nodes:,} nodes at {number(rate)} failures per 1000 node-days: one each {duration(mttf_s)}"
    return present(args, result, show, out)


def _whole(check: ArgumentCheck, option: str, text: str | None) -> int:
    given = check.needed(option, text, "128")
    if given is None:
        return 1
    if given.isascii() and given.isdigit() and 1 <= int(given[:12]) <= MOST_NODES:
        return int(given)
    check.problems.append(f"{option} {clean(given, 40)}: expected a whole number from 1 to {MOST_NODES}")
    return 1


def _live(args: argparse.Namespace) -> Any:
    from twin.api import path_of

    client = client_of(args)
    if args.format == "json":
        return client.get("/checkpoints", job=args.job, limit=MOST_SHOWN)
    return client.get(path_of("explain", "checkpoint", *([f"job:{args.job}"] if args.job else ())))


VERBS = {
    "checkpoint plan": Verb(
        run_plan,
        f"""
        [JOB]  job of the daemon; default: all of its jobs
        --nodes N  number of nodes of a hypothetical job
        --rate R  its failures per 1000 node-days, such as 6.5
        --rate-shape K  uncertainty of the rate, as if estimated from K failures; default: certain
        {TERMS}
        --report FOLDER  write checkpoint.html into this folder
        """,
        ("", "llama-405b", "--nodes 512 --rate 6.5 --save 60s --restart 10min"),
        live=True,
    )
}
