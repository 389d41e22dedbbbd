"""Reports of a load backtest: a table for the terminal, and a page with scores, forecasts and their bands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.console import Console

from models.backtest import BacktestResult, HorizonForecasts, binomial
from models.load import BANDS, MEDIAN
from twin.catalogue import F64, I64, TimeAxis, clean, duration, number
from twin.report import (
    Line,
    PlotLayout,
    bullets,
    cards,
    details,
    figure,
    fill,
    grid,
    heading,
    joined,
    marked,
    page,
    pair,
    paragraph,
    plot,
    print_line,
    responsive,
    section,
    stacked,
    table,
    terms,
    whiskers,
    write_whole,
)


def ratio_words(value: float) -> str:
    """A ratio near 1, always to three places: 0.9996 is not 1."""
    return "–" if not math.isfinite(value) else f"{value:.4f}" if 0.9995 <= value < 1.0005 else f"{value:.3f}"


def amount(value: float) -> str:
    """A value of any size: with an exponent where digits would fill the line, or all be zero."""
    plain = not math.isfinite(value) or value == 0.0 or 1e-3 <= abs(value) < 1e9
    return number(value) if plain else f"{value:.3g}"


def better_of(report: Mapping[str, Any], name: str) -> str:
    """The better side, as a word."""
    if report["better"] == "none":
        return "even"
    return ("ours" if report["better"] == "ours" else clean(name)) + ("" if report["sure"] else ", not sure")


def rival_lines(report: Mapping[str, Any]) -> list[str]:
    """One data set's comparison, in lines for the terminal."""
    name = clean(report["name"])

    def line(ahead: str, part: Mapping[str, Any]) -> str:
        return (
            f"beside {name}, {ahead}: error {ratio_span(part)} of its error; better: {better_of(part, name)}"
        )

    lines = [line(f"{duration(h['horizon_s'])} ahead", h) for h in report["horizons"]]
    return [*lines, line("all horizons", report["overall"]), report["budget_words"]]


