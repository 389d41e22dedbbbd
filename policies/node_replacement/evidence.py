"""Evidence: failure probability of each node, its confidence, and its cause.

A node's chance is the greater of its forecast and of a fresh verdict on it or its GPUs. The cause decides
what may be done: a hardware fault is withdrawn and repaired; a fault of the application, power or cooling is
not answered by replacing a node. Unknown is neither healthy nor a reason to drain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.checkpointing import DEGRADED_PU, FAILED_PU, VERDICT_S, facility_trouble_pu, nearest_forecast
from twin.catalogue import F64, I8, I64, NS, Bool
from twin.contracts import BY_FACILITY, BY_POWER, DEGRADED, FAILED, View, action, is_failure

NONE, HARDWARE, RECURRING, LEMON, SOFTWARE, FACILITY, SHARED, FORECAST = range(8)
CAUSES = ("none", "hardware", "recurring", "lemon", "software", "facility", "shared", "forecast")
MENDS = (HARDWARE, RECURRING, LEMON, FORECAST)  # which a withdrawal can remedy
HOUR_S, DAY_S = 3600.0, 86_400.0
# A forecast of another horizon stands for these within this ratio. source: estimate
NEAR = 4.0
# A forecast alone makes a suspect from this chance within a day on, if it is so many times the middle node's:
# what is likely of all is news of the fleet, not of one. source: estimate
LIKELY_PU, TIMES = 0.2, 3.0
STILL_PU = 0.7  # of that chance keeps a suspect one, so that it does not flicker. source: estimate
TROUBLED_PU = 0.5  # from which on power or cooling above a node is what is wrong. source: estimate
RECURS_NATS = 4.0  # source: twin.health.recurring, an alarm stands until less is left
# From when trouble is said to recur until the node fails: the median, and the spread of its logarithm.
# source: README, warnings on simulated fleets; the spread is an estimate
LEAD_S, LEAD_SPREAD = 13.6 * 3600.0, 1.1
LEMON_PU = 0.85  # source: twin.health.rules_node, of its rule for lemons
RESTART_APP, CHECK_FACILITY = action("restart_app"), action("check_facility")
RESET_GPU, DRAIN = action("reset_gpu"), action("drain")  # RESET_GPU and all that is more wants a drain


def one_of(column: np.ndarray, places: Sequence[int]) -> Bool:
    """Return elements of a column of small numbers that are one of a few; np.isin takes ten times as long."""
    out: Bool = np.zeros(column.shape, np.bool_)
    for place in places:
        out |= column == place
    return out


@dataclass(frozen=True, slots=True)
class NodeEvidence:
    """Evidence against each node [n]; NaN = unknown."""

    chance_1h_pu: F64
    chance_24h_pu: F64
    sure_pu: F64  # that the fault is the node's own and needs work
    cause: I8  # place in CAUSES
    action: I8  # place in twin.contracts.health_levels.ACTIONS
    failed: Bool  # down or broken now
    silent: Bool  # known only not to report: no reason to disturb a job
    since_ns: I64  # of the verdict; 0 = none


def evidence_of(view: View, suspected: Bool | None = None, probation: Bool | None = None) -> NodeEvidence:
    """The evidence against each node now. `suspected` [n]: for these a little less is enough; `probation`
    [n]: for these half is."""
    n = view.site.sizes["node"]
    hour, day = failure_chance(view, HOUR_S), failure_chance(view, DAY_S)
    level, act, sure, since = _verdicts(view)
    bad = (level >= DEGRADED) & (act >= RESET_GPU)
    cause = np.where(bad, HARDWARE, NONE).astype(np.int8)
    lemon, recurs = _feature(view, "lemon", n) > 0, _feature(view, "recurs", n) >= RECURS_NATS
    cause[bad & recurs & (level == DEGRADED) & (act == DRAIN)] = RECURRING
    fresh = view.now_ns - since <= round(VERDICT_S * NS)
    _raise_by_verdicts(cause == HARDWARE, fresh, level == FAILED, sure, hour, day)
    _raise_by_recurrence(view, cause == RECURRING, sure, since, hour, day)
    cause[lemon & (cause == NONE)] = LEMON
    sure = np.where(cause == LEMON, LEMON_PU, np.where(bad, sure, np.nan))
    likely = _likely(day, suspected, probation)
    alone = (level >= DEGRADED) & (act == RESTART_APP)
    cause[alone & (cause == NONE)] = SOFTWARE
    foreseen = likely & (cause == NONE)
    cause[foreseen] = FORECAST
    sure[foreseen] = day[foreseen]
    _exclude_external_causes(view, level, act, cause)
    return NodeEvidence(
        hour,
        day,
        sure,
        cause,
        act.astype(np.int8),
        (level == FAILED) & bad,
        _silent(view, bad, n),
        np.where(bad, since, 0),
    )


def _raise_by_verdicts(bad: Bool, fresh: Bool, failed: Bool, sure: F64, hour: F64, day: F64) -> None:
    """Raise the chances by fresh verdicts; keep the day's no less than the hour's."""
    at = np.flatnonzero(bad)
    if len(at):
        pu = np.where(failed[at], FAILED_PU, DEGRADED_PU) * np.nan_to_num(sure[at])
        # A broken node stays broken; one that survives its verdict fails by the forecast
        pu = np.where(fresh[at] | failed[at], pu, np.nan)
        hour[at] = np.fmax(hour[at], pu)
    np.copyto(day, hour, where=~(day >= hour) & ~np.isnan(hour))


def _raise_by_recurrence(view: View, recurs: Bool, sure: F64, since: I64, hour: F64, day: F64) -> None:
    """Raise the chances of nodes with recurring trouble, by how many of these fail and how long after it was
    noticed. A node that survived for long is less likely to fail. Changes `sure`, `hour` and `day`."""
    at = np.flatnonzero(recurs)
    if not len(at):
        return
    age_s = np.maximum((view.now_ns - since[at]) / NS, 0.0)
    was = np.clip(np.nan_to_num(sure[at]), 0.0, 1.0)
    lived = 1.0 - _failed_by(age_s)
    true = was * lived / np.maximum(was * lived + 1.0 - was, 1e-9)
    for ahead_s, column in ((HOUR_S, hour), (DAY_S, day)):
        fails = (_failed_by(age_s + ahead_s) - _failed_by(age_s)) / np.maximum(lived, 1e-9)
        column[at] = np.fmax(column[at], true * np.clip(fails, 0.0, 1.0))
    sure[at] = true


def _failed_by(age_s: F64) -> F64:
    """Return the share of failures after recurring trouble that come within this time of its notice [k]."""
    z = np.log(np.maximum(age_s, 1.0) / LEAD_S) / (LEAD_SPREAD * math.sqrt(2.0))
    return np.array([0.5 * (1.0 + math.erf(x)) for x in z.tolist()], np.float64)


def failure_chance(view: View, horizon_s: float) -> F64:
    """Return the forecast chance of failing within about `horizon_s` [n], at a constant rate; NaN =
    unknown."""
    best = nearest_forecast(view, horizon_s)
    n = view.site.sizes["node"]
    if best is None or not 1.0 / NEAR <= best.horizon_s / horizon_s <= NEAR or len(best.mean) != n:
        return np.full(n, np.nan)
    mean = best.mean.astype(np.float64)
    if best.horizon_s == horizon_s:
        return mean
    out: F64 = -np.expm1(np.log1p(-np.minimum(mean, 1.0 - 1e-9)) * horizon_s / best.horizon_s)
    return out


def failed_nodes(view: View) -> Bool:
    """Return the nodes that have failed already, by verdict or by the log of failures [n_node]."""
    failed: Bool = view.health("node").level == FAILED
    log = view.failures()
    failed[log.node[(log.end_ns == 0) & is_failure(log)]] = True
    return failed


def _verdicts(view: View) -> tuple[I8, I8, F64, I64]:
    """Return (level, action, confidence, since) [n] of the worst verdict on each node and its GPUs.

    Between two that want a drain the graver level counts, then the stronger action; what a GPU's clock is
    lowered by from outside is none of its own.
    """
    own = view.health("node")
    level, act = own.level.astype(np.int8), own.action.astype(np.int8)
    sure, since = own.sure_pu.astype(np.float64), own.since_ns.astype(np.int64)
    gpus = view.health("gpu")
    ill = np.flatnonzero(gpus.level >= DEGRADED)
    if not len(ill):
        return level, act, sure, since
    outside = (gpus.lowered[ill] == BY_FACILITY) | (gpus.lowered[ill] == BY_POWER)
    todo = gpus.action[ill].astype(np.int8)
    ill = ill[~(outside & (todo <= CHECK_FACILITY))]
    node, todo = view.site.node_of_gpu[ill], gpus.action[ill].astype(np.int8)
    wants = (todo >= RESET_GPU).astype(np.int64)
    rank = (wants * 16 + gpus.level[ill]) * 16 + todo
    order = np.lexsort((-gpus.sure_pu[ill], -rank, node))
    first = order[np.unique(node[order], return_index=True)[1]]
    worst, at = ill[first], node[first]
    mine = ((act[at] >= RESET_GPU).astype(np.int64) * 16 + level[at]) * 16 + act[at]
    mine[level[at] < DEGRADED] = -1
    over = rank[first] >= mine
    worst, at = worst[over], at[over]
    level[at], act[at] = gpus.level[worst], gpus.action[worst]
    sure[at], since[at] = gpus.sure_pu[worst], gpus.since_ns[worst]
    return level, act, sure, since


def _likely(day: F64, suspected: Bool | None, probation: Bool | None) -> Bool:
    """Return the nodes that their forecast alone makes suspects [n]."""
    known = day[~np.isnan(day)]
    if not len(known) or not (known >= 0.5 * STILL_PU * LIKELY_PU).any():
        return np.zeros(len(day), np.bool_)
    usual = float(np.partition(known, len(known) // 2)[len(known) // 2])
    # Of few nodes the middle one may be the bad one
    least = max(LIKELY_PU, min(TIMES * usual, 1.0) if usual < LIKELY_PU else 1.0)
    wanted = np.full(len(day), least)
    if probation is not None:
        wanted[probation] *= 0.5
    if suspected is not None:
        wanted[suspected] *= STILL_PU
    with np.errstate(invalid="ignore"):
        out: Bool = day >= wanted
    return out


def _exclude_external_causes(view: View, level: I8, act: I8, cause: I8) -> None:
    """Mark causes outside the node: power, cooling, failures shared with others. Changes `cause`."""
    speaks = (cause != NONE) | (level >= DEGRADED)
    if not speaks.any():
        return
    asks = (act == CHECK_FACILITY) & (level >= DEGRADED) & ((cause == NONE) | (cause == FORECAST))
    cause[asks | speaks & (facility_trouble_pu(view) >= TROUBLED_PU)] = FACILITY
    log = view.failures()
    down = (log.end_ns == 0) & log.shared & is_failure(log)
    together = np.unique(log.node[down])
    cause[together[speaks[together]]] = SHARED


def _silent(view: View, bad: Bool, n: int) -> Bool:
    """Return the nodes whose only evidence is silence [n]."""
    out = np.zeros(n, np.bool_)
    if not bad.any():
        return out
    named: dict[int, set[str]] = {}
    for fault in view.faults():
        if fault.table == "node":
            named.setdefault(fault.entity, set()).add(fault.kind)
        elif fault.table == "gpu":
            named.setdefault(int(view.site.node_of_gpu[fault.entity]), set()).add(fault.kind)
    own = view.health("node")
    diagnose = action("run_diagnostics")
    for node, kinds in named.items():
        silent = kinds <= {"node_silent", "sensor_silent"} and "node_silent" in kinds
        out[node] = silent and bad[node] and own.level[node] < FAILED and own.action[node] <= diagnose
    return out


def reporting_by_gpus_alone(view: View, n: int) -> Bool:
    """Return the nodes whose GPUs have reported, but never the node itself [n]."""
    gpus, itself = _feature(view, "gpu_gap_pu", n), _feature(view, "node_gap_pu", n)
    out: Bool = np.isfinite(gpus) & np.isnan(itself)
    return out


def _feature(view: View, name: str, n: int) -> np.ndarray:
    """Return a feature of each node [n]; NaN if unknown."""
    features = view.node_features()
    if name not in features.names or len(features.values) != n:
        return np.full(n, np.nan)
    return features.values[:, features.names.index(name)]
