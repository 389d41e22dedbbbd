"""The lattice of a series: the common step of its values, such as 1 for a count of GPUs, and rounding to it.

A forecast of a count is a count: where most steps change nothing, 3.97 is always wrong and 4 mostly right.
May import the core's number types; NumPy only.
"""

from __future__ import annotations

import numpy as np

from twin.frame import F64

# Steps that count as a lattice, coarsest first. source: estimate; counts, halves, and what meters and people round to
STEPS = (1000.0, 100.0, 50.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.25, 0.2, 0.1, 0.05, 0.01)
NEAR = 1e-6  # share of a step that a value may be off. source: estimate; sums of decimal fractions in binary
COARSE = 64.0  # a lattice matters where a usual value or change spans fewer steps. source: estimate
ENOUGH = 8  # finite values that tell a step. source: estimate


def quantum(values: F64) -> F64:
    """The common step of each column of `values` [n_time, n], NaN skipped; 0 where there is none. [n]

    Differences are tried rather than values, so that a lattice need not hold zero; `snap` rounds around a
    value on it. A step much finer than what the series does says nothing, so that it counts as none.
    """
    n = values.shape[1]
    out = np.zeros(n)
    finite = np.isfinite(values)
    enough = finite.sum(axis=0) >= ENOUGH
    if not enough.any():
        return out
    first = np.argmax(finite, axis=0)
    change = np.where(finite, values - values[first, np.arange(n)], 0.0)
    spread = np.abs(change).max(axis=0)
    found = ~enough | (spread == 0.0)
    for step in STEPS:
        steps = change / step
        fits = (np.abs(steps - np.round(steps)) <= NEAR * (1.0 + np.abs(steps))).all(axis=0) & ~found
        out[fits] = step
        found |= fits
    return out


def snap(values: F64, on: F64, quantum: F64) -> F64:
    """`values` rounded to the lattice through `on` [n] with steps `quantum` [n]; unchanged where that is 0."""
    step = np.where(quantum > 0.0, quantum, 1.0)
    rounded: F64 = on + np.rint((values - on) / step) * step
    return np.where((quantum > 0.0) & np.isfinite(on), rounded, values)
