"""checkpoint: how often each training job should save, by the live failure rate of the nodes that it holds,
and which should save now, ahead of what is about to interrupt them.

An interval, durable or in memory, is proposed where it promises a job more than LEAST_GAIN of its time over
the one in force, so that nobody is nagged: the optimum is flat. A save now is requested once for each
threat, with a deadline; that it runs out is no failure. Jobs of other kinds, and those that never
said anything of checkpoints, are left alone. With no forecast nothing new is proposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from policies.checkpointing.contention import alone_s, shared_s
from policies.checkpointing.costs import (
    JobBatch,
    newest_s,
    read_ratios,
    reports_checkpoints,
    restarts_now,
    save_terms,
    storage_left,
    storage_loads,
    storage_of,
    takes_saves,
)
from policies.checkpointing.early_save import DRAIN, SaveAssessment, assess_saves
from policies.checkpointing.explain import TOPICS, explain
from policies.checkpointing.hazard import interruption_rates, job_nodes
from policies.checkpointing.plan import IntervalPlan, SaveTerms, best_plan, ettr_at, least_interval_s
from policies.checkpointing.stagger import stagger_saves
from policies.checkpointing.storage_traffic import (
    COLUMNS as TRAFFIC,
    JOB_COLUMNS,
    StorageTraffic,
    apart_pu,
    bound_start,
    follow_traffic,
    lately_pu,
    learn_stretch,
    learn_time,
    of_jobs,
    others_load_pu,
    start_s,
    stretch_pu,
)
from policies.checkpointing.texts import INTERVAL, LOCAL, SINCE, proposals
from twin.catalogue import F64, I32, I64, NS, Bool, ContractError
from twin.contracts import Columns, ExplainRequest, Explanation, Memory, Proposal, Topic, View
from twin.telemetry import KINDS, ColumnSpec

TRAINING = KINDS.index("training")
# A job receives new advice where that promises this much more of its time (1 = all of it). source: estimate;
# the optimum is flat, so that this is a quarter of the interval or so
LEAST_GAIN = 0.001
LONG_S, LONG_GAIN = 6 * 3600.0, 0.0005  # after so long, less is enough. source: estimate
CHANGE_S, PRESSING_GAIN = 600.0, 0.01  # sooner than this only for that much more. source: estimate
SAVE_CHECK_S = 5.0  # between looks at what threatens; diagnosis and health are no faster
PLAN_CHECK_S = 60.0  # between looks at a job's interval; forecasts come as often
MOST_PLANNED = 1000  # jobs planned in one tick: 10,000 take less than a minute
PLAN_EXPIRES_S = 86_400.0  # after so long without a plan an interval is let go. source: estimate
MOST_S = 86_400.0  # nobody is advised to save more rarely than that. source: estimate
# Between two asks to save now of one job, and after one that it did not answer. source: estimate
SPACING_S, UNANSWERED_S = 300.0, 3600.0
REQUEST_S = 900.0  # a save that did not begin by then is requested no more. source: estimate
QUEUE_S = 600.0  # of flushes that may be requested at once, one after the other. source: estimate
# The most that one job's save takes of that, and the longest wait for it: a job that needs longer, or
# says so, must not keep all the others from saving. source: estimate
MOST_QUEUED_S, MOST_AWAITED_S = 0.5 * QUEUE_S, 3600.0
ROUND_S = ((600.0, 5.0), (3600.0, 15.0), (np.inf, 60.0))  # an interval up to this is a multiple of that


class Checkpoint:
    """Proposes intervals between saves, and saves ahead of trouble."""

    name: ClassVar[str] = "checkpoint"
    controls: ClassVar[tuple[str, ...]] = (INTERVAL, SINCE, LOCAL)
    rank: ClassVar[int] = 30
    period_s: ClassVar[float] = 1.0  # a job that ended is let go in the same tick
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns(
        job={
            "generation": "i4",
            "checked_ns": ColumnSpec("i8", was="looked_ns"),
            "planned_ns": "i8",
            "changed_ns": "i8",
            "interval_s": "f8",
            "least_s": "f8",
            "previous_s": ColumnSpec("f8", was="was_s"),
            "mttf_s": "f8",
            "block_s": "f8",
            "source": "i4",
            "ettr_pu": "f8",
            "gain_pu": "f8",
            "local_s": "f8",
            "nodes": "i4",
            "save_since_s": ColumnSpec("f8", was="since_s"),
            "save_deadline_ns": ColumnSpec("i8", was="until_ns"),
            "requested_ns": ColumnSpec("i8", was="asked_ns"),
            "answered_threats": ColumnSpec("i8", was="answered"),
            "threat": ColumnSpec("i8", was="why"),
            "chance_pu": "f8",
            "lost_s": "f8",
            "cost_s": "f8",
            "round_s": "f8",
            "slot_ns": "i8",
            "anchor_ns": "i8",
            "restarted_ns": "i8",
            "restart_load_pu": "f8",
            "restart_s": "f8",
            **JOB_COLUMNS,
        },
        storage=TRAFFIC,
    )

    topics: ClassVar[tuple[Topic, ...]] = TOPICS

    def __init__(
        self,
        silent_jobs: bool = False,
        stagger: bool = True,
        ramp_pu: float = 0.1,
        storage_of_queue: dict[str, str] | None = None,
    ) -> None:
        """`silent_jobs`: also for training jobs that never said anything of checkpoints.

        `stagger`: saves are moved so that they do not meet. `ramp_pu`: the share of a feeder's budget
        that they may take away or bring back within 10 s. `storage_of_queue`: file systems by queue.
        """
        for name, given in (("silent_jobs", silent_jobs), ("stagger", stagger)):
            if not isinstance(given, bool):
                raise ContractError(f"{name}: expected true or false, got {given!r}")
        if isinstance(ramp_pu, bool) or not isinstance(ramp_pu, int | float) or not 0.001 <= ramp_pu <= 1.0:
            raise ContractError(f"ramp_pu: expected a number from 0.001 to 1, got {ramp_pu!r}")
        given_names = storage_of_queue or {}
        if not isinstance(given_names, dict) or not all(
            isinstance(x, str) for pair in given_names.items() for x in pair
        ):
            raise ContractError("storage_of_queue: expected names of file systems by queue: {train: scratch}")
        self.silent_jobs, self.stagger, self.ramp_pu = silent_jobs, stagger, float(ramp_pu)
        self.storage_of_queue = dict(given_names)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Return intervals and immediate saves for training jobs, with their figures."""
        kept = {name: column.copy() for name, column in memory.items()}
        jobs = view.jobs
        mine = jobs.alive & (jobs.kind == TRAINING)
        gone = ~mine | (kept["generation"] != jobs.generation)
        by_job = {name: column for name, column in kept.items() if name not in TRAFFIC}
        for column in by_job.values():
            column[gone] = 0
        traffic = follow_traffic(view, kept)
        slots = np.flatnonzero(mine).astype(np.int32)
        kept["generation"][slots] = jobs.generation[slots]
        if not self.silent_jobs:
            slots = slots[reports_checkpoints(view, slots)]
        if len(slots) and view.now_ns - kept["checked_ns"][slots].min() >= round(SAVE_CHECK_S * NS):
            kept["checked_ns"][slots] = view.now_ns
            batch = _batch_of(view, slots, kept)
            by_queue = self._storage_indices(view)
            storage = storage_of(view, slots, by_queue)
            batch = _with_load(view, batch, storage, (traffic, self.stagger), kept)
            left = storage_left(view, _storage_duty(batch), traffic)
            takes = takes_saves(view, storage)
            _plan_intervals(view, batch, (left, takes), kept)
            _request_saves(view, batch, takes, kept)
            if self.stagger:
                stagger_saves(view, batch, by_queue, self.ramp_pu, kept)
            else:
                kept["round_s"][slots], kept["slot_ns"][slots] = 0.0, 0
        return proposals(view, by_job), kept

    def _storage_indices(self, view: View) -> dict[str, int]:
        found = {queue: view.site.entity("storage", name) for queue, name in self.storage_of_queue.items()}
        return {queue: index for queue, index in found.items() if index is not None}

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """Return the intervals of training jobs, in force and best; see `topics`."""
        return explain(view, memory, request)


