"""Failure prior: expectations about a fleet's failures before its own record is informative.

It gives the rate of failures and its spread between fleets, how unequal nodes are, and how much a failure
raises the rate of its node while it ages. The fleet's own failures outweigh it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from models.failure.fault_log import FaultLog
from twin.catalogue import F64, ContractError

# Ends of the ages of a failure, in days since the node was back. source: estimate; each about twice the last
AGES_D = (0.0, 1.0, 3.0, 7.0, 16.0, 30.0, 60.0)
WIDTHS_D = np.diff(AGES_D)
N_AGE = len(WIDTHS_D)
LEAST_BASE = 0.25  # of the fleet's rate that no failure before brought about. source: estimate
ROUNDS = 30  # of expectation and maximisation; later ones change nothing that matters
VERSION = "1"
_MOST = {"rate_per_d": 100.0, "node_days": 1e9, "shape": 1e4, "excess_shape": 1e6, "repair_d": 1e4}
_NUMBERS = len(_MOST) + 1 + N_AGE  # of a prior as a line


@dataclass(frozen=True)
class FailurePrior:
    """Prior of one fleet.

    rate_per_d: failures per node and day, a Gamma that counts as much as `node_days` of watching; shape: of
    the Gamma of rates over the nodes of a fleet; excess_per_d: how much one failure adds to its node's rate
    in each of the ages AGES_D, in a fleet of this rate; it goes with the power `excess_power` of a fleet's
    rate, and with a factor of the fleet, a Gamma of mean 1 and shape `excess_shape`; repair_d: median of a
    repair.
    """

    rate_per_d: float
    node_days: float
    shape: float
    excess_per_d: tuple[float, ...]
    excess_shape: float
    repair_d: float
    excess_power: float = 0.0

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 0.0 < value <= most:
                raise ContractError(f"prior: {name}: expected a number > 0 and <= {most:g}, got {value}")
        if not 0.0 <= self.excess_power <= 1.0:
            raise ContractError(f"prior: excess_power: expected 0 to 1, got {self.excess_power}")
        excess = self.excess_per_d
        if len(excess) != N_AGE or not all(0.0 <= x <= 100.0 for x in excess):
            raise ContractError(f"prior: excess_per_d: expected {N_AGE} numbers from 0 to 100, got {excess}")

    @property
    def offspring(self) -> float:
        """Failures that one failure brings about."""
        return float(np.dot(self.excess_per_d, WIDTHS_D))

    @property
    def half_life_d(self) -> float:
        """Half-life of the one exponential that has the mean age of the excess."""
        middle = (np.array(AGES_D[1:]) + AGES_D[:-1]) / 2.0
        weight = np.array(self.excess_per_d) * WIDTHS_D
        return float(math.log(2.0) * np.dot(weight, middle) / max(weight.sum(), 1e-12))

    @property
    def text(self) -> str:
        """It as a line, for a setting of the site file."""
        numbers = [*(getattr(self, name) for name in _MOST), self.excess_power, *self.excess_per_d]
        return " ".join([VERSION, *(f"{number:.4g}" for number in numbers)])


def parse_prior(text: str) -> FailurePrior:
    """The inverse of `text`. Raises ContractError."""
    version, *words = text.split() or [""]
    if version != VERSION:
        raise ContractError(f"prior: version {version[:20]!r}; expected {VERSION}: `racktwin models import`")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != _NUMBERS:
        raise ContractError(
            f"prior: expected {_NUMBERS} numbers behind the version, as `racktwin models import` "
            f"prints them, got {len(words)}"
        )
    power, *excess = numbers[len(_MOST) :]
    return FailurePrior(
        **dict(zip(_MOST, numbers, strict=False)), excess_per_d=tuple(excess), excess_power=power
    )


def life_table(known: FaultLog, day: float) -> tuple[F64, F64]:
    """(failures, node-days) by the age of the node's last failure [N_AGE each], as known on this day."""
    order = np.lexsort((known.start_d, known.node))
    node, start_d, end_d = known.node[order], known.start_d[order], known.end_d[order]
    follows = node[1:] == node[:-1]
    until_d = np.full(known.k, day)
    until_d[:-1][follows] = start_d[1:][follows]
    again = np.zeros(known.k, np.bool_)
    again[:-1] = follows
    back = end_d <= day
    age_d = np.where(back, np.maximum(until_d - np.where(back, end_d, 0.0), 0.0), 0.0)
    failed = np.histogram(age_d[back & again], AGES_D)[0].astype(np.float64)
    lived = np.clip(age_d[:, None] - np.array(AGES_D[:-1]), 0.0, WIDTHS_D).sum(axis=0)
    return failed, lived


def excess_posterior(
    prior: FailurePrior, known: FaultLog, day: float, rate_per_d: float
) -> tuple[F64, float]:
    """(excess in each age [N_AGE], rate of nodes without it) after the fleet's own failures.

    Of a failure at some age it is not known whether the excess or the base rate brought it: expectation and
    maximisation share it out. Both together make `rate_per_d`.
    """
    failed, lived = life_table(known, day)
    watched_d = max(known.n * (day - known.begin_d), 1e-9)
    first = np.array(prior.excess_per_d) * (rate_per_d / prior.rate_per_d) ** prior.excess_power
    usual = float(first @ lived)  # failures that the excess brings about if the fleet is as others
    factor, base = 1.0, rate_per_d
    for _ in range(ROUNDS):
        share = factor * first / np.maximum(factor * first + base, 1e-12)
        factor = (prior.excess_shape + float(failed @ share)) / (prior.excess_shape + usual)
        base = max(rate_per_d - factor * usual / watched_d, LEAST_BASE * rate_per_d)
    return factor * first, base


def expected_failures(
    prior: FailurePrior, known: FaultLog, day: float, spans_d: tuple[float, ...], rate_per_d: float
) -> F64:
    """Failures to expect of each node in (day, day + span] as long as none comes [n_span, n].

    The fleet's rate, shared out by each node's own count (Gamma-Poisson), and the excess of its failures.
    `known` must be a log as known on `day`.
    """
    watched_d = np.maximum(day - known.begin_d - known.down_d(day), 0.0)
    excess, base_per_d = excess_posterior(prior, known, day, rate_per_d)
    prior_d = prior.shape / max(base_per_d, 1e-12)
    own = prior.shape + known.per_node(np.ones(known.k))
    back = known.returned
    age_d = day - np.where(back, known.end_d, day)
    # The integral of the excess from age 0; beyond the last age there is none.
    ages, total = np.array(AGES_D), np.concatenate([[0.0], np.cumsum(excess * WIDTHS_D)])
    out = []
    for span_d in spans_d:
        left = np.interp(age_d + span_d, ages, total) - np.interp(age_d, ages, total)
        base = own * np.log1p(span_d / (prior_d + watched_d))
        out.append(base + known.per_node(np.where(back, left, 0.0)))
    return np.stack(out)
