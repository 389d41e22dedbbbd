"""Closed forms of checkpoint intervals: the terms of a job, and the effective training time of an interval.

Terms are read from the command line (times are `60`, `60s`, `10m`, `1.8h`, `2d`; all errors are reported at
once). The forms cover one tier, two tiers, early saves on predictions, and Weibull times between failures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from policies.checkpointing import (
    FIXED_S,
    SaveTerms,
    best_ahead,
    best_plan,
    best_weibull,
    ettr_ahead,
    ettr_at,
    ettr_weibull,
    single_tier as single,
)
from twin.catalogue import F64, ConfigError, clean, duration, number, seconds_of
from twin.report import grid

LEAST_S, MOST_S = 1e-3, 1e10  # of a time that is not zero: 300 years. source: estimate
LEAST_WEIBULL, MOST_WEIBULL = 0.2, 5.0  # beyond, no machine was seen to fail so. source: estimate
LEAD_S = 600.0  # time from a prediction to its failure, unless given. source: estimate


@dataclass(frozen=True)
class JobTerms:
    """A job's terms in seconds; NaN: not given. `recall` 0: nothing is predicted; `weibull` 1: no memory."""

    mttf_s: float
    save_s: float
    restart_s: float
    flush_s: float
    recall: float
    precision: float
    lead_s: float
    weibull: float
    local_save_s: float
    local_restart_s: float
    soft_mttf_s: float
    rate_shape: float = math.inf  # of the Gamma that is believed of the rate; inf: sure

    @property
    def two_levels(self) -> bool:
        """True if there is a tier in memory."""
        return not math.isnan(self.local_save_s)


class ArgumentCheck:
    """Options to numbers; keeps what is wrong, to report it at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def time(self, option: str, text: str | None, zero: bool = False) -> float:
        """Seconds; NaN if the option is not given or no time."""
        if text is None:
            return math.nan
        value = seconds_of(text)
        if value is not None and ((zero and value == 0.0) or LEAST_S <= value <= MOST_S):
            return value
        least = "0 s" if zero else "1 ms"
        self.problems.append(
            f"{option} {clean(text, 40) or '(nothing)'}: expected a duration such as 60s, 10min, "
            f"1.8h or 1d12h, from {least} to 300 years"
        )
        return math.nan

    def between(self, option: str, text: str | None, low: float, high: float, default: float) -> float:
        """A number within bounds; `default` if the option is not given."""
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            self.problems.append(f"{option} {clean(text, 40)}: expected a number from {low:g} to {high:g}")
            return default
        return value

    def needed(self, option: str, text: str | None, example: str) -> str | None:
        """The text; one problem more if there is none."""
        if text is None:
            self.problems.append(f"{option} is missing: expected such as {option} {example}")
        return text

    def end(self) -> None:
        """Raise ConfigError if anything was wrong."""
        if self.problems:
            raise ConfigError(self.problems)


def parse_terms(args: argparse.Namespace, check: ArgumentCheck, mttf_s: float) -> JobTerms:
    """The job's terms; problems go to `check`, which the caller ends."""
    save_s = check.time("--save", check.needed("--save", args.save, "60s"))
    restart_s = check.time("--restart", check.needed("--restart", args.restart, "600s"), zero=True)
    local = (args.local_save, args.local_restart, args.soft_mttf)
    if any(x is not None for x in local) and None in local:
        check.problems.append(
            "a local tier needs all of --local-save, --local-restart and --soft-mttf: expected the other "
            "options too"
        )
    if (args.recall is None) != (args.precision is None):
        check.problems.append("--recall and --precision belong together: expected both, or neither")
    if args.lead is not None and args.recall is None:
        check.problems.append("--lead belongs to a prediction: expected --recall and --precision too")
    found = JobTerms(
        mttf_s,
        save_s,
        restart_s,
        check.time("--flush", args.flush, zero=True),
        check.between("--recall", args.recall, 0.0, 0.999, 0.0),
        check.between("--precision", args.precision, 0.01, 1.0, 1.0),
        LEAD_S if args.lead is None else check.time("--lead", args.lead),
        check.between("--weibull", args.weibull, LEAST_WEIBULL, MOST_WEIBULL, 1.0),
        check.time("--local-save", args.local_save),
        check.time("--local-restart", args.local_restart, True),
        check.time("--soft-mttf", args.soft_mttf),
    )
    if found.recall > 0.0 and found.flush_s > 0.0:
        check.problems.append("--recall is for saves that are durable at once: expected no --flush with it")
    if [found.weibull != 1.0, found.recall > 0.0, found.two_levels].count(True) > 1:
        check.problems.append(
            "--weibull, --recall and --local-save are three different sums: expected one of them at a time"
        )
    return found


