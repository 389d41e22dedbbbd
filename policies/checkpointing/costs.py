"""Save costs: costs of a job's saves and recoveries, measured, else declared, else from a prior.

And what its storage can drain: many jobs flush to one file system, and together they may not ask of it more
than it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.checkpointing.contention import alone_s, restart_under_load_s
from policies.checkpointing.hazard import DAY_S, InterruptionRates, JobNodes
from policies.checkpointing.plan import SaveTerms
from policies.checkpointing.storage_traffic import StorageTraffic, good_readings, of_jobs
from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import View
from twin.telemetry import DURATIONS, watched_ns

# A save of a large job stops it for 10 to 60 s; the upper end. source: domain.md D
PRIOR_BLOCK_S = 60.0
# From a lost node until training goes on. source: domain.md D, the slower of its two cases
PRIOR_RESTART_S = 600.0
# Failures of processes per node and day: 54 of software in 54 days on 2048 nodes of 8 GPUs. It counts as much
# as one failure. source: The Llama 3 Herd of Models, arXiv 2407.21783, table 5
PRIOR_SOFT = 54.0 / (54.0 * 2048.0)
MEASURED, DECLARED, PRIOR = range(3)
SOURCES = ("measured", "as it said", "by a prior")
# Of its time that a file system may be busy with checkpoints. source: estimate
DRAIN_PU = 0.5
LEAST_LEFT_PU = 0.1  # of it is left to checkpoints whatever else goes on. source: estimate
FULL_PU = 0.98  # a save onto a fuller file system may fail and stop the job. source: estimate
DOWN = 2  # storage.health_state


@dataclass(frozen=True, slots=True)
class JobBatch:
    """Jobs of one planning call [m], with the known terms of each."""

    slots: I32
    held: JobNodes
    rates: InterruptionRates
    terms: SaveTerms
    source: np.ndarray
    proposed_s: F64  # interval: as proposed, else as the job says; 0 = unknown
    kept_s: F64  # what it keeps: as it says itself, else as proposed; 0 = unknown
    local_s: F64  # between saves to memory, as proposed, else as the job says; 0 = unknown
    slower: F64 | float = 1.0  # times that a save takes at the load of storage now, of what was measured

    @property
    def terms_now(self) -> SaveTerms:
        """Return the terms of a save that begins now."""
        x = self.terms
        return x._replace(block_s=x.block_s * self.slower, flush_s=x.flush_s * self.slower)


def save_terms(
    view: View, slots: I32, held: JobNodes, rates: InterruptionRates
) -> tuple[SaveTerms, np.ndarray]:
    """Return (known terms of these jobs, source of their save costs [m], a place in SOURCES)."""
    jobs = view.jobs
    block, save = jobs.checkpoint_block_s[slots], jobs.checkpoint_save_s[slots]
    source = np.select(
        [(block > 0) | (save > 0) & (jobs.checkpoint_told_ns[slots] > 0), save > 0],
        [MEASURED, DECLARED],
        PRIOR,
    )
    block_s = np.select([block > 0, save > 0], [block, save], PRIOR_BLOCK_S)
    flush = jobs.checkpoint_flush_s[slots]
    # Both are counted from a save's begin; what counts here is what comes after training went on
    flush_s = np.maximum(np.where(flush > 0, flush, save) - block_s, 0.0)
    restart = jobs.checkpoint_restart_s[slots]
    restart_s = np.where(restart > 0, restart, PRIOR_RESTART_S)
    local = jobs.checkpoint_local_block_s[slots]
    again = jobs.checkpoint_local_restart_s[slots]
    local_block_s = np.where(local > 0, local, np.nan)
    local_restart_s = np.where(local > 0, np.where(again > 0, again, restart_s), np.nan)
    gaps = view.failures().unwatched_ns  # in which its reports were not received
    ran_ns = watched_ns(view.now_ns, gaps) - watched_ns(jobs.started_ns[slots], gaps)
    ran_s = np.maximum(ran_ns / NS, 0.0)
    prior_s = DAY_S / (PRIOR_SOFT * np.maximum(held.size, 1))
    soft = (1.0 + jobs.recoveries[slots]) / (prior_s + ran_s)
    terms = SaveTerms(
        block_s, flush_s, restart_s, local_block_s, local_restart_s, rates.shape, rates.per_s, soft
    )
    return terms, source


def storage_left(view: View, duty_pu: float, traffic: StorageTraffic) -> float:
    """Return the share of time left on the file systems for checkpoints, of all jobs together.

    `duty_pu`: what checkpoints take of it already. Nobody says which job writes where, so all are taken for
    one. What else is written, and what is restored, is known where the site keeps a history of
    `storage.flush_bytes_per_s` and `storage.restore_bytes_per_s`: the mean beside the greatest, as if both
    came out of one purse; else from `traffic`.
    """
    if not view.site.sizes["storage"]:
        return 1.0
    shares = [_busy_share(view, f"storage.{way}_bytes_per_s") for way in ("flush", "restore")]
    if shares == [None, None]:
        other = max(0.0, float(traffic.busy_pu[traffic.known].max(initial=0.0)) - duty_pu)
    else:
        other = max(0.0, (shares[0] or 0.0) - duty_pu) + (shares[1] or 0.0)
    return max(LEAST_LEFT_PU, DRAIN_PU * (1.0 - min(other, 1.0)))


def takes_saves(view: View, storage: I64) -> Bool:
    """Return the jobs [m] whose storage is neither down nor full; where it is not known, none may be."""
    bad = good_readings(view, "storage.health_state") >= DOWN
    bad |= good_readings(view, "storage.used_pu") >= FULL_PU
    out: Bool = ~of_jobs(bad, storage, bool(bad.any())).astype(np.bool_)
    return out


def storage_of(view: View, slots: I32, by_queue: dict[str, int]) -> I64:
    """Return the storage of each job [m]: stated by it, by its queue, or the site's only one; -1 =
    unknown."""
    n, site, jobs = view.site.sizes["storage"], view.site, view.jobs
    known = {"": 0 if n == 1 else -1}  # by what jobs say, and by queue
    out = np.empty(len(slots), np.int64)
    for i, slot in enumerate(slots.tolist()):
        said = jobs.storages[slot]
        if said not in known:
            found = site.entity("storage", said)
            known[said] = known[""] if found is None else found
        out[i] = known[said] if said else by_queue.get(jobs.queues[slot], known[""])
    return out


def storage_loads(busy_pu: F64, storage: I64, n_storage: int) -> F64:
    """Return the share of time that saves of other jobs keep a job's storage busy [m]."""
    known = storage >= 0
    total = np.bincount(storage[known], busy_pu[known], minlength=max(n_storage, 1))
    return np.where(known, np.maximum(total[storage] - busy_pu, 0.0), 0.0)


