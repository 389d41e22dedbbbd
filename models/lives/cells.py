"""Cells: a life log cut into steps of time, one row per stay and step, as a hazard in discrete time sees it.

A row says which stay, how many days of the step were watched, what failed, and, for stays that stood at the
begin of the step, what a forecast from there is judged by. Faults with a cause in common are set apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.failure import shared_faults
from models.lives.gamma_effects import Factor
from models.lives.life_log import LifeLog
from twin.catalogue import F64, I64, Bool

# Edges of the groups of age, in days in service. source: estimate
AGES_D = (30.0, 90.0, 180.0, 365.0, 545.0, 730.0, 910.0, 1095.0, 1460.0, 1825.0)
YEAR_D = 365.25
MOST_BATCH_VALUES = 32  # of a level that batches are distinguished by. source: estimate
MOST_PAIR_LEVELS = 400  # combinations of two levels of position that are a factor. source: estimate


@dataclass(frozen=True)
class StepCells:
    """Rows of one step from `begin_d`: stay, age group, watched days, faults by class [k, n_class].

    `stood`: rows in service at the begin; of those: `y` failed within the step, of whatever cause, and
    `seen_d`: the days until then, or until the row could not be seen to fail any more.
    """

    begin_d: float
    stay: I64
    age: I64
    days: F64
    count: F64
    stood: Bool
    y: Bool
    seen_d: F64


@dataclass(frozen=True)
class LifeCells:
    """All steps of a log: `shared`: mask of its faults that had a cause in common [m]."""

    log: LifeLog
    step_d: float
    steps: tuple[StepCells, ...]
    shared: Bool

    def shared_rate(self, day: float) -> float:
        """Faults with a cause in common per device and day, up to a day."""
        n_d = sum(float(step.days.sum()) for step in self.steps if step.begin_d + self.step_d <= day + 1e-9)
        known = self.shared & (self.log.day <= day) & self.log.episode
        return float(known.sum()) / max(n_d, 1.0)


def shared_episodes(log: LifeLog) -> Bool:
    """Mask of the faults that have a cause in common with others [m]."""
    out = np.zeros(len(log.day), np.bool_)
    out[np.flatnonzero(log.episode)] = shared_faults(log.as_faults())
    return out


def cut_cells(log: LifeLog, step_d: float, shared: Bool | None = None) -> LifeCells:
    """Cut a log into whole steps from its begin; a last step that is not whole is left out."""
    n_step = int((log.until_d - log.begin_d) / step_d + 1e-9)
    if shared is None:
        shared = shared_episodes(log)
    edges = log.begin_d + step_d * np.arange(n_step + 1)
    begin = np.clip(log.from_d, log.begin_d, None)
    end = np.minimum(log.to_d, log.until_d)
    first = np.clip(np.searchsorted(edges, begin, side="right") - 1, 0, n_step)
    last = np.clip(np.searchsorted(edges, end, side="left"), first, n_step)  # the step after the last one
    many = last - first
    stay = np.repeat(np.arange(log.k), many)
    step = np.arange(len(stay)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many)
    order = np.argsort(step, kind="stable")
    stay, step = stay[order], step[order]
    bounds = np.searchsorted(step, np.arange(n_step + 1))
    asset = log.asset
    steps = []
    fault_step = np.searchsorted(edges, log.day, side="right") - 1
    for i in range(n_step):
        here = stay[bounds[i] : bounds[i + 1]]
        low, high = edges[i], edges[i + 1]
        days = log.watched_d(np.maximum(begin[here], low), np.minimum(end[here], high))
        at = np.flatnonzero((fault_step == i) & log.episode)
        # A fault on the very edge belongs to the step in which its stay is; others have no row.
        row_of = np.searchsorted(here, log.stay[at])
        inside = (
            (row_of < len(here)) & (here[np.minimum(row_of, max(len(here) - 1, 0))] == log.stay[at])
            if len(here)
            else np.zeros(len(at), np.bool_)
        )
        at, row_of = at[inside], row_of[inside]
        own = ~shared[at]
        count = np.zeros((len(here), max(len(log.classes), 1)))
        np.add.at(count, (row_of[own], log.kind[at[own]]), 1.0)
        stood = begin[here] <= low
        first_fault = np.full(len(here), np.inf)
        np.minimum.at(first_fault, row_of, log.day[at])
        seen = log.watched_d(np.full(len(here), low), np.minimum(np.minimum(end[here], first_fault), high))
        age = np.searchsorted(AGES_D, low - log.first_d[asset[here]], side="right")
        steps.append(StepCells(float(low), here, age, days, count, stood, np.isfinite(first_fault), seen))
    return LifeCells(log, step_d, tuple(steps), shared)


def position_factors(log: LifeLog) -> tuple[Factor, ...]:
    """Each level of position, and each pair of levels with few enough combinations, by place."""
    out = []
    level = [
        np.unique(log.places[:, j], return_inverse=True)[1].astype(np.int64) for j in range(len(log.levels))
    ]
    size = [int(part.max(initial=0)) + 1 for part in level]
    for i, name in enumerate(log.levels):
        if 1 < size[i] <= MOST_PAIR_LEVELS:
            out.append(Factor(name, level[i], size[i]))
        for j in range(i):
            if min(size[i], size[j]) > 1 and size[i] * size[j] <= MOST_PAIR_LEVELS:
                both = level[j] * size[i] + level[i]
                out.append(Factor(f"{log.levels[j]}x{name}", both, size[i] * size[j]))
    return tuple(out)


def position_groups(log: LifeLog) -> dict[str, tuple[I64, int]]:
    """Groups of neighbours by stay: all that share the outermost levels, down to the very position."""
    out = {}
    before = 1
    for j in range(1, len(log.levels) + 1):
        _, found = np.unique(log.places[:, :j], axis=0, return_inverse=True)
        found = found.reshape(-1).astype(np.int64)
        size = int(found.max(initial=0)) + 1
        if size > before:
            name = "position" if j == len(log.levels) else "same " + log.levels[j - 1]
            out[name] = (found[log.place], size)
            before = size
    return out


def cohorts(log: LifeLog) -> tuple[I64, int]:
    """The year of its first service of each stay's asset [k], counted from the log's begin; their number."""
    years = max(int((log.until_d - log.begin_d) / YEAR_D) + 1, 1)
    found = np.clip((log.first_d - log.begin_d) / YEAR_D, 0, years - 1).astype(np.int64)
    return found[log.asset], years


def batch_groups(log: LifeLog) -> dict[str, tuple[I64, int]]:
    """Groups by stay of devices installed in one year at one value of a level of position.

    A batch need not fail where the one before it failed.
    """
    year, years = cohorts(log)
    out = {}
    for j, name in enumerate(log.levels):
        value, found = np.unique(log.places[:, j], return_inverse=True)
        if 1 < len(value) <= MOST_BATCH_VALUES:
            size = len(value)
            out[f"installed at {name}"] = (
                found.reshape(-1).astype(np.int64)[log.place] * years + year,
                size * years,
            )
    return out