def _batch_of(view: View, slots: I32, kept: Memory) -> JobBatch:
    nodes = job_nodes(view, slots)
    rates = interruption_rates(view, nodes)
    terms, source = save_terms(view, slots, nodes, rates)
    reported_s, own = view.jobs.checkpoint_interval_s[slots], kept["interval_s"][slots]
    proposed = np.where(own > 0, own, reported_s)
    local = np.where(
        kept["local_s"][slots] > 0, kept["local_s"][slots], view.jobs.checkpoint_local_interval_s[slots]
    )
    return JobBatch(
        slots, nodes, rates, terms, source, proposed, np.where(reported_s > 0, reported_s, own), local
    )


def _with_load(
    view: View, batch: JobBatch, storage: I64, counted: tuple[StorageTraffic, bool], kept: Memory
) -> JobBatch:
    """Return the terms with restarts and saves at the present storage load; notes the load at each of
    them.

    The load is by counters of the file system, where they are known, else by what jobs report of their saves.
    `counted`: the traffic, and whether saves are kept apart, so that they meet none of each other.
    """
    n_storage, slots, jobs, (traffic, apart) = view.site.sizes["storage"], batch.slots, view.jobs, counted
    if not n_storage:
        return batch
    duty = _save_duty(batch)
    stated_pu = storage_loads(duty, storage, n_storage)
    saved_ns, recovered_ns = jobs.saved_ns[slots], jobs.recovered_ns[slots]
    ratio = read_ratios(view, storage, traffic)
    recovered = recovered_ns != kept["restarted_ns"][slots]
    kept["restart_load_pu"][slots[recovered]] = stated_pu[recovered]
    then_pu = np.where(recovered_ns > 0, kept["restart_load_pu"][slots], 0.0)
    restart_s = restarts_now(view, slots, batch.terms, then_pu, stated_pu, ratio)
    # The counters still contain the job's own reads of its last restart
    known = of_jobs(traffic.known, storage, False)
    ago_s = np.where(recovered_ns > 0, (view.now_ns - recovered_ns) / NS, np.inf)
    by_all = of_jobs(traffic.busy_pu, storage, 0.0) - lately_pu(kept["alone_s"][slots] * ratio, ago_s)
    load_pu = others_load_pu(np.maximum(by_all, 0.0), duty)
    missed_pu = stated_pu * apart_pu(np.clip(by_all, 0.0, 1.0)) if apart else 0.0
    save_pu = others_load_pu(np.maximum(by_all, 0.0), duty + missed_pu)
    save_s = newest_s(view, slots, "checkpoint_flush_s", "checkpoint_save_s", "checkpoint_block_s")
    new = known & (saved_ns != kept["save_ns"][slots]) & ~recovered & np.isfinite(save_s)
    informative = new & (kept["alone_weight"][slots] > 0)
    expected_s = shared_s(kept["alone_s"][slots], save_pu)
    learn_stretch(kept, storage[informative], save_s[informative], expected_s[informative])
    learn_time(kept, "alone", slots[new], alone_s(save_s, save_pu)[new], save_pu[new])
    longer = of_jobs(stretch_pu(kept), storage, 1.0)
    read_s = shared_s(kept["alone_s"][slots] * ratio, load_pu) * longer
    learned = known & (kept["alone_weight"][slots] > 0)
    took_s = newest_s(view, slots, "checkpoint_restart_s")
    new = learned & recovered & np.isfinite(took_s)
    learn_time(kept, "start", slots[new], np.maximum(took_s - read_s, 0.0)[new], load_pu[new])
    bound_start(kept, slots[new], np.maximum(took_s - kept["alone_s"][slots] * ratio, 1e-3)[new])
    kept["restarted_ns"][slots], kept["save_ns"][slots] = recovered_ns, saved_ns
    restart_s = np.where(
        learned & (kept["start_weight"][slots] > 0), start_s(kept, slots) + read_s, restart_s
    )
    kept["restart_s"][slots] = restart_s
    usual_s = np.maximum(batch.terms.block_s + batch.terms.flush_s, 1e-3)
    return replace(
        batch,
        terms=batch.terms._replace(restart_s=restart_s),
        slower=np.where(learned, shared_s(kept["alone_s"][slots], save_pu) * longer / usual_s, 1.0),
    )


