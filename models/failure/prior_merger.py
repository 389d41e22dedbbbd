"""Prior merger: the failure prior of a new fleet, from the noisy statistics of others.

Each quantity of a fleet is its own: the mean over fleets and the variance between them are estimated
together (random effects), so that many nodes of one odd fleet do not outweigh all other fleets, and a new
fleet learns how far to trust the mean. The noise that hides single nodes is part of each fleet's variance.
source: DerSimonian and Laird, Controlled Clinical Trials 7 (1986), 177-188
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from models.failure.priors import LEAST_BASE, N_AGE, WIDTHS_D, FailurePrior
from models.failure.site_statistics import COUNT_EDGES, GROUPS, REPAIR_EDGES_D, exposure_d, watched_d
from twin.catalogue import F64, ContractError

# Variance between fleets of a logarithm before any are compared; it counts as much as one fleet. source:
# estimate; a factor of e
ASSUMED_SPREAD = 1.0
_LOG_MEANS = np.linspace(math.log(1e-4), math.log(1e3), 81)  # of failures per node and span
_LOG_SHAPES = np.linspace(math.log(0.02), math.log(50.0), 25)
_LOG_EXCESS = np.linspace(math.log(1e-5), math.log(1.0), 61)
_LOG_LEVELS = np.linspace(-4.0, 4.0, 65)
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0: a failure adds as much anywhere; 1: it multiplies the rate
LEAST_FLEETS = 5  # for a power of their own. source: estimate
_SPREADS = np.linspace(0.1, 2.0, 20).tolist()  # between fleets, standard deviations of a logarithm
MOST_VARIANCE = 4.0  # of a logarithm: beyond it a fleet says nothing. source: estimate


@dataclass(frozen=True)
class FleetStatistics:
    """Statistics of one fleet over a span. groups: by name of GROUPS; noise: variance of each cell of one."""

    days: float
    groups: Mapping[str, F64]
    noise: Mapping[str, float]

    def __post_init__(self) -> None:
        if not 0.0 < self.days < math.inf:
            raise ContractError(f"statistics: expected a span > 0 days, got {self.days}")
        for name, cells in GROUPS.items():
            if name not in self.groups or len(self.groups[name]) != cells:
                raise ContractError(f"statistics: {name}: expected {cells} numbers")


class Estimate(NamedTuple):
    """A logarithm and its variance."""

    log: float
    variance: float


class FleetEstimate(NamedTuple):
    """Logarithms that a fleet's statistics give: failures per node-day, shape, median days of a repair."""

    rate: Estimate
    shape: Estimate
    repair: Estimate


class GammaLaw(NamedTuple):
    """Shape of a Gamma whose logarithm has a variance, and the mean by the exponential of its mean."""

    shape: float
    factor: float


def gamma_of(variance: float) -> GammaLaw:
    """The Gamma whose logarithm is as wide as a normal law's, by the leading terms of tri- and digamma.

    By the variance itself a wide one would lie nearly whole at 0, and one early failure would outweigh it.
    """
    v = min(max(variance, 1e-4), MOST_VARIANCE)
    shape = (1.0 + math.sqrt(1.0 + 2.0 * v)) / (2.0 * v)
    return GammaLaw(shape, math.exp(1.0 / (2.0 * shape) + 1.0 / (12.0 * shape**2)))


def random_effects(parts: Sequence[Estimate]) -> tuple[Estimate, float]:
    """(mean over fleets, variance between them: of DerSimonian and Laird, with the assumed one)."""
    known = [part for part in parts if part.variance <= MOST_VARIANCE]
    if not known:
        raise ContractError("no statistics are significant above their noise: merge more, or larger fleets")
    y = np.array([part.log for part in known])
    v = np.array([max(part.variance, 1e-6) for part in known])
    w, k = 1.0 / v, len(known)
    q = float((w * (y - (w * y).sum() / w.sum()) ** 2).sum())
    found = max(0.0, (q - (k - 1)) / float(w.sum() - (w**2).sum() / w.sum())) if k > 1 else 0.0
    between = _with_assumed(found, k)
    w = 1.0 / (v + between)
    return Estimate(float((w * y).sum() / w.sum()), float(1.0 / w.sum())), between


def _with_assumed(found: float, fleets: int) -> float:
    """A variance between fleets, with the assumed one as that of one more."""
    return ((fleets - 1) * found + ASSUMED_SPREAD) / fleets


