"""Scores of life hazards: loss beside the rivals', ratios of positions, serial or slot, lemons.

All are over pairs of a step and a device that stood at its begin. A pair whose device was taken away alive
counts in the logarithmic loss for the time that it was watched, and in nothing else. Intervals resample whole
steps, which are spans of time that do not overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from models.backtest.failure_scores import Ranking, ratio, reliability, top, verdict
from models.backtest.lives import (
    AGE,
    BLIND,
    CHAMPION,
    COUNT,
    LIFE_METHODS,
    POSITION,
    LifeForecasts,
    LifeResult,
    pair_loss,
)
from models.lives import judge_lemons
from models.moving_block import resampled
from twin.catalogue import F64

Score = dict[str, Any]
MOST_LEVELS = 8  # levels of position with more values are not listed. source: estimate
BUDGET = 0.01  # of the fleet
TOP = 20
PAIRS = (
    (POSITION, BLIND),
    (POSITION, AGE),
    (POSITION, COUNT),
    (BLIND, AGE),
    (BLIND, COUNT),
    (CHAMPION, BLIND),
)


def score_lives(result: LifeResult, budget: float = BUDGET, seed: int = 0) -> Score:
    """All scores of a backtest."""
    steps = result.steps
    drawn = resampled(len(steps), 1, seed)
    loss = {name: np.array([pair_loss(f, name).sum() for f in steps]) for name in LIFE_METHODS}
    pairs = np.array([float(len(f.y)) for f in steps])
    faults = float(sum(f.y.sum() for f in steps))
    fleet = float(pairs.mean()) if len(pairs) else 0.0
    hazard = result.hazards[POSITION]
    verdict_ = judge_lemons(hazard, result.train_d, fleet, budget)
    return {
        "step_d": result.cells.step_d,
        "steps": len(steps),
        "devices": fleet,
        "pairs": int(pairs.sum()),
        "positives": int(faults),
        "methods": {name: _method(steps, name, loss[name], pairs) for name in LIFE_METHODS},
        "against": {f"{a}/{b}": _beside(loss[a], loss[b], drawn) for a, b in PAIRS},
        "champion_steps": {name: result.chosen.count(name) for name in sorted(set(result.chosen))},
        "positions": _positions(result, drawn),
        "terms": _terms(result),
        "lemons": vars(verdict_),
        "shared_faults": int(result.cells.shared.sum()),
        "lookahead_steps_checked": result.steps_checked,
    }


def _method(steps: tuple[LifeForecasts, ...], name: str, loss: F64, pairs: F64) -> Score:
    whole = [f.whole for f in steps]
    p = np.concatenate([f.p[name][w] for f, w in zip(steps, whole, strict=True)])
    y = np.concatenate([f.y[w] for f, w in zip(steps, whole, strict=True)])
    place = np.repeat(np.arange(len(steps)), [int(w.sum()) for w in whole])
    ranking = Ranking(p, y, place)
    hits = sum(
        float((top(f.p[name][None], np.ones((1, len(f.y)), np.bool_), TOP)[0] * f.y).sum()) for f in steps
    )
    base = float(y.mean()) if len(y) else np.nan
    calibration = reliability(p, y)
    return {
        "log_loss": ratio(float(loss.sum()), float(pairs.sum())),
        "brier": float(((p - y) ** 2).mean()) if len(y) else np.nan,
        "brier_base_rate": base * (1.0 - base),
        "pr_auc": ranking.pr_auc(),
        "roc_auc": ranking.roc_auc(),
        "precision_at_20": ratio(hits, float(TOP * len(steps))),
        "ece": calibration["ece"],
        "forecast": float(p.sum()),
        "came": int(y.sum()),
        "bins": calibration["bins"],
    }


def _beside(one: F64, other: F64, drawn: np.ndarray) -> Score:
    """The part by which one loss is less than another, with its 90 % interval over resampled steps."""
    again = 1.0 - one[drawn].sum(axis=1) / other[drawn].sum(axis=1) if len(drawn) else np.zeros(0)
    low, high = np.quantile(again, [0.05, 0.95]) if len(again) else (np.nan, np.nan)
    less = 1.0 - ratio(float(one.sum()), float(other.sum()))
    word = verdict(float(low), float(high), True)
    return {"less": less, "low": float(low), "high": float(high), "verdict": word}


def _positions(result: LifeResult, drawn: np.ndarray) -> list[Score]:
    """Of each level of position with few values: the rate that came and the rate forecast, by value.

    Ratios are to the value with the most faults; the interval is of the ratio that came.
    """
    log, out = result.cells.log, []
    for j, level in enumerate(log.levels):
        values = np.unique(log.places[:, j])
        if not 2 <= len(values) <= MOST_LEVELS:
            continue
        sums = np.zeros((3, len(result.steps), len(values)))
        for i, f in enumerate(result.steps):
            at = np.searchsorted(values, log.places[log.place[f.stay], j])
            for row, weight in enumerate((f.y, f.p[POSITION] * f.whole, f.whole)):
                sums[row, i] = np.bincount(at, weight.astype(np.float64), len(values))
        came, forecast, pairs = sums
        most = int(np.argmax(came.sum(axis=0)))
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = came.sum(axis=0) / pairs.sum(axis=0)
            said = forecast.sum(axis=0) / pairs.sum(axis=0)
            again = came[drawn].sum(axis=1) / pairs[drawn].sum(axis=1)
            ratios = again / again[:, most : most + 1]
            low, high = (
                np.nanquantile(ratios, [0.05, 0.95], axis=0)
                if len(drawn)
                else np.full((2, len(values)), np.nan)
            )
        out.append({
            "level": level,
            "values": [
                {
                    "value": int(values[v]),
                    "faults": int(came[:, v].sum()),
                    "expected": float(forecast[:, v].sum()),
                    "ratio": ratio(float(rate[v]), float(rate[most])),
                    "low": float(low[v]),
                    "high": float(high[v]),
                    "forecast_ratio": ratio(float(said[v]), float(said[most])),
                }
                for v in range(len(values))
            ],
        })  # fmt: skip
    return out


def _terms(result: LifeResult) -> Score:
    """Choices made on the past: effects, frailties, and whom a fault follows."""
    hazard = result.hazards[POSITION]
    shapes = [dict(zip(hazard.factor_names, e.shape, strict=True)) for e in hazard.effects if e.shape]
    return {
        "age": hazard.terms.age,
        "by_class": hazard.terms.by_class,
        "log_likelihood": {name: held.likelihood for name, held in result.hazards.items()},
        "frailty": [vars(found) for found in hazard.chosen],
        "follows": hazard.follows(),
        "effect_shapes": shapes,
    }
