"""The command `backtest lives`: failures of devices, forecast from position, age and past, on recorded lives.

Reads the lives, trains on those before a day, scores what came after it, prints tables or one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError, clean, number
from twin.cli.arguments import present
from twin.cli.grammar import Verb
from twin.report import grid, print_line

DAY_S = 86_400.0
TRAINED_SHARE = 0.5  # of the log, unless --from says otherwise
LEAST_STEPS = (12, 4)  # trained and scored. source: estimate
MOST_BUDGET = 0.5
WITH_SERIALS = ("lives", "titan")  # forms that name devices; in the others a place stands for what is there
SCORES = ("log_loss", "brier", "ece", "pr_auc", "roc_auc")


def run_lives(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score and print. Raises ConfigError for what the operator can mend."""
    from models.backtest import backtest_lives, score_lives
    from twin.run import ProgressBar
    from twin.tables import read_lives

    step_d = args.step_s / DAY_S
    if not 0.0 < args.withdraw <= MOST_BUDGET:
        raise ConfigError(
            f"--withdraw {args.withdraw:g}: expected a share of the fleet up to {MOST_BUDGET:g}"
        )
    read = read_lives(args.events, args.nodes)
    log = read.log
    train_d = day_of(args.start, read.zero, log.begin_d + TRAINED_SHARE * (log.until_d - log.begin_d))
    least, most = log.begin_d + LEAST_STEPS[0] * step_d, log.until_d - LEAST_STEPS[1] * step_d
    if not least <= train_d <= most:
        raise ConfigError(
            f"--from: day {train_d:.5g} of the log: expected a day from {least:.5g} to {most:.5g}, so that "
            f"{LEAST_STEPS[0]} steps of {number(step_d)} days are learned from and {LEAST_STEPS[1]} scored"
        )
    begun = time.monotonic()
    with ProgressBar(err, "backtest") as bar:
        result = backtest_lives(log, train_d, step_d, refit=not args.frozen, progress=bar.move)
    summary = {
        "events": str(args.events),
        "form": read.form,
        "assets": len(log.assets),
        "places": len(log.places),
        "levels": list(log.levels),
        "faults": len(log.day),
        "episodes": int(log.episode.sum()),
        "classes": list(log.classes),
        "until_day": log.until_d,
        "from_day": result.train_d,
        "refit": not args.frozen,
        "notes": list(read.notes),
        **score_lives(result, args.withdraw),
        "wall_s": round(time.monotonic() - begun, 3),
    }
    for note in read.notes:
        print_line(err, note, "dim")
    return present(args, summary, say_lives, out)


def day_of(word: str | None, zero: datetime.datetime | None, default: float) -> float:
    """A day of the log: a number, or a date where the log has dates. Raises ConfigError."""
    if word is None:
        return default
    try:
        day = float(word)
    except ValueError:
        day = math.nan
    if math.isfinite(day):
        return day
    try:
        found = datetime.datetime.fromisoformat(word)
    except ValueError:
        found = None
    if found is None or zero is None:
        form = (
            "a date such as 2017-01-01, or a day of the log" if zero else "a day of the log: it has no dates"
        )
        raise ConfigError(f"--from {clean(word, 40)}: expected {form}")
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    return (found - zero).total_seconds() / DAY_S


def say_lives(report: Mapping[str, Any], out: Console) -> None:
    """Tables: scores, one model beside another, ratios of positions, whom faults follow, lemons."""
    step = f"{number(report['step_d'])} days"
    for line in (
        f"{Path(report['events']).name}: {report['episodes']:,} failures of {report['assets']:,} devices at "
        f"{report['places']:,} places",
        f"scored: day {number(report['from_day'])} to {number(report['until_day'])} in {report['steps']} "
        f"steps of {step}; {report['positives']:,} of {report['pairs']:,} forecasts came true",
    ):
        _line(out, line)
    rows = [
        [name.replace("_", " "), *(number(s[key], 4) for key in SCORES),
         number(s["precision_at_20"]), f"{s['forecast']:,.0f} / {s['came']:,}"]
        for name, s in report["methods"].items()
    ]  # fmt: skip
    heads = ("model", "log loss", "Brier", "ECE", "PR-AUC", "ROC-AUC", "first 20", "forecast / came")
    grid(out, heads, rows, right=range(1, len(heads)))
    rows = [
        [pair.replace("_", " ").replace("/", " beside "), f"{100 * s['less']:+.1f} %",
         f"{100 * s['low']:+.1f} to {100 * s['high']:+.1f}", s["verdict"]]
        for pair, s in report["against"].items()
    ]  # fmt: skip
    grid(out, ("log loss", "less by", "90 % interval", "the first is"), rows, right=(1, 2))
    for level in report["positions"]:
        _say_level(level, out)
    _say_terms(report["terms"], report["form"] in WITH_SERIALS, out)
    lemons = report["lemons"]
    _line(out, "")
    _line(
        out,
        f"lemons: of {lemons['candidates']} devices that had failed and served on, {lemons['withdrawn']} "
        f"withdrawn, of which {lemons['failed_again']} failed again; {lemons['avoided']} of "
        f"{lemons['repeats']} repeat failures avoided, {lemons['oracle_avoided']} by who knows the future",
    )


def _line(out: Console, text: str, style: str = "") -> None:
    out.print(clean(text, 300), markup=False, soft_wrap=True, highlight=False, style=style)


def _say_level(level: Mapping[str, Any], out: Console) -> None:
    rows = [
        [v["value"], v["faults"], f"{v['expected']:.0f}", number(v["ratio"]),
         f"{number(v['low'])} to {number(v['high'])}", number(v["forecast_ratio"])]
        for v in level["values"]
    ]  # fmt: skip
    heads = (level["level"], "failed", "forecast", "ratio that came", "90 % interval", "ratio forecast")
    grid(out, heads, rows, right=range(1, len(heads)))


def _say_terms(terms: Mapping[str, Any], serials: bool, out: Console) -> None:
    """The choices made on the past; whom a fault follows only where serials are known."""
    rows = [
        [f["group"], number(f["shape"]), number(f["half_life_d"]), f"{f['gain']:+.1f}"]
        for f in terms["frailty"]
    ]
    grid(out, ("past of", "shape", "half-life, days", "log likelihood"), rows, right=(1, 2, 3))
    for name, gain in terms["follows"].items():
        if serials and len(gain) == 2:
            who = "serial" if gain["serial"] >= gain["position"] else "position"
            _line(
                out,
                f"{name}: a fault follows the {who}: log likelihood {gain['serial']:+.1f} by the serial's "
                f"past, {gain['position']:+.1f} by the position's",
            )


VERBS = {
    "backtest lives": Verb(
        run_lives,
        """
        --events FILE!  CSV with asset,position,begin,end,class, or the format of Titan, LANL or Grid'5000
        --nodes COUNT  number of nodes of the fleet, if the file names only those that failed
        --from DATE>start  train before this date or day, score after it; default: half of the log
        --step DURATION=30d>step_s  span of one forecast
        --withdraw FRACTION=0.01  fraction of the fleet that may be withdrawn as lemons
        --frozen  do not retrain after --from; default: retrain every six steps on all past data
        """,
        ("--events gc_full.csv --from 2017-01-01", "--events lives.csv --from 400 --step 7d"),
        rows="positions",
    )
}
