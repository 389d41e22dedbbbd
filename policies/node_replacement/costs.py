"""Option costs: expected GPU-hours of watching a suspect, of letting it leave when its job ends, or of
draining it after the next planned save, after a save now, or at once.

A failure costs the whole of a synchronous job the work since its last durable save, the time until somebody
notices, a restart and the wait for another node. To act costs a restart too, but loses little work; and where
the alarm is false, the node stands idle while it is tested. Chances are shared out over the time that a node
stays at work, in proportion to its hazard, so that a higher chance never makes a milder option the cheapest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from policies.checkpointing import InterruptionRates, at_risk_s, job_nodes, reports_checkpoints, save_terms
from policies.node_replacement.evidence import DAY_S, HOUR_S
from twin.catalogue import F64, I8, I32, NS, Bool
from twin.contracts import View
from twin.telemetry import KINDS

WATCH, CORDON, AT_NEXT, SAVE_NOW, AT_ONCE = range(5)
OPTIONS = ("watch", "cordon", "at_next", "save_now", "at_once")
# From a failure until the job notices: collectives time out after 10 min unless configured otherwise. source:
# default timeout of NCCL process groups in PyTorch's documentation
NOTICE_S = 600.0
QUEUE_S, QUEUE_SPARE_S = 1800.0, 60.0  # wait for another node; with a spare at hand. source: estimate
# A false alarm keeps the node out while it is tested, or until it is inspected. source: estimate
TEST_S, LOOK_S = 2 * HOUR_S, 8 * HOUR_S
TEST_FINDS_PU = 0.5  # of what is wrong with a node, a test finds. source: estimate
SPARE_PU = 0.25  # of a node's time is lost while a spare takes over that else stands idle. source: estimate
# Chance that what is broken, and stays so, ends a job one day, if not tomorrow. source: estimate
LATER_PU = 0.8
BROKEN_GPUS = 1.0  # that a node with a broken part has idle, at least. source: estimate
WORTH = 0.9  # of what it saves an act may cost for sure. source: estimate
PRIOR_WORK_S = 1800.0  # not saved, of a job of which no more is known. source: estimate
PRIOR_LEFT_S, MOST_LEFT_S = HOUR_S, 7 * DAY_S  # of a job that just began; of any. source: estimate
IDLE_PU = 0.5  # chance that an idle node has work of the usual size by then. source: estimate
TRAINING, INFERENCE = KINDS.index("training"), KINDS.index("inference")


@dataclass(frozen=True, slots=True)
class Stakes:
    """The work at stake on each of k nodes. Times in seconds."""

    job_gpus: F64  # that stand still if it fails: of the whole job where it is synchronous
    node_gpus: F64
    lost_s: F64  # of work since the last durable save
    next_s: F64  # until the next planned save begins
    usual_s: F64  # of work that is lost on average, at any time
    block_s: F64
    durable_s: F64  # from a save's begin until it is durable
    restart_s: F64
    left_s: F64  # until the job ends, as far as anybody knows
    asks: Bool  # its job can be asked to save
    busy: Bool
    spare: Bool  # one is at hand

    def rows(self, rows: np.ndarray) -> Stakes:
        """Return the stakes of some of the nodes."""
        return Stakes(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays that a site may set. Seconds."""

    test_s: float = LOOK_S
    queue_s: float = QUEUE_S
    notice_s: float = NOTICE_S


@dataclass(frozen=True, slots=True)
class Chances:
    """Of k nodes: chance of failing within an hour and a day, and that the node needs work; NaN = unknown."""

    hour_pu: F64
    day_pu: F64
    sure_pu: F64


@dataclass(frozen=True, slots=True)
class OptionCosts:
    """Of k nodes: cost of each option [5, k] (inf: not possible), and the option of least cost."""

    gpu_h: F64
    option: I8
    chance_pu: F64  # that the node fails before the work of each option is safe [5, k]


