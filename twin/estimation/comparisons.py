"""Comparison board: many relations in one flat column, so that a tick needs few array operations.

A relation predicts a signal from other readings and one parameter of its entity. The board keeps noise,
parameter and doubt of all of them. A parameter is learned from the device's own readings, so it enters
expectations late: in use <- waiting <- learning, moved on every 60 s; no expectation knows a reading of its
own signal that is younger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Residual, confidence_of
from twin.estimation.noise import FAULT_SIGMAS, NOISE_WARMUP, ResidualNoise
from twin.estimation.parameter import MOVE_S
from twin.telemetry import OWN, PackedState, column, part, scalar

# Readings of one instant arrive some seconds apart, so while an expectation moves it is doubted by this share
# of its movement, and after it for a while; source: estimate.
FAST_S, FAST_SHARE, HOLD_S = 5.0, 0.5, 10.0
# No model holds over all of its range: a change of regime is doubted by this share of it until the parameter
# has followed; source: estimate.
SLOW_S, SLOW_SHARE = 300.0, 0.04
CALM_SHARE = 0.5  # of the sigma that is noise, to learn of noise; source: estimate
SETTLED_COUNT = 240  # readings taken in before a parameter's early value is its reference; source: estimate


@dataclass(frozen=True, slots=True)
class Row:
    """A relation over a table of n entities and the parameter that it learns.

    `prior` [n] or a number, NaN = none known: the first reading decides. `spread` is the prior's 1 sigma,
    `error` that of one reading of the parameter, both over its value where `relative`. `noise` is the floor
    under the learned noise, in the signal's unit, or in shares of the expectation where a part says so.
    """

    name: str
    table: str
    n: int
    noise: float
    parameter: str = ""  # "" = nothing is learned but the noise
    prior: Any = np.nan
    spread: float = 0.1
    error: float = 0.02
    drift: float = 2e-4  # of the parameter, per root second; over its value where relative
    low: float = -np.inf
    high: float = np.inf
    relative: bool = False
    hold_s: float = HOLD_S


class Board(PackedState):
    """Cells of all rows, one after another. Parts write `expected` and so on through `put(name, ...)`.

    Of each cell's parameter: the value as learned, its successors on the way into use, its early value, and
    the expectation as followed fast and slowly.
    """

    value: F64 = column(OWN, "f8", "_prior")
    var: F64 = column(OWN, "f8", "_prior_var")
    waiting: F64 = column(OWN, "f8", "_prior")
    waiting_var: F64 = column(OWN, "f8", "_prior_var")
    in_use: F64 = column(OWN, "f8", "_prior")
    in_use_var: F64 = column(OWN, "f8", "_prior_var")
    reference: F64 = column(OWN, "f8", np.nan)
    reference_var: F64 = column(OWN, "f8", np.nan)
    settled_ns: I64 = column(OWN, "i8")  # instant of the reference; 0 is unknown
    fast: F64 = column(OWN, "f8", np.nan)
    slow: F64 = column(OWN, "f8", np.nan)
    held: F64 = column(OWN, "f8")  # doubt because the expectation moved lately
    count: I64 = column(OWN, "i8")
    taught_ns: I64 = column(OWN, "i8")
    slope: F64 = column(OWN, "f8")  # the last one says how far the next move shifts
    moved_ns: int = scalar(0)
    idle_s: float = scalar(0.0)
    noise: ResidualNoise = part()

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        sizes = [r.n for r in rows]
        n = self.n = sum(sizes)
        self._learns = np.repeat([bool(r.parameter) for r in rows], sizes).astype(np.bool_)
        self._relative = np.repeat([r.relative for r in rows], sizes).astype(np.bool_)
        self._spread = self._spread_out([r.spread for r in rows])
        prior = np.concatenate([np.zeros(0), *(np.broadcast_to(r.prior, r.n) for r in rows)])
        self._prior = np.where(self._learns, prior, 0.0)
        self._prior_var = (self._spread * np.where(self._relative, np.abs(prior), 1.0)) ** 2
        super().__init__([(r.name, r.table, r.n) for r in rows])
        self.noise = ResidualNoise(n, self._spread_out([r.noise for r in rows]), "cell")
        self._error_var = self._spread_out([r.error**2 for r in rows])
        self._drift_var = self._spread_out([r.drift**2 for r in rows])
        self._low, self._high = (self._spread_out([getattr(r, k) for r in rows]) for k in ("low", "high"))
        self._hold_s = self._spread_out([r.hold_s for r in rows])
        self._held_dt_s, self._hold = 0.0, np.ones(n)
        self._renewed = np.zeros(n, np.int8)  # moves that are still to come of a parameter that changed
        self.expected, self.measured, self.implied = (np.full(n, np.nan) for _ in range(3))
        self.loose, self.level, self.steps = np.zeros(n), np.ones(n), np.zeros(n)
        self._floor = self.noise.floor
        self.received_ns = np.zeros(n, np.int64)
        self.sigma, self.confidence = np.full(n, np.nan), np.full(n, np.nan)

    def _spread_out(self, of_row: Sequence[float]) -> F64:
        return np.repeat(np.array(of_row, np.float64), [r.n for r in self.rows])

    def parameter(self, name: str) -> F64:
        """Return the parameter in use of a relation [n]."""
        return self.in_use[self.cells[name]]

    def learned(self, name: str, kept: str = "value") -> F64:
        """Return a column of a relation's cells, such as the `value` as learned by now; a view [n]."""
        view: F64 = getattr(self, kept)[self.cells[name]]
        return view

    def change(self, name: str, factor: F64, spread: F64, read_ns: I64) -> Bool:
        """Parameters of a relation change for a known reason [n]: by about `factor` (NaN: they do not), with
        a `spread` of 1 sigma over the new value. Returns those that did; one of a reading that has been far
        off for long does not. The next reading decides each anew.
        """
        at = self.cells[name]
        changed: Bool = np.isfinite(factor) & ~self.noise.lasting(read_ns, at)
        for value, var in (
            ("waiting", "waiting_var"),
            ("in_use", "in_use_var"),
            ("reference", "reference_var"),
        ):
            moved = getattr(self, value)[at] * factor
            moved_var = getattr(self, var)[at] * factor**2 + (spread * moved) ** 2
            np.copyto(getattr(self, value)[at], moved, where=changed)
            np.copyto(getattr(self, var)[at], moved_var, where=changed)
        self.value[at][changed], self.count[at][changed] = np.nan, 0
        self._renewed[at][changed] = 3
        self._begin_anew()
        return changed

    def _begin_anew(self) -> None:
        """Restart the learning of expectations that move with a changed parameter: this is no change of
        regime."""
        renewed = self._renewed > 0
        self._renewed -= renewed
        self.fast[renewed] = self.slow[renewed] = np.nan

    def put(self, name: str, expected: F64, measured: F64, read_ns: I64, **more: F64 | float) -> None:
        """Put a comparison of this tick [n].

        `implied` is the parameter that the reading asks for, `slope` the change of the expectation with it,
        `loose` more doubt in the signal's unit, `level` what a noise of 1 amounts to, `steps` 1 sigma for the
        resolution of the readings: the noise is no less.
        """
        at = self.cells[name]
        self.expected[at], self.measured[at], self.received_ns[at] = expected, measured, read_ns
        for key, value in more.items():
            getattr(self, key)[at] = value

    def put_offset(self, name: str, base: F64, measured: F64, read_ns: I64, **more: F64 | float) -> None:
        """Put a comparison with a parameter that is added to `base`."""
        expected = base + self.parameter(name)
        self.put(name, expected, measured, read_ns, implied=measured - base, slope=1.0, **more)

    def put_ratio(self, name: str, base: F64, measured: F64, read_ns: I64, steps: F64 | float = 0.0) -> None:
        """Put a comparison with a parameter that multiplies `base`; noise and `steps` scale with the
        expectation."""
        expected = self.parameter(name) * base
        self.put(name, expected, measured, read_ns, implied=measured / base, slope=base, level=expected,
                 steps=steps * expected)  # fmt: skip

    def begin(self, now_ns: int) -> None:
        """Begin the comparisons of a tick; due learned parameters come into use."""
        # New ones, since the residuals of the tick before hold views of the old
        self.expected, self.measured, self.implied, self.sigma = np.full((4, self.n), np.nan)
        if self.moved_ns == 0:
            self.moved_ns = now_ns
        if now_ns - self.moved_ns < MOVE_S * NS:
            return
        self.moved_ns = now_ns
        # The shift of an expectation by new parameters is no change of regime
        shift = (self.waiting - self.in_use) * self.slope
        for level in (self.fast, self.slow):
            np.add(level, shift, out=level, where=np.isfinite(shift))
        self._begin_anew()
        self.in_use[:], self.in_use_var[:] = self.waiting, self.waiting_var
        self.waiting[:], self.waiting_var[:] = self.value, self.var
        fresh = (self.count >= SETTLED_COUNT) & np.isnan(self.reference) & self._learns
        self.reference[fresh], self.reference_var[fresh] = self.value[fresh], self.var[fresh]
        self.settled_ns[fresh] = now_ns

    def use_now(self) -> None:
        """Put the learned parameters into use at once."""
        for value, var in ((self.waiting, self.waiting_var), (self.in_use, self.in_use_var)):
            value[:], var[:] = self.value, self.var

    def settle(self, dt_s: float, untouched: Bool | None) -> None:
        """Judge the comparisons, then learn from new readings of devices that are not under maintenance."""
        difference = self.measured - self.expected
        self.slope[~np.isfinite(self.slope)] = 0.0  # of a comparison that there is not
        if self.steps.any():
            self.noise.floor = np.fmax(self._floor, self.steps / self.level)
        sigma = self.noise.sigma() * self.level
        doubt_var, known_var = self._doubt(sigma, dt_s) ** 2, sigma**2
        np.sqrt(known_var + doubt_var + self.in_use_var * self.slope**2, out=self.sigma)
        self.confidence = confidence_of(difference, self.sigma)
        taught = self.received_ns > self.taught_ns
        np.copyto(self.taught_ns, self.received_ns)
        if untouched is not None:
            taught &= untouched
        self.idle_s += dt_s
        if not taught.any():
            return
        dt_s, self.idle_s = self.idle_s, 0.0
        # With hindsight: the change of the parameter known by now is not noise.
        off = difference - (self.value - self.in_use) * self.slope
        share = np.where(np.isfinite(sigma), np.sqrt(known_var / (known_var + doubt_var)), 1.0)
        # While a parameter is not settled, or is not observed, the difference is not noise; nor is it
        # while an expectation moves, and a difference that seems small then does not end one that lasts.
        settled = (
            taught
            & (share > CALM_SHARE)
            & (~self._learns | ((self.count > NOISE_WARMUP) & np.isfinite(self.implied)))
        )
        self._learn(np.where(taught, self.implied, np.nan), known_var, doubt_var, dt_s)
        self.noise.learn(np.where(settled, off / self.level * share, np.nan), self.received_ns, dt_s)

    def _doubt(self, sigma: F64, dt_s: float) -> F64:
        """Return 1 sigma for a moving expectation away from the place where its relation was learned."""
        expected, held = self.expected, self.held
        known = np.isfinite(expected)
        for level, tau_s in ((self.fast, FAST_S), (self.slow, SLOW_S)):
            np.copyto(level, expected, where=np.isnan(level))
            np.add(level, (expected - level) * -math.expm1(-dt_s / tau_s), out=level, where=known)
        quiet = np.where(np.isfinite(sigma), 2.0 * sigma, 0.0)
        move = FAST_SHARE * np.maximum(np.abs(expected - self.fast) - quiet, 0.0)
        held *= self._hold_of(dt_s)
        np.fmax(held, move, out=held)
        away = SLOW_SHARE * np.maximum(np.abs(expected - self.slow) - quiet, 0.0)
        away += held
        away += self.loose
        return np.where(np.isfinite(away), away, 0.0)

    def _hold_of(self, dt_s: float) -> F64:
        """Return the share of a doubt that remains after a step."""
        if dt_s != self._held_dt_s:
            self._held_dt_s, self._hold = dt_s, np.exp(-dt_s / self._hold_s)
        return self._hold

    def _learn(self, implied: F64, known_var: F64, doubt_var: F64, dt_s: float) -> None:
        """Run a scalar Kalman step of each parameter; readings that are far off for long teach nothing."""
        value, var = self.value, self.var
        first = np.isnan(value) & np.isfinite(implied) & self._learns
        if first.any():
            np.copyto(value, implied, where=first)  # where nothing is known before, the first reading decides
        unit_var = np.where(self._relative, value**2, 1.0)
        most = self._spread**2 * unit_var
        if first.any():
            np.copyto(var, most, where=first)
        var += self._drift_var * unit_var * dt_s
        np.minimum(var, most, out=var)
        lasting = self.noise.lasting(self.received_ns)
        slope_var = np.where(self.slope == 0.0, 1.0, self.slope**2)
        error_var = np.fmax(self._error_var * unit_var, known_var / slope_var) + doubt_var / slope_var
        teach = np.isfinite(implied) & self._learns & ~lasting
        bound = FAULT_SIGMAS * np.sqrt(var + error_var)
        # Once settled, readings far off teach nothing until drift could explain them
        teach &= (self.count <= NOISE_WARMUP) | (np.abs(implied - value) <= bound)
        innovation = np.where(teach, np.minimum(np.maximum(implied - value, -bound), bound), 0.0)
        gain = np.where(teach, var / (var + error_var), 0.0)
        value += gain * innovation
        np.minimum(np.maximum(value, self._low, out=value), self._high, out=value)
        var *= 1.0 - gain
        self.count += teach

    def residual(self, name: str) -> Residual:
        """Return a relation's comparison of this tick; its arrays are not written again."""
        at = self.cells[name]
        return Residual(name, self.expected[at], self.measured[at], self.sigma[at], self.confidence[at])

    def learning_left(self, name: str) -> tuple[F64, I64]:
        """See `Estimator.learning_left`."""
        at = self.cells[name]
        readings = np.maximum(NOISE_WARMUP - self.noise.count[at], 0)
        readings += np.where(self._learns[at], np.maximum(NOISE_WARMUP + 1 - self.count[at], 0), 0)
        return np.zeros(at.stop - at.start), readings

    def noise_of(self, name: str) -> ResidualNoise:
        """Return the noise of one relation. Read only."""
        at = self.cells[name]
        out = ResidualNoise(at.stop - at.start, self.noise.floor[at])
        for kept in out.declared:
            setattr(out, kept, getattr(self.noise, kept)[at])
        return out
