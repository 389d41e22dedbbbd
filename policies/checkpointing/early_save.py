"""Early saves: selects the jobs that should save now, because an interruption is likely.

Weighed is the chance that a job is interrupted before its next planned save is durable, but after one begun
now would be, times the work that it would lose, against what a save costs it: both of all its members. While
a danger lasts, a job saves at the interval that is best for it. What threatens are the forecasts of the next
hour and the verdicts on its nodes, a drain, or trouble of power and cooling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.checkpointing.costs import JobBatch
from policies.checkpointing.hazard import JobNodes
from policies.checkpointing.plan import SaveTerms
from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import View
from twin.diagnosis import FAULT_KINDS
from twin.telemetry import GOOD

SERVICE = "node.service_level"
DRAIN_LEVEL = 2.0  # a level of it, and all that is more
# The hour's rate must be so many times that of the days for which the interval was planned. source: estimate
RATE_RATIO = 2.0
# Chance that a job is interrupted that is to leave its nodes: a drain waits for its end, or not, and has a
# deadline. source: estimate
DRAIN_PU = 0.9
# Chance that a critical fault of power or cooling, if it is one, stops the nodes below it. source: estimate
FACILITY_PU = 0.3
# Of a feeder's budget, beyond which it is in trouble: less is noise of its meter, as caps keep the feeder at
# its budget. source: estimate
OVER_PU = 1.02
SURE_PU = 0.5  # below which a diagnosis counts for nothing. source: estimate
POWER = ("feed_lost", "breaker_tripped", "grid_event")
FORECAST, VERDICT, DRAIN, EVENT = 1, 2, 4, 8
THREAT_TEXTS = {
    FORECAST: "its nodes are forecast to fail soon",
    VERDICT: "one of its nodes is in bad health",
    DRAIN: "one of its nodes is to be drained",
    EVENT: "the power or cooling above it has a fault",
}


class SaveAssessment(NamedTuple):
    """Of m jobs: the threats (bits), the strongest one, its chance, and the work at stake."""

    causes: I64  # drains and events that last, answered or not
    why: I64  # the one bit that weighs most; 0 = nothing
    chance_pu: F64
    lost_s: F64  # of each member
    cost_s: F64
    worth: Bool  # whether the expected loss exceeds the cost


def at_risk_s(view: View, slots: I32, interval_s: F64, terms: SaveTerms) -> tuple[F64, F64]:
    """Return (work without a durable save, time until the next planned save begins) [m], s; NaN = unknown.

    A job that never reported when it saved is taken to be half way between two saves; one that is late by
    more than an interval has fallen silent, and saves nobody knows when.
    """
    jobs, saved_ns = view.jobs, view.jobs.saved_ns[slots]
    since_ns = np.where(saved_ns > 0, saved_ns, jobs.started_ns[slots])
    age_s = np.maximum((view.now_ns - since_ns) / NS, 0.0)
    period_s = np.where(interval_s > 0, interval_s, np.nan) + terms.block_s
    half_s = 0.5 * period_s
    reported = saved_ns > 0
    lost_s = np.where(reported, age_s, np.fmin(age_s, half_s))
    next_s = np.where(reported, np.maximum(period_s - age_s, 0.0), half_s)
    next_s = np.where(reported & (age_s > 2.0 * period_s), period_s, next_s)
    return np.where(np.isnan(period_s), np.nan, lost_s), next_s


def assess_saves(view: View, batch: JobBatch, answered: I64) -> SaveAssessment:
    """Return the worth of a save now to these jobs; unknown worth counts as none.

    `answered` [m] are causes (bits) for which a save was asked for already: what lasts is one reason to save,
    not one every few seconds.
    """
    rates, terms = batch.rates, batch.terms
    lost_s, next_s = at_risk_s(view, batch.slots, batch.kept_s, terms)
    durable_s = terms.block_s + terms.flush_s
    until_s = next_s + durable_s
    with np.errstate(invalid="ignore"):
        news = (rates.soon_per_s >= RATE_RATIO * rates.per_s) & (rates.soon_per_s > 0)
        verdict = rates.verdict_per_s > 0
        hazard = np.where(news, rates.soon_per_s, rates.verdict_per_s)
        hazard = np.where(np.isfinite(hazard), hazard, 0.0)
        # A save that is not durable in time is of no use
        failing = np.exp(-hazard * durable_s) - np.exp(-hazard * until_s)
        by_verdict = verdict & (2.0 * rates.verdict_per_s >= hazard)
    drained = _worst_of_jobs(batch.held, draining_nodes(view)) * DRAIN_PU
    struck = _worst_of_jobs(batch.held, facility_trouble_pu(view)) * FACILITY_PU
    causes = (DRAIN * (drained > 0) + EVENT * (struck > 0)).astype(np.int64)
    drained = np.where(answered & DRAIN, 0.0, drained)
    struck = np.where(answered & EVENT, 0.0, struck)
    each = np.stack([np.where(by_verdict, 0.0, failing), np.where(by_verdict, failing, 0.0), drained, struck])
    each = np.where(np.isfinite(each), each, 0.0)
    bits = np.array([FORECAST, VERDICT, DRAIN, EVENT], np.int64)
    chance = 1.0 - np.prod(1.0 - each, axis=0)
    why = np.where(chance > 0, bits[np.argmax(each, axis=0)], 0)
    with np.errstate(invalid="ignore"):
        # Just before a planned save there is nothing to bring forward
        worth = (chance * lost_s > terms.block_s) & (next_s > durable_s)
        # Young's interval meets a threat that may come at any time, not one save after the other
        worth &= (drained > 0) | (struck > 0) | (lost_s * lost_s * hazard >= 2.0 * terms.block_s)
    return SaveAssessment(causes, why, chance, lost_s, terms.block_s, worth)


def draining_nodes(view: View) -> F64:
    """Return 1 for nodes that are being drained or requested to be [n_node]; otherwise 0."""
    level = np.fmax(view.commanded(SERVICE), view.readback(SERVICE))
    with np.errstate(invalid="ignore"):
        out = (level >= DRAIN_LEVEL).astype(np.float64)
    for request in view.requests:
        wish = request.lo if request.want is None else max(request.lo, request.want)
        if request.control == SERVICE and wish >= DRAIN_LEVEL:
            out[view.targets(request)] = 1.0
    return out


def facility_trouble_pu(view: View) -> F64:
    """Return the probability of grave trouble of power or cooling above a node [n_node]."""
    racks = np.zeros(view.site.sizes["rack"])
    for fault in view.faults():
        kind = FAULT_KINDS.get(fault.kind)
        if kind is None or kind.severity != "critical" or fault.signal or fault.confidence_pu < SURE_PU:
            continue
        if kind.cooling or fault.kind in POWER:
            below = _racks_below(view, fault.table, fault.entity)
            racks[below] = np.maximum(racks[below], fault.confidence_pu)
    for feeder in np.flatnonzero(_over_budget(view)).tolist():
        racks[_racks_below(view, "feeder", feeder)] = 1.0
    return racks[view.site.rack_of_node]


def _over_budget(view: View) -> Bool:
    """Return the feeders that draw surely more than their budget, as after the end of a grant."""
    power = np.where(view.quality("feeder.power_w") == GOOD, view.believed("feeder.power_w"), np.nan)
    with np.errstate(invalid="ignore"):
        over: Bool = power > OVER_PU * view.budget_w()
    return over


def _racks_below(view: View, table: str, entity: int) -> np.ndarray:
    """Return the racks that an entity of the facility serves; none for a table that serves none."""
    site = view.site
    if table == "rack":
        return np.array([entity])
    if table == "cdu":
        return np.flatnonzero(site.cdu_of_rack == entity)
    if table == "loop":
        cdus = np.flatnonzero(site.loop_of_cdu == entity)
        return np.flatnonzero(np.isin(site.cdu_of_rack, cdus))
    if table == "feeder":
        _, racks = site.below_feeder()
        return np.concatenate([racks.of_row(feeder) for feeder in site.subtree(entity)])
    if table == "site":
        return np.arange(site.sizes["rack"])
    return np.zeros(0, np.int64)


def _worst_of_jobs(held: JobNodes, of_node: F64) -> F64:
    """Return the largest value of each job's nodes [m]."""
    out = np.zeros(len(held.size))
    np.maximum.at(out, held.job, of_node[held.node])
    return out
