"""Backtest of life hazards: trained on lives up to a day, then forecast step by step and scored.

At the begin of each step every device in service is forecast, from what was known then. The champion is the
hazard with position, or the decayed count of the device's own faults, where it lost less than the blind
hazard on forecasts already issued, beyond chance; else the blind one. A further rival is the age. One step is
forecast again from a log that ends there; if that changes anything, the run fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from models.backtest.audit import LookAhead, differ
from models.failure import Isotonic
from models.lives import (
    REFIT_STEPS,
    WARM_STEPS,
    HazardTerms,
    LifeCells,
    LifeHazard,
    LifeLog,
    cut_cells,
    trained,
)
from models.moving_block import interval
from twin.catalogue import F64, I64, Bool

COUNT, AGE, BLIND, POSITION, CHAMPION = "decayed_count", "age", "blind", "position", "champion"
LIFE_METHODS = (COUNT, AGE, BLIND, POSITION, CHAMPION)
CHALLENGERS = (POSITION, COUNT)
HALF_LIFE_D = 30.0  # of the decayed count, as in the backtest of failures. source: estimate
LEAST_P = 1e-6  # a probability of 0 would lose without bound. source: estimate
AUDITED = 0.5  # where in the scored part the look ahead is checked


@dataclass(frozen=True)
class LifeForecasts:
    """One step's forecasts of the devices that stood at its begin [k].

    y: failed within the step; share: of the step that the device could be seen to fail, up to its fault;
    whole: its outcome is known; p: probability by method.
    """

    begin_d: float
    stay: I64
    y: Bool
    share: F64
    whole: Bool
    p: dict[str, F64]


@dataclass(frozen=True)
class LifeResult:
    """A whole backtest: forecasts and champion of each scored step, the hazards as trained before them."""

    cells: LifeCells
    train_d: float
    steps: tuple[LifeForecasts, ...]
    hazards: dict[str, LifeHazard]
    chosen: tuple[str, ...]
    steps_checked: int


def backtest_lives(
    log: LifeLog,
    train_d: float,
    step_d: float = 30.0,
    refit: bool = False,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> LifeResult:
    """Return forecasts of each step after `train_d`. With `refit`, all is fitted again over time.

    Raises LookAhead.
    """
    cells = cut_cells(log, step_d)
    train = int((train_d - log.begin_d) / step_d + 1e-9)
    walk = _Walk(cells, train, refit, seed, None)
    n = len(cells.steps)
    for i in range(train, n):
        walk.step(i)
        progress(0.5 + 0.4 * (i + 1 - train) / (n - train))
    checked = train + int(AUDITED * (n - train))
    if checked < n:
        _audit(log, cells, walk, train, checked)
    return LifeResult(
        cells, log.begin_d + train * step_d, tuple(walk.issued[train:]),
        walk.first, tuple(walk.chosen), int(checked < n),
    )  # fmt: skip


class _Walk:
    """The forecasters on their way through the steps of one log."""

    def __init__(
        self, cells: LifeCells, train: int, refit: bool, seed: int, terms: HazardTerms | None
    ) -> None:
        self.cells, self.train, self.refit, self.seed = cells, train, refit, seed
        found = trained(cells, train, terms)
        self.hazards = {name: hazard for name, (hazard, _) in found.items()}
        self.first = dict(self.hazards)
        self.count = np.zeros(len(cells.log.assets))
        self.known: list[tuple[F64, F64, F64]] = []
        self.issued: list[LifeForecasts] = []
        self.chosen: list[str] = []
        for i in range(train):
            self._keep(i, {name: rates[i] for name, (_, rates) in found.items()})

    def step(self, i: int) -> None:
        """Forecast step i, then learn from it."""
        if self.refit and i > self.train and (i - self.train) % REFIT_STEPS == 0:
            self.hazards = {name: hazard for name, (hazard, _) in trained(self.cells, i).items()}
        self.chosen.append(self._champion())
        self._keep(i, {name: hazard.forecast(i) for name, hazard in self.hazards.items()})

    def _keep(self, i: int, rates: dict[str, F64]) -> None:
        step, step_d = self.cells.steps[i], self.cells.step_d
        at = np.flatnonzero(step.stood)
        asset = self.cells.log.asset[step.stay[at]]
        shared = self.cells.shared_rate(step.begin_d)
        p = {name: -np.expm1(-(rate[at] + shared) * step_d) for name, rate in rates.items()}
        score = self.count[asset]
        p[COUNT] = self._mapped(score)
        if self.chosen:
            p[CHAMPION] = p[self.chosen[-1]]
        y = step.y[at]
        whole = y | (step.days[at] >= step_d - 1e-6)
        self.issued.append(
            LifeForecasts(step.begin_d, step.stay[at], y, np.minimum(step.seen_d[at] / step_d, 1.0), whole, p)
        )
        value, place, pairs = np.unique(score[whole], return_inverse=True, return_counts=True)
        hits = np.bincount(place, y[whole].astype(np.float64), len(value)).astype(np.float64)
        self.known.append((value, pairs.astype(np.float64), hits))
        fade = 0.5 ** (step_d / HALF_LIFE_D)
        log = self.cells.log
        here = log.episode & (log.day >= step.begin_d) & (log.day < step.begin_d + step_d)
        age_d = step.begin_d + step_d - log.day[here]
        came = np.bincount(log.asset[log.stay[here]], 0.5 ** (age_d / HALF_LIFE_D), len(self.count))
        self.count = fade * self.count + came

    def _mapped(self, score: F64) -> F64:
        """Decayed counts as probabilities, by the shares of all steps so far that came true."""
        at, pairs, hits = (np.concatenate([np.zeros(0), *(part[j] for part in self.known)]) for j in range(3))
        return np.maximum(Isotonic(at, hits, pairs)(score), LEAST_P)

    def _champion(self) -> str:
        """The challenger that lost least so far, if that is less than the blind hazard beyond chance."""
        # Hazards know nothing before their first fit.
        warm = [forecasts for forecasts in self.issued[WARM_STEPS:] if len(forecasts.y)]
        best, least = BLIND, 0.0
        for name in CHALLENGERS:
            rest = np.array([
                (pair_loss(f, name).sum() - pair_loss(f, BLIND).sum()) / len(f.y) for f in warm
            ])  # fmt: skip
            if len(rest) < 2:
                break
            _, high = interval(rest, 1, self.seed)
            if high < 0.0 and rest.mean() < least:
                best, least = name, float(rest.mean())
        return best


def pair_loss(forecasts: LifeForecasts, method: str) -> F64:
    """Logarithmic loss of each device: of one that was taken away, for the time that it was watched [k]."""
    p = np.clip(forecasts.p[method], LEAST_P, 1.0 - LEAST_P)
    out: F64 = np.where(forecasts.y, -np.log(p), -np.log1p(-p) * forecasts.share)
    return out


def _audit(log: LifeLog, cells: LifeCells, walk: _Walk, train: int, i: int) -> None:
    """Raise LookAhead if step i is forecast otherwise from a log that ends where it begins."""
    edge = cells.steps[i].begin_d
    short = replace(log.known_at(edge), until_d=edge + cells.step_d)
    # The mark of a shared fault may depend on the ten minutes after it.
    again = _Walk(
        cut_cells(short, cells.step_d, cells.shared[log.day <= edge]),
        train,
        walk.refit,
        walk.seed,
        walk.first[POSITION].terms,
    )
    for j in range(train, i + 1):
        again.step(j)
    before, after = walk.issued[i], again.issued[i]
    for name in LIFE_METHODS:
        if before.p[name].shape != after.p[name].shape or differ(before.p[name], after.p[name]).any():
            raise LookAhead(f"the life hazard {name}", i, "the log ended there")
