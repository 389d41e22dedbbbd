"""Command `python -m tests.evaluation cooling`: GPUs that heat shuts down when coolant stops, leaks, and what
supply set points save in a year.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console

from tests.evaluation.harness import chosen, number_in, print_result, short, table
from tests.support.flow_losses import DRAWS, KINDS, LOSS_HEADS, loss_row, losses_of, together
from tests.support.leaks import LEAK_HEADS, LEAK_KINDS, leak_row, leaks_of, leaks_together
from twin.run import Pool, ProgressBar

LOOPS = ("chiller", "tower", "dry_cooler")
MOST_EACH, MOST_JOBS = 1000, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The draw, the kinds of loss and how many of each, the form of the output."""
    parser.add_argument("--part", choices=("flow", "setpoint", "healthy"), default="flow",
                        help="losses of flow and leaks, set points, or healthy racks (flow)")  # fmt: skip
    parser.add_argument("--loops", metavar="NAME,..", help=f"of {', '.join(LOOPS)} (default: chiller)")
    parser.add_argument("--plants", type=int, default=1, metavar="N", help="plants (not of flow; default: 1)")
    parser.add_argument("--racks", type=int, default=512, metavar="N", help="of each plant (healthy: 512)")
    parser.add_argument("--hours", type=float, default=1.0, metavar="N", help="of each plant (healthy: 1)")
    parser.add_argument("--tick", type=int, default=1, choices=(1, 2, 5, 10), help="in s (healthy: 1)")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="of the seeds (setpoint: 0)")
    parser.add_argument("--days", type=int, default=8, metavar="N", help="of the year (setpoint: 8)")
    parser.add_argument("--climates", metavar="NAME,..", help="of the years (default: all three)")
    parser.add_argument("--draw", choices=tuple(DRAWS), default="develop",
                        help="seeds and profiles: those of development, or held back from it "
                             "(default: develop)")  # fmt: skip
    all_kinds = ", ".join((*KINDS, *LEAK_KINDS))
    parser.add_argument("--kinds", metavar="NAME,..", help=f"of {all_kinds} (default: all)")
    parser.add_argument("--profiles", metavar="NAME,..", help="of losses of flow (default: the draw's)")
    parser.add_argument("--each", type=int, default=20, metavar="N", help="of each kind (default: 20)")
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="processes side by side (default: as many as processors)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, with every scenario")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate, count, print. Raises ConfigError for what the operator can mend."""
    from tests.support.flow_loss_run import live_through
    from tests.support.leak_run import live_through_leak

    if args.part != "flow":
        return (_setpoint if args.part == "setpoint" else _healthy)(args, out, err)
    known = (*KINDS, *LEAK_KINDS)
    kinds = chosen("--kinds", args.kinds, {name: name for name in known}, known)
    each = int(number_in("--each", args.each, 1, MOST_EACH))
    jobs = int(number_in("--jobs", args.jobs or os.cpu_count() or 1, 1, MOST_JOBS))
    begun = time.monotonic()
    with ProgressBar(err, "losses of flow") as bar:
        mine = DRAWS[args.draw].profiles
        profiles = chosen("--profiles", args.profiles, {name: name for name in mine}, mine)
        losses = together(losses_of(args.draw, kinds, each, profiles))
        lived = [x for lot in Pool(live_through, jobs, bar.move).results(losses) for x in lot]
    with ProgressBar(err, "leaks") as bar:
        lots = leaks_together(leaks_of(args.draw, kinds, each))
        leaked = [x for lot in Pool(live_through_leak, jobs, bar.move).results(lots) for x in lot]
    outcomes, leaks = [asdict(x) for x in lived], [asdict(x) for x in leaked]
    rows = [loss_row(kind, [x for x in outcomes if x["kind"] == kind]) for kind in kinds if kind in KINDS]
    of_leaks = [leak_row(k, [x for x in leaks if x["kind"] == k]) for k in kinds if k in LEAK_KINDS]
    result = {"simulated": True, "draw": args.draw, "kinds": rows, "scenarios": outcomes,
              "leak_kinds": of_leaks, "leaks": leaks}  # fmt: skip
    return print_result(result, begun, args, out, _say)


def _say(told: dict[str, Any], out: Console) -> None:
    if told["leak_kinds"]:
        leaks = [[str(r["kind"]), *(short(r[key]) for key in list(r)[1:])] for r in told["leak_kinds"]]
        out.print(table(f"simulated: leaks, draw {told['draw']}", LEAK_HEADS, leaks))
        out.print("command: after a second detector is wet; after reading: after the twin has read it so;")
        out.print("loss told: coolant that is missing.")
    if not told["kinds"]:
        return
    rows = [[str(row["kind"]), *(short(row[key]) for key in list(row)[1:])] for row in told["kinds"]]
    out.print(table(f"simulated: losses of flow at full load, draw {told['draw']}", LOSS_HEADS, rows))
    out.print(
        "at most: upper end of the 95 % interval of plants with a loss. "
        "shut down: GPUs that heat switched off; caps alone: the same where no node may be switched off. "
        "needless: nodes that lost no GPU within half an hour with caps alone. In meter_lies, gpu_lies, "
        "pump_lost, utility_bridged and utility_dips nothing is in danger."
    )


def _setpoint(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Years of set points. Raises ConfigError for what the operator can mend."""
    from tests.support import setpoint_year

    loops = chosen("--loops", args.loops, {name: name for name in LOOPS}, LOOPS[:1])
    known = {name: name for name in setpoint_year.CLIMATES}
    climates = chosen("--climates", args.climates, known, known)
    plants = int(number_in("--plants", args.plants, 1, 100))
    days = int(number_in("--days", args.days, 1, 365))
    jobs = int(number_in("--jobs", args.jobs or os.cpu_count() or 1, 1, MOST_JOBS))
    begun = time.monotonic()
    with ProgressBar(err, "years of set points") as bar:
        seed = DRAWS[args.draw].first_seed + args.offset
        years = setpoint_year.years_of(seed, (loops, climates), plants, days)
        outcomes = [asdict(x) for x in Pool(setpoint_year.live_through, jobs, bar.move).results(years)]
    return print_result(setpoint_year.result_of(outcomes, args.draw), begun, args, out, _say_setpoint)


