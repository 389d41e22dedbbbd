"""Life hazard: the rate at which devices fail, step by step, from age, position, class and their own past.

The rate is a product of effects: age, levels of position, and, by what was forecast before and what came, the
frailty of the fleet, of the year of installation, of neighbours, of the slot and of the serial. Effects are
fitted per class of fault on the past, and again every REFIT_STEPS; frailties are chosen on forecasts as they
were issued. Blind models leave out the position, or all but the age.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.lives.cells import AGES_D, LifeCells, batch_groups, cohorts, position_factors, position_groups
from models.lives.frailty import (
    ASSUMED_HALF_LIFE_D,
    ASSUMED_SHAPE,
    LEAST_GAIN,
    LONGEST_LEVEL_D,
    Frailty,
    FrailtyTerms,
    StepRows,
    apply_terms,
    by_member,
    choose_terms,
)
from models.lives.gamma_effects import Effects, Factor, fit_effects
from twin.catalogue import F64, I64

REFIT_STEPS = 6  # source: estimate
WARM_STEPS = 6  # before the first fit: the mean rate alone. source: estimate
LEAST_FAULTS = 50.0  # of a class; classes with fewer share their effects. source: estimate
N_AGE = len(AGES_D) + 1
LEAST_D = 1e-9  # a row that nobody watched forecasts nothing that counts
FLEET, INSTALLED, SERIAL, POSITION = "fleet", "installed", "serial", "position"
# Kept though they gained nothing yet: a level that drifts, and a batch to come, show only later.
KEPT = (FLEET, INSTALLED)


@dataclass(frozen=True)
class HazardTerms:
    """The parts of a hazard: with the position or blind to it, and its groups of frailty in turn."""

    name: str
    position: bool
    age: bool
    groups: tuple[str, ...]
    by_class: bool = True


class LifeHazard:
    """A hazard on the cells of one log, walked through step by step."""

    def __init__(self, cells: LifeCells, terms: HazardTerms) -> None:
        self.cells, self.terms = cells, terms
        log = cells.log
        self.groups: dict[str, tuple[I64, int]] = {
            FLEET: (np.zeros(log.k, np.int64), 1),
            INSTALLED: cohorts(log),
            SERIAL: (log.asset.astype(np.int64), len(log.assets)),
            **position_groups(log),
            **batch_groups(log),
        }
        self.by_position = position_factors(log) if terms.position else ()
        self.effects: list[Effects] = []
        self.kinds: list[list[int]] = []
        self.n_age = N_AGE if terms.age else 1
        self.year, years = self.groups[INSTALLED]
        self.n_year = years if INSTALLED in terms.groups else 1
        self.rate: F64 = np.zeros(len(log.places) * self.n_age * self.n_year)
        self.frailties: list[Frailty] = []
        self.chosen: list[FrailtyTerms] = []
        self.apart: list[StepRows] = []
        self.likelihood = -np.inf

    def train(self, upto: int) -> list[F64]:
        """Choose settings and effects on the steps before `upto`. Returns the rates forecast for them.

        Each rate, of faults of one's own per day, is of a row of its step, and rests on steps before it.
        """
        steps, step_d = self.cells.steps[:upto], self.cells.step_d
        rows = []
        for i, step in enumerate(steps):
            if i == 0 or (i >= WARM_STEPS and (i - WARM_STEPS) % REFIT_STEPS == 0):
                self.fit(i)
            rows.append(StepRows(step.stay, step.count, self.static_rate(step.stay, step.age) * step.days))
        judged = rows[min(WARM_STEPS, upto) :]
        for group in self.terms.groups:
            if group == POSITION:
                self.apart = [StepRows(rows.stay, rows.count, rows.forecast) for rows in judged]
            member, size = self.groups[group]
            longest_d = LONGEST_LEVEL_D if group in KEPT else np.inf
            found = choose_terms(group, by_member(member, size, judged), step_d, longest_d)
            self.chosen.append(found)
            if found.gain <= LEAST_GAIN and group in KEPT:
                found = FrailtyTerms(group, ASSUMED_SHAPE, ASSUMED_HALF_LIFE_D, found.gain)
            if found.gain > LEAST_GAIN or group in KEPT:
                self.frailties.append(apply_terms(found, member, size, step_d, judged))
        self.likelihood = sum(_likelihood(part) for part in judged)
        self.fit(upto)
        return [
            part.forecast / np.maximum(step.days, LEAST_D) for part, step in zip(rows, steps, strict=True)
        ]

    def follows(self) -> dict[str, dict[str, float]]:
        """By class of fault: the likelihood that the past of the serial, or of the position, gains alone.

        Beside what the fleet, the year of installation and the neighbours predict, on the steps of the
        training.
        """
        out: dict[str, dict[str, float]] = {}
        for c, name in enumerate(self.cells.log.classes):
            out[name] = {}
            for group in (SERIAL, POSITION):
                if group in self.groups:
                    each = by_member(*self.groups[group], self.apart, c)
                    out[name][group] = choose_terms(group, each, self.cells.step_d).gain
        return out

    def forecast(self, i: int) -> F64:
        """Rates per day of the rows of step i, from the steps before; then the step is learned from.

        Steps are asked for in turn, from the one on that training ended at.
        """
        step = self.cells.steps[i]
        rate, before = self.static_rate(step.stay, step.age), []
        for held in self.frailties:
            before.append(rate)
            rate = rate * held.factor(self.groups[held.terms.group][0][step.stay])
        total = step.count.sum(axis=1)
        for held, without in zip(self.frailties, before, strict=True):
            held.learn(self.groups[held.terms.group][0][step.stay], total, without * step.days)
        return rate

    def fit(self, upto: int) -> None:
        """Effects from the steps before `upto`, and the rate at every place in every group of age."""
        log, n_age, n_year = self.cells.log, self.n_age, self.n_year
        n = len(log.places) * n_age * n_year
        days = np.zeros(n)
        count = np.zeros((n, max(len(log.classes), 1)))
        for step in self.cells.steps[:upto]:
            key = self._key(step.stay, step.age)
            days += np.bincount(key, step.days, n)
            failed = np.flatnonzero(step.count.any(axis=1))
            np.add.at(count, key[failed], step.count[failed])
        used = np.flatnonzero(days > 0)
        total = count.sum(axis=0)
        kinds = [[c] for c in np.flatnonzero(total >= LEAST_FAULTS).tolist()] if self.terms.by_class else []
        rest = [c for c in range(len(total)) if [c] not in kinds]
        self.kinds = kinds + ([rest] if total[rest].sum() > 0 or not kinds else [])
        every = self._factors(np.arange(n)) if upto >= WARM_STEPS else ()
        known = tuple(Factor(f.name, f.level[used], f.size, f.ordered) for f in every)
        self.effects = [
            fit_effects(count[used][:, part].sum(axis=1), days[used], known) for part in self.kinds
        ]
        self.rate = sum((effects.rate(every, n) for effects in self.effects), np.zeros(n))

    @property
    def factor_names(self) -> tuple[str, ...]:
        """Names of the factors that have effects."""
        return tuple(f.name for f in self._factors(np.zeros(1, np.int64)))

    def _key(self, stay: I64, age: I64) -> I64:
        """The cell of the effects in which these stays are, in these groups of age [k]."""
        place = self.cells.log.place[stay].astype(np.int64)
        year = np.minimum(self.year[stay], self.n_year - 1)
        out: I64 = (place * self.n_age + np.minimum(age, self.n_age - 1)) * self.n_year + year
        return out

    def _factors(self, key: I64) -> tuple[Factor, ...]:
        """Levels of cells: the age first, and the year of installation."""
        place, rest = np.divmod(key, self.n_age * self.n_year)
        age, year = np.divmod(rest, self.n_year)
        out = [Factor("age", age, N_AGE, ordered=True)] if self.n_age > 1 else []
        out += [Factor(INSTALLED, year, self.n_year)] if self.n_year > 1 else []
        return (*out, *(Factor(f.name, f.level[place], f.size) for f in self.by_position))

    def static_rate(self, stay: I64, age: I64) -> F64:
        """Rates per day of these stays in these groups of age, without any frailty [k]."""
        out: F64 = self.rate[self._key(stay, age)]
        return out


def _likelihood(rows: StepRows) -> float:
    """Of the faults that came, by the forecast numbers."""
    count = rows.count.sum(axis=1)
    failed = np.flatnonzero(count)
    return float(count[failed] @ np.log(np.maximum(rows.forecast[failed], 1e-12)) - rows.forecast.sum())
