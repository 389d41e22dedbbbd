"""Storage traffic: load of file systems by their own counters, from all readers and writers.

A file system is as fast as the greatest rates that it ever showed, the greatest of them aside, which may be a
slip of a counter. Its load is what it moves beside that. Jobs report only of their own saves; counters count
all. Where nobody reports, or not for long enough, nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from policies.checkpointing.contention import MOST_LOAD_PU
from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import Memory, View
from twin.telemetry import GOOD, ColumnSpec

WINDOW_S = 3600.0  # of which loads are means: transfers come in bursts. source: tuned on simulated ones
OBSERVED_S = 3600.0  # before that the greatest rate may be far from what there is. source: estimate
HALF_LIFE_S = 30 * 86_400.0  # of what was seen: a file system may get slower. source: estimate
CHECK_S = 5.0
WAYS = ("flush", "restore")
SAVES = ("took_s", "expected_s", "count")
COLUMNS: dict[str, str | ColumnSpec] = {
    "traffic_ns": "i8",
    "traffic_heard_s": "f8",
    **{f"traffic_{way}_{figure}": "f8" for way in WAYS for figure in ("mean", "first", "second")},
    **{f"traffic_saves_{figure}": "f8" for figure in SAVES},
}
"""Memory by file system: when and for how long it was observed, its mean and its two greatest rates; of its
latest saves, how long they took, how long they were expected to take, and their number."""
JOB_COLUMNS: dict[str, str | ColumnSpec] = {
    "save_ns": "i8",
    **{f"{what}_{field}": "f8" for what in ("alone", "start") for field in ("s", "weight")},
    "start_most_s": "f8",
}
"""Memory by job: what a save takes alone, what of a restart is no read, how much these means weigh, and the
most that a restart can be without its read; 0: unknown."""
START_RISE = 0.2  # of the way to a slower restart, by which that most rises. source: estimate
MOST_WEIGHT = 100.0  # of what was learned: that of thirty saves beside nobody. source: estimate
LEAST_SPREAD_PU = 0.3  # of a time, relative and squared, beside no load. source: estimate
# Saves show how long the queue at a file system really is, of which its load gives only the mean. Stretches
# fade by this time; this many saves as expected are put to them. source: tuned on simulated transfers
STRETCH_S, USUAL_SAVES = 1800.0, 3.0
MOST_STRETCH = 2.0  # of all; five times as much of one save, which may be false. source: estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTraffic:
    """Of each file system [n]: its load by all, where it is `known`, and how fast it writes and reads."""

    known: Bool
    busy_pu: F64
    write_bytes_per_s: F64
    read_bytes_per_s: F64


def follow_traffic(view: View, kept: Memory) -> StorageTraffic:
    """Take the present traffic of the file systems; returns the known state."""
    n = view.site.sizes["storage"]
    rates = {way: good_readings(view, f"storage.{way}_bytes_per_s") for way in WAYS}
    reported = np.isfinite(rates["flush"]) | np.isfinite(rates["restore"])
    since_s = np.where(kept["traffic_ns"] > 0, (view.now_ns - kept["traffic_ns"]) / NS, np.inf)
    if n and since_s.max() >= CHECK_S:
        _learn(view, kept, rates, reported, since_s)
    write = kept["traffic_flush_second"].copy()
    # Few read without haste: a slow trickle is no measure. source: estimate, no slower than it writes
    read = np.maximum(kept["traffic_restore_second"], write)
    busy = kept["traffic_flush_mean"] / np.maximum(write, 1.0)
    busy += kept["traffic_restore_mean"] / np.maximum(read, 1.0)
    return StorageTraffic(
        known=reported & (kept["traffic_heard_s"] >= OBSERVED_S) & (write > 0.0),
        busy_pu=np.minimum(busy, 1.0),
        write_bytes_per_s=write,
        read_bytes_per_s=read,
    )


def _learn(view: View, kept: Memory, rates: dict[str, F64], reported: Bool, since_s: F64) -> None:
    kept["traffic_ns"][:] = view.now_ns
    step_s = np.where(np.isfinite(since_s), since_s, 0.0)
    fade = 0.5 ** (step_s / HALF_LIFE_S)
    for way in WAYS:
        first, second = kept[f"traffic_{way}_first"], kept[f"traffic_{way}_second"]
        first *= fade
        second *= fade
        # Each reading counts once, however often it is looked at
        new = np.isfinite(rates[way]) & (view.age_s(f"storage.{way}_bytes_per_s") < since_s)
        rate = np.where(new, rates[way], 0.0)
        second[:] = np.maximum(second, np.minimum(first, rate))
        first[:] = np.maximum(first, rate)
    # At first the plain mean. After a silence what was before counts for less
    spoken_s = np.where(reported, np.minimum(step_s, WINDOW_S), 0.0)
    total_s = kept["traffic_heard_s"] + spoken_s
    weight = np.maximum(-np.expm1(-step_s / WINDOW_S), spoken_s / np.maximum(total_s, 1.0))
    for way in WAYS:
        mean = kept[f"traffic_{way}_mean"]
        rate = np.minimum(np.nan_to_num(rates[way]), kept[f"traffic_{way}_second"])
        mean[:] = np.where(reported, mean + weight * (rate - mean), mean)
    kept["traffic_heard_s"][:] = total_s
    for figure in SAVES:
        kept[f"traffic_saves_{figure}"] *= np.exp(-step_s / STRETCH_S)


def learn_stretch(kept: Memory, storage: I64, took_s: F64, expected_s: F64) -> None:
    """Take in that saves [k] at these file systems took `took_s`, where load let expect `expected_s`."""
    took_s = np.minimum(took_s, 5.0 * MOST_STRETCH * expected_s)
    for figure, value in zip(SAVES, (took_s, expected_s, np.ones(len(took_s))), strict=True):
        np.add.at(kept[f"traffic_saves_{figure}"], storage, value)


def stretch_pu(kept: Memory) -> F64:
    """Ratio of the time that transfers take now to that by the load, by file system [n]."""
    took, expected, count = (kept[f"traffic_saves_{figure}"] for figure in SAVES)
    mean = np.divide(took, expected, out=np.ones(len(took)), where=expected > 0.0)
    return np.clip((count * mean + USUAL_SAVES) / (count + USUAL_SAVES), 1.0 / MOST_STRETCH, MOST_STRETCH)


def good_readings(view: View, key: str) -> F64:
    """Present readings; NaN where there is none that is good."""
    return np.where(view.quality(key) == GOOD, view.value(key), np.nan).astype(np.float64)


def others_load_pu(busy_pu: ArrayLike, duty_pu: ArrayLike) -> F64:
    """Load by all others, of a load by all. `duty_pu`: share of its time that a job's own transfers take.

    They take longer by what others do: of a duty d at a load b, d (1 - b) / (1 - d) is the job's own work.
    """
    busy, duty = np.asarray(busy_pu, np.float64), np.clip(np.asarray(duty_pu, np.float64), 0.0, 0.99)
    own = duty * np.maximum(1.0 - busy, 0.0) / (1.0 - duty)
    out: F64 = np.clip(busy - own, 0.0, MOST_LOAD_PU)
    return out


def apart_pu(busy_pu: ArrayLike) -> F64:
    """The part of the other saves' load that a save does not meet, as saves are kept apart.

    It meets what is left of them where the file system was busy ever since. source: simulated transfers, 16
    saves an hour at loads of 0.3 to 0.8.
    """
    out: F64 = 1.0 - np.square(np.asarray(busy_pu, np.float64))
    return out


def lately_pu(transfer_s: ArrayLike, ago_s: ArrayLike) -> F64:
    """The part of a load that is one transfer, which ended `ago_s` ago and takes `transfer_s` alone."""
    work, ago = np.asarray(transfer_s, np.float64), np.maximum(np.asarray(ago_s, np.float64), 0.0)
    out: F64 = -np.expm1(-np.maximum(work, 0.0) / WINDOW_S) * np.exp(-ago / WINDOW_S)
    return out


def of_jobs(column: F64 | Bool, storage: I64, unknown: float) -> np.ndarray:
    """A column of file systems by job [m]; `unknown` where a job's storage is."""
    if not len(column):
        return np.full(len(storage), unknown)
    return np.where(storage >= 0, column[np.maximum(storage, 0)], unknown)


def learn_time(kept: Memory, what: str, slots: I32, found_s: F64, load_pu: F64) -> None:
    """Take one more time [k], `alone` or `start`, into its mean; the less load there was, the more it says.

    The square of the relative spread of a time beside others grows as their load.
    """
    mean, total = kept[f"{what}_s"], kept[f"{what}_weight"]
    weight = 1.0 / (LEAST_SPREAD_PU + load_pu)
    before = np.minimum(total[slots], MOST_WEIGHT)
    mean[slots] += (found_s - mean[slots]) * weight / (before + weight)
    total[slots] = before + weight


def bound_start(kept: Memory, slots: I32, most_s: F64) -> None:
    """Take in restarts [k] that took `most_s` longer than their reads take alone: no read is faster."""
    bound = kept["start_most_s"]
    slower_s = bound[slots] + START_RISE * (most_s - bound[slots])
    bound[slots] = np.where(bound[slots] > 0.0, np.minimum(most_s, slower_s), most_s)


def start_s(kept: Memory, slots: I32) -> F64:
    """The part of a restart that is no read [m], within its bound."""
    most_s = kept["start_most_s"][slots]
    return np.where(most_s > 0.0, np.minimum(kept["start_s"][slots], most_s), kept["start_s"][slots])
