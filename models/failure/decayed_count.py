"""Reference forecast: nodes ranked by their number of faults, with exponential decay.

Half a page that every other forecast has to beat. The count becomes a probability by isotonic regression on
past origins.
"""

from __future__ import annotations

import numpy as np

from models.failure.fault_log import FaultLog
from twin.catalogue import F64

HALF_LIFE_D = 30.0  # source: estimate; the span over which one fault predicts another
GRAIN = 1e-3  # of a score
ORDER = 1e-9  # of a probability
PRIOR_CASES = 2.0  # cases at the mean rate that every step of the map is drawn to. source: estimate


def decayed_counts(known: FaultLog, day: float, half_life_d: float = HALF_LIFE_D) -> F64:
    """Return each node's faults up to `day`, weighted by 0.5 ** (age / half-life) [n]."""
    age_d = day - known.start_d
    return known.per_node(np.where(age_d >= 0.0, 0.5 ** (age_d / half_life_d), 0.0))


class Isotonic:
    """A rising map from scores >= 0 to probabilities, fitted on (score, 0 or 1), or on how many of so many
    `cases` of a score came true.

    The steps that pool adjacent violators, in the middle between them a straight line; ends are held. On a
    step the order of scores is kept, by next to nothing.
    source: Zadrozny and Elkan, KDD 2002
    """

    def __init__(self, score: F64, outcome: F64, cases: F64 | None = None) -> None:
        from scipy.optimize import isotonic_regression

        # Scores that are almost alike are one: to sort each of a million takes seconds.
        place = np.round(score / GRAIN).astype(np.int64)
        count = np.bincount(place, cases)
        bins = np.flatnonzero(count)
        at, count, hits = bins * GRAIN, count[bins], np.bincount(place, outcome)[bins]
        total = len(outcome) if cases is None else cases.sum()
        mean = float(outcome.sum() / total) if total else 0.0
        self.at, self.level = at, hits
        if not len(at):
            return
        steps = isotonic_regression(hits / count, weights=count)
        weight = np.add.reduceat(count.astype(np.float64), steps.blocks[:-1])
        drawn = (steps.x[steps.blocks[:-1]] * weight + PRIOR_CASES * mean) / (weight + PRIOR_CASES)
        self.level = np.repeat(np.maximum.accumulate(drawn), np.diff(steps.blocks))

    def __call__(self, score: F64) -> F64:
        if not len(self.at):
            return np.zeros_like(score)
        out: F64 = np.minimum(np.interp(score, self.at, self.level) + ORDER * score / (1.0 + score), 1.0)
        return out
