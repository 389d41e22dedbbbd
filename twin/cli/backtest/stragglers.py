"""The command `backtest stragglers`: what holds a synchronous training job back, by recorded operations.

Prints tables or one JSON object.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError
from twin.cli.arguments import present
from twin.cli.grammar import Verb
from twin.report import print_line

SHOWN = 5  # rows of a table
TABLES = {
    "by_kind": "operation",
    "by_stage": "stage",
    "by_rank": "data-parallel rank",
    "by_worker": "worker: stage,rank",
}


def run_stragglers(args: argparse.Namespace, out: Console, _: Console) -> int:
    """Analyse and print; 1 if a published result is missed. Raises ConfigError for what is to be mended."""
    from twin.backtest import LIMIT_PU, analyse_trace, compare_published

    if args.gpus_per_worker < 1:
        raise ConfigError(f"--gpus-per-worker {args.gpus_per_worker}: expected 1 or more")
    found = []
    for path in args.files:
        begun = time.monotonic()
        one = analyse_trace(Path(path), gpus_per_worker=args.gpus_per_worker)
        one["wall_s"] = round(time.monotonic() - begun, 3)
        if args.published is not None:
            one["published"] = compare_published(one, Path(args.published))
        found.append(one)
    present(args, {"traces": found}, say_stragglers, out)
    compared = [one["published"] for one in found if args.published is not None]
    wrong = [
        p for p in compared if max(map(abs, p["deviations_pu"].values())) > LIMIT_PU or not p["cause_agrees"]
    ]
    return 1 if wrong else 0


def say_stragglers(report: dict[str, Any], out: Console) -> None:
    """Each trace in words, then its tables."""
    from twin.backtest import print_table

    for one in report["traces"]:
        print_line(
            out,
            f"{one['trace']}: {one['steps']} steps of {one['stages']} stages x {one['dp_ranks']} "
            f"data-parallel ranks, {one['gpus']} GPUs",
            "bold",
        )
        print_line(
            out,
            f"slowdown {one['slowdown']:.4f}: {one['step_s']:.3f} s a step, {one['ideal_s']:.3f} s with "
            f"ideal durations; costs {one['wasted_gpu_h']:.2f} GPU-hours",
        )
        print_line(out, f"held back by: {one['cause']}")
        print_line(
            out,
            f"the slowest 3 % of workers explain {100 * one['workers_explain_pu']:.1f} % (M_W), the last "
            f"stage {100 * one['last_stage_explains_pu']:.1f} % (M_S); recorded steps take "
            f"{100 * one['graph_error_pu']:+.2f} % of what the graph says",
        )
        if one["steps_dropped"]:
            print_line(out, f"{one['steps_dropped']} steps lack operations and were left out", "yellow")
        for table, title in TABLES.items():
            rows = [
                [row["name"], f"{row['slowdown']:.4f}", f"{100 * row['explains_pu']:.1f}"]
                for row in one[table][:SHOWN]
            ]
            print_table(out, [title, "slowdown if only it is slow", "explains, %"], rows)
        if (published := one.get("published")) is not None:
            worst = max(published["deviations_pu"].values(), key=abs)
            agrees = "the same" if published["cause_agrees"] else "another"
            print_line(
                out,
                f"published: slowdown {published['slowdown']:.4f}; deviates by at most {100 * worst:+.4f} %; "
                f"{agrees} rank, stage and operation are slowest",
            )


VERBS = {
    "backtest stragglers": Verb(
        run_stragglers,
        """
        FILE+>files  step traces: .json (Chrome Trace Events), .csv, .parquet (needs pyarrow); also .gz
        --published FOLDER  compare with result-NAME.json, mw-NAME.json and ms-NAME.json in this folder
        --gpus-per-worker COUNT=1  GPUs of one tensor- or sequence-parallel worker
        """,
        ("timeline-AR.json.gz --gpus-per-worker 4",),
        rows="traces",
    )
}
