"""What was known of each node's failures, day by day and at each fault: rates as the live model's baseline.

On each whole day, and at the instant of each fault, the log as known then, and no more, gives each node a
rate: the Gamma-Poisson rate with its prior from the literature, and failures that excite failures, fitted
anew each week. Faults with a cause in common are told apart as in the live model. A job's rate is the sum
over the nodes that it holds, times what the policy makes of how often the fleet failed of late; how sure it
is follows from each node's own past and the fleet's. Each run audits itself for a look ahead. Part of the
shell; NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from models import failure_rates as rates
from models.audit import LookAhead, differ
from models.common_cause import individual, shocks
from models.faultlog import FaultLog, scrambled
from models.self_exciting import SelfExciting
from policies.checkpoint_hazard import of_late
from twin.errors import ConfigError
from twin.frame import F64, Bool

SPAN_D = 1.0  # rates are means over the coming day, as far as a plan looks. source: estimate
REFIT_D = 7.0  # source: estimate; as in the backtest of failures
AUDITED = (0.1, 0.5, 0.97)  # where among the instants the look ahead is checked
MOST_INSTANTS = 20_000
DAY_S = 86_400.0


class Known(NamedTuple):
    """At each instant: failures per day of each node [n_instant, n], the shape of the Gamma around each.

    days [n_instant], ascending; fleet_shape [n_instant]: of what all share; shock_per_d, shock_nodes
    [n_instant]: causes in common per day, and how many nodes each strikes; of_late [n_instant]: how many
    times as often as `per_d` says nodes fail of late.
    """

    days: F64
    per_d: F64
    own_shape: F64
    fleet_shape: F64
    shock_per_d: F64
    shock_nodes: F64
    of_late: F64

    def of(self, held: Bool) -> tuple[F64, F64]:
        """(failures per second, shape) of a job that holds these nodes at these instants [n_instant, n]."""
        own = np.where(held, self.per_d, 0.0)
        sum_d = own.sum(axis=1)
        spread = (own**2 / self.own_shape).sum(axis=1)
        # A cause in common strikes a job once, however many of its nodes it takes.
        share = np.clip(self.shock_nodes / max(held.shape[1], 1), 0.0, 1.0)
        struck = self.shock_per_d * -np.expm1(held.sum(axis=1) * np.log1p(-np.minimum(share, 1.0 - 1e-12)))
        with np.errstate(divide="ignore", invalid="ignore"):
            shape = 1.0 / (np.where(sum_d > 0, spread / sum_d**2, 0.0) + 1.0 / self.fleet_shape)
        return (self.of_late * sum_d + struck) / DAY_S, shape


def known(
    log: FaultLog,
    from_d: float,
    progress: Callable[[float], None] = lambda _: None,
    look: Callable[[FaultLog, float], FaultLog] = FaultLog.known_at,
) -> Known:
    """Rates from `from_d` on: each whole day, each fault. Raises LookAhead, and ConfigError for too many.

    `look` is how the past is looked up: replaced in tests that plant a look ahead.
    """
    later = log.start_d[log.start_d > from_d]
    days = np.unique(np.concatenate([[from_d], np.arange(np.floor(from_d) + 1.0, log.until_d), later]))
    days = days[days < log.until_d]
    if len(days) > MOST_INSTANTS:
        raise ConfigError(
            f"{len(days):,} days and faults to go through, expected at most {MOST_INSTANTS:,}: give a later "
            "--from"
        )
    checked = {int(share * (len(days) - 1)) for share in AUDITED}
    teacher, rows = _Teacher(), []
    for i, day in enumerate(days.tolist()):
        if i in checked:
            teacher.fitted_d = -np.inf  # so that the fit is audited too
        row = teacher.say(look(log, day), day)
        if i in checked:
            teacher.fitted_d = -np.inf
            again = teacher.say(look(scrambled(log, day), day), day)
            if any(differ(np.asarray(a), np.asarray(b)).any() for a, b in zip(row, again, strict=True)):
                raise LookAhead("the rate of failures", int(day), "later events became others")
        rows.append(row)
        progress((i + 1) / len(days))
    columns = [np.array(part) for part in zip(*rows, strict=True)]
    return Known(days, *columns)


Row = tuple[F64, F64, float, float, float, float]


class _Teacher:
    """Fits once a week, and says what is known of a day."""

    def __init__(self) -> None:
        self.fitted_d, self.theta, self.faults = -np.inf, np.zeros(0), 0.0

    def say(self, seen: FaultLog, day: float) -> Row:
        own = individual(seen)
        past = past_of(seen, own, day)
        if day - self.fitted_d >= REFIT_D:
            self.fitted_d, self.faults = day, float(own.k)
            self.theta = SelfExciting().fit(own, day)["theta"]
        fleet, fleet_shape = rates.fleet(past)
        hazard = rates.baseline(past, (SPAN_D,), self.theta, self.faults).hazard[0]
        count = own.per_node(np.ones(own.k))
        own_shape = np.maximum(fleet * rates.OWN_DAYS + count, rates.LEAST_SHAPE)
        causes = len(past.shock_d)
        watched_d = max(day - seen.begin_d, rates.PRIOR_NODE_DAYS / max(seen.n, 1))
        struck = float(past.shock_nodes.mean()) if causes else 0.0
        per_d = hazard / SPAN_D
        # A node under repair has no forecast, and the policy counts none for it.
        lately = of_late(day - own.start_d, per_d[~past.down], day - seen.begin_d)
        return per_d, own_shape, fleet_shape, causes / watched_d, struck, lately


def past_of(seen: FaultLog, own: FaultLog, day: float) -> rates.Past:
    """The log as the live model's rates take it; its clock begins with the watch."""
    shift = FaultLog(own.n, own.node, own.start_d - own.begin_d, own.end_d - own.begin_d, own.kind,
                     own.classes, 0.0, own.until_d - own.begin_d)  # fmt: skip
    down = np.zeros(seen.n, bool)
    down[seen.node[seen.end_d > day]] = True
    found = shocks(seen)
    return rates.Past(
        shift, down, np.array([s.day - seen.begin_d for s in found]),
        np.array([float(s.nodes) for s in found]), seen.start_d - seen.begin_d, day - seen.begin_d,
    )  # fmt: skip
