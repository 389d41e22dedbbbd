"""A discrete-time hazard: boosted trees that correct what the self-exciting baseline says of each node.

A case is a node that is up on a day; its features are taken from the log as it was known that day. The
trees learn the difference between what came (0 or 1) and the baseline's probability, by least squares, so
that they minimise the Brier score and say nothing where the log says nothing more. Refit on a sliding
window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from models import trees
from models.failure.fault_log import FaultLog
from models.failure.self_exciting import SelfExciting, fleet_rate
from twin.catalogue import F64, Bool

WINDOWS_D = (1.0, 3.0, 7.0, 14.0, 30.0, 60.0)  # source: estimate
HALF_LIVES_D = (5.0, 15.0, 45.0)  # source: estimate
MOST_CLASSES = 4  # the most frequent ones so far have a column each. source: estimate
SLIDING_D = 365.0  # days of past that a fit looks at. source: estimate
WARM_D = 14.0  # days after the log's begin that it leaves out. source: estimate
MOST_CASES = 60_000  # source: estimate; bounds the time of a fit
LEAST_FAILED = 30  # cases with a fault, of which fewer teach nothing. source: estimate
# source: tuned on synthetic logs; overlapping spans make cases alike, so leaves are large
ROUNDS, LEARNING_RATE, MOST_LEAVES, LEAF_SHARE, LEAST_LEAF = 25, 0.05, 4, 0.03, 50
LEAST_P = 1e-6


def node_features(known: FaultLog, day: float, kinds: tuple[int, ...]) -> F64:
    """Features of each node from a log as known on `day` [n, n_feature]. NaN: nothing to tell of."""
    age_d, back = day - known.start_d, known.returned
    out = [known.per_node((age_d <= window_d).astype(np.float64)) for window_d in WINDOWS_D]
    out += [known.per_node(0.5 ** (age_d / half_life_d)) for half_life_d in HALF_LIVES_D]
    ones = np.ones(known.k)
    own, down_d = known.per_node(ones), known.down_d(day)
    up_d = np.maximum(day - known.begin_d - down_d, 0.0)
    last = np.full(
        (4, known.n), np.nan
    )  # its age, since the return, how long the repair took, the gap before
    order = known.node
    previous = np.full(known.n, np.nan)
    for i in range(known.k):
        last[3, order[i]] = known.start_d[i] - previous[order[i]]
        previous[order[i]] = known.start_d[i]
    last[0, order] = age_d
    last[1, order] = np.where(back, day - known.end_d, np.nan)
    last[2, order] = np.where(back, known.end_d - known.start_d, np.nan)
    out += [own, own / np.maximum(up_d, 1.0), down_d, *last]
    out += [known.per_node(np.where(known.kind == kind, 0.5 ** (age_d / 30.0), 0.0)) for kind in kinds]
    out += [np.full(known.n, np.nan)] * (MOST_CLASSES - len(kinds))
    out += [np.full(known.n, fleet_rate(known, day, half_life_d)) for half_life_d in (7.0, 30.0)]
    return np.stack(out, axis=1)


def frequent_classes(known: FaultLog) -> tuple[int, ...]:
    """The classes that most faults had so far, at most MOST_CLASSES."""
    count = np.bincount(known.kind, minlength=1)
    order = np.argsort(-count, kind="stable")[:MOST_CLASSES]
    return tuple(int(kind) for kind in order if count[kind])


class Hazard:
    """One forest per span over the baseline. Without a forest it says what the baseline says."""

    name = "hazard"

    def __init__(self, spans_d: tuple[float, ...]) -> None:
        self.spans_d = spans_d
        self.base = SelfExciting()
        self.kinds: tuple[int, ...] = ()
        self.forests: dict[float, trees.Forest] = {}

    def fit(self, known: FaultLog, day: float, seed: int = 0) -> dict[str, np.ndarray]:
        """Parameters from origins whose span is over on `day`; of a span that has too few faults, none."""
        base = SelfExciting()
        out = {f"base.{key}": value for key, value in base.fit(known, day).items()}
        base.load({"theta": out["base.theta"]})
        kinds = frequent_classes(known)
        out["kinds"] = np.array(kinds, np.int32)
        days = np.arange(
            np.ceil(max(known.begin_d + WARM_D, day - SLIDING_D)), day - min(self.spans_d) + 1e-9
        )
        if not len(days):
            return out
        up, later = known.up(days), known.next_start(days)
        seen = [known.known_at(at) for at in days]
        x = [node_features(log, at, kinds) for log, at in zip(seen, days, strict=True)]
        quiet = [log.per_node(np.ones(log.k)) == 0.0 for log in seen]
        p = [base.predict(log, at, self.spans_d) for log, at in zip(seen, days, strict=True)]
        for i, span_d in enumerate(self.spans_d):
            over = np.flatnonzero(days <= day - span_d)[:: _stride(span_d)]
            failed = later[over] <= days[over, None] + span_d
            if int((failed & up[over]).sum()) < LEAST_FAILED:
                continue
            take = _sample(up[over], seed)
            cases = [_together(x[j], failed[a] - p[j][i], take[a], quiet[j]) for a, j in enumerate(over)]
            rows, rest, weight = (np.concatenate(part) for part in zip(*cases, strict=True))
            packed = _grow(rows, rest, weight, seed)
            out |= {f"{span_d:g}.{key}": value for key, value in packed.items()}
        return out

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Use these from now on. Raises ContractError for a damaged forest."""
        self.base.load({"theta": parameters["base.theta"]})
        self.kinds = tuple(int(kind) for kind in parameters["kinds"])
        self.forests = {
            span_d: trees.unpack_trees({key: parameters[f"{span_d:g}.{key}"] for key in trees.KEYS})
            for span_d in self.spans_d
            if f"{span_d:g}.start" in parameters
        }

    def predict(self, known: FaultLog, day: float, spans_d: tuple[float, ...]) -> F64:
        """Probability of a fault in (day, day + span] of nodes that are up [n_span, n]."""
        out = self.base.predict(known, day, spans_d)
        x = node_features(known, day, self.kinds)
        for i, span_d in enumerate(spans_d):
            if span_d in self.forests:
                out[i] += self.forests[span_d].predict(x)
        return np.clip(out, LEAST_P, 1.0 - LEAST_P)