class BestInterval(NamedTuple):
    """The best interval, what it is worth; NaN or None where it does not apply."""

    interval_s: float
    ettr: float
    local_interval_s: float = np.nan
    plain_interval_s: float | None = None  # without a prediction
    plain_ettr: float | None = None


def best_interval_of(terms: JobTerms) -> BestInterval:
    """The greatest share of time that is kept, and by which interval."""
    if terms.two_levels or terms.rate_shape != np.inf:
        found = best_plan(_terms(terms))
        return BestInterval(
            float(found.interval_s[0]), float(found.ettr[0]), float(found.local_interval_s[0])
        )
    if terms.weibull != 1.0:
        pair = best_weibull(terms.save_s, terms.restart_s, terms.mttf_s, terms.weibull, terms.flush_s)
        return BestInterval(*(float(np.ravel(x)[0]) for x in pair))
    plain = single.best_interval(terms.save_s, terms.restart_s, terms.mttf_s, terms.flush_s)
    interval_s, ettr = (float(x) for x in plain)
    if terms.recall == 0.0:
        return BestInterval(interval_s, ettr)
    report = best_ahead(terms.save_s, terms.restart_s, terms.mttf_s, recall(terms), terms.precision)
    ahead_s, ahead = (float(np.ravel(x)[0]) for x in report)
    return BestInterval(ahead_s, ahead, np.nan, interval_s, ettr)


def recall(terms: JobTerms) -> float:
    """Of failures predicted early enough for a save."""
    return terms.recall if terms.lead_s >= terms.save_s else 0.0


def ettr_of(terms: JobTerms, interval_s: F64) -> F64:
    """The share of time that these intervals keep [n]."""
    if terms.two_levels or terms.rate_shape != np.inf:
        return ettr_at(_terms(terms, len(interval_s)), interval_s)
    if terms.weibull != 1.0:
        return ettr_weibull(
            interval_s, terms.save_s, terms.restart_s, terms.mttf_s, terms.weibull, terms.flush_s
        )
    if terms.recall > 0.0:
        return ettr_ahead(
            interval_s, terms.save_s, terms.restart_s, terms.mttf_s, recall(terms), terms.precision
        )
    return single.ettr(interval_s, terms.save_s, terms.restart_s, terms.mttf_s, terms.flush_s)


def _terms(terms: JobTerms, n: int = 1) -> SaveTerms:
    soft_per_s = 1.0 / terms.soft_mttf_s if terms.two_levels else 0.0
    of = (
        terms.save_s,
        terms.flush_s,
        terms.restart_s,
        terms.local_save_s,
        terms.local_restart_s,
        terms.rate_shape,
        1.0 / terms.mttf_s,
        soft_per_s,
    )
    return SaveTerms(*(np.full(n, x) for x in of))


NOISE_PP = 1e-7  # of a difference of two numbers that are the same
POINTS = 241  # of the curve
# The goal that is judged where it applies. source: issue Checkpoints
GOAL_MTTF_S, GOAL_SAVE_S, GOAL_PP, GOAL_RIVAL = 6480.0, 60.0, 10.0, "fixed_60_min"
CURVE_WORDS = "effective training time by interval"


def closed_forms(terms: JobTerms) -> dict[str, Any]:
    """The best interval, what it is worth, and what each alternative costs. ETTR 0 to 1, times in s."""
    found = best_interval_of(terms)
    young = float(single.young_s(terms.save_s, terms.mttf_s))
    daly = float(single.daly_s(terms.save_s, terms.mttf_s))
    rivals = {**FIXED_S, "young": young, "daly": daly}
    alternatives = {
        name: _alternative(max(interval_s, terms.flush_s), terms, found.ettr)
        for name, interval_s in rivals.items()
    }
    report: dict[str, Any] = {
        "terms": asdict(terms),
        "interval_s": found.interval_s,
        "ettr": found.ettr,
        "young_s": young,
        "daly_s": daly,
        "alternatives": alternatives,
        "notes": _notes(terms, found.interval_s),
    }
    if terms.two_levels:
        report["local_interval_s"] = found.local_interval_s
    if found.plain_ettr is not None:
        report["without_prediction"] = {
            "interval_s": found.plain_interval_s,
            "ettr": found.plain_ettr,
            "gain_pp": _points(found.ettr - found.plain_ettr),
        }
    report["goals"] = _goals(terms, report)
    return report


def _alternative(interval_s: float, terms: JobTerms, best: float) -> dict[str, float]:
    ettr = float(ettr_of(terms, np.array([interval_s]))[0])
    return {"interval_s": interval_s, "ettr": ettr, "behind_pp": _points(best - ettr)}


def _points(ettr: float) -> float:
    """A difference in percentage points."""
    return 0.0 if abs(100.0 * ettr) < NOISE_PP else 100.0 * ettr


