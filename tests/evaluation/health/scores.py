"""Scores of health on simulated fleets: false drains, precision, recall, lead times, calibration, lemons.

Several courses are scored as one fleet of all their nodes. Only what came after the training days counts;
lemons are judged on the 28th day. All of it is simulated. Part of the shell; pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.backtest import ratio, reliability
from tests.evaluation.health.alarms import FALSE, PENDING, TRUE, Alarm, alarms_of
from tests.evaluation.health.course import DAY_S, HORIZONS_S, Course, Failed
from tests.evaluation.health.incidents import by_kind
from tests.evaluation.health.intervals import median_interval, rate_interval, share_interval
from twin.catalogue import F64, Bool

MONTH_D = 30.0
LEMON_DAYS = 28.0
NOTICE_S = 600.0  # before its true beginning that a failure may be noticed: a tick is a minute or more
MINUTE_S = 60.0
Told = dict[str, Any]
# (key, words, whether more is better, bound, unit); from the requirements of the project
GOALS: tuple[tuple[str, str, bool, float, str], ...] = (
    ("false_drains_per_node_month", "false drains a node-month", False, 0.01, ""),
    ("precision", "precision of alarms", True, 0.5, ""),
    ("recall", "recall, with precursors", True, 0.5, ""),
    ("lead_min", "median lead time", True, 10.0, "min"),
    ("lemons_found", "lemons found in 28 days", True, 0.9, ""),
    ("lemons_precision", "precision of lemons", True, 0.85, ""),
)


class Fleet:
    """Courses as one fleet: nodes of course i begin at `first[i]`."""

    def __init__(self, courses: Sequence[Course]) -> None:
        self.courses = courses
        self.first = np.concatenate([[0], np.cumsum([c.n for c in courses])]).astype(int)
        self.n = int(self.first[-1])
        self.alarms: list[tuple[int, Alarm]] = []
        self.failures: list[tuple[int, Failed]] = []
        self.announced: dict[tuple[int, float], Alarm] = {}  # by node of the fleet and beginning
        for place, course in zip(self.first, courses, strict=False):
            found = alarms_of(course)
            self.alarms += [(int(place) + a.node, a) for a in found if a.begin_s >= course.train_s]
            for alarm in found:
                if alarm.failure is not None:
                    self.announced[int(place) + alarm.node, alarm.failure.begin_s] = alarm
            self.failures += [
                (int(place) + f.node, f)
                for f in course.failures
                if course.train_s <= f.begin_s <= course.end_s
            ]

    def by_node(self, nodes: Sequence[int]) -> F64:
        """Count each node of the fleet among these [n]."""
        return np.bincount(np.asarray(nodes, int), minlength=self.n).astype(np.float64)

    def node_months(self) -> float:
        """In which nodes served after the training days."""
        days = sum(c.n * (c.end_s - c.train_s) / DAY_S - down_days(c) for c in self.courses)
        return float(days) / MONTH_D


def down_days(course: Course) -> float:
    """Days of nodes that were down after training; a node is down once at a time."""
    total, reached = 0.0, dict[int, float]()
    for f in sorted(course.failures, key=lambda f: (f.node, f.begin_s)):
        begin = max(f.begin_s, course.train_s, reached.get(f.node, 0.0))
        end = min(f.end_s, course.end_s)
        total += max(0.0, end - begin)
        reached[f.node] = max(end, reached.get(f.node, 0.0))
    return total / DAY_S


def scores(courses: Sequence[Course]) -> Told:
    """All figures of courses of one strength, as plain data with NaN where nothing can be told."""
    fleet = Fleet(courses)
    announced = [(n, f) for n, f in fleet.failures if f.own and f.announced]
    silent = [(n, f) for n, f in fleet.failures if f.own and not f.announced]
    return {
        "nodes": fleet.n,
        "node_months": fleet.node_months(),
        "failures": len(fleet.failures),
        "failures_shared": sum(f.shared for _, f in fleet.failures),
        "drains": _drains(fleet),
        "with_precursors": _recall(fleet, announced),
        "without_precursors": _recall(fleet, silent),
        "lead_time_min": _lead(fleet, announced),
        "by_class": _by_class(fleet),
        "by_reason": _by_reason(fleet),
        "noticed": _noticed(fleet),
        "incidents": by_kind(courses, fleet.node_months()),
        "chances": [calibration(courses, h) for h in HORIZONS_S],
        "counts": [coverage(courses, h) for h in HORIZONS_S],
        "lemons": lemons(courses),
    }


def _drains(fleet: Fleet) -> Told:
    """False drains by node-month, and precision."""
    true = fleet.by_node([n for n, a in fleet.alarms if a.outcome == TRUE])
    false = fleet.by_node([n for n, a in fleet.alarms if a.outcome == FALSE])
    months, count = fleet.node_months(), int(false.sum())
    low, high = rate_interval(count, months)
    precision_low, precision_high = share_interval(true, true + false)
    return {
        "alarms": len(fleet.alarms), "true": int(true.sum()), "false": count,
        "pending": sum(a.outcome == PENDING for _, a in fleet.alarms),
        "false_though_down_with_others": sum(a.hit_by_others for _, a in fleet.alarms),
        "false_per_node_month": ratio(float(count), months), "low": low, "high": high,
        "precision": ratio(float(true.sum()), float((true + false).sum())),
        "precision_low": precision_low, "precision_high": precision_high,
    }  # fmt: skip


def _recall(fleet: Fleet, failures: Sequence[tuple[int, Failed]]) -> Told:
    """Score the failures that an alarm announced; `early`: before anything could be measured."""
    seen = [(n, f) for n, f in failures if (n, f.begin_s) in fleet.announced]
    hits, all_ = fleet.by_node([n for n, _ in seen]), fleet.by_node([n for n, _ in failures])
    low, high = share_interval(hits, all_)
    early = sum(fleet.announced[n, f.begin_s].begin_s < f.precursor_s for n, f in seen if f.announced)
    return {"failures": len(failures), "announced": len(seen),
            "recall": ratio(float(len(seen)), float(len(failures))), "low": low, "high": high,
            "early": int(early)}  # fmt: skip


def _lead(fleet: Fleet, failures: Sequence[tuple[int, Failed]]) -> Told:
    """Minutes from alarm to failure: median with its interval, and quartiles."""
    lead = [fleet.announced[key].lead_s / MINUTE_S
            for n, f in failures if (key := (n, f.begin_s)) in fleet.announced]  # fmt: skip
    values = np.array(lead)
    low, high = median_interval(values)
    q25, median, q75 = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else np.full(3, np.nan)
    return {"count": len(lead), "median": float(median), "q25": float(q25), "q75": float(q75), "low": low,
            "high": high}  # fmt: skip


def _by_class(fleet: Fleet) -> dict[str, Told]:
    kinds = sorted({f.kind for _, f in fleet.failures})
    out = {}
    for kind in kinds:
        own = [(n, f) for n, f in fleet.failures if f.kind == kind and f.own]
        with_ = [(n, f) for n, f in own if f.announced]
        without = [(n, f) for n, f in own if not f.announced]
        spans = np.array([(f.begin_s - f.precursor_s) / MINUTE_S for _, f in with_])
        out[kind] = {
            "failures": len(own), "with_precursors": _recall(fleet, with_),
            "without_precursors": _recall(fleet, without), "lead_time_min": _lead(fleet, with_),
            "precursor_min": float(np.median(spans)) if len(spans) else np.nan,
            "reasons": dict(Counter(fleet.announced[n, f.begin_s].reason
                                    for n, f in own if (n, f.begin_s) in fleet.announced).most_common()),
        }  # fmt: skip
    return out


def _by_reason(fleet: Fleet) -> dict[str, dict[str, int]]:
    """Alarms by what first gave rise to them, the most frequent first."""
    count = Counter(a.reason for _, a in fleet.alarms)
    return {
        reason: {o: sum(a.reason == reason and a.outcome == o for _, a in fleet.alarms)
                 for o in (TRUE, FALSE, PENDING)}
        for reason, _ in count.most_common()
    }  # fmt: skip


def _noticed(fleet: Fleet) -> Told:
    """Of failures that came, those that the twin logged and how soon; and those it logged that never were."""
    delays, missed, invented = [], 0, 0
    for course in fleet.courses:
        seen: dict[int, list[float]] = {}
        for node, at_s in course.noticed:
            seen.setdefault(node, []).append(at_s)
        times = [(f.node, f.begin_s - NOTICE_S, f.end_s) for f in course.failures]
        for f in course.failures:
            if not course.train_s <= f.begin_s <= course.end_s:
                continue
            after = [t for t in seen.get(f.node, []) if f.begin_s - NOTICE_S <= t <= f.end_s]
            missed += not after
            delays += [min(after) - f.begin_s] if after else []
        of = {node: [(a, b) for n, a, b in times if n == node] for node in seen}
        invented += sum(
            t >= course.train_s and not any(a <= t <= b for a, b in of[node])
            for node, at in seen.items() for t in at
        )  # fmt: skip
    delay = np.array(delays)
    p50, p90 = np.quantile(delay, [0.5, 0.9]) if len(delay) else (np.nan, np.nan)
    return {"noticed": len(delays), "missed": missed, "invented": invented, "delay_p50_s": float(p50),
            "delay_p90_s": float(p90)}  # fmt: skip


def up_and_failing(course: Course, horizon_s: float) -> tuple[Bool, Bool, Bool]:
    """(scored [origin], node is up, it fails within the horizon [origin, n]).

    Whatever the cause: chances are those of all failures, though causes in common are alike for all nodes.
    """
    at_s = course.origin_s
    scored: Bool = (at_s >= course.train_s) & (at_s + horizon_s <= course.end_s)
    up, failing = np.ones((len(at_s), course.n), np.bool_), np.zeros((len(at_s), course.n), np.bool_)
    for f in course.failures:
        up[:, f.node] &= ~((f.begin_s <= at_s) & (at_s < f.end_s))
        failing[:, f.node] |= (f.begin_s > at_s) & (f.begin_s <= at_s + horizon_s)
    return scored, up, failing


def calibration(courses: Sequence[Course], horizon_s: float) -> Told:
    """Score the chances of one horizon, over hours and nodes that are up; beside the base rate."""
    said, came = [np.zeros(0)], [np.zeros(0, np.bool_)]
    unknown = 0
    for course in courses:
        if horizon_s not in course.said:
            continue
        scored, up, failing = up_and_failing(course, horizon_s)
        p, use = course.said[horizon_s].astype(np.float64), scored[:, None] & up
        unknown += int((use & ~np.isfinite(p)).sum())
        use &= np.isfinite(p)
        said.append(p[use])
        came.append(failing[use])
    p, y = np.concatenate(said), np.concatenate(came)
    base = float(y.mean()) if len(y) else np.nan
    brier = float(((p - y) ** 2).mean()) if len(y) else np.nan
    return {"horizon_s": horizon_s, "pairs": len(p), "unknown": unknown, "positives": int(y.sum()),
            "base_rate": base, "brier": brier, "brier_base_rate": base * (1.0 - base),
            "skill": 1.0 - ratio(brier, base * (1.0 - base)), **reliability(p, y)}  # fmt: skip


def coverage(courses: Sequence[Course], horizon_s: float) -> Told:
    """The fleet's failures within a horizon beside what was forecast, and the share in its interval."""
    inside, actual, mean, width, spans = 0, [], [], [], 0.0
    for course in courses:
        if horizon_s not in course.counted:
            continue
        begun = np.array(sorted(f.begin_s for f in course.failures))
        scored = (course.origin_s >= course.train_s) & (course.origin_s + horizon_s <= course.end_s)
        came = np.searchsorted(begun, course.origin_s + horizon_s, "right") - np.searchsorted(
            begun, course.origin_s, "right"
        )
        middle, low, high = course.counted[horizon_s].T
        use = scored & np.isfinite(middle)
        inside += int((use & (low <= came) & (came <= high)).sum())
        actual += came[use].tolist()
        mean += middle[use].tolist()
        width += (high - low)[use].tolist()
        spans += (course.end_s - course.train_s) / horizon_s if use.any() else 0.0
    n = len(actual)
    return {"horizon_s": horizon_s, "origins": n, "independent_spans": spans,
            "coverage90": ratio(float(inside), n), "mean_forecast": ratio(sum(mean), n),
            "mean_actual": ratio(float(sum(actual)), n), "interval_width": ratio(sum(width), n)}  # fmt: skip


