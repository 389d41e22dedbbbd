"""Synthetic logs of faults for tests, seeded."""

from __future__ import annotations

import numpy as np

from models.faultlog import FaultLog

CLASSES = ("GPU", "NIC", "DISK")


def fleet(
    seed: int = 0, *, n: int = 60, days: float = 120.0, rate: float = 0.01, excite: float = 0.0,
    half_life_d: float = 8.0, lemons: int = 0,
) -> FaultLog:  # fmt: skip
    """Nodes with a rate per day; each fault adds `excite` for a while; `lemons` nodes have ten times it."""
    rng = np.random.default_rng(seed)
    base = np.full(n, rate)
    base[:lemons] *= 10.0
    step_d, rows = 0.1, []
    down, extra = np.zeros(n), np.zeros(n)
    for day in np.arange(0.0, days - step_d, step_d):
        extra *= 0.5 ** (step_d / half_life_d)
        failed = (rng.random(n) < (base + extra) * step_d) & (down <= day)
        for node in np.flatnonzero(failed):
            start = day + step_d * rng.random()
            down[node] = start + rng.exponential(1.0)
            extra[node] += excite
            rows.append((start, node, down[node], rng.integers(len(CLASSES))))
    return log_of([(int(node), start, end, int(kind)) for start, node, end, kind in sorted(rows)], n, days)


def log_of(faults: list[tuple[int, float, float, int]], n: int, days: float) -> FaultLog:
    """From (node, start, end, class); ends after the last day are not known."""
    node, start, end, kind = (
        (np.array(part) for part in zip(*faults, strict=True)) if faults else [np.zeros(0)] * 4
    )
    return FaultLog(
        n, node.astype(np.int32), start.astype(np.float64), np.where(end <= days, end, np.inf),
        kind.astype(np.int32), CLASSES, 0.0, days,
    )  # fmt: skip
