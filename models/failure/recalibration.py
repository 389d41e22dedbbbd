"""Probabilities moved to the shares that came true: a line on the logistic scale.

p becomes logistic(a + b logit(p)), drawn to a = 0 and b = 1, so that few outcomes change little. The recent
past counts more. source: Cox, Biometrika 45 (1958); Platt (1999).
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, Bool

HALF_LIFE_D = 60.0  # of what an outcome counts. source: estimate
PRIOR = 10.0  # weight of a = 0, b = 1 in units of a half: (a^2 + (b - 1)^2) * PRIOR / 2. source: estimate
STEPS = 25  # of Newton's method, each at most LONGEST, which needs fewer. source: estimate
LONGEST = 1.0
LEAST_P = 1e-6
FLATTEST = 0.1  # a line that falls would turn the order round. source: estimate


def logit(p: F64) -> F64:
    p = np.clip(p, LEAST_P, 1.0 - LEAST_P)
    out: F64 = np.log(p) - np.log1p(-p)
    return out


def logistic(x: F64) -> F64:
    out: F64 = 1.0 / (1.0 + np.exp(-np.clip(x, -50.0, 50.0)))
    return out


class Logistic:
    """Fitted on probabilities p [k], whether it came [k], and how long ago that was said, age_d [k]."""

    def __init__(self, p: F64, came: Bool, age_d: F64, prior: float = PRIOR) -> None:
        x = np.stack([np.ones(len(p)), logit(p)])
        weight = 0.5 ** (age_d / HALF_LIFE_D)
        goal = np.array([0.0, 1.0])
        line = goal.copy()
        for _ in range(STEPS):
            said = logistic(line @ x)
            slope = x @ (weight * (came - said)) - prior * (line - goal)
            bend = (x * (weight * said * (1.0 - said))) @ x.T + prior * np.eye(2)
            line = line + np.clip(np.linalg.solve(bend, slope), -LONGEST, LONGEST)
            line[1] = max(line[1], FLATTEST)
        self.line = line

    def __call__(self, p: F64) -> F64:
        return logistic(self.line[0] + self.line[1] * logit(p))