def lemons(courses: Sequence[Course]) -> Told:
    """Seeded lemons against nodes called so at any time up to the 28th day; None where fewer days ran."""
    seeded, flagged, found, standing, right = [], [], [], 0, 0
    place = 0
    for course in courses:
        if course.end_s - course.begin_s >= LEMON_DAYS * DAY_S - 1.0 and len(course.flagged_s):
            called = np.flatnonzero(course.flagged_s <= course.begin_s + LEMON_DAYS * DAY_S + 1.0)
            seeded += [place + n for n in course.lemons]
            flagged += [place + n for n in called.tolist()]
            found += [place + n for n in course.lemons if n in called]
            standing += len(course.flagged_28d)
            right += sum(n in course.lemons for n in course.flagged_28d)
        place += course.n
    size = max(place, 1)
    hits, all_, calls = (
        np.bincount(np.array(x, int), minlength=size).astype(float) for x in (found, seeded, flagged)
    )
    low, high = share_interval(hits, all_)
    precision_low, precision_high = share_interval(hits, calls)
    return {"seeded": len(seeded), "called": len(flagged), "found": len(found),
            "found_pu": ratio(float(len(found)), len(seeded)), "low": low, "high": high,
            "precision": ratio(float(len(found)), len(flagged)), "precision_low": precision_low,
            "precision_high": precision_high, "called_on_day_28": standing,
            "right_on_day_28": right}  # fmt: skip


def goals(told: Mapping[str, Any]) -> list[Told]:
    """Each goal with its value, interval and verdict; met is None where there is nothing to judge."""
    drains, recall, lead, lemon = (told[k] for k in ("drains", "with_precursors", "lead_time_min", "lemons"))
    values = {
        "false_drains_per_node_month": (drains["false_per_node_month"], drains["low"], drains["high"]),
        "precision": (drains["precision"], drains["precision_low"], drains["precision_high"]),
        "recall": (recall["recall"], recall["low"], recall["high"]),
        "lead_min": (lead["median"], lead["low"], lead["high"]),
        "lemons_found": (lemon["found_pu"], lemon["low"], lemon["high"]),
        "lemons_precision": (lemon["precision"], lemon["precision_low"], lemon["precision_high"]),
    }
    out = []
    for key, words, more, bound, unit in GOALS:
        value, low, high = values[key]
        met = None if not np.isfinite(value) else bool(value >= bound if more else value <= bound)
        out.append({"goal": key, "words": words, "bound": bound, "at_least": more, "unit": unit,
                    "value": value, "low": low, "high": high, "met": met})  # fmt: skip
    return out
