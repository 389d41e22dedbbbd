"""The command `backtest load`: how well forecasts of load and demand would have done on recorded series."""

from __future__ import annotations

import argparse
import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from twin.backtest import Rival, print_load_scores
from twin.catalogue import ConfigError, clean, did_you_mean, duration, number, seconds_of
from twin.cli.arguments import REPORT, present
from twin.cli.grammar import Verb, WrongCall
from twin.report import print_line
from twin.run import on_cluster

LEAST_ROWS = 20
MOST_JOBS = 64  # source: estimate; more gain nothing, as a backtest has few parts
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(%|)")


def _jobs(text: str) -> int:
    number_ = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number_ <= MOST_JOBS:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {MOST_JOBS} processes")
    return number_


def run_load(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score, print, write the page. Raises ConfigError for what the operator can mend."""
    if args.model is not None and args.experts is not None:
        raise WrongCall("--model scores one forecaster, --experts several: expected one of the two")
    if not args.value_column and args.aggregate != "count":
        raise WrongCall("--value-column is missing: expected the columns of values")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, on odd data: what matters is reported as a note
        with on_cluster(args.cluster):
            return _scored(args, out, err)


def _scored(args: argparse.Namespace, out: Console, err: Console) -> int:
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
            step_s=args.step_s,
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
        [BacktestCase("", read.panel, horizons, refits=args.refits)],
        chosen,
        args.start,
        err,
        rival,
        args.jobs,
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
    present(args, summary, print_load_scores, out)
    if args.report is not None:
        from twin.backtest import PAGE, write_page

        write_page(summary, result, args.report / PAGE)
        print_line(err, f"report: {args.report / PAGE}")
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
        near = did_you_mean(unknown[0], FORECASTERS) if unknown else ""
        raise ConfigError(f"{option}: forecaster {named}: expected some of {', '.join(FORECASTERS)}{near}")
    return tuple(wanted)


class BacktestCase(NamedTuple):
    """A panel to be scored at these horizons; `pooled`: which series are taken together (None: all).

    `refits`: as in `backtest_terms`.
    """

    name: str
    panel: Any
    horizons: tuple[int, ...]
    pooled: list[int] | None = None
    refits: int | None = None


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
    asks = [BacktestTask(c.panel, c.horizons, blend, backtest_terms(start, refits=c.refits)) for c in cases]
    if rival is not None:
        alone = {rival.name: rival.kind}
        asks += [
            BacktestTask(c.panel, c.horizons, alone, backtest_terms(start, rival, not i, c.refits))
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
    from models.backtest import (
        LEAST_BLOCKS,
        apart_targets,
        each_cells,
        overall as mean_of,
        published_coverage,
        score_load,
        to_best,
    )
    from models.load import ForecastGrid

    panel, cells = result.panel, each_cells(result)
    if not any(np.isfinite(one.error).any() for one in cells):
        named = ", ".join(clean(name) for name in panel.names[:3])
        raise ConfigError(
            f"{named}: nothing to score: after {result.start_row} of {panel.n_time} rows of "
            f"{duration(panel.step_s)}, no value has another one horizon later; give a longer --step, "
            "other --horizons, or a smaller --from"
        )
    summary = score_load(result, pooled, held=cells)
    for place, row in enumerate(summary):
        row["coverage90_told"], row["told_targets"] = published_coverage(result, place, pooled)
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
        apart = [apart_targets(one, columns) for one in cells]
        counts = [n >= LEAST_BLOCKS for n in apart]
        found = mean_of(
            [to_best(one, columns) for one, n in zip(cells, counts, strict=True) if n or not any(counts)]
        )
        interval = {"mase": found["ratio"], "mase_low": found["low"], "mase_high": found["high"]}
        return interval | {"horizons_counted": sum(counts)}

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


def overall(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all horizons alike: MASE (geometric mean), coverage (mean), the worst ratio of pinball losses.

    Horizons with fewer than ten targets that do not overlap are left out where others have more.
    `coverage90_by_targets` is the mean over targets that do not overlap: most of them are one step ahead.
    """
    from models.backtest import LEAST_BLOCKS

    enough = [h for h in scores if h["independent_targets"] >= LEAST_BLOCKS]
    scores = enough or scores

    def known(key: str) -> list[float]:
        return [h[key] for h in scores if h[key] is not None and math.isfinite(h[key])]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    mase = [v for v in known("mase") if v > 0]
    ratio = [h["pinball"] / h["pinball_persistence"] for h in scores if h["pinball_persistence"] > 0]
    out = {
        "mase": math.exp(mean([math.log(v) for v in mase])) if mase else math.nan,
        "mase_worst": max(known("mase"), default=math.nan),
        "pinball_ratio_worst": max(ratio, default=math.nan),
    }
    for band in ("50", "90", "99"):
        for kind in ("", "_closed"):
            out[f"coverage{band}{kind}"] = mean(known(f"coverage{band}{kind}"))
    free = [(h["independent_targets"], h["coverage90"]) for h in scores if math.isfinite(h["coverage90"])]
    count = sum(n for n, _ in free)
    out["coverage90_by_targets"] = sum(n * share for n, share in free) / count if count else math.nan
    out["independent_targets"] = count
    return out


def losses(scores: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Losses to a rival, by error (MASE > 1) or pinball loss; `series` null: all, or the only one."""
    out = []
    for horizon in scores:
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


def horizons_of(text: str | None, n_time: int, step_s: float, start: float) -> tuple[int, ...]:
    """Rows ahead, ascending. Without `text`: 1, 5, 15, 60, 6 h, 24 h and a tenth of the rows, up to that."""
    if n_time < LEAST_ROWS:
        raise ConfigError(
            f"{n_time} rows of {duration(step_s)}: expected at least {LEAST_ROWS} for a score; give a "
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
        word = word.strip()
        span_s, part = seconds_of(word), _PART.fullmatch(word)
        if span_s is None and part is None:
            asked = clean(word) or "(nothing)"
            problems.append(f"--horizons {asked}: expected rows (5), a duration (15min, 6h) or a part (10%)")
            continue
        whole = part is not None and not part[2]  # a number of rows
        rows = (float(part[1]) * (n_time / 100 if part[2] else 1)) if part else (span_s or 0.0) / step_s
        if (whole and rows != round(rows)) or not 1 <= round(rows) <= most:
            asked = f"{number(rows)} rows of {number(step_s)} s"
            problems.append(f"--horizons {word}: {asked}, expected 1 to {most} of {n_time} rows")
        elif part is None and abs(rows - round(rows)) > 1e-6:
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


# Options of scoring: the same for one series and for a suite of them.
SCORING = """
    --horizons H,H,..  rows (5), durations (15min, 6h) or parts of the series (10%)
    --from FRACTION=0.5>start  score origins after this fraction of the rows
    --model NAME  score only this forecaster
    --experts A,B,..  combine only these forecasters
    --rival NAME  score this forecaster next to the blend
    --refits COUNT  fits at growing intervals (default: when the daemon would fit)
    --jobs COUNT=1  number of parallel processes
    --cluster ADDRESS  on the workers of this Dask scheduler, such as tcp://HOST:8786
"""
VERBS = {
    "backtest load": Verb(
        run_load,
        f"""
        --series FILE!+  CSV file, optionally compressed
        --time-column T!  column of times
        --value-column V+  columns of values
        --step DURATION  step of the time grid, such as 5min
        --aggregate HOW  aggregation of the rows of one step: mean, sum, last, max, count
        --total  score the sum of all columns
        --where COLUMN:VALUE  only rows with this value in this column
        --gap FROM TO  exclude the time between these instants, such as an outage; repeatable
        --known-column C+  columns that are known ahead, such as a weather forecast
        --zone ZONE=UTC  time zone of times without an offset
        {REPORT}
        {SCORING}
        """,
        ("--series load.csv --time-column time --value-column power_w --step 1min --horizons 15min,6h",),
        rows="horizons",
    )
}
