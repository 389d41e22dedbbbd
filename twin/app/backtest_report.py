"""The page of a backtest: scores in plain words, forecasts with their bands over the series, and rivals.

Made of the report's own plots. Pure but for the one file that it is asked to write. Part of the shell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.backtest import Course, Result
from models.forecaster import BANDS, MEDIAN
from models.scores import binomial
from twin.app.backtest_goals import amount, ratio_words
from twin.app.backtest_rival import ratio_span, who
from twin.app.backtest_table import loss_words
from twin.app.report import write_whole
from twin.app.report_page import page
from twin.app.report_plots import figure, pair
from twin.app.report_sections import section, table
from twin.app.report_svg import Line, plot, whiskers
from twin.app.report_text import TimeAxis, clean, duration, number, safe
from twin.frame import F64, I64

PAGE = "backtest.html"
MAX_POINTS = 480
LEAST_WINDOW_ROWS = 240
WINDOW_HORIZONS = 4  # of the longest horizon are drawn
MAX_LOSSES = 40
LEAST_TARGETS = 20  # fewer tell nothing of coverage
WORDS = {
    "ahead": "How far ahead was forecast.",
    "error": "Mean absolute error, in the series' own unit, of the forecast's middle.",
    "last, yesterday, EWMA": "The same of three rivals: the last value stays; the same time yesterday; a "
    "mean that forgets (the best of three half-lives in hindsight).",
    "MASE": "Error over that of the best rival: below 1 the forecast is better. In brackets, where it lies "
    "with 90 % confidence.",
    "pinball": "Loss of all quantiles over that of the last value with its past errors as bands: below 1 is "
    "better.",
    "inside 50, 90, 99 %": "How many outcomes lay in the band that should hold so many.",
    "at peaks": "Mean error at the highest 5 % of outcomes, in per cent of them: negative is too low.",
    "ramps hit": "Of the great changes, how many were announced: right direction, at least half as great as "
    "such changes are. Behind it, how many announcements came to nothing.",
}


def write_page(told: Mapping[str, Any], result: Result, path: Path) -> None:
    """Write the page. Raises StorageError if it cannot be written."""
    write_whole(path, render(told, result))


def render(told: Mapping[str, Any], result: Result) -> str:
    """The page as text. `told`: what the command says as JSON."""
    shown = int(np.argmax(np.nansum(np.abs(result.panel.values), axis=0)))
    rows = _rows(result)
    times_ns = result.panel.t_ns(rows)
    axis = TimeAxis(times_ns, int(times_ns[0]), int(times_ns[-1]))
    body = (
        _head(told)
        + section("scores", "Scores", _scores_intro(told), _table(told), _words())
        + _courses(result, shown, rows, axis)
        + _compared(told)
        + _rival(told)
        + _losses(told)
        + _series(told)
    )
    times = [int(t) for t in times_ns]
    title = f"racktwin: backtest of {clean(', '.join(told['series'][:3]))}"
    return page(title, body, [axis.label(t) for t in times], [axis.place(t) for t in times])


def _head(told: Mapping[str, Any]) -> str:
    names = ", ".join(safe(n) for n in told["series"][:20])
    notes = "".join(f"<li>{safe(note, 400)}</li>" for note in told["notes"][:40])
    best = "" if math.isnan(told["overall"]["mase"]) else (
        f'<div class="card"><i>MASE, all horizons</i><b>{number(told["overall"]["mase"])}</b>'
        "<p>error over that of the best of three rivals; below 1 is better</p></div>"
    )  # fmt: skip
    coverage = number(100 * told["overall"]["coverage90"])
    return (
        f"<header><h1>Backtest: {names}</h1><p>{told['rows']:,} rows of {duration(told['step_s'])}. Each "
        "forecast was made from what was known by then: what is fitted was fitted on earlier rows only, and "
        f"{told['lookahead_origins_checked']:,} origins were forecast again with later rows taken away, with "
        f"the same result. Scored: origins after {100 * told['from']:.0f} % of the rows.</p></header>"
        f'<div class="cards">{best}<div class="card"><i>Inside the 90 % band</i><b>{coverage} %</b>'
        "<p>of outcomes, mean over the horizons</p></div></div>"
        + (
            f"<details><summary>What was done to the data</summary><ul>{notes}</ul></details>"
            if notes
            else ""
        )
    )


def _scores_intro(told: Mapping[str, Any]) -> str:
    if len(told["series"]) == 1:
        return "Per horizon."
    return f"Per horizon, {len(told['series'])} series taken together: their errors are summed."


def _table(told: Mapping[str, Any]) -> str:
    return _score_table([(duration(h["horizon_s"]), h) for h in told["horizons"]], "ahead")


def _score_table(units: list[tuple[str, Mapping[str, Any]]], first: str) -> str:
    head = [first, "error", "last", "yesterday", "EWMA", "MASE", "pinball", "inside 50, 90, 99 %", "at peaks",
            "ramps hit", "outcomes"]  # fmt: skip
    rows = []
    for name, h in units:
        ratio = h["pinball"] / h["pinball_persistence"] if h["pinball_persistence"] else math.nan
        within = ", ".join(number(100 * h[f"coverage{band}"]) for band in BANDS)
        few = h["coverage90_low"]
        if not math.isnan(few):
            low, high = number(100 * few, 2), number(100 * h["coverage90_high"], 2)
            within += f"<br><span class='soft'>90: {low} to {high}</span>"
        span = f"<span class='soft'>({ratio_words(h['mase_low'])} to {ratio_words(h['mase_high'])})</span>"
        false = "" if math.isnan(h["ramp_false_rate"]) else (
            f"<span class='soft'>({number(100 * h['ramp_false_rate'], 2)} % false)</span>"
        )  # fmt: skip
        rows.append([
            safe(name), *(amount(h[k]) for k in ("mae", "mae_naive", "mae_seasonal", "mae_ewma")),
            f"<b>{ratio_words(h['mase'])}</b> {span}", ratio_words(ratio), within,
            f"{number(100 * h['peak_error'], 2)} %",
            f"{number(100 * h['ramp_hit_rate'], 2)} % {false}", f"{h['targets']:,}",
        ])  # fmt: skip
    return table(head, rows, tuple(range(1, len(head))))


def _words() -> str:
    told = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in WORDS.items())
    return f"<details><summary>What the columns mean</summary><dl>{told}</dl></details>"


def _rows(result: Result) -> I64:
    """Rows to draw: the end of the scored part, at most so many points."""
    last = result.panel.n_time - 1
    window = max(LEAST_WINDOW_ROWS, WINDOW_HORIZONS * result.courses[-1].horizon)
    first = max(min(result.start_row, last - 1), last - window)
    return np.unique(np.linspace(first, last, min(MAX_POINTS, last - first + 1)).round().astype(np.int64))


def at_rows(course: Course, rows: I64, series: int) -> F64:
    """Quantiles [n_row, n_level] of the values at these rows, as issued a horizon or a stride more before."""
    targets = course.origins + course.horizon
    place = np.searchsorted(targets, rows, side="right") - 1
    old = (place < 0) | (rows - targets[np.maximum(place, 0)] >= course.stride)
    out: F64 = course.quantiles[np.maximum(place, 0), series].copy()
    out[old] = np.nan
    return out


def _courses(result: Result, shown: int, rows: I64, axis: TimeAxis) -> str:
    actual = result.panel.values[rows, shown]
    blank = np.full(len(rows), np.nan)
    drawn = []
    for course in result.courses[:1] + result.courses[1:][-1:]:
        q = at_rows(course, rows, shown)
        edges = {name: (q[:, low], q[:, high]) for name, (low, high) in BANDS.items()}
        lines = [Line("", blank, 1, *edges["99"]), Line("", blank, 1, *edges["90"])]
        lines += [Line("forecast", q[:, MEDIAN], 1, *edges["50"]), Line("measured", actual, 2)]
        ahead = duration(course.horizon * result.panel.step_s)
        title = f"{ahead} ahead"
        wide, narrow = (plot(lines, axis, "value", title, width=w, height=250) for w in (1080, 520))
        both = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        drawn.append(
            figure(title, f"Each point was forecast {ahead} before. Shades: 50, 90, 99 %.", both, "lead")
        )
    name = result.panel.names[shown] if result.panel.names else str(shown)
    intro = f"The end of the scored part, {safe(name)}: measured, and forecast with its bands."
    return section("course", "Forecasts", intro, *drawn)


def _compared(told: Mapping[str, Any]) -> str:
    """Errors over each rival's, and coverage, by horizon."""
    errors, inside = [], []
    for h in told["horizons"]:
        ahead = duration(h["horizon_s"])
        half = (h["mase_high"] - h["mase_low"]) / 2
        if not math.isnan(h["mase"]):
            errors.append((ahead, h["mase"], 0.0 if math.isnan(half) else half))
        low, high = binomial(h["coverage90"], h["independent_targets"])
        if h["independent_targets"] >= LEAST_TARGETS and not math.isnan(low):
            inside.append((ahead, 100 * h["coverage90"], 50 * (high - low)))
    figures = []
    if errors:
        drawn = whiskers(errors, "", "MASE by horizon")
        figures.append(
            figure("Error over the best rival's", "Below 1 the forecast is better; 90 % interval.", drawn)
        )
    if inside:
        drawn = whiskers(inside, "%", "Coverage of the 90 % band by horizon")
        sentence = f"Should be 90 %; its interval, from {LEAST_TARGETS} outcomes that do not overlap."
        figures.append(figure("Inside the 90 % band", sentence, drawn))
    rows = []
    for h in told["horizons"]:
        ratios = [h["mae"] / h[k] if h[k] else math.nan for k in ("mae_naive", "mae_seasonal", "mae_ewma")]
        rows.append(
            [duration(h["horizon_s"]), *(ratio_words(r) for r in ratios), f"{h['ewma_half_life']} rows"]
        )
    head = ["ahead", "over last value", "over yesterday", "over EWMA", "EWMA's half-life"]
    beside = "<h3>Error over each rival's</h3>" + table(head, rows, (1, 2, 3, 4))
    return section("compared", "Compared", "By horizon.", pair(figures), beside)


