"""Parameters learned of devices, with their drift, their late entry into use, and the least squares.

An expectation may not know a reading of its own signal that is younger than a minute. So a learned value
passes through three sets, in use <- waiting <- learning, and moves on every 60 s of data time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from twin import kernels
from twin.catalogue import F32, F64, I64, Bool
from twin.telemetry import OWN, EntityState, column, scalar

# Rows learn in turns of parts. Below this size NumPy's calls cost as much as the rows; more turns than these
# would lose little but learn late; source: estimate.
LEAST_PART, TURNS = 512, 10
MOVE_S = 60.0  # between moves from set to set; the age that the rule above asks for
NOISE_AFTER_MOVES = 3  # of what was learned, before differences are called noise
# A reading that is off by more than ASKED_SIGMAS is asked how well its parameters are known where its device
# now works; KNOWN_SIGMAS of that doubt account for a difference before it is called noise; source: estimate
ASKED_SIGMAS = KNOWN_SIGMAS = 2.0
# Readings closer than this err alike (models err, not noise), so they count as one; source: estimate
ALIKE_S = 20.0


def parts_of(n: int, most: int) -> list[slice]:
    """Parts of n rows that learn in turn: at most `TURNS` of `LEAST_PART` rows; more if they pass `most`."""
    count = max(-(-n // most), min(n // LEAST_PART, TURNS), 1)
    cuts = np.linspace(0, n, count + 1).astype(np.int64).tolist()
    return [slice(a, b) for a, b in pairwise(cuts)]


def moves_left_s(parts: list[slice], moves: I64, since_s: F64) -> F64:
    """Return the time until the parameters of each row have moved into use so often [n]; `moves` and
    `since_s`, the last one's age, are of each part.
    """
    left_s = np.maximum((NOISE_AFTER_MOVES - moves) * MOVE_S - since_s, 0.0)
    return np.repeat(left_s, [p.stop - p.start for p in parts])


@dataclass(frozen=True, slots=True)
class Parameter:
    """A learned quantity of the entities of `table`, in the unit that its name says [n].

    `reference` is what it was when it had first settled (NaN before), `sigma` the uncertainty of `value`, and
    `confidence_pu` the probability that the two truly differ.
    """

    name: str
    table: str
    value: F64
    reference: F64
    sigma: F64
    confidence_pu: F64

    @property
    def drift(self) -> F64:
        """Return value / reference - 1."""
        return self.value / self.reference - 1.0


class Delayed(EntityState):
    """k parameters of n rows in three sets [k, n]. `learning` is written to, `in_use` is read."""

    learning: F64 = column(OWN, "f8", "first", lead=("k",))
    waiting: F64 = column(OWN, "f8", "first", lead=("k",))
    in_use: F64 = column(OWN, "f8", "first", lead=("k",))
    since_s: float = scalar(0.0)

    def __init__(self, first: F64, table: str = OWN) -> None:
        self.first = first
        super().__init__({"k": first.shape[0], table: first.shape[1]}, table)

    def advance(self, dt_s: float) -> bool:
        """Advance all rows once a minute, before learning; returns True if it did."""
        self.since_s += dt_s
        if self.since_s < MOVE_S:
            return False
        self.since_s = 0.0
        self.move()
        return True

    def move(self, rows: slice = slice(None)) -> None:
        """Advance these rows, for callers with their own clock."""
        self.in_use[:, rows] = self.waiting[:, rows]
        self.waiting[:, rows] = self.learning[:, rows]

    def reset(self, entity: int, first: F64) -> None:
        """Start again for one entity with `first` [k]."""
        for values in (self.learning, self.waiting, self.in_use):
            values[:, entity] = first


class Fit(EntityState):
    """Least squares per row, y = x . theta, with k features, forgetting, and a prior that never fades.

    Kept are the normal equations of past readings: `normal` [k (k + 1) / 2, n], `moment` [k, n]. Adding the
    prior's when solving bounds the covariance by the prior's, whatever is or is not excited.
    """

    normal: F64 = column(OWN, "f8", lead=("pairs",))
    moment: F64 = column(OWN, "f8", lead=("k",))
    taught_s: F64 = column(OWN, "f8")  # seconds of readings taken in, by their weight

    def __init__(self, k: int, n: int, memory_s: float, table: str = OWN) -> None:
        super().__init__({"k": k, "pairs": k * (k + 1) // 2, table: n}, table)
        self.k, self.n, self.memory_s = k, n, memory_s

    def learn(self, rows: slice, features: list[F64], y: F64, error: F64, weight: F64, dt_s: float) -> None:
        """Take in a reading per row: `features` k times [m]; `error` is its 1 sigma; weight 0 is none.

        Past readings fade only as far as new ones come in. Features, y and error are finite where
        the weight is not 0.
        """
        fade, worth = min(dt_s / self.memory_s, 1.0), min(dt_s / ALIKE_S, 1.0)
        kept = self.normal[:, rows], self.moment[:, rows], self.taught_s[rows]
        kernels.learn_fit(*kept, y, error, weight, fade, worth, dt_s, *features)

    def solve(self, rows: slice, prior: F64, spread: F64) -> Solution:
        """Return the parameters of these rows with this prior and its 1 sigma, both [k, m] or [k, 1]."""
        trust = 1.0 / (spread * spread)
        return solve(self.normal[:, rows], self.moment[:, rows], prior, trust)


class Solution(NamedTuple):
    """`theta` and its variance [k, m]; `factor` [k (k + 1) / 2, m]: the lower triangle, row after row, of W
    with covariance W' W."""

    theta: F64
    variance: F64
    factor: F64


