"""Scores of failure forecasts: ranking, calibration of probabilities, and lead time.

All scores are over pairs of a day and a node that is up that day. Differences from the reference come with a
90 % interval from blocks of days, and one of three words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.backtest.failures import (
    BASELINE,
    CHAMPION,
    METHODS,
    REFERENCE,
    CountForecast,
    FailureResult,
    IssuedForecasts,
)
from models.failure import TOO_WIDE, WINDOW_D, common_causes
from models.moving_block import resampled
from twin.catalogue import F64, I64, Bool

BINS = 10
WORDS = ("better", "worse", "not distinguishable")
UNKNOWN = "too few days to judge"
HIGHER_IS_BETTER = {"pr_auc": True, "roc_auc": True, "brier": False, "log_loss": False}
LEAST_P = 1e-4  # in the logarithmic loss. source: estimate
HOURS = 24.0
MOST_SHOCKS = 20  # reported one by one
MOST_STEPS = 4000  # of a ranking whose days are resampled. source: estimate; an error far below the interval

Score = dict[str, Any]


class Ranking:
    """Pairs in the order of a score, the highest first: curves for any weights of days.

    score, y [k]; day [k]: place of each pair's day. Equal scores are one step.
    """

    def __init__(self, score: F64, y: Bool, day: I64) -> None:
        order = np.argsort(-score, kind="stable")
        self._y, self._day = y[order].astype(np.float64), day[order]
        ranked = score[order]
        self._end = (
            np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True)) if len(ranked) else np.zeros(0, int)
        )

        # Resampled days are weighed by numbers of pairs and faults of each day within steps.
        step = np.zeros(len(ranked), np.int64)
        step[self._end[:-1] + 1] = 1
        step = _merged(np.cumsum(step), self._y)
        shape = (int(step[-1]) + 1 if len(step) else 0, int(day.max(initial=-1)) + 1)
        self._pairs, self._hits = (
            np.bincount(step * shape[1] + self._day, of, shape[0] * shape[1]).reshape(shape)
            for of in (None, self._y)
        )

    def _steps(self, weight: F64 | None) -> tuple[F64, F64]:
        if weight is None:
            return np.cumsum(self._y)[self._end], (self._end + 1).astype(np.float64)
        w = weight[: self._pairs.shape[1]]
        return np.cumsum(self._hits @ w), np.cumsum(self._pairs @ w)

    def pr_auc(self, weight: F64 | None = None) -> float:
        """Average precision: precision times the gain in recall, over steps of equal scores."""
        hits, all_ = self._steps(weight)
        if not len(hits) or hits[-1] <= 0:
            return np.nan
        gain = np.diff(hits, prepend=0.0)
        return float((gain * hits / np.maximum(all_, 1e-12)).sum() / hits[-1])

    def roc_auc(self, weight: F64 | None = None) -> float:
        """Chance that a pair with a fault stands before one without; a tie counts half."""
        hits, all_ = self._steps(weight)
        if not len(hits) or not 0 < hits[-1] < all_[-1]:
            return np.nan
        false = all_ - hits
        area = np.diff(false, prepend=0.0) * (hits - 0.5 * np.diff(hits, prepend=0.0))
        return float(area.sum() / (hits[-1] * false[-1]))


def _merged(step: I64, y: F64) -> I64:
    """Steps of ranks, of which neighbours without a fault are one, and as many as MOST_STEPS are left."""
    if not len(step):
        return step
    faulty = np.bincount(step, y) > 0
    new = np.append(True, faulty[1:] | faulty[:-1])
    place = (np.cumsum(new) - 1)[step]
    out: I64 = place // (1 + int(place[-1]) // MOST_STEPS)
    return out


def top(rank: F64, up: Bool, k: int) -> F64:
    """Return the share of each node in a day's first k [n_day, n]; equal ranks at the edge share the rest."""
    value = np.where(up, rank, -np.inf)
    out = np.zeros(value.shape)
    for i, row in enumerate(value):
        n = min(k, int(up[i].sum()))
        if not n:
            continue
        edge = np.partition(row, len(row) - n)[len(row) - n]
        above, tied = row > edge, row == edge
        out[i] = above + tied * ((n - above.sum()) / tied.sum())
    return out


def reliability(p: F64, y: Bool) -> Score:
    """Calibration over bins of equally many pairs: `ece`, `resolution`, and the bins themselves.

    Resolution is the variance of the bins' shares: a constant forecast has none. Equal forecasts may lie in
    different bins; which is settled by their order.
    """
    if not len(p):
        return {"ece": np.nan, "resolution": np.nan, "bins": []}
    parts = np.array_split(np.argsort(p, kind="stable"), BINS)
    rows = [(len(part), float(p[part].mean()), float(y[part].mean())) for part in parts if len(part)]
    n, said, came = np.array(rows).T
    share = n / n.sum()
    return {
        "ece": float((share * np.abs(said - came)).sum()),
        "resolution": float((share * (came - y.mean()) ** 2).sum()),
        "bins": [{"pairs": int(a), "forecast": b, "came": c} for a, b, c in rows],
    }