def stakes_of(view: View, nodes: I32, spare: Bool) -> Stakes:
    """Return the stakes of these nodes; an idle one counts as a part of the usual job."""
    jobs, site, k = view.jobs, view.site, len(nodes)
    of_node = np.diff(site.gpu_start_of_node).astype(np.float64)
    slot = jobs.job_of_node[nodes]
    busy = slot >= 0
    slots, place = np.unique(slot[busy], return_inverse=True)
    nodes_of_job = job_nodes(view, slots.astype(np.int32))
    nothing = np.full(len(slots), np.nan)
    terms, _ = save_terms(view, slots, nodes_of_job, InterruptionRates(nothing, nothing, nothing, nothing))
    interval = np.where(jobs.checkpoint_interval_s[slots] > 0, jobs.checkpoint_interval_s[slots], np.nan)
    lost, ahead = at_risk_s(view, slots, interval, terms)
    ran = np.maximum((view.now_ns - jobs.running_since_ns(slots)) / NS, 0.0)
    # Of a training job that never said how often it saves, some; of other work, all that it did; a service
    # loses nothing but its time
    silent = np.where(jobs.kind[slots] == TRAINING, np.minimum(ran, PRIOR_WORK_S), ran)
    silent = np.where(jobs.kind[slots] == INFERENCE, 0.0, np.minimum(silent, DAY_S))
    lost = np.where(np.isnan(lost), silent, lost)
    usual = np.where(np.isnan(interval), silent, 0.5 * interval)
    limit = jobs.time_limit_s[slots]
    # A job uses any share of its limit about as likely as any other; without a limit it runs as long again as
    # it ran. source: Mu'alem and Feitelson, IEEE TPDS 12(6), 2001, on user estimates
    left = np.where(limit > 0, 0.5 * np.maximum(limit - ran, 0.0), ran + PRIOR_LEFT_S)
    gpus = np.bincount(nodes_of_job.job, weights=of_node[nodes_of_job.node], minlength=len(slots))
    own = of_node[nodes]
    total = np.where(jobs.synchronous[slots], gpus, 0.0)

    def spread(of_job: F64, idle: float | F64) -> F64:
        out = np.full(k, idle, np.float64)
        out[busy] = of_job[place]
        return out

    asks = reports_checkpoints(view, slots) & (jobs.kind[slots] == TRAINING)
    usual_gpus, usual_loss = _usual(view, of_node)
    return Stakes(
        np.maximum(spread(total, IDLE_PU * usual_gpus), np.where(busy, own, IDLE_PU * own)),
        own,
        spread(lost, 0.0),
        spread(np.where(np.isnan(interval), np.inf, ahead), np.inf),
        spread(usual, usual_loss),
        spread(terms.block_s, 0.0),
        spread(terms.block_s + terms.flush_s, 0.0),
        spread(terms.restart_s, 600.0),
        spread(np.minimum(left, MOST_LEFT_S), 0.0),
        spread(asks, 0.0) > 0,
        busy,
        spare,
    )


def _usual(view: View, of_node: F64) -> tuple[float, float]:
    """Return (GPUs of the job that a node of this site usually has, work that such a failure loses, s)."""
    jobs = view.jobs
    there = np.flatnonzero(jobs.alive)
    size = np.bincount(jobs.job_of_node[jobs.job_of_node >= 0], minlength=jobs.n)[there].astype(np.float64)
    if not size.any():
        return float(of_node.mean()) if len(of_node) else 0.0, PRIOR_WORK_S
    whole = np.where(jobs.synchronous[there], size, np.minimum(size, 1.0))
    weight = float(size.sum())
    interval = jobs.checkpoint_interval_s[there]
    loss = np.where(interval > 0, 0.5 * interval, PRIOR_WORK_S)
    gpus = float(of_node.mean()) * float((whole * size).sum()) / weight
    return gpus, float((loss * size).sum()) / weight