def _say_setpoint(told: dict[str, Any], out: Console) -> None:
    from tests.support.setpoint_year import HEADS, LEGEND

    rows = [[str(r["loop"]), str(r["climate"]), *(short(r[k]) for k in list(r)[2:])] for r in told["rows"]]
    out.print(table(f"simulated: set points in recorded weather, draw {told['draw']}", HEADS, rows))
    out.print(LEGEND)


def _healthy(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Healthy racks. Raises ConfigError for what the operator can mend."""
    from tests.support.healthy_racks import healthy_of, healthy_row, live_through_health

    racks = 4 * int(number_in("--racks", args.racks, 4, 10_000) / 4)
    jobs, begun = int(number_in("--jobs", args.jobs or os.cpu_count() or 1, 1, MOST_JOBS)), time.monotonic()
    count = int(number_in("--plants", args.plants, 1, 100))
    plants = healthy_of(args.draw, count, racks, args.hours, args.tick)
    with ProgressBar(err, "healthy racks") as bar:
        outcomes = [asdict(x) for x in Pool(live_through_health, jobs, bar.move).results(plants)]
    row = healthy_row(outcomes)
    rows = [[name, short(value)] for name, value in row.items()]
    say = lambda _, to: to.print(table(f"simulated: healthy racks, draw {args.draw}", ("", ""), rows))  # noqa: E731
    return print_result({"simulated": True, "row": row, "plants": outcomes}, begun, args, out, say)
