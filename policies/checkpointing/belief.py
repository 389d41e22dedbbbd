"""Rate belief: an uncertain failure rate, as a Gamma distribution in a few rates with weights.

Gauss quadrature for the weight x^(shape - 1) e^-x, scaled to a mean of 1: m rates give the exact mean of
every polynomial of degree 2m - 1. Nodes and weights of any shape are read off a table over log shape, made
once.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from twin.catalogue import F64

QUADRATURE_NODES = 8
# Shapes outside are taken for the nearest: below 0.05 says nothing, beyond 1e6 is known to 0.1 %.
LEAST_SHAPE, MOST_SHAPE, STEP = 0.05, 1e6, 0.02


def gauss_gamma(shape: F64, nodes: int) -> tuple[F64, F64]:
    """Return (rates, weights), each [n, nodes], of Gamma beliefs of mean 1 and `shape` [n]; by Golub and
    Welsch.

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
    """Return (rates, weights), each [nodes, n], for beliefs of mean 1 and `shape` [n]; inf: certain. NaN
    stays.

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
