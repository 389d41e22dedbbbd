"""A made-up fleet whose truth is known: which node fails when, what shows before, and what a repair cures.

All of it is drawn before anybody acts, so that the same faults strike whoever decides. A fault is the first
of a chain: a repair that does not cure leaves a defect, which fails so long after the return. Recurrence and
repair times are those of a recording before its 120th day; warnings are as good as they were measured.
Everything is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.failure import LITERATURE
from twin.catalogue import F64, I32, I64, Bool

HOUR_S, DAY_S = 3600.0, 86_400.0
NODES, GPUS = 1024, 8  # source: the goal of the project
DEPTH = 8  # faults of a chain that are drawn; beyond, a repair cures

# Failures after a return from repair, fitted by maximum likelihood (two exponentials beside a constant rate,
# censored at the end) to the 195 repairs that ended before day 120, of which 100 were followed by a fault of
# the same node. source: gpu-server-faults (InfiniteHBD-Trace, Apache-2.0), days before 120
AGAIN_PU = (0.228, 0.234)
AGAIN_S = (0.0668 * DAY_S, 3.54 * DAY_S)
# Repairs of the same days: median 32.9 h, mean 202 h; the lognormal with both.
REPAIR_S, REPAIR_SPREAD = 32.9 * HOUR_S, 1.905
REPAIR_MOST_S = 60 * DAY_S  # source: estimate; the longest that ended took 90 days

# A lemon comes back without a cause found: as fast as the fastest quarter of these repairs. source: the same
LEMON_REPAIR_S, LEMON_REPAIR_SPREAD = 3.2 * HOUR_S, 0.7

LEAD_SPREAD = 1.1  # of the log of the lead. source: estimate, as in tests.evaluation.health.failure_classes
FALSE_S = 24 * HOUR_S  # for which a false alarm stands. source: estimate
MONTH_S = 30 * DAY_S


class Warnings(NamedTuple):
    """Warnings of a fleet. shows_pu: of the failures have precursors; found_pu: of these are warned of."""

    name: str
    shows_pu: float
    found_pu: float
    lead_s: float  # median
    false_per_month: float  # false alarms per node
    right_pu: float  # of the alarms come true


# As the evaluation `health` measured them on a seed kept back until the end: of 88 failures 37 had
# precursors, of which 0.35 (at half strength 0.30) were found. source: README, "How well it warns"
MEASURED = Warnings("measured", 37 / 88, 0.35, 13.58 * HOUR_S, 0.012, 0.67)
HALF = Warnings("half", 37 / 88, 0.30, 19.4 * HOUR_S, 0.014, 0.58)
NONE = Warnings("none", 37 / 88, 0.0, 13.58 * HOUR_S, 0.0, 0.5)
WARNINGS = {w.name: w for w in (MEASURED, HALF, NONE)}


class Scenario(NamedTuple):
    """A fleet. `rate` is of failures per node and day, repeated ones included, as where nobody acts ahead.

    `lemon_rate` is that of a lemon's own failures, beside the others; `job_s` the median work of a job.
    """

    name: str
    about: str
    rate: float
    lemon_pu: float
    lemon_rate: float
    job_s: float


# A lemon fails ten times as often as the others. source: as LEMON_FACTOR of
# tests.evaluation.health.failure_classes
SCENARIOS = {
    s.name: s
    for s in (
        Scenario("rate_6.5", "6.5 failures per 1000 node-days, 1.5 % lemons at ten times the rate",
                 LITERATURE[0], 0.015, 10 * LITERATURE[0], 4 * HOUR_S),
        Scenario("rate_2.34", "2.34 failures per 1000 node-days, 1.5 % lemons at ten times the rate",
                 LITERATURE[1], 0.015, 10 * LITERATURE[1], 4 * HOUR_S),
        Scenario("lemons", "2.34 per 1000 node-days, and 1.8 % of the nodes fail every few days",
                 LITERATURE[1], 0.018, 0.5, 1.5 * HOUR_S),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Truth:
    """The draws of a run: faults [k] in order of `start_s` from the begin, each a chain of DEPTH [k, DEPTH].

    Of each link of a chain: how long its repair takes, whether a defect stays (`again`) and fails `delay_s`
    after the return, whether it shows and is told of `lead_s` before, and chances in [0, 1) that say whether
    a test finds it. `extra`: the fault is of a lemon, and goes when the node is exchanged.
    """

    n: int
    until_s: float
    lemon: Bool
    node: I32
    start_s: F64
    extra: Bool
    repair_s: F64
    again: Bool
    delay_s: F64
    shows: Bool
    told: Bool
    lead_s: F64
    chance: F64
    false_node: I32
    false_s: F64
    test_chance: F64  # [n, 64], of tests in turn: whether a lemon shows, whether there is a result


def draw(scenario: Scenario, warnings: Warnings, seed: int, until_s: float, n: int = NODES) -> Truth:
    """All that is to come until `until_s` seconds after the begin."""
    rng = np.random.default_rng([seed, 77])
    lemon = np.zeros(n, np.bool_)
    lemon[rng.permutation(n)[: round(scenario.lemon_pu * n)]] = True
    first = scenario.rate * (1.0 - sum(AGAIN_PU)) / DAY_S
    node, start_s = _poisson(rng, np.full(n, first), until_s)
    more, at_s = _poisson(rng, np.where(lemon, scenario.lemon_rate / DAY_S, 0.0), until_s)
    extra = np.r_[np.zeros(len(node), np.bool_), np.ones(len(more), np.bool_)]
    node, start_s = np.r_[node, more], np.r_[start_s, at_s]
    order = np.argsort(start_s, kind="stable")
    node, start_s, extra = node[order], start_s[order], extra[order]
    shape = (len(node), DEPTH)
    median = np.where(extra, LEMON_REPAIR_S, REPAIR_S)[:, None]
    spread = np.where(extra, LEMON_REPAIR_SPREAD, REPAIR_SPREAD)[:, None]
    repair_s = np.minimum(median * np.exp(spread * rng.standard_normal(shape)), REPAIR_MOST_S)
    which = rng.random(shape)
    again = (which < sum(AGAIN_PU)) & ~extra[:, None]
    again[:, -1] = False
    delay_s = np.where(which < AGAIN_PU[0], *AGAIN_S) * rng.exponential(1.0, shape)
    shows = rng.random(shape) < warnings.shows_pu
    told = shows & (rng.random(shape) < warnings.found_pu)
    lead_s = warnings.lead_s * np.exp(LEAD_SPREAD * rng.standard_normal(shape))
    chance = rng.random(shape)
    false_node, false_s = _poisson(rng, np.full(n, warnings.false_per_month / MONTH_S), until_s)
    order = np.argsort(false_s, kind="stable")
    return Truth(n, until_s, lemon, node, start_s, extra, repair_s, again, delay_s, shows, told, lead_s,
                 chance, false_node[order], false_s[order], rng.random((n, 64)))  # fmt: skip


def _poisson(rng: np.random.Generator, rate_per_s: F64, until_s: float) -> tuple[I32, F64]:
    """(nodes, instants) of events of these rates [n], by node."""
    count: I64 = rng.poisson(rate_per_s * until_s)
    node = np.repeat(np.arange(len(rate_per_s), dtype=np.int32), count)
    return node, rng.uniform(0.0, until_s, len(node))
