"""The noise of residuals, learned: how far a reading usually is from its expectation, per row.

A difference that lasts is no noise, so nothing is learned from one: a fault must not become what is normal.
May import frames only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.frame import F64, I64, NS, Bool

NOISE_MEMORY_S = 600.0  # time constant of the learned noise; source: estimate
NOISE_WARMUP = 30  # residuals before a noise is called learned; source: estimate
# Beyond so many sigmas for so long it is no noise: nothing is learned from it, lest a fault become normal;
# source: estimate.
FAULT_SIGMAS, FAULT_S = 4.0, 10.0


def confidence_of(difference: F64, sigma: F64) -> F64:
    """Probability that a difference is real: erf(|z| / sqrt 2) of a normal; NaN = unknown."""
    return _erf(np.abs(difference) / sigma / np.sqrt(2.0))


def _erf(x: F64) -> F64:
    # Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7
    t = 1.0 / (1.0 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 1.0 - poly * np.exp(-x * x)


def confidence_of_many(difference: F64, sigma: F64) -> F64:
    """The same for long columns, in float32 inside: absolute error below 1e-6."""
    x = (difference / sigma).astype(np.float32)
    np.abs(x, out=x)
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


class Noise:
    """Learned root mean square of residuals, per row [n]: a constant loss is part of what is normal."""

    def __init__(self, n: int, floor: F64) -> None:
        self.n, self.floor = n, floor
        self.variance = np.zeros(n)
        self.count = np.zeros(n, np.int64)
        self.off_ns = np.zeros(n, np.int64)  # since when it has been far off; 0 = it is not

    def sigma(self, rows: slice = slice(None)) -> F64:
        """What was learned so far [n], or of a part; NaN before `NOISE_WARMUP` residuals."""
        learned = np.maximum(np.sqrt(self.variance[rows]), self.floor[rows])
        return np.where(self.count[rows] >= NOISE_WARMUP, learned, np.nan)

    def learn(self, difference: F64, heard_ns: I64, dt_s: float, rows: slice = slice(None)) -> None:
        """Take in residuals (NaN: none) of readings of `heard_ns`; one far off counts as four sigmas.

        With `rows`, both are those of a part of the rows, `dt_s` seconds after that part's turn before.
        """
        variance, count, off_ns = self.variance[rows], self.count[rows], self.off_ns[rows]
        floor = self.floor[rows]
        known = np.isfinite(difference)
        warm = count >= NOISE_WARMUP
        bound = np.where(warm, FAULT_SIGMAS * np.maximum(np.sqrt(variance), floor), np.inf)
        far = known & (np.abs(difference) > bound)
        near = known & ~(np.abs(difference) > bound / 2)
        since_ns = np.where(near, 0, np.where(far & (off_ns == 0), heard_ns, off_ns))
        known &= ~((since_ns > 0) & (heard_ns - since_ns >= FAULT_S * NS))
        clipped = np.where(known, np.clip(difference, -bound, bound), 0.0)
        counted = count + known
        share = np.maximum(1.0 / np.maximum(counted, 1), min(1.0, dt_s / NOISE_MEMORY_S))
        self.variance[rows] = np.where(known, variance + share * (clipped**2 - variance), variance)
        self.count[rows], self.off_ns[rows] = counted, since_ns

    def lasting(self, heard_ns: I64, rows: slice = slice(None)) -> Bool:
        """Rows that have been far off for so long that nothing may be learned from them."""
        off_ns = self.off_ns[rows]
        return np.asarray((off_ns > 0) & (heard_ns - off_ns >= FAULT_S * NS))

    def forget(self, entity: int) -> None:
        """Begin anew for one row."""
        self.variance[entity], self.count[entity], self.off_ns[entity] = 0.0, 0, 0

    def adopt(self, old: Noise, to: Any, source: Any) -> None:
        """Rows `to` are what `source` was of another."""
        for name in ("variance", "count", "off_ns"):
            getattr(self, name)[to] = getattr(old, name)[source]

    def dump(self) -> dict[str, Any]:
        return {"variance": self.variance, "count": self.count, "off_ns": self.off_ns}

    def restore(self, data: dict[str, Any]) -> None:
        self.variance, self.count = np.array(data["variance"]), np.array(data["count"])
        self.off_ns = np.array(data["off_ns"])
