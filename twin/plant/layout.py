"""Layout: entities in runs, one run per rack or node, with sums up to the owner and copies down to the
members.

Where all runs are equally long, a column is viewed as a matrix [runs, length], so that nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twin.catalogue import F64, I32

Index = NDArray[np.intp]
DENSE_MAX = 40_000  # cells of an incidence matrix up to which a product beats counting


@dataclass(slots=True)
class Runs:
    """`start` [n_run + 1]: members of run i are start[i] .. start[i + 1] - 1."""

    start: I32
    count: int = field(init=False)
    equal: bool = field(init=False)
    shape: tuple[int, ...] = field(init=False)  # how a column of members is looked at
    of: Index = field(init=False)  # run of each member
    _ones: F64 = field(init=False)

    def __post_init__(self) -> None:
        length = np.diff(self.start)
        self.count = len(length)
        total = int(self.start[-1])
        self.equal = self.count > 0 and total > 0 and bool((length == length[0]).all())
        self.shape = (self.count, int(length[0])) if self.equal else (total,)
        self.of = np.repeat(np.arange(self.count), length)
        self._ones = np.ones(int(length[0]) if self.equal else 0)

    def down(self, of_run: F64) -> F64:
        """Return a value per run, in a form that broadcasts against columns in `shape`."""
        return of_run[:, None] if self.equal else of_run[self.of]

    def sums(self, column: F64, out: F64) -> F64:
        """Return the sum per run of a column in `shape`."""
        if self.equal:
            return np.matmul(column, self._ones, out=out)
        out[:] = np.bincount(self.of, weights=column, minlength=self.count)
        return out


@dataclass(slots=True)
class Groups:
    """Members that belong to a group each, or to none (-1): racks of a CDU, CDUs of a loop."""

    of: Index
    count: int
    inside: NDArray[np.bool_] = field(init=False)
    at: Index = field(init=False)  # the group, 0 for none: to be gathered from
    _matrix: F64 | None = field(init=False)

    def __post_init__(self) -> None:
        self.inside = self.of >= 0
        self.at = np.where(self.inside, self.of, 0).astype(np.intp)
        self._matrix = None
        if 0 < self.count * len(self.of) <= DENSE_MAX:
            self._matrix = np.zeros((self.count, len(self.of)))
            self._matrix[self.of[self.inside], np.flatnonzero(self.inside)] = 1.0

    def sums(self, values: F64, out: F64) -> F64:
        """Return the sum per group, without members of no group."""
        if self._matrix is not None:
            return np.dot(self._matrix, values, out=out)
        if self.count:
            out[:] = np.bincount(self.at, weights=values * self.inside, minlength=self.count)
        return out

    def spread(self, of_group: F64, out: F64) -> F64:
        """Return the group's value for each member; that of group 0 for members of none."""
        if self.count:
            return of_group.take(self.at, out=out, mode="clip")
        return out
