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
_SPREADS = np.linspace(0.1, 2.0, 20).tolist()  # between fleets, standard deviations of a logarithm
MOST_VARIANCE = 4.0  # of a logarithm: beyond it a fleet tells nothing. source: estimate


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
    """Logarithms that a fleet's statistics tell of: failures per node-day, shape, median days of a repair."""

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
        raise ContractError("no statistics tell enough through their noise: merge more, or larger fleets")
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


def normal_law(density: F64, points: F64, spreads: Sequence[float]) -> tuple[float, float]:
    """(mean, standard deviation) of a normal law over fleets, by empirical Bayes.

    density: logarithm of each fleet's likelihood at each point [n_fleet, n_point]; points rise evenly.
    """
    likelihood = np.exp(density - density.max(axis=1, keepdims=True))
    best, found = -np.inf, (0.0, 1.0)
    for spread in spreads:
        law = np.exp(-(((points[:, None] - points) / spread) ** 2) / 2.0)
        law /= law.sum(axis=0)
        score = np.log(np.maximum(likelihood @ law, 1e-300)).sum(axis=0)
        if score.max() > best:
            best, found = float(score.max()), (float(points[score.argmax()]), float(spread))
    return found


def merge_excess(fleets: Sequence[FleetStatistics], bases: Sequence[float]) -> tuple[F64, GammaLaw]:
    """(mean excess in each age [N_AGE], law of its level over fleets)."""
    shape = np.zeros(N_AGE)
    for age in range(N_AGE):
        each = [excess_density(f, b, age, np.exp(_LOG_EXCESS)) for f, b in zip(fleets, bases, strict=True)]
        shape[age] = math.exp(normal_law(np.array(each), _LOG_EXCESS, (math.sqrt(ASSUMED_SPREAD),))[0])
    levels = [
        sum(excess_density(f, b, age, np.exp(_LOG_LEVELS) * shape[age]) for age in range(N_AGE))
        for f, b in zip(fleets, bases, strict=True)
    ]
    level, spread = normal_law(np.array(levels), _LOG_LEVELS, _SPREADS)
    law = gamma_of(_with_assumed(spread**2, len(fleets)))
    return shape * math.exp(level) * law.factor, law


def merge_statistics(fleets: Sequence[FleetStatistics]) -> FailurePrior:
    """The prior of a fleet that is none of these. Raises ContractError where noise hides everything."""
    if not fleets:
        raise ContractError("expected statistics of one fleet at least")
    estimates = [estimate_fleet(fleet) for fleet in fleets]
    rate, between = random_effects([one.rate for one in estimates])
    law = gamma_of(rate.variance + between)
    per_d = math.exp(rate.log) * law.factor
    shape, _ = random_effects([one.shape for one in estimates])
    repairs = [one.repair for one in estimates if one.repair.variance <= MOST_VARIANCE]
    repair_d = math.exp(random_effects(repairs)[0].log) if repairs else 1.0
    bases = [base_rate(fleet, math.exp(one.rate.log)) for fleet, one in zip(fleets, estimates, strict=True)]
    excess, level = merge_excess(fleets, bases)
    return FailurePrior(
        rate_per_d=per_d,
        node_days=law.shape / per_d,
        shape=math.exp(shape.log),
        excess_per_d=tuple(excess.tolist()),
        excess_shape=level.shape,
        repair_d=repair_d,
    )