def _stride(span_d: float) -> int:
    """Days between origins that are learned from: long spans overlap, and tell little more each day."""
    return max(1, min(3, int(span_d) // 3))


def _sample(case: Bool, seed: int) -> Bool:
    """At most about MOST_CASES cases [n_day, n], by chance."""
    n = int(case.sum())
    if n <= MOST_CASES:
        return case
    rng = np.random.default_rng(seed)  # tidy: allow np.random because cases are drawn, from the seed given
    out: Bool = case & (rng.random(case.shape) < MOST_CASES / n)
    return out


def _together(x: F64, rest: F64, take: Bool, quiet: Bool) -> tuple[F64, F64, F64]:
    """One day's features, what the baseline left, weights. Nodes that never failed are alike: one case."""
    some, alike = take & ~quiet, take & quiet
    n = int(alike.sum())
    if not n:
        return x[some], rest[some], np.ones(int(some.sum()))
    rows = np.concatenate([x[some], x[alike][:1]])
    return rows, np.append(rest[some], rest[alike].mean()), np.append(np.ones(int(some.sum())), float(n))


def _grow(rows: F64, rest: F64, weight: F64, seed: int) -> dict[str, Any]:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    model = HistGradientBoostingRegressor(
        max_iter=ROUNDS,
        learning_rate=LEARNING_RATE,
        max_leaf_nodes=MOST_LEAVES,
        max_bins=63,
        min_samples_leaf=max(LEAST_LEAF, int(LEAF_SHARE * len(rest))),
        early_stopping=False,
        random_state=seed,
    )
    low, high = np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0)
    telling = np.flatnonzero(low < high)
    if not len(telling):
        return {}
    with threadpool_limits(1):  # a second thread that waits for a busy core costs more than it brings
        model.fit(rows[:, telling], rest, sample_weight=weight)
    packed = trees.pack_trees(model)
    packed["feature"] = np.where(packed["feature"] < 0, -1, telling[packed["feature"]]).astype(np.int32)
    return packed | {"n_feature": np.array([rows.shape[1]], np.int32)}