def solve(normal: F64, moment: F64, prior: F64, trust: F64) -> Solution:
    """Solve (N + diag(trust)) theta = moment + trust * prior by Cholesky, row by row.

    `normal` [k (k + 1) / 2, m] holds the upper triangle of N, row after row.
    """
    k, m = moment.shape
    place: dict[tuple[int, int], int] = {}
    for i in range(k):
        for j in range(i, k):
            place[i, j] = len(place)
    low: dict[tuple[int, int], F64] = {}
    inverse: dict[tuple[int, int], F64] = {}  # of the lower triangle
    right = moment + trust * prior
    half: list[F64] = []
    for i in range(k):
        for j in range(i):
            low[i, j] = normal[place[j, i]] - sum((low[i, p] * low[j, p] for p in range(j)), np.zeros(m))
            low[i, j] *= inverse[j, j]
        square = normal[place[i, i]] + trust[i] - sum((low[i, p] ** 2 for p in range(i)), np.zeros(m))
        inverse[i, i] = 1.0 / np.sqrt(square)
        half.append((right[i] - sum((low[i, p] * half[p] for p in range(i)), np.zeros(m))) * inverse[i, i])
        for j in range(i):
            total = sum((low[i, p] * inverse[p, j] for p in range(j, i)), np.zeros(m))
            inverse[i, j] = -total * inverse[i, i]
    theta, variance = np.zeros((k, m)), np.zeros((k, m))
    for j in range(k):
        for i in range(j, k):
            theta[j] += inverse[i, j] * half[i]
            variance[j] += inverse[i, j] ** 2
    return Solution(theta, variance, np.stack([inverse[i, j] for i in range(k) for j in range(i + 1)]))


def for_prior(normal: F64, moment: F64, spread: F64) -> tuple[F64, F64]:
    """Return the normal equations of the prior's mean; parameters of a row are `spread` [k, m] away from it.

    However many readings a row has, it tells no more of the mean than its own distance from it allows: with
    S = diag(spread^2) and normal N, (N^-1 + S)^-1 = T - T (N + T)^-1 T, where T = S^-1.
    """
    k, m = moment.shape
    trust = 1.0 / (spread * spread)
    theta, _, factor = solve(normal, moment, np.zeros((k, m)), trust)
    rows = [factor[i * (i + 1) // 2 : (i + 1) * (i + 2) // 2] for i in range(k)]
    told = []
    for a in range(k):
        for b in range(a, k):
            covariance = sum((rows[i][a] * rows[i][b] for i in range(b, k)), np.zeros(m))
            told.append((trust[a] if a == b else 0.0) - trust[a] * covariance * trust[b])
    return np.stack(told), trust * theta


class Covariance(EntityState):
    """Covariance of k parameters of n rows, by its factor W (see `Solution`). It comes into use as late as
    the parameters in `Delayed` do: what was seen within the last minute has not made these surer."""

    waiting: F32 = column(OWN, "f4", "first", lead=("pairs",))
    in_use: F32 = column(OWN, "f4", "first", lead=("pairs",))

    def __init__(self, spread: F64, table: str = OWN) -> None:
        """`spread` [k, n]: 1 sigma of the prior."""
        k, n = spread.shape
        self.first = np.zeros((k * (k + 1) // 2, n), np.float32)
        self.first[[i * (i + 3) // 2 for i in range(k)]] = spread
        super().__init__({"pairs": len(self.first), table: n}, table)

    def move(self, rows: slice, factor: F64) -> None:
        """Advance these rows, beside `Delayed.move`."""
        self.in_use[:, rows] = self.waiting[:, rows]
        self.waiting[:, rows] = factor

    def variance(self, k: int, rows: slice) -> F64:
        """Return the variance [m] of parameter k in use, for a part of the rows."""
        of_row = [i * (i + 1) // 2 + k for i in range(len(self.first)) if k <= i]
        column = self.in_use[[at for at in of_row if at < len(self.first)]][:, rows]
        return np.asarray((column.astype(np.float64) ** 2).sum(axis=0))

    def sigma(self, at: np.ndarray, features: list[F64]) -> F64:
        """Return 1 sigma [m] of x . theta of the rows `at` from the uncertainty of theta; `features` k
        times [m].

        Large where x is unlike what was seen: sqrt(x' S x).
        """
        out = np.empty(len(at))
        kernels.fit_sigma(self.in_use, at, out, *features)
        return out


class Reference(EntityState):
    """The settled early value of k parameters of n rows, and the doubt about a drift away from it."""

    value: F64 = column(OWN, "f8", np.nan, lead=("k",))
    sigma: F64 = column(OWN, "f8", np.nan, lead=("k",))
    confidence: F64 = column(OWN, "f8", np.nan, lead=("k",))
    settled_ns: I64 = column(OWN, "i8")  # instant of the value; 0 is unknown

    def __init__(self, k: int, n: int, settled_s: float, table: str = OWN) -> None:
        super().__init__({"k": k, table: n}, table)
        self.settled_s = settled_s

    def settle(self, rows: slice, value: F64, taught_s: F64, received_ns: I64) -> None:
        """Make `value` [k, m] the reference once enough readings have been used for the first time.

        `received_ns` [m]: instant of the newest of them.
        """
        early = self.value[:, rows]
        fresh: Bool = np.isnan(early[0]) & (taught_s >= self.settled_s) & np.isfinite(value).all(axis=0)
        np.copyto(early, value, where=fresh)
        np.copyto(self.settled_ns[rows], received_ns, where=fresh)
