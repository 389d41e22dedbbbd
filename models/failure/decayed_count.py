"""The reference: nodes ranked by their number of faults, each of which counts half as much after a while.

Half a page that every other forecast has to beat. The count becomes a probability by isotonic regression on
past origins.
"""

from __future__ import annotations

import numpy as np

from models.failure.fault_log import FaultLog
from twin.catalogue import F64

HALF_LIFE_D = 30.0  # source: estimate; the span over which one fault tells of another
PRIOR_CASES = 2.0  # cases at the mean rate that every step of the map is drawn to. source: estimate


def decayed_counts(known: FaultLog, day: float, half_life_d: float = HALF_LIFE_D) -> F64:
    """Each node's faults up to `day`, weighted by 0.5 ** (age / half-life) [n]."""
    age_d = day - known.start_d
    return known.per_node(np.where(age_d >= 0.0, 0.5 ** (age_d / half_life_d), 0.0))


class Isotonic:
    """A rising map from scores to probabilities, fitted on (score, 0 or 1).

    The steps that pool adjacent violators, in the middle between them a straight line; ends are held.
    source: Zadrozny and Elkan, KDD 2002
    """

    def __init__(self, score: F64, outcome: F64) -> None:
        at, place, count = np.unique(score, return_inverse=True, return_counts=True)
        hits = np.bincount(place, outcome, len(at))
        mean = float(outcome.mean()) if len(outcome) else 0.0
        level: list[float] = []
        weight: list[float] = []
        width: list[int] = []
        for value, n in zip(hits, count, strict=True):
            level.append(float(value / n))
            weight.append(float(n))
            width.append(1)
            while len(level) > 1 and level[-2] >= level[-1]:
                both = weight[-2] + weight[-1]
                level[-2:] = [(level[-2] * weight[-2] + level[-1] * weight[-1]) / both]
                weight[-2:] = [both]
                width[-2:] = [width[-2] + width[-1]]
        w = np.array(weight)
        drawn = (np.array(level) * w + PRIOR_CASES * mean) / (w + PRIOR_CASES)
        self.at = at
        self.level = np.repeat(np.maximum.accumulate(drawn), width) if len(at) else drawn

    def __call__(self, score: F64) -> F64:
        if not len(self.at):
            return np.zeros_like(score)
        out: F64 = np.interp(score, self.at, self.level)
        return out
