"""A discrete-time hazard on telemetry: boosted trees beside the baseline, calibrated on later cases.

Per horizon: trees learn the log-odds of a failure within it from features and from the baseline; a line
logit p = a + b logit(baseline) + c trees is then fitted on cases later than any that grew them, drawn to the
baseline alone. It is in force only once what it really said lost less than the baseline beyond chance. Fits
run in a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from models import trees
from models.failure.cases import BEFORE, HOUR_NS, SLOT_S
from models.failure.recalibration import logistic, logit
from models.moving_block import interval
from twin.catalogue import F64, I64, NS, Bool, ContractError

DAY_NS = 86_400 * NS
LEAST_FAILED, LEAST_LATER = 24, 8  # different failures: in all, and to calibrate on. source: estimate
EARLIER = 0.65  # share of the failures that trees grow from. source: estimate
# source: estimate; cases of one failure are alike, so leaves are large, and trees small
ROUNDS, LEARNING_RATE, MOST_LEAVES, LEAST_LEAF, LEAF_SHARE, L2 = 60, 0.08, 6, 30, 0.002, 1.0
MOST_BINS, LEAST_IN_BIN = 8, 5.0  # of calibration: failures in each. source: estimate
# Of the line's coefficients, in units of failures: without any, the baseline is said. source: estimate
PRIOR_LINE, PRIOR = np.array([0.0, 1.0, 0.0]), 2.0
STEPS, HALVINGS = 40, 30
SCORED_FAILED, SCORED_DAYS, SCORED_BLOCKS = 15, 5, 4  # before a challenger may win. source: estimate
LEAST_P = 1e-6
RATE = 0  # the horizon whose baseline the trees read: the shortest says the rate
KEYS = (*trees.KEYS, "line", "bins", "taught")


class Champion(NamedTuple):
    """The model in force at a horizon: `hazard` or not, since when, on which evidence (NaN: none yet).

    gain: loss per failure spared against the baseline, with its 90 % interval; failures: scored on.
    """

    hazard: bool
    since_ns: int
    gain: float
    low: float
    high: float
    failures: int

    def array(self) -> F64:
        """Return the champion as numbers."""
        return np.array([self.hazard, self.since_ns / NS, self.gain, self.low, self.high, self.failures])

    @classmethod
    def of(cls, numbers: F64) -> Champion:
        """Return the champion from `array`. Raises ContractError."""
        if np.shape(numbers) != (6,) or not np.isfinite(numbers[[0, 1, 5]]).all():
            raise ContractError("champion: expected six numbers")
        hazard, since_s, gain, low, high, failures = numbers.tolist()
        return cls(bool(hazard), round(since_s * NS), gain, low, high, int(failures))


NOBODY = Champion(False, 0, np.nan, np.nan, np.nan, 0)


class Outcomes(NamedTuple):
    """Cases of one horizon with a known outcome [k].

    at: their place; y: failed; weight: so much of one failure, or as much time without; failure: a number
    for each different one, -1 where there was none.
    """

    at: I64
    y: Bool
    weight: F64
    failure: I64


def outcomes(cases: Mapping[str, Any], settled_ns: int, horizon_s: float) -> Outcomes:
    """Return the present outcome of each case. The hour before a failure is kept complete: nothing else
    shows it.

    A case whose node people took away before its horizon was over says nothing, nor one whose horizon
    is not over, whatever became of it already.
    """
    horizon_ns = round(horizon_s * NS)
    t_ns, failed_ns, lost_ns = cases["t_ns"], cases["failed_ns"], cases["lost_ns"]
    until_ns = t_ns + horizon_ns
    y = (failed_ns > 0) & (failed_ns <= until_ns)
    known = (until_ns <= settled_ns) & (y | (lost_ns == 0) | (lost_ns > until_ns))
    before = cases["how"] == BEFORE
    known &= (before == y) if horizon_ns <= HOUR_NS else ~before
    index = np.flatnonzero(known)
    y = y[index]
    weight = cases["weight"][index].astype(np.float64) * SLOT_S / horizon_s
    which = np.stack([cases["node"][index][y], failed_ns[index][y]])
    failure = np.full(len(index), -1, np.int64)
    if y.any():
        failure[y] = np.unique(which, axis=1, return_inverse=True)[1].ravel()
    return Outcomes(index, y, weight, failure)


def grow(rows: F64, y: Bool, weight: F64, seed: int) -> dict[str, Any]:
    """Return trees of the log-odds of y, packed; {} if no column is informative."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    known = np.isfinite(rows)
    low = np.where(known, rows, np.inf).min(axis=0, initial=np.inf)
    high = np.where(known, rows, -np.inf).max(axis=0, initial=-np.inf)
    informative = np.flatnonzero((low < high) | ((low == high) & ~known.all(axis=0)))
    if not len(informative) or y.all() or not y.any():
        return {}
    model = HistGradientBoostingClassifier(
        max_iter=ROUNDS,
        learning_rate=LEARNING_RATE,
        max_leaf_nodes=MOST_LEAVES,
        max_bins=63,
        min_samples_leaf=max(LEAST_LEAF, int(LEAF_SHARE * len(y))),
        l2_regularization=L2,
        early_stopping=False,
        random_state=seed,
    )
    with threadpool_limits(1):  # a second thread that waits for a busy core costs more than it brings
        model.fit(rows[:, informative], y, sample_weight=weight / weight.mean())
    packed = trees.pack_trees(_LogOdds(model))
    packed["feature"] = np.where(packed["feature"] < 0, -1, informative[packed["feature"]]).astype(np.int32)
    return packed | {"n_feature": np.array([rows.shape[1]], np.int32)}


