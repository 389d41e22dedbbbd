"""The lattice of a series: the common step of its values, such as 1 for a count of GPUs, and rounding to it.

A forecast of a count is a count: where most steps change nothing, 3.97 is always wrong and 4 mostly right.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, Bool

# Steps that are tried, coarsest first. source: estimate; trays, nodes and GPUs, and what meters round to
STEPS = (100.0, 72.0, 64.0, 50.0, 32.0, 16.0, 10.0, 8.0, 5.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.2, 0.1, 0.05, 0.01)
NEAR = 1e-6  # part of a step that a value may be off. source: estimate; decimals are not exact in binary
FEW = 4  # rows that are looked at first. source: estimate
ENOUGH = 20  # finite values that show a step. source: estimate; fewer may all be even by chance


def quantum(values: F64) -> F64:
    """The common step of each column of `values` [n_time, n], NaN skipped; 0 where there is none. [n]

    Differences from a column's first value are tried, so that a lattice need not hold zero; `snap` rounds
    around a value on it. A column that never changes, or with fewer than 20 values, has none.
    """
    n = values.shape[1]
    out = np.zeros(n)
    if not len(values) or not n:
        return out
    finite = np.isfinite(values)
    first = values[np.argmax(finite, axis=0), np.arange(n)]
    change = np.where(finite, values - np.where(np.isfinite(first), first, 0.0), 0.0)
    found = (finite.sum(axis=0) < ENOUGH) | ~change.any(axis=0)
    # A few rows rule out most steps of most series.
    few = np.arange(len(change) - 1, -1, -max(1, len(change) // FEW))
    possible = _fits(change[few], np.array(STEPS)[:, None, None])
    for step, likely in zip(STEPS, possible, strict=True):
        left = np.flatnonzero(likely & ~found)
        if len(left):
            fits = left[_fits(change[:, left], step)]
            out[fits] = step
            found[fits] = True
    return out


def _fits(change: F64, step: F64 | float) -> Bool:
    """True where all changes [..., n_time, n] are whole numbers of steps. bool [..., n]"""
    steps = change / step
    # Rounding errors of values grow with the values.
    size = np.abs(steps)
    near = NEAR * (1.0 + size)
    whole = np.abs(steps - np.rint(steps)) <= near
    fits: Bool = whole.all(axis=-2) & (size.max(axis=-2) < 1.0 / NEAR)
    return fits


def snap(values: F64, on: F64, quantum: F64) -> F64:
    """`values` [..., n] rounded to the lattice of step `quantum` [n] through `on` [n]; untouched where 0."""
    lattice = (quantum > 0.0) & np.isfinite(on)
    if not lattice.any():
        return values
    step = np.where(lattice, quantum, 1.0)
    rounded: F64 = on + np.rint((values - on) / step) * step
    return np.where(lattice, rounded, values)