def lead_time_h(issued: IssuedForecasts, in_top: F64) -> Score:
    """Hours from the first day, at most a horizon before a fault, on which its node was in the top, to it.

    One figure per fault that was seen coming; `faults`: how many there were that could be.
    """
    first: dict[tuple[int, float], float] = {}
    faults: set[tuple[int, float]] = set()
    for i, day in enumerate(issued.days):
        for node in np.flatnonzero(issued.y[i] & issued.up[i]):
            fault = (int(node), round(float(day + issued.next_d[i, node]), 6))
            faults.add(fault)
            if in_top[i, node] >= 0.5:
                first.setdefault(fault, float(issued.next_d[i, node]) * HOURS)
    lead = np.array([first[fault] for fault in sorted(first)])
    quarter = np.quantile(lead, [0.25, 0.5, 0.75]) if len(lead) else np.full(3, np.nan)
    return {
        "median": float(quarter[1]),
        "q25": float(quarter[0]),
        "q75": float(quarter[2]),
        "foreseen": len(first),
        "faults": len(faults),
    }


class JudgedForecasts:
    """One method's forecasts for one horizon: daily sums, of which scores of any days are made."""

    def __init__(self, issued: IssuedForecasts, name: str, ks: Sequence[int]) -> None:
        p, up, y = issued.p[name], issued.up, issued.y & issued.up
        place = np.broadcast_to(np.arange(len(issued.days))[:, None], up.shape)[up]
        self.ranking = Ranking(issued.rank[name][up], y[up], place)
        self.pairs = up.sum(axis=1).astype(np.float64)
        self.faults = y.sum(axis=1).astype(np.float64)
        self.squares = np.where(up, (p - y) ** 2, 0.0).sum(axis=1)
        sure = np.clip(p, LEAST_P, 1.0 - LEAST_P)
        self.logs = np.where(up, -np.where(y, np.log(sure), np.log1p(-sure)), 0.0).sum(axis=1)
        self.in_top = {k: top(issued.rank[name], up, k) for k in ks}
        self.hits = {k: (self.in_top[k] * y).sum(axis=1) for k in ks}
        self.taken = {k: self.in_top[k].sum(axis=1) for k in ks}

    def scores(self, weight: F64 | None = None) -> dict[str, float]:
        """Over days that count `weight` [n_day]; None: each once."""
        w = np.ones(len(self.pairs)) if weight is None else weight
        pairs, faults = float(w @ self.pairs), float(w @ self.faults)
        out = {
            "pr_auc": self.ranking.pr_auc(weight),
            "roc_auc": self.ranking.roc_auc(weight),
            "brier": ratio(float(w @ self.squares), pairs),
            "log_loss": ratio(float(w @ self.logs), pairs),
        }
        for k, hits in self.hits.items():
            precision = ratio(float(w @ hits), float(w @ self.taken[k]))
            out[f"precision_at_{k}"] = precision
            out[f"recall_at_{k}"] = ratio(float(w @ hits), faults)
            out[f"lift_at_{k}"] = ratio(precision, ratio(faults, pairs))
        return out


def ratio(a: float, b: float) -> float:
    return a / b if b else np.nan


def verdict(low: float, high: float, higher_is_better: bool) -> str:
    """A word for the interval of a difference."""
    if not np.isfinite(low + high):
        return UNKNOWN
    if low > 0.0 or high < 0.0:
        return WORDS[0] if (low > 0.0) == higher_is_better else WORDS[1]
    return WORDS[2]


def drawn_scores(judged: JudgedForecasts, drawn: I64) -> list[dict[str, float]]:
    """The scores of each drawn set of days [n_resample, n_day]."""
    n = len(judged.pairs)
    return [judged.scores(np.bincount(days, minlength=n).astype(np.float64)) for days in drawn]


def compare_methods(
    here: Mapping[str, float],
    there: Mapping[str, float],
    one: Sequence[Mapping[str, float]],
    other: Sequence[Mapping[str, float]],
    metrics: Sequence[str],
) -> Score:
    """Differences here - there by metric; their 90 % intervals from the same drawn days, one and other."""
    out: Score = {}
    for metric in metrics:
        known = np.array([a[metric] - b[metric] for a, b in zip(one, other, strict=True)])
        known = known[np.isfinite(known)]
        low, high = np.quantile(known, [0.05, 0.95]) if len(known) else (np.nan, np.nan)
        better = HIGHER_IS_BETTER.get(metric, True)
        out[metric] = {
            "difference": here[metric] - there[metric],
            "low": float(low),
            "high": float(high),
            "verdict": verdict(float(low), float(high), better),
        }
    return out


