"""Frailty: a factor on the rate of each group of devices that its own past sets, and that fades.

A group (one serial, one slot, a blade, a cabinet, a year of installation, the fleet) had N faults where M
were forecast, both fading with a half-life; its factor is (a + N) / (a + M). It says of a lemon that it fails
several times as often as its like, of a slot that it kills whatever is put there, of a batch that it is
better than the one before. Shape and half-life are the ones under which faults were likeliest as forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from models.lives.gamma_effects import sums
from twin.catalogue import F64, I64

FRAILTY_SHAPES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # source: estimate
HALF_LIVES_D = (30.0, 90.0, 270.0, 810.0, np.inf)  # source: estimate
LEAST_GAIN = 3.0  # of logarithmic likelihood for two parameters: a group that gains less is left out
ALIKE = 16  # members that never failed that are merged in the choice of settings. source: estimate
# Of a group that is kept without having shown its worth: a batch that is not there yet. source: estimate
ASSUMED_SHAPE, ASSUMED_HALF_LIFE_D = 10.0, 90.0
LONGEST_LEVEL_D = 270.0  # half-life of what is kept for its drift. source: estimate


@dataclass(frozen=True)
class FrailtyTerms:
    """The settings of a group: shape and half-life, and the likelihood that they gained where chosen."""

    group: str
    shape: float
    half_life_d: float
    gain: float


@dataclass
class Frailty:
    """Fading counts of one group's members."""

    terms: FrailtyTerms
    size: int
    step_d: float
    came: F64 = field(init=False)
    forecast: F64 = field(init=False)

    def __post_init__(self) -> None:
        self.came, self.forecast = np.zeros(self.size), np.zeros(self.size)

    def factor(self, member: I64) -> F64:
        """Of rows of these members [k]."""
        a = self.terms.shape
        out: F64 = ((a + self.came) / (a + self.forecast))[member]
        return out

    def learn(self, member: I64, count: F64, forecast: F64) -> None:
        """One step's faults and those forecast without this factor, by row [k]."""
        fade = 0.5 ** (self.step_d / self.terms.half_life_d)
        self.came = fade * (self.came + sums(member, count, self.size))
        self.forecast = fade * (self.forecast + sums(member, forecast, self.size))


@dataclass
class StepRows:
    """One step's rows: stay [k], faults by class [k, n_class], and the forecast number of all [k]."""

    stay: I64
    count: F64
    forecast: F64


Sums = list[tuple[F64, F64]]  # by step: faults and forecast number of each member [size]


def by_member(member: I64, size: int, steps: Sequence[StepRows], kind: int | None = None) -> Sums:
    """Sums over the members of a group; member: of each stay.

    Of one class of faults alone if `kind` says so: each forecast is shared out as its faults were, over all
    steps.
    """
    share = 1.0
    if kind is not None:
        total = sum(float(rows.count.sum()) for rows in steps)
        share = sum(float(rows.count[:, kind].sum()) for rows in steps) / max(total, 1.0)
    out = []
    for rows in steps:
        here = member[rows.stay]
        count = rows.count.sum(axis=1) if kind is None else rows.count[:, kind]
        out.append((sums(here, count, size), share * sums(here, rows.forecast, size)))
    return out


def choose_terms(group: str, each: Sums, step_d: float, longest_d: float = np.inf) -> FrailtyTerms:
    """The likeliest settings of a group on forecasts as they were issued; the gain is over none.

    longest_d: of the half-lives to choose from.
    """
    if not each:
        return FrailtyTerms(group, np.inf, np.inf, 0.0)
    each, width = _merged(each)
    best = FrailtyTerms(group, np.inf, np.inf, 0.0)
    for half_life_d in [life_d for life_d in HALF_LIVES_D if life_d <= longest_d]:
        fade = 0.5 ** (step_d / half_life_d)
        came, forecast, gain = np.zeros(len(width)), np.zeros(len(width)), np.zeros(len(FRAILTY_SHAPES))
        for count, expected in each:
            failed = np.flatnonzero(count)
            for i, a in enumerate(FRAILTY_SHAPES):
                factor = (a + came) / (a + forecast)
                gain[i] += count[failed] @ np.log(factor[failed]) - (width * expected) @ (factor - 1.0)
            came, forecast = fade * (came + count), fade * (forecast + expected)
        i = int(np.argmax(gain))
        if gain[i] > best.gain:
            best = FrailtyTerms(group, FRAILTY_SHAPES[i], half_life_d, float(gain[i]))
    return best


def _merged(each: Sums) -> tuple[Sums, F64]:
    """Return the members with never-failed ones merged into their mean, ALIKE at a time, and the merged
    sizes.

    Those that began together and were forecast alike go together, so that likelihoods hardly change.
    """
    size = len(each[0][0])
    total = sum((count for count, _ in each), np.zeros(size))
    expected = sum((expected for _, expected in each), np.zeros(size))
    first = np.full(size, len(each))
    for i in range(len(each) - 1, -1, -1):
        first[each[i][1] > 0] = i
    never = np.flatnonzero((total == 0) & (expected > 0))
    never = never[np.lexsort((expected[never], first[never]))]
    failed = np.flatnonzero(total)
    index = np.zeros(size, np.int64)  # members that were never there add nothing anywhere
    index[failed] = np.arange(len(failed))
    index[never] = len(failed) + np.arange(len(never)) // ALIKE
    merged = len(failed) + -(-len(never) // ALIKE)
    there = np.concatenate([failed, never])
    width = np.bincount(index[there], minlength=merged).astype(np.float64)
    return [
        (
            sums(index[there], count[there], merged),
            sums(index[there], expected[there], merged) / width,
        )
        for count, expected in each
    ], width


def apply_terms(
    terms: FrailtyTerms, member: I64, size: int, step_d: float, steps: Sequence[StepRows]
) -> Frailty:
    """Carry a group through the steps: their forecasts take up its factor. Returns its memory after them."""
    held = Frailty(terms, size, step_d)
    for rows in steps:
        here = member[rows.stay]
        factor = held.factor(here)
        held.learn(here, rows.count.sum(axis=1), rows.forecast)
        rows.forecast = rows.forecast * factor
    return held