def read_ratios(view: View, storage: I64, traffic: StorageTraffic) -> F64:
    """Return the ratio of a read to the save of the same bytes [m], by the highest rates seen."""
    ratio = 1.0
    writes, reads = (_greatest(view, f"storage.{way}_bytes_per_s") for way in ("flush", "restore"))
    if writes > 0 and reads > 0:
        ratio = writes / reads
    of_each = traffic.write_bytes_per_s / np.maximum(traffic.read_bytes_per_s, 1.0)
    return of_jobs(np.where(traffic.known, of_each, ratio), storage, ratio)


def restarts_now(view: View, slots: I32, terms: SaveTerms, then_pu: F64, now_pu: F64, ratio: F64) -> F64:
    """Restart times [m] at the load of storage now, by what jobs report; `then_pu` is the load when they were
    measured.

    What a save writes is read again: alone it takes as long as the save, by `ratio`. Where a job never said
    what a save takes, its restart stays as it is.
    """
    jobs = view.jobs
    stated = (jobs.checkpoint_flush_s[slots] > 0) | (jobs.checkpoint_save_s[slots] > 0)
    transfer_s = alone_s(terms.block_s + terms.flush_s, now_pu) * ratio
    return restart_under_load_s(terms.restart_s, transfer_s, then_pu, now_pu, stated)


def newest_s(view: View, slots: I32, *names: str) -> F64:
    """Return the newest measurement of the first reported of these durations [m]; NaN: none."""
    past = view.jobs.checkpoint_past
    out = np.full(len(slots), np.nan)
    for name in names:
        out = np.where(np.isnan(out), past[slots, DURATIONS.index(name), -1], out)
    return out


def _greatest(view: View, key: str) -> float:
    past = view.series(key)
    if past is None or not np.isfinite(past[1]).any():
        return 0.0
    return float(np.nanmax(np.where(np.isfinite(past[1]), past[1], np.nan)))


def _busy_share(view: View, key: str) -> float | None:
    """Return the share of time that the busiest file system is busy with this; None without a history."""
    past = view.series(key)
    if past is None or not np.isfinite(past[1]).any():
        return None
    rates = np.where(np.isfinite(past[1]), past[1], np.nan)
    rates = rates[:, np.isfinite(rates).any(axis=0)]
    most = np.nanmax(rates, axis=0)
    return float(np.where(most > 0, np.nanmean(rates, axis=0) / np.maximum(most, 1.0), 0.0).max())


def reports_checkpoints(view: View, slots: I32) -> Bool:
    """Return the jobs that ever reported checkpoints [m]; it is unknown if the others save at all."""
    jobs = view.jobs
    reported = jobs.checkpoint_interval_s[slots] + jobs.checkpoint_save_s[slots]
    out: Bool = (reported + jobs.checkpoint_restart_s[slots] > 0) | (jobs.checkpoint_told_ns[slots] > 0)
    return out
