"""Part `setpoint` of the cooling evaluation: energies of three arms in three climates, and their goals."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from tests.evaluation.harness import chosen, number_in, print_result, short, table
from twin.catalogue import ConfigError
from twin.cli.traces import trace_root
from twin.run import Pool, ProgressBar

RECORDING = "weather-years-sustaindc"
KINDS = ("chiller", "tower", "dry_cooler")
SEEDS = {"develop": 60_000, "held_back": 60_000_000}
LEAST_SAVING_PU, ACCOUNT_PU = 0.10, 0.10  # the goals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Loops, plants and days of the part `setpoint`."""
    parser.add_argument(
        "--loops", metavar="NAME,..", help=f"of {', '.join(KINDS)} (setpoint; default: chiller)"
    )
    parser.add_argument("--plants", type=int, default=1, metavar="N", help="plants (setpoint; default: 1)")
    parser.add_argument("--days", type=int, default=2, metavar="N",
                        help="days of each month (setpoint; default: 2)")  # fmt: skip


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate, compare, print. Raises ConfigError for what the operator can mend."""
    from tests.evaluation.cooling.setpoint_year import ARMS, CLIMATES, SetpointYear, live_through
    from tests.evaluation.cooling.year_weather import days_of

    loops = chosen("--loops", args.loops, {name: name for name in KINDS}, ["chiller"])
    plants = int(number_in("--plants", args.plants, 1, 100))
    days = days_of(int(number_in("--days", args.days, 1, 28)))
    jobs = int(number_in("--jobs", args.jobs or os.cpu_count() or 1, 1, 64))
    folder = trace_root(os.environ) / RECORDING
    if not folder.is_dir():
        raise ConfigError([f"{folder}: not there; run `racktwin trace fetch {RECORDING}`"])
    begun, first = time.monotonic(), SEEDS[args.draw]
    years = [
        SetpointYear(climate, cooling, arm, first + k, folder / CLIMATES[climate], days)
        for cooling in loops
        for climate in CLIMATES
        for k in range(plants)
        for arm in ARMS
    ]
    with ProgressBar(err, "years of set points") as bar:
        outcomes = [asdict(x) for x in Pool(live_through, jobs, bar.move).results(years)]
    return print_result(result_of(outcomes, args.draw), begun, args, out, say)


def result_of(outcomes: Sequence[dict[str, Any]], draw: str) -> dict[str, Any]:
    """A row for each loop and climate, of all plants."""
    places = dict.fromkeys((x["cooling"], x["climate"]) for x in outcomes)
    rows = [_row(place, [x for x in outcomes if (x["cooling"], x["climate"]) == place]) for place in places]
    return {"simulated": True, "draw": draw, "rows": rows, "years": list(outcomes)}


def _row(place: tuple[str, str], some: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def of(arm: str, key: str) -> float:
        return sum(float(x[key]) for x in some if x["arm"] == arm)

    saved, beside = (
        of(arm, "total_kwh") - of("cooling_setpoint", "total_kwh") for arm in ("fixed", "greedy")
    )
    mine = [x for x in some if x["arm"] == "cooling_setpoint"]
    return {
        "cooling": place[0],
        "climate": place[1],
        "plants": len(mine),
        "cooling_kwh": of("fixed", "cooling_kwh"),
        "liquid_kwh": of("fixed", "loop_kwh"),
        "saved_kwh": saved,
        "saved_pu": saved / max(of("fixed", "cooling_kwh"), 1e-9),
        "saved_liquid_pu": saved / max(of("fixed", "loop_kwh"), 1e-9),
        "below_greedy_kwh": beside,
        "expected_over_saved": of("cooling_setpoint", "expected_kwh") / saved if saved else None,
        "account_over_saved": of("cooling_setpoint", "saved_kwh") / saved if saved else None,
        "hot_pu": max(float(x["hot_pu"]) for x in mine),
        "hottest_c": max(float(x["hottest_c"]) for x in mine),
        "mean_c": sum(float(x["mean_c"]) for x in mine) / len(mine),
        "greedy_c": of("greedy", "mean_c") / len(mine),
    }


def say(told: dict[str, Any], out: Console) -> None:
    """The table."""
    heads = ("loop", "climate", "plants", "cooling, kWh", "liquid, kWh", "saved, kWh", "of cooling",
             "of liquid", "below greedy", "expected/saved", "account/saved", "hot GPU-hours", "hottest, C",
             "mean set, C", "greedy's, C")  # fmt: skip
    rows = []
    for row in told["rows"]:
        rows.append([str(row["cooling"]), str(row["climate"]), *(short(row[k]) for k in list(row)[2:])])
    out.print(table(f"simulated: set points in recorded weather, draw {told['draw']}", heads, rows))
    out.print(
        "cooling: pumps, fans, chillers, air handlers with the BMS's fixed set points; liquid: without air "
        "handlers. saved: all power of racks and cooling, leakage included. "
        f"Goals: {LEAST_SAVING_PU:.0%} of cooling saved, below greedy, expected within {ACCOUNT_PU:.0%} of "
        "saved, no more GPU-hours beyond the guard than 0.001."
    )
