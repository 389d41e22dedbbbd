"""What speaks against each node: its chance of failing, how sure that is, and whose fault it would be.

A node's chance is that of its forecast or of a fresh verdict on it or its GPUs, whichever is more. The cause
decides what may be done: hardware is taken out and mended, what an application, power or cooling did is not
answered by replacing a node. What is not known is neither healthy nor a reason to drain. May import
contracts, checkpoint_ahead, checkpoint_hazard and the core's words of health.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies.checkpoint_ahead import troubled_pu
from policies.checkpoint_hazard import DEGRADED_PU, FAILED_PU, VERDICT_S, nearest
from twin.contracts import View
from twin.frame import F64, I8, I32, I64, NS, Bool
from twin.health.failure_words import is_failure
from twin.health.levels import BY_FACILITY, BY_POWER, DEGRADED, FAILED, action

NONE, HARDWARE, RECURRING, LEMON, SOFTWARE, FACILITY, SHARED, FORECAST = range(8)
CAUSES = ("none", "hardware", "recurring", "lemon", "software", "facility", "shared", "forecast")
MENDS = (HARDWARE, RECURRING, LEMON, FORECAST)  # which taking the node out can help
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
    """Where a column of small numbers is one of a few; np.isin takes ten times as long for these."""
    out: Bool = np.zeros(column.shape, np.bool_)
    for place in places:
        out |= column == place
    return out


class Evidence(NamedTuple):
    """Of each node [n]; NaN = unknown."""

    chance_1h_pu: F64
    chance_24h_pu: F64
    sure_pu: F64  # that it is the node's own and needs work
    cause: I8  # place in CAUSES
    action: I8  # place in twin.health.levels.ACTIONS
    failed: Bool  # it is down or broken now
    silent: Bool  # all that is known is that it is not heard: no reason to disturb work
    since_ns: I64  # of the verdict; 0 = none


def evidence_of(view: View, kept: Bool | None = None, tighter: Bool | None = None) -> Evidence:
    """What speaks against each node now. `kept` [n]: suspects already, for whom a little less is enough;
    `tighter` [n]: nodes on probation, for whom half is."""
    n = view.site.sizes["node"]
    hour, day = chance(view, HOUR_S), chance(view, DAY_S)
    level, act, sure, since = _verdicts(view)
    bad = (level >= DEGRADED) & (act >= RESET_GPU)
    cause = np.where(bad, HARDWARE, NONE).astype(np.int8)
    lemon, recurs = _feature(view, "lemon", n) > 0, _feature(view, "recurs", n) >= RECURS_NATS
    cause[bad & recurs & (level == DEGRADED) & (act == DRAIN)] = RECURRING
    _speak(view, cause == HARDWARE, level, sure, since, hour, day)
    _foretell(view, cause == RECURRING, sure, since, hour, day)
    cause[lemon & (cause == NONE)] = LEMON
    sure = np.where(cause == LEMON, LEMON_PU, np.where(bad, sure, np.nan))
    likely = _likely(day, kept, tighter)
    alone = (level >= DEGRADED) & (act == RESTART_APP)
    cause[alone & (cause == NONE)] = SOFTWARE
    foreseen = likely & (cause == NONE)
    cause[foreseen] = FORECAST
    sure[foreseen] = day[foreseen]
    _outside(view, level, act, cause)
    return Evidence(hour, day, sure, cause, act.astype(np.int8), (level == FAILED) & bad,
                    _silent(view, bad, n), np.where(bad, since, 0))  # fmt: skip


def _speak(view: View, bad: Bool, level: I8, sure: F64, since: I64, hour: F64, day: F64) -> None:
    """Raise the chances by what fresh verdicts say; keep the day's no less than the hour's."""
    at = np.flatnonzero(bad)
    if len(at):
        fresh = view.now_ns - since[at] <= round(VERDICT_S * NS)
        pu = np.where(level[at] == FAILED, FAILED_PU, DEGRADED_PU) * np.nan_to_num(sure[at])
        # One that is broken stays so; one that lives on with its verdict fails by the forecast
        pu = np.where(fresh | (level[at] == FAILED), pu, np.nan)
        hour[at] = np.fmax(hour[at], pu)
    np.copyto(day, hour, where=~(day >= hour) & ~np.isnan(hour))


def _foretell(view: View, recurs: Bool, sure: F64, since: I64, hour: F64, day: F64) -> None:
    """Raise the chances of nodes on which trouble recurs: so many of these fail, and so long after it was
    noticed. Who lived on for long is less sure to be one of them. Changes `sure`, `hour` and `day`."""
    at = np.flatnonzero(recurs)
    if not len(at):
        return
    age_s = np.maximum((view.now_ns - since[at]) / NS, 0.0)
    was = np.clip(np.nan_to_num(sure[at]), 0.0, 1.0)
    lived = 1.0 - _by(age_s)
    true = was * lived / np.maximum(was * lived + 1.0 - was, 1e-9)
    for ahead_s, column in ((HOUR_S, hour), (DAY_S, day)):
        fails = (_by(age_s + ahead_s) - _by(age_s)) / np.maximum(lived, 1e-9)
        column[at] = np.fmax(column[at], true * np.clip(fails, 0.0, 1.0))
    sure[at] = true


def _by(age_s: F64) -> F64:
    """Share of the failures that trouble foretold which have come so long after it was noticed [k]."""
    z = np.log(np.maximum(age_s, 1.0) / LEAD_S) / (LEAD_SPREAD * math.sqrt(2.0))
    return np.array([0.5 * (1.0 + math.erf(x)) for x in z.tolist()], np.float64)


def chance(view: View, horizon_s: float) -> F64:
    """The forecast chance of failing within about `horizon_s` [n], at a constant rate; NaN = unknown."""
    best = nearest(view, horizon_s)
    n = view.site.sizes["node"]
    if best is None or not 1.0 / NEAR <= best.horizon_s / horizon_s <= NEAR or len(best.mean) != n:
        return np.full(n, np.nan)
    mean = best.mean.astype(np.float64)
    if best.horizon_s == horizon_s:
        return mean
    out: F64 = -np.expm1(np.log1p(-np.minimum(mean, 1.0 - 1e-9)) * horizon_s / best.horizon_s)
    return out


def _verdicts(view: View) -> tuple[I8, I8, F64, I64]:
    """(level, action, sureness, since) [n] of the worst verdict on each node and its GPUs.

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