def _save_duty(batch: JobBatch) -> F64:
    """Return the share of time that each job's saves keep storage busy, at its present interval."""
    busy_s = batch.terms.block_s + batch.terms.flush_s
    share = busy_s / np.maximum(batch.kept_s + batch.terms.block_s, busy_s)
    return np.where(batch.kept_s > 0, share, 0.0)


def _storage_duty(batch: JobBatch) -> float:
    """Return the share of time that saves keep the file system busy, at the present intervals."""
    return float(_save_duty(batch).sum())


def _plan_intervals(view: View, batch: JobBatch, room: tuple[float, Bool], kept: Memory) -> None:
    """Recompute the intervals of the jobs whose last computation is oldest. `room`: the share of time that
    storage has for saves, and the jobs whose storage takes any."""
    now_ns, slots, (left, takes) = view.now_ns, batch.slots, room
    stale = slots[now_ns - kept["planned_ns"][slots] > round(PLAN_EXPIRES_S * NS)]
    kept["interval_s"][stale] = kept["local_s"][stale] = 0.0
    waited_ns = now_ns - kept["planned_ns"][slots]
    known = np.isfinite(batch.rates.per_s)
    due = np.flatnonzero(known & takes & (waited_ns >= round(PLAN_CHECK_S * NS)))
    if not len(due):
        return
    if len(due) > MOST_PLANNED:
        due = np.sort(due[np.argsort(-waited_ns[due], kind="stable")[:MOST_PLANNED]])
    terms = SaveTerms(*(column[due] for column in batch.terms))
    free = best_plan(terms)
    wanted = np.where(batch.proposed_s > 0, batch.proposed_s, MOST_S)
    wanted[due] = np.minimum(np.nan_to_num(free.interval_s, nan=MOST_S), MOST_S)
    busy_s = batch.terms.block_s + batch.terms.flush_s
    storage = np.full(len(slots), 0 if view.site.sizes["storage"] else -1)
    least_s = least_interval_s(busy_s, storage, wanted, left, np.maximum(batch.held.size, 1))[due]
    bound = least_s > free.interval_s
    best = best_plan(terms, least_s) if bound.any() else free
    _change_intervals(view, batch, due, best, least_s, kept)


