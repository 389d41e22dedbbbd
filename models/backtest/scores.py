"""Scores of a load backtest: errors next to those of last value, same time yesterday, and EWMA.

Every rival is taken from the same origins and judged at the same targets. A target counts where its value is
known, and the value at its origin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.backtest.load import BacktestResult, HorizonForecasts
from models.load import BANDS, LEVELS, MEDIAN, UNUSUAL, ForecastGrid, SeriesPanel, forward_fill, restlessness
from twin.catalogue import F64, I64, Bool

Score = dict[str, float | int | None]

HALF_LIVES = (5, 15, 60)  # rows; the best in hindsight counts
RESAMPLES, CONFIDENCE_Z = 500, 1.6449  # 90 % intervals: 5 and 95 % of the bootstrap, and of a normal
ENOUGH_TARGETS = 500  # non-overlapping ones, from which on coverage is stated without its interval
# Blocks, and targets that do not overlap, below which there is no interval, and a horizon does not count
# among several. source: estimate
LEAST_BLOCKS = 10
PEAK_SHARE = 0.95  # a peak: a target above this quantile of the scored ones
RAMP_SHARE = 0.90  # a ramp: a change beyond this quantile of the changes before the scored part
ANNOUNCED = 0.5  # of a ramp's threshold: so much in the right direction announces it
LEAST_ERRORS = 8  # as many past errors as a band of persistence needs. source: estimate
GROWTH = 1.02  # its quantiles are taken anew once there are so many more errors. source: estimate


@dataclass(frozen=True)
class Cells:
    """One horizon, cell by cell [k, n]: absolute errors, losses and marks; NaN or False where nothing counts.

    `band_share`: share of an outcome that lies in each band, by name; `closed`: 1 where it lies between the
    band's edges or on them. `peak`: forecast less actual at peaks; `peak_size`: the actual's size.
    `after_move`: the origin's row moved unusually.
    """

    horizon: int
    stride: int
    origins: I64
    error: F64
    rivals: Mapping[str, F64]
    pinball: F64
    pinball_persistence: F64
    inside: Mapping[str, F64]
    closed: Mapping[str, F64]
    peak: F64
    peak_size: F64
    ramp: Bool
    hit: Bool
    announced: Bool
    false: Bool
    after_move: Bool


def ewma(values: F64, half_lives: Sequence[float] = HALF_LIVES) -> F64:
    """Exponentially weighted means [n_half_life, n_time, n], from the first value on; a gap holds them.

    Weights sum to 1 from the start, so that the first value counts no more than any other of its age.
    """
    share = 1.0 - 0.5 ** (1.0 / np.array(half_lives, np.float64))[:, None]
    out = np.empty((len(half_lives), *values.shape))
    mean = np.full((len(half_lives), values.shape[1]), np.nan)
    weight = np.zeros_like(mean)  # of all values so far
    for row, now in enumerate(values):
        known = np.isfinite(now)
        weight = np.where(known, weight + share * (1.0 - weight), weight)
        step = np.where(weight > share, mean + share / np.maximum(weight, share) * (now - mean), now)
        mean = np.where(known, step, mean)
        out[:, row] = mean
    return out


def seasonal_naive(values: F64, origins: I64, horizon: int, season: int | None) -> F64:
    """The last known value at the target's time of day [k, n]; the last value where no day is behind."""
    filled = forward_fill(values)
    last: F64 = filled[origins]
    if season is None:
        return last
    at = origins + horizon - season * -(-horizon // season)
    before = filled[np.maximum(at, 0)]
    return np.where((at >= 0)[:, None] & np.isfinite(before), before, last)


def persistence_bands(values: F64, origins: I64, horizon: int, stride: int) -> F64:
    """Quantiles [k, n, n_level] of the last value plus the errors that it had made by then, from all origins.

    Errors of every `stride` rows whose outcome was known at the origin; taken anew once there are 2 % more.
    """
    begin = np.arange(0, len(values) - horizon, stride)
    errors = values[begin + horizon] - values[begin]
    out = np.full((len(origins), values.shape[1], len(LEVELS)), np.nan)
    known = np.searchsorted(begin + horizon, origins, side="right")
    used, offsets = -1, np.full((values.shape[1], len(LEVELS)), np.nan)
    for i, count in enumerate(known.tolist()):
        if used < 0 or count >= used * GROWTH:
            used, offsets = count, _quantiles(errors[:count])
        out[i] = values[origins[i]][:, None] + offsets
    return out


def _quantiles(errors: F64) -> F64:
    """Quantiles at LEVELS of each column, gaps left out [n, n_level]; NaN for fewer than 8."""
    ordered = np.sort(errors, axis=0)
    count = np.isfinite(errors).sum(axis=0)
    place = np.maximum(count - 1, 0)[:, None] * np.array(LEVELS)
    low = np.floor(place).astype(np.int64)
    high = np.minimum(low + 1, np.maximum(count - 1, 0)[:, None])
    columns = np.arange(errors.shape[1])[:, None]
    if not len(ordered):
        return np.full((errors.shape[1], len(LEVELS)), np.nan)
    out: F64 = ordered[low, columns] + (place - low) * (ordered[high, columns] - ordered[low, columns])
    out[count < LEAST_ERRORS] = np.nan
    return out


def pinball(quantiles: F64, actual: F64) -> F64:
    """Mean over LEVELS of the quantile loss [k, n]. quantiles [k, n, n_level], actual [k, n]."""
    gap = actual[..., None] - quantiles
    levels = np.array(LEVELS)
    out: F64 = np.maximum(levels * gap, (levels - 1.0) * gap).mean(axis=-1)
    return out


def band_share(quantiles: F64, actual: F64, band: str) -> F64:
    """Share of an outcome inside a band [k, n], 0 to 1, fair where forecasts have atoms.

    An outcome that equals some quantiles is spread over the levels that it could stand for: the randomised
    probability integral transform, in expectation. source: Czado, Gneiting and Held, Biometrics 65 (2009)
    """
    edges = np.array((0.0, *LEVELS, 1.0))
    begin = edges[(quantiles < actual[..., None]).sum(axis=-1)]
    end = edges[len(edges) - 1 - (quantiles > actual[..., None]).sum(axis=-1)]
    low, high = (LEVELS[i] for i in BANDS[band])
    share = np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0.0) / (end - begin)
    out: F64 = np.where(np.isfinite(quantiles).all(axis=-1) & np.isfinite(actual), share, np.nan)
    return out


