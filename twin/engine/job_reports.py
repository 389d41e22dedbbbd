"""Job reports: starts and ends, the cost of checkpoints, the age of the last checkpoint.

A reported duration is a measurement and may be false. The estimate is the median of the last few reports, so
that one false report does not move it far. A reported interval holds until the next report. A report that is
repeated, late or out of order never overrides a newer one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twin.catalogue import NS, signal_of
from twin.control import Arbiter
from twin.site import Site
from twin.telemetry import DURATIONS, STATED_FIELDS, JobSlots, State, TableUpdate, events as ev, start_fault

MAX_NODES = 100_000  # of one job
MAX_COST_S, MAX_INTERVAL_S = 1e6, 1e7  # as the catalogue bounds them
MAX_PROGRESS_PER_S = 1e6  # likewise
MAX_OFF_S = (
    8 * 86_400.0
)  # of an instant from now: a day more than a wire lets a report wait. source: estimate
MAX_HELD_S = 366 * 86_400.0  # the oldest state that a running job may hold. source: estimate
# Kinds of durations, by tier and the field of the report that states it
_ROW_OF = {
    ("durable", "save_s"): "checkpoint_save_s",
    ("durable", "block_s"): "checkpoint_block_s",
    ("durable", "flush_s"): "checkpoint_flush_s",
    ("durable", "restart_s"): "checkpoint_restart_s",
    ("memory", "block_s"): "checkpoint_local_block_s",
    ("memory", "restart_s"): "checkpoint_local_restart_s",
}
_LAG = len(DURATIONS)  # the row of how late reports come, by the job's clock


def job_started(
    event: ev.JobStarted, site: Site, state: State, jobs: JobSlots, count: Callable[[str, int], None]
) -> str | None:
    """Assign slot and nodes to a job; return a reason if it gets none. `count` counts unusual events."""
    if not (0 <= event.floor_w < np.inf and abs(event.priority) < 2**31):
        return f"expected a floor >= 0 and a priority of 32 bits, got {event.floor_w} and {event.priority}"
    for name in STATED_FIELDS:
        if not 0 <= getattr(event, name) < np.inf:
            return f"expected {name} >= 0, got {getattr(event, name)}"
    known = jobs.slot_of.get(event.job)
    interval_s = 0.0 if known is None else float(jobs.checkpoint_interval_s[known])
    found = [site.entity("node", name) for name in event.nodes[:MAX_NODES]]
    nodes = [i for i in found if i is not None]
    slot = jobs.start(event, nodes, len(found) - len(nodes), state.now_ns)
    if slot is None:
        return f"all {jobs.n} job slots are taken or resting"
    if known is None:  # reports and advice of the slot's last job are not this one's
        state.tables["job"].replace(slot)
    elif jobs.checkpoint_told_ns[slot] and not event.checkpoint_interval_s:
        jobs.checkpoint_interval_s[slot] = (
            interval_s  # it said so itself, and whoever started it does not know
        )
    for name in DURATIONS:
        said_s = getattr(event, name, 0.0)
        if known is None and said_s > 0.0:
            _measure(jobs, slot, DURATIONS.index(name), said_s)
        elif known is not None and jobs.checkpoint_told_ns[slot]:
            getattr(jobs, name)[slot] = _estimate(jobs, slot, DURATIONS.index(name), said_s)
    if start_fault(event, state.now_ns):
        count("implausible_starts", 1)
    if len(nodes) < len(event.nodes):  # it runs all the same, on what we do not see as well
        count("unknown_nodes", len(event.nodes) - len(nodes))
    return None


def job_ended(event: ev.JobEnded, jobs: JobSlots, arbiter: Arbiter, now_ns: int) -> str | None:
    """Free a job's slot and its leases; return a reason if that is not possible."""
    if jobs.unslotted.pop(event.job, None) is not None:
        return None
    slot = jobs.end(event, now_ns)
    if slot is None:
        return f"no job {event.job} runs"
    arbiter.forget("job", slot)
    return None


