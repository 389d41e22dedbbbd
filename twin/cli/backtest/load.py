"""Command `backtest`: scores forecasts of load and failure, checkpoint intervals and power curves.

`backtest load --series FILE ...` prints a table or one JSON object and writes a page; the other kinds have
their own modules.
"""

from __future__ import annotations

import argparse
import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from twin.backtest import Rival, print_load_scores
from twin.catalogue import ConfigError, clean, duration, number
from twin.cli.arguments import write_json
from twin.cli.backtest import checkpoint, failures, power_curves

LEAST_ROWS = 20
MOST_JOBS = 64  # source: estimate; more gain nothing, as a backtest has few parts
SPAN_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*(s|sec|min|m|h|d|%|)$")


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin backtest`."""
    parser = commands.add_parser(
        "backtest", help="score forecasts, failures, checkpoint intervals and power curves"
    )
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    failures.add_failures(kinds)
    checkpoint.add_checkpoint(kinds)
    power_curves.add_power_curves(kinds)
    load = kinds.add_parser(
        "load", help="forecasts of load and demand, beside the last value, yesterday and EWMA"
    )
    load.add_argument(
        "--series", type=Path, nargs="+", required=True, metavar="FILE", help="CSV, also compressed"
    )
    load.add_argument("--time-column", metavar="T", help="column of times")
    load.add_argument("--value-column", nargs="+", default=[], metavar="V", help="columns of values")
    load.add_argument("--step", metavar="S", help="step of the grid, such as 60 (s) or 5min")
    load.add_argument("--aggregate", metavar="HOW", help="rows of one step: mean, sum, last, max, count")
    load.add_argument("--total", action="store_true", help="score the sum of all columns")
    load.add_argument("--where", metavar="COLUMN=VALUE", help="only rows with this value in this column")
    load.add_argument(
        "--gap",
        nargs=2,
        action="append",
        default=[],
        metavar=("FROM", "TO"),
        help="nothing counts from here to there, such as an outage",
    )
    load.add_argument(
        "--known-column", nargs="+", default=[], metavar="C", help="columns known ahead, such as a forecast"
    )
    load.add_argument("--zone", default="UTC", help="time zone of times without one (default: UTC)")
    load.add_argument("--report", type=Path, metavar="DIR", help="write backtest.html into this folder")
    add_scoring(load)
    parser.set_defaults(refuse=load.error)
    parser.set_defaults(handler=run_backtest)


def add_scoring(load: argparse.ArgumentParser) -> None:
    """The arguments that say what is scored, and how; the same for one series and for a suite of them."""
    load.add_argument(
        "--horizons", metavar="H,H,..", help="rows (5), spans (15min, 6h) or parts of the series (10%%)"
    )
    load.add_argument(
        "--from",
        dest="start",
        type=float,
        default=0.5,
        metavar="FRACTION",
        help="score origins after this part of the rows (default: 0.5)",
    )
    load.add_argument("--model", metavar="NAME", help="score this forecaster alone")
    load.add_argument("--experts", metavar="A,B,..", help="combine these forecasters only")
    load.add_argument("--rival", metavar="NAME", help="score this forecaster beside the blend")
    load.add_argument(
        "--jobs", type=_jobs, default=1, metavar="N", help="processes side by side (default: 1)"
    )
    load.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _jobs(text: str) -> int:
    number_ = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number_ <= MOST_JOBS:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {MOST_JOBS} processes")
    return number_


def run_backtest(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score, print, write the page. Raises ConfigError for what the operator can mend."""
    if args.what == "failures":
        return failures.run_failures(args, out, err)
    if args.what == "checkpoint":
        return checkpoint.run_checkpoint(args, out, err)
    if args.what == "power-curves":
        return power_curves.run_power_curves(args, out, err)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, on odd data: what matters is told as a note
        return _run(args, out, err)


def _run(args: argparse.Namespace, out: Console, err: Console) -> int:
    if args.model is not None and args.experts is not None:
        args.refuse("--model is one forecaster alone: expected no --experts")
    if args.time_column is None or (not args.value_column and args.aggregate != "count"):
        args.refuse("--series needs --time-column and --value-column")
    from twin.backtest import find_rival
    from twin.report import open_folder
    from twin.tables import SeriesOptions, read_series

    chosen, rival = chosen_forecasters(args), find_rival(args.rival)
    if args.report is not None:
        open_folder(args.report)
    read = read_series(
        args.series,
        args.time_column,
        args.value_column,
        SeriesOptions(
            step_s=None if args.step is None else step_of(args.step),
            aggregate=args.aggregate,
            known_columns=args.known_column,
            zone=args.zone,
            total=args.total,
            where=_where(args.where),
            gap_ranges=[(a, b) for a, b in args.gap],
        ),
    )
    begun = time.monotonic()
    notes = list(read.notes)
    for note in notes:
        err.print(clean(note, 500), style="dim", markup=False, soft_wrap=True)
    horizons = horizons_of(args.horizons, read.panel.n_time, read.panel.step_s, args.start)
    [(result, summary)] = scored(
        [BacktestCase("", read.panel, horizons)], chosen, args.start, err, rival, args.jobs
    )
    summary = (
        {
            "series": list(read.panel.names),
            "files": [str(p) for p in args.series],
            "rows": read.panel.n_time,
            "step_s": read.panel.step_s,
            "from": args.start,
            "experts": list(chosen),
            "notes": notes + summary.pop("notes"),
        }
        | summary
        | {"wall_s": round(time.monotonic() - begun, 3)}
    )
    if args.json:
        write_json(summary, out)
    else:
        print_load_scores(summary, out)
    if args.report is not None:
        from twin.backtest import PAGE, write_page

        write_page(summary, result, args.report / PAGE)
        if not args.json:
            out.print(f"report: {args.report / PAGE}", markup=False, soft_wrap=True)
    return 0


def chosen_forecasters(args: argparse.Namespace) -> tuple[str, ...]:
    """The forecasters to combine, or the one to score alone. Raises ConfigError, also for a wrong --from."""
    if not 0.1 <= args.start <= 0.9:
        raise ConfigError(f"--from {args.start:g}: expected a part of the rows from 0.1 to 0.9")
    option = "--experts" if args.model is None else "--model"
    given = None if args.experts is None else args.experts.split(",")
    return known_names(given if args.model is None else [args.model], option)


def known_names(names: Sequence[str] | None, option: str = "--experts") -> tuple[str, ...]:
    """Names of forecasters; None: those that the daemon combines. Raises ConfigError for others."""
    from models.load import DEFAULT_EXPERTS, FORECASTERS

    wanted = list(DEFAULT_EXPERTS if names is None else dict.fromkeys(n.strip() for n in names))
    unknown = [n for n in wanted if n not in FORECASTERS]
    if unknown or not wanted:
        named = clean(", ".join(unknown), 200) or "(nothing)"
        raise ConfigError(f"{option}: forecaster {named}: expected some of {', '.join(FORECASTERS)}")
    return tuple(wanted)


class BacktestCase(NamedTuple):
    """A panel to be scored at these horizons; `pooled`: which series are taken together (None: all)."""

    name: str
    panel: Any
    horizons: tuple[int, ...]
    pooled: list[int] | None = None


def scored(
    cases: Sequence[BacktestCase],
    chosen: tuple[str, ...],
    start: float,
    err: Console,
    rival: Rival | None = None,
    jobs: int = 1,
) -> list[tuple[Any, dict[str, Any]]]:
    """(what was issued, scores as plain data) of each case; a bar on the terminal while it runs."""
    from models.backtest import each_cells
    from models.load import FORECASTERS
    from twin.backtest import BacktestTask, backtest_terms, compare_rival, run_all
    from twin.run import ProgressBar

    blend = {name: FORECASTERS[name] for name in chosen}
    asks = [BacktestTask(c.panel, c.horizons, blend, backtest_terms(start)) for c in cases]
    if rival is not None:
        alone = {rival.name: rival.kind}
        asks += [
            BacktestTask(c.panel, c.horizons, alone, backtest_terms(start, rival, not i))
            for i, c in enumerate(cases)
        ]
    with ProgressBar(err, "backtest") as bar:
        results = run_all(asks, jobs, bar)
        bar.move(1.0, "scoring")
        out = []
        for i, case in enumerate(cases):
            pooled = list(range(case.panel.n)) if case.pooled is None else case.pooled
            cells, summary = scores_of(results[i], pooled)
            if rival is not None:
                other = results[len(cases) + i]
                summary["rival"] = compare_rival(
                    rival, (results[i], cells), (other, each_cells(other)), pooled
                )
            out.append((results[i], summary))
    return out


def scores_of(result: Any, pooled: list[int]) -> tuple[Any, dict[str, Any]]:
    """(cells of each horizon, scores as plain data) of one backtest."""
    from models.backtest import each_cells, overall as mean_of, score_load, to_best
    from models.load import ForecastGrid

    panel, cells = result.panel, each_cells(result)
    if not any(np.isfinite(one.error).any() for one in cells):
        named = ", ".join(clean(name) for name in panel.names[:3])
        raise ConfigError(
            f"{named}: nothing to score: after {result.start_row} of {panel.n_time} rows of "
            f"{duration(panel.step_s)}, no value has another a horizon later: give a longer --step, "
            "other --horizons, or a smaller --from"
        )
    summary = score_load(result, pooled, held=cells)
    day = ForecastGrid(panel.step_s, tuple(c.horizon for c in result.courses)).seasons[:1]
    notes = (
        [
            "seasonal: the value at the same time of the last day that was known"
            + ("" if result.start_row >= day[0] else "; where no day is behind, the last value")
        ]
        if day
        else ["seasonal: the same as the last value, as the step divides no day"]
    )

    def mase(columns: list[int]) -> dict[str, Any]:
        found = mean_of([to_best(one, columns) for one in cells])
        return {"mase": found["ratio"], "mase_low": found["low"], "mase_high": found["high"]}

    return cells, {
        "notes": notes,
        "horizons": summary,
        "overall": overall(summary) | mase(pooled),
        "overall_of": {panel.names[j]: mase([j]) for j in range(panel.n) if j not in pooled},
        "losses": losses(summary),
        "lookahead_origins_checked": result.origins_checked,
        "fits": len(result.cuts),
        "fits_cpu_s": round(result.fits_cpu_s, 3),
    }


def overall(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all horizons alike: MASE (geometric mean), coverage (mean), the worst ratio of pinball losses.

    `coverage90_by_targets` is the mean over targets that do not overlap, so that long horizons weigh less.
    """

    def known(key: str) -> list[float]:
        return [h[key] for h in told if h[key] is not None and math.isfinite(h[key])]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    mase = [v for v in known("mase") if v > 0]
    ratio = [h["pinball"] / h["pinball_persistence"] for h in told if h["pinball_persistence"] > 0]
    out = {
        "mase": math.exp(mean([math.log(v) for v in mase])) if mase else math.nan,
        "mase_worst": max(known("mase"), default=math.nan),
        "pinball_ratio_worst": max(ratio, default=math.nan),
    }
    for band in ("50", "90", "99"):
        for kind in ("", "_closed"):
            out[f"coverage{band}{kind}"] = mean(known(f"coverage{band}{kind}"))
    free = [(h["independent_targets"], h["coverage90"]) for h in told if math.isfinite(h["coverage90"])]
    count = sum(n for n, _ in free)
    out["coverage90_by_targets"] = sum(n * share for n, share in free) / count if count else math.nan
    out["independent_targets"] = count
    return out


def losses(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Losses to a rival, by error (MASE > 1) or pinball loss; `series` null: all, or the only one."""
    out = []
    for horizon in told:
        each = horizon["series"].items() if len(horizon["series"]) > 1 else ()
        units = [(None, horizon), *each]
        for name, unit in units:
            place = {"horizon_steps": horizon["horizon_steps"], "horizon_s": horizon["horizon_s"]}
            if unit["mase"] > 1.0 or (math.isnan(unit["mase"]) and unit["mae"] > 0.0):
                rivals = {k: unit[f"mae_{k}"] for k in ("naive", "seasonal", "ewma")}
                out.append(
                    place
                    | {
                        "series": name,
                        "score": "mase",
                        "value": unit["mase"],
                        "low": unit["mase_low"],
                        "high": unit["mase_high"],
                        "better": min(rivals, key=rivals.__getitem__),
                    }
                )
            if unit["pinball"] > unit["pinball_persistence"]:
                worse = unit["pinball"] / (unit["pinball_persistence"] or math.nan)
                out.append(
                    place
                    | {
                        "series": name,
                        "score": "pinball",
                        "value": worse,
                        "low": math.nan,
                        "high": math.nan,
                        "better": "persistence",
                    }
                )
    return out


def step_of(text: str) -> float:
    """Seconds of "60", "60s" or "5min". Raises ConfigError."""
    found = _SPAN.match(text.strip())
    if found is None or found[2] == "%" or float(found[1]) <= 0:
        raise ConfigError(f"--step {text}: expected seconds, or a span such as 5min or 1h")
    return float(found[1]) * SPAN_S.get(found[2], 1.0)


def horizons_of(text: str | None, n_time: int, step_s: float, start: float) -> tuple[int, ...]:
    """Rows ahead, ascending. Without `text`: 1, 5, 15, 60, 6 h, 24 h and a tenth of the rows, up to that."""
    if n_time < LEAST_ROWS:
        raise ConfigError(
            f"{n_time} rows of {duration(step_s)}: expected at least {LEAST_ROWS} to score anything: give a "
            "longer series or a shorter --step"
        )
    most = n_time - 1 - math.ceil(start * n_time)
    if text is None:
        tenth = max(1, n_time // 10)
        spans = [round(s / step_s) for s in (21_600.0, 86_400.0) if s / step_s == round(s / step_s)]
        found = {h for h in (1, 5, 15, 60, *spans, tenth) if 1 <= h <= min(tenth, most)}
        return tuple(sorted(found))
    problems, out = [], set()
    for word in text.split(",") if text.strip() else [text]:
        match = _SPAN.match(word.strip())
        if match is None:
            asked = clean(word) or "(nothing)"
            problems.append(f"--horizons {asked}: expected rows (5), a span (15min, 6h) or a part (10%)")
            continue
        value, unit = float(match[1]), match[2]
        rows = value if not unit else value / 100 * n_time if unit == "%" else value * SPAN_S[unit] / step_s
        if (not unit and rows != round(rows)) or not 1 <= round(rows) <= most:
            asked = f"{number(rows)} rows of {number(step_s)} s"
            problems.append(f"--horizons {word}: {asked}, expected 1 to {most} of {n_time} rows")
        elif unit not in ("", "%") and abs(rows - round(rows)) > 1e-6:
            problems.append(f"--horizons {word}: expected a multiple of the step of {number(step_s)} s")
        else:
            out.add(round(rows))
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(out))


def _where(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    column, found, value = text.partition("=")
    if not found or not column:
        raise ConfigError(f"--where {text}: expected COLUMN=VALUE")
    return column, value
