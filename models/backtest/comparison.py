"""Scores over several horizons at once: one ratio of errors for a data set, and one forecast beside another.

A horizon's ratio of errors counts as much as any other's: the whole is their geometric mean. Its interval
resamples stretches of time that all horizons share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.backtest.scores import LEAST_BLOCKS, RESAMPLES, Cells, Score, interval, summed
from twin.catalogue import F64, I64, Bool, ContractError


@dataclass(frozen=True)
class ErrorRatio:
    """One horizon's two errors: origins [k] (rows), error and rival [k], each summed over the series."""

    horizon: int
    stride: int
    origins: I64
    error: F64
    rival: F64
    targets: int

    @property
    def value(self) -> float:
        """Of the sums; 1 where neither ever errs, NaN where only the rival never does, or without targets."""
        mine, other = float(self.error.sum()), float(self.rival.sum())
        return mine / other if other > 0 else 1.0 if mine == 0 and self.targets else np.nan


def to_best(held: Cells, columns: Sequence[int]) -> ErrorRatio:
    """Errors of some series beside those of the best of the simple rivals: the one that `mase` is against."""
    at = list(columns)
    counts = np.isfinite(held.error[:, at])
    return _ratio(held, at, held.rivals[best_rival(summed(held, at))], counts)


def best_rival(score: Score) -> str:
    """Name of the simple baseline that errs least in these scores, as in `Cells.rivals`."""
    life = f"ewma{score['ewma_half_life']}"
    errors = {"naive": score["mae_naive"], "seasonal": score["mae_seasonal"], life: score["mae_ewma"]}
    return min(errors, key=lambda name: np.inf if errors[name] is None else float(errors[name] or 0.0))


def to_rival(held: Cells, other: Cells, columns: Sequence[int]) -> ErrorRatio:
    """Errors of some series beside those of another forecast of the same origins, where both exist."""
    if not np.array_equal(held.origins, other.origins):
        raise ContractError("rival: expected forecasts from the same origins")
    at = list(columns)
    return _ratio(held, at, other.error, np.isfinite(held.error[:, at]) & np.isfinite(other.error[:, at]))


def _ratio(held: Cells, at: list[int], rival: F64, counts: Bool) -> ErrorRatio:
    """`rival` [k, n]; counts [k, len(at)]."""
    mine, other = (np.where(counts, part[:, at], 0.0).sum(axis=1) for part in (held.error, rival))
    return ErrorRatio(held.horizon, held.stride, held.origins, mine, other, int(counts.sum()))


def mean_ratio(ratios: Sequence[ErrorRatio]) -> float:
    """Geometric mean of the horizons' ratios; NaN without any."""
    values = np.array([ratio.value for ratio in ratios])
    values = values[np.isfinite(values) & (values > 0)]
    return float(np.exp(np.log(values).mean())) if len(values) else np.nan


def mean_interval(ratios: Sequence[ErrorRatio], seed: int = 0) -> tuple[float, float]:
    """90 % interval of `mean_ratio` by the circular block bootstrap; NaN for too few blocks.

    A block is a stretch of time as long as the longest horizon, and the same for all horizons, so that what
    they have in common stays in common.
    source: Politis and Romano, in Exploring the Limits of Bootstrap (1992)
    """
    used = [ratio for ratio in ratios if np.isfinite(ratio.value) and ratio.value > 0]
    if not used:
        return np.nan, np.nan
    first = min(int(ratio.origins[0]) for ratio in used)
    rows = max(int(ratio.origins[-1]) for ratio in used) + 1 - first
    length = max(*(ratio.horizon for ratio in used), round(rows ** (1 / 3)), 1)
    if rows < LEAST_BLOCKS * length:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)  # tidy: allow np.random because a bootstrap draws, from the seed given
    begin = rng.integers(0, rows, (RESAMPLES, -(-rows // length)))
    logs = np.zeros((len(used), RESAMPLES))
    for i, ratio in enumerate(used):
        mine, other = (
            _blocks(part, ratio.origins - first, rows, length)[begin].sum(axis=1)
            for part in (ratio.error, ratio.rival)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            logs[i] = np.log(mine / other)
    drawn = np.exp(logs.mean(axis=0))
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < RESAMPLES / 2:
        return np.nan, np.nan
    return float(np.quantile(drawn, 0.05)), float(np.quantile(drawn, 0.95))


def _blocks(part: F64, at: I64, rows: int, length: int) -> F64:
    """Sums over `length` rows from each row on, round the end. [rows]"""
    each = np.zeros(rows)
    each[at] = part
    total = np.concatenate([[0.0], np.cumsum(np.concatenate([each, each[: length - 1]]))])
    out: F64 = total[length:] - total[:-length]
    return out


def overall(ratios: Sequence[ErrorRatio], seed: int = 0) -> Score:
    """`mean_ratio` and its interval as plain numbers."""
    low, high = mean_interval(ratios, seed)
    return {"ratio": mean_ratio(ratios), "low": low, "high": high}


def compare_errors(held: Cells, other: Cells, columns: Sequence[int], seed: int = 0) -> dict[str, object]:
    """One horizon, where both exist: errors of both, their ratio with its 90 % interval, and who errs less.

    `sure`: the interval lies on one side of 1.
    """
    ratio = to_rival(held, other, columns)
    targets = ratio.targets
    length = max(-(-held.horizon // held.stride), round(len(ratio.error) ** (1 / 3)), 1)
    low, high = interval(ratio.error, ratio.rival, length, seed)
    mae, mae_rival = (float(p.sum()) / targets if targets else np.nan for p in (ratio.error, ratio.rival))
    return {
        "mae": mae,
        "mae_rival": mae_rival,
        "ratio": ratio.value,
        "low": low,
        "high": high,
        "targets": targets,
        **winner(mae, mae_rival, low, high),
    }


def winner(mine: float, other: float, low: float, high: float) -> dict[str, object]:
    """Return the better side: ours, rival, or none if both err equally; `sure` if the interval excludes 1."""
    better = "ours" if mine < other else "rival" if mine > other else "none"
    return {"better": better, "sure": bool(high < 1.0 or low > 1.0)}
