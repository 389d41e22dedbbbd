"""Synthetic logs of faults for tests, seeded."""

from __future__ import annotations

import numpy as np

from models.failure import FaultLog

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


COUNTS = ("poisson", "clustered", "drifting", "seasonal", "shocks", "step")


def daily_counts(kind: str, seed: int, days: int = 300, mean: float = 1.7) -> np.ndarray:
    """Faults per day of a fleet whose law an outlook of its numbers does not know [n_day]."""
    rng = np.random.default_rng([seed, COUNTS.index(kind)])
    t = np.arange(days)
    if kind == "clustered":  # each fault has half another one on average, six days later on average
        out = rng.poisson(mean * 0.5, days)
        for day in range(days):
            for at in day + rng.geometric(1 / 6, rng.poisson(0.5 * out[day])):
                if at < days:
                    out[at] += 1
        return out.astype(np.float64)
    if kind == "shocks":
        struck = (rng.random(days) < 1 / 40) * rng.geometric(1 / 12, days)
        return (rng.poisson(0.8 * mean, days) + struck).astype(np.float64)
    rate = np.full(days, mean)
    if kind == "drifting":
        rate = mean * np.exp(np.cumsum(rng.normal(0.0, 0.03, days)))
    elif kind == "seasonal":
        rate = mean * (1.0 + 0.5 * np.sin(2 * np.pi * t / 7) + 0.4 * np.sin(2 * np.pi * t / 91 + seed))
    elif kind == "step":
        rate = np.where(t < rng.uniform(0.3, 0.8) * days, mean, mean * rng.choice([0.4, 2.2]))
    return rng.poisson(rate).astype(np.float64)


def struck(log: FaultLog, at: list[float], nodes: int, seed: int = 0, within_d: float = 0.003) -> FaultLog:
    """The same log with so many other nodes that fail within minutes of each of these days."""
    rng = np.random.default_rng(seed)
    rows = list(
        zip(log.node.tolist(), log.start_d.tolist(), log.end_d.tolist(), log.kind.tolist(), strict=True)
    )
    for day in at:
        down = ~log.up(np.array([day]))[0] | ~log.up(np.array([day + within_d]))[0]
        free = np.setdiff1d(np.flatnonzero(~down), log.node[np.abs(log.start_d - day) < 1.0])
        for node in rng.choice(free, nodes, replace=False):
            start = day + within_d * rng.random()
            rows.append((int(node), start, start + 0.5, 0))
    return log_of(sorted(rows, key=lambda row: row[1]), log.n, log.until_d)