def option_costs(chances: Chances, stays: Bool, broken: Bool, at: Stakes, delays: Delays) -> OptionCosts:
    """Return the expected cost of each option for k nodes, and the option to take.

    Where no chance is known, nothing is done. stays [k]: the fault does not go away. broken [k]: a part is
    broken already, and idle while the node is watched.
    """
    hour_pu, day_pu, sure_pu = chances.hour_pu, chances.day_pu, chances.sure_pu
    p = np.clip(np.nan_to_num(day_pu), 0.0, 1.0)
    sure = np.clip(np.nan_to_num(sure_pu), 0.0, 1.0)
    queue = np.where(at.spare, QUEUE_SPARE_S, delays.queue_s)
    stop = at.restart_s + queue  # of the job, whoever ends it
    used = np.where(at.busy, np.where(at.spare, SPARE_PU, 1.0), IDLE_PU)
    idle = delays.test_s * used * at.node_gpus * (1.0 - sure)
    fails = at.usual_s + delays.notice_s + stop
    wait = at.next_s + at.durable_s
    # (how long the node stays at work, work lost if it fails meanwhile, seconds that the whole job pays)
    exposed = np.stack(
        [np.full(len(p), DAY_S), np.minimum(at.left_s, DAY_S), wait, at.durable_s, np.zeros(len(p))]
    )
    lost = np.stack(
        [
            at.usual_s,
            np.minimum(at.usual_s, np.fmax(at.lost_s, at.left_s)),
            at.lost_s + 0.5 * np.where(np.isfinite(wait), wait, 0.0),
            at.lost_s,
            at.lost_s * 0.0,
        ]
    )
    # The next planned save stops the job in any case
    nothing = np.zeros(len(p))
    pays = np.stack([nothing, nothing, stop, at.block_s + stop, at.lost_s + stop])
    acts = np.arange(5)[:, None] >= CORDON
    share = _share(hour_pu, p, exposed)
    risk = share * (lost + delays.notice_s + stop)
    later = np.where(stays, LATER_PU * sure, 0.0) * fails
    certain = np.where(acts, pays * at.job_gpus + idle, later * at.job_gpus)
    certain[CORDON, ~at.busy] = idle[~at.busy]
    certain[WATCH] += np.where(broken, sure * BROKEN_GPUS * DAY_S, 0.0)
    risk[CORDON, ~at.busy] = 0.0
    each = p * risk * at.job_gpus + certain
    # An idle node leaves as it is; a busy one cannot, and only who speaks of saves can wait for one
    can = np.ones(each.shape, np.bool_)
    can[AT_NEXT] &= at.busy & at.asks & (risk[AT_NEXT] <= risk[CORDON]) & (risk[AT_NEXT] >= risk[SAVE_NOW])
    can[SAVE_NOW] &= at.busy & at.asks & (risk[SAVE_NOW] <= risk[CORDON])
    can[AT_ONCE] &= at.busy
    cost = np.where(can, each, np.inf)
    # The certain cost of an act counts for more: else a doubt would be enough to act on
    least = cost + np.where(acts, (1.0 / WORTH - 1.0) * certain, 0.0)
    known = ~np.isnan(day_pu) | stays
    option = np.where(known, np.argmin(least, axis=0), WATCH).astype(np.int8)
    return OptionCosts(cost / HOUR_S, option, p * share)


def inspection_pays(sure_pu: F64, at: Stakes) -> Bool:
    """Nodes that passed their test, with the evidence still standing, for which an inspection costs less than
    a return to service [k], by the doubt that is left after such a test."""
    delays = Delays()
    sure = np.clip(np.nan_to_num(sure_pu), 0.0, 1.0)
    left = sure * (1.0 - TEST_FINDS_PU) / (1.0 - sure * TEST_FINDS_PU)
    fails_s = at.usual_s + delays.notice_s + at.restart_s + np.where(at.spare, QUEUE_SPARE_S, delays.queue_s)
    used = np.where(at.busy, np.where(at.spare, SPARE_PU, 1.0), IDLE_PU)
    out: Bool = LATER_PU * left * fails_s * at.job_gpus > LOOK_S * used * at.node_gpus * (1.0 - left)
    return out


def _share(hour_pu: F64, day_pu: F64, exposed_s: F64) -> F64:
    """Return the share of a day's chance within `exposed_s` [5, k]; the first hour may be worse."""
    day = -np.log1p(-np.minimum(day_pu, 1.0 - 1e-9))
    hour = -np.log1p(-np.clip(np.nan_to_num(hour_pu), 0.0, 1.0 - 1e-9))
    hour = np.clip(hour, day * HOUR_S / DAY_S, day)
    rest = (day - hour) / (DAY_S - HOUR_S)
    within = np.minimum(exposed_s, DAY_S)
    hazard = hour / HOUR_S * np.minimum(within, HOUR_S) + rest * np.maximum(within - HOUR_S, 0.0)
    out: F64 = np.where(day > 0.0, hazard / np.where(day > 0.0, day, 1.0), within / DAY_S)
    return out