class IdentityLink:
    """Identity link: log-odds stay log-odds."""


class _Loss:
    link = IdentityLink()


class _LogOdds:
    """A fitted classifier as a regressor of log-odds, as `pack_trees` wants one."""

    def __init__(self, model: Any) -> None:
        self._predictors, self._baseline_prediction = model._predictors, model._baseline_prediction
        self.n_features_in_, self._loss, self.predict = model.n_features_in_, _Loss(), model.decision_function


def calibrate(base: F64, raw: F64, y: Bool, weight: F64) -> F64:
    """Return the line (a, b, c) of logit p = a + b logit(base) + c raw; b and c never below 0 [3].

    Newton's method on the weighted likelihood with PRIOR towards PRIOR_LINE.
    """
    centre = _centre(raw, weight)
    x = np.stack([np.ones(len(y)), logit(base), raw - centre])

    def fault(line: F64) -> float:
        odds = line @ x
        return float((weight * (np.logaddexp(0.0, odds) - y * odds)).sum()) + 0.5 * PRIOR * float(
            ((line - PRIOR_LINE) ** 2).sum()
        )

    line = PRIOR_LINE.copy()
    least = fault(line)
    for _ in range(STEPS):
        said = logistic(line @ x)
        slope = x @ (weight * (y - said)) - PRIOR * (line - PRIOR_LINE)
        bend = (x * (weight * said * (1.0 - said))) @ x.T + PRIOR * np.eye(3)
        step = np.linalg.solve(bend, slope)
        # Far from the end a whole step may lead astray: half of it, and half again, until it helps.
        for _ in range(HALVINGS):
            tried = line + step
            tried[1:] = np.maximum(tried[1:], 0.0)
            now = fault(tried)
            if now < least:
                break
            step = 0.5 * step
        else:
            break
        line, least = tried, now
    line[0] -= line[2] * centre
    return line


def _centre(raw: F64, weight: F64) -> float:
    return float((raw * weight).sum() / max(weight.sum(), 1e-12))


def bins_of(p: F64, y: Bool, weight: F64) -> F64:
    """Return bins of calibration: (lower edge, spread), both on the logistic scale, ascending [n_bin, 2].

    Each holds LEAST_IN_BIN failures or more; the spread is that of a share of so many.
    """
    order = np.argsort(-p, kind="stable")
    hits = np.cumsum((weight * y)[order])
    each = max(LEAST_IN_BIN, float(hits[-1]) / MOST_BINS)
    place = np.minimum((hits / each).astype(np.int64), max(int(hits[-1] / each) - 1, 0))
    out = []
    for b in range(int(place[-1]), -1, -1):
        inside = order[place == b]
        if len(inside):
            came = float((weight * y)[inside].sum())
            rest = float(weight[inside].sum()) - came
            out.append(
                (float(logit(p[inside]).min()), np.sqrt(1.0 / (came + 0.5) + 1.0 / (max(rest, 0.0) + 0.5)))
            )
    return np.array(out)


def fit_horizon(
    cases: Mapping[str, Any], settled_ns: int, horizon_s: float, place: int, seed: int
) -> dict[str, Any]:
    """Return trees, line and bins of one horizon; {} if too little is known."""
    known = outcomes(cases, settled_ns, horizon_s)
    n_failed = int(known.failure.max(initial=-1)) + 1
    if n_failed < LEAST_FAILED:
        return {}
    t_ns = cases["t_ns"][known.at]
    first = np.full(n_failed, np.iinfo(np.int64).max)
    np.minimum.at(first, known.failure[known.y], t_ns[known.y])
    split_ns = int(np.sort(first)[int(EARLIER * n_failed)])
    early, late = t_ns + round(horizon_s * NS) <= split_ns, t_ns >= split_ns
    different = [len(np.unique(known.failure[part & known.y])) for part in (early, late)]
    if different[0] < LEAST_FAILED - LEAST_LATER or different[1] < LEAST_LATER:
        return {}
    base = np.clip(cases["said"][known.at, place].astype(np.float64), LEAST_P, 1.0 - LEAST_P)
    rate = np.clip(cases["said"][known.at, RATE].astype(np.float64), LEAST_P, 1.0 - LEAST_P)
    rows = np.column_stack([cases["x"][known.at].astype(np.float64), logit(rate)])
    packed = grow(rows[early], known.y[early], known.weight[early], seed)
    if not packed:
        return {}
    raw = trees.predict_trees(packed, rows[late])
    line = calibrate(base[late], raw, known.y[late], known.weight[late])
    p = logistic(line[0] + line[1] * logit(base[late]) + line[2] * raw)
    bins = bins_of(p, known.y[late], known.weight[late])
    taught = np.array([n_failed, len(known.at)], np.float64)
    return {**packed, "line": line, "bins": bins, "taught": taught}


