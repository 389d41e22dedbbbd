"""Recalibration: the ratio of recent faults to expected faults, as a factor on all forecasts.

Rates of a fleet drift, and a fit believes the past for a year. Faults that came over faults expected is again
a Gamma-Poisson rate, drawn to 1, and all nodes' rates are multiplied by it: no order of nodes changes.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64

HALF_LIFE_D = 20.0  # of what a day counts. source: LANL's systems of even number
PRIOR = 10.0  # faults expected that came. source: LANL's systems of even number
LEAST_P = 1e-6


def logit(p: F64) -> F64:
    p = np.clip(p, LEAST_P, 1.0 - LEAST_P)
    out: F64 = np.log(p) - np.log1p(-p)
    return out


def logistic(x: F64) -> F64:
    out: F64 = 1.0 / (1.0 + np.exp(-np.clip(x, -50.0, 50.0)))
    return out


def level(expected: F64, came: F64, age_d: F64) -> float:
    """Faults that came for each that was expected, from days that are over [n_day]."""
    weight = 0.5 ** (age_d / HALF_LIFE_D)
    return float((PRIOR + weight @ came) / (PRIOR + weight @ expected))


def at_level(p: F64, factor: float) -> F64:
    """Probabilities of one or more faults at so many times the rate."""
    out: F64 = -np.expm1(factor * np.log1p(-np.minimum(p, 1.0 - 1e-12)))
    return out
