"""Cost-benefit prediction: expected losses within a day if a node leaves as planned, and if it stays.

On a grid of times the node survives with the probability that its hazard allows. In each step a failure costs
its job the work since the last durable save, the notice, the queue and the restart, and the node its repair.
Where it leaves, the job pays for a planned stop instead, and for failures of its spare. Nothing after the day
counts, so that both options can be compared with the later outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.node_replacement.costs import (
    AT_NEXT,
    AT_ONCE,
    CORDON,
    OPTIONS,
    QUEUE_SPARE_S,
    SAVE_NOW,
    SPARE_PU,
    Chances,
    Delays,
    Stakes,
)
from twin.catalogue import F64, I8

HOUR_S, DAY_S = 3600.0, 86_400.0
STEP_S, FIRST_S = 900.0, 60.0  # of the day, and of its first hour, where the hazard of a suspect is greatest
MOST_PU = 1.0 - 1e-9  # a chance of one has no rate
REPAIR_S = 133.0 * HOUR_S  # mean. source: gpu-server-faults trace, domain.md C


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeTerms:
    """Terms of the prediction for k nodes; arrays [k], seconds. NaN = unknown."""

    hour_pu: F64  # chance of failing within an hour, and within a day
    day_pu: F64
    sure_pu: F64  # that the node needs repair; else it comes back after its test
    job_gpus: F64  # that stand still if it fails
    node_gpus: F64
    lost_s: F64  # of work since the last durable save, now
    next_s: F64  # until the next planned save begins; inf: nobody knows, then always `usual_s` is lost
    usual_s: F64
    period_s: F64  # from one planned save to the next
    durable_s: F64  # from a save's begin until it can be recovered from
    restart_s: F64
    queue_s: F64  # until other nodes are there, or the spare is
    notice_s: F64  # from a failure until the job notices
    test_s: F64
    repair_s: F64
    idle_pu: F64  # of the node's time that is lost while it is out; less with a spare
    act_in_s: F64  # until the node leaves; inf: not within reach
    pays_s: F64  # by its job, when it leaves: what no save holds, its restart and its wait; 0: it has ended
    spare_day_pu: F64  # chance that its spare fails within a day
    wait_use_pu: F64  # greatest share of a limit of power or heat that is used, now and with the load moved
    act_use_pu: F64


class OptionOutcome(NamedTuple):
    """Of k nodes, within a day: the outcome if it leaves (act) and if it stays (wait).

    `pu`: chance that a failure interrupts its job; `gpu_h`: expected GPU-hours lost; `use_pu`: the greatest
    share of a limit that is used.
    """

    act_pu: F64
    wait_pu: F64
    act_gpu_h: F64
    wait_gpu_h: F64
    act_use_pu: F64
    wait_use_pu: F64


@dataclass(frozen=True, slots=True)
class SpareEffect:
    """Of k nodes: the chance that the spare fails within a day, and the greatest share of a limit of power or
    heat in use, now and with the load moved to the spare."""

    day_pu: F64
    wait_use_pu: F64
    act_use_pu: F64


def terms_of_option(
    chances: Chances, option: I8, at: Stakes, delays: Delays | None = None, repair_s: float = REPAIR_S,
    spare: SpareEffect | None = None,
) -> OutcomeTerms:  # fmt: skip
    """Return the terms of k nodes for the option planned for each."""
    k, delays = len(option), delays or Delays()
    nothing = np.zeros(k)
    spare = spare or SpareEffect(nothing, nothing, nothing)
    act_in = np.select(
        [option == CORDON, option == AT_NEXT, option == SAVE_NOW, option == AT_ONCE],
        [at.left_s, at.next_s + at.durable_s, at.durable_s, nothing],
        np.inf,
    )
    # An idle node leaves at once, and disturbs nobody
    act_in = np.where(at.busy | (option < CORDON) | (option >= len(OPTIONS)), act_in, 0.0)
    queue = np.where(at.spare, QUEUE_SPARE_S, delays.queue_s)
    # Work done while a save is written is lost; a planned save stops the training in any case
    unsaved = np.select(
        [option == AT_NEXT, option == SAVE_NOW], [at.durable_s - at.block_s, at.durable_s], at.lost_s
    )
    return OutcomeTerms(
        hour_pu=chances.hour_pu,
        day_pu=chances.day_pu,
        sure_pu=np.clip(np.nan_to_num(chances.sure_pu), 0.0, 1.0),
        job_gpus=at.job_gpus,
        node_gpus=at.node_gpus,
        lost_s=at.lost_s,
        next_s=at.next_s,
        usual_s=at.usual_s,
        period_s=2.0 * at.usual_s + at.block_s,
        durable_s=at.durable_s,
        restart_s=at.restart_s,
        queue_s=queue,
        notice_s=np.full(k, delays.notice_s),
        test_s=np.full(k, delays.test_s),
        repair_s=np.full(k, repair_s),
        idle_pu=np.where(at.spare, SPARE_PU, 1.0),
        act_in_s=act_in,
        pays_s=np.where((option >= AT_NEXT) & at.busy, unsaved + at.restart_s + queue, 0.0),
        spare_day_pu=np.clip(np.nan_to_num(spare.day_pu), 0.0, MOST_PU),
        wait_use_pu=spare.wait_use_pu,
        act_use_pu=spare.act_use_pu,
    )


def expected_outcome(terms: OutcomeTerms) -> OptionOutcome:
    """Return the outcome of both options of k nodes, a day ahead."""
    grid = np.concatenate([np.arange(0.0, HOUR_S, FIRST_S), np.arange(HOUR_S, DAY_S + 1.0, STEP_S)])
    leaves = np.clip(np.nan_to_num(terms.act_in_s, nan=np.inf), 0.0, DAY_S)
    wait_s = _until(terms, np.broadcast_to(grid, (len(leaves), len(grid))))
    act_s = _until(terms, np.minimum(grid, leaves[:, None]))
    alive = _alive(terms, leaves[:, None])[:, 0]
    gone = leaves < DAY_S
    left_s = DAY_S - leaves
    spare_pu = -np.expm1(np.log1p(-terms.spare_day_pu) * left_s / DAY_S)
    fails_s = terms.usual_s + terms.notice_s + terms.restart_s + terms.queue_s
    planned = terms.job_gpus * (terms.pays_s + spare_pu * fails_s)
    out_s = terms.sure_pu * np.minimum(terms.repair_s, left_s)
    out_s = out_s + (1.0 - terms.sure_pu) * np.minimum(terms.test_s, left_s)
    planned = planned + terms.node_gpus * terms.idle_pu * out_s
    act_s = act_s + np.where(gone, alive * planned, 0.0)
    spare_fails = np.where(gone, alive * spare_pu, 0.0)
    end = _alive(terms, np.full((len(leaves), 1), DAY_S))[:, 0]
    use = np.where(gone, np.maximum(terms.wait_use_pu, terms.act_use_pu), terms.wait_use_pu)
    return OptionOutcome(
        1.0 - alive + spare_fails, 1.0 - end, act_s / HOUR_S, wait_s / HOUR_S, use, terms.wait_use_pu
    )


def _alive(terms: OutcomeTerms, at_s: F64) -> F64:
    """Return the probability to survive until then, [k, m]: one rate for the first hour, another for the
    rest."""
    day = -np.log1p(-np.clip(terms.day_pu, 0.0, MOST_PU))
    hour = np.where(
        np.isnan(terms.hour_pu),
        day * HOUR_S / DAY_S,
        -np.log1p(-np.clip(np.nan_to_num(terms.hour_pu), 0.0, MOST_PU)),
    )
    day = np.where(np.isnan(day), hour * np.nan, np.maximum(day, hour))
    rest = (day - hour) / (DAY_S - HOUR_S)
    early = np.minimum(at_s, HOUR_S)
    out: F64 = np.exp(-(hour[:, None] / HOUR_S * early + rest[:, None] * (at_s - early)))
    return out


def _until(terms: OutcomeTerms, edges: F64) -> F64:
    """Return the expected GPU-seconds lost to failures within the steps between these edges [k, m] -> [k]."""
    alive = _alive(terms, edges)
    fails = alive[:, :-1] - alive[:, 1:]
    span = np.diff(edges, axis=1)
    work = np.diff(_worked(terms, edges), axis=1)
    lost_s = np.where(span > 0.0, work / np.where(span > 0.0, span, 1.0), 0.0)
    middle = 0.5 * (edges[:, 1:] + edges[:, :-1])
    pays = lost_s + (terms.notice_s + terms.restart_s + terms.queue_s)[:, None]
    out_s = np.minimum(terms.repair_s[:, None], DAY_S - middle)
    node = (terms.node_gpus * terms.idle_pu)[:, None] * out_s
    out: F64 = (fails * (terms.job_gpus[:, None] * pays + node)).sum(axis=1)
    return out


def _worked(terms: OutcomeTerms, at_s: F64) -> F64:
    """Return the integral from now to then of the work that a failure would lose [k, m], s * s.

    It grows with time, and falls to the length of a save each time that one becomes durable.
    """
    first = (terms.next_s + terms.durable_s)[:, None]
    known = np.isfinite(first)
    first = np.where(known, first, np.inf)
    rise = np.minimum(at_s, first)
    before = terms.lost_s[:, None] * rise + 0.5 * rise * rise
    period = np.maximum(terms.period_s, 1.0)[:, None]
    since = np.maximum(at_s - np.where(known, first, 0.0), 0.0)
    turns = np.floor(since / period)
    rest = since - turns * period
    after = terms.durable_s[:, None] * since + 0.5 * (turns * period * period + rest * rest)
    return np.where(known, before + after, terms.usual_s[:, None] * at_s)
