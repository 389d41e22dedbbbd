"""Staggered saves: shifts each job's next durable save a little, so that saves do not collide.

A round is the time from one durable save to the next. Once in a round, a job's interval is made shorter or
longer by as much as the calendar asks for, within what the plan loses by it. Saves ahead of trouble are never
moved: they are requested by themselves, and a job that is asked for one keeps its interval.
"""

from __future__ import annotations

import numpy as np

from policies.checkpointing.calendar import BIN_S, GivenSaves, PlannedSave, SaveCalendar
from policies.checkpointing.costs import JobBatch, storage_of
from twin.catalogue import F64, I64, NS
from twin.contracts import Memory, View
from twin.site import Site

HORIZON_S = 3600.0  # saves beyond it get their time later. source: estimate
LEAD_S = 60.0  # advice takes this long to reach a job: looks at a folder, polls. source: estimate
MOST_MOVED = 50  # saves that get their time in one look; a fleet of 10,000 jobs has some thirty
MOST_SHIFT_PU = 0.25  # of an interval, by which a save is moved. source: estimate
DIP_PU = 0.7  # of its nodes' power, which a job that saves does not draw. source: estimate


def stagger_saves(
    view: View, batch: JobBatch, by_queue: dict[str, int], ramp_pu: float, kept: Memory
) -> None:
    """Give the saves of the coming hour their times, and make the intervals of this round of them."""
    slots, jobs, now_ns = batch.slots, view.jobs, view.now_ns
    anchor_ns = np.maximum(jobs.saved_ns[slots], jobs.recovered_ns[slots])
    over = (anchor_ns != kept["anchor_ns"][slots]) | (kept["save_since_s"][slots] > 0)
    kept["round_s"][slots[over]] = 0.0
    kept["slot_ns"][slots[over]] = 0
    kept["anchor_ns"][slots] = anchor_ns
    wanted_s = np.where(kept["interval_s"][slots] > 0, kept["interval_s"][slots], batch.kept_s)
    block_s = batch.terms_now.block_s
    busy_s = block_s + batch.terms_now.flush_s
    # A round begins with the block of its save, or with training where the job recovered
    blocked_ns = np.round(batch.terms.block_s * NS)
    begin_ns = anchor_ns + np.where(jobs.saved_ns[slots] >= anchor_ns, blocked_ns, 0.0)
    due_s = (begin_ns - now_ns) / NS + wanted_s
    due_s = np.where(kept["slot_ns"][slots] > 0, (kept["slot_ns"][slots] - now_ns) / NS, due_s)
    coming = (anchor_ns > 0) & (wanted_s > 0) & (due_s > -busy_s) & (due_s < HORIZON_S)
    at = np.flatnonzero(coming)
    moved = (kept["slot_ns"][slots] == 0) & (kept["save_since_s"][slots] == 0) & (due_s > LEAD_S)
    if not moved[at].any():
        return
    entries = _PowerEntries(view, batch, at)
    limit_w = _ramp_limit_w(view, entries, ramp_pu)
    storage = storage_of(view, slots, by_queue)
    shift_s = MOST_SHIFT_PU * wanted_s
    floored = wanted_s <= kept["least_s"][slots] * 1.02  # storage drains no more: no round gets shorter

    def planned(i: int) -> PlannedSave:
        early_s = 0.0 if floored[i] else float(shift_s[i])
        feeders, watts = entries.of(i)
        return PlannedSave(
            due_s=float(due_s[i]),
            early_s=early_s,
            late_s=float(shift_s[i]),
            interval_s=float(wanted_s[i]),
            block_s=float(block_s[i]),
            busy_s=float(busy_s[i]),
            storage=int(storage[i]),
            feeders=feeders,
            watts=watts,
        )

    calendar = SaveCalendar(limit_w, view.site.sizes["storage"], HORIZON_S + MOST_SHIFT_PU * HORIZON_S)
    calendar.add(entries.subset(at[~moved[at]], (due_s, wanted_s, block_s, busy_s), storage))
    new = at[moved[at]]
    for i in new[np.argsort(due_s[new], kind="stable")][:MOST_MOVED].tolist():
        save = planned(i)
        at_s = calendar.place(save, LEAD_S)
        slot = int(slots[i])
        kept["slot_ns"][slot] = now_ns + round(at_s * NS)
        if abs(at_s - save.due_s) >= BIN_S:
            kept["round_s"][slot] = max(1.0, round(wanted_s[i] + at_s - save.due_s))
            kept["interval_s"][slot] = wanted_s[i]  # which the job has had from itself so far