def _change_intervals(
    view: View, batch: JobBatch, due: np.ndarray, best: IntervalPlan, least_s: F64, kept: Memory
) -> None:
    """Change the proposals to the jobs at the places `due`, where that pays."""
    now_ns, envelope = view.now_ns, view.envelope(INTERVAL)
    slots, terms = batch.slots[due], SaveTerms(*(column[due] for column in batch.terms))
    low, high = envelope.low[slots], np.minimum(envelope.high[slots], MOST_S)
    sound = np.isfinite(best.ettr) & np.isfinite(low) & (low <= high)
    least = np.clip(least_s, low, high)
    interval = np.clip(rounded_interval(best.interval_s, least), low, high)
    now_s, now_local_s = batch.proposed_s[due], batch.local_s[due]
    local = _memory_intervals(view, slots, best, interval)
    worth = ettr_at(terms, interval, np.where(local > 0, local, best.local_interval_s))
    # A job that never stated how often it saves to memory is taken to do its best: it is advised so once
    before = ettr_at(terms, now_s, np.where(now_local_s > 0, now_local_s, np.nan))
    gain = np.where(now_s > 0, worth - before, worth)
    rested_s = (now_ns - kept["changed_ns"][slots]) / NS
    never = kept["changed_ns"][slots] == 0
    enough = (gain >= LEAST_GAIN) & (never | (rested_s >= CHANGE_S) | (gain >= PRESSING_GAIN))
    enough |= ~never & (rested_s >= LONG_S) & (gain >= LONG_GAIN)
    # An interval that storage cannot drain is too short, whatever else it may promise
    enough |= (now_s > 0) & (now_s < 0.98 * least) & (never | (rested_s >= CHANGE_S))
    new = (now_s <= 0) | (local > 0) & (kept["local_s"][slots] <= 0)
    other = (interval != kept["interval_s"][slots]) | (local != kept["local_s"][slots])
    change = sound & (new | enough) & other
    kept["planned_ns"][slots] = now_ns
    fresh = {
        "changed_ns": np.full(len(slots), now_ns),
        "interval_s": interval,
        "least_s": least,
        "previous_s": now_s,
        "mttf_s": 1.0 / np.maximum(terms.hard_per_s + terms.soft_per_s, 1e-12),
        "block_s": terms.block_s,
        "source": batch.source[due],
        "ettr_pu": worth,
        "gain_pu": np.where(now_s > 0, gain, 0.0),
        "local_s": local,
        "nodes": batch.held.size[due],
    }
    for name, column in fresh.items():
        kept[name][slots[change]] = column[change]
    # A round was moved by the interval before; by the new one its save is due at another time
    kept["round_s"][slots[change]] = 0.0
    kept["slot_ns"][slots[change]] = 0


def _memory_intervals(view: View, slots: I32, best: IntervalPlan, interval: F64) -> F64:
    """Return the intervals between saves to memory [m], rounded; 0: no such tier, or no use of it.

    Rounded up, so that the last of them falls together with the durable save, and not just before it.
    """
    envelope = view.envelope(LOCAL)
    low, high = envelope.low[slots], envelope.high[slots]
    with np.errstate(invalid="ignore"):
        parts = np.maximum(np.rint(best.interval_s / best.local_interval_s), 1.0)
        local = np.clip(np.ceil(interval / parts), low, high)
        known = np.isfinite(best.local_interval_s) & np.isfinite(interval) & (low <= high)
    return np.where(known & np.isfinite(local), local, 0.0)