def _likely(day: F64, kept: Bool | None, tighter: Bool | None) -> Bool:
    """Nodes that are suspects by their forecast alone [n]."""
    known = day[~np.isnan(day)]
    if not len(known) or not (known >= 0.5 * STILL_PU * LIKELY_PU).any():
        return np.zeros(len(day), np.bool_)
    usual = float(np.partition(known, len(known) // 2)[len(known) // 2])
    # Of few nodes the middle one may be the bad one
    least = max(LIKELY_PU, min(TIMES * usual, 1.0) if usual < LIKELY_PU else 1.0)
    wanted = np.full(len(day), least)
    if tighter is not None:
        wanted[tighter] *= 0.5
    if kept is not None:
        wanted[kept] *= STILL_PU
    with np.errstate(invalid="ignore"):
        out: Bool = day >= wanted
    return out


def _outside(view: View, level: I8, act: I8, cause: I8) -> None:
    """What is not the node's own: power, cooling, and what failed together with others. Changes `cause`."""
    speaks = (cause != NONE) | (level >= DEGRADED)
    if not speaks.any():
        return
    asks = (act == CHECK_FACILITY) & (level >= DEGRADED) & ((cause == NONE) | (cause == FORECAST))
    cause[asks | speaks & (troubled_pu(view) >= TROUBLED_PU)] = FACILITY
    log = view.failures()
    down = (log.end_ns == 0) & log.shared & is_failure(log)
    together = np.unique(log.node[down])
    cause[together[speaks[together]]] = SHARED


def _silent(view: View, bad: Bool, n: int) -> Bool:
    """Nodes against which nothing speaks but that they are not heard [n]."""
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


def _feature(view: View, name: str, n: int) -> np.ndarray:
    """A number of each node [n]; NaN where nobody tells it."""
    features = view.node_features()
    if name not in features.names or len(features.values) != n:
        return np.full(n, np.nan)
    return features.values[:, features.names.index(name)]


def suspects(evidence: Evidence) -> I32:
    """Nodes against which something speaks that taking them out can help, ascending."""
    return np.flatnonzero(one_of(evidence.cause, MENDS)).astype(np.int32)