class _PowerEntries:
    """Watts of some jobs at each feeder above them that fall and rise with a save: DIP_PU of their draw."""

    def __init__(self, view: View, batch: JobBatch, at: I64) -> None:
        site = view.site
        self.n_feeder = site.sizes["feeder"]
        held = batch.held
        node_w = _node_power_w(view)
        inside = np.zeros(len(held.size), np.bool_)
        inside[at] = True
        use = inside[held.job]
        rack = site.rack_of_node[held.node[use]]
        start, feeder, share = site.derived("save_feeders", lambda: _feeders_above(site))
        count = start[rack + 1] - start[rack]
        job = np.repeat(held.job[use], count)
        first = np.repeat(start[rack], count)
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        place = first + within
        watt = np.repeat(node_w[held.node[use]], count) * share[place] * DIP_PU
        key, where = np.unique(job * max(self.n_feeder, 1) + feeder[place], return_inverse=True)
        self.watt: F64 = np.bincount(where, watt, minlength=len(key)).astype(np.float64)
        self.job: I64 = key // max(self.n_feeder, 1)
        self.feeder: I64 = key % max(self.n_feeder, 1)

    def of(self, job: int) -> tuple[I64, F64]:
        """(feeders, watts) of a job in its place."""
        low, high = np.searchsorted(self.job, (job, job + 1))
        return self.feeder[low:high], self.watt[low:high]

    def subset(self, at: I64, times_s: tuple[F64, F64, F64, F64], storage: I64) -> GivenSaves:
        """The saves at these places, whose columns are given for all."""
        position = np.full(len(storage), -1)
        position[at] = np.arange(len(at))
        use = position[self.job] >= 0
        entry = position[self.job[use]].astype(np.int64)
        due_s, interval_s, block_s, busy_s = (column[at] for column in times_s)
        return GivenSaves(
            at_s=due_s,
            interval_s=interval_s,
            block_s=block_s,
            busy_s=busy_s,
            storage=storage[at],
            entry=entry,
            feeder=self.feeder[use],
            watts=self.watt[use],
        )


def _feeders_above(site: Site) -> tuple[I64, I64, F64]:
    """Of each rack [start, feeder, share]: the feeders above it, and the share of its power on each."""
    start, feeders, shares = [0], list[int](), list[float]()
    for rack in range(site.sizes["rack"]):
        direct = site.feeders_of_rack.of_row(rack).tolist()
        found: dict[int, float] = {}
        for feeder in direct:
            seen = 0
            while feeder >= 0 and seen < 64:
                found[feeder] = found.get(feeder, 0.0) + 1.0 / len(direct)
                feeder, seen = int(site.parent_of_feeder[feeder]), seen + 1
        feeders += found
        shares += found.values()
        start.append(len(feeders))
    return np.array(start, np.int64), np.array(feeders, np.int64), np.array(shares, np.float64)


def _node_power_w(view: View) -> F64:
    """Power of each node [n_node]: its reading, or else its share of its rack's draw or maximum."""
    site = view.site
    own = view.believed("node.power_w").astype(np.float64)
    of_rack = view.believed("rack.power_w").astype(np.float64)
    of_rack = np.where(np.isfinite(of_rack), of_rack, np.nan_to_num(site.design.rack_max_w))
    part = of_rack / np.maximum(np.diff(site.node_start_of_rack), 1)
    node = np.where(np.isfinite(own), own, part[site.rack_of_node])
    out: F64 = np.where(np.isfinite(node), np.maximum(node, 0.0), 0.0)
    return out


def _ramp_limit_w(view: View, entries: _PowerEntries, ramp_pu: float) -> F64:
    """Ramp limit of each feeder [n_feeder]: a share of its budget, or else of the jobs' draw."""
    drawn = np.bincount(entries.feeder, entries.watt, minlength=entries.n_feeder) / DIP_PU
    budget = view.budget_w()
    out: F64 = ramp_pu * np.where(np.isfinite(budget) & (budget > 0), budget, drawn)
    return out