def checkpoint_reported(event: ev.CheckpointTold, jobs: JobSlots, state: State) -> str | None:
    """Apply a job's report of its checkpoints; return a reason if it is refused."""
    slot = jobs.slot_of.get(event.job)
    if slot is None:
        return f"no job {event.job[:100]} has a slot"
    if wrong := _nonsense(event, state.now_ns):
        return wrong
    tier = int(event.tier == "memory")
    at_ns = event.at_ns or state.now_ns
    if at_ns == jobs.checkpoint_at_ns[slot, tier]:
        return "heard already"
    # The least delay of a job's reports is the offset of its clock behind ours
    _measure(jobs, slot, _LAG, max((state.now_ns - at_ns) / NS, 0.0))
    shift_ns = min(round(float(np.nanmin(jobs.checkpoint_past[slot, _LAG])) * NS), state.now_ns - at_ns)
    was_ahead = jobs.checkpoint_at_ns[slot].max() > state.now_ns >= at_ns
    if was_ahead or at_ns + shift_ns > jobs.checkpoint_told_ns[slot] > 0:  # it has been set
        jobs.checkpoint_at_ns[slot] = np.minimum(jobs.checkpoint_at_ns[slot], at_ns - 1)
        jobs.recovered_ns[slot] = min(int(jobs.recovered_ns[slot]), at_ns - 1)
    newest = bool(at_ns > jobs.checkpoint_at_ns[slot].max())
    newest_of_tier = bool(at_ns > jobs.checkpoint_at_ns[slot, tier])
    recovered = event.restart_s > 0.0 and at_ns > jobs.recovered_ns[slot]
    jobs.checkpoint_at_ns[slot, tier] = max(at_ns, int(jobs.checkpoint_at_ns[slot, tier]))
    at_ns = at_ns + shift_ns
    jobs.checkpoint_told_ns[slot] = max(at_ns, int(jobs.checkpoint_told_ns[slot]))
    for field in ("save_s", "block_s", "flush_s", "restart_s"):
        name, said_s = _ROW_OF.get((event.tier, field)), getattr(event, field)
        if name is not None and said_s > 0.0:
            row = DURATIONS.index(name)
            getattr(jobs, name)[slot] = _measure(jobs, slot, row, said_s)
    if event.interval_s > 0.0 and newest_of_tier:
        kept = jobs.checkpoint_local_interval_s if tier else jobs.checkpoint_interval_s
        kept[slot] = event.interval_s
    if event.began_ns:
        column = jobs.saved_local_ns if tier else jobs.saved_ns
        began_ns = event.began_ns + shift_ns
        # After a recovery it holds what it came back to; else the newest that it ever reported
        column[slot] = began_ns if recovered and newest else max(began_ns, int(column[slot]))
    if recovered:
        jobs.recovered_ns[slot] = event.at_ns or state.now_ns
        # From the durable tier although there is one in memory: a node was lost, which others count
        jobs.recoveries[slot] += bool(tier or not jobs.saved_local_ns[slot])
    if newest:
        pace = {"progress_per_s": event.progress_per_s, "remaining_s": event.remaining_s}
        _latch(state, slot, at_ns, {name: value for name, value in pace.items() if value > 0.0})
    if newest_of_tier and not tier:
        _read(event, slot, state, at_ns)
    elif newest_of_tier and event.interval_s > 0.0:
        _latch(state, slot, at_ns, {"checkpoint_local_interval_readback_s": event.interval_s})
    return None


def _nonsense(event: ev.CheckpointTold, now_ns: int) -> str | None:
    """Reason to refuse a report; None if it is plausible."""
    durations = {name: getattr(event, name) for name in ("save_s", "block_s", "flush_s", "restart_s")}
    spans = {"interval_s": event.interval_s, "remaining_s": event.remaining_s}
    for name, value in (durations | spans).items():
        most = MAX_INTERVAL_S if name in spans else MAX_COST_S
        if not 0.0 <= value <= most:
            return f"expected {name} of 0 (not said) to {most:g} s, got {value}"
    if not 0.0 <= event.progress_per_s <= MAX_PROGRESS_PER_S:
        return (
            f"expected progress_per_s of 0 (not said) to {MAX_PROGRESS_PER_S:g}, got {event.progress_per_s}"
        )
    if not (event.began_ns or event.progress_per_s or any((durations | spans).values())):
        return "says nothing; expected a duration, an interval, its progress or when the save began"
    at_ns = event.at_ns or now_ns
    off_s = (at_ns - now_ns) / NS
    if not abs(off_s) <= MAX_OFF_S:
        return f"its clock reads {off_s:.0f} s from ours; expected at most {MAX_OFF_S:.0f} s: check its host"
    held_s = (at_ns - event.began_ns) / NS
    if event.began_ns and not 0.0 <= held_s <= MAX_HELD_S:
        return f"holds a state of {held_s:.0f} s ago; expected 0 to {MAX_HELD_S:.0f} s: check its clock"
    return None


def _measure(jobs: JobSlots, slot: int, row: int, said_s: float) -> float:
    """Add a measurement in place of the oldest, and return the new estimate."""
    past = jobs.checkpoint_past[slot, row]
    past[:-1] = past[1:]
    past[-1] = said_s
    return said_s if row == _LAG else _estimate(jobs, slot, row, said_s)


def _estimate(jobs: JobSlots, slot: int, row: int, otherwise: float) -> float:
    """Return the median; for an even number, the middle value nearer to the former estimate."""
    past = jobs.checkpoint_past[slot, row]
    known = np.sort(past[np.isfinite(past)])
    if not len(known):
        return otherwise
    middle = known[(len(known) - 1) // 2 : len(known) // 2 + 1]
    before = float(getattr(jobs, DURATIONS[row])[slot])
    return float(middle[np.argmin(np.abs(middle - before))]) if before > 0.0 else float(middle[0])


def _read(event: ev.CheckpointTold, slot: int, state: State, at_ns: int) -> None:
    """Turn a durable report into readings of the job."""
    columns = {"checkpoint_save_s": event.save_s, "checkpoint_flush_s": event.flush_s,
            "checkpoint_interval_readback_s": event.interval_s}  # fmt: skip
    readings = {name: value for name, value in columns.items() if value > 0.0}
    if event.began_ns:
        readings["checkpoint_age_s"] = ((event.at_ns or state.now_ns) - event.began_ns) / NS
    _latch(state, slot, at_ns, readings)


def _latch(state: State, slot: int, at_ns: int, readings: dict[str, float]) -> None:
    """Store readings of these signals of a job with good quality, unless a newer reading exists."""
    table = state.tables["job"]
    rows, steps = [], []
    for name, value in readings.items():
        signal = signal_of(f"job.{name}")
        if table.t_ns[table.partition.group_of_row[signal.row], slot] <= at_ns:
            rows.append(signal.row)
            steps.append(round(value / signal.quantum))
    order = np.argsort(rows)
    if rows:
        entity, t_ns = np.array([slot], np.int32), np.array([at_ns], np.int64)
        q = np.array(steps, np.int32)[order][:, None]
        table.apply_update(TableUpdate("job", np.array(rows, np.int32)[order], entity, q, t_ns), at_ns)