def ratio_span(part: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    return f"{ratio_words(part['ratio'])} ({ratio_words(part['low'])} to {ratio_words(part['high'])})"


WIDE_COLUMNS = 116  # of a terminal that has room for all
COLUMNS = ("ahead", "MAE", "last", "season", "EWMA", "MASE (90 %)", "pinball", "in 50 90 99 %", "at peaks",
           "ramps hit", "targets", "apart")  # fmt: skip
NARROW = ("ahead", "MAE", "MASE (90 %)", "pinball", "in 50 90 99 %", "apart")


def print_load_scores(report: Mapping[str, Any], out: Console) -> None:
    """The table, and where it loses."""
    names = ", ".join(report["series"][:6]) + (" …" if len(report["series"]) > 6 else "")
    scored_from = f"scored after {100 * report['from']:.0f} %"
    title = f"{names} · {report['rows']:,} rows of {duration(report['step_s'])} · {scored_from}"
    columns = [c for c in COLUMNS if out.width >= WIDE_COLUMNS or c in NARROW]
    rows = [[cells[head] for head in columns] for cells in map(_cells, report["horizons"])]
    out.print(clean(title, 200), style="italic", markup=False, soft_wrap=True)
    grid(out, columns, rows, right=range(1, len(columns)), folds=())
    if "rival" in report:
        for line in rival_lines(report["rival"]):
            out.print(line, markup=False, soft_wrap=True)
    print_line(out, "apart: targets that do not overlap in time; intervals only from ten of them on", "dim")
    for line in (coverage_words(report["horizons"]), moves_words(report["horizons"])):
        if line:
            out.print(line, markup=False, soft_wrap=True)
    worse = report["losses"]
    for loss in worse[:20]:
        out.print(loss_words(loss), markup=False, soft_wrap=True)
    if len(worse) > 20:
        out.print(f"{len(worse) - 20} more are in the JSON")
    checked = (
        f"{report['lookahead_origins_checked']:,} origins were forecast again without later rows: the same"
    )
    out.print(checked, style="dim", markup=False, soft_wrap=True)


def coverage_words(horizons: Sequence[Mapping[str, Any]]) -> str:
    """A line on the coverage of the band that a daemon reports; "" where none was reported."""
    parts = [
        f"{duration(h['horizon_s'])} ahead {number(100 * h['coverage90_told'])} %"
        for h in horizons
        if h["told_targets"]
    ]
    return f"in the 90 % band that a daemon reports: {', '.join(parts)}" if parts else ""


def moves_words(horizons: Sequence[Mapping[str, Any]]) -> str:
    """A line on the coverage after unusual moves, of horizons with enough of them; "" without any."""
    parts = [
        f"{duration(h['horizon_s'])} ahead {number(100 * h['coverage90_after_moves'])} % "
        f"of {h['after_moves']:,}"
        for h in horizons
        if h["after_moves"] >= LEAST_TARGETS
    ]
    return f"in the 90 % band after unusual moves: {', '.join(parts)}" if parts else ""


def _cells(h: Mapping[str, Any]) -> dict[str, str]:
    """A horizon's scores as people read them, by column."""
    ratio = h["pinball"] / h["pinball_persistence"] if h["pinball_persistence"] else math.nan
    values = (
        duration(h["horizon_s"]), *(amount(h[k]) for k in ("mae", "mae_naive", "mae_seasonal", "mae_ewma")),
        f"{ratio_words(h['mase'])} ({ratio_words(h['mase_low'])} to {ratio_words(h['mase_high'])})",
        ratio_words(ratio),
        " ".join(number(100 * h[f"coverage{band}"]) for band in ("50", "90", "99")),
        f"{number(100 * h['peak_error'], 2)} %", f"{number(100 * h['ramp_hit_rate'], 2)} %",
        f"{h['targets']:,}", f"{h['independent_targets']:,}",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def loss_words(loss: Mapping[str, Any]) -> str:
    """A line on where a rival did better."""
    whose = "" if loss["series"] is None else f", {clean(loss['series'])}"
    rival = {"naive": "the last value", "seasonal": "the same time yesterday", "ewma": "EWMA",
             "persistence": "the last value with its past errors"}[loss["better"]]  # fmt: skip
    span = "" if math.isnan(loss["low"]) else f" ({ratio_words(loss['low'])} to {ratio_words(loss['high'])})"
    what = "MASE" if loss["score"] == "mase" else "pinball loss ×"
    ahead = duration(loss["horizon_s"])
    return f"loses {ahead} ahead{whose}: {what} {ratio_words(loss['value'])}{span}, to {rival}"


PAGE = "backtest.html"
MAX_POINTS = 480
LEAST_WINDOW_ROWS = 240
WINDOW_HORIZONS = 4  # of the longest horizon are drawn
MAX_LOSSES = 40
LEAST_TARGETS = 20  # fewer say nothing about coverage
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


def write_page(report: Mapping[str, Any], result: BacktestResult, path: Path) -> None:
    """Write the page. Raises StorageError if it cannot be written."""
    write_whole(path, render(report, result))


def render(report: Mapping[str, Any], result: BacktestResult) -> str:
    """The page as text. `report`: what the command says as JSON."""
    shown = int(np.argmax(np.nansum(np.abs(result.panel.values), axis=0)))
    rows = _rows(result)
    times_ns = result.panel.t_ns(rows)
    axis = TimeAxis(times_ns, int(times_ns[0]), int(times_ns[-1]))
    body = (
        _head(report)
        + section("scores", "Scores", _scores_intro(report), _table(report), _words())
        + _courses(result, shown, rows, axis)
        + _compared(report)
        + _rival(report)
        + _losses(report)
        + _series(report)
    )
    times = [int(t) for t in times_ns]
    title = f"racktwin: backtest of {clean(', '.join(report['series'][:3]))}"
    return page(title, body, [axis.label(t) for t in times], [axis.place(t) for t in times])


def _head(report: Mapping[str, Any]) -> Markup:
    names = ", ".join(clean(n) for n in report["series"][:20])
    notes = [clean(note, 400) for note in report["notes"][:40]]
    best, below = report["overall"]["mase"], "error over that of the best of three rivals; below 1 is better"
    shown = [] if math.isnan(best) else [("MASE, all horizons", number(best), below)]
    coverage = number(100 * report["overall"]["coverage90"])
    shown.append(("Inside the 90 % band", f"{coverage} %", "of outcomes, each horizon alike"))
    line = (
        f"{report['rows']:,} rows of {duration(report['step_s'])}. Each forecast was made from what was "
        "known by then: what is fitted was fitted on earlier rows only, and "
        f"{report['lookahead_origins_checked']:,} origins were forecast again with later rows taken away, "
        f"with the same result. Scored: origins after {100 * report['from']:.0f} % of the rows."
    )
    return (
        fill("header.html", title=f"Backtest: {names}", lines=[line])
        + cards(shown)
        + (details("Changes made to the data", bullets(notes)) if notes else Markup(""))
    )


def _scores_intro(report: Mapping[str, Any]) -> str:
    if len(report["series"]) == 1:
        return "Per horizon."
    return f"Per horizon, {len(report['series'])} series taken together: their errors are summed."


def _table(report: Mapping[str, Any]) -> Markup:
    return _score_table([(duration(h["horizon_s"]), h) for h in report["horizons"]], "ahead")


def _score_table(units: list[tuple[str, Mapping[str, Any]]], first: str) -> Markup:
    head = [first, "error", "last", "yesterday", "EWMA", "MASE", "pinball", "inside 50, 90, 99 %", "at peaks",
            "ramps hit", "outcomes"]  # fmt: skip
    rows = []
    for name, h in units:
        ratio = h["pinball"] / h["pinball_persistence"] if h["pinball_persistence"] else math.nan
        within = ", ".join(number(100 * h[f"coverage{band}"]) for band in BANDS)
        few = h["coverage90_low"]
        if not math.isnan(few):
            low, high = number(100 * few, 2), number(100 * h["coverage90_high"], 2)
            within = stacked(within, f"90: {low} to {high}")
        span = marked(f"({ratio_words(h['mase_low'])} to {ratio_words(h['mase_high'])})", "soft")
        hits: list[str] = [f"{number(100 * h['ramp_hit_rate'], 2)} %"]
        if not math.isnan(h["ramp_false_rate"]):
            hits.append(marked(f"({number(100 * h['ramp_false_rate'], 2)} % false)", "soft"))
        rows.append([
            clean(name), *(amount(h[k]) for k in ("mae", "mae_naive", "mae_seasonal", "mae_ewma")),
            Markup("<b>{}</b> {}").format(ratio_words(h["mase"]), span), ratio_words(ratio), within,
            f"{number(100 * h['peak_error'], 2)} %",
            joined(hits, " "), f"{h['targets']:,}",
        ])  # fmt: skip
    return table(head, rows, tuple(range(1, len(head))))


def _words() -> Markup:
    return details("Meaning of the columns", terms(WORDS.items()))


def _rows(result: BacktestResult) -> I64:
    """Rows to draw: the end of the scored part, at most so many points."""
    last = result.panel.n_time - 1
    window = max(LEAST_WINDOW_ROWS, WINDOW_HORIZONS * result.courses[-1].horizon)
    first = max(min(result.start_row, last - 1), last - window)
    return np.unique(np.linspace(first, last, min(MAX_POINTS, last - first + 1)).round().astype(np.int64))


def at_rows(course: HorizonForecasts, rows: I64, series: int) -> F64:
    """Quantiles [n_row, n_level] of the values at these rows, as issued a horizon or a stride more before."""
    targets = course.origins + course.horizon
    place = np.searchsorted(targets, rows, side="right") - 1
    old = (place < 0) | (rows - targets[np.maximum(place, 0)] >= course.stride)
    out: F64 = course.quantiles[np.maximum(place, 0), series].copy()
    out[old] = np.nan
    return out


def _courses(result: BacktestResult, shown: int, rows: I64, axis: TimeAxis) -> Markup:
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
        wide, narrow = (
            plot(lines, axis, "value", title, PlotLayout(width=w, height=250)) for w in (1080, 520)
        )
        drawn.append(
            figure(
                title,
                f"Each point was forecast {ahead} before. Shades: 50, 90, 99 %.",
                responsive(wide, narrow),
                "lead",
            )
        )
    name = result.panel.names[shown] if result.panel.names else str(shown)
    intro = f"The end of the scored part, {clean(name)}: measured, and forecast with its bands."
    return section("course", "Forecasts", intro, *drawn)


def _compared(report: Mapping[str, Any]) -> Markup:
    """Errors over each rival's, and coverage, by horizon."""
    errors, inside = [], []
    for h in report["horizons"]:
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
    for h in report["horizons"]:
        ratios = [h["mae"] / h[k] if h[k] else math.nan for k in ("mae_naive", "mae_seasonal", "mae_ewma")]
        rows.append(
            [duration(h["horizon_s"]), *(ratio_words(r) for r in ratios), f"{h['ewma_half_life']} rows"]
        )
    head = ["ahead", "over last value", "over yesterday", "over EWMA", "EWMA's half-life"]
    beside = heading("Error over each rival's") + table(head, rows, (1, 2, 3, 4))
    beside += paragraph(coverage_words(report["horizons"]), "soft")
    return section("compared", "Compared", "By horizon.", pair(figures), beside)


def _rival(report: Mapping[str, Any]) -> Markup:
    """Another forecaster beside, if one was asked for."""
    if "rival" not in report:
        return Markup("")
    rival = report["rival"]
    name = clean(rival["name"])
    units = [*((duration(h["horizon_s"]), h) for h in rival["horizons"]), ("all", rival["overall"])]
    rows = [
        [ahead, *(amount(unit[k]) if k in unit else "" for k in ("mae", "mae_rival")), ratio_span(unit),
         clean(better_of(unit, rival["name"]))]
        for ahead, unit in units
    ]  # fmt: skip
    head = ["ahead", "error", f"error of {name}", "ratio (90 %)", "better"]
    intro = f"The same origins and targets, forecast by {name}: {clean(rival['budget_words'], 400)}."
    return section("rival", f"Beside {name}", intro, table(head, rows, (1, 2, 3)))


def _losses(report: Mapping[str, Any]) -> Markup:
    lines = [clean(loss_words(loss), 300) for loss in report["losses"][:MAX_LOSSES]]
    more = len(report["losses"]) - MAX_LOSSES
    rest = paragraph(f"{more} more are in the JSON." if more > 0 else "", "soft")
    intro = "Where a rival was better." if lines else "No rival was better at any horizon of any series."
    return section("losses", "Where it loses", intro, bullets(lines), rest)


def _series(report: Mapping[str, Any]) -> Markup:
    if len(report["series"]) < 2:
        return Markup("")
    parts = []
    for h in report["horizons"]:
        drawn = _score_table([(clean(name), unit) for name, unit in h["series"].items()][:100], "series")
        parts.append(details(f"{duration(h['horizon_s'])} ahead", drawn))
    return section("series", "Series by series", "Each series by itself.", *parts)