def cells(panel: SeriesPanel, course: HorizonForecasts, start_row: int, means: F64) -> Cells:
    """All that a horizon's scores are sums of. `means`: `ewma` of the panel."""
    horizon, values = course.horizon, panel.values
    origins = course.origins[course.origins + horizon < panel.n_time]
    quantiles = course.quantiles[: len(origins)]
    actual, last, said = values[origins + horizon], values[origins], quantiles[..., MEDIAN]
    counts = np.isfinite(actual) & np.isfinite(last) & np.isfinite(said)
    actual = np.where(counts, actual, np.nan)
    seasons = ForecastGrid(panel.step_s, (horizon,)).seasons
    yesterday = seasonal_naive(values, origins, horizon, seasons[0] if seasons else None)
    rivals = {"naive": np.abs(last - actual), "seasonal": np.abs(yesterday - actual)}
    rivals |= {f"ewma{life}": np.abs(means[i, origins] - actual) for i, life in enumerate(HALF_LIVES)}
    loss = pinball(quantiles, actual)
    loss_rival = pinball(persistence_bands(values, origins, horizon, course.stride), actual)
    both = np.isfinite(loss) & np.isfinite(loss_rival)
    known = np.isfinite(quantiles).all(axis=-1) & counts
    lows = {name: quantiles[..., edge[0]] for name, edge in BANDS.items()}
    highs = {name: quantiles[..., edge[1]] for name, edge in BANDS.items()}
    peak = _peaks(actual)
    ramp, hit, announced, false = _ramps(values, start_row, horizon, actual - last, said - last, counts)
    return Cells(
        horizon,
        course.stride,
        origins,
        np.abs(said - actual),
        rivals,
        np.where(both, loss, np.nan),
        np.where(both, loss_rival, np.nan),
        {name: band_share(quantiles, actual, name) for name in BANDS},
        {name: np.where(known, (lows[name] <= actual) & (actual <= highs[name]), np.nan) for name in BANDS},
        np.where(peak, said - actual, np.nan),
        np.where(peak, np.abs(actual), np.nan),
        ramp,
        hit,
        announced,
        false,
        counts & _after_moves(values, origins),
    )


