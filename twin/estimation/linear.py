"""Linear relation: a signal that is linear in others, y = x . theta, per entity; compared in every tick,
learned in turns.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, Bool
from twin.contracts import Residual
from twin.estimation.noise import ResidualNoise, confidence_of
from twin.estimation.parameter import MOVE_S, Delayed, Fit, Parameter, Reference, parts_of
from twin.telemetry import OWN, EntityState, OldOfNew, column, part, scalar

PART = 2_048  # rows that learn in one tick, at most
NOISE_AFTER_MOVES = 3  # of what was learned, before differences are called noise
SETTLED_S = 900.0  # of readings before a parameter's value is its reference; source: estimate
MOVE_PU = 0.1  # doubt in an expectation while it moves, of its last step; source: estimate


class Linear(EntityState):
    """A relation over a table: `prior` and `spread` [k, n]; `error` [n] of one reading, `floor` of noise."""

    sigma: F64 = column(OWN, "f8", np.nan)
    expected: F64 = column(OWN, "f8", np.nan)
    taught_ns: I64 = column(OWN, "i8")
    elapsed_s: F64 = column("part", "f8")
    since_s: F64 = column("part", "f8")
    moves: I64 = column("part", "i8")
    turn: int = scalar(0)
    set: Delayed = part()
    fit: Fit = part()
    reference: Reference = part()
    noise: ResidualNoise = part()

    def __init__(
        self, name: str, prior: F64, spread: F64, error: F64, floor: F64, memory_s: float = 3600.0
    ) -> None:
        table = name.partition(".")[0]
        self.name = name
        self.k, self.n = prior.shape
        self.parts = parts_of(self.n, PART)
        super().__init__({table: self.n, "part": len(self.parts)}, table)
        self.prior, self.spread, self.error = prior, spread, error
        self.set, self.fit = Delayed(prior, table), Fit(self.k, self.n, memory_s, table)
        self.reference = Reference(self.k, self.n, SETTLED_S, table)
        self.noise = ResidualNoise(self.n, floor, table)

    def compare(
        self,
        features: list[F64],
        measured: F64,
        heard_ns: I64,
        dt_s: float,
        untouched: Bool | None = None,
        doubt: F64 | None = None,
    ) -> Residual:
        """The comparison of this tick; `features` k times [n]. Learns from new readings that are `untouched`.

        `doubt` [n] is more uncertainty in y's unit.
        """
        self.elapsed_s += dt_s
        self.since_s += dt_s
        part = self.turn % len(self.parts)
        self.turn += 1
        if self.since_s[part] >= MOVE_S:
            self._move(part)
        before, expected = self.expected, self.set.in_use[0] * features[0]
        for theta, x in zip(self.set.in_use[1:], features[1:], strict=True):
            expected += theta * x
        self.expected = expected
        loose = expected - before
        np.abs(loose, out=loose)
        loose *= MOVE_PU
        loose[np.isnan(loose)] = 0.0
        if doubt is not None:
            loose += doubt
        sigma = self.sigma + loose
        self._learn(part, features, measured, heard_ns, untouched, loose)
        return Residual(self.name, expected, measured, sigma)

    def _move(self, part: int) -> None:
        rows = self.parts[part]
        theta, variance = self.fit.solve(rows, self.prior[:, rows], self.spread[:, rows])
        self.set.learning[:, rows] = theta
        self.set.move(rows)
        self.reference.settle(rows, theta, self.fit.taught_s[rows])
        self.reference.sigma[:, rows] = np.sqrt(variance)
        early = self.reference.value[:, rows]
        self.reference.confidence[:, rows] = confidence_of(
            self.set.in_use[:, rows] - early, self.reference.sigma[:, rows]
        )
        self.since_s[part] = 0.0
        self.moves[part] += 1

    def _learn(
        self,
        part: int,
        features: list[F64],
        measured: F64,
        heard_ns: I64,
        untouched: Bool | None,
        loose: F64,
    ) -> None:
        rows, dt_s = self.parts[part], float(self.elapsed_s[part])
        self.elapsed_s[part] = 0.0
        heard, y, expected = heard_ns[rows], measured[rows], self.expected[rows]
        fresh = heard > self.taught_ns[rows]
        self.taught_ns[rows] = heard
        if untouched is not None:
            fresh &= untouched[rows]
        if not fresh.any():
            return
        usable = fresh & np.isfinite(y - expected) & ~self.noise.lasting(heard, rows)
        sigma = self.sigma[rows]
        bound = np.where(np.isfinite(sigma), 4.0 * sigma, np.inf) + loose[rows]
        held = np.minimum(np.maximum(y, expected - bound), expected + bound)
        # What comes while it moves errs by more
        weight = np.where(usable, 1.0 / (1.0 + (loose[rows] / self.error[rows]) ** 2), 0.0)
        self.fit.learn(rows, [x[rows] for x in features], held, self.error[rows], weight, dt_s)
        if self.moves[part] < NOISE_AFTER_MOVES:
            return
        off = y - expected
        off = np.sign(off) * np.maximum(np.abs(off) - loose[rows], 0.0)
        self.noise.learn(np.where(fresh, off, np.nan), heard, dt_s, rows)
        self.sigma[rows] = self.noise.sigma(rows)

    def parameter(self, name: str, k: int) -> Parameter:
        """One coefficient, as now in use; views, to be read only."""
        of = self.reference
        return Parameter(name, self.table, self.set.in_use[k], of.value[k], of.sigma[k], of.confidence[k])

    def adopt(self, old: Linear, old_of_new: OldOfNew) -> None:
        """Take over what was learned on another site; its parts may have been others."""
        super().adopt(old, old_of_new)
        self.turn, self.moves[:] = 0, int(old.moves.min(initial=0))
