"""Board of comparisons: many relations in one flat column, so that a tick costs few array operations.

A relation predicts a signal from other readings and one parameter of its entity. The board keeps noise,
parameter and doubt of all of them. A parameter is learned from the device's own readings, so it enters
expectations late: in use <- waiting <- learning, moved on every 60 s; no expectation knows a reading of its
own signal that is younger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import Residual
from twin.estimation.noise import FAULT_SIGMAS, NOISE_WARMUP, ResidualNoise, confidence_of

MOVE_S = 60.0  # between moves of what was learned into use
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

    `prior` [n] or a number, NaN = none known: the first reading tells. `spread` is the prior's 1 sigma,
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


# What is kept of each cell: name -> value of a new one; None = stated by the row.
_KEPT: dict[str, float | None] = {
    "value": None, "var": None, "waiting": None, "waiting_var": None, "in_use": None, "in_use_var": None,
    "reference": np.nan, "reference_var": np.nan, "fast": np.nan, "slow": np.nan, "held": 0.0,
}  # fmt: skip
_KEPT_NUMBERS = ("count", "taught_ns", "slope")  # the last slope says how far the next move shifts


class Board:
    """Cells of all rows, one after another. Parts write `expected` and so on through `of(name)`."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        ends = np.cumsum([0, *(r.n for r in rows)])
        self.cells = {
            r.name: slice(int(a), int(b)) for r, a, b in zip(rows, ends[:-1], ends[1:], strict=True)
        }
        n = self.n = int(ends[-1])
        self.noise = ResidualNoise(n, self._spread_out([r.noise for r in rows]))
        self._prior = np.concatenate([np.zeros(0), *(np.broadcast_to(r.prior, r.n) for r in rows)]).astype(
            np.float64
        )
        self._relative = np.repeat([r.relative for r in rows], [r.n for r in rows]).astype(np.bool_)
        self._spread = self._spread_out([r.spread for r in rows])
        self._error_var = self._spread_out([r.error**2 for r in rows])
        self._drift_var = self._spread_out([r.drift**2 for r in rows])
        self._low, self._high = (self._spread_out([getattr(r, k) for r in rows]) for k in ("low", "high"))
        self._learns = np.repeat([bool(r.parameter) for r in rows], [r.n for r in rows]).astype(np.bool_)
        self._hold_s = self._spread_out([r.hold_s for r in rows])
        self._held_dt_s, self._hold = 0.0, np.ones(n)
        self._kept: dict[str, F64] = {}
        for name, start in _KEPT.items():
            self._kept[name] = self._at_first(name) if start is None else np.full(n, start)
        self.count, self.taught_ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.moved_ns, self._idle_s = 0, 0.0
        self.expected, self.measured, self.implied = (np.full(n, np.nan) for _ in range(3))
        self.slope, self.loose, self.level = np.zeros(n), np.zeros(n), np.ones(n)
        self.heard_ns = np.zeros(n, np.int64)
        self.sigma, self.confidence = np.full(n, np.nan), np.full(n, np.nan)

    def _spread_out(self, of_row: Sequence[float]) -> F64:
        return np.repeat(np.array(of_row, np.float64), [r.n for r in self.rows])

    def _at_first(self, name: str) -> F64:
        if not name.endswith("var"):
            return np.where(self._learns, self._prior, 0.0)
        return (self._spread * np.where(self._relative, np.abs(self._prior), 1.0)) ** 2

    def parameter(self, name: str) -> F64:
        """The parameter in use of a relation [n]."""
        return self._kept["in_use"][self.cells[name]]

    def learned(self, name: str, what: str = "value") -> F64:
        """Return a column of a relation's cells, such as the `value` as learned by now; a view [n]."""
        return self._kept[what][self.cells[name]]

    def put(self, name: str, expected: F64, measured: F64, heard_ns: I64, **more: F64 | float) -> None:
        """A comparison of this tick [n].

        `implied` is the parameter that the reading asks for, `slope` the change of the expectation with it,
        `loose` more doubt in the signal's unit, `level` what a noise of 1 amounts to.
        """
        at = self.cells[name]
        self.expected[at], self.measured[at], self.heard_ns[at] = expected, measured, heard_ns
        for key, value in more.items():
            getattr(self, key)[at] = value

    def begin(self, now_ns: int) -> None:
        """Before the comparisons of a tick: what was learned moves on when its time has come."""
        # New ones, since the residuals of the tick before hold views of the old
        self.expected, self.measured, self.implied, self.sigma = np.full((4, self.n), np.nan)
        if self.moved_ns == 0:
            self.moved_ns = now_ns
        if now_ns - self.moved_ns < MOVE_S * NS:
            return
        self.moved_ns, kept = now_ns, self._kept
        # What an expectation moves by on that account is no change of regime
        shift = (kept["waiting"] - kept["in_use"]) * self.slope
        for name in ("fast", "slow"):
            np.add(kept[name], shift, out=kept[name], where=np.isfinite(shift))
        kept["in_use"][:], kept["in_use_var"][:] = kept["waiting"], kept["waiting_var"]
        kept["waiting"][:], kept["waiting_var"][:] = kept["value"], kept["var"]
        fresh = (self.count >= SETTLED_COUNT) & np.isnan(kept["reference"]) & self._learns
        kept["reference"][fresh], kept["reference_var"][fresh] = kept["value"][fresh], kept["var"][fresh]

    def use_now(self) -> None:
        """Put the learned parameters into use at once."""
        for name in ("waiting", "in_use"):
            self._kept[name][:], self._kept[name + "_var"][:] = self._kept["value"], self._kept["var"]

    def settle(self, dt_s: float, untouched: Bool | None) -> None:
        """Judge the comparisons, then learn from those of new readings where nobody works at the device."""
        kept, difference = self._kept, self.measured - self.expected
        self.slope[~np.isfinite(self.slope)] = 0.0  # of a comparison that there is not
        sigma = self.noise.sigma() * self.level
        doubt_var, known_var = self._doubt(sigma, dt_s) ** 2, sigma**2
        np.sqrt(known_var + doubt_var + kept["in_use_var"] * self.slope**2, out=self.sigma)
        self.confidence = confidence_of(difference, self.sigma)
        taught = self.heard_ns > self.taught_ns
        np.copyto(self.taught_ns, self.heard_ns)
        if untouched is not None:
            taught &= untouched
        self._idle_s += dt_s
        if not taught.any():
            return
        dt_s, self._idle_s = self._idle_s, 0.0
        # With hindsight: what is known by now of the parameter is no noise.
        off = difference - (kept["value"] - kept["in_use"]) * self.slope
        share = np.where(np.isfinite(sigma), np.sqrt(known_var / (known_var + doubt_var)), 1.0)
        # While a parameter is still being found, or says nothing, the difference is not noise; nor is it
        # while an expectation moves, and a difference that seems small then does not end one that lasts.
        settled = (
            taught
            & (share > CALM_SHARE)
            & (~self._learns | ((self.count > NOISE_WARMUP) & np.isfinite(self.implied)))
        )
        self._learn(np.where(taught, self.implied, np.nan), known_var, doubt_var, dt_s)
        self.noise.learn(np.where(settled, off / self.level * share, np.nan), self.heard_ns, dt_s)

    def _doubt(self, sigma: F64, dt_s: float) -> F64:
        """1 sigma for that an expectation moves, and is not where its relation was learned."""
        kept, expected = self._kept, self.expected
        known = np.isfinite(expected)
        for name, tau_s in (("fast", FAST_S), ("slow", SLOW_S)):
            level = kept[name]
            np.copyto(level, expected, where=np.isnan(level))
            np.add(level, (expected - level) * -math.expm1(-dt_s / tau_s), out=level, where=known)
        quiet = np.where(np.isfinite(sigma), 2.0 * sigma, 0.0)
        move = FAST_SHARE * np.maximum(np.abs(expected - kept["fast"]) - quiet, 0.0)
        held = kept["held"]
        held *= self._hold_of(dt_s)
        np.fmax(held, move, out=held)
        away = SLOW_SHARE * np.maximum(np.abs(expected - kept["slow"]) - quiet, 0.0)
        away += held
        away += self.loose
        return np.where(np.isfinite(away), away, 0.0)

    def _hold_of(self, dt_s: float) -> F64:
        """Share of a doubt that is left after a step."""
        if dt_s != self._held_dt_s:
            self._held_dt_s, self._hold = dt_s, np.exp(-dt_s / self._hold_s)
        return self._hold

    def _learn(self, implied: F64, known_var: F64, doubt_var: F64, dt_s: float) -> None:
        """A scalar Kalman step of each parameter; none from a reading that has been far off for long."""
        kept = self._kept
        value, var = kept["value"], kept["var"]
        first = np.isnan(value) & np.isfinite(implied) & self._learns
        if first.any():
            np.copyto(value, implied, where=first)  # where nothing is known before, the first reading tells
        unit_var = np.where(self._relative, value**2, 1.0)
        most = self._spread**2 * unit_var
        if first.any():
            np.copyto(var, most, where=first)
        var += self._drift_var * unit_var * dt_s
        np.minimum(var, most, out=var)
        lasting = self.noise.lasting(self.heard_ns)
        slope_var = np.where(self.slope == 0.0, 1.0, self.slope**2)
        error_var = np.fmax(self._error_var * unit_var, known_var / slope_var) + doubt_var / slope_var
        teach = np.isfinite(implied) & self._learns & ~lasting
        bound = FAULT_SIGMAS * np.sqrt(var + error_var)
        # Once it is found, what is far off teaches nothing, until drift could have brought it there
        teach &= (self.count <= NOISE_WARMUP) | (np.abs(implied - value) <= bound)
        innovation = np.where(teach, np.minimum(np.maximum(implied - value, -bound), bound), 0.0)
        gain = np.where(teach, var / (var + error_var), 0.0)
        value += gain * innovation
        np.minimum(np.maximum(value, self._low, out=value), self._high, out=value)
        var *= 1.0 - gain
        self.count += teach

    def residual(self, name: str) -> Residual:
        """A relation's comparison of this tick; arrays that are not written to again."""
        at = self.cells[name]
        return Residual(name, self.expected[at], self.measured[at], self.sigma[at], self.confidence[at])

    def noise_of(self, name: str) -> ResidualNoise:
        """The noise of one relation, to be read."""
        at, out = self.cells[name], ResidualNoise(0, self.noise.floor)
        out.n, out.floor = at.stop - at.start, self.noise.floor[at]
        out.variance, out.count, out.off_ns = (
            getattr(self.noise, k)[at] for k in ("variance", "count", "off_ns")
        )
        return out

    def forget(self, table: str, entity: int) -> None:
        """Forget the parameters learned of an entity: another device is in its place now."""
        fresh = Board(self.rows)
        for row in self.rows:
            if row.table == table:
                self._take(fresh, self.cells[row.name].start + entity, self.cells[row.name].start + entity)

    def adopt(self, old: Board, old_of_new: Mapping[str, I32]) -> None:
        """Take over the parameters that another board learned of the same entities at other places."""
        for row in self.rows:
            if row.name in old.cells and row.table in old_of_new:
                source = old_of_new[row.table]
                kept = np.flatnonzero(source >= 0)
                self._take(old, self.cells[row.name].start + kept, old.cells[row.name].start + source[kept])
        self.moved_ns, self._idle_s = old.moved_ns, old._idle_s

    def _take(self, other: Board, to: Any, source: Any) -> None:
        for name, column in self._kept.items():
            column[to] = other._kept[name][source]
        for name in _KEPT_NUMBERS:
            getattr(self, name)[to] = getattr(other, name)[source]
        for name in ("variance", "count", "off_ns"):
            getattr(self.noise, name)[to] = getattr(other.noise, name)[source]

    def dump(self) -> dict[str, Any]:
        """Everything learned."""
        return {
            "rows": [[r.name, r.n] for r in self.rows], "kept": dict(self._kept), "count": self.count,
            "taught_ns": self.taught_ns, "moved_ns": self.moved_ns, "idle_s": self._idle_s,
            "slope": self.slope, "noise": self.noise.dump(),
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> bool:
        """Take over what `dump` gave; False, and nothing, where that was of other rows."""
        if [list(r) for r in data["rows"]] != [[r.name, r.n] for r in self.rows]:
            return False
        if set(data["kept"]) != set(self._kept):
            return False
        self._kept = {k: np.array(data["kept"][k]) for k in self._kept}
        self.count, self.taught_ns = np.array(data["count"]), np.array(data["taught_ns"])
        self.moved_ns, self._idle_s = int(data["moved_ns"]), float(data["idle_s"])
        if "slope" in data:  # one of a version before has none
            self.slope = np.array(data["slope"])
        self.noise.restore(data["noise"])
        return True
