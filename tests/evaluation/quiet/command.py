"""Command `python -m tests.evaluation quiet`: false alarms of healthy simulated sites, by detector and cause.

Plants without faults under every kind of load live with the twin beside them; every alarm is false. With
--recordings the twin also replays those of real sites, and tells what it raised.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.evaluation.harness import chosen, number_in, print_result
from tests.evaluation.quiet.healthy_sites import DRAWS, LOADS, SEASONS, SENSORS, Choice, runs_of
from tests.evaluation.results import RECORDINGS
from twin.run import Pool, ProgressBar

COOLING = ("liquid", "air")
MOST_HOURS, MOST_PLANTS, MOST_JOBS = 240.0, 1000, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The draw, what of it to run and for how long, the form of the output."""
    parser.add_argument("--draw", choices=tuple(DRAWS), default="develop",
                        help="seeds, sizes and profiles: those of development, or held back from it "
                             "(default: develop)")  # fmt: skip
    parser.add_argument(
        "--hours", type=float, default=1.0, metavar="H", help="that each plant lives (default: 1)"
    )
    parser.add_argument("--plants", type=int, default=1, metavar="N",
                        help="of each profile, size and load (default: 1); 0: recordings alone")  # fmt: skip
    parser.add_argument("--cooling", metavar="NAME,..", help=f"of {', '.join(COOLING)} (default: all)")
    parser.add_argument("--loads", metavar="NAME,..", help=f"of {', '.join(LOADS)} (default: all)")
    parser.add_argument("--racks", metavar="N,..", help="sizes of the draw (default: all but the large ones)")
    parser.add_argument("--sensors", metavar="NAME,..", default="fine",
                        help=f"grades of {', '.join(SENSORS)} (default: fine)")  # fmt: skip
    parser.add_argument("--seasons", metavar="NAME,..", default="mild",
                        help=f"of {', '.join(SEASONS)} (default: mild)")  # fmt: skip
    parser.add_argument("--recordings", type=Path, metavar="DIR", nargs="?", const=RECORDINGS,
                        help="also replay the recordings in DIR (default: RACKTWIN_TRACES)")  # fmt: skip
    parser.add_argument("--calibration", action="store_true",
                        help="also count the residuals beyond 2, 3, 4 and 5 sigma of each comparison, by "
                             "load and by the age of what the twin has learned")  # fmt: skip
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="processes side by side (default: as many as processors)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, with every alarm")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate, count, print. Raises ConfigError for what the operator can mend."""
    from tests.evaluation.quiet.alarm_rates import rates
    from tests.evaluation.quiet.calibration import calibration
    from tests.evaluation.quiet.healthy_run import run_healthy
    from tests.evaluation.quiet.recorded import recordings_in, replay

    draw = DRAWS[args.draw]
    sizes = {str(racks): racks for racks in (*draw.racks, *draw.large_racks)}
    choice = Choice(
        chosen("--loads", args.loads, {name: name for name in LOADS}, LOADS),
        chosen("--cooling", args.cooling, {name: name for name in COOLING}, COOLING),
        chosen("--racks", args.racks, sizes, map(str, draw.racks)),
        chosen("--sensors", args.sensors, {name: name for name in SENSORS}, ()),
        chosen("--seasons", args.seasons, {name: name for name in SEASONS}, ()),
    )
    seconds = round(3600.0 * number_in("--hours", args.hours, 0.01, MOST_HOURS))
    plants = int(number_in("--plants", args.plants, 1 if args.recordings is None else 0, MOST_PLANTS))
    jobs = int(number_in("--jobs", args.jobs or os.cpu_count() or 1, 1, MOST_JOBS))
    runs = runs_of(draw, choice, plants, seconds)
    recorded = [] if args.recordings is None else recordings_in(args.recordings)
    begun = time.monotonic()
    with ProgressBar(err, "healthy plants") as bar:
        work = partial(run_healthy, calibrated=args.calibration)
        lived = Pool(work, jobs, bar.move).results(runs, [4.0 + r.racks for r in runs])
    with ProgressBar(err, "recordings") as bar:
        replayed = Pool(replay, jobs, bar.move).results(recorded)
    alarms = [alarm for some in lived for alarm in some.alarms]
    result = {
        "simulated": True, "draw": args.draw, "seconds": seconds, "plants": len(runs),
        "rates": rates(runs, alarms), "alarms": [asdict(a) for a in alarms],
        "recordings": [r._asdict() for r in replayed],
    }  # fmt: skip
    if args.calibration:
        result["calibration"] = calibration([cell for some in lived for cell in some.calibration])
    return print_result(result, begun, args, out, _say)


def _say(told: dict[str, Any], out: Console) -> None:
    from tests.evaluation.quiet.alarm_rates import say
    from tests.evaluation.quiet.calibration import say_calibration

    say(told, out)
    if "calibration" in told:
        say_calibration(told["calibration"], out)