def count_shares(log_mean: F64, log_shape: F64) -> F64:
    """Share of nodes in each cell of `counts`, negative binomial [n, n_cell]."""
    mean, shape = np.exp(log_mean)[:, None], np.exp(log_shape)[:, None]
    top = COUNT_EDGES[-1]
    k = np.arange(top - 1)
    ratio = np.log((k + shape) / (k + 1.0)) + np.log(mean / (mean + shape))
    first = -shape * np.log1p(mean / shape)
    log_p = np.concatenate([first, first + np.cumsum(ratio, axis=1)], axis=1)
    p = np.exp(log_p)
    cells = [p[:, a:b].sum(axis=1) for a, b in pairwise(COUNT_EDGES)]
    inside = np.stack(cells, axis=1)
    return np.concatenate([inside, np.maximum(1.0 - inside.sum(axis=1, keepdims=True), 0.0)], axis=1)


_GRID = tuple(part.ravel() for part in np.meshgrid(_LOG_MEANS, _LOG_SHAPES, indexing="ij"))


@lru_cache(maxsize=1)
def _shares() -> F64:
    """The cells at each point of the grid [n_point, n_cell]."""
    return count_shares(*_GRID)


def estimate_fleet(fleet: FleetStatistics) -> FleetEstimate:
    """Rate, shape and repair of one fleet: means over a grid, by how well each fits the noisy counts."""
    seen, noise = np.asarray(fleet.groups["counts"], np.float64), fleet.noise["counts"]
    nodes = max(float(seen.sum()), 1.0)
    shares = _shares()
    variance = nodes * shares * (1.0 - shares) + noise + 0.25
    loss = ((seen - nodes * shares) ** 2 / variance + np.log(variance)).sum(axis=1) / 2.0
    weight = np.exp(loss.min() - loss)
    weight /= weight.sum()
    rate, shape = (_moments(points, weight) for points in _GRID)
    # Nodes of one fleet share its circumstances; no rate is known better than to a twentieth.
    return FleetEstimate(
        Estimate(rate.log - math.log(fleet.days), rate.variance + 0.05**2), shape, _repair(fleet)
    )


def _moments(points: F64, weight: F64) -> Estimate:
    mean = float(weight @ points)
    return Estimate(mean, float(weight @ (points - mean) ** 2))


def _repair(fleet: FleetStatistics) -> Estimate:
    """The median of repairs: of the cell where half of the noisy counts lie below."""
    seen = np.asarray(fleet.groups["repairs"], np.float64)
    total = float(seen.sum())
    sure = total / math.sqrt(len(seen) * fleet.noise["repairs"] + max(total, 1.0))
    if sure < 2.0:
        return Estimate(0.0, math.inf)
    rising = np.maximum.accumulate(np.cumsum(seen))
    edges = np.log(np.maximum([*REPAIR_EDGES_D, 4.0 * REPAIR_EDGES_D[-1]], 1e-3))
    at = float(
        np.interp(rising[-1] / 2.0, np.concatenate([[0.0], rising + 1e-9 * np.arange(len(rising))]), edges)
    )
    return Estimate(at, (2.0 / sure) ** 2)


def base_rate(fleet: FleetStatistics, rate_per_d: float) -> float:
    """Failures per node and day of nodes whose last failure is older than all ages; at most the rate."""
    groups = {name: np.asarray(counts, np.float64) for name, counts in fleet.groups.items()}
    lived = watched_d(groups["counts"], fleet.days)
    lived -= float(exposure_d(groups["again"], groups["censored"]).sum())
    if lived <= 0.0:
        return rate_per_d
    return float(np.clip(groups["again"][-1] / lived, rate_per_d * LEAST_BASE, rate_per_d))


def excess_density(fleet: FleetStatistics, base: float, age: int, excess: F64) -> F64:
    """Logarithm of the likelihood of a fleet's noisy count of failures at an age, by excess [n].

    Of the count itself, so that one below 0 counts for what it says.
    """
    again = np.asarray(fleet.groups["again"], np.float64)
    censored = np.asarray(fleet.groups["censored"], np.float64)
    lived = max(float(exposure_d(again, censored)[age]), float(WIDTHS_D[age]))
    hazard = excess + base
    cells = N_AGE + 1 - age  # whose noise is in the exposure
    noisy = cells * (fleet.noise["again"] + fleet.noise["censored"])
    variance = hazard * lived + fleet.noise["again"] + (hazard * WIDTHS_D[age]) ** 2 * noisy + 0.25
    out: F64 = -((again[age] - hazard * lived) ** 2 / variance + np.log(variance)) / 2.0
    return out