def score_horizon(issued: IssuedForecasts, ks: Sequence[int], seed: int = 0) -> Score:
    """All scores of one horizon: the champion's, every method's, and differences from the reference."""
    names = (CHAMPION, *METHODS)
    judged = {name: JudgedForecasts(issued, name, ks) for name in names}
    block = max(int(np.ceil(issued.span_d)), 1)
    metrics = ("pr_auc", "roc_auc", "brier", "log_loss", *(f"precision_at_{k}" for k in ks))
    own = {name: _own(issued, name, judged[name], ks) for name in names}
    faults, pairs = judged[CHAMPION].faults.sum(), judged[CHAMPION].pairs.sum()
    base = ratio(float(faults), float(pairs))
    days = len(issued.days)
    chosen = {name: issued.chosen.count(name) for name in METHODS if name in issued.chosen}
    drawn = resampled(days, block, seed)
    again = {name: drawn_scores(judged[name], drawn) for name in (REFERENCE, BASELINE)}
    # A champion that never changed is that method.
    again[CHAMPION] = (
        again[BASELINE] if BASELINE in chosen and len(chosen) == 1 else drawn_scores(judged[CHAMPION], drawn)
    )
    against = {
        name: compare_methods(
            judged[name].scores(), judged[REFERENCE].scores(), again[name], again[REFERENCE], metrics
        )
        for name in (CHAMPION, BASELINE)
    }
    return {
        "horizon_d": issued.span_d,
        "origins": days,
        "pairs": int(pairs),
        "positives": int(faults),
        "base_rate": base,
        "from_day": float(issued.days[0]) if days else np.nan,
        "until_day": float(issued.days[-1]) if days else np.nan,
        **own[CHAMPION],
        "brier_base_rate": base * (1.0 - base),
        "champion_days": chosen,
        "block_d": block,
        "blocks": days / block,
        "against_reference": against[CHAMPION],
        "baseline_against_reference": against[BASELINE],
        "methods": {name: own[name] for name in METHODS},
    }


def _own(issued: IssuedForecasts, name: str, judged: JudgedForecasts, ks: Sequence[int]) -> Score:
    flat = judged.scores()
    out: Score = {metric: flat[metric] for metric in ("roc_auc", "pr_auc", "brier", "log_loss")}
    for kind in ("precision", "recall", "lift"):
        out[f"{kind}_at_k"] = {str(k): flat[f"{kind}_at_{k}"] for k in ks}
    held = reliability(issued.p[name][issued.up], (issued.y & issued.up)[issued.up])
    lead = {str(k): lead_time_h(issued, judged.in_top[k]) for k in ks}
    return out | held | {"lead_time_h": lead}


def score_counts(counted: CountForecast) -> Score:
    """The fleet's faults in the next days: error, coverage of the interval, and mean time between faults."""
    inside = (counted.low <= counted.actual) & (counted.actual <= counted.high)
    known = np.isfinite(counted.mean)
    n = int(known.sum())
    given = np.isfinite(counted.low)
    said, actual = counted.mean[known], counted.actual[known]
    hours = counted.span_d * HOURS
    return {
        "span_d": counted.span_d,
        "origins": n,
        "independent_spans": n / counted.span_d,
        "intervals": int(given.sum()),
        "coverage90": ratio(float(inside[given].sum()), int(given.sum())),
        "mean_forecast": ratio(float(said.sum()), n),
        "mean_actual": ratio(float(actual.sum()), n),
        "mae": ratio(float(np.abs(said - actual).sum()), n),
        "interval_width": ratio(float((counted.high - counted.low)[given].sum()), int(given.sum())),
        "without_interval": TOO_WIDE if n > given.sum() else None,
        "mtbf_forecast_h": ratio(hours * n, float(said.sum())),
        "mtbf_actual_h": ratio(hours * n, float(actual.sum())),
        "latest": {
            "day": float(counted.days[-1]),
            "mtbf_h": ratio(hours, float(counted.mean[-1])),
            "mtbf_low_h": ratio(hours, float(counted.high[-1])),
            "mtbf_high_h": ratio(hours, float(counted.low[-1])),
        }
        if n
        else None,
    }


def score_failures(result: FailureResult, ks: Sequence[int], seed: int = 0) -> Mapping[str, Any]:
    """Scores of every horizon, and of the fleet's numbers of faults."""
    counts = [score_counts(counted) for counted in result.counted]
    horizons = []
    for issued in result.horizons:
        mine = [c for c in counts if c["span_d"] == issued.span_d]
        horizons.append(score_horizon(issued, ks, seed) | {"fleet": mine[0] if mine else None})
    return {
        "horizons": horizons,
        "fleet": counts,
        "shocks": shock_score(result),
        "lookahead_days_checked": result.days_checked,
    }


def shock_score(result: FailureResult) -> Score:
    """Causes in common of the whole log: how many, how many faults they had, and the greatest of them."""
    found = common_causes(result.log)
    greatest = sorted(found, key=lambda shock: (-shock.nodes, shock.day))[:MOST_SHOCKS]
    return {
        "count": len(found),
        "faults": sum(shock.faults for shock in found),
        "window_min": round(WINDOW_D * HOURS * 60.0, 3),
        "greatest": [shock._asdict() for shock in greatest],
    }
