"""New-site backtest: one-day-ahead forecasts of a site's first days, with other fleets' prior and without.

The log is cut into spans. Each is a site that begins to watch with nothing known: the model of the daemon
says each day who fails within a day, once from published averages and once from the prior, and is fitted
once a week. Scores are over all spans; their intervals draw spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.backtest.failure_scores import Ranking, Score, ratio
from models.failure import (
    FailureHistory,
    FailurePrior,
    FaultLog,
    SelfExciting,
    baseline,
    individual_faults,
    probability,
    shock_rate,
)
from models.moving_block import resampled
from twin.catalogue import F64, I64, Bool, ContractError

METHODS = ("own", "with_prior")
SPAN_D = 30
AHEAD_D = 1.0
REFIT_D = 7  # as the backtest of all forecasters
LEAST_FAULTS = 10  # before a fit, as in the daemon
LEAST_SPANS = 2


@dataclass(frozen=True)
class NewSiteForecasts:
    """Pairs of a day and a node that is up [k]: which span, who failed, the probabilities by method."""

    span: I64
    y: Bool
    p: dict[str, F64]
    spans: int


def span_log(log: FaultLog, begin_d: float, until_d: float) -> FaultLog:
    """The faults between two days as a log of its own, which begins with day 0."""
    inside = (log.start_d >= begin_d) & (log.start_d < until_d)
    return FaultLog(
        log.n,
        log.node[inside],
        log.start_d[inside] - begin_d,
        log.end_d[inside] - begin_d,
        log.kind[inside],
        log.classes,
        0.0,
        until_d - begin_d,
    )


def backtest_new_site(
    log: FaultLog,
    prior: FailurePrior,
    most_spans: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> NewSiteForecasts:
    """Forecasts of all spans, or of `most_spans` evenly over the log. Raises ContractError for too few."""
    spans = int((log.until_d - log.begin_d) // SPAN_D)
    if spans < LEAST_SPANS:
        raise ContractError(f"expected a log of {LEAST_SPANS * SPAN_D} days or more, for {LEAST_SPANS} spans")
    chosen = np.arange(spans)
    if 0 < most_spans < spans:
        chosen = np.unique(np.linspace(0, spans - 1, most_spans).round().astype(np.int64))
    parts = []
    for i, which in enumerate(chosen):
        parts.append(_span(log, prior, log.begin_d + float(which) * SPAN_D))
        progress((i + 1) / len(chosen))
    span = np.repeat(np.arange(len(parts)), [len(y) for y, _ in parts])
    p = {name: np.concatenate([said[m] for _, said in parts]) for m, name in enumerate(METHODS)}
    return NewSiteForecasts(span, np.concatenate([y for y, _ in parts]), p, len(parts))


def _span(log: FaultLog, prior: FailurePrior, begin_d: float) -> tuple[Bool, list[F64]]:
    """(who failed, probabilities by method) of one span."""
    mine = span_log(log, begin_d, begin_d + SPAN_D)
    days = np.arange(1.0, SPAN_D)
    # A node that was under repair when watching began is no candidate until it is back.
    up, later = log.up(days + begin_d), mine.next_start(days)
    theta, faults, fitted = None, 0.0, -np.inf
    ys, ps = [], []
    for i, day in enumerate(days):
        known = mine.known_at(day)
        own = individual_faults(known)
        if own.k >= LEAST_FAULTS and day - fitted >= REFIT_D:
            theta, faults, fitted = SelfExciting().fit(own, day)["theta"], float(own.k), day
        shared = np.array([float(known.k - own.k)])
        past = FailureHistory(own, ~up[i], np.zeros(1), shared, known.start_d, day)
        alone = np.exp(-shock_rate(past) * AHEAD_D)  # no failure with a cause in common
        said = []
        for one in (None, prior):
            hazard = baseline(past, (AHEAD_D,), theta, faults, one).hazard[0]
            said.append(1.0 - (1.0 - probability(hazard)[up[i]]) * alone)
        ys.append((later[i] <= day + AHEAD_D)[up[i]])
        ps.append(said)
    return np.concatenate(ys), [np.concatenate(column) for column in zip(*ps, strict=True)]


def score_new_site(issued: NewSiteForecasts, seed: int = 0) -> Score:
    """PR-AUC and Brier by method, and the prior's gain over the site's own with its 90 % interval."""
    n, y = issued.spans, issued.y
    ranking = {name: Ranking(issued.p[name], y, issued.span) for name in METHODS}
    squares = {name: np.bincount(issued.span, (issued.p[name] - y) ** 2, minlength=n) for name in METHODS}
    pairs = np.bincount(issued.span, minlength=n).astype(np.float64)

    def gains(weight: F64) -> tuple[float, float]:
        auc = [ranking[name].pr_auc(weight) for name in METHODS]
        brier = [ratio(float(weight @ squares[name]), float(weight @ pairs)) for name in METHODS]
        return ratio(auc[1], auc[0]) - 1.0, ratio(brier[1], brier[0]) - 1.0

    drawn = [np.bincount(spans, minlength=n).astype(np.float64) for spans in resampled(n, 1, seed)]
    again = np.array([gains(weight) for weight in drawn])
    whole = gains(np.ones(n))
    base = float(y.mean()) if len(y) else np.nan
    out: Score = {"spans": n, "pairs": len(y), "positives": int(y.sum()), "base_rate": base}
    out["brier_base_rate"] = base * (1.0 - base)
    for name in METHODS:
        out[name] = {
            "pr_auc": ranking[name].pr_auc(),
            "brier": ratio(float(squares[name].sum()), float(pairs.sum())),
        }
    for i, metric in enumerate(("pr_auc", "brier")):
        known = again[np.isfinite(again[:, i]), i]
        low, high = np.quantile(known, [0.05, 0.95]) if len(known) else (np.nan, np.nan)
        out[f"{metric}_gain"] = {"relative": whole[i], "low": float(low), "high": float(high)}
    return out
