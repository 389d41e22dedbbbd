"""Differential privacy: noise that hides each single node, and a ledger of the budget spent.

Two fleets are neighbours if one has one node more, with all its failures. Under a mechanism with the budget
epsilon no outcome is more than e^epsilon times likelier for one of them than for the other. A count that a
node moves by at most s is published with noise k of probability proportional to exp(-epsilon |k| / s), a
group of counts likewise where s bounds the sum of the moves. Budgets of several publications add up.
source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy (2014): definition 2.4, theorem
3.6 (Laplace) and theorem 3.16 (composition); Ghosh, Roughgarden and Sundararajan, STOC 2009 (discrete)
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np

from models.failure import SENSITIVITY
from twin.catalogue import I64, NS, ConfigError, StorageError, utc

# Parts of the budget by group of counts. source: estimate; what failures bring about is the hardest to see
SHARES = {
    "counts": Fraction(1, 4),
    "again": Fraction(1, 2),
    "censored": Fraction(1, 8),
    "repairs": Fraction(1, 8),
}
PERIOD_D = 365  # after which a publication no longer counts against the budget. source: estimate
DAY_NS = 86_400 * NS
_DECIMAL = re.compile(r"[0-9]{0,9}\.?[0-9]{1,9}")


def _bernoulli(p: Fraction) -> bool:
    return secrets.randbelow(p.denominator) < p.numerator


def _bernoulli_exp(x: Fraction) -> bool:
    """True with the probability exp(-x), for x from 0 to 1."""
    k = 1
    while _bernoulli(x / k):
        k += 1
    return k % 2 == 1


def discrete_laplace(scale: Fraction) -> int:
    """A whole number k with a probability proportional to exp(-|k| / scale), exactly: no rounding leaks.

    source: Canonne, Kamath and Steinke, NeurIPS 2020, algorithm 2
    """
    t, s = scale.numerator, scale.denominator
    while True:
        u = secrets.randbelow(t)
        if not _bernoulli_exp(Fraction(u, t)):
            continue
        v = 0
        while _bernoulli_exp(Fraction(1)):
            v += 1
        size = (u + t * v) // s
        is_negative = bool(secrets.randbelow(2))
        if not (is_negative and size == 0):
            return -size if is_negative else size


def noise_scale(group: str, epsilon: Fraction) -> Fraction:
    """Scale of the noise of a group of counts under a budget for all groups."""
    return Fraction(SENSITIVITY[group]) / (SHARES[group] * epsilon)


def noise_variance(group: str, epsilon: Fraction) -> float:
    """Variance of that noise."""
    a = math.exp(-1.0 / float(noise_scale(group, epsilon)))
    return 2.0 * a / (1.0 - a) ** 2


def publish(groups: Mapping[str, I64], epsilon: Fraction) -> dict[str, list[int]]:
    """The counts with noise: the one place where they leave the site."""
    out = {}
    for name, counts in groups.items():
        scale = noise_scale(name, epsilon)
        out[name] = [int(count) + discrete_laplace(scale) for count in np.asarray(counts).tolist()]
    return out


class Spending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One publication: its budget as a decimal number, the days it is of, and when it was made."""

    epsilon: str
    since_day: int
    until_day: int
    now_ns: int


class BudgetLedger:
    """The file of all publications of one fleet, one a line. Who deletes it forgets what was spent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def spendings(self) -> list[Spending]:
        """All of them; none where there is no file. Raises StorageError for a file that is damaged."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror}") from error
        out = []
        for number, line in enumerate(lines, start=1):
            try:
                out.append(msgspec.json.decode(line, type=Spending))
                epsilon_of(out[-1].epsilon, "epsilon")
            except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
                raise StorageError(
                    f"{self.path} line {number}: {error}; expected the ledger of `racktwin models export`"
                ) from error
        return out

    def spend(self, spending: Spending, budget: Fraction) -> Fraction:
        """Write a publication down before it is made; what is left after it.

        Raises ConfigError where that is more than the budget of PERIOD_D days.
        """
        try:
            with self.path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # two exports at once must see each other
                left = self._left(spending, budget)
                file.write(msgspec.json.encode(spending) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}") from error
        return left

    def _left(self, spending: Spending, budget: Fraction) -> Fraction:
        since_ns = spending.now_ns - PERIOD_D * DAY_NS
        counted = [one for one in self.spendings() if one.now_ns > since_ns]
        left = budget - total_budget(counted) - Fraction(spending.epsilon)
        if left < 0:
            freed, back = Fraction(0), ""
            for one in sorted(counted, key=lambda one: one.now_ns):
                freed += Fraction(one.epsilon)
                if left + freed >= 0:
                    back = f"; so much is free again on {utc(one.now_ns + PERIOD_D * DAY_NS)[:10]}"
                    break
            raise ConfigError(
                f"{self.path}: {float(total_budget(counted)):g} of {float(budget):g} was spent in the last "
                f"{PERIOD_D} days, too much for {spending.epsilon} more; expected a smaller --epsilon, or a "
                f"later day{back}"
            )
        return left


def total_budget(spendings: Sequence[Spending]) -> Fraction:
    """The sum of budgets: that of all publications together."""
    return sum((Fraction(one.epsilon) for one in spendings), Fraction(0))


def epsilon_of(text: str, option: str) -> Fraction:
    """A budget as a person writes it. Raises ConfigError."""
    # Digits alone: a file of a stranger is read too, and the fraction of 1e999999999 would never be done
    value = Fraction(text) if _DECIMAL.fullmatch(text) else Fraction(0)
    if not Fraction(1, 1000) <= value <= 100:
        raise ConfigError(f"{option} {text[:20]!r}: expected a number from 0.001 to 100, such as 0.5")
    return value
