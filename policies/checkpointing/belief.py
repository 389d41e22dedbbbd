"""A rate of failures that is believed, not known: a Gamma belief as a few rates with their weights.

Gauss quadrature for the weight x^(shape - 1) e^-x, scaled to a mean of 1: m rates give the exact mean of
every polynomial of degree 2m - 1. Nodes and weights of any shape are read off a table over log shape, made
once.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from policies.checkpointing.single_tier import MOST_S, best_interval, ettr, maximise, seconds
from twin.catalogue import F64

QUADRATURE_NODES = 8
WIDE = 30.0  # how far from the interval for the mean rate the best one is looked for, as a factor
# Shapes outside are taken for the nearest: below 0.05 says nothing, beyond 1e6 is known to 0.1 %.
LEAST_SHAPE, MOST_SHAPE, STEP = 0.05, 1e6, 0.02


def gauss_gamma(shape: F64, nodes: int) -> tuple[F64, F64]:
    """(rates, weights), each [n, nodes], of Gamma beliefs of mean 1 and `shape` [n]; by Golub and Welsch.

    source: the recurrence of the Laguerre polynomials, Abramowitz and Stegun 22.7.12.
    """
    i = np.arange(nodes)
    matrix = np.zeros((len(shape), nodes, nodes))
    matrix[:, i, i] = 2.0 * i + shape[:, None]
    beside = np.sqrt(i[1:] * (i[1:] + shape[:, None] - 1.0))
    matrix[:, i[1:], i[:-1]] = matrix[:, i[:-1], i[1:]] = beside
    found, vectors = np.linalg.eigh(matrix)
    return found / shape[:, None], vectors[:, 0, :] ** 2


@cache
def _table(nodes: int) -> tuple[F64, F64]:
    steps = np.arange(np.log(LEAST_SHAPE), np.log(MOST_SHAPE) + STEP, STEP)
    rates, weights = gauss_gamma(np.exp(steps), nodes)
    return np.ascontiguousarray(rates.T), np.ascontiguousarray(weights.T)


def quadrature(shape: F64, nodes: int = QUADRATURE_NODES) -> tuple[F64, F64]:
    """(rates, weights), each [nodes, n], for beliefs of mean 1 and `shape` [n]; inf: sure. NaN stays.

    Between two shapes of the table both are interpolated, then scaled to a mean of exactly 1.
    """
    rates, weights = _table(nodes)
    place = (
        np.log(np.clip(np.where(np.isnan(shape), 1.0, shape), LEAST_SHAPE, MOST_SHAPE)) - np.log(LEAST_SHAPE)
    ) / STEP
    low = np.minimum(place.astype(np.int64), rates.shape[1] - 2)
    share = place - low
    x, w = (np.take(a, low, axis=1) for a in (rates, weights))
    x += share * (np.take(rates, low + 1, axis=1) - x)
    w += share * (np.take(weights, low + 1, axis=1) - w)
    x = np.where(np.isinf(shape), 1.0, x / (x * w).sum(axis=0))
    return np.where(np.isnan(shape), np.nan, x), w


def ettr_believed(
    interval_s: ArrayLike,
    save_s: ArrayLike,
    restart_s: ArrayLike,
    shape: ArrayLike,
    per_s: ArrayLike,
    flush_s: ArrayLike = 0.0,
) -> F64:
    """ETTR [n] expected over a Gamma belief in the rate of failures, of mean `per_s` and `shape` (inf: sure).

    One tier, as `single_tier.ettr`. NaN where an input is NaN.
    """
    arrays = np.broadcast_arrays(
        *(
            np.atleast_1d(np.asarray(x, np.float64))
            for x in (interval_s, save_s, restart_s, shape, per_s, flush_s)
        )
    )
    interval, save, restart, shapes, rate, flush = arrays
    rates, weights = quadrature(shapes)
    with np.errstate(divide="ignore", invalid="ignore"):
        mttf = 1.0 / np.maximum(rates * rate, 0.0)
    return np.asarray((weights * ettr(interval, save, restart, mttf, flush)).sum(axis=0))


def best_believed(
    save_s: ArrayLike, restart_s: ArrayLike, shape: ArrayLike, per_s: ArrayLike, flush_s: ArrayLike = 0.0
) -> tuple[F64, F64]:
    """(interval_s, ettr), each [n], of the greatest ETTR expected over a Gamma belief, by golden section.

    Little is lost by planning with the mean rate: to first order the belief's width does not matter, and a
    rate that is wrong by a factor costs as much to either side (0.4 points at twice or half the true rate,
    at an MTTF of 7.9 h and a save of 60 s). An interval that is itself wrong by a factor costs a little
    more when it is too long (1.46 against 1.42 points at a factor of 2 there, 4.97 against 4.22 at 1 h and
    300 s).
    """
    save, restart, shapes, rate, flush = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x, np.float64)) for x in (save_s, restart_s, shape, per_s, flush_s))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        sure, _ = best_interval(np.maximum(save, 1e-9), restart, 1.0 / np.maximum(rate, 0.0), flush)
    sure = np.clip(sure, 1e-9, MOST_S)
    low = np.maximum(sure / WIDE, seconds(flush))
    found = maximise(lambda x: ettr_believed(x, save, restart, shapes, rate, flush), low, sure * WIDE)
    return found, ettr_believed(found, save, restart, shapes, rate, flush)