def _after_moves(values: F64, origins: I64) -> Bool:
    """True where the change to the row of an origin was unusual, as bands see it [k, n]."""
    move = np.abs(values[origins] - values[np.maximum(origins - 1, 0)])
    with np.errstate(invalid="ignore"):
        return np.asarray(move > UNUSUAL * restlessness(values, origins))


def _peaks(actual: F64) -> Bool:
    """Targets above the 95 % quantile of their series; on a plateau, those that reach it."""
    out = np.zeros(actual.shape, bool)
    for j, column in enumerate(actual.T):
        known = column[np.isfinite(column)]
        if len(known):
            edge = np.quantile(known, PEAK_SHARE)
            out[:, j] = column > edge if (known > edge).any() else column >= edge
    return out


def _ramps(
    values: F64, start_row: int, horizon: int, change: F64, said: F64, counts: Bool
) -> tuple[Bool, Bool, Bool, Bool]:
    """(ramps, ramps that were announced, announcements, announcements that came to nothing), each [k, n]."""
    before = np.abs(values[horizon:start_row] - values[: max(start_row - horizon, 0)])
    edge = np.full(values.shape[1], np.nan)
    for j, column in enumerate(before.T):
        known = column[np.isfinite(column)]
        if len(known) >= LEAST_ERRORS:
            edge[j] = np.quantile(known, RAMP_SHARE)
    some = counts & np.isfinite(edge)
    ramp = some & (np.abs(change) > edge)
    announced = some & (np.abs(said) >= ANNOUNCED * edge) & (said != 0.0)
    agree = np.sign(said) == np.sign(change)
    came = agree & (np.abs(change) >= ANNOUNCED * edge)
    return ramp, ramp & announced & agree, announced, announced & ~came


def count_independent(origins: I64, counts: Bool, horizon: int) -> int:
    """Number of targets that do not overlap: origins at least a horizon apart."""
    number, next_row = 0, -1
    for row in origins[counts].tolist():
        if row >= next_row:
            number, next_row = number + 1, row + horizon
    return number


def apart_targets(held: Cells, columns: Sequence[int]) -> int:
    """Number of targets of some series of a horizon that do not overlap in time."""
    counts = np.asarray(np.isfinite(held.error[:, list(columns)]).any(axis=1))
    return count_independent(held.origins, counts, held.horizon)