class NormalLaw(NamedTuple):
    """Mean and standard deviation over fleets, and the logarithm of the likelihood there."""

    mean: float
    deviation: float
    score: float


def normal_law(density: F64, points: F64, spreads: Sequence[float]) -> NormalLaw:
    """The normal law over fleets by empirical Bayes.

    density: logarithm of each fleet's likelihood at each point [n_fleet, n_point]; points rise evenly.
    """
    most = density.max(axis=1, keepdims=True)
    likelihood = np.exp(density - most)
    found = NormalLaw(0.0, 1.0, -np.inf)
    for spread in spreads:
        law = np.exp(-(((points[:, None] - points) / spread) ** 2) / 2.0)
        law /= law.sum(axis=0)
        score = np.log(np.maximum(likelihood @ law, 1e-300)).sum(axis=0)
        if (best := float(score.max() + most.sum())) > found.score:
            found = NormalLaw(float(points[score.argmax()]), float(spread), best)
    return found


class ExcessLaw(NamedTuple):
    """Mean excess in each age, for a fleet of a reference rate; its power of the rate; its level's law."""

    mean: F64
    power: float
    level: GammaLaw


def merge_excess(
    fleets: Sequence[FleetStatistics], rates: Sequence[float], bases: Sequence[float], reference: float
) -> ExcessLaw:
    """The law of the excess under the power of the rate that makes the noisy counts likeliest."""
    best, found = -np.inf, ExcessLaw(np.zeros(N_AGE), 0.0, gamma_of(ASSUMED_SPREAD))
    for power in POWERS if len(fleets) >= LEAST_FLEETS else POWERS[:1]:
        scales = (np.array(rates) / reference) ** power
        score, law = _excess_law(fleets, bases, scales, power)
        if score > best:
            best, found = score, law
    return found


def _excess_law(
    fleets: Sequence[FleetStatistics], bases: Sequence[float], scales: F64, power: float
) -> tuple[float, ExcessLaw]:
    """(logarithm of the likelihood, law of the excess) where fleets' excess is scaled so [n_fleet]."""
    each = list(zip(fleets, bases, scales.tolist(), strict=True))
    shape = np.zeros(N_AGE)
    for age in range(N_AGE):
        density = np.array([excess_density(f, b, age, s * np.exp(_LOG_EXCESS)) for f, b, s in each])
        shape[age] = math.exp(normal_law(density, _LOG_EXCESS, (math.sqrt(ASSUMED_SPREAD),)).mean)
    levels = [
        sum(excess_density(f, b, age, s * np.exp(_LOG_LEVELS) * shape[age]) for age in range(N_AGE))
        for f, b, s in each
    ]
    level = normal_law(np.array(levels), _LOG_LEVELS, _SPREADS)
    law = gamma_of(_with_assumed(level.deviation**2, len(fleets)))
    return level.score, ExcessLaw(shape * math.exp(level.mean) * law.factor, power, law)


def merge_statistics(fleets: Sequence[FleetStatistics]) -> FailurePrior:
    """Return the prior of a fleet outside these. Raises ContractError if noise hides everything."""
    if not fleets:
        raise ContractError("expected statistics of one fleet at least")
    estimates = [estimate_fleet(fleet) for fleet in fleets]
    rate, between = random_effects([one.rate for one in estimates])
    law = gamma_of(rate.variance + between)
    per_d = math.exp(rate.log) * law.factor
    shape, _ = random_effects([one.shape for one in estimates])
    repairs = [one.repair for one in estimates if one.repair.variance <= MOST_VARIANCE]
    repair_d = math.exp(random_effects(repairs)[0].log) if repairs else 1.0
    rates = [math.exp(one.rate.log) for one in estimates]
    bases = [base_rate(fleet, per_node) for fleet, per_node in zip(fleets, rates, strict=True)]
    excess = merge_excess(fleets, rates, bases, per_d)
    return FailurePrior(
        rate_per_d=per_d,
        node_days=law.shape / per_d,
        shape=math.exp(shape.log),
        excess_per_d=tuple(excess.mean.tolist()),
        excess_shape=excess.level.shape,
        excess_power=excess.power,
        repair_d=repair_d,
    )
