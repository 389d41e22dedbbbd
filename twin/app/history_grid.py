"""From series to an answer: steps of time, and plain numbers, rounded, None where there was no reading.

Pure; may import NumPy and the catalogue.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from twin.app.history_chunks import NO_COUNT, SLOT_S, Coarse, missing
from twin.catalogue import Signal
from twin.frame import NS

MAX_POINTS = 50_000
GAP_PERIODS = 2.5  # samples further apart than this many of their usual distance have a gap between them
_NICE_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


def chosen_step_ns(
    since_ns: int, until_ns: int, step_s: float | None, max_points: int, every_s: float
) -> int | None:
    """The step of an answer; None for readings as sampled, or if `step_s` gives more than `max_points`."""
    span_s = (until_ns - since_ns) / NS
    if step_s is not None:
        return max(1, round(step_s * NS)) if span_s / step_s <= max_points else None
    if span_s / every_s <= max_points:
        return None
    least_s = max(span_s / max_points, every_s)
    for nice_s in _NICE_S:
        if nice_s >= least_s:
            return nice_s * NS
    return math.ceil(least_s / 86_400) * 86_400 * NS


def answer(
    signal: Signal,
    names: list[str],
    full: list[str],
    found: tuple[Coarse, int],
    step_ns: int | None,
    since_ns: int,
    until_ns: int,
    every_s: float,
) -> dict[str, Any]:
    """What the caller gets: see `HistoryService.query`."""
    slots, means = found
    if step_ns is None:
        slots = _with_gaps(slots, means, every_s)
    else:
        slots = _stepped(slots, step_ns, since_ns, until_ns)
    counter = signal.kind == "counter"
    out: dict[str, Any] = {
        "signal": signal.key,
        "unit": signal.unit,
        "states": list(signal.states),
        "step_s": None if step_ns is None else step_ns / NS,
        "t_ns": slots.t_ns.tolist(),
        "names": dict(zip(names, full, strict=True)),
        "values": _plain(signal, names, slots.mean, 1),
    }
    if not counter and (means or step_ns is not None):
        out["min"], out["max"] = (_plain(signal, names, part, 0) for part in (slots.low, slots.high))
    return out


def _with_gaps(slots: Coarse, means: int, every_s: float) -> Coarse:
    """An instant without readings in each long silence, so that no line is drawn across it."""
    steps = np.diff(slots.t_ns)
    exact = steps[means:]
    usual = np.full(len(steps), max(every_s * NS, float(np.median(exact)) if len(exact) else 0.0))
    usual[:means] = max(every_s, SLOT_S) * NS
    after = np.flatnonzero(steps > GAP_PERIODS * usual) + 1
    if len(after) == 0:
        return slots
    t_ns = np.insert(slots.t_ns, after, slots.t_ns[after - 1] + np.rint(usual[after - 1]).astype(np.int64))
    gap = np.nan if slots.mean.dtype.kind == "f" else NO_COUNT
    return Coarse(t_ns, *(np.insert(part, after, gap, axis=0) for part in slots[1:]))


def _stepped(slots: Coarse, step_ns: int, since_ns: int, until_ns: int) -> Coarse:
    """One slot per step, empty ones too; each begins at a whole multiple of the step."""
    first = since_ns // step_ns
    count = (until_ns - 1) // step_ns - first + 1
    t_ns = (np.arange(count, dtype=np.int64) + first) * step_ns
    found = folded(slots, step_ns)
    inside = (found.t_ns >= first * step_ns) & (found.t_ns < (first + count) * step_ns)
    at = found.t_ns[inside] // step_ns - first
    parts = []
    for part in found[1:]:
        whole = np.full((count, part.shape[1]), np.nan if part.dtype.kind == "f" else NO_COUNT, part.dtype)
        whole[at] = part[inside]
        parts.append(whole)
    return Coarse(t_ns, *parts)


def folded(slots: Coarse, step_ns: int) -> Coarse:
    """Slots, ascending in time, joined into longer ones; only those that had any."""
    at = slots.t_ns // step_ns
    begin = np.flatnonzero(np.diff(at, prepend=at[:1] - 1))
    if len(begin) == 0:
        return slots
    t_ns = at[begin] * step_ns
    # Segments of `begin` are never empty, so reduceat gives each its own.
    if slots.mean.dtype.kind != "f":
        last = np.maximum.reduceat(slots.high, begin, axis=0)
        return Coarse(t_ns, last, last, last)
    gaps = missing(slots.mean)
    sums = np.add.reduceat(np.where(gaps, 0.0, slots.mean.astype(np.float64)), begin, axis=0)
    known = np.add.reduceat(~gaps, begin, axis=0, dtype=np.int64)
    mean = (sums / np.where(known == 0, np.nan, known)).astype(np.float32)
    low = np.fmin.reduceat(slots.low, begin, axis=0)
    return Coarse(t_ns, mean, low, np.fmax.reduceat(slots.high, begin, axis=0))


def _plain(signal: Signal, names: list[str], values: Any, more_digits: int) -> dict[str, list[Any]]:
    gaps = missing(values)
    if signal.kind != "counter":
        digits = more_digits + max(0, math.ceil(-math.log10(signal.quantum))) if signal.quantum > 0 else 6
        values = np.round(values.astype(np.float64), digits)
    plain = values.astype(object)
    plain[gaps] = None
    return {name: plain[:, k].tolist() for k, name in enumerate(names)}
