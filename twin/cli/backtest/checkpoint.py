"""Command `backtest checkpoint`: the effective time of training under intervals between saves.

With --mttf by closed forms, with --events on recorded failures. Prints tables or one JSON object, writes a
page.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from typing import Any

from rich.console import Console

from twin.backtest import ArgumentCheck, parse_terms
from twin.catalogue import ConfigError, clean
from twin.cli.arguments import present
from twin.cli.backtest.failures import LOG
from twin.cli.grammar import Verb, WrongCall
from twin.report import print_line

OF_EVENTS = ("nodes", "start", "until", "sizes", "mend")  # options that a log gives a meaning to
OF_FORMS = ("mttf", "recall", "precision", "lead", "weibull", "local_save", "local_restart", "soft_mttf")
LEAST_DAYS = 14  # that jobs run. source: estimate
MOST_SIZES = 16


def run_checkpoint(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Work it out and print. Raises ConfigError for what the operator can mend."""
    from twin.backtest import check_folder

    if args.events is None and (
        given := ["--from" if name == "start" else f"--{name}" for name in OF_EVENTS if getattr(args, name)]
    ):
        raise WrongCall(f"expected --events for {', '.join(given)}")
    check_folder(args.report)
    if args.events is not None:
        return _replayed(args, out, err)
    return _forms(args, out)


def _costs(args: argparse.Namespace) -> Any:
    """The costs of saves in a replay; a log of nodes says nothing about what else `Asked` knows."""
    from twin.backtest import SaveCosts

    check = ArgumentCheck()
    if given := [f"--{name.replace('_', '-')}" for name in OF_FORMS if getattr(args, name) is not None]:
        check.problems.append(
            f"{', '.join(given)}: only for closed forms, with --mttf alone: expected none with --events"
        )
    save_s = check.time("--save", check.needed("--save", args.save, "60s"))
    restart_s = check.time("--restart", check.needed("--restart", args.restart, "600s"), zero=True)
    flush_s = check.time("--flush", args.flush, zero=True)
    if args.nodes is None:
        check.problems.append("--nodes is missing: expected the number of nodes of the fleet, such as 400")
    if not 0 <= args.seed < 2**31:
        check.problems.append(f"--seed {args.seed}: expected a whole number from 0 to 2147483647")
    check.end()
    return SaveCosts(save_s, restart_s, flush_s)


def _replayed(args: argparse.Namespace, out: Console, err: Console) -> int:
    from twin.backtest import SIZES, place_jobs, print_scores, replay, scores
    from twin.catalogue import number
    from twin.run import ProgressBar
    from twin.tables import read_faults

    costs = _costs(args)
    sizes = SIZES if args.sizes is None else sizes_of(args.sizes)
    read = read_faults(args.events, args.nodes, until_d=args.until, mend=args.mend)
    log = read.log
    from_d = math.ceil(0.5 * (log.begin_d + log.until_d)) if args.start is None else args.start
    last = log.until_d - LEAST_DAYS
    if last < log.begin_d:
        raise ConfigError(
            f"the log ends on day {log.until_d:.4g}, {log.until_d - log.begin_d:.3g} days after its begin: "
            f"expected at least {LEAST_DAYS}, for jobs to run on; --until ends it, else its last event does"
        )
    if not (math.isfinite(from_d) and log.begin_d <= from_d <= last):
        raise ConfigError(
            f"--from {from_d:g}: expected a day from {log.begin_d:g} to {last:.4g}, so that jobs run for at "
            f"least {LEAST_DAYS} days; the log ends on day {log.until_d:.4g}"
        )
    begun = time.monotonic()
    with ProgressBar(err, "replay") as bar:
        found = replay(log, place_jobs(log, from_d, sizes, seed=args.seed), costs, progress=bar.move)
    result = {
        "events": str(args.events),
        "nodes": log.n,
        "nodes_failed": len(read.names),
        "faults": log.k,
        "faults_scored": int((log.start_d > from_d).sum()),
        "from_day": from_d,
        "until_day": log.until_d,
        "save_s": costs.save_s,
        "restart_s": costs.restart_s,
        "flush_s": costs.flush_s,
        "seed": args.seed,
        "simulated": False,
        "notes": list(read.notes),
        **scores(found, costs.save_s),
        "wall_s": round(time.monotonic() - begun, 3),
    }
    if args.report is not None:
        from twin.backtest import write_replay

        write_replay(result, found, args.report)
    for note in read.notes:
        print_line(err, note, "dim")
    head = (
        f"{args.events.name}: {result['faults_scored']:,} recorded faults of {log.n:,} nodes from day "
        f"{number(from_d)} to {number(log.until_d)}; jobs are synthetic"
    )

    def show(result: dict[str, Any], out: Console) -> None:
        print_line(out, head)
        print_scores(result, out)

    return present(args, result, show, out)


def sizes_of(text: str) -> tuple[int, ...]:
    """Nodes of jobs, ascending. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not re.fullmatch("[0-9]{1,7}", word) or int(word) < 1]
    if wrong or len(words) > MOST_SIZES:
        named = clean(", ".join(wrong), 100) or f"{len(words)} sizes"
        raise ConfigError(f"--sizes {named}: expected up to {MOST_SIZES} whole numbers such as 8,64,400")
    return tuple(sorted({int(word) for word in words}))


def _forms(args: argparse.Namespace, out: Console) -> int:
    from twin.backtest import closed_forms, print_forms, write_curve

    check = ArgumentCheck()
    mttf_s = check.time("--mttf", check.needed("--mttf", args.mttf, "1.8h"))
    asked = parse_terms(args, check, mttf_s)
    check.end()
    result = closed_forms(asked)
    written = [] if args.report is None else write_curve(result, args.report)

    def show(result: dict[str, Any], out: Console) -> None:
        print_forms(result, out)
        for path in written:
            print_line(out, f"written: {path}")

    return present(args, result, show, out)


TERMS = """
    --save T  time that training pauses for a save, such as 60s
    --restart T  time from a failure until training continues, such as 10min
    --flush T=0  time from the end of the pause until a save is durable
    --recall R  fraction of failures that are predicted, 0 to 1
    --precision P  fraction of predictions that a failure follows, 0 to 1
    --lead T  lead time of a prediction; default: 10min
    --weibull K  Weibull shape of the times between failures; default: 1
    --local-save T  time of a save to memory or local disks
    --local-restart T  time of a restart from memory or local disks
    --soft-mttf T  mean time between failures that leave the local save intact
"""
VERBS = {
    "backtest checkpoint": Verb(
        run_checkpoint,
        f"""
        --mttf T  mean time between failures of the job, such as 1.8h
        {TERMS}
        --events FILE  recorded faults: JSON of fault_start and fault_end, or CSV of node,start,end,class
        --nodes COUNT  number of nodes of that fleet
        --from DAY>start  day of the log on which jobs begin; default: half of the log
        {LOG}
        --sizes N,N,..  nodes of the jobs; default: 8,16,32,64,128,256,400
        --seed SEED=9  seed of the placement of jobs
        --report FOLDER  write checkpoint.html into this folder
        """,
        (
            "--mttf 1.8h --save 60s --restart 10min",
            "--events faults.csv --nodes 400 --save 60s --restart 10min",
        ),
    )
}