def _request_saves(view: View, batch: JobBatch, takes: Bool, kept: Memory) -> None:
    """End answered and expired requests; create new ones where a save now is worth more than its cost."""
    now_ns, slots, jobs = view.now_ns, batch.slots, view.jobs
    pending = kept["save_since_s"][slots] > 0
    saved = jobs.saved_ns[slots] >= np.round(kept["save_since_s"][slots] * NS)
    over = pending & (saved | (kept["save_deadline_ns"][slots] <= now_ns))
    kept["save_since_s"][slots[over]] = 0.0
    kept["save_deadline_ns"][slots[pending & saved]] = 0  # it listens
    pending &= ~over
    met, wanted_elsewhere = _other_requests(view, batch, pending)
    # The policy that drains requested a save and waited for it: it is the one, and no other is requested
    answered = np.asarray(kept["answered_threats"][slots] | np.where(met, DRAIN, 0), np.int64)
    batch = replace(batch, terms=batch.terms_now)
    w = assess_saves(view, batch, answered)
    kept["answered_threats"][slots] = answered & w.causes  # what is over may threaten anew
    cost_s = batch.terms.block_s + batch.terms.flush_s
    rest_s = np.where(kept["save_deadline_ns"][slots] > 0, UNANSWERED_S, SPACING_S)
    rested = (now_ns - kept["requested_ns"][slots]) / NS >= rest_s
    wanted = np.flatnonzero(w.worth & (w.why > 0) & rested & ~pending & ~wanted_elsewhere & takes)
    if not len(wanted):
        return
    # The most that is at stake first, and no more at once than the file system drains in time
    stake = (w.chance_pu * w.lost_s - w.cost_s) * np.maximum(batch.held.size, 1)
    wanted = wanted[np.argsort(-stake[wanted], kind="stable")]
    if view.site.sizes["storage"]:
        share_s = np.minimum(cost_s, MOST_QUEUED_S)
        queue_s = float(share_s[pending].sum()) + np.cumsum(share_s[wanted])
        room = queue_s <= QUEUE_S
        room[0] |= not pending.any()
        wanted = wanted[room]
    _store_requests(view, slots, np.sort(wanted), w, batch, kept)


def _other_requests(view: View, batch: JobBatch, pending: Bool) -> tuple[Bool, Bool]:
    """Return the jobs [m] that fulfilled a recent save request, and those with a present request of
    others."""
    now_s, wish_s = view.now_ns / NS, view.commanded(SINCE)[batch.slots]
    saved_s = view.jobs.saved_ns[batch.slots] / NS
    lately_s = batch.terms.block_s + batch.terms.flush_s + SPACING_S
    with np.errstate(invalid="ignore"):
        met = (saved_s >= wish_s) & (now_s - saved_s <= lately_s)
        waits = (saved_s < wish_s) & (now_s - wish_s <= lately_s) & ~pending
    return met, waits


def _store_requests(
    view: View, slots: I32, at: np.ndarray, w: SaveAssessment, batch: JobBatch, kept: Memory
) -> None:
    """Store the requests to these jobs, and the reasons."""
    index, now_ns = slots[at], view.now_ns
    durable_s = (batch.terms.block_s + batch.terms.flush_s)[at]
    # A save that is being written counts: it began no longer ago than a save takes
    kept["save_since_s"][index] = np.floor(now_ns / NS - durable_s)
    wait_s = REQUEST_S + np.minimum(durable_s, MOST_AWAITED_S)
    kept["save_deadline_ns"][index] = now_ns + np.round(wait_s * NS).astype(np.int64)
    kept["requested_ns"][index] = now_ns
    kept["answered_threats"][index] |= w.causes[at]
    kept["threat"][index] = w.why[at]
    kept["chance_pu"][index], kept["lost_s"][index], kept["cost_s"][index] = (
        w.chance_pu[at],
        w.lost_s[at],
        w.cost_s[at],
    )
    kept["nodes"][index] = batch.held.size[at]


def rounded_interval(interval_s: F64, least_s: F64) -> F64:
    """Return intervals rounded for people, at least the minimum."""
    step = np.select([interval_s <= most for most, _ in ROUND_S], [s for _, s in ROUND_S], ROUND_S[-1][1])
    near = np.minimum(np.nan_to_num(interval_s, nan=MOST_S, posinf=MOST_S), MOST_S)
    out: F64 = np.maximum(np.maximum(np.rint(near / step), 1.0) * step, np.ceil(least_s))
    return out
