"""Confidence that a measured value differs from the expected one: the error function."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twin.catalogue import F64

Z90 = 1.6448536269514722  # the normal's 95 % quantile
LEAST_GAMMA_SHAPE = 0.05


def confidence_of(difference: F64, sigma: F64) -> F64:
    """Probability that a difference is real: erf(|z| / sqrt 2) of a normal; NaN = unknown."""
    return erf(np.abs(difference) / sigma / np.sqrt(2.0))


def erf(x: F64) -> F64:
    """The error function of x >= 0, absolute error below 1.5e-7. source: Abramowitz and Stegun 7.1.26"""
    t = 1.0 / (1.0 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 1.0 - poly * np.exp(-x * x)


def confidence_of_many(difference: F64, sigma: F64) -> F64:
    """The same for long columns, in float32 inside: absolute error below 1e-6."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x = (difference / sigma).astype(np.float32)
    np.abs(x, out=x)
    np.minimum(x, np.float32(20.0), out=x)  # an infinite one would give 0 times infinity
    x *= np.float32(np.sqrt(0.5))
    t = x * np.float32(0.3275911)
    t += np.float32(1.0)
    np.reciprocal(t, out=t)
    poly = t * np.float32(1.061405429)
    for term in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly += np.float32(term)
        poly *= t
    x *= x
    np.negative(x, out=x)
    np.exp(x, out=x)
    poly *= x
    np.subtract(np.float32(1.0), poly, out=poly)
    return poly.astype(np.float64)


def gamma_factors(shape: F64) -> tuple[F64, F64]:
    """5 and 95 % quantiles of a Gamma of mean 1. source: Wilson and Hilferty, PNAS 17 (1931)

    Below a shape of 1 the lower one is too low, towards 0, and the upper one within a tenth.
    """
    shape = np.maximum(shape, LEAST_GAMMA_SHAPE)
    middle, step = 1.0 - 1.0 / (9.0 * shape), Z90 / (3.0 * np.sqrt(shape))
    low: F64 = np.maximum(middle - step, 0.0) ** 3
    high: F64 = np.maximum(middle + step, 1.0) ** 3
    return low, high


@dataclass(frozen=True)
class Residual:
    """Expected beside measured [n]: `sigma` is the learned noise of their difference. To be read only."""

    name: str
    expected: F64
    measured: F64
    sigma: F64
    stated_pu: F64 | None = None  # a confidence that was found otherwise

    @cached_property
    def confidence_pu(self) -> F64:
        """Probability [n] that the two truly differ; on a healthy site it is uniform in 0..1. NaN = unknown.

        Worked out when first asked for: most ticks nobody asks.
        """
        if self.stated_pu is not None:
            return self.stated_pu
        return confidence_of_many(self.measured - self.expected, self.sigma)

    @property
    def difference(self) -> F64:
        """measured - expected"""
        return self.measured - self.expected
