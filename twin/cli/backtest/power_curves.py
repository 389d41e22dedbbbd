"""The command `backtest power-curves`: how well learned power curves foretell measured power limits.

Prints tables or one JSON object.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console

from twin.backtest import print_table
from twin.cli.arguments import present
from twin.cli.grammar import Verb
from twin.report import print_line

COLUMNS = ("time_touched", "energy_touched", "time_all", "energy_all")


def run_power_curves(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score and print. Raises ConfigError for what the operator can mend."""
    from twin.backtest import run_backtest
    from twin.run import ProgressBar

    begun = time.monotonic()
    with ProgressBar(err, "GPU models") as bar:
        result = run_backtest(args.sweeps, bar.move)
    result["wall_s"] = round(time.monotonic() - begun, 3)
    return present(args, result, say_curves, out)


def _three(found: dict[str, Any]) -> str:
    return (
        f"{100 * found['median_pu']:.1f} / {100 * found['p90_pu']:.1f} %, "
        f"{100 * found['within_goal_pu']:.0f} % within"
    )


def say_curves(report: dict[str, Any], out: Console) -> None:
    """A table of each GPU model, what is held out in words, and what the least energy costs to miss."""
    for part in report["gpus"]:
        about = "the form of the curve was chosen on these" if part["chosen_on"] else "not used to choose"
        print_line(
            out,
            f"{part['gpu']}: {part['jobs']} jobs at {len(part['limits_w'])} limits from "
            f"{part['limits_w'][0]:g} to {part['limits_w'][-1]:g} W, of which {part['jobs_touched']} draw "
            f"enough to be touched; measured; {about}",
            "bold",
        )
        rows = [
            [
                s["trial"],
                s["method"],
                *(_three(s[f"{w}_{g}"]) for g in ("touched", "all") for w in ("time", "energy")),
            ]
            for s in part["scores"]
        ]
        titles = ["held out", "by", *(column.replace("_", ", ") for column in COLUMNS)]
        print_table(out, titles, rows)
        for rule, x in part["energy_minimum"].items():
            print_line(
                out,
                f"least energy, cap by {rule}: {100 * x['mean_pu']:.1f} % above the least measured, "
                f"90th percentile {100 * x['p90_pu']:.1f} %, worst {100 * x['worst_pu']:.1f} %",
            )
        out.print("")
    print_line(out, f"errors: median / 90th percentile, share within {100 * report['goal_pu']:g} %")
    for trial, about in report["trials"].items():
        print_line(out, f"{trial}: seen were {about}")


VERBS = {
    "backtest power-curves": Verb(
        run_power_curves,
        "--sweeps FOLDER!  folder of measured sweeps: files summary_power_GPU.csv",
        ("--sweeps sweeps/",),
        rows="gpus",
    )
}