def _notes(terms: JobTerms, interval_s: float) -> list[str]:
    out = []
    if terms.flush_s > 0 and interval_s <= terms.flush_s * (1.0 + 1e-9):
        out.append(
            f"no interval is shorter than a flush of {duration(terms.flush_s)}: storage drains one save "
            "before the next"
        )
    if terms.save_s >= 2.0 * terms.mttf_s:
        out.append("a save takes longer than failures leave: hardly anything is kept, whatever the interval")
    if terms.restart_s >= 2.0 * terms.mttf_s:
        out.append(
            "a restart takes longer than failures leave: hardly anything is kept, whatever the interval"
        )
    if terms.two_levels:
        out.append("Young and Daly know one tier: theirs are for node losses and durable saves alone")
    elif terms.recall > 0 and terms.lead_s < terms.save_s:
        out.append(f"a save takes longer than {duration(terms.lead_s)}: predictions come too late")
    return out


def _goals(terms: JobTerms, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    plain = terms.weibull == 1.0 and terms.recall == terms.flush_s == 0.0 and not terms.two_levels
    if not plain or (terms.mttf_s, terms.save_s) != (GOAL_MTTF_S, GOAL_SAVE_S):
        return []
    ahead = report["alternatives"][GOAL_RIVAL]["behind_pp"]
    return [
        {
            "goal": f"at least {GOAL_PP:g} pp above fixed 60 min at an MTTF of 1.8 h and a save of 60 s",
            "value_pp": ahead,
            "met": ahead >= GOAL_PP,
        }
    ]


def curve(terms: JobTerms, interval_s: float) -> tuple[F64, F64]:
    """(intervals, ETTR) over the range that is worth a look, from a tenth of the best to beyond 2 h."""
    middle = interval_s if math.isfinite(interval_s) and interval_s > 0 else terms.mttf_s
    low = max(0.1 * middle, terms.flush_s, 1e-3)
    high = max(10.0 * middle, 2.5 * 3600.0 if middle > 60.0 else 0.0)
    x = np.geomspace(low, max(high, 1.01 * low), POINTS)
    return x, ettr_of(terms, x)


def print_forms(report: Mapping[str, Any], out: Console) -> None:
    """The table."""
    terms = JobTerms(**report["terms"])
    for line in headings(terms):
        out.print(line, markup=False, soft_wrap=True, highlight=False)
    best = ("best", duration(report["interval_s"]), f"{100 * report['ettr']:.2f} %", "")
    rows: list[list[Any]] = [[Text(cell, "bold") for cell in best]]
    for name, one in report["alternatives"].items():
        share, behind = f"{100 * one['ettr']:.2f} %", f"{one['behind_pp']:.2f} pp"
        rows.append([name.replace("_", " "), duration(one["interval_s"]), share, behind])
    grid(out, ("rule", "interval", "effective time", "behind"), rows, right=(1, 2, 3), folds=())
    if "local_interval_s" in report:
        line = f"saves in memory every {duration(report['local_interval_s'])}"
        out.print(line, markup=False, highlight=False)
    if "without_prediction" in report:
        plain = report["without_prediction"]
        line = (
            f"without prediction: every {duration(plain['interval_s'])}, {100 * plain['ettr']:.2f} %; "
            f"saving ahead adds {plain['gain_pp']:.2f} pp"
        )
        out.print(line, markup=False, soft_wrap=True, highlight=False)
    for note in report["notes"]:
        out.print(note, style="dim", markup=False, soft_wrap=True, highlight=False)
    print_goals(report["goals"], out)


def headings(terms: JobTerms) -> list[str]:
    """The terms in words."""
    words = [
        f"MTTF {duration(terms.mttf_s)}",
        f"save {duration(terms.save_s)}",
        f"restart {duration(terms.restart_s)}",
    ]
    if terms.flush_s > 0:
        words.append(f"durable {duration(terms.flush_s)} later")
    if terms.weibull != 1.0:
        words.append(f"Weibull {number(terms.weibull)}")
    if terms.recall > 0:
        words.append(f"{number(100 * terms.recall)} % predicted {duration(terms.lead_s)} ahead")
        words.append(f"precision {number(100 * terms.precision)} %")
    lines = [", ".join(words)]
    if terms.two_levels:
        local = (terms.local_save_s, terms.local_restart_s, terms.soft_mttf_s)
        lines.append("in memory: save {}, restart {}, MTTF of processes {}".format(*map(duration, local)))
    return lines


def print_goals(goals: list[dict[str, Any]], out: Console) -> None:
    """Each goal: met or missed, by how much."""
    for goal in goals:
        met = "met" if goal["met"] else "MISSED"
        line = f"goal {met}: {goal['goal']}: {goal['value_pp']:+.2f} pp"
        out.print(line, style=None if goal["met"] else "red", markup=False, soft_wrap=True, highlight=False)