def _rival(told: Mapping[str, Any]) -> str:
    """Another forecaster beside, if one was asked for."""
    if "rival" not in told:
        return ""
    rival = told["rival"]
    name = safe(rival["name"])
    units = [*((duration(h["horizon_s"]), h) for h in rival["horizons"]), ("all", rival["overall"])]
    rows = [
        [ahead, *(amount(unit[k]) if k in unit else "" for k in ("mae", "mae_rival")), ratio_span(unit),
         safe(who(unit, rival["name"]))]
        for ahead, unit in units
    ]  # fmt: skip
    head = ["ahead", "error", f"error of {name}", "ratio (90 %)", "better"]
    intro = f"The same origins and targets, forecast by {name}: {safe(rival['budget_words'], 400)}."
    return section("rival", f"Beside {name}", intro, table(head, rows, (1, 2, 3)))


def _losses(told: Mapping[str, Any]) -> str:
    lines = [f"<li>{safe(loss_words(loss), 300)}</li>" for loss in told["losses"][:MAX_LOSSES]]
    more = len(told["losses"]) - MAX_LOSSES
    rest = f'<p class="soft">{more} more are in the JSON.</p>' if more > 0 else ""
    intro = "Where a rival was better." if lines else "No rival was better at any horizon of any series."
    return section("losses", "Where it loses", intro, f"<ul>{''.join(lines)}</ul>{rest}")


def _series(told: Mapping[str, Any]) -> str:
    if len(told["series"]) < 2:
        return ""
    parts = []
    for h in told["horizons"]:
        drawn = _score_table([(clean(name), unit) for name, unit in h["series"].items()][:100], "series")
        parts.append(f"<details><summary>{duration(h['horizon_s'])} ahead</summary>{drawn}</details>")
    return section("series", "Series by series", "Each series by itself.", *parts)