def choose(
    cases: Mapping[str, Any],
    settled_ns: int,
    horizon_s: float,
    place: int,
    before: Champion,
    seed: int,
) -> Champion:
    """Return the next champion, by the forecasts of both on cases with a known outcome.

    The challenger must be better beyond chance to win, and better at all to stay; `since_ns` of a new one is
    left 0.
    """
    known = outcomes(cases, settled_ns, horizon_s)
    said = cases["said"][known.at].astype(np.float64)
    both = np.isfinite(said[:, place]) & np.isfinite(said[:, place + said.shape[1] // 2])
    failures = len(np.unique(known.failure[both & known.y]))
    nobody = Champion(False, 0, np.nan, np.nan, np.nan, failures)
    if not both.any():
        return nobody
    day = cases["t_ns"][known.at][both] // DAY_NS
    day -= day.min()
    loss = [_loss(said[both, place + k], known.y[both]) for k in (0, said.shape[1] // 2)]
    spared = np.bincount(day, known.weight[both] * (loss[0] - loss[1])) / max(failures, 1)
    n_day, block = len(spared), max(1, -(-round(horizon_s * NS) // DAY_NS))
    enough = failures >= SCORED_FAILED and n_day >= SCORED_DAYS and n_day >= SCORED_BLOCKS * block
    low, high = (x * n_day for x in interval(spared, block, seed)) if enough else (np.nan, np.nan)
    gain = float(spared.sum())
    hazard = gain > 0.0 if before.hazard else enough and low > 0.0
    since_ns = before.since_ns if hazard and before.hazard else 0
    return Champion(bool(hazard), since_ns, gain, float(low), float(high), failures)


def _loss(p: F64, y: Bool) -> F64:
    p = np.clip(p, LEAST_P, 1.0 - LEAST_P)
    return -np.where(y, np.log(p), np.log1p(-p))


class Hazards:
    """Fitted trees of some horizons, ready to predict. `horizons` are their places, ascending."""

    def __init__(self, fitted: Mapping[int, Mapping[str, Any]]) -> None:
        """By place of the horizon: trees, line and bins. Raises ContractError for what is none."""
        self.places = tuple(sorted(fitted))
        self.lines, self.bins = [], []
        for place in self.places:
            line, bins = fitted[place]["line"], fitted[place]["bins"]
            if np.shape(line) != (3,) or not np.isfinite(line).all() or (line[1:] < 0).any():
                raise ContractError("line: expected three numbers, the last two >= 0")
            if bins.ndim != 2 or bins.shape[1] != 2 or not len(bins) or not np.isfinite(bins).all():
                raise ContractError("bins: expected edges and spreads")
            if (np.diff(bins[:, 0]) < 0).any() or (bins[:, 1] < 0).any():
                raise ContractError("bins: expected rising edges and spreads >= 0")
            self.lines.append(line.astype(np.float64))
            self.bins.append(bins.astype(np.float64))
        packed = [{key: fitted[place][key] for key in trees.KEYS} for place in self.places]
        self.grove = trees.unpack_grove(packed) if packed else None
        read = np.concatenate([p["feature"] for p in packed]) if packed else np.zeros(0, np.int32)
        self.read = [int(c) for c in np.unique(read) if 0 <= c < self.n_feature]

    @property
    def n_feature(self) -> int:
        """Return the number of feature columns, without the baseline; 0 without trees."""
        return 0 if self.grove is None else self.grove.n_feature - 1

    def say(self, values: Any, base: F64) -> F64:
        """Return probabilities [n_place, n] from features [n, n_feature] and the baseline's [n_horizon,
        n]."""
        if self.grove is None:
            return np.zeros((0, len(values)))
        rows = np.zeros((len(values), self.n_feature + 1), order="F")
        for column in self.read:
            rows[:, column] = values[:, column]
            rows[np.isinf(rows[:, column]), column] = np.nan
        rows[:, -1] = logit(base[RATE])
        raw = self.grove.predict(rows)
        return np.stack(
            [
                logistic(line[0] + line[1] * logit(base[place]) + line[2] * odds)
                for place, line, odds in zip(self.places, self.lines, raw, strict=True)
            ]
        )

    def band(self, i: int, p: F64) -> tuple[F64, F64]:
        """Return the 90 % interval of probabilities of the i-th horizon, by the failures in their bin."""
        at = logit(p)
        bins = self.bins[i]
        spread = 1.6448536269514722 * bins[np.clip(np.searchsorted(bins[:, 0], at, "right") - 1, 0, None), 1]
        return logistic(at - spread), logistic(at + spread)