def interval(error: F64, rival: F64, length: int, seed: int) -> tuple[float, float]:
    """90 % interval of sum(error) / sum(rival) [k] by the circular block bootstrap; NaN for too few blocks.

    source: Politis and Romano, in Exploring the Limits of Bootstrap (1992); blocks keep what is correlated
    """
    n = len(error)
    if n < LEAST_BLOCKS * length:
        return np.nan, np.nan
    sums = []
    for part in (error, rival):
        total = np.concatenate([[0.0], np.cumsum(np.concatenate([part, part[: length - 1]]))])
        sums.append(total[length:] - total[:-length])
    rng = np.random.default_rng(seed)  # tidy: allow np.random because a bootstrap draws, from the seed given
    begin = rng.integers(0, n, (RESAMPLES, -(-n // length)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sums[0][begin].sum(axis=1) / sums[1][begin].sum(axis=1)
    ratio = ratio[np.isfinite(ratio)]
    if len(ratio) < RESAMPLES / 2:
        return np.nan, np.nan
    return float(np.quantile(ratio, 0.05)), float(np.quantile(ratio, 0.95))


def binomial(share: float, n: int) -> tuple[float, float]:
    """90 % interval of a share seen in n trials. source: Wilson, J. Am. Stat. Assoc. 22 (1927)"""
    if n < 1 or not np.isfinite(share):
        return np.nan, np.nan
    z2 = CONFIDENCE_Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = CONFIDENCE_Z / (1 + z2 / n) * np.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return float(max(middle - half, 0.0)), float(min(middle + half, 1.0))


def _mean(array: F64) -> float:
    known = array[np.isfinite(array)]
    return float(known.mean()) if len(known) else np.nan


def _share(part: Bool, whole: Bool) -> float:
    return float(part.sum() / whole.sum()) if whole.any() else np.nan


def summed(held: Cells, columns: Sequence[int], seed: int = 0) -> Score:
    """The scores of some series of a horizon taken together, as plain numbers; NaN where there is none.

    Errors are summed over the series, so that the greater ones weigh more, and so are those of the rivals.
    """
    at = list(columns)
    error = held.error[:, at]
    counts = np.isfinite(error)
    row_error = np.where(counts, error, 0.0).sum(axis=1)
    row_rival = {
        name: np.where(counts, values[:, at], 0.0).sum(axis=1) for name, values in held.rivals.items()
    }
    targets = int(counts.sum())
    mean = {name: float(rows.sum()) / targets if targets else np.nan for name, rows in row_rival.items()}
    life = min(HALF_LIVES, key=lambda life: mean[f"ewma{life}"])
    best = min(("naive", "seasonal", f"ewma{life}"), key=mean.__getitem__)
    mae = float(row_error.sum()) / targets if targets else np.nan
    mase = mae / mean[best] if mean[best] > 0 else 1.0 if mae == 0 else np.nan
    length = max(-(-held.horizon // held.stride), round(len(row_error) ** (1 / 3)), 1)
    low, high = interval(row_error, row_rival[best], length, seed)
    free = apart_targets(held, at)
    out: Score = {
        "mae": mae,
        "mae_naive": mean["naive"],
        "mae_seasonal": mean["seasonal"],
        "mae_ewma": mean[f"ewma{life}"],
        "ewma_half_life": life,
        "mase": mase,
        "mase_low": low,
        "mase_high": high,
        "pinball": _mean(held.pinball[:, at]),
        "pinball_persistence": _mean(held.pinball_persistence[:, at]),
    }
    for name in BANDS:
        out[f"coverage{name}"] = _mean(held.inside[name][:, at])
    for name in BANDS:
        out[f"coverage{name}_closed"] = _mean(held.closed[name][:, at])
    enough = LEAST_BLOCKS <= free < ENOUGH_TARGETS
    ends = binomial(_mean(held.inside["90"][:, at]), free) if enough else (np.nan, np.nan)
    out["coverage90_low"], out["coverage90_high"] = ends
    peak_size = float(np.nansum(held.peak_size[:, at]))
    ramp, announced = held.ramp[:, at], held.announced[:, at]
    return out | {
        "targets": targets,
        "independent_targets": free,
        "peak_error": float(np.nansum(held.peak[:, at])) / peak_size if peak_size > 0 else np.nan,
        "ramp_hit_rate": _share(held.hit[:, at], ramp),
        "ramp_false_rate": _share(held.false[:, at], announced),
        "ramps": int(ramp.sum()),
        "coverage90_after_moves": _mean(held.inside["90"][:, at][held.after_move[:, at]]),
        "after_moves": int(held.after_move[:, at].sum()),
    }


def unchanged_share(values: F64) -> F64:
    """Share of one-row changes that are zero [n]; NaN without any."""
    change = np.diff(values, axis=0)
    known = np.isfinite(change).sum(axis=0)
    out: F64 = (change == 0.0).sum(axis=0) / np.where(known > 0, known, np.nan)
    return out


def each_cells(result: BacktestResult) -> list[Cells]:
    """`cells` of each horizon."""
    means = ewma(result.panel.values)
    return [cells(result.panel, course, result.start_row, means) for course in result.courses]


def score_load(
    result: BacktestResult,
    pooled: Sequence[int] | None = None,
    seed: int = 0,
    held: Sequence[Cells] | None = None,
) -> list[dict[str, object]]:
    """Per horizon, scores over the `pooled` series (default: all), and in `series` by name those of each.

    `held`: `each_cells` of the result, if they were made already.
    """
    panel = result.panel
    still = unchanged_share(panel.values)
    names = panel.names or tuple(str(j) for j in range(panel.n))
    whole = list(range(panel.n)) if pooled is None else list(pooled)
    out: list[dict[str, object]] = []
    for course, one in zip(result.courses, each_cells(result) if held is None else held, strict=True):
        score: dict[str, object] = {
            "horizon_steps": course.horizon,
            "horizon_s": course.horizon * panel.step_s,
        }
        score |= summed(one, whole, seed)
        score["unchanged_share"] = _mean(still[whole])
        score |= {"fit_s": result.fit_s, "predict_ms": course.predict_ms}
        score["series"] = {
            name: summed(one, [j], seed) | {"unchanged_share": float(still[j])}
            for j, name in enumerate(names)
        }
        out.append(score)
    return out
